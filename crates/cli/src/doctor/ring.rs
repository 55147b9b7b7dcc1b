//! io_uring, by using it: the engine's probe, and the memory that it registers.

use super::Needs;
use super::finding::{Check, Finding, checks};
use super::host::{allowing, capabilities, container, in_user_namespace};
use crate::quantity::size;
use ringfetch_engine::probe::{UringFacts, UringRefusal, probe, register_memory};
use ringfetch_host::View;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

checks! {
    SETUP = "io_uring.setup",
        "backends uring and auto need it; without it the daemon runs on mmap, or does not start";
    SYSCTL = "io_uring.sysctl",
        "kernel.io_uring_disabled (kernel 6.6) forbids io_uring to some users or to all";
    SECCOMP = "io_uring.seccomp", "the default profiles of container runtimes forbid io_uring";
    BUFFERS = "io_uring.registered_buffers",
        "memory that is registered with a ring need not be pinned again for every read; without it, reads still work";
    MEMLOCK = "limits.memlock",
        "registered memory counts against RLIMIT_MEMLOCK, once a ring, and over all processes of the user";
}

/// CAP_IPC_LOCK is bit 14 of a capability set (capabilities(7)).
const CAP_IPC_LOCK: u64 = 1 << 14;

/// Memory of a ring itself, which counts too on kernels before 5.12 and from 6.14: at most 4096 entries of 64
/// bytes and 8192 of 16.
const RING_BYTES: u64 = 1 << 20;

/// Most that is registered to try it, unless the limit is higher: without a limit, more would not be refused either, and
/// for each TiB the kernel takes 4 GiB of memory (16 bytes a page) and about 20 s.
const TRIED_BYTES_MAX: u64 = 16 << 30;

/// What was tried, and the results.
#[derive(Debug)]
pub(super) struct RingProbe {
    pub(super) probe: Result<UringFacts, UringRefusal>,
    /// Registering the daemon's response memory with all its rings, or as much of it as is tried.
    pub(super) memory: io::Result<()>,
    pub(super) memlock_limit_bytes: Option<u64>,
}

/// How much of the response memory is tried with each ring: enough to exceed the limit, if all of it does.
fn tried_bytes(needs: Needs, limit_bytes: Option<u64>) -> u64 {
    let most = limit_bytes.map_or(0, |limit| limit.saturating_add(4096));
    let of_ring = most.max(TRIED_BYTES_MAX).div_ceil(needs.cores.into());
    needs.memory_budget_bytes.min(of_ring)
}

impl RingProbe {
    pub(super) fn run(needs: Needs) -> Self {
        let limit = getrlimit(Resource::Memlock).current;
        Self {
            probe: probe(),
            memory: register_memory(tried_bytes(needs, limit), needs.cores),
            memlock_limit_bytes: limit,
        }
    }
}

pub(super) fn checks(view: &View, tried: &RingProbe, needs: Needs) -> Vec<Finding> {
    let mut checks = vec![setup(view, tried), sysctl(view, tried), seccomp(view, tried)];
    // Without a ring, both would report the same refusal.
    if let Ok(facts) = &tried.probe {
        checks.push(match &facts.registered_buffers {
            Ok(()) => BUFFERS.ok("memory can be registered, and is read into"),
            Err(reason) => BUFFERS.warning(
                format!("memory cannot be registered: {reason}"),
                "raise the limit on locked memory (limits.memlock), or set engine.uring.registered_buffers: false",
            ),
        });
        checks.push(memlock(view, tried, needs));
    }
    checks
}

fn setup(view: &View, tried: &RingProbe) -> Finding {
    match &tried.probe {
        Ok(facts) => SETUP.ok(format!("a ring, a no-op and a read work ({})", facts.features)),
        Err(refusal) => SETUP.problem(refusal.cause(), remedy(view, refusal)),
    }
}

/// The engine's remedy; for a filter it names that of Docker, which other runtimes do not read.
fn remedy(view: &View, refusal: &UringRefusal) -> String {
    let is_filter = matches!(refusal, UringRefusal::Seccomp { .. });
    let other = container(view).filter(|name| is_filter && !["Docker", "Podman"].contains(name));
    let allowed = other.and_then(|_| allowing(view));
    allowed.map_or_else(|| refusal.remedy(), str::to_owned)
}

fn sysctl(view: &View, tried: &RingProbe) -> Finding {
    let value: Option<u8> = view.number("proc/sys/kernel/io_uring_disabled");
    let group: i64 = view.number("proc/sys/kernel/io_uring_group").unwrap_or(-1);
    if let Err(refusal @ UringRefusal::Sysctl { .. }) = &tried.probe {
        let found = format!("{} (kernel.io_uring_group is {group})", refusal.cause());
        return SYSCTL.problem(found, refusal.remedy());
    }
    match value {
        None if !view.exists("proc/sys/kernel") => SYSCTL.unknown_without("/proc"),
        None => SYSCTL.ok("there is no kernel.io_uring_disabled here, so it forbids nothing"),
        Some(0) => SYSCTL.ok("kernel.io_uring_disabled is 0: allowed to all"),
        Some(value) => SYSCTL.warning(
            format!(
                "kernel.io_uring_disabled is {value} and kernel.io_uring_group is {group}: the daemon's user may be refused"
            ),
            "run this as the daemon's user; put its group in kernel.io_uring_group, or `sysctl kernel.io_uring_disabled=0`",
        ),
    }
}

fn seccomp(view: &View, tried: &RingProbe) -> Finding {
    let mode = view.line("proc/thread-self/status", "Seccomp:");
    let filters = view.line("proc/thread-self/status", "Seccomp_filters:");
    let filters = filters.map_or_else(String::new, |count| format!(" (filters: {count})"));
    match (&tried.probe, mode.as_deref()) {
        (Err(refusal @ UringRefusal::Seccomp { .. }), _) => {
            SECCOMP.problem(format!("{}{filters}", refusal.cause()), remedy(view, refusal))
        }
        (_, Some("0")) => SECCOMP.ok("no filter"),
        (Ok(_), Some("2")) => SECCOMP.ok(format!("a filter that allows io_uring{filters}")),
        (_, Some(mode)) => SECCOMP.note(format!("mode {mode}{filters}; something else refuses io_uring")),
        (_, None) => SECCOMP.note("unknown (is /proc mounted, with CONFIG_SECCOMP?)"),
    }
}

fn memlock(view: &View, tried: &RingProbe, needs: Needs) -> Finding {
    let cores = u64::from(needs.cores);
    let together = needs.memory_budget_bytes.saturating_mul(cores);
    let wanted = together.saturating_add(cores * RING_BYTES);
    let (budget, all) = (size(needs.memory_budget_bytes), size(together));
    let what = format!("{budget} of answer memory with {cores} rings, {all} together");
    let limit = tried
        .memlock_limit_bytes
        .map(|bytes| format!("the limit is {}", size(bytes)));
    let limit = limit.unwrap_or_else(|| "there is no limit".to_owned());
    let capable = capabilities(view) & CAP_IPC_LOCK != 0;
    let lifted = match (capable, in_user_namespace(view)) {
        (true, false) => ", which CAP_IPC_LOCK lifts for this process",
        // The kernel's capable() requires it outside the namespace.
        (true, true) => ", and CAP_IPC_LOCK in a user namespace does not lift it",
        (false, _) => "",
    };
    match &tried.memory {
        Ok(()) => {
            let each = tried_bytes(needs, tried.memlock_limit_bytes);
            let part = match each < needs.memory_budget_bytes {
                true => format!("of which {} were tried, ", size(each.saturating_mul(cores))),
                false => String::new(),
            };
            MEMLOCK.ok(format!("{what}, {part}can be registered; {limit}{lifted}"))
        }
        // The limit returns ENOMEM; one ring per core may need more descriptors than allowed.
        Err(error) if Errno::from_io_error(error) != Some(Errno::NOMEM) => MEMLOCK.note_with(
            format!("{what}, could not be tried: {error}"),
            "if it is for want of descriptors, raise the limit of open files (`ulimit -n`)",
        ),
        Err(error) => MEMLOCK.warning(
            format!("{what}, cannot be registered ({error}); {limit}{lifted}"),
            format!(
                "allow {wanted} bytes of locked memory (`ulimit -l {}`, LimitMEMLOCK={wanted} in systemd, --ulimit \
                 memlock={wanted} in Docker), or set engine.uring.registered_buffers: false",
                wanted.div_ceil(1024)
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;
    use ringfetch_host::tree::Tree;

    const NEEDS: Needs = Needs::new(64 << 20, 2, 1);
    const DISABLED: &str = "proc/sys/kernel/io_uring_disabled";
    const GROUP: &str = "proc/sys/kernel/io_uring_group";
    const STATUS: &str = "proc/thread-self/status";
    const FILTERED: &str = "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n";

    fn works() -> RingProbe {
        RingProbe {
            probe: Ok(UringFacts {
                kernel_release: "6.8.0".to_owned(),
                features: "nodrop".to_owned(),
                registered_buffers: Ok(()),
            }),
            memory: Ok(()),
            memlock_limit_bytes: Some(8 << 20),
        }
    }

    fn refused(refusal: UringRefusal) -> RingProbe {
        RingProbe {
            probe: Err(refusal),
            memory: Err(Errno::PERM.into()),
            ..works()
        }
    }

    fn by_id<'a>(checks: &'a [Finding], id: &str) -> &'a Finding {
        let found = checks.iter().find(|finding| finding.check.id == id);
        found.unwrap_or_else(|| panic!("no {id} in {checks:?}"))
    }

    /// Verdicts of setup, sysctl and seccomp.
    fn verdicts(checks: &[Finding]) -> [Verdict; 3] {
        ["io_uring.setup", "io_uring.sysctl", "io_uring.seccomp"].map(|id| by_id(checks, id).verdict)
    }

    #[test]
    fn the_one_who_refuses_is_the_one_with_the_problem() {
        // Refusals by sysctl, by a filter, and by a security module; no finding about registered memory.
        use Verdict::{Note, Ok, Problem};
        let tree = Tree::new(&[(DISABLED, "2\n"), (GROUP, "-1\n"), (STATUS, FILTERED)]);
        let checks = |refusal| checks(&tree.view(), &refused(refusal), NEEDS);
        let by_sysctl = checks(UringRefusal::Sysctl { value: 2 });
        assert_eq!(
            (by_sysctl.len(), verdicts(&by_sysctl)),
            (3, [Problem, Problem, Note]),
            "{by_sysctl:?}"
        );
        let remedy = by_id(&by_sysctl, "io_uring.sysctl")
            .remedy
            .as_deref()
            .expect("remedy");
        assert!(remedy.contains("sysctl kernel.io_uring_disabled=0"), "{remedy}");

        tree.write(DISABLED, "0\n");
        let by_filter = checks(UringRefusal::Seccomp { errno: 1 });
        assert_eq!(verdicts(&by_filter), [Problem, Ok, Problem]);
        let seccomp = by_id(&by_filter, "io_uring.seccomp");
        let remedy = seccomp.remedy.as_deref().expect("remedy");
        assert!(remedy.contains("deploy/seccomp/ringfetchd.json"), "{remedy}");
        assert!(seccomp.found.contains("filters: 1"), "{seccomp:?}");
        // Kubernetes knows no such option.
        tree.write("proc/self/cgroup", "0::/kubepods.slice/pod1.slice\n");
        let in_a_pod = checks(UringRefusal::Seccomp { errno: 1 });
        for id in ["io_uring.setup", "io_uring.seccomp"] {
            let remedy = by_id(&in_a_pod, id).remedy.as_deref().expect("remedy");
            assert!(remedy.contains("seccompProfile"), "{remedy}");
        }

        tree.write(STATUS, "Seccomp:\t0\n");
        assert_eq!(
            verdicts(&checks(UringRefusal::Denied { errno: 1 })),
            [Problem, Ok, Ok]
        );
    }

    #[test]
    fn what_works_for_one_user_may_be_refused_to_the_next() {
        // A ring that works although the sysctl names a group, and one on a kernel without sysctl or filter.
        let tree = Tree::new(&[(DISABLED, "1\n"), (GROUP, "997\n"), (STATUS, FILTERED)]);
        let found = checks(&tree.view(), &works(), NEEDS);
        assert_eq!(verdicts(&found), [Verdict::Ok, Verdict::Warning, Verdict::Ok]);
        assert!(
            by_id(&found, "io_uring.sysctl").found.contains("997"),
            "{found:?}"
        );

        let old = Tree::new(&[("proc/sys/kernel/ostype", "Linux\n")]);
        let found = checks(&old.view(), &works(), NEEDS);
        assert_eq!(verdicts(&found), [Verdict::Ok, Verdict::Ok, Verdict::Note]);
    }

    #[test]
    fn locked_memory_is_reported_with_what_it_takes() {
        // 64 MiB for 2 rings with a limit of 8 MiB: refused; allowed by CAP_IPC_LOCK; refused despite the
        // capability, in a user namespace; out of descriptors.
        let tree = Tree::new(&[("proc/self/status", "CapEff:\t0000000000000000\n")]);
        let mut tried = works();
        tried.memory = Err(Errno::NOMEM.into());
        let finding = memlock(&tree.view(), &tried, NEEDS);
        assert_eq!(finding.verdict, Verdict::Warning);
        let remedy = finding.remedy.expect("remedy");
        assert!(remedy.contains("ulimit -l 133120`"), "{remedy}");
        assert!(finding.found.contains("8.0 MiB"), "{}", finding.found);

        tree.write("proc/self/status", "CapEff:\t000001ffffffffff\n");
        tree.write("proc/self/uid_map", "         0          0 4294967295\n");
        let finding = memlock(&tree.view(), &works(), NEEDS);
        assert_eq!(finding.verdict, Verdict::Ok);
        assert!(finding.found.contains("CAP_IPC_LOCK lifts"), "{}", finding.found);

        tree.write("proc/self/uid_map", "         0       1000          1\n");
        let finding = memlock(&tree.view(), &tried, NEEDS);
        assert!(finding.found.contains("does not lift"), "{}", finding.found);

        tried.memory = Err(Errno::MFILE.into());
        assert_eq!(memlock(&tree.view(), &tried, NEEDS).verdict, Verdict::Note);
    }

    #[test]
    fn as_much_memory_is_tried_as_answers_the_question() {
        // Budgets for 4 rings below and beyond the bound; the largest of both, without a limit, with a small one and with
        // one beyond the bound: the least that exceeds it.
        let most = Needs::new(1 << 40, 1024, 1);
        for (needs, limit, each) in [
            (Needs::new(1 << 30, 4, 1), None, 1 << 30),
            (Needs::new(16 << 30, 4, 1), Some(8 << 20), 4 << 30),
            (most, None, 16 << 20),
            (most, Some(8 << 20), 16 << 20),
            (most, Some(1 << 40), (1 << 30) + 4),
            (most, Some(u64::MAX), 1 << 40),
        ] {
            assert_eq!(tried_bytes(needs, limit), each, "{needs:?} {limit:?}");
        }
        let finding = memlock(&Tree::new(&[]).view(), &works(), most);
        assert_eq!(finding.verdict, Verdict::Ok);
        assert!(
            finding
                .found
                .contains("1024.0 TiB together, of which 16.0 GiB were tried, can be"),
            "{}",
            finding.found
        );
    }

    #[test]
    fn memory_that_cannot_be_registered_is_a_warning() {
        let mut tried = works();
        if let Ok(facts) = &mut tried.probe {
            facts.registered_buffers = Err("no".to_owned());
        }
        let checks = checks(&Tree::new(&[]).view(), &tried, NEEDS);
        assert_eq!(
            by_id(&checks, "io_uring.registered_buffers").verdict,
            Verdict::Warning
        );
    }
}
