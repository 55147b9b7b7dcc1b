//! Compares the response memory of a configuration with the memory of the host, and with what the process may have.

use ringfetch_command::size;
use ringfetch_host::View;
use ringfetch_host::cgroup::Cgroup;
use rustix::process::{Resource, getrlimit};

/// What the daemon needs besides the budget (docs/OPERATIONS.md, "Memory"), without any request.
const BESIDES_BYTES: u64 = 64 << 20;

/// Checks that the budget (`engine.memory_budget`) is at most the host's memory and its control group's limit. What
/// else needs memory is not counted.
///
/// # Errors
/// It is more: the key, both figures and the remedy.
pub fn check(budget_bytes: u64, view: &View) -> Result<(), String> {
    let total = view
        .meminfo()
        .map(|meminfo| (meminfo.mem_total, "this host's memory".to_owned()));
    let group = Cgroup::of_this_process(view).memory;
    let group = group.map(|memory| {
        (
            memory.limit_bytes,
            format!("the control group's limit ({})", memory.file),
        )
    });
    let least = total.into_iter().chain(group).min_by_key(|(bytes, _)| *bytes);
    match least {
        Some((bytes, whose)) if bytes < budget_bytes => Err(format!(
            "engine.memory_budget: is {}, more than {whose}, which is {}; lower it, or provide \
             more memory",
            size::exact(budget_bytes),
            size::rounded(bytes),
        )),
        Some(_) | None => Ok(()),
    }
}

/// Checks that the process may have the budget and what the daemon needs besides. An allocation beyond that ends it.
///
/// # Errors
/// It may not: the limit, and the remedy.
pub fn check_process_limits(budget_bytes: u64) -> Result<(), String> {
    let limits = [
        (Resource::As, "of address space (ulimit -v)"),
        (Resource::Data, "of data (ulimit -d)"),
    ];
    let needed = budget_bytes.saturating_add(BESIDES_BYTES);
    for (resource, what) in limits {
        let most = getrlimit(resource).current.filter(|most| *most < needed);
        if let Some(most) = most {
            return Err(format!(
                "engine.memory_budget: is {}, and the process may have {} {what}; raise that limit to {} at least, or lower \
                 the budget",
                size::exact(budget_bytes),
                size::rounded(most),
                size::rounded(needed),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_host::tree::Tree;

    #[test]
    fn a_budget_beyond_the_memory_is_refused() {
        // Scenario: a host with 4 GiB; the same with a control group of 1 GiB; one whose /proc cannot be read.
        // Expectation: what exceeds the smaller of the two is refused, with the key, the source of the limit and
        // the remedy; an unknown host refuses nothing.
        let host = Tree::new(&[]);
        assert_eq!(check(1 << 40, &host.view()), Ok(()));
        host.write_meminfo(&[("MemTotal", 4 << 20)]);
        assert_eq!(check(4 << 30, &host.view()), Ok(()));
        let error = check((4 << 30) + 4096, &host.view()).unwrap_err();
        for part in [
            "engine.memory_budget",
            "this host's memory",
            "4.0 GiB",
            "lower it",
        ] {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
        host.write("proc/self/cgroup", "0::/a\n");
        host.write(
            "proc/self/mountinfo",
            "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        );
        host.write("sys/fs/cgroup/a/memory.max", "1073741824\n");
        host.write("sys/fs/cgroup/a/memory.current", "0\n");
        assert_eq!(check(1 << 30, &host.view()), Ok(()));
        let error = check(2 << 30, &host.view()).unwrap_err();
        for part in ["2GiB", "control group's limit", "memory.max", "1.0 GiB"] {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
    }
}
