//! The engine's `uring`: one ring on one core.

use super::{DEPTH_MAX, Strategy};
use crate::drive::engine::{self, Choice};
use ringfetch_engine::config::BackendKind;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "uring",
    about: "the engine's uring: one ring, each read asked for alone",
    depth_max: DEPTH_MAX,
    run: |job| engine::drive(job, Choice::of(BackendKind::Uring)),
};
