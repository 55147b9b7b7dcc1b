//! Resources used by this process so far.

use std::time::Duration;

/// Usage of all threads of this process, including its rings' (getrusage(2), RUSAGE_SELF).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// CPU time in user mode.
    pub user: Duration,
    /// CPU time in the kernel.
    pub system: Duration,
}

/// Queries the kernel.
pub fn usage() -> Usage {
    let mut raw = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one rusage, for which there is room.
    let code = unsafe { libc::getrusage(libc::RUSAGE_SELF, raw.as_mut_ptr()) };
    if code != 0 {
        return Usage::default();
    }
    // SAFETY: zeroed, and all of its fields are numbers.
    let raw = unsafe { raw.assume_init() };
    let time = |at: libc::timeval| {
        let seconds = Duration::from_secs(u64::try_from(at.tv_sec).unwrap_or(0));
        seconds + Duration::from_micros(u64::try_from(at.tv_usec).unwrap_or(0))
    };
    Usage {
        user: time(raw.ru_utime),
        system: time(raw.ru_stime),
    }
}
