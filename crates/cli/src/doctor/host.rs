//! The machine: its kernel, the container or VM around this process, its clock.

use super::finding::{Check, Finding, checks};
use ringfetch_host::{View, chosen};

checks! {
    KERNEL = "kernel.release",
        "newer kernels give the engine more to work with; the probes below say what works";
    ENVIRONMENT = "host.environment",
        "a container's runtime sets the seccomp profile and the limits, whatever the host allows";
    CLOCK = "host.clock_source",
        "every read is timed: where the clock is not read in user space, each look at it is a system call";
    HUGE_PAGES = "memory.huge_pages",
        "with `always`, scattered memory is backed by 2 MiB pages, and more is used than the process touches";
}

/// Features by release, and what is lost without them. Sources: liburing's man pages io_uring_setup(2),
/// io_uring_enter(2) and io_uring_register(2); statx(2); cachestat(2).
const FEATURES: [((u32, u32), &str); 7] = [
    ((5, 1), "io_uring"),
    ((5, 6), "plain reads by a ring"),
    ((5, 11), "waits of a ring with a bound"),
    ((5, 19), "COOP_TASKRUN"),
    ((6, 0), "SINGLE_ISSUER"),
    ((6, 1), "the alignment of direct reads (STATX_DIOALIGN)"),
    ((6, 5), "cachestat, which backends auto and mmap ask"),
];
/// The release that the engine's own messages ask for.
const RELEASE_MIN: (u32, u32) = (5, 11);

/// Major and minor number of `6.18.44-generic`.
pub(super) fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

pub(super) fn kernel(release: &str) -> Finding {
    let Some(version) = version(release) else {
        return KERNEL.note(format!("{release}: an unknown version"));
    };
    let missing: Vec<String> = FEATURES
        .iter()
        .filter(|(since, _)| version < *since)
        .map(|((major, minor), what)| format!("{what} ({major}.{minor})"))
        .collect();
    let found = format!("{release}, without {}", missing.join(", "));
    if missing.is_empty() {
        KERNEL.ok(format!("{release}: has everything the engine uses"))
    } else if version < RELEASE_MIN {
        KERNEL.warning(
            found,
            "use kernel 6.5 or newer; uring and auto need at least 5.11",
        )
    } else {
        KERNEL.note_with(found, "use kernel 6.5 or newer")
    }
}

/// The container around this process, as far as it can be seen from inside.
pub(super) fn container(view: &View) -> Option<&'static str> {
    let files = [
        ("run/.containerenv", "Podman"),
        ("var/run/secrets/kubernetes.io", "Kubernetes"),
        (".dockerenv", "Docker"),
    ];
    if let Some((_, name)) = files.into_iter().find(|(path, _)| view.exists(path)) {
        return Some(name);
    }
    let named = view.text("run/systemd/container").unwrap_or_default();
    let groups = view.text("proc/self/cgroup").unwrap_or_default();
    let known = [
        ("kubepods", "Kubernetes"),
        ("docker", "Docker"),
        ("podman", "Podman"),
        ("libpod", "Podman"),
        ("lxc", "LXC"),
        ("systemd-nspawn", "systemd-nspawn"),
    ];
    let marked = |(mark, _): &(&str, _)| named.contains(mark) || groups.contains(mark);
    let unknown = (!named.is_empty()).then_some("some");
    known.into_iter().find(marked).map(|(_, name)| name).or(unknown)
}

/// Whether this is a user namespace: then capabilities do not reach the host's limits.
pub(super) fn in_user_namespace(view: &View) -> bool {
    view.text("proc/self/uid_map").is_some_and(|map| {
        let fields: Vec<&str> = map.split_whitespace().collect();
        !fields.is_empty() && fields != ["0", "0", "4294967295"]
    })
}

/// This process's effective set; 0: unknown.
pub(super) fn capabilities(view: &View) -> u64 {
    let set = view.line("proc/self/status", "CapEff:");
    set.and_then(|set| u64::from_str_radix(&set, 16).ok())
        .unwrap_or(0)
}

pub(super) fn environment(view: &View, ring_refused: bool) -> Finding {
    let mut found = match container(view) {
        Some(name) => format!("in a {name} container"),
        None => "no container detected".to_owned(),
    };
    if in_user_namespace(view) {
        found.push_str(", in a user namespace (rootless)");
    }
    if view.exists("run/systemd/system") {
        found.push_str(", systemd runs");
    }
    match allowing(view).filter(|_| ring_refused) {
        Some(remedy) => ENVIRONMENT.note_with(found, remedy),
        None => ENVIRONMENT.ok(found),
    }
}

/// How the container's runtime is told to allow io_uring. `None`: no container is detected.
pub(super) fn allowing(view: &View) -> Option<&'static str> {
    Some(match container(view)? {
        "Kubernetes" => {
            "allow io_uring_setup, io_uring_enter and io_uring_register in a profile of the runtime's own form \
             (securityContext.seccompProfile, type Localhost); deploy/seccomp/README.md says why Docker's format does not work"
        }
        "Docker" | "Podman" => {
            "run the container with --security-opt seccomp=deploy/seccomp/ringfetchd.json, and --ulimit memlock where \
             memory is to be registered"
        }
        _ => {
            "allow io_uring_setup, io_uring_enter and io_uring_register in the container's filter (lxc.seccomp.profile, \
             systemd-nspawn --system-call-filter)"
        }
    })
}

pub(super) fn clock_source(view: &View) -> Finding {
    const DIRECTORY: &str = "sys/devices/system/clocksource/clocksource0";
    let Some(source) = view.text(format!("{DIRECTORY}/current_clocksource")) else {
        return CLOCK.unknown_without("/sys");
    };
    // Only these are read in user space, by the vDSO: arch/*/include/asm/vdso/clocksource.h.
    let fast = "tsc kvm-clock hyperv_clocksource arch_sys_counter riscv_clocksource timebase";
    if fast.split(' ').any(|name| source.starts_with(name)) {
        return CLOCK.ok(source);
    }
    let available = view.text(format!("{DIRECTORY}/available_clocksource"));
    CLOCK.warning(
        format!("{source}, which needs a system call (available: {})", available.unwrap_or_default()),
        "where tsc or kvm-clock is available and stable: `echo tsc >/sys/devices/system/clocksource/clocksource0/current_clocksource`",
    )
}

pub(super) fn huge_pages(view: &View) -> Finding {
    let Some(modes) = view.text("sys/kernel/mm/transparent_hugepage/enabled") else {
        if !view.exists("sys/kernel/mm") {
            return HUGE_PAGES.unknown_without("/sys");
        }
        return HUGE_PAGES.ok("the kernel has no transparent huge pages");
    };
    match chosen(&modes) {
        Some("always") => HUGE_PAGES.note_with(
            "transparent huge pages: always",
            "`echo madvise >/sys/kernel/mm/transparent_hugepage/enabled`, if the daemon's resident memory is a concern",
        ),
        Some(mode) => HUGE_PAGES.ok(format!("transparent huge pages: {mode}")),
        None => HUGE_PAGES.note(format!("transparent huge pages: {modes}")),
    }
}
