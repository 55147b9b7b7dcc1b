//! The daemon's process from outside: memory, CPU time, and whether it is still the same process.

use procfs::process::ClearRefs;
use serde::Serialize;
use std::io;
use std::sync::Arc;

/// A process, as /proc shows it.
#[derive(Debug, Clone)]
pub struct Process(Arc<procfs::process::Process>);

/// What it uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Usage {
    /// Resident memory (VmRSS).
    pub resident_mib: f64,
    /// Its peak since the process started, or since [`Process::forget_peak`] (VmHWM).
    pub resident_peak_mib: f64,
    /// The part that is not backed by a file (RssAnon).
    pub anonymous_mib: f64,
    /// User and system time, in ticks of 10 ms.
    pub cpu_seconds: f64,
    /// Open descriptors.
    pub descriptors: usize,
}

impl Process {
    /// A process by its number.
    ///
    /// # Errors
    /// It does not exist.
    pub fn new(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).map_err(io::Error::other)?;
        procfs::process::Process::new(pid)
            .map(|process| Self(Arc::new(process)))
            .map_err(io::Error::other)
    }

    /// What it uses now.
    ///
    /// # Errors
    /// It has ended, or its number now belongs to another process.
    pub fn usage(&self) -> io::Result<Usage> {
        // The /proc directory of an ended process returns errors, even if its number is reused.
        let stat = self.0.stat().map_err(io::Error::other)?;
        let status = self.0.status().map_err(io::Error::other)?;
        let mib = |kib: Option<u64>| approximate(kib.unwrap_or(0)) / 1024.0;
        Ok(Usage {
            resident_mib: mib(status.vmrss),
            resident_peak_mib: mib(status.vmhwm),
            anonymous_mib: mib(status.rssanon),
            // USER_HZ is 100 on every architecture of Linux that we run on.
            cpu_seconds: approximate(stat.utime + stat.stime) / 100.0,
            descriptors: self.0.fd_count().map_err(io::Error::other)?,
        })
    }

    /// Resets the peak of resident memory.
    ///
    /// # Errors
    /// The process belongs to another user, or has ended.
    pub fn forget_peak(&self) -> io::Result<()> {
        self.0.clear_refs(ClearRefs::PeakRSS).map_err(io::Error::other)
    }
}

#[expect(clippy::cast_precision_loss, reason = "for display")]
fn approximate(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_can_be_watched() {
        // Scenario: the test's own process. Expectation: it uses memory and descriptors; number 0 is no process.
        let process = Process::new(std::process::id()).expect("a process");
        let usage = process.usage().expect("usage");
        assert!(
            usage.resident_mib > 0.0
                && usage.resident_peak_mib >= usage.resident_mib
                && usage.descriptors > 0
        );
        assert!(Process::new(0).is_err());
    }
}
