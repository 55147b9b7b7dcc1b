//! What holds over all checks.

use super::*;
use ringfetch_host::tree::Tree;
use std::fs;

#[test]
fn the_document_lists_every_check() {
    // Scenario: docs/DOCTOR.md against the checks in the code. Expectation: the same ids, each once.
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/DOCTOR.md")).unwrap();
    let mut documented: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .collect();
    documented.sort_unstable();
    let all = [
        host::CHECKS,
        ring::CHECKS,
        limits::CHECKS,
        paths::CHECKS,
        block::CHECKS,
    ];
    let mut ids: Vec<&str> = all.iter().copied().flatten().map(|check| check.id).collect();
    ids.sort_unstable();
    assert_eq!(documented, ids);
    ids.dedup();
    assert_eq!(documented.len(), ids.len(), "an id stands for one check");
}

#[test]
fn kernels_are_told_with_what_they_lack() {
    // Scenario: releases of distributions, old and new, and nonsense. Expectation: ok from 6.5 on, a note that names
    // what is missing before, a warning before 5.11; no panic.
    let told = |release: &str| {
        let finding = host::kernel(release);
        (finding.verdict, finding.found)
    };
    for release in ["6.5.0", "6.18.44-fc-v657", "6.8.0-45-generic", "10.0-rc1"] {
        assert_eq!(told(release).0, Verdict::Ok, "{release}");
    }
    let (verdict, found) = told("5.15.0-91-generic");
    assert_eq!(verdict, Verdict::Note);
    assert!(
        found.contains("cachestat") && found.contains("COOP_TASKRUN"),
        "{found}"
    );
    assert!(!found.contains("(5.11)"), "{found}");
    let (verdict, found) = told("4.18.0-553.el8.x86_64");
    assert_eq!(verdict, Verdict::Warning);
    assert!(found.contains("io_uring (5.1)"), "{found}");
    for release in ["", "six", "6", "99999999999.1"] {
        assert_eq!(told(release).0, Verdict::Note, "{release}");
    }
}

#[test]
fn containers_are_recognised_by_what_they_leave() {
    // Scenario: Docker, Podman rootless, Kubernetes, LXC, none; with io_uring refused and not. Expectation: the name; a
    // note with the runtime's own remedy only where io_uring is refused.
    let docker = Tree::new(&[(".dockerenv", ""), ("proc/self/uid_map", "0 0 4294967295\n")]);
    let finding = host::environment(&docker.view(), true);
    assert_eq!(finding.verdict, Verdict::Note);
    assert!(
        finding.found.contains("Docker") && !finding.found.contains("rootless"),
        "{finding:?}"
    );
    let remedy = finding.remedy.unwrap_or_default();
    assert!(
        remedy.contains("--security-opt seccomp=deploy/seccomp/ringfetchd.json"),
        "{remedy}"
    );
    assert_eq!(host::environment(&docker.view(), false).verdict, Verdict::Ok);

    let podman = Tree::new(&[("run/.containerenv", ""), ("proc/self/uid_map", "0 1000 1\n")]);
    let finding = host::environment(&podman.view(), true);
    assert!(
        finding.found.contains("Podman") && finding.found.contains("rootless"),
        "{finding:?}"
    );

    let pod = Tree::new(&[("proc/self/cgroup", "0::/kubepods.slice/kubepods-pod1.slice\n")]);
    let remedy = host::environment(&pod.view(), true).remedy.unwrap_or_default();
    assert!(remedy.contains("seccompProfile"), "{remedy}");

    let lxc = Tree::new(&[("run/systemd/container", "lxc\n")]);
    assert_eq!(host::container(&lxc.view()), Some("LXC"));
    let none = Tree::new(&[
        ("run/systemd/system/x", ""),
        ("proc/self/cgroup", "0::/init.scope\n"),
    ]);
    let finding = host::environment(&none.view(), true);
    assert_eq!(finding.verdict, Verdict::Ok);
    assert!(finding.found.contains("no container"), "{finding:?}");
}

#[test]
fn clocks_and_huge_pages() {
    // Scenario: tsc and hpet; always, madvise, and a kernel without. Expectation: ok and a warning; a note, ok, ok.
    const CLOCK: &str = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    let tree = Tree::new(&[(CLOCK, "tsc\n"), ("sys/kernel/mm/ksm/run", "0\n")]);
    assert_eq!(host::clock_source(&tree.view()).verdict, Verdict::Ok);
    tree.write(CLOCK, "hpet\n");
    assert_eq!(host::clock_source(&tree.view()).verdict, Verdict::Warning);
    assert_eq!(host::huge_pages(&tree.view()).verdict, Verdict::Ok);
    const PAGES: &str = "sys/kernel/mm/transparent_hugepage/enabled";
    tree.write(PAGES, "always [madvise] never\n");
    assert_eq!(host::huge_pages(&tree.view()).verdict, Verdict::Ok);
    tree.write(PAGES, "[always] madvise never\n");
    assert_eq!(host::huge_pages(&tree.view()).verdict, Verdict::Note);
}

#[test]
fn a_host_that_tells_nothing_is_not_blamed() {
    // Scenario: /proc and /sys not mounted. Expectation: notes that say so, and nothing worse; no limit is made up.
    let tree = Tree::new(&[]);
    let (view, group) = (tree.view(), Cgroup::of_this_process(&tree.view()));
    let needs = Needs {
        memory_budget_bytes: 1 << 20,
        cores: 1,
        paths: 0,
    };
    let mut checks = limits::checks(&view, &group, 1, needs);
    checks.extend([
        host::clock_source(&view),
        host::huge_pages(&view),
        host::environment(&view, true),
    ]);
    // This process's own limit of open files is asked of the kernel, not of /proc.
    checks.retain(|finding| finding.check.id != "limits.open_files");
    assert!(
        checks.iter().all(|finding| finding.verdict <= Verdict::Note),
        "{checks:?}"
    );
    let notes = checks
        .iter()
        .filter(|finding| finding.found.starts_with("unknown (is"));
    assert_eq!(notes.count(), 5, "{checks:?}");
    assert_eq!(limits::cache_room(&view, &group, needs), None);
}

#[test]
fn the_report_is_text_for_people_and_json_for_scripts() {
    // Scenario: a host's check, and two paths on one device with a warning, told with and without colour and as JSON.
    // Expectation: aligned lines, details under what is not ok, the second path's device not told again, escape sequences
    // only with colour; in JSON everything, with the worst verdict.
    const HOST: finding::Check = finding::Check {
        id: "kernel.release",
        why: "w",
    };
    const DEVICE: finding::Check = finding::Check {
        id: "device.tags",
        why: "few tags",
    };
    let checks = vec![
        HOST.ok("6.18"),
        DEVICE.warning("8", "more").about("/a"),
        DEVICE.warning("8", "more").about("/b"),
    ];
    let report = Report {
        release: "6.18".to_owned(),
        user: 7,
        needs: Needs {
            memory_budget_bytes: 1 << 20,
            cores: 1,
            paths: 2,
        },
        summary: summary::Summary::of(&checks, &[], true, None),
        checks,
    };
    let text = |colour| {
        let mut out = Vec::new();
        report.write(&mut out, colour).unwrap();
        String::from_utf8(out).unwrap()
    };
    let plain = text(false);
    let want = "\nhost\n  ok       kernel.release  6.18\n\n/a\n  warning  device.tags     8\n             why: few \
                tags\n             fix: more\n\n/b\n  and of the device, as above: 1\n";
    assert!(plain.contains(want), "{plain}");
    assert!(
        plain.ends_with("problems: 0, warnings: 2, notes: 0, ok: 1\n"),
        "{plain}"
    );
    assert!(!plain.contains('\x1b') && text(true).contains("\x1b[33mwarning\x1b[0m"));
    let json = report.json();
    assert_eq!(
        (&json["verdict"], json["checks"].as_array().map(Vec::len)),
        (&"warning".into(), Some(3))
    );
    assert_eq!(json["checks"][2]["path"], "/b");
    assert_eq!(
        report.at_least(Verdict::Warning),
        ["device.tags (/a)", "device.tags (/b)"]
    );
    assert!(report.at_least(Verdict::Problem).is_empty());
}
