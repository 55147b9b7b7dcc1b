//! The engine's `uring`: one ring on one core.

use super::{DEPTH_MAX, Run, Strategy};
use crate::drive::engine::Choice;
use ringfetch_engine::config::BackendKind;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "uring",
    about: "the engine's uring: one ring, each read submitted alone",
    depth_max: DEPTH_MAX,
    run: Run::Engine(|_| Choice::of(BackendKind::Uring)),
};
