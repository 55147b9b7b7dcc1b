//! The threads that open objects: of the whole process, so that their number does not grow with its cores.
//!
//! The blocking pool of a core's runtime would start a thread whenever an open ends and the next one begins before its
//! thread is idle: batches of missing names had 512 threads per core, and tokio-uring's runtime has no setting for it.

use super::objects::OPENS_MAX;
use std::io;
use std::sync::LazyLock;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

/// Most threads: three directories whose file system hangs leave none to others. Each takes 160 KiB (measured), until
/// it has been idle for 10 s.
pub(super) const OPENERS_MAX: usize = 3 * OPENS_MAX;

/// Has no task of its own: only its pool is used.
static OPENERS: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    Builder::new_current_thread()
        .max_blocking_threads(OPENERS_MAX)
        .thread_name("rf-open")
        .build()
});

/// Runs a function on one of the threads. Must be called inside a tokio runtime.
pub(super) fn spawn<T: Send + 'static>(open: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    match &*OPENERS {
        Ok(openers) => openers.spawn_blocking(open),
        // It needs no resource of the system.
        Err(_) => tokio::task::spawn_blocking(open),
    }
}
