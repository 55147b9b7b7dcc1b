//! The engine's `mmap` with its default settings: batches are announced (MADV_WILLNEED), two threads copy.

use super::{DEPTH_MAX, Run, Strategy};
use crate::drive::engine::Choice;
use ringfetch_engine::config::BackendKind;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "mmap",
    about: "the engine's mmap, announced: batches of up to 16 reads, two threads; latency is that of a batch",
    depth_max: DEPTH_MAX,
    run: Run::Engine(|_| Choice {
        batch: 16,
        ..Choice::of(BackendKind::Mmap)
    }),
};
