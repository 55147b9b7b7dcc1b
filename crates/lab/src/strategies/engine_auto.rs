//! The engine's `auto`: copies what is in the page cache, and reads the rest through the ring.

use super::{DEPTH_MAX, Run, Strategy};
use crate::drive::engine::Choice;
use ringfetch_engine::config::BackendKind;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "auto",
    about: "the engine's auto: copies what the page cache has, reads the rest through the ring",
    depth_max: DEPTH_MAX,
    run: Run::Engine(|_| Choice::of(BackendKind::Auto)),
};
