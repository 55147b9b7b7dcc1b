//! Bytes that are sent together but are not contiguous in memory.

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use smallvec::SmallVec;
use std::io::IoSlice;

/// The payload of one frame: usually the head of a message and its data, which need not be copied together.
#[derive(Debug, Default)]
pub struct FrameParts {
    /// Parts before `next` are sent and freed; those from `next` on are not empty.
    parts: SmallVec<[Bytes; 2]>,
    next: usize,
    remaining: usize,
}

impl FrameParts {
    /// Appends bytes.
    pub fn push(&mut self, part: Bytes) {
        if !part.is_empty() {
            self.remaining = self.remaining.saturating_add(part.len());
            self.parts.push(part);
        }
    }

    /// How many parts there are.
    pub fn count(&self) -> usize {
        self.parts.len().saturating_sub(self.next)
    }
}

impl From<Bytes> for FrameParts {
    fn from(bytes: Bytes) -> Self {
        let mut parts = Self::default();
        parts.push(bytes);
        parts
    }
}

impl Buf for FrameParts {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        self.parts.get(self.next).map_or(&[], |part| part)
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let parts = self.parts.get(self.next..).unwrap_or_default();
        for (slice, part) in slices.iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        slices.len().min(parts.len())
    }

    fn advance(&mut self, count: usize) {
        assert!(count <= self.remaining, "advances beyond the end");
        self.remaining -= count;
        let mut left = count;
        while left > 0
            && let Some(part) = self.parts.get_mut(self.next)
        {
            let taken = left.min(part.len());
            part.advance(taken);
            left -= taken;
            if part.is_empty() {
                // Frees the memory as soon as it is sent.
                *part = Bytes::new();
                self.next += 1;
            }
        }
    }

    fn copy_to_bytes(&mut self, count: usize) -> Bytes {
        if let Some(part) = self.parts.get(self.next)
            && count <= part.len()
        {
            let bytes = part.slice(..count);
            self.advance(count);
            return bytes;
        }
        let mut bytes = BytesMut::with_capacity(count);
        bytes.put(self.take(count));
        bytes.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;

    #[test]
    fn the_memory_of_a_part_is_free_once_it_is_sent() {
        // Scenario: two parts are sent one after the other. Expectation: the first is freed while the second is not.
        let parts: [Arc<[u8]>; 2] = [[1; 4].into(), [2; 4].into()];
        let mut data = FrameParts::default();
        parts
            .iter()
            .for_each(|part| data.push(Bytes::from_owner(Arc::clone(part))));
        let held = || parts.each_ref().map(|part| Arc::strong_count(part) - 1);
        data.advance(3);
        assert_eq!(held(), [1, 1]);
        data.advance(1);
        assert_eq!(held(), [0, 1]);
        data.advance(4);
        assert_eq!(held(), [0, 0]);
    }

    proptest! {
        #[test]
        fn parts_are_read_as_if_they_were_adjacent(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..6),
            steps in prop::collection::vec((0usize..30, any::<bool>()), 0..12),
        ) {
            // Any parts, advanced over or taken in any steps: what is left is the rest of all parts, as
            // consecutive chunks and as slices.
            let mut model: Vec<u8> = parts.concat();
            let mut data = FrameParts::default();
            parts.into_iter().for_each(|part| data.push(Bytes::from(part)));
            for (step, copies) in steps {
                let step = step.min(model.len());
                let rest = model.split_off(step);
                if copies {
                    prop_assert_eq!(&data.copy_to_bytes(step)[..], &model[..]);
                } else {
                    data.advance(step);
                }
                model = rest;
                prop_assert_eq!(data.remaining(), model.len());
                prop_assert_eq!(data.has_remaining(), !data.chunk().is_empty());
                let mut slices = [IoSlice::new(&[]); 8];
                let count = data.chunks_vectored(&mut slices);
                prop_assert_eq!(count, data.count());
                let sliced: Vec<u8> = slices[..count].iter().flat_map(|slice| slice.iter().copied()).collect();
                prop_assert_eq!(&sliced, &model);
            }
        }
    }
}
