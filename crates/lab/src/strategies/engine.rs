//! The engine's backends. The engine has no limit of its own on reads in flight: memory limits it.

use super::{Run, Strategy};
use crate::drive::engine::Choice;
use crate::setup::Setup;
use ringfetch_engine::config::BackendKind;

const fn strategy(name: &'static str, about: &'static str, choice: fn(&Setup) -> Choice) -> Strategy {
    Strategy {
        name,
        about,
        depth_max: 1 << 20,
        run: Run::Engine(choice),
    }
}

pub(super) static URING: Strategy = strategy(
    "uring",
    "the engine's uring: one ring, each read submitted alone",
    |_| Choice::of(BackendKind::Uring),
);

/// As one call with many items uses it.
pub(super) static URING_BATCH: Strategy = strategy(
    "uring-batch",
    "the engine's uring: one ring, batches of up to 16 reads, four at least; latency is that of a batch",
    |setup| Choice {
        batch: (setup.depth / 4).clamp(1, 16),
        ..Choice::of(BackendKind::Uring)
    },
);

pub(super) static AUTO: Strategy = strategy(
    "auto",
    "the engine's auto: copies what the page cache has, reads the rest through the ring",
    |_| Choice::of(BackendKind::Auto),
);

/// With its default settings: batches are announced (MADV_WILLNEED).
pub(super) static MMAP: Strategy = strategy(
    "mmap",
    "the engine's mmap, announced: batches of up to 16 reads, two threads; latency is that of a batch",
    |_| Choice {
        batch: 16,
        ..Choice::of(BackendKind::Mmap)
    },
);

/// Each thread waits for its own page fault.
pub(super) static MMAP_PLAIN: Strategy = strategy(
    "mmap-plain",
    "the engine's mmap, not announced: as many threads as the depth (at most 256), a page fault a read",
    |setup| Choice {
        mmap_threads: u32::try_from(setup.depth).unwrap_or(u32::MAX),
        announce: false,
        ..Choice::of(BackendKind::Mmap)
    },
);

pub(super) static PREAD: Strategy = strategy(
    "engine-pread",
    "the engine's pread: a pool of as many threads as the depth",
    |_| Choice::of(BackendKind::Pread),
);
