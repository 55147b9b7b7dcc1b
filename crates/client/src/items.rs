//! A batch's answer: its bytes and the place of each item in them. Invariant, checked once when the answer
//! arrives: every item lies inside the bytes, the items fill them, and the listed errors are exactly those of
//! items without bytes. `vectors` interprets the items of vectors.

use crate::code::Code;
use crate::error::Error;
use crate::message::Data;
use bytes::Bytes;
use ringfetch_proto::v1 as wire;
use std::ops::{Deref, Range};

/// One item that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("item {item}: {code}: {message}")]
#[non_exhaustive]
pub struct ItemError {
    /// Its position in the request, from 0.
    pub item: usize,
    /// Why, as a gRPC code.
    pub code: Code,
    /// What is wrong and how to fix it.
    pub message: String,
}

impl ItemError {
    /// The code as gRPC spells it, for counting errors.
    pub fn label(&self) -> &'static str {
        self.code.as_str()
    }
}

/// Lengths that a request's items may have in the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Expected {
    /// Items that all have the same length, which the answer states.
    Uniform { items: usize },
    /// These lengths; `None` if only the server knows (an object to its end).
    Each(Vec<Option<u64>>),
}

/// The items of one answer, in request order, as slices of what the transport delivered.
#[derive(Debug, Clone)]
pub struct Items(Box<Contents>);

/// Boxed, since an answer is moved many times: copying 170 bytes each time cost a twentieth of a small
/// request.
#[derive(Debug, Clone)]
struct Contents {
    data: Data,
    places: Places,
    /// In item order.
    errors: Vec<ItemError>,
    etag: String,
    etags: Vec<String>,
}

#[derive(Debug, Clone)]
enum Places {
    Uniform {
        item_bytes: usize,
        items: usize,
    },
    /// Where each item ends in the data.
    Ends(Vec<usize>),
}

impl Items {
    /// Checks an answer against its request. `item_bytes`: the length of every good item, if the answer
    /// states it.
    pub(crate) fn check(
        expected: &Expected,
        item_bytes: Option<u64>,
        lengths: &[u32],
        errors: Vec<wire::ItemError>,
        data: Data,
    ) -> Result<Self, Error> {
        let items = match expected {
            Expected::Uniform { items } => *items,
            Expected::Each(each) => each.len(),
        };
        let errors = check_errors(errors, items)?;
        let places = if lengths.is_empty() && items > 0 {
            check_uniform(expected, items, item_bytes, &errors, data.len())?
        } else {
            check_lengths(expected, items, item_bytes, lengths, &errors, data.len())?
        };
        Ok(Self(Box::new(Contents {
            data,
            places,
            errors,
            etag: String::new(),
            etags: Vec::new(),
        })))
    }

    pub(crate) fn of_version(mut self, etag: String) -> Self {
        self.0.etag = etag;
        self
    }

    pub(crate) fn of_versions(mut self, etags: Vec<String>) -> Result<Self, Error> {
        if etags.len() != self.len() {
            let problem = format!("{} versions for {} objects", etags.len(), self.len());
            return Err(Error::protocol(problem));
        }
        self.0.etags = etags;
        Ok(self)
    }

    /// The dataset version of all items; empty for objects, which each have their own.
    pub fn etag(&self) -> &str {
        &self.0.etag
    }

    /// For objects, the version of each item; empty for one that could not be opened.
    pub fn etags(&self) -> &[String] {
        &self.0.etags
    }

    /// Number of items, failed ones included.
    pub fn len(&self) -> usize {
        match &self.0.places {
            Places::Uniform { items, .. } => *items,
            Places::Ends(ends) => ends.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Item `i`: a slice of the buffer that it arrived in. The few items that span two buffers are copied.
    ///
    /// # Errors
    /// Why the item could not be read; OUT_OF_RANGE if the request had no item `i`.
    pub fn get(&self, i: usize) -> Result<Bytes, ItemError> {
        let place = self.place(i)?;
        Ok(self.0.data.slice(place.start, place.end))
    }

    /// All items in request order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Result<Bytes, ItemError>> + '_ {
        (0..self.len()).map(|i| self.get(i))
    }

    /// The good items back to back, in request order, in the pieces in which they arrived.
    pub fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        self.0.data.pieces()
    }

    /// The same as one buffer; a copy if there are several pieces.
    pub fn data(&self) -> Bytes {
        self.0.data.slice(0, self.0.data.len())
    }

    /// Bytes of all items together.
    pub fn data_bytes(&self) -> usize {
        self.0.data.len()
    }

    /// The failed items, in item order. Empty if there are none.
    pub fn errors(&self) -> &[ItemError] {
        &self.0.errors
    }

    fn place(&self, i: usize) -> Result<Range<usize>, ItemError> {
        if i >= self.len() {
            let message = format!("the request had {} items", self.len());
            return Err(ItemError {
                item: i,
                code: Code::OutOfRange,
                message,
            });
        }
        if let Ok(found) = self.0.errors.binary_search_by_key(&i, |error| error.item) {
            return Err(self.0.errors[found].clone());
        }
        Ok(match &self.0.places {
            // Item 3 of 4096 bytes: 12288..16384. `check` ensured that items x item_bytes is the data's
            // length.
            Places::Uniform { item_bytes, .. } => i * item_bytes..(i + 1) * item_bytes,
            Places::Ends(ends) => (if i == 0 { 0 } else { ends[i - 1] })..ends[i],
        })
    }
}

pub(crate) fn check_errors(errors: Vec<wire::ItemError>, items: usize) -> Result<Vec<ItemError>, Error> {
    if errors.is_empty() {
        return Ok(Vec::new());
    }
    let mut checked = Vec::with_capacity(errors.len());
    for error in errors {
        let item = usize::try_from(error.item).unwrap_or(usize::MAX);
        if item >= items {
            return Err(Error::protocol(format!(
                "an error for item {item} of a request of {items}"
            )));
        }
        let Some(code) = Code::from_number(error.code) else {
            return Err(Error::protocol(format!("item {item} failed with code OK")));
        };
        checked.push(ItemError {
            item,
            code,
            message: error.message,
        });
    }
    checked.sort_by_key(|error| error.item);
    if let Some(twice) = checked.windows(2).find(|pair| pair[0].item == pair[1].item) {
        return Err(Error::protocol(format!("two errors for item {}", twice[0].item)));
    }
    Ok(checked)
}

fn check_uniform(
    expected: &Expected,
    items: usize,
    item_bytes: Option<u64>,
    errors: &[ItemError],
    data_bytes: usize,
) -> Result<Places, Error> {
    let (Expected::Uniform { .. }, Some(each)) = (expected, item_bytes) else {
        return Err(Error::protocol(format!("no lengths for {items} items")));
    };
    if !errors.is_empty() {
        return Err(Error::protocol("item errors without a list of lengths"));
    }
    let total = u64::try_from(items)
        .ok()
        .and_then(|items| items.checked_mul(each));
    if each == 0 || total != u64::try_from(data_bytes).ok() {
        return Err(Error::protocol(format!(
            "{data_bytes} bytes for {items} items of {each}"
        )));
    }
    // `each` divides a length that fits usize.
    Ok(Places::Uniform {
        item_bytes: data_bytes / items,
        items,
    })
}

fn check_lengths(
    expected: &Expected,
    items: usize,
    item_bytes: Option<u64>,
    lengths: &[u32],
    errors: &[ItemError],
    data_bytes: usize,
) -> Result<Places, Error> {
    if lengths.len() != items {
        return Err(Error::protocol(format!(
            "{} lengths for {items} items",
            lengths.len()
        )));
    }
    let mut failed = errors.iter().map(|error| error.item).peekable();
    let mut ends = Vec::with_capacity(items);
    let mut end = 0usize;
    for (i, &length) in lengths.iter().enumerate() {
        let due = if failed.next_if_eq(&i).is_some() {
            Some(0)
        } else {
            match expected {
                Expected::Uniform { .. } => item_bytes,
                Expected::Each(each) => each.get(i).copied().flatten(),
            }
        };
        if let Some(due) = due.filter(|&due| due != u64::from(length)) {
            return Err(Error::protocol(format!(
                "item {i} has {length} bytes, {due} were due"
            )));
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        end = end
            .checked_add(length)
            .filter(|&end| end <= data_bytes)
            .ok_or_else(|| {
                Error::protocol(format!(
                    "the lengths go past the answer's {data_bytes} bytes at item {i}"
                ))
            })?;
        ends.push(end);
    }
    if end != data_bytes {
        return Err(Error::protocol(format!(
            "the lengths sum to {end}, the answer has {data_bytes} bytes"
        )));
    }
    Ok(Places::Ends(ends))
}

/// Blocks, in request order. Derefs to [`Items`], which slices them.
#[derive(Debug, Clone)]
pub struct Blocks {
    items: Items,
    block_bytes: u32,
}

impl Blocks {
    pub(crate) fn check(
        expected: &Expected,
        answer: wire::FetchBlocksResponse,
        data: Data,
    ) -> Result<Self, Error> {
        let block_bytes = answer.block_bytes;
        if block_bytes == 0 {
            return Err(Error::protocol("blocks of 0 bytes"));
        }
        let items = Items::check(
            expected,
            Some(block_bytes.into()),
            &answer.lengths,
            answer.errors,
            data,
        )?;
        let items = items.of_version(answer.etag);
        Ok(Self { items, block_bytes })
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }
}

impl Deref for Blocks {
    type Target = Items;

    fn deref(&self) -> &Items {
        &self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(item: u32) -> wire::ItemError {
        wire::ItemError {
            item,
            code: Code::OutOfRange.number(),
            message: "past the end".into(),
        }
    }

    #[test]
    fn items_are_slices_in_request_order() {
        // Scenario: three items of 2, 0 and 3 bytes, the middle one failed; and two of 3 bytes without
        // lengths. Expected: get and iter agree; the failed item returns its error; item 3 is out of range.
        let expected = Expected::Uniform { items: 2 };
        let uniform = Items::check(
            &expected,
            Some(3),
            &[],
            vec![],
            Bytes::from_static(b"abcdef").into(),
        )
        .unwrap();
        assert_eq!(uniform.get(1).unwrap(), "def");
        let expected = Expected::Each(vec![Some(2), Some(9), None]);
        let items = Items::check(
            &expected,
            None,
            &[2, 0, 3],
            vec![failed(1)],
            Bytes::from_static(b"abcde").into(),
        )
        .unwrap();
        assert_eq!(items.len(), 3);
        assert_eq!(items.get(0).unwrap(), "ab");
        assert_eq!(items.get(1).unwrap_err().code, Code::OutOfRange);
        assert_eq!(items.get(2).unwrap(), "cde");
        assert_eq!(items.iter().filter(Result::is_ok).count(), 2);
        assert_eq!(items.get(3).unwrap_err().item, 3);
        assert_eq!(items.errors().len(), 1);
    }

    #[test]
    fn an_answer_is_handed_on_in_a_few_words() {
        // A request's answer is moved a dozen times; values above 128 bytes are moved by a memcpy call each.
        assert!(size_of::<Result<crate::Answer, Error>>() <= 48);
    }

    #[test]
    fn an_answer_that_does_not_add_up_is_refused() {
        // Scenario: answers whose lengths, errors, count or data contradict the request or one another.
        // Expected: a protocol error for each, no panic.
        let uniform = Expected::Uniform { items: 2 };
        let each = Expected::Each(vec![Some(2), None]);
        let code_ok = wire::ItemError { code: 0, ..failed(0) };
        type Case = (
            &'static str,
            Expected,
            Option<u64>,
            Vec<u32>,
            Vec<wire::ItemError>,
            &'static [u8],
        );
        #[rustfmt::skip]
        let cases: Vec<Case> = vec![
            ("short data", uniform.clone(), Some(3), vec![], vec![], b"abcde"),
            ("zero length", uniform.clone(), Some(0), vec![], vec![], b""),
            ("product overflows", uniform.clone(), Some(u64::MAX), vec![], vec![], b"ab"),
            ("errors without lengths", uniform.clone(), Some(3), vec![], vec![failed(0)], b"abcdef"),
            ("missing item not listed", uniform, Some(2), vec![2, 0], vec![], b"ab"),
            ("no lengths", each.clone(), None, vec![], vec![], b"ab"),
            ("too few lengths", each.clone(), None, vec![2], vec![], b"ab"),
            ("too many lengths", each.clone(), None, vec![2, 0, 0], vec![], b"ab"),
            ("not what was asked", each.clone(), None, vec![1, 1], vec![], b"ab"),
            ("sum too large", each.clone(), None, vec![2, u32::MAX], vec![], b"ab"),
            ("sum too small", each.clone(), None, vec![2, 0], vec![], b"abc"),
            ("bytes of a failed item", each.clone(), None, vec![2, 1], vec![failed(1)], b"abc"),
            ("error past the end", each.clone(), None, vec![2, 0], vec![failed(2)], b"ab"),
            ("error listed twice", each.clone(), None, vec![2, 0], vec![failed(1), failed(1)], b"ab"),
            ("failed with OK", each, None, vec![0, 0], vec![code_ok], b""),
        ];
        for (name, expected, item_bytes, lengths, errors, data) in cases {
            let answer = Items::check(
                &expected,
                item_bytes,
                &lengths,
                errors,
                Bytes::from_static(data).into(),
            );
            assert!(
                matches!(answer, Err(Error::Protocol { .. })),
                "{name}: {answer:?}"
            );
        }
    }
}
