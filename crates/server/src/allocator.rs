//! The allocator, and the thread that returns unused memory to the system.
//!
//! By itself mimalloc does that on whichever thread allocates next: a core spent up to 9 ms of CPU time in one poll of a
//! connection (measured), in an madvise(2) for each 64 KiB, each of which interrupts the other CPUs.
#![allow(
    unsafe_code,
    reason = "options of mimalloc, for which no crate has a safe interface"
)]

use libmimalloc_sys::{mi_collect, mi_option_get, mi_option_set, mi_option_t};
use std::ffi::c_long;
use std::thread::{Builder, sleep};
use std::time::Duration;

/// Chosen by measurement: docs/adr/0008.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc.h, in milliseconds; the crate does not name it.
const PURGE_DELAY: mi_option_t = 15;

/// 24 days: not on threads that allocate.
const NEVER_MS: c_long = i32::MAX as c_long;

/// How often memory is returned. What was freed just before is, too, and has to be zeroed again if it is needed.
const EVERY: Duration = Duration::from_secs(10);

/// Returns unused memory on a thread of its own from now on. Call it before other threads start. Without a thread all stays as it was.
pub(crate) fn return_memory_on_own_thread() {
    // SAFETY: options may be accessed while there is one thread.
    let before = unsafe { mi_option_get(PURGE_DELAY) };
    // SAFETY: as above.
    unsafe { mi_option_set(PURGE_DELAY, NEVER_MS) };
    let thread = Builder::new().name("rf-purge".to_owned());
    let started = thread.spawn(|| {
        loop {
            sleep(EVERY);
            // SAFETY: any thread may call it; it takes memory that is in use by none.
            unsafe { mi_collect(true) };
        }
    });
    if started.is_err() {
        // SAFETY: as above: there is still one thread.
        unsafe { mi_option_set(PURGE_DELAY, before) };
    }
}
