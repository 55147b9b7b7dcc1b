//! `ringfetch doctor`: checks this host, and the device below each path, for the daemon.
//!
//! Owns the order of the checks and the exit code. Reads of /proc and /sys go through a [`View`], which tests
//! replace; what can only be known by trying is tried, through the engine. Nothing is changed or written.
//! Scripts rely on a *problem* being only something that keeps io_uring from working, a path from being read, or
//! the daemon from starting with this memory budget.

mod block;
mod finding;
mod host;
mod limits;
mod paths;
mod report;
mod ring;
mod summary;
#[cfg(test)]
mod tests;

use crate::args::Global;
use crate::outcome::Failure;
use crate::quantity::parse_size;
use crate::sink;
use clap::Args;
use finding::Verdict;
use report::Report;
use ringfetch_host::View;
use ringfetch_host::cgroup::Cgroup;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Files, block devices and directories of objects that the daemon is to serve.
    #[arg(value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Fail (exit code 1) on warnings too, not only on problems.
    #[arg(long)]
    pub(crate) strict: bool,
    /// The daemon's engine.memory_budget, which limits are compared with.
    #[arg(long, value_name = "SIZE", value_parser = parse_budget, default_value = "256MiB")]
    pub(crate) memory_budget: u64,
    /// The daemon's engine.cores. Default: as `auto`, the CPUs that this process may use.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) cores: Option<u32>,
}

/// The daemon takes no other one.
fn parse_budget(text: &str) -> Result<u64, String> {
    let budget = parse_size(text)?;
    let fits = (1 << 20..=1 << 40).contains(&budget);
    fits.then_some(budget)
        .ok_or_else(|| "use 1MiB to 1TiB, as for engine.memory_budget".to_owned())
}

/// What limits are compared with.
#[derive(Debug, Clone, Copy)]
struct Needs {
    memory_budget_bytes: u64,
    /// Number of rings, and of network threads.
    cores: u32,
    paths: u64,
    /// How many of the paths are directories of objects.
    directories: u64,
}

impl Needs {
    const fn new(memory_budget_bytes: u64, cores: u32, paths: u64) -> Self {
        Self {
            memory_budget_bytes,
            cores,
            paths,
            directories: 0,
        }
    }
}

pub(crate) fn run(global: &Global, doctor: &Doctor) -> Result<(), Failure> {
    let report = examine(doctor);
    sink::print(global.json, &report.json(), |out| {
        let colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        report.write(out, colour)
    })?;
    let found = report.at_least(if doctor.strict {
        Verdict::Warning
    } else {
        Verdict::Problem
    });
    if found.is_empty() {
        return Ok(());
    }
    Err(Failure::Failed(format!("not all is well: {}", found.join(", "))))
}

fn examine(doctor: &Doctor) -> Report {
    let view = View::real();
    let usable = u32::try_from(ringfetch_host::cpus::usable_cpus().len()).unwrap_or(u32::MAX);
    let (cores, paths) = (doctor.cores.unwrap_or(usable), doctor.paths.len() as u64);
    let needs = Needs {
        directories: doctor.paths.iter().filter(|path| path.is_dir()).count() as u64,
        ..Needs::new(doctor.memory_budget, cores, paths)
    };
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let group = Cgroup::of_this_process(&view);
    let ring = ring::RingProbe::run(needs);
    let has_ring = ring.probe.is_ok();

    let mut checks = vec![host::kernel(&release), host::environment(&view, !has_ring)];
    checks.extend(ring::checks(&view, &ring, needs));
    checks.extend(limits::checks(&view, &group, usable, needs));
    checks.push(host::clock_source(&view));
    checks.push(host::huge_pages(&view));
    let mut files = Vec::new();
    for path in &doctor.paths {
        let (found, file) = paths::examine(&view, &group, path, needs, has_ring);
        checks.extend(found);
        files.push(file);
    }
    let room = limits::cache_room(&view, &group, needs);
    let summary = summary::Summary::of(&checks, &files, has_ring, room);
    let user = rustix::process::geteuid().as_raw();
    Report {
        release,
        user,
        needs,
        checks,
        summary,
    }
}
