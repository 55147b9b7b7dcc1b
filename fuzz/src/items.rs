//! A batch by its contract (docs/API.md), for both transports.

use crate::{ITEMS_MAX, RESPONSE_BYTES};

/// A well-formed request for items.
#[derive(Debug)]
pub struct Batch<'a> {
    /// The bytes of each item; `None`: it fails.
    pub items: Vec<Option<&'a [u8]>>,
    /// Bytes that are requested, or more.
    pub bytes: u64,
    pub fail_fast: bool,
}

impl Batch<'_> {
    /// Whether a refusal would be a mistake.
    pub fn must_succeed(&self) -> bool {
        let is_within = self.bytes <= RESPONSE_BYTES && self.items.len() <= ITEMS_MAX as usize;
        is_within && !self.items.is_empty() && (!self.fail_fast || self.failed().next().is_none())
    }

    /// Checks an answer: the items that did not fail, back to back, and the positions of the others.
    pub fn check(&self, data: &[u8], failed: impl Iterator<Item = u32> + Clone) {
        let count = self.items.len();
        assert!(
            (1..=ITEMS_MAX as usize).contains(&count),
            "{count} items were accepted"
        );
        assert!(
            self.failed().eq(failed.clone()),
            "failed: {:?}, {self:?}",
            failed.collect::<Vec<_>>()
        );
        assert!(
            !self.fail_fast || self.failed().next().is_none(),
            "an error was listed in spite of fail_fast"
        );
        assert_eq!(
            data,
            self.items.iter().copied().flatten().collect::<Vec<_>>().concat()
        );
    }

    fn failed(&self) -> impl Iterator<Item = u32> {
        (0..)
            .zip(&self.items)
            .filter_map(|(item, bytes)| bytes.is_none().then_some(item))
    }
}
