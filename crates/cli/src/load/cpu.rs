//! CPU time: this process's own, and that of another process.

use crate::outcome::Failure;
use ringfetch_host::process::cpu_time;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Another process on this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process {
    pid: u32,
}

impl Process {
    /// The process with this id, which must exist.
    pub(crate) fn new(pid: u32) -> Result<Self, Failure> {
        let process = Self { pid };
        process.cpu().map(|_| process).map_err(Failure::Failed)
    }

    fn cpu(self) -> Result<Duration, String> {
        let missing = || format!("--server-pid: there is no process {}", self.pid);
        cpu_time(self.pid).ok_or_else(missing)
    }
}

/// CPU times at one moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Snapshot {
    at: Instant,
    own: Duration,
    server: Option<Duration>,
}

impl Snapshot {
    /// This process's, and the server's if there is one.
    ///
    /// # Errors
    /// The server is gone.
    pub(crate) fn take(server: Option<&Process>) -> Result<Self, String> {
        let server = server.map(|process| process.cpu()).transpose()?;
        Ok(Self {
            server,
            ..Self::own()
        })
    }

    /// This process's alone.
    pub(crate) fn own() -> Self {
        let own = clock_gettime(ClockId::ProcessCPUTime);
        let own = Duration::try_from(own).unwrap_or_default();
        let (at, server) = (Instant::now(), None);
        Self { at, own, server }
    }

    /// Time since an earlier moment.
    pub(crate) fn since(&self, before: &Self) -> Duration {
        self.at.saturating_duration_since(before.at)
    }

    /// CPU time of this process since an earlier moment, all threads, user and system.
    pub(crate) fn own_since(&self, before: &Self) -> Duration {
        self.own.saturating_sub(before.own)
    }

    /// CPU time of the other process since an earlier moment.
    pub(crate) fn server_since(&self, before: &Self) -> Option<Duration> {
        Some(self.server?.saturating_sub(before.server?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_some_cpu() {
        let me = Process::new(std::process::id()).unwrap();
        let before = Snapshot::take(Some(&me)).unwrap();
        let after = Snapshot::take(Some(&me)).unwrap();
        assert!(after.own >= before.own && after.own > Duration::ZERO);
        assert!(after.server_since(&before).is_some());
        let Err(Failure::Failed(message)) = Process::new(u32::MAX) else {
            panic!("a process of no pid")
        };
        assert!(message.contains("--server-pid"), "{message}");
    }
}
