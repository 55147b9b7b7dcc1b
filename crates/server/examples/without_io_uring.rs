//! Runs a command where the kernel refuses io_uring, as the profiles of container runtimes do: with EPERM (Docker) or
//! ENOSYS (Podman).
//!
//! `target/debug/examples/without_io_uring EPERM cargo test --workspace`

#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    reason = "it shares a module with the tests, which fail by panicking"
)]

#[path = "../tests/e2e/seccomp.rs"]
mod seccomp;

use seccomp::{ENOSYS, EPERM, without_io_uring};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let errno = match words.next().and_then(|word| word.into_string().ok()).as_deref() {
        Some("EPERM") => EPERM,
        Some("ENOSYS") => ENOSYS,
        _ => return usage(),
    };
    let Some(program) = words.next() else {
        return usage();
    };
    let arguments: Vec<_> = words.collect();
    let failure = without_io_uring(errno, || Command::new(&program).args(arguments).exec());
    eprintln!("{}: {failure}", program.display());
    ExitCode::from(127)
}

fn usage() -> ExitCode {
    eprintln!("usage: without_io_uring EPERM|ENOSYS COMMAND [ARGUMENT...]");
    ExitCode::from(2)
}
