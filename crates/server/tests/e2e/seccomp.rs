//! Runs programs as on a host that refuses io_uring, as the profiles of container runtimes do. The tests of
//! `ringfetch` use this too.

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use std::panic::resume_unwind;
use std::thread;

/// What Docker's profile returns.
pub(crate) const EPERM: u32 = 1;
/// What Podman's profile returns.
pub(crate) const ENOSYS: u32 = 38;

/// The number of the system call, the same on every architecture.
const IO_URING_SETUP: i64 = 425;

/// Runs on a thread where io_uring_setup returns `errno`. Processes started there inherit that.
pub(crate) fn without_io_uring<T: Send>(errno: u32, run: impl FnOnce() -> T + Send) -> T {
    let filter = SeccompFilter::new(
        [(IO_URING_SETUP, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(errno),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    thread::scope(|scope| {
        let confined = scope.spawn(|| {
            apply_filter(&program).unwrap();
            run()
        });
        confined.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}
