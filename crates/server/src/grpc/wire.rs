//! Scans an encoded request for the number of items it lists, so that too many are refused before they are decoded into
//! memory; and a refused one for its dataset. No scan visits more fields than a sensible message has: a field may have two bytes,
//! and protobuf keeps the last value of one that is set a million times.

use crate::fetch::FetchError;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use std::cell::Cell;

/// A field that lists items.
#[derive(Debug, Clone, Copy)]
pub(super) struct RepeatedField {
    tag: u32,
    varints: bool,
}

impl RepeatedField {
    /// A list of numbers, which may be packed: many in one field.
    pub(super) const fn varints(tag: u32) -> Self {
        Self { tag, varints: true }
    }

    /// A list of strings, each in a field of its own.
    pub(super) const fn strings(tag: u32) -> Self {
        Self { tag, varints: false }
    }
}

/// How many fields of a message may be visited, with those of messages in it.
#[derive(Debug)]
pub(super) struct Fields {
    most: usize,
    left: Cell<usize>,
}

impl Fields {
    fn at_most(most: usize) -> Self {
        let left = Cell::new(most);
        Self { most, left }
    }

    /// Of a message without lists, and of one that is only looked through for its dataset: 64. The largest of the former has six.
    pub(super) fn few() -> Self {
        Self::at_most(64)
    }

    /// Of a request that may have this many items: an entry in each of four lists for each of them. 65,536 in any case: vectors that
    /// are scored are lists of numbers, too.
    pub(super) fn of_items(items_max: u32) -> Self {
        let items_max = usize::try_from(items_max).unwrap_or(usize::MAX);
        Self::at_most(items_max.saturating_mul(4).max(1 << 16))
    }

    fn take_one(&self) -> Result<(), TooManyFields> {
        let left = self.left.get().checked_sub(1);
        self.left.set(left.ok_or(TooManyFields(self.most))?);
        Ok(())
    }
}

/// A message has more fields than are visited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManyFields(usize);

impl std::fmt::Display for TooManyFields {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(most) = self;
        write!(
            f,
            "more than {most} fields: split the batch, pack lists of numbers, and set other fields once"
        )
    }
}

impl From<TooManyFields> for FetchError {
    fn from(too_many: TooManyFields) -> Self {
        Self::Malformed {
            field: "message".to_owned(),
            problem: too_many.to_string(),
        }
    }
}

/// Checks a message without lists, and decodes nothing.
///
/// # Errors
/// It has more than [`Fields::few`].
pub(super) fn check_fields(message: &[u8]) -> Result<(), TooManyFields> {
    visit(message, &Fields::few(), |_, _| ()).map(drop)
}

/// Number of entries in the longest of `lists` in an encoded message. Counts nothing after invalid bytes,
/// which the decoder refuses.
///
/// # Errors
/// The message has more than `fields`.
pub(super) fn longest_list(
    message: &[u8],
    lists: &[RepeatedField],
    fields: &Fields,
) -> Result<usize, TooManyFields> {
    let mut counts = vec![0_usize; lists.len()];
    visit(message, fields, |tag, field| {
        for (count, list) in counts.iter_mut().zip(lists) {
            if list.tag == tag {
                *count += match field {
                    // The last byte of a varint is the one without the continuation bit.
                    FieldValue::Bytes(packed) if list.varints => {
                        packed.iter().filter(|byte| **byte < 0x80).count()
                    }
                    FieldValue::Bytes(_) | FieldValue::Number(_) => 1,
                };
            }
        }
    })?;
    Ok(counts.into_iter().max().unwrap_or(0))
}

/// The field of each request that names its dataset.
const DATASET_TAG: u32 = 1;

/// The dataset that an encoded request names, as far as it can be read; for records of requests that are not decoded.
pub(super) fn dataset_in(message: &[u8]) -> Option<&str> {
    let mut dataset = None;
    let _seen = visit(message, &Fields::few(), |tag, field| {
        if let (DATASET_TAG, FieldValue::Bytes(name)) = (tag, field) {
            dataset = std::str::from_utf8(name).ok();
        }
    });
    dataset
}

#[derive(Debug, Clone, Copy)]
pub(super) enum FieldValue<'a> {
    /// A varint.
    Number(u64),
    /// Anything with a length.
    Bytes(&'a [u8]),
}

impl FieldValue<'_> {
    /// Where the bytes of a field begin and end in the message that it is from.
    pub(super) fn range_in(self, message: &[u8]) -> Option<(usize, usize)> {
        let Self::Bytes(bytes) = self else { return None };
        let start = bytes.as_ptr().addr().checked_sub(message.as_ptr().addr())?;
        Some((start, start + bytes.len()))
    }
}

/// Calls `each` for every field of a message that is a varint or has a length. Returns whether it has no others, and no
/// invalid bytes, after which there are no calls.
///
/// # Errors
/// It has more than `fields`; there was no call for the others.
pub(super) fn visit<'a>(
    mut message: &'a [u8],
    fields: &Fields,
    mut each: impl FnMut(u32, FieldValue<'a>),
) -> Result<bool, TooManyFields> {
    let mut are_all = true;
    // How many groups the next field is in. Their fields are counted, and not passed on: no message has any that is known.
    let mut groups = 0_usize;
    while !message.is_empty() {
        fields.take_one()?;
        let Ok((tag, wire_type)) = decode_key(&mut message) else {
            return Ok(false);
        };
        match wire_type {
            WireType::Varint => match decode_varint(&mut message) {
                Ok(number) if groups == 0 => each(tag, FieldValue::Number(number)),
                Ok(_) => {}
                Err(_) => return Ok(false),
            },
            WireType::LengthDelimited => {
                let length = decode_varint(&mut message)
                    .ok()
                    .and_then(|length| usize::try_from(length).ok());
                let Some((field, rest)) = length.and_then(|length| message.split_at_checked(length)) else {
                    return Ok(false);
                };
                if groups == 0 {
                    each(tag, FieldValue::Bytes(field));
                }
                message = rest;
            }
            WireType::StartGroup => {
                groups += 1;
                are_all = false;
            }
            WireType::EndGroup => match groups.checked_sub(1) {
                Some(outer) => groups = outer,
                None => return Ok(false),
            },
            WireType::ThirtyTwoBit | WireType::SixtyFourBit => {
                if skip_field(wire_type, tag, &mut message, DecodeContext::default()).is_err() {
                    return Ok(false);
                }
                are_all = false;
            }
        }
    }
    Ok(are_all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message as _;
    use ringfetch_proto::v1;

    const OBJECTS: &[RepeatedField] = &[
        RepeatedField::strings(2),
        RepeatedField::varints(3),
        RepeatedField::varints(4),
    ];

    proptest! {
        #[test]
        fn lists_are_counted_as_they_will_be_decoded(
            names in prop::collection::vec(".{0,5}", 0..40),
            offsets in prop::collection::vec(any::<u64>(), 0..40),
            lengths in prop::collection::vec(any::<u64>(), 0..40),
        ) {
            // Any request: as many entries as its longest list has, also when it is sent twice (protobuf
            // appends).
            let longest = names.len().max(offsets.len()).max(lengths.len());
            let request = v1::FetchObjectsRequest { dataset: "d".into(), names, offsets, lengths, fail_fast: true, if_match: Vec::new() };
            let once = request.encode_to_vec();
            prop_assert_eq!(longest_list(&once, OBJECTS, &Fields::at_most(1000)), Ok(longest));
            prop_assert_eq!(longest_list(&[once.clone(), once].concat(), OBJECTS, &Fields::at_most(1000)), Ok(2 * longest));
        }

        #[test]
        fn any_bytes_are_counted_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            // Garbage: no panic, and if it decodes, the count is right.
            let counted = longest_list(&bytes, OBJECTS, &Fields::at_most(1000)).expect("few fields");
            if let Ok(request) = v1::FetchObjectsRequest::decode(&bytes[..]) {
                let longest = request.names.len().max(request.offsets.len()).max(request.lengths.len());
                prop_assert!(counted >= longest, "{counted} {longest}");
            }
        }
    }

    #[test]
    fn numbers_that_are_not_packed_count_too() {
        // Three fields of tag 3 with one varint each, as old encoders write them.
        let message = [0x18, 1, 0x18, 0x80, 1, 0x18, 3];
        assert_eq!(longest_list(&message, OBJECTS, &Fields::at_most(3)), Ok(3));
        assert_eq!(
            longest_list(&message, OBJECTS, &Fields::at_most(2)),
            Err(TooManyFields(2))
        );
    }
}
