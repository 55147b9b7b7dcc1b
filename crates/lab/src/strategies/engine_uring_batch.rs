//! The engine's `uring` as one call with many items uses it: batches, at least four of them in flight.

use super::{DEPTH_MAX, Run, Strategy};
use crate::drive::engine::Choice;
use ringfetch_engine::config::BackendKind;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "uring-batch",
    about: "the engine's uring: one ring, batches of up to 16 reads, four at least; latency is that of a batch",
    depth_max: DEPTH_MAX,
    run: Run::Engine(|setup| Choice {
        batch: (setup.depth / 4).clamp(1, 16),
        ..Choice::of(BackendKind::Uring)
    }),
};
