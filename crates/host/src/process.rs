//! The CPU time of another process.

use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use std::time::Duration;

/// Above every process id: `PID_MAX_LIMIT` of linux/threads.h.
const PIDS_MAX: i32 = 1 << 22;

/// CPU time of a process so far, user and system, of all its threads, ended ones too: what CLOCK_PROCESS_CPUTIME_ID is for
/// this one, in nanoseconds (clock_getcpuclockid(3)). /proc/PID/stat counts ticks of 10 ms, a fifth of a step of 50 ms.
/// `None`: there is no such process.
pub fn cpu_time(pid: u32) -> Option<Duration> {
    // 0 is the calling process; of a larger number the clock's id has the lower 29 bits, which are another one.
    let pid = i32::try_from(pid)
        .ok()
        .filter(|pid| (1..PIDS_MAX).contains(pid))?;
    let clock = clock_getcpuclockid(Pid::from_raw(pid)).ok()?;
    clock.now().ok().map(Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::time::{ClockId, clock_gettime};

    #[test]
    fn cpu_time_is_counted_in_less_than_ticks() {
        // Scenario: this process, by its own clock before and after; no process. Expected: between both; nothing.
        let own = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
        let before = own();
        let between = cpu_time(std::process::id()).unwrap();
        let after = own();
        assert!(
            before <= between && between <= after,
            "{before:?} {between:?} {after:?}"
        );
        assert_eq!([0, 1 << 29, 0x7fff_ffff, u32::MAX].map(cpu_time), [None; 4]);
    }
}
