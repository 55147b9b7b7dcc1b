//! A running daemon, over gRPC.

use super::{Run, Strategy};
use crate::drive::daemon;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "daemon",
    about: "a running daemon, over gRPC, as it is configured; half of this machine's cores ask, at most 4",
    depth_max: 4096,
    run: Run::Own(daemon::drive),
};
