//! Reloads that change nothing, and signals at unexpected times.

use crate::daemon::{Daemon, LISTEN, PATIENCE, Refused, Setup, eventually, eventually_async};
use crate::data::{noise, plain_blocks};
use crate::flip::set;
use crate::reload::{engine, file, hang_up, reload, reloads, told};
use crate::seccomp::EPERM;
use crate::wire::{self, Narrow};
use ringfetch_proto::v1;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::time::timeout;
use tonic::Code;
use tonic_types::StatusExt as _;

#[tokio::test]
async fn an_invalid_file_changes_nothing_and_is_reported() {
    // Scenario: a file with a misspelling, a wrong type and a changed limit; one with a dataset that does not
    // open next to a new one; one that is not YAML; no file; a FIFO; by SIGHUP and by call; then a good one.
    // Expectation: everything stays as it was; every mistake is named, with its key, in log, response and
    // status; the metric is 0 until the good one.
    let good = file(&engine("mmap"), &["blocks"]);
    let setup = Setup::new("mmap").whole(&good);
    setup.file("blocks.bin", &noise(9, 8 * 4096));
    setup.file("new.bin", &noise(9, 8 * 4096));
    let daemon = setup.start();
    let successful = async || daemon.sum("ringfetch_config_last_reload_successful", &[]).await == 1;
    let since = async || {
        let scrape = daemon.scrape().await;
        let metric = "ringfetch_config_last_reload_success_timestamp_seconds";
        let (_, time) = scrape.series(metric, &[]).next().unwrap();
        time.parse::<f64>().unwrap()
    };
    assert!(successful().await);
    let started = since().await;
    assert!(started > 1.6e9, "{started}");

    let slips = file(
        "engine: {bakend: mmap, cores: many}\nlimits: {items_per_request: 1}",
        &["blocks", "new"],
    );
    let missing = file(&engine("pread"), &["new", "missing", "absent"]);
    for (text, keys) in [
        (slips.as_str(), &["engine.bakend", "engine.cores"][..]),
        (
            missing.as_str(),
            &["datasets.absent.path", "datasets.missing.path"],
        ),
        ("engine: [", &["config"]),
    ] {
        daemon.rewrite(text);
        let failed = reloads(&daemon, "failed").await;
        hang_up(&daemon).await;
        let status = reload(&daemon).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        let found = status.get_details_bad_request().unwrap().field_violations;
        let mut found: Vec<_> = found.iter().map(|violation| violation.field.as_str()).collect();
        found.sort_unstable();
        assert_eq!(found, keys);
        let last = daemon.status().await.last_reload.unwrap();
        assert!(!last.successful && !successful().await, "{last:?}");
        for key in keys {
            // An open error is reported as at startup, with the dataset's name.
            let name = key.split('.').nth(1).unwrap_or(key);
            assert!(
                last.problem.contains(name) && status.message().contains(name),
                "{name}: {last:?} {status:?}"
            );
            daemon.logged(&["ERROR", "nothing has changed", name]);
        }
        assert_eq!(reloads(&daemon, "failed").await, failed + 2);
        let state = daemon.status().await;
        assert_eq!((state.datasets.len(), state.backend()), (1, v1::Backend::Mmap));
        let three = wire::blocks("blocks", &[0, 1, 2]);
        daemon.fetch().await.fetch_blocks(three).await.unwrap();
    }
    let config = daemon.path("ringfetchd.yaml");
    fs::remove_file(&config).unwrap();
    assert_eq!(reload(&daemon).await.unwrap_err().code(), Code::InvalidArgument);
    // Without a writer: an open that waits for one would also stop every later reload.
    rustix::fs::mkfifoat(rustix::fs::CWD, &config, rustix::fs::Mode::RUSR).unwrap();
    let status = reload(&daemon).await.unwrap_err();
    assert!(status.message().contains("is not a regular file"), "{status:?}");
    assert_eq!(since().await, started);

    daemon.rewrite(&good);
    let answer = reload(&daemon).await.unwrap();
    assert!(
        answer.applied.is_empty() && answer.datasets_unchanged == ["blocks"],
        "{answer:?}"
    );
    assert!(successful().await && since().await > started);
    daemon.stop().await;
}

#[tokio::test]
async fn a_reload_without_descriptors_names_what_is_missing_too() {
    // Scenario: a daemon with a limit of 200 open files; a file with a dataset of 300 files, and then also one whose file is
    // missing; then one of 60 files while cached objects have taken the descriptors. Expectation: the lack is the host's,
    // and no mistake; the missing file is one, and is named; cached objects give way.
    let names: Vec<String> = (0..300).map(|index| format!("objects/{index}")).collect();
    let keys = engine("pread").replace('}', ", direct_io: off}");
    let objects = "  - {name: objects, kind: objects, path: objects}\n";
    let start = file(&keys, &["blocks"]) + objects;
    let of = |names: &[String]| {
        let paths = names.join(", ");
        format!("{start}  - {{name: many, kind: blocks, block_bytes: 4KiB, paths: [{paths}]}}\n")
    };
    let setup = Setup::new("pread").whole(&start);
    for name in names.iter().map(String::as_str).chain(["blocks.bin"]) {
        setup.file(name, &[1; 4096]);
    }
    let daemon = setup.through(&["prlimit", "--nofile=200"]).start();
    let missing = "  - {name: z, kind: blocks, block_bytes: 4KiB, path: gone.bin}\n";

    daemon.rewrite(&of(&names));
    let status = reload(&daemon).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(
        status.message().contains("datasets.many.path") || status.message().contains("dataset many: path")
    );
    daemon.rewrite(&(of(&names) + missing));
    let status = reload(&daemon).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    for part in [
        "dataset many: path",
        "out of file descriptors",
        "gone.bin: does not exist",
    ] {
        assert!(status.message().contains(part), "{part}: {status:?}");
    }
    assert_eq!(status.message().matches("out of file").count(), 1, "{status:?}");

    let http = daemon.http_client();
    for index in 0..300 {
        let object = http.get(&format!("/v1/datasets/objects/objects/{index}")).await;
        assert_eq!(object.status, 200, "{object:?}");
    }
    daemon.rewrite(&of(&names[..60]));
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(answer.datasets_added, ["many"]);
    daemon.assert_serves("many").await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_reload_that_cannot_open_its_file_says_what_it_lacks() {
    // Scenario: SIGHUP when the daemon has as many files open as it may, and a call on an open connection; the same when many
    // of them are cached objects. Expectation: the error names the limit, and advises no other file; the call is told that the
    // host refuses, and of no mistake in the file; cached objects give way.
    let text = file(&engine("pread").replace('}', ", direct_io: off}"), &["blocks"])
        + "  - {name: objects, kind: objects, path: objects, revalidate_ms: 3600000}\n";
    let setup = Setup::new("pread").whole(&text);
    setup.file("blocks.bin", &[1; 4096]);
    for index in 0..50 {
        setup.file(&format!("objects/{index}"), b"x");
    }
    let daemon = setup.start();
    let mut admin = daemon.admin_client().await;
    admin.reload(v1::ReloadRequest {}).await.unwrap();
    let limit = getrlimit(Resource::Nofile);
    let set = |most| {
        let limit = Rlimit {
            current: most,
            ..limit
        };
        prlimit(Some(daemon.pid()), Resource::Nofile, limit).unwrap();
    };
    set(Some(8));
    daemon.signal(Signal::HUP);
    let line = daemon.logged(&["ERROR", "config: cannot be read: Too many open files"]);
    assert!(line.contains("ulimit -n") && !line.contains("name a"), "{line}");
    let status = admin.reload(v1::ReloadRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "HOST_REFUSED");
    set(limit.current);

    let http = daemon.http_client();
    for index in 0..50 {
        let object = http.get(&format!("/v1/datasets/objects/objects/{index}")).await;
        assert_eq!(object.status, 200, "{object:?}");
    }
    let is_free = |fd: &u64| !has_open(&daemon, *fd);
    set((0..).find(is_free));
    admin.reload(v1::ReloadRequest {}).await.unwrap();
    daemon.stop().await;
}

/// Whether a descriptor of the daemon is in use.
pub(crate) fn has_open(daemon: &Daemon, fd: u64) -> bool {
    let link = format!("/proc/{}/fd/{fd}", daemon.pid().as_raw_nonzero());
    fs::symlink_metadata(link).is_ok()
}

#[tokio::test]
async fn a_reload_that_changes_nothing_takes_no_more_descriptors() {
    // Scenario: a limit of 200 open files, and 120 datasets; a reload. Expectation: it succeeds, since what is the same is
    // open twice for a moment only.
    let names: Vec<String> = (0..120).map(|index| format!("d{index}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let keys = engine("pread").replace('}', ", direct_io: off}");
    let setup = Setup::new("pread").whole(&file(&keys, &names));
    for name in &names {
        setup.file(&format!("{name}.bin"), &[1; 4096]);
    }
    let daemon = setup.through(&["prlimit", "--nofile=200"]).start();
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(answer.datasets_unchanged.len(), 120);
    daemon.stop().await;
}

#[tokio::test]
async fn a_backend_that_cannot_be_had_refuses_the_whole_reload() {
    // Scenario: io_uring is forbidden, and a file requests it, for the engine or for one dataset (after
    // another that changes to pread), with a new dataset and a changed limit. Expectation:
    // FAILED_PRECONDITION with key and cause; the engine with its reason, both datasets, the list and the limit are as
    // before; the file without it is applied.
    use v1::Backend::{Mmap, Pread};
    let setup = Setup::new("mmap").whole(&file(&engine("mmap"), &["a", "b"]));
    for name in ["a", "b", "new"] {
        setup.file(&format!("{name}.bin"), &noise(9, 8 * 4096));
    }
    let daemon = setup.without_io_uring(EPERM).start();
    let before = daemon.status().await;
    let limit = "\nlimits: {items_per_request: 1}";
    let own = |name: &str, backend: &str| {
        format!(
            "  - {{name: {name}, kind: blocks, block_bytes: 4KiB, path: {name}.bin, backend: {backend}}}\n"
        )
    };
    let of_engine = file(&(engine("uring") + limit), &["a", "b", "new"]);
    let of_one =
        file(&(engine("pread") + limit), &[]) + &own("a", "pread") + &own("b", "auto") + &own("new", "pread");
    let of_new = file(&(engine("pread") + limit), &["a", "b"]) + &own("new", "uring");
    for (text, key) in [
        (&of_engine, "engine.backend"),
        (&of_one, "datasets.b.backend"),
        (&of_new, "datasets.new.backend"),
    ] {
        daemon.rewrite(text);
        let status = reload(&daemon).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert!(
            status.message().contains(key) && status.message().contains("seccomp"),
            "{status:?}"
        );
        let state = daemon.status().await;
        assert_eq!((state.datasets.len(), state.backend()), (2, Mmap), "{key}");
        assert_eq!(state.reason, before.reason, "{key}");
        for dataset in &state.datasets {
            let path = dataset.read_path.clone().unwrap();
            assert_eq!(
                (path.backend(), path.own_backend),
                (Mmap, false),
                "{key}: {dataset:?}"
            );
        }
        let mut fetch = daemon.fetch().await;
        fetch.fetch_blocks(wire::blocks("a", &[0, 1, 2])).await.unwrap();
    }
    daemon.rewrite(&(file(&(engine("pread") + limit), &["a"]) + &own("new", "pread")));
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(answer.datasets_added, ["new"]);
    assert_eq!(daemon.status().await.backend(), Pread);
    daemon.assert_serves("new").await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_fallback_of_the_start_is_no_mistake_of_a_reload() {
    // Scenario: io_uring is forbidden, and a daemon fell back to mmap, for the engine and for a dataset; a
    // reload; a switch of both to pread at run time; another reload of the same file. Expectation: both
    // reloads succeed, and mmap reads after each; as after the start, status and metric name the backend of
    // the file, and why mmap is used instead. So they do if mmap was switched to.
    use v1::Backend::{Mmap, Pread, Uring};
    let keys = "engine: {backend: uring, on_unavailable: mmap, cores: 2, memory_budget: 32MiB}";
    let text =
        file(keys, &["a"]) + "  - {name: b, kind: blocks, block_bytes: 4KiB, path: a.bin, backend: auto}\n";
    let setup = Setup::new("uring").whole(&text);
    setup.file("a.bin", &noise(9, 8 * 4096));
    let daemon = setup.without_io_uring(EPERM).start();
    let backends = async || {
        let status = daemon.status().await;
        let of = |dataset: &v1::DatasetStatus| dataset.read_path.clone().unwrap().backend();
        (status.backend(), of(&status.datasets[0]), of(&status.datasets[1]))
    };
    let answer = reload(&daemon).await.unwrap();
    assert!(answer.applied.is_empty() && answer.notes.is_empty(), "{answer:?}");
    set(&daemon, Pread, None).await.unwrap();
    set(&daemon, Pread, Some("b")).await.unwrap();
    assert_eq!(backends().await, (Pread, Pread, Pread));
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(
        told(&answer.applied),
        [
            ("engine.backend", "pread", "mmap"),
            ("datasets.b.backend", "pread", "auto")
        ]
    );
    assert!(
        answer.notes.len() == 2 && answer.notes.iter().all(|note| note.contains("seccomp")),
        "{answer:?}"
    );
    assert_eq!(backends().await, (Mmap, Mmap, Mmap));
    let assert_is_fallback = async || {
        let status = daemon.status().await;
        assert!(status.fallback && status.reason.contains("seccomp"), "{status:?}");
        assert_eq!((status.backend(), status.requested()), (Mmap, Uring));
        let labels = [("backend", "mmap"), ("requested", "uring")];
        let scrape = daemon.scrape().await;
        let info: Vec<_> = scrape.series("ringfetch_backend_info", &labels).collect();
        assert!(info.len() == 1 && info[0].0.contains("seccomp"), "{info:?}");
    };
    assert_is_fallback().await;
    set(&daemon, Mmap, None).await.unwrap();
    assert!(!daemon.status().await.fallback);
    let answer = reload(&daemon).await.unwrap();
    assert!(answer.applied.is_empty() && answer.notes.len() == 1, "{answer:?}");
    assert_is_fallback().await;
    let answer = reload(&daemon).await.unwrap();
    assert!(answer.applied.is_empty() && answer.notes.is_empty(), "{answer:?}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_reloads_at_once_come_one_after_the_other() {
    // Scenario: thirty concurrent calls during a burst of SIGHUPs. Expectation: each reloads, or is refused
    // as busy with a retry hint; the daemon serves, and the next reload succeeds.
    let setup = Setup::new("mmap").whole(&file(&engine("mmap"), &["blocks"]));
    setup.file("blocks.bin", &noise(9, 8 * 4096));
    let daemon = setup.start();
    let admin = daemon.admin_client().await;
    let calls: Vec<_> = (0..30)
        .map(|_| {
            let mut admin = admin.clone();
            tokio::spawn(async move { admin.reload(v1::ReloadRequest {}).await })
        })
        .collect();
    (0..50).for_each(|_| daemon.signal(Signal::HUP));
    let mut made = 0;
    for call in calls {
        match call.await.unwrap() {
            Ok(_) => made += 1,
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                assert!(status.get_details_retry_info().is_some());
                assert_eq!(status.get_details_error_info().unwrap().reason, "BUSY");
            }
        }
    }
    assert!(made > 0);
    eventually_async("the burst is over", async || reload(&daemon).await.ok()).await;
    assert_eq!(reloads(&daemon, "failed").await, 0);
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

/// Datasets of a daemon that gets signals while it opens them, with a descriptor or two for each.
const OPENED: usize = 200;

fn drains_for_3_s() -> String {
    engine("mmap") + "\nshutdown: {lame_duck_ms: 0, drain_timeout_ms: 3000}"
}

fn is_opening(pid: Pid) -> bool {
    let open = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()));
    open.is_ok_and(|open| open.count() < OPENED)
}

/// Sends a signal once the process catches it, according to the set of caught signals in proc_pid_status(5):
/// before that it would be killed. Returns whether it surely came while the process opens its datasets.
fn send_once_caught(pid: Pid, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    if caught.is_none_or(|mask| mask >> (signal.as_raw() - 1) & 1 == 0) {
        return false;
    }
    // Looks before and after, since a process that ends has few descriptors, too.
    let is_early = is_opening(pid);
    // It may have ended meanwhile, which the test reports then.
    let _gone = kill_process(pid, signal);
    is_early && is_opening(pid)
}

/// Starts daemons that get this signal again and again until they are ready. Returns the first one to which it surely came
/// while it opened its datasets, whatever came of it: this process may not be scheduled just then.
fn start_with_early(signal: Signal) -> Result<Daemon, Refused> {
    let names: Vec<String> = (0..OPENED).map(|index| format!("blocks{index}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let keys = drains_for_3_s();
    let mut starts = (0..20).filter_map(|_| {
        let setup = Setup::new("mmap").whole(&file(&keys, &names));
        for name in &names {
            setup.file(&format!("{name}.bin"), &[7; 4096]);
        }
        setup.file("blocks0.bin", &noise(9, 1024 * 4096));
        let came = Arc::new(AtomicBool::new(false));
        let to_disturb = Arc::clone(&came);
        let setup = setup.disturbed(move |daemon| {
            to_disturb.fetch_or(send_once_caught(daemon.pid(), signal), Ordering::Relaxed);
        });
        let started = setup.start_or_refused();
        came.load(Ordering::Relaxed).then_some(started)
    });
    starts.next().expect("a signal while it opens its datasets")
}

#[test]
fn a_signal_before_it_serves_ends_it_at_once() {
    // Scenario: SIGTERM or SIGINT while the daemon opens its datasets. Expectation: it catches them from the beginning (as
    // process 1 of a container it would ignore them otherwise), and ends with exit code 0 before it is ready.
    for signal in [Signal::TERM, Signal::INT] {
        match start_with_early(signal) {
            Ok(_) => panic!("it became ready"),
            Err(ended) => ended.with(0, &["ending before it serves"]),
        }
    }
}

/// Threads that keep all CPUs busy while it exists.
struct Busy(Arc<AtomicBool>);

impl Busy {
    fn begin() -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        for _ in 0..2 * std::thread::available_parallelism().unwrap().get() {
            let ends = Arc::clone(&ends);
            std::thread::spawn(move || {
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Self(ends)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The threads that end a start on a signal.
fn starters(pid: Pid) -> Vec<Pid> {
    let tasks = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
    let tasks = tasks.into_iter().flatten().flatten();
    let starters = tasks.filter(|task| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "rf-start")
            && runs(&task.path().join("stat"))
    });
    let id = |task: fs::DirEntry| Pid::from_raw(task.file_name().to_str()?.parse().ok()?);
    starters.filter_map(id).collect()
}

/// Whether a thread may still run the daemon's code. One that was joined may be listed for a moment: it is exiting
/// (PF_EXITING in field 9, proc_pid_stat(5)).
fn runs(stat: &Path) -> bool {
    const PF_EXITING: u32 = 0x4;
    let stat = fs::read_to_string(stat).unwrap_or_default();
    let flags = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.split(' ').nth(6));
    let flags = flags.and_then(|flags| flags.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & PF_EXITING == 0)
}

#[tokio::test]
async fn a_signal_as_soon_as_it_serves_lets_it_drain() {
    // Scenario: SIGTERM to daemons that have just become ready, on busy CPUs, where the thread that ends a start on a signal
    // has the lowest priority. Expectation: that thread has ended by then, and each daemon drains.
    let _busy = Busy::begin();
    for _ in 0..10 {
        let (setup, _) = plain_blocks(Setup::new("mmap"), 16);
        let last = |daemon: &Daemon| {
            for thread in starters(daemon.pid()) {
                // By setpriority(2), which takes a thread's id, too. It may have ended meanwhile.
                let _gone = rustix::process::setpriority_process(Some(thread), 19);
            }
        };
        let mut daemon = setup.disturbed(last).start();
        assert_eq!(starters(daemon.pid()), []);
        daemon.signal(Signal::TERM);
        daemon.ends_with(0).await;
        daemon.logged(&["draining", "SIGTERM"]);
    }
}

#[tokio::test]
async fn signals_before_it_serves_and_while_it_drains_do_no_harm() {
    // Scenario: SIGHUP again and again during startup, and while a drain waits for a client. Expectation: it
    // starts, serves, and has reloaded; the drain continues to its end, and nothing is reloaded.
    let mut daemon = start_with_early(Signal::HUP).unwrap_or_else(|ended| panic!("it ended: {ended:?}"));
    daemon.assert_serves("blocks0").await;
    daemon.logged(&["\"reloaded\""]);

    let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
    let _held = narrow
        .call("FetchRanges", &[], &wire::ranges("blocks0", &[(0, 3 << 20)]))
        .await;
    // Waits for reloads that the signals during startup left, and makes further ones short.
    daemon.rewrite(&file(&drains_for_3_s(), &["blocks0"]));
    eventually_async("the rest is removed", async || reload(&daemon).await.ok()).await;
    daemon.signal(Signal::TERM);
    daemon.logged(&["draining", "SIGTERM"]);
    daemon.signal(Signal::HUP);
    daemon.logged(&["nothing is reloaded", "draining"]);
    daemon.ends_with(1).await;
}

#[tokio::test]
async fn a_budget_that_the_next_start_would_refuse_is_refused() {
    // Scenario: a daemon that may have 1 GiB of data; its file asks for that much response memory, and then for 1 TiB, both of
    // which need a restart. Expectation: the first is the host's refusal, with the limit to raise; the other is refused, too; what
    // there is room for waits for the restart.
    let keys = |budget: &str| file(&engine("mmap").replace("32MiB", budget), &["blocks"]);
    let setup = Setup::new("mmap").whole(&keys("32MiB"));
    setup.file("blocks.bin", &[1; 4096]);
    let daemon = setup.through(&["prlimit", "--data=1073741824"]).start();
    daemon.rewrite(&keys("1GiB"));
    let status = reload(&daemon).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("ulimit -d"), "{status:?}");
    daemon.rewrite(&keys("1TiB"));
    let status = reload(&daemon).await.unwrap_err();
    assert!(status.message().contains("is 1TiB"), "{status:?}");
    daemon.rewrite(&keys("33MiB"));
    let waits = reload(&daemon).await.unwrap().needs_restart;
    assert_eq!(waits[0].key, "engine.memory_budget");
    daemon.stop().await;
}

#[tokio::test]
async fn a_reload_takes_environment_and_flags_as_at_the_start() {
    // Scenario: a flag sets mmap; the file changes to pread, and to another limit. Expectation: the flag
    // wins; the limit is applied.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 8);
    let daemon = setup.start();
    let text = fs::read_to_string(daemon.path("ringfetchd.yaml")).unwrap();
    assert!(text.starts_with(LISTEN));
    daemon.rewrite(&(text + "engine: {backend: pread}\nlimits: {http_ranges: 3}\n"));
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(told(&answer.applied), [("limits.http_ranges", "64", "3")]);
    assert_eq!(daemon.status().await.backend(), v1::Backend::Mmap);
    eventually("the log tells it", PATIENCE, || {
        let applied = |line: &String| line.contains("\"applied\":\"limits.http_ranges 64 -> 3\"");
        daemon.log().iter().any(applied).then_some(())
    });
    daemon.stop().await;
}

#[tokio::test]
#[ignore = "needs root and /dev/fuse"]
async fn a_file_system_that_does_not_respond_stops_no_later_change() {
    // Scenario: the file system of a dataset's second file stops responding; a reload that is to open it, after the access log was
    // renamed; a switch; a reload with another second file. Expectation: the access log is opened again; the first reload is
    // refused, with the file's name; the switch and the second reload are made.
    let directory = tempfile::tempdir().unwrap();
    let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
    fs::create_dir_all(&source).unwrap();
    fs::create_dir_all(&mountpoint).unwrap();
    fs::write(source.join("hangs.bin"), noise(1, 4096)).unwrap();
    let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
    let hangs = disk.path().join("hangs.bin").display().to_string();
    let keys = format!("{}\naccess_log: {{path: access.log}}", engine("mmap"));
    let good = file(&keys, &["blocks"]);
    let with_second = |path: &str| {
        format!("{good}  - {{name: two, kind: blocks, block_bytes: 4KiB, paths: [blocks.bin, {path}]}}\n")
    };
    let setup = Setup::new("mmap").whole(&with_second(&hangs));
    setup.file("other.bin", &noise(2, 4096));
    setup.file("blocks.bin", &noise(9, 8 * 4096));
    let daemon = setup.start();
    fs::rename(daemon.path("access.log"), daemon.path("renamed.log")).unwrap();
    disk.hold_attributes();
    daemon.signal(Signal::HUP);
    let changes = timeout(PATIENCE, async {
        eventually_async("the log is opened again", async || {
            daemon.path("access.log").exists().then_some(())
        })
        .await;
        let switched = set(&daemon, v1::Backend::Pread, None).await;
        daemon.rewrite(&with_second("other.bin"));
        (switched.map(drop), reload(&daemon).await)
    });
    let changes = changes.await;
    // A daemon whose thread waits for the disk cannot be killed.
    disk.release_attributes();
    let (switched, reloaded) = changes.expect("the changes are made");
    assert!(switched.is_ok(), "{switched:?}");
    assert_eq!(reloaded.unwrap().datasets_replaced, ["two"]);
    daemon.logged(&["WARN", "a reload takes long", &hangs]);
    daemon.logged(&["ERROR", "nothing has changed", "has not responded", &hangs]);
    daemon.stop().await;
}
