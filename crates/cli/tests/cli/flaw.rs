//! What is wrong with a fake daemon.

use crate::server::OBJECTS;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// What differs from the pattern.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flaw {
    /// This byte of the dataset `blocks` is flipped.
    pub(crate) flipped_byte: Option<u64>,
    /// Every read is refused.
    pub(crate) overloaded: bool,
    /// With this hint.
    pub(crate) overloaded_for: Option<Duration>,
    /// Every other read is refused for a rate, the first one, too, with this hint; how many there were.
    pub(crate) refused_for: Option<(Duration, &'static AtomicUsize)>,
    /// The last item of every read cannot be read for now.
    pub(crate) unreadable: bool,
    /// The first two reads have an item that cannot be read for now; how many there were.
    pub(crate) unreadable_at_first: Option<&'static AtomicUsize>,
    /// An object that is read from its beginning stops in the middle.
    pub(crate) stalled: bool,
    /// Of data, in one response.
    pub(crate) response_bytes_max: usize,
    /// Of one request.
    pub(crate) items_max: usize,
    pub(crate) objects: u64,
    /// How many streams their client has ended, rather than left.
    pub(crate) streams_ended: Option<&'static AtomicUsize>,
    /// Each dataset is replaced once it has been described, and each object once its first byte has been read.
    pub(crate) replaced: bool,
}

impl Flaw {
    pub(crate) const NONE: Self = Self {
        flipped_byte: None,
        overloaded: false,
        overloaded_for: None,
        refused_for: None,
        unreadable: false,
        unreadable_at_first: None,
        stalled: false,
        response_bytes_max: 3 << 20,
        items_max: usize::MAX,
        objects: OBJECTS,
        streams_ended: None,
        replaced: false,
    };
    pub(crate) const OVERLOADED: Self = Self {
        overloaded: true,
        ..Self::NONE
    };

    pub(crate) fn flipped(byte: u64) -> Self {
        Self {
            flipped_byte: Some(byte),
            ..Self::NONE
        }
    }

    /// Blocks are wrong then, too. Objects come in several parts.
    pub(crate) const REPLACED: Self = Self {
        flipped_byte: Some(0),
        response_bytes_max: 4 << 10,
        replaced: true,
        ..Self::NONE
    };

    pub(crate) fn limited(response_bytes_max: usize) -> Self {
        Self {
            response_bytes_max,
            ..Self::NONE
        }
    }

    /// Of a response that holds little, so that there are many.
    pub(crate) fn refused_for(hint: Duration) -> Self {
        Self {
            refused_for: Some((hint, Box::leak(Box::default()))),
            ..Self::limited(4 << 10)
        }
    }

    pub(crate) fn overloaded_for(hint: Duration) -> Self {
        Self {
            overloaded_for: Some(hint),
            ..Self::OVERLOADED
        }
    }

    pub(crate) const UNREADABLE: Self = Self {
        unreadable: true,
        ..Self::NONE
    };

    pub(crate) const STALLED: Self = Self {
        stalled: true,
        ..Self::NONE
    };

    /// With so many reads before, of which the first two are those that fail.
    pub(crate) fn unreadable_at_first(reads: usize) -> Self {
        Self {
            unreadable_at_first: Some(Box::leak(Box::new(AtomicUsize::new(reads)))),
            ..Self::NONE
        }
    }

    /// None, but it counts the streams that end.
    pub(crate) fn counting_streams(ended: &'static AtomicUsize) -> Self {
        Self {
            streams_ended: Some(ended),
            ..Self::NONE
        }
    }

    /// How many reads there were of one that counts them.
    pub(crate) fn reads(self) -> usize {
        let reads = self.refused_for.map(|(_, reads)| reads);
        let reads = reads.or(self.unreadable_at_first);
        reads.map_or(0, |reads| reads.load(Ordering::Relaxed))
    }

    pub(crate) fn of_few_items(items_max: usize) -> Self {
        Self {
            items_max,
            ..Self::NONE
        }
    }

    pub(crate) const WITHOUT_OBJECTS: Self = Self {
        objects: 0,
        ..Self::NONE
    };
}
