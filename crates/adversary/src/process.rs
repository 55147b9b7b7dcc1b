//! The daemon's process from outside: memory, CPU time, whether it is still the same one.

use serde::Serialize;
use std::path::PathBuf;
use std::{fs, io};

/// A process, as /proc shows it.
#[derive(Debug, Clone)]
pub struct Process {
    directory: PathBuf,
    started: u64,
}

/// What it uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Usage {
    /// Resident memory (VmRSS).
    pub resident_mib: f64,
    /// Its peak since the process began, or since [`Process::forget_peak`] (VmHWM).
    pub resident_peak_mib: f64,
    /// Of that, what no file backs (RssAnon).
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
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let started = started(&fs::read_to_string(directory.join("stat"))?)?.0;
        Ok(Self { directory, started })
    }

    /// What it uses now.
    ///
    /// # Errors
    /// It has ended, or its number belongs to another process now.
    pub fn usage(&self) -> io::Result<Usage> {
        let (started, ticks) = started(&fs::read_to_string(self.directory.join("stat"))?)?;
        if started != self.started {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process has ended"));
        }
        let status = fs::read_to_string(self.directory.join("status"))?;
        let mib = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let kib = line.and_then(|line| {
                line.trim_start_matches(':')
                    .trim()
                    .split(' ')
                    .next()?
                    .parse::<f64>()
                    .ok()
            });
            kib.unwrap_or(0.0) / 1024.0
        };
        Ok(Usage {
            resident_mib: mib("VmRSS"),
            resident_peak_mib: mib("VmHWM"),
            anonymous_mib: mib("RssAnon"),
            // USER_HZ is 100 on every architecture of Linux that we run on.
            cpu_seconds: ticks / 100.0,
            descriptors: fs::read_dir(self.directory.join("fd"))?.count(),
        })
    }

    /// Makes the peak of resident memory begin anew.
    ///
    /// # Errors
    /// The process belongs to another user, or has ended.
    pub fn forget_peak(&self) -> io::Result<()> {
        fs::write(self.directory.join("clear_refs"), "5")
    }
}

/// When it began, and the ticks it has used: fields 22, 14 and 15 of proc_pid_stat(5).
fn started(stat: &str) -> io::Result<(u64, f64)> {
    // The name before the last parenthesis may hold anything.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
    let found = number(22).zip(ticks(14).zip(ticks(15)));
    found
        .map(|(began, (user, system))| (began, user + system))
        .ok_or(io::ErrorKind::InvalidData.into())
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
