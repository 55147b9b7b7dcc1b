//! Rate limits of principals, over every interface.

use super::{Stream, get, grpc_roads, http_roads, lines, read, rewrite, served, with, with_wide};
use crate::access_log::lines_of;
use crate::daemon::{Daemon, PATIENCE, eventually_async};
use crate::data::noise;
use crate::exposition::Scrape;
use crate::wire::{self, Narrow};
use ringfetch_proto::v1;
use rustix::process::Signal;
use std::cell::Cell;
use std::time::{Duration, Instant};
use std::{fs, future};
use tokio::time::timeout;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// A principal with these limits, and one without.
fn principals(limits: &str) -> String {
    lines(&[
        ("greedy", "greedy", &format!("* {limits}")),
        ("root", "root", "*,@admin"),
    ])
}

fn relimit(daemon: &Daemon, limits: &str) {
    rewrite(daemon, &principals(limits));
    daemon.signal(Signal::HUP);
}

/// Reads 3 MiB.
async fn read_much(daemon: &Daemon, token: &str) -> Result<(), Status> {
    let indices: Vec<u64> = (0..768).map(|number| number % 64).collect();
    let request = with(token, wire::blocks("blocks", &indices));
    daemon.fetch().await.fetch_blocks(request).await.map(drop)
}

pub(super) async fn metrics(daemon: &Daemon, token: &str) -> Scrape {
    let metrics = get(daemon, token, "/metrics").await;
    Scrape {
        text: String::from_utf8_lossy(&metrics.body).into_owned(),
    }
}

/// Makes rounds of requests until each has been refused once: a round may take so long that some are granted.
async fn refusals(mut round: impl AsyncFnMut() -> Vec<Option<String>>) -> Vec<String> {
    let mut refused: Vec<Option<String>> = Vec::new();
    eventually_async("each request is refused", async || {
        let answers = round().await;
        refused.resize(answers.len(), None);
        for (refused, answer) in refused.iter_mut().zip(answers) {
            *refused = answer.or(refused.take());
        }
        refused.iter().all(Option::is_some).then_some(())
    })
    .await;
    assert!(!refused.is_empty(), "nothing was requested");
    refused.into_iter().flatten().collect()
}

#[tokio::test]
async fn requests_a_second_are_counted_by_every_road() {
    // Scenario: a principal with one request a second uses every interface of both transports, also for a
    // dataset that does not exist, each until it is refused; another principal sends requests in between; the
    // limit is removed. Expectation: each interface refuses it with the limit's name and a retry hint, and
    // never the other; then it is served.
    let daemon = served(&principals("requests/s=1")).start();
    for dataset in ["blocks", "absent"] {
        let calls = refusals(async || {
            let round = grpc_roads(&daemon, "greedy", dataset).await.into_iter();
            let is_refused = |code| code == Code::ResourceExhausted;
            round
                .map(|(code, message)| is_refused(code).then_some(message))
                .collect()
        });
        for message in calls.await {
            assert!(message.contains("requests/s"), "{message}");
        }
        let requests = refusals(async || {
            let round = http_roads(&daemon, "greedy", dataset).await.into_iter();
            round
                .map(|answer| answer.starts_with("429").then_some(answer))
                .collect()
        });
        for answer in requests.await {
            assert!(answer.contains("\"retry-after\": \"1\""), "{answer}");
        }
    }
    let refused = eventually_async("a listing is refused", async || {
        let answer = get(&daemon, "greedy", "/v1/datasets").await;
        (answer.status == 429).then_some(answer)
    })
    .await;
    refused.is_problem(
        429,
        "rate-limited",
        None,
        &["limit of 1 requests a second (requests/s)", "retry after"],
    );
    let after_ms = refused.json()["retry_after_ms"].as_u64().unwrap();
    assert!((1..=1000).contains(&after_ms), "{after_ms}");
    let refused = eventually_async("a call is refused", async || {
        let listed = with("greedy", v1::ListDatasetsRequest::default());
        daemon.datasets().await.list_datasets(listed).await.err()
    })
    .await;
    let after = refused.get_details_retry_info().unwrap().retry_delay.unwrap();
    assert!((1..=1000).contains(&after.as_millis()), "{after:?}");
    assert_eq!(refused.get_details_error_info().unwrap().reason, "RATE_LIMITED");
    let served = grpc_roads(&daemon, "root", "blocks").await;
    assert!(
        served.iter().all(|(code, _)| *code != Code::ResourceExhausted),
        "{served:#?}"
    );
    let seen = metrics(&daemon, "root").await;
    let refused = |principal| {
        let labels = [("principal", principal), ("reason", "requests_per_second")];
        seen.sum("ringfetch_principal_rejected_total", &labels)
    };
    assert!(refused("greedy") > 50 && refused("root") == 0);
    let all = seen.sum("ringfetch_rejected_total", &[("reason", "requests_per_second")]);
    assert_eq!(all, refused("greedy"));
    relimit(&daemon, "");
    eventually_async("nothing is refused", async || {
        let answers = grpc_roads(&daemon, "greedy", "blocks").await;
        answers
            .iter()
            .all(|(code, _)| *code != Code::ResourceExhausted)
            .then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn bytes_a_second_are_charged_before_they_are_read() {
    // Scenario: a principal with 64 KiB a second and a stream requests 3 MiB, a debt that takes 48 s to pay
    // back; then it uses every interface, and the stream; another principal requests the same; the limit
    // grows, and is removed. Expectation: the first response is complete; after it everything that reads is
    // refused with the limit's name, and what reads nothing is not; the other principal is served; a larger
    // limit applies at once, also to the stream.
    let daemon = served(&principals("bytes/s=64KiB")).start();
    let mut stream = Stream::open(&daemon, "greedy").await;
    read_much(&daemon, "greedy").await.unwrap();
    let refused = read_much(&daemon, "greedy").await.unwrap_err();
    let said = "this principal's limit of 65536 bytes a second (bytes/s) is used up; retry after";
    assert!(refused.message().starts_with(said), "{refused:?}");
    let after = refused.get_details_retry_info().unwrap().retry_delay.unwrap();
    assert!((40..48).contains(&after.as_secs()), "{after:?}");
    assert_eq!(stream.asked("blocks").await.unwrap(), Code::ResourceExhausted);
    // In the order of `grpc_roads`: the six that read, GetDataset and ListObjects, five on a stream.
    let codes = async |dataset| -> Vec<bool> {
        let answers = grpc_roads(&daemon, "greedy", dataset).await;
        answers
            .iter()
            .map(|(code, _)| *code == Code::ResourceExhausted)
            .collect()
    };
    let blocks = [
        true, false, true, false, false, false, false, false, true, false, true, false, false,
    ];
    assert_eq!(codes("blocks").await, blocks);
    let vectors = [
        false, true, true, false, true, false, false, false, false, true, true, false, true,
    ];
    assert_eq!(codes("vectors").await, vectors);
    let objects = [
        false, false, false, true, false, true, false, false, false, false, false, true, false,
    ];
    assert_eq!(codes("objects").await, objects);
    for (path, status) in [
        ("blocks/blocks/1", 429),
        ("blocks/blocks/%31", 429),
        ("blocks/bytes", 429),
        ("vectors/vectors/1", 429),
        ("objects/objects/a", 429),
        ("objects/objects", 200),
        ("blocks", 200),
    ] {
        let answer = get(&daemon, "greedy", &format!("/v1/datasets/{path}")).await;
        assert_eq!(answer.status, status, "{path}");
        if status == 429 {
            answer.is_problem(429, "rate-limited", None, &["bytes/s"]);
            assert!(answer.header("retry-after").parse::<u64>().unwrap() > 1);
        }
    }
    read_much(&daemon, "root").await.unwrap();
    let refused = metrics(&daemon, "root").await.sum(
        "ringfetch_principal_rejected_total",
        &[("principal", "greedy"), ("reason", "bytes_per_second")],
    );
    // A call, a request on the stream, then 13 over gRPC and five over HTTP.
    assert_eq!(refused, 20);
    relimit(&daemon, "bytes/s=1GiB");
    eventually_async("more is granted", async || {
        read_much(&daemon, "greedy").await.ok()
    })
    .await;
    stream.answers_one().await.unwrap();
    let seen = metrics(&daemon, "root").await;
    let read = seen.sum("ringfetch_principal_read_bytes_total", &[("principal", "greedy")]);
    // Two long responses, and two blocks over the stream.
    assert_eq!(read, 2 * ((3 << 20) + 4096));
    daemon.stop().await;
}

#[tokio::test]
async fn a_request_past_its_deadline_is_not_charged_for_bytes() {
    // Scenario: a principal with 64 KiB a second requests 3 MiB and scores, many times, with a deadline that has passed when they
    // arrive; then it reads a block. Expectation: each is past its deadline; the block is read.
    let daemon = served(&principals("bytes/s=64KiB")).start();
    let mut narrow = Narrow::connect(daemon.grpc, 1 << 20).await;
    let indices: Vec<u64> = (0..768).map(|number| number % 64).collect();
    let (much, scores) = (
        wire::blocks("blocks", &indices),
        wire::best("vectors", vec![1.0; 4], vec![3; 4096]),
    );
    let late = [("authorization", "Bearer greedy"), ("grpc-timeout", "1n")];
    for _ in 0..20 {
        for call in [
            narrow.call("FetchBlocks", &late, &much).await,
            narrow.call("ScoreVectors", &late, &scores).await,
        ] {
            let status = call.status().await;
            assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        }
    }
    read(&daemon, "greedy", "blocks").await.unwrap();
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root and /dev/fuse"]
async fn an_object_that_changes_before_it_is_read_is_one_request() {
    // Scenario: principals with one request a second read an object, one over each transport; it is rewritten, shorter, while
    // the disk holds the read back. Expectation: the new bytes, which alone are counted; one line in the log, without a failure.
    let directory = tempfile::tempdir().unwrap();
    let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
    fs::create_dir(&source).unwrap();
    let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
    let path = format!("path: {}", disk.path().display());
    let limited = |name| (name, name, "* requests/s=1");
    let principals = lines(&[limited("http"), limited("grpc"), ("root", "root", "*,@admin")]);
    let daemon = served(&principals)
        .dataset(&["name: slow", "kind: objects", "revalidate_ms: 3600000", &path])
        .set("access_log.path", "access.log")
        .start();
    let (old, new) = (noise(98, 64 << 10), noise(99, 16 << 10));
    for transport in ["http", "grpc"] {
        let name = format!("by-{transport}");
        fs::write(source.join(&name), &old).unwrap();
        let path = format!("/v1/datasets/slow/objects/{name}");
        // Opening it reads, too.
        assert_eq!(get(&daemon, "root", &path).await.body, old);
        disk.reset();
        disk.hold();
        let token = format!("Bearer {transport}");
        let (http, mut grpc) = (daemon.http_client(), Narrow::connect(daemon.grpc, 1 << 20).await);
        let object = name.clone();
        let reading = tokio::spawn(async move {
            let headers = [("authorization", &token[..]), ("x-request-id", transport)];
            if transport == "http" {
                let answer = http.get_with(&path, &headers).await;
                return (answer.status.to_string(), answer.body.to_vec());
            }
            let request = wire::object("slow", &object);
            let held = grpc.call("ReadObject", &headers, &request).await;
            let (body, status) = held.rest().await;
            let messages: Vec<v1::ReadObjectResponse> = wire::messages(&body);
            let data = messages.into_iter().flat_map(|message| message.data);
            (format!("{:?}", status.unwrap().code()), data.collect())
        });
        assert!(disk.wait_until(PATIENCE, |reads| reads.arrived > 0));
        fs::write(source.join(&name), &new).unwrap();
        // The kernel learns of it.
        assert_eq!(fs::metadata(disk.path().join(&name)).unwrap().len(), 16 << 10);
        disk.release();
        let (status, body) = reading.await.unwrap();
        let ok = if transport == "http" {
            ("200 OK", "200")
        } else {
            ("Ok", "OK")
        };
        assert_eq!((&status[..], body == new), (ok.0, true), "{transport}");
        let logged = lines_of(&daemon, transport, 1).await;
        let line = &logged[0];
        let counts = ["items", "failed_items", "bytes"].map(|key| line[key].as_u64().unwrap());
        assert_eq!((logged.len(), &line["code"]), (1, &ok.1.into()), "{logged:?}");
        assert_eq!(counts, [1, 0, 16 << 10], "{line}");
        let labels = [("principal", transport)];
        let seen = metrics(&daemon, "root").await;
        assert_eq!(
            seen.sum("ringfetch_principal_read_bytes_total", &labels),
            16 << 10
        );
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_long_object_comes_whole_within_its_bytes_a_second() {
    // Scenario: a principal with 4 MiB a second reads an object of 5 MiB, over both transports. Expectation:
    // all of it, in parts that wait for their turn; no part is refused.
    let setup = served(&principals("bytes/s=4MiB"));
    let content: Vec<u8> = (0..5_u32 << 20).map(|place| place.to_le_bytes()[2]).collect();
    setup.file("objects/long", &content);
    let daemon = setup.start();
    let mirrored = get(&daemon, "greedy", "/v1/datasets/objects/objects/long").await;
    assert!(mirrored.status == 200 && mirrored.body == content);
    let request = wire::object("objects", "long");
    // Until the debt of the first is paid back.
    let mut answer = eventually_async("the second is granted", async || {
        let request = with("greedy", request.clone());
        daemon.fetch().await.read_object(request).await.ok()
    })
    .await
    .into_inner();
    let mut read = Vec::new();
    while let Some(message) = answer.message().await.unwrap() {
        read.extend_from_slice(&message.data);
    }
    assert!(read == content);
    daemon.stop().await;
}

#[tokio::test]
async fn a_long_object_leaves_room_for_other_reads() {
    // Scenario: a principal with 64 KiB a second reads an object of 32 MiB, and blocks while that comes.
    // Expectation: blocks are served, though some are refused, and the object continues, in parts of a second's
    // worth.
    let setup = served(&principals("bytes/s=64KiB"));
    setup.file("objects/long", &vec![7; 32 << 20]);
    let daemon = setup.start();
    let request = wire::object("objects", "long");
    let answer = daemon.fetch().await.read_object(with("greedy", request)).await;
    let mut answer = answer.unwrap().into_inner();
    let mut read = 0;
    for _ in 0..3 {
        while let Some(message) = timeout(PATIENCE, answer.message()).await.unwrap().unwrap() {
            assert!(message.data.len() <= 64 << 10, "{}", message.data.len());
            if !message.data.is_empty() {
                read += message.data.len();
                break;
            }
        }
        eventually_async("a block is served", async || {
            let request = with("greedy", wire::blocks("blocks", &[1]));
            daemon.fetch().await.fetch_blocks(request).await.ok()
        })
        .await;
    }
    assert!((1..32 << 20).contains(&read), "{read}");
    drop(answer);
    daemon.stop().await;
}

#[tokio::test]
async fn several_long_objects_leave_room_for_other_reads() {
    // Scenario: a principal with 1 MiB a second reads four objects of 32 MiB at a time, and blocks, each again when its
    // refusal says so. Expectation: blocks are served, one within five tries that come in time.
    let setup = served(&principals("bytes/s=1MiB"));
    setup.file("objects/long", &vec![7; 32 << 20]);
    let daemon = setup.start();
    let mut readers = Vec::new();
    for _ in 0..4 {
        let request = wire::object("objects", "long");
        let mut answer = eventually_async("the object is granted", async || {
            let request = with("greedy", request.clone());
            daemon.fetch().await.read_object(request).await.ok()
        })
        .await
        .into_inner();
        readers.push(tokio::spawn(async move {
            while let Ok(Some(_)) = answer.message().await {}
        }));
    }
    for _ in 0..3 {
        let (mut tries, mut due) = (0, Instant::now());
        while let Err(refused) = daemon
            .fetch()
            .await
            .fetch_blocks(with("greedy", wire::blocks("blocks", &[1])))
            .await
        {
            // Whoever comes later than told may find that the objects have taken what was left for it.
            tries += u32::from(due.elapsed() < Duration::from_millis(100));
            assert!(tries < 5, "{refused:?}");
            let details = refused.get_error_details();
            let wait = details.retry_info().and_then(|info| info.retry_delay);
            let wait = wait.expect("a hint");
            due = Instant::now() + wait;
            // As told: the service's time, not the test's.
            timeout(wait, future::pending::<()>()).await.unwrap_err();
        }
    }
    readers.iter().for_each(tokio::task::JoinHandle::abort);
    daemon.stop().await;
}

#[tokio::test]
async fn a_response_that_is_not_read_keeps_no_other_waiting() {
    // Scenario: a principal with 1 MiB a second requests an object of 5 MiB twice and reads neither response; then
    // it requests it once more. Expectation: that comes whole.
    let setup = served(&principals("bytes/s=1MiB")).set("timeouts.send_ms", "600000");
    setup.file("objects/long", &vec![7; 5 << 20]);
    let daemon = setup.start();
    let request = wire::object("objects", "long");
    let narrow = Narrow::connect(daemon.grpc, 65_535).await;
    let token = [("authorization", "Bearer greedy")];
    let mut unread = Vec::new();
    for _ in 0..2 {
        let granted = eventually_async("one is granted", async || {
            let held = narrow.clone().call("ReadObject", &token, &request).await;
            // A refusal: the principal owes for those before.
            (!held.head.headers.contains_key("grpc-status")).then_some(held)
        });
        unread.push(granted.await);
    }
    let mut answer = eventually_async("the last is granted", async || {
        let request = with("greedy", request.clone());
        daemon.fetch().await.read_object(request).await.ok()
    })
    .await
    .into_inner();
    let mut read = 0;
    while let Some(message) = timeout(PATIENCE, answer.message()).await.unwrap().unwrap() {
        read += message.data.len();
    }
    assert_eq!(read, 5 << 20);
    drop(unread);
    daemon.stop().await;
}

#[tokio::test]
async fn a_score_is_charged_for_what_it_reads() {
    // Scenario: a principal with 64 KiB a second scores 200 ids past the end of vectors of 128 KiB, and with 64 KiB of
    // memory a vector that does not fit. Expectation: neither reads anything, and a block is granted at once.
    let score = |ids: Vec<u64>| wire::best("wide", vec![1.0; 1 << 15], ids);
    for (limits, ids, is_scored) in [
        ("bytes/s=64KiB", (2..202).collect(), true),
        ("bytes/s=64KiB,memory=64KiB", vec![0], false),
    ] {
        let setup = served(&principals(limits));
        setup.file("wide.bin", &vec![0; 2 << 17]);
        let daemon = with_wide(setup, 32768).start();
        let scored = daemon
            .fetch()
            .await
            .score_vectors(with("greedy", score(ids)))
            .await;
        assert_eq!(scored.is_ok(), is_scored, "{scored:?}");
        let own = "a vector has 131072 bytes, and one can be scored that has at most 65536 bytes (memory= of the principal)";
        assert!(
            scored
                .err()
                .is_none_or(|status| status.message().starts_with(own))
        );
        assert_eq!(read(&daemon, "greedy", "blocks").await, Ok(()), "{limits}");
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_long_object_that_waits_hears_of_another_limit() {
    // Scenario: a principal with 128 KiB a second reads an object of 16 MiB, which would take two minutes; once it
    // has begun, that limit is removed, and one of less memory is set than the part that waits has bytes.
    // Expectation: the rest arrives soon, in parts that fit.
    let setup = served(&principals("bytes/s=128KiB"));
    setup.file("objects/long", &vec![7; 16 << 20]);
    let daemon = setup.start();
    let request = wire::object("objects", "long");
    let answer = daemon.fetch().await.read_object(with("greedy", request)).await;
    let mut answer = answer.unwrap().into_inner();
    let mut read = 0;
    while read == 0 {
        read += answer.message().await.unwrap().unwrap().data.len();
    }
    relimit(&daemon, "memory=64KiB");
    let rest = async {
        while let Some(message) = answer.message().await.unwrap() {
            read += message.data.len();
        }
    };
    timeout(PATIENCE, rest).await.expect("the rest");
    assert_eq!(read, 16 << 20);
    daemon.stop().await;
}

#[tokio::test]
async fn limits_that_change_all_the_time_cut_no_long_object() {
    // Scenario: four readers of objects of 16 MiB, again and again, whose principal may hold 64 KiB and 8 MiB by
    // turns. Expectation: an answer that has begun is whole.
    const READS: usize = 24;
    let setup = served(&principals("memory=8MiB"));
    setup.file("objects/long", &vec![7; 16 << 20]);
    let daemon = setup.start();
    let changing = async {
        let mut often = tokio::time::interval(Duration::from_millis(10));
        loop {
            for limits in ["memory=64KiB", "memory=8MiB"] {
                often.tick().await;
                relimit(&daemon, limits);
            }
        }
    };
    let messages = Cell::new(0);
    let reading = async || {
        let fetch = daemon.fetch().await;
        for _ in 0..READS {
            let request = wire::object("objects", "long");
            let answer = loop {
                let before = messages.get();
                // Refused while the other readers hold what the principal may have.
                let begun = eventually_async("it begins, or others go on", async || {
                    let request = with("greedy", request.clone());
                    match fetch.clone().read_object(request).await {
                        Ok(answer) => Some(Some(answer)),
                        Err(_) => (messages.get() > before).then_some(None),
                    }
                });
                if let Some(answer) = begun.await {
                    break answer;
                }
            };
            let (mut answer, mut read) = (answer.into_inner(), 0);
            while let Some(message) = timeout(PATIENCE, answer.message()).await.unwrap().unwrap() {
                read += message.data.len();
                messages.set(messages.get() + 1);
            }
            assert_eq!(read, 16 << 20);
        }
    };
    let readers = futures_util::future::join_all((0..4).map(|_| reading()));
    tokio::select! {
        () = changing => unreachable!("it does not end"),
        _all = readers => {}
    }
    daemon.stop().await;
}
