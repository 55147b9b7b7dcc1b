//! A running daemon, over gRPC.

use super::{Run, Strategy};
use crate::drive::daemon;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "daemon",
    about: "a running daemon, over gRPC, as it is configured; the settings say over how many connections",
    depth_max: 4096,
    run: Run::Own(daemon::drive),
};
