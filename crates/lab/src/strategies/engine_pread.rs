//! The engine's `pread`: a pool of as many threads as the depth.

use super::{DEPTH_MAX, Run, Strategy};
use crate::drive::engine::Choice;
use ringfetch_engine::config::BackendKind;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "engine-pread",
    about: "the engine's pread: a pool of as many threads as the depth",
    depth_max: DEPTH_MAX,
    run: Run::Engine(|_| Choice::of(BackendKind::Pread)),
};
