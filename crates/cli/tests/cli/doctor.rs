//! `ringfetch doctor` on this host, and restricted: under a seccomp filter, with little lockable memory, as a
//! user without permissions.

use crate::loop_device::LoopDevice;
use crate::program;
use crate::seccomp::{ENOSYS, EPERM, without_io_uring};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

const BINARY: &str = env!("CARGO_BIN_EXE_ringfetch");
/// The path of checks of the host.
const HOST: &str = "";

/// Runs `ringfetch doctor` through another program that ends by running its arguments.
fn doctor(binary: &str, through: &[&str], args: &[&str]) -> Output {
    let line = [through, &[binary, "doctor"], args].concat();
    program(line[0]).args(&line[1..]).output().unwrap()
}

struct Report(Value);

impl Report {
    /// The report of a run that must end with this code.
    fn of(binary: &str, through: &[&str], args: &[&str], code: i32) -> Self {
        let output = doctor(binary, through, &[&["--json"], args].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        // 1: what is not well, in one line; 0: nothing.
        assert_eq!(error.lines().count(), usize::from(code != 0), "{args:?}: {error}");
        Self(serde_json::from_slice(&output.stdout).unwrap())
    }

    fn checks(&self) -> &[Value] {
        self.0["checks"].as_array().unwrap()
    }

    fn has(&self, id: &str) -> bool {
        self.checks().iter().any(|check| check["id"] == id)
    }

    /// The check with this id, for this path or [`HOST`], which must have this verdict.
    #[track_caller]
    fn check(&self, id: &str, path: &str, verdict: &str) -> &Value {
        let about = |check: &&Value| check["id"] == id && check["path"].as_str().unwrap_or(HOST) == path;
        let found = self.checks().iter().find(about);
        let found = found.unwrap_or_else(|| panic!("no {id} for {path:?} in {:#}", self.0));
        assert_eq!(found["verdict"], verdict, "{found:#}");
        found
    }

    #[track_caller]
    fn found(&self, id: &str, path: &str, verdict: &str) -> &str {
        self.check(id, path, verdict)["found"].as_str().unwrap()
    }

    #[track_caller]
    fn remedy(&self, id: &str, path: &str, verdict: &str) -> &str {
        let check = self.check(id, path, verdict);
        check["remedy"]
            .as_str()
            .unwrap_or_else(|| panic!("no remedy: {check:#}"))
    }

    /// Whether this backend can run.
    fn runs(&self, backend: &str) -> bool {
        self.0["backends"]["runs"][backend].as_bool().unwrap()
    }

    /// The recommended backend.
    fn take(&self) -> &str {
        self.0["backends"]["take"].as_str().unwrap()
    }
}

fn examine(args: &[&str], code: i32) -> Report {
    Report::of(BINARY, &[], args, code)
}

/// Exit code of a run whose only problems are the host's: 1 if io_uring is unavailable.
fn code_of_the_host() -> i32 {
    i32::from(ringfetch_engine::probe::probe().is_err())
}

/// The ids that docs/DOCTOR.md lists.
fn documented() -> Vec<&'static str> {
    let lines = include_str!("../../../../docs/DOCTOR.md").lines();
    lines
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .collect()
}

/// A directory on the file system of the build.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A directory that every user may enter, wherever the build is.
fn directory_for_all() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    set_mode(directory.path(), 0o755);
    directory
}

fn set_mode(path: impl AsRef<Path>, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn file(directory: &Path, name: &str) -> String {
    let path = directory.join(name);
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    text(&path).to_owned()
}

/// [`examine`] as a user with no other processes, since locked memory is counted over all of a user's
/// processes; with a copy of the binary, since that user may not be able to enter the build directory.
fn somebody(through: &[&str], args: &[&str], code: i32) -> Report {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let place = NEXT.fetch_add(1, Ordering::Relaxed);
    let user = (1_000_000 + 16 * std::process::id() + place).to_string();
    let as_user = ["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"];
    let directory = directory_for_all();
    let binary = directory.path().join("ringfetch");
    // Copied by another process: if this one had the file open for writing, another test's child would
    // inherit the descriptor, and the kernel does not execute a file that is open for writing.
    let copied = Command::new("cp").arg(BINARY).arg(&binary).status();
    assert!(copied.unwrap().success());
    Report::of(text(&binary), &[through, &as_user].concat(), args, code)
}

#[test]
#[ignore = "needs io_uring"]
fn a_host_where_all_works() {
    // A file and a directory of objects on the build's file system, which is itself ok if it is local.
    let directory = directory();
    let path = file(directory.path(), "blocks.bin");
    let report = examine(&[&path, text(directory.path())], 0);
    for id in ["setup", "seccomp", "registered_buffers"] {
        report.check(&format!("io_uring.{id}"), HOST, "ok");
    }
    for path in [&path, text(directory.path())] {
        for id in ["path.open", "path.direct_io", "path.ring_read", "path.residency"] {
            report.check(id, path, "ok");
        }
    }
    let found = report.found("path.residency", &path, "ok");
    assert!(found.starts_with("100 % of 1.0 MiB"), "{found}");
    let kind = Command::new("stat")
        .args(["-f", "-c", "%T", &path])
        .output()
        .unwrap();
    let kind = String::from_utf8(kind.stdout).unwrap();
    if ["ext2/ext3", "xfs"].contains(&kind.trim()) {
        report.check("path.file_system", &path, "ok");
        assert!(report.has("device.stack"), "{:#}", report.0);
    } else {
        let ok = |check: &Value| check["id"] == "path.file_system" && check["verdict"] == "ok";
        assert!(!report.checks().iter().any(ok), "{kind}: {:#}", report.0);
    }
    assert!(
        ["uring", "auto", "mmap"]
            .iter()
            .all(|backend| report.runs(backend)),
        "{:#}",
        report.0
    );
    assert_eq!(report.take(), "mmap", "it is warm, and fits: {:#}", report.0);
}

#[test]
#[ignore = "needs io_uring"]
fn json_has_the_documented_ids_and_fields() {
    let documented = documented();
    let directory = directory();
    let report = examine(&[&file(directory.path(), "x")], 0);
    for check in report.checks() {
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
    let of_host = |id: &&&str| !id.starts_with("path.") && !id.starts_with("device.");
    let of_paths = [
        "path.open",
        "path.file_system",
        "path.direct_io",
        "path.residency",
    ];
    for id in documented.iter().filter(of_host).chain(&of_paths) {
        assert!(report.has(id), "no {id}");
    }
    for field in "version kernel_release user memory_budget_bytes cores verdict fix_first".split(' ') {
        assert!(!report.0[field].is_null(), "no {field}");
    }
}

#[test]
#[ignore = "needs io_uring"]
fn text_is_a_line_a_check() {
    // To a pipe, with an existing path and a missing one.
    let directory = directory();
    let path = file(directory.path(), "there");
    let gone = directory.path().join("gone");
    let args = [path.as_str(), text(&gone)];
    let report = examine(&args, 1);
    let output = doctor(BINARY, &[], &args);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("path.open") && error.contains("gone"), "{error}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains('\x1b'), "{text}");
    let column = |check: &Value| {
        let [verdict, id] = ["verdict", "id"].map(|field| check[field].as_str().unwrap());
        let start = format!("  {verdict:<7}  {id} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        let found = line.unwrap_or_else(|| panic!("no {start:?} in {text}"));
        start.len() + found.len() - found.trim_start().len()
    };
    let columns: Vec<usize> = report.checks().iter().map(column).collect();
    assert!(columns.iter().all(|column| *column == columns[0]), "{columns:?}");
    let mut after = text
        .split("does not exist\n")
        .nth(1)
        .unwrap()
        .lines()
        .map(str::trim_start);
    assert!(after.next().unwrap().starts_with("why: "), "{text}");
    assert!(after.next().unwrap().starts_with("fix: "), "{text}");
    let runs = "backends that run here: uring, auto, mmap, pread";
    for part in [runs, "\ntake: ", "fix first:\n  1. path.open"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn a_seccomp_filter_is_named_with_its_remedy() {
    // io_uring_setup fails with EPERM under Docker's filter, with ENOSYS under Podman's.
    for errno in [EPERM, ENOSYS] {
        let report = without_io_uring(errno, || examine(&[], 1));
        for id in ["io_uring.setup", "io_uring.seccomp"] {
            let remedy = report.remedy(id, HOST, "problem");
            assert!(
                remedy.contains("seccomp=deploy/seccomp/ringfetchd.json"),
                "{remedy}"
            );
        }
        report.check("io_uring.sysctl", HOST, "ok");
        assert!(!report.has("io_uring.registered_buffers"), "{:#}", report.0);
        assert_eq!(report.0["fix_first"][0]["check"], "io_uring.setup");
        assert!(!report.runs("uring") && report.runs("mmap"), "{:#}", report.0);
        assert_eq!(report.take(), "mmap");
    }
}

#[test]
#[ignore = "needs root and io_uring"]
fn little_lockable_memory_is_a_warning() {
    // 2 MiB of lockable memory for 1 MiB of response memory: enough for one ring, not for four; then with
    // the amount that the remedy suggests.
    let run = |memlock: u64, args: &[&str], code| {
        let limit = format!("--memlock={memlock}");
        somebody(
            &["prlimit", &limit],
            &[&["--memory-budget", "1MiB", "--cores"], args].concat(),
            code,
        )
    };
    run(2 << 20, &["1"], 0).check("limits.memlock", HOST, "ok");
    let report = run(2 << 20, &["4"], 0);
    let remedy = report.remedy("limits.memlock", HOST, "warning");
    let rest = remedy.split_once("LimitMEMLOCK=").unwrap().1;
    let bytes: u64 = rest.split(' ').next().unwrap().parse().unwrap();
    assert!(bytes >= 4 << 20, "{remedy}");
    assert!(
        remedy.contains(&format!("ulimit -l {}`", bytes / 1024)),
        "{remedy}"
    );
    run(2 << 20, &["4", "--strict"], 1);
    run(bytes, &["4"], 0).check("limits.memlock", HOST, "ok");
}

#[test]
#[ignore = "needs /dev/shm"]
fn memory_is_no_device() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = file(directory.path(), "x");
    let report = examine(&[&path], code_of_the_host());
    assert!(
        report
            .remedy("path.file_system", &path, "warning")
            .contains("mmap")
    );
    let of_device = |check: &Value| check["id"].as_str().unwrap().starts_with("device.");
    assert!(!report.checks().iter().any(of_device), "{:#}", report.0);
    assert_eq!(report.take(), "mmap");
    examine(&["--strict", &path], 1);
}

#[test]
fn files_of_vectors_are_opened_as_the_daemon_opens_them() {
    // Scenario: whole files, one of bfloat16 among them, and files cut in the data and in the header. Expected:
    // the shape of the whole ones; a problem with its remedy for the others.
    let directory = directory();
    let here = |name: &str| text(&directory.path().join(name)).to_owned();
    for (name, dtype) in [
        ("good.npy", "f32"),
        ("bf16.npy", "bf16"),
        ("cut.npy", "f32"),
        ("stub.npy", "f32"),
    ] {
        let made = program(BINARY)
            .args("dataset make vectors --count 2000 --dim 64 --dtype".split(' '))
            .args([dtype, &here(name)])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
    }
    for (name, length) in [("cut.npy", 300_000), ("stub.npy", 50)] {
        fs::File::options()
            .write(true)
            .open(here(name))
            .unwrap()
            .set_len(length)
            .unwrap();
    }
    fs::rename(here("good.npy"), here("good.NPY")).unwrap();
    let paths = ["good.NPY", "bf16.npy", "cut.npy", "stub.npy"].map(here);
    let report = examine(&paths.each_ref().map(String::as_str), 1);
    for (path, shape) in paths
        .iter()
        .zip(["2 000 vectors of 64 f32 (npy)", "2 000 vectors of 64 bf16 (npy)"])
    {
        let found = report.found("path.open", path, "ok");
        assert!(found.ends_with(shape), "{found}");
    }
    let cut = report.found("path.open", &paths[2], "problem");
    assert!(cut.contains("300000 bytes") && !cut.contains(&paths[2]), "{cut}");
    for path in &paths[2..] {
        let remedy = report.remedy("path.open", path, "problem");
        assert!(remedy.contains("kind: blocks"), "{remedy}");
    }
}

#[test]
#[ignore = "needs root and io_uring"]
fn paths_that_cannot_be_read_fail_with_the_remedy() {
    // The readable file next to them is still examined.
    let directory = directory_for_all();
    let here = |name: &str| text(&directory.path().join(name)).to_owned();
    let (good, secret) = (file(directory.path(), "good"), file(directory.path(), "secret"));
    set_mode(secret, 0o600);
    fs::write(here("empty"), "").unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(here("fifo"))
            .status()
            .unwrap()
            .success()
    );
    fs::create_dir(here("none")).unwrap();
    fs::create_dir(here("some")).unwrap();
    file(here("some").as_ref(), "a");
    set_mode(file(here("some").as_ref(), "b"), 0o600);

    let expected = [
        ("gone", "problem", "correct the path"),
        ("secret", "problem", "let the daemon's user read it"),
        ("empty", "problem", "write it first"),
        ("fifo", "problem", "name a regular file"),
        ("none", "warning", "put objects there"),
        ("some", "warning", "let the daemon's user read them"),
    ];
    let paths = expected.map(|(name, ..)| here(name));
    let mut args: Vec<&str> = paths.iter().map(String::as_str).collect();
    args.push(&good);
    let report = somebody(&[], &args, 1);
    for (path, (name, verdict, fix)) in paths.iter().zip(expected) {
        let remedy = report.remedy("path.open", path, verdict);
        assert!(remedy.contains(fix), "{name}: {remedy}");
    }
    let object = report.found("path.open", &here("some"), "warning");
    assert!(object.contains("b: "), "{object}");
    report.check("path.open", &good, "ok");
    report.check("path.ring_read", &good, "ok");
}

#[test]
#[ignore = "needs root and io_uring"]
fn a_loop_device_is_seen_through() {
    // One that goes through the page cache, and one that does not.
    let directory = directory();
    let [cached, direct] = [("cached", "--direct-io=off"), ("direct", "--direct-io=on")]
        .map(|(name, direct_io)| LoopDevice::attach(file(directory.path(), name), direct_io));
    let report = examine(&[&cached.0, &direct.0], 0);
    for device in [&cached.0, &direct.0] {
        for id in [
            "path.open",
            "path.file_system",
            "path.direct_io",
            "path.ring_read",
        ] {
            report.check(id, device, "ok");
        }
    }
    let remedy = report.remedy("device.stack", &cached.0, "warning");
    assert!(
        remedy.contains(&format!("losetup --direct-io=on {}", cached.0)),
        "{remedy}"
    );
    let found = report.found("device.stack", &direct.0, "ok");
    assert!(found.contains("direct)"), "{found}");
}

#[test]
#[ignore = "needs root, io_uring and /dev/shm"]
fn container_layers_are_told_apart_from_volumes() {
    // An overlayfs over a file that is in the page cache, mounted for this run alone.
    const MOUNT: &str =
        "mount -t overlay overlay -o lowerdir=$1/l,upperdir=$1/u,workdir=$1/w $1/m && shift && exec \"$@\"";
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    for name in ["l", "u", "w", "m"] {
        fs::create_dir(directory.path().join(name)).unwrap();
    }
    file(&directory.path().join("l"), "x");
    let path = directory.path().join("m/x");
    let (path, root) = (text(&path), text(directory.path()));
    let through = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", root];
    let report = Report::of(BINARY, &through, &[path], 0);
    assert!(
        report
            .remedy("path.file_system", path, "warning")
            .contains("volume")
    );
    let remedy = report.remedy("path.residency", path, "warning");
    assert!(remedy.contains("uring or mmap"), "{remedy}");
    assert_ne!(report.take(), "auto");
}

#[test]
fn few_descriptors_are_enough_to_say_so() {
    let directory = directory();
    for name in 0..200 {
        fs::write(directory.path().join(name.to_string()), "x").unwrap();
    }
    let (path, through) = (text(directory.path()), ["prlimit", "--nofile=32:32"]);
    let report = Report::of(BINARY, &through, &[path], code_of_the_host());
    let found = report.found("path.open", path, "ok");
    assert!(found.contains("200 objects"), "{found}");
    assert!(
        report
            .remedy("limits.open_files", HOST, "warning")
            .contains("LimitNOFILE")
    );
}

#[test]
fn a_limit_below_the_budget_is_a_problem() {
    // Scenario: limits of address space and data below, and above, what a start needs: the budget and 64 MiB. Expected: a
    // problem with the limit's name, as the daemon does not start; a warning.
    let args = ["--memory-budget", "512MiB"];
    for (limit, name) in [("--as", "ulimit -v"), ("--data", "ulimit -d")] {
        for (bytes, code, verdict) in [
            (575 << 20, 1, "problem"),
            (577 << 20, code_of_the_host(), "warning"),
        ] {
            let limit = format!("{limit}={bytes}");
            let report = Report::of(BINARY, &["prlimit", &limit], &args, code);
            let remedy = report.remedy("limits.memory", HOST, verdict);
            assert!(remedy.contains(name), "{remedy}");
        }
    }
}

#[test]
fn the_largest_configuration_is_answered() {
    // Scenario: the largest budget and the most cores that the daemon takes: more memory than any host has. Expected: a
    // report in which memory is a problem and CPUs are a warning, before `timeout` ends it.
    let most = ["--memory-budget", "1TiB", "--cores", "1024"];
    let report = Report::of(BINARY, &["timeout", "60"], &most, 1);
    report.check("memory.available", HOST, "problem");
    report.check("cpu.usable", HOST, "warning");
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for args in [
        ["--memory-budget", "16MB"],
        ["--memory-budget", "16777215TiB"],
        ["--memory-budget", "0"],
        ["--memory-budget", "1048575"],
        ["--cores", "0"],
        ["--config", "ringfetchd.yaml"],
    ] {
        let output = doctor(BINARY, &[], &args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}
