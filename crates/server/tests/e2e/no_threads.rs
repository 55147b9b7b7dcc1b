//! The daemon where the system refuses it a thread (EAGAIN of clone(2)): its user or its control group has too many.

use crate::daemon::{AS_NOBODY, Daemon, Refused, Setup};
use crate::data::plain_blocks;
use crate::reload::{hang_up, reload, reloads};
use crate::wire;
use rustix::process::{Resource, getrlimit};
use std::process::Command;
use tonic::{Code, Status};

/// More than may run at a time of whatever needs a thread: 64 opens of a directory, 8 listings, 8 reloads.
const TIMES: u64 = 65;

/// Sets the daemon's limit of threads, as its own user: root may need a capability for that.
fn set_threads_max(daemon: &Daemon, most: &str) {
    let [command, arguments @ ..] = AS_NOBODY;
    let pid = daemon.pid().as_raw_nonzero().to_string();
    let limit = format!("--nproc={most}:");
    let mut prlimit = Command::new(command);
    prlimit.args(arguments).args(["prlimit", "--pid", &pid, &limit]);
    assert!(prlimit.status().unwrap().success());
}

async fn list(daemon: &Daemon) -> Result<usize, Status> {
    let request = wire::listing("objects");
    let listed = daemon.datasets().await.list_objects(request).await;
    listed.map(|listed| listed.into_inner().objects.len())
}

#[tokio::test]
#[ignore = "needs root"]
async fn what_needs_a_thread_is_refused_until_there_is_one() {
    // Scenario: the daemon runs as an ordinary user, whose limit of threads is lowered. Objects are fetched, a directory
    // is listed and the configuration is reloaded, more often than each may run at a time. Then the limit is raised.
    // Expectation: UNAVAILABLE and 503 with a retry hint, and failed reloads; blocks are served all the time; everything
    // works again, SIGHUP too; nothing has panicked.
    let (setup, _) = plain_blocks(Setup::new("pread").open_to_all(), 16);
    setup.file("objects/a", b"a");
    let daemon = setup
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .through(&AS_NOBODY)
        .start();
    set_threads_max(&daemon, "1");
    let mut fetch = daemon.fetch().await;
    let http = daemon.http_client();
    for _ in 0..TIMES {
        let answer = fetch.fetch_objects(wire::objects("objects", &["a"])).await;
        let answer = answer.unwrap().into_inner();
        assert_eq!(answer.errors[0].code, i32::from(Code::Unavailable), "{answer:?}");
        let status = list(&daemon).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        let status = reload(&daemon).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal, "{status:?}");
    }
    let object = http.get("/v1/datasets/objects/objects/a").await;
    object.is_problem(503, "object-unreadable", None, &["temporarily unavailable"]);
    assert_eq!(object.header("retry-after"), "1");
    let listed = http.get("/v1/datasets/objects/objects").await;
    listed.is_problem(503, "listing-failed", None, &["temporarily unavailable"]);
    hang_up(&daemon).await;
    assert!(reloads(&daemon, "failed").await > TIMES);
    daemon.assert_serves("blocks").await;

    let most = getrlimit(Resource::Nproc).maximum;
    set_threads_max(
        &daemon,
        &most.map_or("unlimited".to_owned(), |most| most.to_string()),
    );
    let answer = fetch.fetch_objects(wire::objects("objects", &["a"])).await;
    assert_eq!(answer.unwrap().into_inner().data, &b"a"[..]);
    assert_eq!(list(&daemon).await.unwrap(), 1);
    reload(&daemon).await.unwrap();
    hang_up(&daemon).await;
    assert_eq!(reloads(&daemon, "ok").await, 2);
    daemon.stop().await;
}

#[test]
#[ignore = "needs root"]
fn a_start_without_a_thread_for_the_access_log_is_the_hosts_refusal() {
    // Scenario: an ordinary user may have no thread but the first, and one more, and the configuration has an access log.
    // Expectation: exit code 3, the key and the remedy.
    let (mut setup, _) = plain_blocks(Setup::new("pread").open_to_all(), 1);
    setup = setup.set("access_log.path", "access.log");
    for limit in ["--nproc=1:1", "--nproc=2:2"] {
        setup = setup.through(&[&AS_NOBODY[..], &["prlimit", limit]].concat());
        setup
            .refused()
            .with(3, &["access_log.path", "no thread", "ulimit -u"]);
    }
}

#[test]
#[ignore = "needs root"]
fn a_start_with_few_threads_is_refused_and_does_not_panic() {
    // Scenario: spans are to be sent, and an ordinary user may have one thread, two, and so on, until the daemon starts.
    // Expectation: exit code 3 each time; at last for want of the thread that sends spans, with the key and the remedy.
    // No other test's daemon has this user: the system counts the threads of all of a user's processes.
    let mut as_somebody = AS_NOBODY;
    as_somebody[2] = "65533";
    let mut refusals = Vec::new();
    for limit in 1..64 {
        let (setup, _) = plain_blocks(Setup::new("pread").open_to_all(), 1);
        let limit = format!("--nproc={limit}:{limit}");
        let started = setup
            .set("engine.cores", "1")
            .set("tracing.otlp_endpoint", "http://127.0.0.1:9")
            .through(&[&as_somebody[..], &["prlimit", &limit]].concat())
            .start_or_refused();
        match started {
            Ok(_) => break,
            Err(refused) => refusals.push(refused),
        }
    }
    for refused in &refusals {
        refused.with(3, &[]);
    }
    let spans = |refused: &&Refused| refused.said.contains("tracing.otlp_endpoint: there is no thread");
    assert!(
        refusals
            .iter()
            .find(spans)
            .is_some_and(|found| found.said.contains("ulimit -u")),
        "{refusals:?}"
    );
}
