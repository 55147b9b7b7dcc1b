//! The contract suite: one set of cases over every backend, which demands the same bytes and the same error
//! values.
//!
//! A case is a function of a [`harness::Harness`]; a test is a case on one of [`harness::VARIANTS`], so that
//! the failing backend is in the test's name: `module::variant::case`. After each case the harness checks
//! what must always hold: every read counted in the metrics, all memory returned, a clean drain. `faults` and
//! `sharing` contain what only the simulation can show, `devices` real block devices, `filesystems` the cases
//! on file systems other than the build's, `model` random batches.
//!
//! A test names what it needs of the host (`needs`). If it needs a device or a file system, or there is no
//! io_uring or direct I/O for it, it is reported as ignored, with the reason. With `--ignored` or
//! `--include-ignored` it runs, and fails if something is missing.

#![expect(
    clippy::expect_used,
    reason = "a test fails by panicking, outside of its own function too"
)]

mod harness;
mod machine;
mod needs;
mod suite;
#[path = "../wait/mod.rs"]
mod wait;

mod devices;
mod errors;
mod faults;
mod files;
mod filesystems;
mod flow;
mod model;
mod reads;
mod sharing;

use libtest_mimic::Arguments;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let tests = [
        devices::tests(),
        errors::tests(),
        faults::tests(),
        files::tests(),
        filesystems::tests(),
        flow::tests(),
        model::tests(),
        reads::tests(),
        sharing::tests(),
    ];
    let trials = tests.into_iter().flatten();
    let trials = trials.map(|test| test.into_trial(&arguments)).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Functions with their names.
macro_rules! named {
    ($($function:ident),* $(,)?) => {
        &[$((stringify!($function), $function)),*]
    };
}
pub(crate) use named;
