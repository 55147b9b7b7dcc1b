//! `ringfetch doctor` on this host, and restricted: under a seccomp filter, with little lockable memory, as a user who
//! may read nothing.

use crate::seccomp::{ENOSYS, EPERM, without_io_uring};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs `ringfetch doctor` through another program that ends by running its arguments.
fn doctor_through(through: &[&str], args: &[&str]) -> Output {
    doctor_of(env!("CARGO_BIN_EXE_ringfetch"), through, args)
}

/// [`doctor_through`] for a copy of the binary.
fn doctor_of(binary: &str, through: &[&str], args: &[&str]) -> Output {
    let mut line = through.to_vec();
    line.extend([binary, "doctor"]);
    line.extend(args);
    let (program, args) = line.split_first().unwrap();
    Command::new(program).args(args).output().unwrap()
}

/// A run with --json that must end with this code.
fn examine(through: &[&str], args: &[&str], code: i32) -> Value {
    examine_with(env!("CARGO_BIN_EXE_ringfetch"), through, args, code)
}

/// [`examine`] with a copy of the binary.
fn examine_with(binary: &str, through: &[&str], args: &[&str], code: i32) -> Value {
    let mut all = vec!["--json"];
    all.extend(args);
    let output = doctor_of(binary, through, &all);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
    // 1: what is not well, in one line; 0: nothing.
    assert_eq!(error.lines().count(), usize::from(code != 0), "{args:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The check with this id, about this path if any.
fn check<'a>(report: &'a Value, id: &str, path: Option<&Path>) -> &'a Value {
    let path = path.map(|path| path.to_str().unwrap());
    let mut all = report["checks"].as_array().unwrap().iter();
    all.find(|check| check["id"] == id && check["path"].as_str() == path)
        .unwrap_or_else(|| panic!("no {id} for {path:?} in {report:#}"))
}

fn assert_verdict(report: &Value, id: &str, path: Option<&Path>, verdict: &str) {
    let found = check(report, id, path);
    assert_eq!(found["verdict"], verdict, "{found:#}");
}

/// The remedy of a check that must have this verdict.
fn remedy(report: &Value, id: &str, path: Option<&Path>, verdict: &str) -> String {
    assert_verdict(report, id, path, verdict);
    let found = check(report, id, path);
    found["remedy"]
        .as_str()
        .unwrap_or_else(|| panic!("no remedy: {found:#}"))
        .to_owned()
}

/// How a run ends that has no problem but those of the host: 1 where io_uring is unavailable.
fn code_of_the_host() -> i32 {
    i32::from(ringfetch_engine::probe::probe().is_err())
}

/// A directory on the file system that the build is on.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A directory that every user may enter, wherever the build is.
fn directory_for_all() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    directory
}

fn file(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    path
}

/// [`examine`] as a user with no other processes, since what a user has locked is counted over all of them; with a copy
/// of the binary, since that user may not be able to enter the directory of the build.
fn somebody(through: &[&str], args: &[&str], code: i32) -> Value {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let place = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let user = (1_000_000 + 16 * std::process::id() + place).to_string();
    let mut line = through.to_vec();
    line.extend(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"]);
    let directory = directory_for_all();
    let binary = directory.path().join("ringfetch");
    // By a process of its own: a descriptor that this one has open for writing, another test's child would inherit, and
    // the kernel executes no file that is open for writing.
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_ringfetch"))
        .arg(&binary)
        .status();
    assert!(copied.unwrap().success());
    examine_with(binary.to_str().unwrap(), &line, args, code)
}

/// A loop device, detached on drop.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn attach(file: &Path, direct_io: &str) -> Self {
        let output = Command::new("losetup")
            .args([&format!("--direct-io={direct_io}"), "--find", "--show"])
            .arg(file)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "losetup must be allowed (run as root): {error}"
        );
        Self(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // A test that fails already must not fail here a second time.
        let _stays_attached = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
#[ignore = "needs io_uring"]
fn a_host_where_all_works() {
    // Scenario: this host, whose CI demands io_uring, with a file and a directory of objects on the build's file system.
    // Expectation: exit code 0; everything about the ring ok; the path opened, read directly and through a ring; the
    // page cache asked; the backends and a choice; the file system ok if it is a local one that is known.
    let directory = directory();
    let path = file(directory.path(), "blocks.bin");
    let report = examine(
        &[],
        &[path.to_str().unwrap(), directory.path().to_str().unwrap()],
        0,
    );
    for id in [
        "io_uring.setup",
        "io_uring.seccomp",
        "io_uring.registered_files",
        "io_uring.registered_buffers",
    ] {
        assert_verdict(&report, id, None, "ok");
    }
    for path in [path.as_path(), directory.path()] {
        for id in ["path.open", "path.direct_io", "path.ring_read", "path.residency"] {
            assert_verdict(&report, id, Some(path), "ok");
        }
    }
    let found = check(&report, "path.residency", Some(&path))["found"]
        .as_str()
        .unwrap();
    assert!(found.starts_with("100 % of 1.0 MiB"), "{found}");
    let kind = Command::new("stat")
        .args(["-f", "-c", "%T"])
        .arg(&path)
        .output()
        .unwrap();
    let kind = String::from_utf8(kind.stdout).unwrap();
    let local = ["ext2/ext3", "xfs"].contains(&kind.trim());
    let system = check(&report, "path.file_system", Some(&path));
    assert_eq!(system["verdict"] == "ok", local, "{kind}: {system:#}");
    if local {
        check(&report, "device.stack", Some(&path));
    }
    let runs = &report["backends"]["runs"];
    assert!(
        runs["uring"] == true && runs["auto"] == true && runs["mmap"] == true,
        "{runs}"
    );
    assert_eq!(
        report["backends"]["take"], "mmap",
        "it is warm, and fits: {report:#}"
    );
}

#[test]
#[ignore = "needs io_uring"]
fn json_has_the_documented_ids_and_fields() {
    // Scenario: a run with a file, against docs/DOCTOR.md. Expectation: no id that is not documented; all of the host's;
    // each check with every field; a remedy for each warning.
    let document = include_str!("../../../../docs/DOCTOR.md");
    let documented: Vec<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .collect();
    let directory = directory();
    let path = file(directory.path(), "x");
    let report = examine(&[], &[path.to_str().unwrap()], 0);
    let checks = report["checks"].as_array().unwrap();
    for check in checks {
        let id = check["id"].as_str().unwrap();
        assert!(documented.contains(&id), "{id} is not in docs/DOCTOR.md");
        let mut keys: Vec<_> = check.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["found", "id", "path", "remedy", "verdict", "why"]);
        assert!(
            check["verdict"] != "warning" || check["remedy"].is_string(),
            "{check:#}"
        );
    }
    let of_host = documented
        .iter()
        .filter(|id| !id.starts_with("path.") && !id.starts_with("device."));
    for id in of_host.chain(&[
        "path.open",
        "path.file_system",
        "path.direct_io",
        "path.residency",
    ]) {
        assert!(checks.iter().any(|check| check["id"] == *id), "no {id}");
    }
    for field in [
        "version",
        "kernel_release",
        "user",
        "memory_budget_bytes",
        "cores",
        "verdict",
        "mend_first",
    ] {
        assert!(!report[field].is_null(), "no {field}");
    }
}

#[test]
#[ignore = "needs io_uring"]
fn text_is_a_line_a_check() {
    // Scenario: text to a pipe, with a path that is not there beside one that is. Expectation: exit code 1 and its name on
    // stderr; a line for each check of the JSON, aligned; why and how to fix it below the problem; the summary; no colour.
    let directory = directory();
    let path = file(directory.path(), "there");
    let gone = directory.path().join("gone");
    let args = [path.to_str().unwrap(), gone.to_str().unwrap()];
    let report = examine(&[], &args, 1);
    let output = doctor_through(&[], &args);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("path.open") && error.contains("gone"), "{error}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains('\x1b'), "{text}");
    let mut columns = Vec::new();
    for check in report["checks"].as_array().unwrap() {
        let start = format!(
            "  {:<7}  {} ",
            check["verdict"].as_str().unwrap(),
            check["id"].as_str().unwrap()
        );
        let line = text.lines().find(|line| line.starts_with(&start));
        let line = line.unwrap_or_else(|| panic!("no {start:?} in {text}"));
        let rest = line[start.len()..].trim_start();
        columns.push(line.len() - rest.len());
    }
    assert!(columns.iter().all(|column| *column == columns[0]), "{columns:?}");
    let after = text.split("does not exist\n").nth(1).unwrap();
    let lines: Vec<&str> = after.lines().map(str::trim_start).collect();
    assert!(
        lines[0].starts_with("why: ") && lines[1].starts_with("fix: "),
        "{after}"
    );
    for part in [
        "backends that run here: uring, auto, mmap, pread",
        "\ntake: ",
        "fix first:\n  1. path.open",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn a_seccomp_filter_is_named_with_its_remedy() {
    // Scenario: a filter that answers EPERM (Docker's), and one that answers ENOSYS (Podman's), to io_uring_setup; no path.
    // Expectation: exit code 1, problems at setup and seccomp with the profile to use, one of them to fix first;
    // nothing said of what a ring could do; mmap is what runs.
    for errno in [EPERM, ENOSYS] {
        let report = without_io_uring(errno, || examine(&[], &[], 1));
        for id in ["io_uring.setup", "io_uring.seccomp"] {
            let remedy = remedy(&report, id, None, "problem");
            assert!(
                remedy.contains("seccomp=deploy/seccomp/ringfetchd.json"),
                "{remedy}"
            );
        }
        assert_verdict(&report, "io_uring.sysctl", None, "ok");
        let ids = report["checks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|check| &check["id"]);
        assert!(
            !ids.into_iter().any(|id| id == "io_uring.registered_files"),
            "{report:#}"
        );
        assert_eq!(report["mend_first"][0]["check"], "io_uring.setup");
        let backends = &report["backends"];
        assert!(
            backends["runs"]["uring"] == false && backends["runs"]["mmap"] == true,
            "{backends}"
        );
        assert_eq!(backends["take"], "mmap");
    }
}

#[test]
#[ignore = "needs root and io_uring"]
fn little_lockable_memory_is_a_warning() {
    // Scenario: a user without privileges, 1 MiB of lockable memory; 512 KiB of answer memory with 1 ring, with 4, with 4
    // and --strict; then with what the remedy asks for. Expectation: one ring fits; for four a warning, exit code 0, with
    // --strict 1; with the remedy carried out all is well.
    let through = ["prlimit", "--memlock=1048576"];
    let budget = ["--memory-budget", "512KiB", "--cores"];
    let report = somebody(&through, &[&budget[..], &["1"]].concat(), 0);
    assert_verdict(&report, "limits.memlock", None, "ok");
    let report = somebody(&through, &[&budget[..], &["4"]].concat(), 0);
    let asked = remedy(&report, "limits.memlock", None, "warning");
    let rest = asked.split_once("LimitMEMLOCK=").unwrap().1;
    let bytes: u64 = rest.split(' ').next().unwrap().parse().unwrap();
    assert!(
        bytes >= 4 * (512 << 10) && asked.contains(&format!("ulimit -l {}`", bytes / 1024)),
        "{asked}"
    );
    somebody(&through, &[&budget[..], &["4", "--strict"]].concat(), 1);
    let raised = format!("--memlock={bytes}");
    let report = somebody(&["prlimit", &raised], &[&budget[..], &["4"]].concat(), 0);
    assert_verdict(&report, "limits.memlock", None, "ok");
}

#[test]
fn memory_is_no_device() {
    // Scenario: a file on tmpfs, with and without --strict. Expectation: a warning that it is memory; no device; mmap to
    // be taken; no problem but the host's; exit code 1 with --strict.
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = file(directory.path(), "x");
    let shown = path.to_str().unwrap();
    let report = examine(&[], &[shown], code_of_the_host());
    assert!(remedy(&report, "path.file_system", Some(&path), "warning").contains("mmap"));
    let ids = report["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|check| check["id"].as_str().unwrap());
    assert!(!ids.into_iter().any(|id| id.starts_with("device.")), "{report:#}");
    assert_eq!(report["backends"]["take"], "mmap");
    examine(&[], &["--strict", shown], 1);
}

#[test]
#[ignore = "needs root and io_uring"]
fn paths_that_cannot_be_read_fail_with_the_remedy() {
    // Scenario: a path that is missing, one that another user may not read, an empty file, a fifo, a directory without
    // objects and one with an object that may not be read. Expectation: problems, exit code 1 and no hanging; for
    // directories warnings; the readable file beside them is examined all the same.
    let directory = directory_for_all();
    let here = |name: &str| directory.path().join(name);
    let (good, secret) = (file(directory.path(), "good"), file(directory.path(), "secret"));
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(here("empty"), "").unwrap();
    let made = Command::new("mkfifo").arg(here("fifo")).status().unwrap();
    assert!(made.success());
    std::fs::create_dir(here("none")).unwrap();
    std::fs::create_dir(here("some")).unwrap();
    file(&here("some"), "a");
    let hidden = file(&here("some"), "b");
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600)).unwrap();

    let paths = ["gone", "secret", "empty", "fifo", "none", "some", "good"].map(here);
    let args: Vec<&str> = paths.iter().map(|path| path.to_str().unwrap()).collect();
    let report = somebody(&[], &args, 1);
    let fix = |name: &str, verdict| remedy(&report, "path.open", Some(&here(name)), verdict);
    assert!(fix("gone", "problem").contains("correct the path"));
    assert!(fix("secret", "problem").contains("let the daemon's user read it"));
    assert!(fix("empty", "problem").contains("write it first"));
    assert!(fix("fifo", "problem").contains("name a regular file"));
    assert!(fix("none", "warning").contains("put objects there"));
    assert!(fix("some", "warning").contains("let the daemon's user read them"));
    let object = check(&report, "path.open", Some(&here("some")))["found"]
        .as_str()
        .unwrap();
    assert!(object.contains("b: "), "{object}");
    assert_verdict(&report, "path.open", Some(&good), "ok");
    assert_verdict(&report, "path.ring_read", Some(&good), "ok");
}

#[test]
#[ignore = "needs root and io_uring"]
fn a_loop_device_is_seen_through() {
    // Scenario: a loop device that goes through the page cache, and one that does not. Expectation: read directly and
    // through a ring, as a device without a file system; a warning with losetup's option for the first, none for the
    // second; the file beneath is named.
    let directory = directory();
    let images = ["cached", "direct"].map(|name| file(directory.path(), name));
    let devices = [
        LoopDevice::attach(&images[0], "off"),
        LoopDevice::attach(&images[1], "on"),
    ];
    let args = [devices[0].0.to_str().unwrap(), devices[1].0.to_str().unwrap()];
    let report = examine(&[], &args, 0);
    for device in &devices {
        for id in [
            "path.open",
            "path.file_system",
            "path.direct_io",
            "path.ring_read",
        ] {
            assert_verdict(&report, id, Some(&device.0), "ok");
        }
    }
    let first = remedy(&report, "device.stack", Some(&devices[0].0), "warning");
    assert!(
        first.contains(&format!("losetup --direct-io=on {}", args[0])),
        "{first}"
    );
    assert_verdict(&report, "device.stack", Some(&devices[1].0), "ok");
    let found = check(&report, "device.stack", Some(&devices[1].0))["found"]
        .as_str()
        .unwrap();
    assert!(found.contains("direct)"), "{found}");
}

#[test]
#[ignore = "needs root and io_uring"]
fn container_layers_are_told_apart_from_volumes() {
    // Scenario: an overlayfs over a file that is in the page cache, mounted for this run alone. Expectation: warnings that
    // it is a container's layers, and that backend auto would take all of it for cold, which it then is not to be.
    const MOUNT: &str =
        "mount -t overlay overlay -o lowerdir=$1/l,upperdir=$1/u,workdir=$1/w $1/m && shift && exec \"$@\"";
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    for name in ["l", "u", "w", "m"] {
        std::fs::create_dir(directory.path().join(name)).unwrap();
    }
    file(&directory.path().join("l"), "x");
    let path = directory.path().join("m/x");
    let root = directory.path().to_str().unwrap();
    let through = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", root];
    let report = examine(&through, &[path.to_str().unwrap()], 0);
    assert!(remedy(&report, "path.file_system", Some(&path), "warning").contains("volume"));
    let asked = remedy(&report, "path.residency", Some(&path), "warning");
    assert!(asked.contains("uring or mmap"), "{asked}");
    assert_ne!(report["backends"]["take"], "auto");
}

#[test]
fn few_descriptors_are_enough_to_say_so() {
    // Scenario: 32 descriptors, and a directory of 200 objects. Expectation: all objects are looked at, and the limit is a
    // warning.
    let directory = directory();
    for name in 0..200 {
        std::fs::write(directory.path().join(name.to_string()), "x").unwrap();
    }
    let report = examine(
        &["prlimit", "--nofile=32:32"],
        &[directory.path().to_str().unwrap()],
        code_of_the_host(),
    );
    let found = check(&report, "path.open", Some(directory.path()))["found"]
        .as_str()
        .unwrap();
    assert!(found.contains("200 objects"), "{found}");
    assert!(remedy(&report, "limits.open_files", None, "warning").contains("LimitNOFILE"));
}

#[test]
fn wrong_usage_is_exit_code_2() {
    // Scenario: sizes and counts that cannot be, an unknown flag. Expectation: exit code 2, nothing on stdout.
    for args in [
        &["--memory-budget", "16MB"][..],
        &["--cores", "0"],
        &["--config", "ringfetchd.yaml"],
    ] {
        let output = doctor_through(&[], args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}
