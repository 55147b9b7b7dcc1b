//! The engine's `mmap` without announcing: as many threads as the depth, each waits for its own page fault.

use super::{DEPTH_MAX, Run, Strategy};
use crate::drive::engine::Choice;
use ringfetch_engine::config::BackendKind;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "mmap-plain",
    about: "the engine's mmap, not announced: as many threads as the depth (at most 256), a page fault a read",
    depth_max: DEPTH_MAX,
    run: Run::Engine(|setup| Choice {
        mmap_threads: u32::try_from(setup.depth).unwrap_or(u32::MAX),
        announce: false,
        ..Choice::of(BackendKind::Mmap)
    }),
};
