//! Properties of all checks together.

use super::*;
use ringfetch_host::tree::Tree;
use std::fs;

#[test]
fn the_document_lists_every_check() {
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
    ]
    .concat();
    let mut ids: Vec<&str> = all.iter().map(|check| check.id).collect();
    ids.sort_unstable();
    assert_eq!(documented, ids);
    ids.dedup();
    assert_eq!(documented.len(), ids.len(), "an id stands for one check");
}

#[test]
fn kernels_are_reported_with_what_they_lack() {
    for release in ["6.5.0", "6.18.44-fc-v657", "6.8.0-45-generic", "10.0-rc1"] {
        assert_eq!(host::kernel(release).verdict, Verdict::Ok, "{release}");
    }
    let noted = host::kernel("5.15.0-91-generic");
    assert_eq!(noted.verdict, Verdict::Note);
    let lacks = |feature| noted.found.contains(feature);
    assert!(
        lacks("cachestat") && lacks("COOP_TASKRUN") && !lacks("(5.11)"),
        "{noted:?}"
    );
    let old = host::kernel("4.18.0-553.el8.x86_64");
    assert!(
        old.verdict == Verdict::Warning && old.found.contains("io_uring (5.1)"),
        "{old:?}"
    );
    for release in ["", "six", "6", "99999999999.1"] {
        assert_eq!(host::kernel(release).verdict, Verdict::Note, "{release}");
    }
}

#[test]
fn containers_are_recognised_by_what_they_leave() {
    // With io_uring refused the container is noted; otherwise it is ok.
    const UID_MAP: &str = "proc/self/uid_map";
    let profile = "--security-opt seccomp=deploy/seccomp/ringfetchd.json";
    for (files, name, rootless, remedy) in [
        (
            &[(".dockerenv", ""), (UID_MAP, "0 0 4294967295\n")][..],
            "Docker",
            false,
            profile,
        ),
        (
            &[("run/.containerenv", ""), (UID_MAP, "0 1000 1\n")],
            "Podman",
            true,
            profile,
        ),
        (
            &[("proc/self/cgroup", "0::/kubepods.slice/pod1.slice\n")],
            "Kubernetes",
            false,
            "seccompProfile",
        ),
        (
            &[("run/systemd/container", "lxc\n")],
            "LXC",
            false,
            "lxc.seccomp.profile",
        ),
    ] {
        let view = Tree::new(files);
        let finding = host::environment(&view.view(), true);
        assert_eq!(finding.verdict, Verdict::Note);
        assert!(finding.found.contains(name), "{finding:?}");
        assert_eq!(finding.found.contains("rootless"), rootless, "{finding:?}");
        assert!(finding.remedy.is_some_and(|text| text.contains(remedy)));
        assert_eq!(host::environment(&view.view(), false).verdict, Verdict::Ok);
    }
    let none = Tree::new(&[
        ("run/systemd/system/x", ""),
        ("proc/self/cgroup", "0::/init.scope\n"),
    ]);
    let finding = host::environment(&none.view(), true);
    assert!(
        finding.verdict == Verdict::Ok && finding.found.contains("no container"),
        "{finding:?}"
    );
}

#[test]
fn clocks_and_huge_pages() {
    const CLOCK: &str = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    const PAGES: &str = "sys/kernel/mm/transparent_hugepage/enabled";
    let tree = Tree::new(&[("sys/kernel/mm/ksm/run", "0\n")]);
    for (clock, verdict) in [("tsc\n", Verdict::Ok), ("hpet\n", Verdict::Warning)] {
        tree.write(CLOCK, clock);
        assert_eq!(host::clock_source(&tree.view()).verdict, verdict);
    }
    assert_eq!(host::huge_pages(&tree.view()).verdict, Verdict::Ok);
    for (modes, verdict) in [
        ("always [madvise] never\n", Verdict::Ok),
        ("[always] madvise never\n", Verdict::Note),
    ] {
        tree.write(PAGES, modes);
        assert_eq!(host::huge_pages(&tree.view()).verdict, verdict);
    }
}

#[test]
fn a_host_without_proc_and_sys_gets_notes() {
    let tree = Tree::new(&[]);
    let (view, group) = (tree.view(), Cgroup::of_this_process(&tree.view()));
    let needs = Needs::new(1 << 20, 1, 0);
    let mut checks = limits::checks(&view, &group, 1, needs);
    checks.extend([
        host::clock_source(&view),
        host::huge_pages(&view),
        host::environment(&view, true),
    ]);
    // The kernel, not /proc, reports this process's own limit of open files.
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
    // A check of the host, and two paths on one device with a warning, which the text shows once.
    let check = |id, why| finding::Check { id, why };
    let device = check("device.tags", "few tags").warning("8", "more");
    let host = check("kernel.release", "w").ok("6.18");
    let checks = vec![host, device.clone().about("/a"), device.about("/b")];
    let summary = summary::Summary::of(&checks, &[], true, None);
    let (release, user, needs) = ("6.18".to_owned(), 7, Needs::new(1 << 20, 1, 2));
    let report = Report {
        release,
        user,
        needs,
        checks,
        summary,
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
