//! Turns a checked request into a batch: what is read for each item, and which items fail before any read.

use super::handle::{Kind, check_version};
use super::request::{Items, too_large};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesOrdered;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::dataset::{Dataset, OpenFile};
use ringfetch_engine::error::{ItemError, ReadError, ResponseMax};
use std::collections::HashMap;
use std::sync::Arc;

/// Objects of one request that are opened concurrently. Opens that miss the cache use threads, of which one request
/// must not take them all.
const OPENS_AT_ONCE: usize = 16;

/// The batch of a checked request. An item that is longer than `max` fails. For objects see `plan_objects`.
pub(super) fn plan(dataset: &Arc<Dataset>, items: &Items<'_>, max: ResponseMax) -> Batch {
    let mut batch = Batch::new(Arc::clone(dataset), items.len());
    match items {
        Items::Blocks(items) | Items::Vectors(items) => {
            let (length, count) = match dataset.kind() {
                Kind::Blocks { block_bytes, count } => (u64::from(block_bytes), count),
                Kind::Vectors {
                    vector_bytes, count, ..
                } => (u64::from(vector_bytes), count),
                Kind::Objects => (0, 0),
            };
            let blocks = matches!(dataset.kind(), Kind::Blocks { .. });
            for item in *items {
                // Out of range comes before too large.
                if length > max.bytes && *item < count {
                    batch.push_failed(ReadError::ItemTooLarge { length, max });
                } else if blocks {
                    batch.push_block(*item);
                } else {
                    batch.push_vector(*item);
                }
            }
        }
        Items::Ranges { offsets, lengths } => {
            let end = dataset.length_bytes();
            for (offset, length) in offsets.iter().zip(*lengths) {
                match too_large(*offset, *length, end, max) {
                    Some(error) => batch.push_failed(error),
                    None => batch.push_range(*offset, *length),
                }
            }
        }
        Items::Pinned {
            object,
            offsets,
            lengths,
        } => {
            for (offset, length) in offsets.iter().zip(*lengths) {
                push_object(&mut batch, object.file(), *offset, Some(*length), max);
            }
        }
        Items::Objects { .. } => {}
    }
    batch
}

/// The batch of a checked request for objects, and their versions. Opens the objects; reads nothing.
pub(super) async fn plan_objects(
    dataset: &Arc<Dataset>,
    items: &Items<'_>,
    max: ResponseMax,
) -> (Batch, Vec<String>) {
    let mut batch = Batch::new(Arc::clone(dataset), items.len());
    let mut etags = Vec::new();
    let Items::Objects {
        names,
        offsets,
        lengths,
        if_match,
    } = items
    else {
        return (batch, etags);
    };
    let (distinct, places) = distinct(names);
    // A plain loop instead of `buffered`, whose closure over a borrowed name keeps the future from being
    // `Send` for every lifetime, which transports need.
    let mut waiting = distinct.iter();
    let mut opening = FuturesOrdered::new();
    let mut opened = Vec::with_capacity(distinct.len());
    etags.reserve_exact(names.len());
    for (item, place) in places.into_iter().enumerate() {
        while opened.len() <= place {
            while opening.len() < OPENS_AT_ONCE
                && let Some(name) = waiting.next()
            {
                opening.push_back(dataset.object(name));
            }
            let Some(object) = opening.next().await else { break };
            opened.push(object);
        }
        let offset = offsets.get(item).copied().unwrap_or(0);
        let length = lengths.get(item).copied().filter(|length| *length > 0);
        let if_match = if_match.get(item).map_or("", String::as_str);
        let Some(object) = opened.get(place) else { break };
        etags.push(
            object
                .as_ref()
                .map_or_else(|_| String::new(), |object| object.etag().to_owned()),
        );
        match object {
            Ok(object) => match check_version(object.etag(), if_match) {
                Ok(()) => push_object(&mut batch, object, offset, length, max),
                Err(error) => batch.push_failed(error),
            },
            Err(error) => batch.push_failed(error.clone()),
        }
    }
    (batch, etags)
}

/// Makes the next request open an object again if its file was truncated or replaced.
pub(super) fn forget_lost(dataset: &Dataset, names: &[String], errors: &[ItemError]) {
    for failed in errors {
        match names.get(failed.item as usize) {
            Some(name) if failed.error.is_of_lost_file() => dataset.forget_object(name),
            Some(_) | None => {}
        }
    }
}

/// Each name once, in order of first occurrence, and for each item the index of its name in that list: a
/// batch reads one version of an object, however often it is named.
fn distinct(names: &[String]) -> (Vec<&str>, Vec<usize>) {
    let mut found = HashMap::with_capacity(names.len());
    let (mut distinct, mut places) = (Vec::with_capacity(names.len()), Vec::with_capacity(names.len()));
    for name in names {
        let place = *found.entry(name.as_str()).or_insert(distinct.len());
        if place == distinct.len() {
            distinct.push(name.as_str());
        }
        places.push(place);
    }
    (distinct, places)
}

/// The error of a read from an offset past the end to the end. Its message does not repeat the length, which nobody sent.
pub(crate) fn past_the_end(offset: u64, end: u64) -> ReadError {
    ReadError::RangeOutOfRange {
        offset,
        length: 1,
        end,
    }
}

fn push_object(
    batch: &mut Batch,
    object: &Arc<OpenFile>,
    offset: u64,
    length: Option<u64>,
    max: ResponseMax,
) {
    let end = object.length_bytes();
    if length.is_none() && offset > end {
        return batch.push_failed(past_the_end(offset, end));
    }
    let wanted = length.unwrap_or_else(|| end.saturating_sub(offset));
    match too_large(offset, wanted, end, max) {
        Some(error) => batch.push_failed(error),
        None => batch.push_object(object, offset, length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::tests::objects_of;
    use ringfetch_engine::config::DirectIo;
    use ringfetch_engine::dataset::{DatasetSpec, Dtype, KindSpec};

    #[test]
    fn an_index_past_the_end_is_out_of_range_however_long_its_item_would_be() {
        // Two blocks and two vectors of 512 bytes, responses of at most 511: the last one is too long, the next is
        // out of range.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        std::fs::write(&path, [7; 1024]).unwrap();
        let max = ResponseMax::of_any(511);
        for (kind, items, what) in [
            (KindSpec::blocks(512), Items::Blocks(&[1, 2]), "block"),
            (
                KindSpec::raw_vectors(512, Dtype::U8, 0),
                Items::Vectors(&[1, 2]),
                "vector",
            ),
        ] {
            let spec = DatasetSpec::new("d", &path, kind, DirectIo::Off);
            let batch = plan(&Arc::new(Dataset::open(&spec).unwrap()), &items, max);
            let errors: Vec<&ReadError> = batch.errors().iter().map(|failed| &failed.error).collect();
            let past_the_end = ReadError::IndexOutOfRange {
                what,
                index: 2,
                count: 2,
            };
            assert_eq!(
                errors,
                [&ReadError::ItemTooLarge { length: 512, max }, &past_the_end]
            );
        }
    }

    #[tokio::test]
    async fn an_offset_past_the_end_is_out_of_range_whatever_it_is() {
        // An object of three bytes, read to its end from there, from the byte after it, and from the largest offset: nothing,
        // and the same error, which repeats no length.
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), "abc").unwrap();
        let dataset = objects_of(directory.path());
        let names = ["a", "a", "a"].map(str::to_owned);
        let items = Items::Objects {
            names: &names,
            offsets: &[3, 4, u64::MAX],
            lengths: &[],
            if_match: &[],
        };
        let (batch, _) = plan_objects(&dataset, &items, ResponseMax::of_any(9)).await;
        let errors: Vec<_> = batch.errors().iter().map(|failed| &failed.error).collect();
        assert_eq!(errors, [&past_the_end(4, 3), &past_the_end(u64::MAX, 3)]);
        let message = errors[1].to_string();
        assert!(
            message.starts_with("offset 18446744073709551615 is past the end"),
            "{message}"
        );
    }
}
