//! CPU time: this process's own, and that of another process.

use ringfetch_host::process::cpu_time;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// CPU times at one moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Snapshot {
    at: Instant,
    own: Duration,
    server: Option<Duration>,
}

impl Snapshot {
    /// This process's, and that of the server with this process id if there is one.
    ///
    /// # Errors
    /// There is no such process.
    pub(crate) fn take(server: Option<u32>) -> Result<Self, String> {
        let of_server = |pid| cpu_time(pid).ok_or_else(|| format!("--server-pid: there is no process {pid}"));
        let server = server.map(of_server).transpose()?;
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
        let me = Some(std::process::id());
        let before = Snapshot::take(me).unwrap();
        let after = Snapshot::take(me).unwrap();
        assert!(after.own >= before.own && after.own > Duration::ZERO);
        assert!(after.server_since(&before).is_some());
        let message = Snapshot::take(Some(u32::MAX)).unwrap_err();
        assert!(message.contains("--server-pid"), "{message}");
    }
}
