//! Limits of this process: CPUs, memory, threads, descriptors, mappings.

use super::Needs;
use super::finding::{Check, Finding, checks};
use super::host;
use crate::quantity::{grouped, size};
use ringfetch_engine::dataset::IN_FLIGHT_DESCRIPTORS_MAX;
use ringfetch_host::View;
use ringfetch_host::cgroup::Cgroup;
use rustix::process::{Resource, getrlimit};

checks! {
    CPUS = "cpu.usable", "the daemon starts a network thread a usable CPU, and a ring with each";
    QUOTA = "cpu.quota",
        "a group that has used up its quota is stopped until the next period, which shows as latency";
    MEMORY = "memory.available", "answers are held in engine.memory_budget, and what is left caches the data";
    GROUP = "memory.cgroup",
        "the page cache that this process fills counts against its group: mmap and auto are warm up to the limit";
    OVERCOMMIT = "memory.overcommit",
        "with vm.overcommit_memory=2 allocations fail early, before the memory is used";
    OPEN_FILES = "limits.open_files",
        "connections, files and rings are descriptors; the daemon raises its soft limit to the hard one";
    PROCESS = "limits.memory",
        "the daemon does not start without room for engine.memory_budget and 64 MiB; later an allocation beyond the limit ends it";
    THREADS = "limits.threads",
        "cores, the threads of mmap and pread, and those that open objects count against pids.max and ulimit -u";
    MAPPINGS = "limits.mappings", "mmap and auto map each file and each cached object";
}

/// What the daemon needs besides its response memory, by docs/OPERATIONS.md, "Memory": 64 MiB, three times
/// limits.request_memory, and 24 KiB for each connection of the three ports, with the defaults of `config/ringfetchd.yaml`.
const OTHER_MEMORY_BYTES: u64 = (64 << 20) + 3 * (64 << 20) + CONNECTIONS * (24 << 10);
/// What of it a start needs, by `crates/server/src/host_memory.rs`.
const START_BYTES: u64 = 64 << 20;
/// CAP_SYS_ADMIN and CAP_SYS_RESOURCE (capabilities(7)): either lifts the limit of a user's threads.
const THREAD_CAPABILITIES: u64 = 1 << 21 | 1 << 24;
/// Defaults of `config/ringfetchd.yaml`: connections on each of three ports, `max_open_files` of a directory of objects.
const CONNECTIONS: u64 = 3 * 4096;
const MAX_OPEN_FILES: u64 = 1024;
/// Descriptors of a core: epoll, its waker, the signal pipe, a ring with its eventfd.
const CORE_DESCRIPTORS: u64 = 6;
/// Descriptors of a file: one for each way to read.
const FILE_DESCRIPTORS: u64 = 2;
/// pread's default pool, and what the runtime's own pool may add.
const OTHER_THREADS: u64 = 64;
/// Threads that open and list objects, by docs/OPERATIONS.md, "threads".
const OBJECT_THREADS: u64 = 192 + 8;

/// The remedy where the daemon does not start: the rest of it is the limit.
const BEYOND: &str = "set a smaller engine.memory_budget: the daemon refuses one beyond";

pub(super) fn checks(view: &View, group: &Cgroup, usable: u32, needs: Needs) -> Vec<Finding> {
    let hard = getrlimit(Resource::Nofile).maximum;
    vec![
        cpus(view, usable, needs),
        quota(group, needs),
        memory(view, needs),
        group_memory(group, needs),
        overcommit(view, needs),
        process_memory(
            [Resource::As, Resource::Data].map(|limit| getrlimit(limit).current),
            needs,
        ),
        open_files(hard, needs),
        threads(group, user_threads(view), needs),
        mappings(view, needs),
    ]
}

/// CPUs in a list like `0-3,8`.
fn count_of(list: &str) -> Option<u64> {
    let mut count: u64 = 0;
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

fn cpus(view: &View, usable: u32, needs: Needs) -> Finding {
    let online = view.text("sys/devices/system/cpu/online");
    let online = online.and_then(|list| count_of(&list));
    let of_online = online.map(|online| format!(" of {online} online"));
    let found = format!("{usable}{}", of_online.unwrap_or_default());
    if needs.cores > usable {
        CPUS.warning(
            format!("{found}, and {} cores requested", needs.cores),
            "set engine.cores to at most the CPUs, or auto: pinned threads on one CPU take turns",
        )
    } else if online.is_some_and(|online| u64::from(usable) < online) {
        CPUS.note(format!(
            "{found}: affinity or quota keeps the others from this process"
        ))
    } else {
        CPUS.ok(found)
    }
}

fn quota(group: &Cgroup, needs: Needs) -> Finding {
    match group.cpus {
        None if group.seen => QUOTA.ok("no quota"),
        None => QUOTA.ok("no control group found"),
        Some(cpus) if cpus < 1.0 => QUOTA.warning(
            format!("{cpus:.2} CPUs: even one core is throttled"),
            "give it 1 CPU at least (cpu.max, --cpus in Docker, resources.limits.cpu in Kubernetes)",
        ),
        Some(cpus) if cpus.fract() > 0.0 => QUOTA.note_with(
            format!("{cpus:.2} CPUs, with engine.cores {}", needs.cores),
            "whole CPUs, better by cpuset than by quota",
        ),
        Some(cpus) => QUOTA.ok(format!("{cpus} CPUs")),
    }
}

fn memory(view: &View, needs: Needs) -> Finding {
    let meminfo = view.meminfo();
    let figures = meminfo.and_then(|meminfo| Some((meminfo.mem_available?, meminfo.mem_total)));
    let Some((available, total)) = figures else {
        return MEMORY.unknown_without("/proc");
    };
    let (free, whole, wanted) = (size(available), size(total), size(needs.memory_bytes()));
    let found = format!("{free} of {whole} available; the daemon may take {wanted}");
    if total < needs.memory_budget_bytes {
        return MEMORY.problem(found, format!("{BEYOND} the host's memory"));
    }
    let remedy = "free memory, or set a smaller engine.memory_budget";
    MEMORY.warn_if(available < needs.memory_bytes(), found, remedy)
}

fn group_memory(group: &Cgroup, needs: Needs) -> Finding {
    let Some(memory) = &group.memory else {
        return GROUP.ok("no limit that can be seen");
    };
    let (limit, used) = (size(memory.limit_bytes), size(memory.used_bytes));
    let found = format!("{limit} ({}), {used} in use", memory.file);
    let wanted = needs.memory_bytes();
    if memory.limit_bytes >= wanted {
        return GROUP.note(found);
    }
    let found = format!("{found}; the daemon may take {}", size(wanted));
    if memory.limit_bytes < needs.memory_budget_bytes {
        return GROUP.problem(found, format!("{BEYOND} this limit, or raise it"));
    }
    let remedy = "bytes at least (memory.max, --memory in Docker), or set a smaller engine.memory_budget";
    GROUP.warning(found, format!("allow {wanted} {remedy}"))
}

fn overcommit(view: &View, needs: Needs) -> Finding {
    match view.number("proc/sys/vm/overcommit_memory") {
        Some(2_u8) => {
            let room = view.meminfo().map_or(0, |meminfo| {
                let limit = meminfo.commit_limit.unwrap_or(0);
                limit.saturating_sub(meminfo.committed_as)
            });
            let (room_text, wanted) = (size(room), size(needs.memory_bytes()));
            let found =
                format!("vm.overcommit_memory is 2, with room for {room_text}; the daemon may take {wanted}");
            let remedy = "raise vm.overcommit_ratio, `sysctl vm.overcommit_memory=0`, or set a smaller \
                          engine.memory_budget";
            OVERCOMMIT.warn_if(room < needs.memory_bytes(), found, remedy)
        }
        Some(mode) => OVERCOMMIT.ok(format!("vm.overcommit_memory is {mode}")),
        None => OVERCOMMIT.unknown_without("/proc"),
    }
}

/// Of address space and of data.
fn process_memory(limits: [Option<u64>; 2], needs: Needs) -> Finding {
    let named = [("address space", "-v", "LimitAS"), ("data", "-d", "LimitDATA")];
    let limits = limits.into_iter().zip(named);
    let least = limits.filter_map(|(limit, named)| Some((limit?, named)));
    let Some((limit, (what, flag, unit))) = least.min_by_key(|(limit, _)| *limit) else {
        return PROCESS.ok("no limit of address space or data");
    };
    let wanted = needs.memory_bytes();
    let found = format!("{} of {what}; the daemon may take {}", size(limit), size(wanted));
    let kib = wanted.div_ceil(1024);
    let remedy = format!(
        "raise the limit (`ulimit {flag} {kib}`, {unit}={wanted} in systemd), or set a smaller engine.memory_budget"
    );
    if limit < needs.memory_budget_bytes.saturating_add(START_BYTES) {
        PROCESS.problem(found, remedy)
    } else {
        PROCESS.warn_if(limit < wanted, found, remedy)
    }
}

fn open_files(hard: Option<u64>, needs: Needs) -> Finding {
    let wanted = CONNECTIONS
        + needs.objects()
        + FILE_DESCRIPTORS * needs.paths
        + CORE_DESCRIPTORS * (u64::from(needs.cores) + 1);
    let Some(hard) = hard else {
        return OPEN_FILES.ok("no limit");
    };
    let (limit, most) = (grouped(hard), grouped(wanted));
    if hard >= wanted {
        return OPEN_FILES.ok(format!("{limit} (hard), {most} may be needed"));
    }
    let (connections, objects, paths) = (grouped(CONNECTIONS), grouped(needs.objects()), needs.paths);
    OPEN_FILES.warning(
        format!("{limit} (hard); {connections} connections, {objects} objects and {paths} paths may take {most}"),
        format!(
            "raise the hard limit (`ulimit -Hn {wanted}`, LimitNOFILE={wanted} in systemd, --ulimit nofile={wanted} \
             in Docker), or set smaller limits.connections and max_open_files"
        ),
    )
}

/// The limit of all threads of this process's user, unless it is lifted.
fn user_threads(view: &View) -> Option<u64> {
    let user = view.line("proc/self/status", "Uid:").unwrap_or_default();
    let is_root = user.split_whitespace().next() == Some("0");
    let is_lifted = is_root || host::capabilities(view) & THREAD_CAPABILITIES != 0;
    let limit = getrlimit(Resource::Nproc).current;
    limit.filter(|_| !is_lifted || host::in_user_namespace(view))
}

fn threads(group: &Cgroup, of_user: Option<u64>, needs: Needs) -> Finding {
    let of_objects = if needs.directories > 0 { OBJECT_THREADS } else { 0 };
    let wanted = OTHER_THREADS + 2 * u64::from(needs.cores) + of_objects;
    if let Some(limit) = of_user.filter(|limit| *limit < wanted) {
        return THREADS.warning(
            format!("{limit} for all processes of this user together; the daemon alone may take {wanted}"),
            format!(
                "leave room for {wanted} (`ulimit -u`, LimitNPROC= in systemd, --ulimit nproc in Docker)"
            ),
        );
    }
    let Some(pids) = &group.pids else {
        return THREADS.ok("no limit that can be seen");
    };
    let found = format!("{} of {} in use ({})", pids.used, pids.limit, pids.file);
    let remedy = format!("leave room for {wanted} (pids.max, --pids-limit in Docker, TasksMax in systemd)");
    THREADS.warn_if(pids.limit.saturating_sub(pids.used) < wanted, found, remedy)
}

fn mappings(view: &View, needs: Needs) -> Finding {
    let files = needs.paths + needs.objects();
    // Besides the files: code, heap and stacks, several mappings per thread. The daemon leaves an eighth for them.
    let others = 4 * (OTHER_THREADS + u64::from(needs.cores)) + 256;
    let wanted = files + others.max(files.div_ceil(7));
    match view.number::<u64>("proc/sys/vm/max_map_count") {
        Some(limit) if limit < wanted => MAPPINGS.warning(
            format!("vm.max_map_count is {limit}, {wanted} may be needed"),
            // 65530 is the kernel's default.
            format!("`sysctl vm.max_map_count={}`, or more", wanted.max(65_530)),
        ),
        Some(limit) => MAPPINGS.ok(format!("vm.max_map_count is {}", grouped(limit))),
        None => MAPPINGS.unknown_without("/proc"),
    }
}

impl Needs {
    fn memory_bytes(&self) -> u64 {
        self.memory_budget_bytes.saturating_add(OTHER_MEMORY_BYTES)
    }

    /// Descriptors of open objects: of each directory, and of all requests in flight together.
    fn objects(&self) -> u64 {
        match self.directories {
            0 => 0,
            directories => directories * MAX_OPEN_FILES + IN_FLIGHT_DESCRIPTORS_MAX as u64,
        }
    }
}

/// Bytes that could cache data: what is available to this process, minus the response memory. `None`:
/// unknown.
pub(super) fn cache_room(view: &View, group: &Cgroup, needs: Needs) -> Option<u64> {
    let available = group.available_bytes(view)?;
    Some(available.saturating_sub(needs.memory_budget_bytes))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;
    use ringfetch_host::cgroup::{Memory, Pids};
    use ringfetch_host::tree::Tree;

    const NEEDS: Needs = Needs::new(256 << 20, 4, 3);

    #[test]
    fn lists_of_cpus_are_counted() {
        for (list, count) in [("0", 1), ("0-3", 4), ("0-3,8,10-11", 7)] {
            assert_eq!(count_of(list), Some(count), "{list}");
        }
        for list in ["", "3-1", "x", "0-18446744073709551615"] {
            assert_eq!(count_of(list), None, "{list}");
        }
    }

    #[test]
    fn fewer_cpus_than_asked_for_are_a_warning() {
        // 64 CPUs online for 4 cores; then quotas.
        use Verdict::{Note, Ok, Warning};
        let tree = Tree::new(&[("sys/devices/system/cpu/online", "0-63\n")]);
        let verdicts = [2, 4, 64].map(|usable| cpus(&tree.view(), usable, NEEDS).verdict);
        assert_eq!(verdicts, [Warning, Note, Ok]);
        let mut group = Cgroup::default();
        for (cpus, verdict) in [
            (Some(0.5), Warning),
            (Some(2.5), Note),
            (Some(4.0), Ok),
            (None, Ok),
        ] {
            group.cpus = cpus;
            assert_eq!(quota(&group, NEEDS).verdict, verdict, "{cpus:?}");
        }
        // Two CPUs by affinity, of which the daemon runs one core.
        group.cpus = Some(3.5);
        let found = quota(&group, Needs { cores: 1, ..NEEDS }).found;
        assert_eq!(found, "3.50 CPUs, with engine.cores 1");
    }

    #[test]
    fn memory_is_held_against_the_budget() {
        // A budget of 256 MiB, which takes 800 MiB by the handbook's sum, with 16 GiB and with 100 MiB available, in groups,
        // with strict overcommit.
        let tree = Tree::new(&[("proc/sys/vm/overcommit_memory", "0\n")]);
        tree.write_meminfo(&[("MemTotal", 32 << 20), ("MemAvailable", 16 << 20)]);
        let (used_bytes, none) = (0, Cgroup::default());
        let [large, enough, small] = [1024, 800, 799].map(|limit: u64| {
            let limit_bytes = limit << 20;
            let file = "memory.max".to_owned();
            let memory = Some(Memory {
                limit_bytes,
                used_bytes,
                file,
            });
            Cgroup {
                memory,
                ..Cgroup::default()
            }
        });
        assert_eq!(memory(&tree.view(), NEEDS).verdict, Verdict::Ok);
        assert_eq!(overcommit(&tree.view(), NEEDS).verdict, Verdict::Ok);
        for (group, available, verdict) in [
            (&none, 16_u64 << 30, Verdict::Ok),
            (&large, 1 << 30, Verdict::Note),
        ] {
            assert_eq!(
                cache_room(&tree.view(), group, NEEDS),
                Some(available - (256 << 20))
            );
            assert_eq!(group_memory(group, NEEDS).verdict, verdict);
        }
        assert_eq!(group_memory(&enough, NEEDS).verdict, Verdict::Note);
        assert_eq!(group_memory(&small, NEEDS).verdict, Verdict::Warning);

        tree.write_meminfo(&[
            ("MemTotal", 32 << 20),
            ("MemAvailable", 100 << 10),
            ("CommitLimit", 20),
        ]);
        tree.write("proc/sys/vm/overcommit_memory", "2\n");
        assert_eq!(memory(&tree.view(), NEEDS).verdict, Verdict::Warning);
        assert_eq!(overcommit(&tree.view(), NEEDS).verdict, Verdict::Warning);
        tree.write_meminfo(&[("CommitLimit", 20_000_000), ("Committed_AS", 1)]);
        assert_eq!(overcommit(&tree.view(), NEEDS).verdict, Verdict::Ok);
        assert_eq!(memory(&tree.view(), NEEDS).verdict, Verdict::Note);
    }

    #[test]
    fn what_the_daemon_refuses_is_a_problem() {
        // Scenario: a host with 4 GiB; the same with a control group of 1 GiB; budgets around both. Expectation: a problem
        // where `ringfetchd` does not start, and only there.
        let tree = Tree::new(&[("proc/self/cgroup", "0::/a\n")]);
        tree.write_meminfo(&[("MemTotal", 4 << 20), ("MemAvailable", 1 << 10)]);
        for limit in [None, Some("1073741824\n")] {
            if let Some(limit) = limit {
                let mount = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
                tree.write("proc/self/mountinfo", mount);
                tree.write("sys/fs/cgroup/a/memory.current", "0\n");
                tree.write("sys/fs/cgroup/a/memory.max", limit);
            }
            let (view, group) = (tree.view(), Cgroup::of_this_process(&tree.view()));
            for budget in [1 << 30, (1 << 30) + 1, 4 << 30, (4 << 30) + 1] {
                let needs = Needs::new(budget, 4, 3);
                let found = [memory(&view, needs), group_memory(&group, needs)];
                let refused = ringfetch_server::host_memory::check(budget, &view).is_err();
                let is_problem = found.iter().any(|finding| finding.verdict == Verdict::Problem);
                assert_eq!(is_problem, refused, "{budget} {limit:?}: {found:?}");
            }
        }
    }

    #[test]
    fn the_limit_of_threads_is_lifted_for_root_and_by_capabilities() {
        // Scenario: root and an ordinary user, without and with CAP_SYS_RESOURCE, in a user namespace and outside. Expectation:
        // the limit counts for a user without it, and in a user namespace.
        let limit = getrlimit(Resource::Nproc).current;
        for (user, capabilities, map, expected) in [
            ("1000", "0", "0 0 4294967295", limit),
            ("1000", "1000000", "0 0 4294967295", None),
            ("0", "0", "0 0 4294967295", None),
            ("0", "1000000", "0 1000 1", limit),
        ] {
            let status = format!("Uid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t{capabilities}\n");
            let tree = Tree::new(&[("proc/self/status", &status), ("proc/self/uid_map", map)]);
            assert_eq!(user_threads(&tree.view()), expected, "{status}{map}");
        }
    }

    #[test]
    fn counts_are_held_against_what_the_daemon_may_need() {
        assert_eq!(open_files(None, NEEDS).verdict, Verdict::Ok);
        assert_eq!(open_files(Some(1 << 20), NEEDS).verdict, Verdict::Ok);
        let low = open_files(Some(4096), NEEDS);
        assert_eq!(low.verdict, Verdict::Warning);
        assert!(low.remedy.is_some_and(|remedy| remedy.contains("LimitNOFILE")));

        // Files alone; a directory among them; two: three ports of 4,096, 1,024 a directory and 24,576 for all, two a path, and
        // the cores'.
        for (directories, wanted) in [(0, 12_324), (1, 37_924), (2, 38_948)] {
            let needs = Needs { directories, ..NEEDS };
            for (limit, verdict) in [(wanted, Verdict::Ok), (wanted - 1, Verdict::Warning)] {
                assert_eq!(open_files(Some(limit), needs).verdict, verdict, "{directories}");
            }
        }

        let mut group = Cgroup::default();
        assert_eq!(threads(&group, None, NEEDS).verdict, Verdict::Ok);
        // A directory: 192 and 8 more, which OPERATIONS.md names.
        for (directories, wanted) in [(0, 72), (1, 272), (2, 272)] {
            let needs = Needs { directories, ..NEEDS };
            for (limit, verdict) in [(wanted - 1, Verdict::Warning), (wanted, Verdict::Ok)] {
                assert_eq!(
                    threads(&group, Some(limit), needs).verdict,
                    verdict,
                    "{directories}"
                );
            }
        }
        for (used, verdict) in [(900, Verdict::Ok), (990, Verdict::Warning)] {
            let (limit, file) = (1000, "pids.max".to_owned());
            group.pids = Some(Pids { limit, used, file });
            assert_eq!(threads(&group, None, NEEDS).verdict, verdict);
        }
        for (limit, verdict) in [("65530\n", Verdict::Ok), ("1000\n", Verdict::Warning)] {
            let tree = Tree::new(&[("proc/sys/vm/max_map_count", limit)]);
            let directories = 1;
            assert_eq!(
                mappings(&tree.view(), Needs { directories, ..NEEDS }).verdict,
                verdict
            );
        }
        // Seven eighths of the default are fewer than these.
        let tree = Tree::new(&[("proc/sys/vm/max_map_count", "65530\n")]);
        let many = Needs {
            paths: 32_400,
            directories: 1,
            ..NEEDS
        };
        let few = mappings(&tree.view(), many);
        assert_eq!(few.verdict, Verdict::Warning);
        let wanted = format!(
            "`sysctl vm.max_map_count={}`, or more",
            (32_400 + many.objects()).div_ceil(7) + 32_400 + many.objects()
        );
        assert_eq!(few.remedy, Some(wanted));
    }
}
