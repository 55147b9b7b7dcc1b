//! `ringfetch dataset verify`: fetches a dataset, or a sample of it, and compares every byte with the
//! pattern. Requests are pipelined but responses checked in order, so that the first wrong byte is reported. What is
//! compared is one version: of the dataset, or of each object.

use crate::args::{Global, Verify};
use crate::daemon::{PatientClient, grpc_failure, has_too_many_items, is_final, is_too_large};
use crate::expected::{Mismatch, check_elements, check_stream};
use crate::outcome::Failure;
use crate::quantity::{grouped, size};
use crate::{progress, sink};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use ringfetch_client::{ByteRange, Code, Dataset, Error, ItemError, Kind, ObjectInfo, ObjectPart, Request};
use ringfetch_pattern::{object_length, object_name, object_seed};
use serde_json::json;
use std::collections::{BTreeSet, HashMap};
use std::io::Write as _;

/// Bytes of all requests in flight: enough to keep a disk busy. Half of it and so on, as long as one response may not
/// hold that much: that limit may be all the memory that this caller may have.
const IN_FLIGHT_BYTES: u64 = 1 << 20;
/// No limit of a response is smaller.
const IN_FLIGHT_BYTES_MIN: u64 = 4 << 10;
const REQUESTS_IN_FLIGHT: usize = 8;
/// Items of a request. Half of it and so on, as long as one request may not have that many.
const REQUEST_ITEMS: usize = 256;

pub(crate) async fn run(global: &Global, args: &Verify) -> Result<(), Failure> {
    let client = PatientClient::new(global)?;
    let failed = grpc_failure(global);
    let (name, seed) = (&args.dataset, args.seed);
    let call = client.call(|client| client.get_dataset(name));
    let dataset = call.await.map_err(failed)?;
    let outcome = if dataset.kind == Kind::Objects {
        let listing = crate::daemon::client(global)?.list_objects(name);
        objects(&client, listing, name, args).await
    } else {
        records(&client, &dataset, args).await
    };
    let checked = match outcome {
        Ok(checked) => checked,
        Err(VerifyError::Call(error)) => return Err(failed(error)),
        Err(VerifyError::Replaced(what)) => {
            let found = format!("{name}: {what} was replaced while it was verified; try again");
            return Err(Failure::Failed(found));
        }
        Err(VerifyError::Found { problem, code }) => {
            if global.json {
                let value =
                    json!({ "dataset": name, "seed": seed, "ok": false, "problem": problem, "code": code });
                sink::print(true, &value, |_| Ok(()))?;
            }
            return Err(Failure::Failed(format!("{name}: {problem}")));
        }
    };
    let kind = dataset.kind.as_str();
    let value = json!({
        "dataset": name, "kind": kind, "seed": seed, "ok": true,
        "items_checked": checked.items, "items": checked.of, "bytes_checked": checked.bytes,
        "count_checked": args.count.is_some(),
    });
    sink::print(global.json, &value, |out| {
        let (items, of, bytes) = (grouped(checked.items), grouped(checked.of), size(checked.bytes));
        let unchecked = if dataset.kind == Kind::Objects && args.count.is_none() {
            "; missing objects and lengths are not checked (--count)"
        } else {
            ""
        };
        writeln!(
            out,
            "{name}: {items} of {of} {kind} ({bytes}) hold the pattern of seed {seed}{unchecked}"
        )
    })
}

/// What was checked and correct.
struct Checked {
    items: u64,
    of: u64,
    bytes: u64,
}

/// Why the check ended early.
enum VerifyError {
    Call(Error),
    /// The dataset, or this object, has another version now.
    Replaced(String),
    /// A wrong byte; or an item that could not be read, and its code.
    Found {
        problem: String,
        code: Option<&'static str>,
    },
}

impl From<Error> for VerifyError {
    fn from(error: Error) -> Self {
        Self::Call(error)
    }
}

/// A difference from the pattern.
fn found(problem: String) -> VerifyError {
    let code = None;
    VerifyError::Found { problem, code }
}

/// Why a request for one version of the dataset failed.
fn of_version(error: Error) -> VerifyError {
    match error.code() {
        Some(Code::FailedPrecondition) => VerifyError::Replaced("it".to_owned()),
        Some(_) | None => VerifyError::Call(error),
    }
}

/// Which items to check: how many, and their numbers in ascending order.
fn selection(args: &Verify, count: u64) -> (u64, Box<dyn Iterator<Item = u64>>) {
    if args.all || args.sample >= count {
        return (count, Box::new(0..count));
    }
    // Drawn with the seed, so that a failure can be reproduced. Repeats are dropped and drawn again.
    let mut random = fastrand::Rng::with_seed(args.seed);
    let mut chosen = BTreeSet::new();
    while (chosen.len() as u64) < args.sample {
        chosen.insert(random.u64(0..count));
    }
    (args.sample, Box::new(chosen.into_iter()))
}

/// The most that a request may have.
#[derive(Debug, Clone, Copy)]
struct RequestMax {
    bytes: u64,
    items: usize,
}

/// The most of each request: what is not refused as too large for one, of bytes shared by those in flight. `longest`: the longest
/// requests of at most so much.
async fn request_max(
    client: &PatientClient,
    longest: impl Fn(RequestMax) -> Vec<Request>,
) -> Result<RequestMax, Error> {
    let (bytes, items) = (IN_FLIGHT_BYTES, REQUEST_ITEMS);
    let mut max = RequestMax { bytes, items };
    'again: loop {
        for request in longest(max) {
            let Err(error) = client.fetch_whole(&request).await else {
                continue;
            };
            if max.items > 1 && has_too_many_items(&error) {
                max.items /= 2;
                continue 'again;
            }
            if max.bytes > IN_FLIGHT_BYTES_MIN && is_too_large(&error) {
                max.bytes /= 2;
                continue 'again;
            }
            // What else is refused is reported with its number, by the request for it.
            if !is_final(&error) {
                return Err(error);
            }
        }
        max.bytes /= REQUESTS_IN_FLIGHT as u64;
        return Ok(max);
    }
}

/// Blocks or vectors: items of one length.
async fn records(client: &PatientClient, dataset: &Dataset, args: &Verify) -> Result<Checked, VerifyError> {
    let (name, etag) = (args.dataset.as_str(), dataset.etag.as_str());
    let shape = match &dataset.vectors {
        Some(shape) => {
            let unknown = || found("its dtype is unknown here".to_owned());
            Some((shape.dtype.ok_or_else(unknown)?, shape.dim))
        }
        None => None,
    };
    let (what, item_bytes) = match shape {
        Some((dtype, dim)) => ("vector", u64::from(dim) * u64::from(dtype.size_bytes())),
        None => ("block", u64::from(dataset.block_bytes)),
    };
    let item_bytes = item_bytes.max(1);
    // Only the first bytes: the items that begin in them, and of the last one only the requested part.
    let bytes_end = args.length.unwrap_or(u64::MAX);
    let count = dataset.count.min(bytes_end.div_ceil(item_bytes));
    if let Some(expected) = args.count.filter(|&expected| expected != dataset.count) {
        let (expected, has) = (grouped(expected), grouped(dataset.count));
        return Err(found(format!(
            "it has {has} {what}s, expected {expected} (--count)"
        )));
    }
    if count == 0 {
        return Err(found(format!("it has no {what}s")));
    }
    let (items, chosen) = selection(args, count);
    let most = dataset.length_bytes.min(items.saturating_mul(item_bytes));
    let longest = |max: RequestMax| {
        // As many ranges as items, which together are as long.
        let bytes = most.min(max.bytes);
        let count = bytes.min(max.items as u64);
        let edge = |n| bytes * n / count;
        let range = |n| ByteRange::new(edge(n), edge(n + 1) - edge(n));
        let ranges: Vec<_> = (0..count).map(range).collect();
        (count > 0)
            .then(|| Request::ranges(name, ranges).if_match(etag))
            .into_iter()
            .collect()
    };
    let max = request_max(client, longest).await.map_err(of_version)?;
    let per_request = usize::try_from(max.bytes / item_bytes).unwrap_or(max.items);
    let bar = progress::items(items, "items");
    let mut answers = stream::iter(chosen)
        .chunks(per_request.clamp(1, max.items))
        .map(|numbers| async move {
            let wanted = match shape {
                Some(_) => Request::vectors(name, &*numbers),
                None => Request::blocks(name, &*numbers),
            };
            let answer = client.fetch(wanted.if_match(etag)).await?;
            Ok::<_, Error>((numbers, answer))
        })
        .buffered(REQUESTS_IN_FLIGHT);
    let mut checked = Checked {
        items: 0,
        of: dataset.count,
        bytes: 0,
    };
    let mut scratch = Vec::new();
    while let Some((numbers, answer)) = answers.try_next().await.map_err(of_version)? {
        for (number, item) in numbers.iter().copied().zip(answer.items().iter()) {
            let bytes = item.map_err(|error| unreadable(&format!("{what} {number}"), &error))?;
            let begin = number * item_bytes;
            let due = usize::try_from(bytes_end - begin).unwrap_or(usize::MAX);
            let bytes = &bytes[..due.min(bytes.len())];
            let wrong = match shape {
                Some((dtype, dim)) => {
                    check_elements(args.seed, dtype, number * u64::from(dim), bytes, &mut scratch)
                }
                None => check_stream(args.seed, begin, bytes),
            };
            if let Some(wrong) = wrong {
                let at = wrong.at;
                let place = match shape {
                    Some(_) => format!("vector {number}, byte {at} of its elements"),
                    None => format!("offset {} (block {number}, byte {at})", begin + at as u64),
                };
                return Err(first_wrong(&place, &wrong, args.seed));
            }
            checked.items += 1;
            checked.bytes += bytes.len() as u64;
        }
        bar.set_position(checked.items);
    }
    Ok(checked)
}

/// Objects: several whole ones per request, long ones in parts.
async fn objects(
    client: &PatientClient,
    listing: impl Stream<Item = Result<ObjectInfo, Error>>,
    name: &str,
    args: &Verify,
) -> Result<Checked, VerifyError> {
    let listed: Vec<ObjectInfo> = listing.try_collect().await?;
    let count = u64::try_from(listed.len()).unwrap_or(u64::MAX);
    if let Some(problem) = args.count.and_then(|expected| differs(&listed, expected, args)) {
        return Err(found(problem));
    }
    if listed.is_empty() {
        return Err(found("it has no objects".to_owned()));
    }
    let (items, chosen) = selection(args, count);
    let chosen: Vec<&ObjectInfo> = chosen
        .filter_map(|n| listed.get(usize::try_from(n).ok()?))
        .collect();
    let length_max = args.length.unwrap_or(u64::MAX);
    let requests = |max| requests(&chosen, length_max, max);
    let longest = |max| {
        let by_items = requests(max).max_by_key(|parts| (parts.len(), bytes_of(parts)));
        let by_bytes = requests(max).max_by_key(|parts| (bytes_of(parts), parts.len()));
        let mut longest: Vec<_> = by_items.into_iter().chain(by_bytes).collect();
        longest.dedup();
        let request = |parts| Request::objects(name, parts);
        longest.into_iter().map(request).collect()
    };
    let requests = requests(request_max(client, longest).await?);
    let lengths = chosen.iter().map(|object| object.length_bytes.min(length_max));
    let bar = progress::bytes(lengths.sum());
    let mut answers = stream::iter(requests)
        .map(|parts| async move {
            let answer = client.fetch(Request::objects(name, &*parts)).await?;
            Ok::<_, Error>((parts, answer))
        })
        .buffered(REQUESTS_IN_FLIGHT);
    let mut checked = Checked {
        items,
        of: count,
        bytes: 0,
    };
    // Of the object whose parts come now.
    let mut version = String::new();
    while let Some((parts, answer)) = answers.try_next().await? {
        let items = answer.items();
        for ((part, etag), item) in parts.iter().zip(items.etags()).zip(items.iter()) {
            if part.offset == 0 {
                version.clone_from(etag);
            }
            // Empty: it could not be opened.
            if *etag != version && !etag.is_empty() {
                return Err(VerifyError::Replaced(format!("object {}", part.name)));
            }
            let bytes = item.map_err(|error| unreadable(&format!("object {}", part.name), &error))?;
            // An empty object is requested to its end, and must be empty.
            if part.length.is_none() && !bytes.is_empty() {
                return Err(found(format!(
                    "object {}: listed as empty, and has {} bytes",
                    part.name,
                    bytes.len()
                )));
            }
            if let Some(wrong) = check_stream(object_seed(args.seed, &part.name), part.offset, &bytes) {
                let place = format!("object {}, offset {}", part.name, part.offset + wrong.at as u64);
                return Err(first_wrong(&place, &wrong, args.seed));
            }
            checked.bytes += bytes.len() as u64;
        }
        bar.set_position(checked.bytes);
    }
    Ok(checked)
}

/// How the names and lengths of a listing differ from those of `make objects`.
fn differs(listed: &[ObjectInfo], count: u64, args: &Verify) -> Option<String> {
    let mut lengths: HashMap<&str, u64> = listed
        .iter()
        .map(|object| (object.name.as_str(), object.length_bytes))
        .collect();
    for index in 0..count {
        let name = object_name(index);
        let expected = object_length(args.seed, index, args.length_min, args.length_max);
        match lengths.remove(name.as_str()) {
            None => return Some(format!("object {name} is missing")),
            Some(length) if length != expected => {
                return Some(format!("object {name} has {length} bytes, expected {expected}"));
            }
            Some(_) => {}
        }
    }
    let more = lengths.keys().min()?;
    Some(format!("object {more} is not one of the {count} (--count)"))
}

/// The parts of objects for each request, in order; at most `length_max` bytes of each object.
fn requests(
    objects: &[&ObjectInfo],
    length_max: u64,
    max: RequestMax,
) -> impl Iterator<Item = Vec<ObjectPart>> {
    let parts = objects.iter().flat_map(move |object| {
        let end = object.length_bytes.min(length_max);
        let empty = (object.length_bytes == 0).then(|| ObjectPart::whole(&object.name));
        let count = end.div_ceil(max.bytes);
        let parts = (0..count).map(move |n| {
            let offset = n * max.bytes;
            ObjectPart::new(&object.name, offset, (end - offset).min(max.bytes))
        });
        empty.into_iter().chain(parts)
    });
    let mut parts = parts.peekable();
    std::iter::from_fn(move || {
        let mut request = vec![parts.next()?];
        let mut left = max.bytes - bytes_of(&request);
        while request.len() < max.items
            && let Some(part) = parts.next_if(|part| part.length.unwrap_or(0) <= left)
        {
            left -= part.length.unwrap_or(0);
            request.push(part);
        }
        Some(request)
    })
}

fn bytes_of(parts: &[ObjectPart]) -> u64 {
    parts.iter().filter_map(|part| part.length).sum()
}

fn first_wrong(place: &str, wrong: &Mismatch, seed: u64) -> VerifyError {
    found(format!("{place}: {wrong} (seed {seed})"))
}

fn unreadable(item: &str, error: &ItemError) -> VerifyError {
    VerifyError::Found {
        problem: format!("{item}: {}: {}", error.label(), error.message),
        code: Some(error.label()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_distinct_ascending_and_in_range() {
        let (dataset, seed, length) = ("d".to_owned(), 1, None);
        let mut args = Verify {
            dataset,
            seed,
            sample: 50,
            all: false,
            length,
            count: None,
            length_min: 10,
            length_max: 3000,
        };
        let (items, chosen) = selection(&args, 60);
        let chosen: Vec<u64> = chosen.collect();
        assert_eq!((items, chosen.len()), (50, 50));
        assert!(
            chosen.is_sorted_by(|one, next| one < next) && chosen[49] < 60,
            "{chosen:?}"
        );
        args.all = true;
        assert!(selection(&args, 60).1.eq(0..60));
        (args.all, args.sample) = (false, 100);
        assert_eq!(selection(&args, 60).0, 60);
    }

    #[test]
    fn every_byte_of_every_object_is_asked_for_once() {
        let lengths = [0, 1, 300_000, 900_000, 3_670_016, 5];
        let objects: Vec<_> = (0..)
            .zip(lengths)
            .map(|(n, length_bytes): (u32, u64)| ObjectInfo::new(format!("o{n}"), length_bytes))
            .collect();
        let objects: Vec<_> = objects.iter().collect();
        let (bytes, items) = (IN_FLIGHT_BYTES, 2);
        let requests: Vec<_> = requests(&objects, u64::MAX, RequestMax { bytes, items }).collect();
        let fits = |parts: &Vec<_>| bytes_of(parts) <= bytes && parts.len() <= items;
        assert!(requests.iter().all(fits));
        let parts: Vec<_> = requests.concat();
        assert_eq!(parts[0], ObjectPart::whole("o0"));
        for (object, length) in objects.iter().zip(lengths).skip(1) {
            let mut end = 0;
            for part in parts.iter().filter(|part| part.name == object.name) {
                assert_eq!(part.offset, end);
                end += part.length.unwrap();
            }
            assert_eq!(end, length);
        }
    }
}
