//! What happens to open streams and to later requests when the principals file changes.

use super::rates::metrics;
use super::*;
use crate::reload::{engine, file};
use crate::reload_refused::has_open;
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
use tokio::io::{AsyncBufReadExt as _, BufReader};

#[tokio::test]
async fn a_revoked_credential_ends_its_streams_and_no_others() {
    // Scenario: streams with two tokens of one principal and with one of another, and an idle HTTP
    // connection. A token is added, one is removed, and then the rights of the other change; by SIGHUP, and
    // by the daemon's own check of the file. Expectation: the new token is accepted; the stream and the
    // connection of the removed token end, although they are silent, and the token is refused; then the
    // stream of the changed one ends; the other principal's continues.
    for signal in [Some(Signal::HUP), None] {
        let other = ("other", "other's", "*");
        let daemon = served(&lines(&[
            ("a", "first", "blocks"),
            ("a", "second", "blocks"),
            other,
        ]))
        .start();
        let first = Stream::open(&daemon, "first").await;
        let mut idle = TcpStream::connect(daemon.http).await.unwrap();
        let request = "GET /v1/datasets/blocks/blocks/1 HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer first\r\n\r\n";
        idle.write_all(request.as_bytes()).await.unwrap();
        let mut answer = vec![0; 12];
        idle.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, b"HTTP/1.1 200");
        let mut second = Stream::open(&daemon, "second").await;
        let mut third = Stream::open(&daemon, "other's").await;
        let change = |principals: &[(&str, &str, &str)]| {
            rewrite(&daemon, &lines(principals));
            if let Some(signal) = signal {
                daemon.signal(signal);
            }
        };
        change(&[("a", "new", "blocks"), ("a", "second", "blocks"), other]);
        first.ends().await;
        // The rest of the response and the end of the connection, clean or not.
        let _rest = timeout(PATIENCE, idle.read_to_end(&mut answer))
            .await
            .expect("an end");
        assert_eq!(read(&daemon, "first", "blocks").await, Err(Code::Unauthenticated));
        assert_eq!(read(&daemon, "new", "blocks").await, Ok(()));
        second.answers_one().await.unwrap();
        change(&[("a", "new", "hidden"), ("a", "second", "hidden"), other]);
        second.ends().await;
        assert_eq!(
            read(&daemon, "second", "blocks").await,
            Err(Code::PermissionDenied)
        );
        assert_eq!(read(&daemon, "second", "hidden").await, Ok(()));
        third.answers_one().await.unwrap();
        let scrape = metrics(&daemon, "other's").await;
        let revoked = [("reason", "revoked"), ("transport", "grpc")];
        assert!(scrape.sum("ringfetch_connections_closed_total", &revoked) >= 2);
        assert!(scrape.sum("ringfetch_access_loads_total", &[("result", "ok")]) >= 2);
        drop(third);
        daemon.stop().await;
    }
}

#[tokio::test]
async fn the_last_principal_can_be_revoked() {
    // Scenario: a stream of the only principal, whose line is replaced by a comment, by SIGHUP and by the daemon's own check; then
    // a daemon that starts with that file. Expectation: the stream ends, and the token is refused, by the second daemon too; the
    // log says so.
    for signal in [Some(Signal::HUP), None] {
        let daemon = served(&lines(&[("a", "only", "*")])).start();
        let mut stream = Stream::open(&daemon, "only").await;
        stream.answers_one().await.unwrap();
        rewrite(&daemon, "# nobody\n");
        if let Some(signal) = signal {
            daemon.signal(signal);
        }
        stream.ends().await;
        assert_eq!(read(&daemon, "only", "blocks").await, Err(Code::Unauthenticated));
        daemon.logged(&["the principals file has no line: no credential is accepted"]);
        daemon.stop().await;
    }
    let daemon = served("# nobody\n").start();
    assert_eq!(read(&daemon, "only", "blocks").await, Err(Code::Unauthenticated));
    daemon.stop().await;
}

#[tokio::test]
async fn limits_are_a_principals_own_and_change_under_its_streams() {
    // Scenario: a principal with a stream and a memory limit smaller than one response; another without
    // limits; the limit grows, and shrinks. Expectation: only the first is refused what does not fit, but
    // gets an object in parts that fit; the stream continues, and each new limit applies to it; metrics count
    // by name, refusals by its own limits from 0 on; a principal that is removed has no series.
    let of = |limits: &str| {
        let rights = format!("blocks,objects {limits}");
        lines(&[("small", "small", &rights), ("root", "root", "*")])
    };
    let setup = served(&of("memory=64KiB,requests=8"));
    setup.file("objects/long", &vec![7; 1 << 20]);
    let daemon = setup.start();
    let long = get(&daemon, "small", "/v1/datasets/objects/objects/long").await;
    assert_eq!((long.status.as_u16(), long.body.len()), (200, 1 << 20));
    let mut stream = Stream::open(&daemon, "small").await;
    let large = |token| {
        let indices: Vec<u64> = (0..32).collect();
        with(token, wire::blocks("blocks", &indices))
    };
    let mut fetch = daemon.fetch().await;
    let refused = fetch.fetch_blocks(large("small")).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    fetch.fetch_blocks(large("root")).await.unwrap();
    let rewritten = |limits: &str| {
        rewrite(&daemon, &of(limits));
        daemon.signal(Signal::HUP);
    };
    rewritten("memory=1MiB,requests=8");
    eventually_async("it fits", async || {
        daemon.fetch().await.fetch_blocks(large("small")).await.ok()
    })
    .await;
    stream.answers_one().await.unwrap();
    rewritten("memory=64KiB");
    eventually_async("it fits no more", async || {
        daemon.fetch().await.fetch_blocks(large("small")).await.err()
    })
    .await;
    stream.answers_one().await.unwrap();
    let seen = metrics(&daemon, "root").await;
    let requests = "ringfetch_principal_requests_total";
    assert!(seen.sum(requests, &[("principal", "small")]) >= 4);
    assert!(seen.sum(requests, &[("principal", "root")]) >= 2);
    assert_eq!(seen.sum(requests, &[("principal", "anonymous")]), 0);
    // From the start on, the limits in its line, and no others.
    let refusals = "ringfetch_principal_rejected_total{principal=\"root\",reason=\"";
    let mut reasons = Vec::from_iter(seen.text.lines().filter_map(|line| line.strip_prefix(refusals)));
    reasons.sort_unstable();
    assert_eq!(
        reasons,
        [
            "bytes_per_second\"} 0",
            "principal_memory\"} 0",
            "principal_requests\"} 0",
            "requests_per_second\"} 0",
        ]
    );
    for metric in [
        "ringfetch_principal_requests_in_flight",
        "ringfetch_principal_memory_bytes",
    ] {
        let nothing = format!("{metric}{{principal=\"small\"}} 0");
        eventually_async("it holds nothing", async || {
            metrics(&daemon, "root")
                .await
                .text
                .contains(&nothing)
                .then_some(())
        })
        .await;
    }
    rewrite(&daemon, &lines(&[("root", "root", "*")]));
    daemon.signal(Signal::HUP);
    stream.ends().await;
    assert!(
        !metrics(&daemon, "root")
            .await
            .text
            .contains("principal=\"small\"")
    );
    daemon.stop().await;
}

#[tokio::test]
async fn fewer_requests_in_flight_end_no_response_that_has_begun() {
    // Scenario: a principal begins to read an object over each transport; its limit is lowered to one request in flight. It reads
    // a block, the rest of one response while the other is unread, and then the rest of the other. Expectation: all is read.
    let of = |limits: &str| {
        let rights = format!("blocks,objects {limits}");
        lines(&[("one", "one", &rights), ("root", "root", "*")])
    };
    let setup = served(&of("requests=2"));
    setup.file("objects/long", &vec![7; 32 << 20]);
    let daemon = setup.start();
    let request = with("one", wire::object("objects", "long"));
    let mut call = daemon
        .fetch()
        .await
        .read_object(request)
        .await
        .unwrap()
        .into_inner();
    let mut mirrored = TcpStream::connect(daemon.http).await.unwrap();
    let request = "GET /v1/datasets/objects/objects/long HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one\r\n\r\n";
    mirrored.write_all(request.as_bytes()).await.unwrap();
    let mut body = BufReader::new(mirrored);
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        body.read_line(&mut line).await.unwrap();
    }
    rewrite(&daemon, &of("requests=1"));
    daemon.signal(Signal::HUP);
    eventually_async("the limit is lowered", async || {
        let loads = metrics(&daemon, "root").await;
        (loads.sum("ringfetch_access_loads_total", &[("result", "ok")]) == 1).then_some(())
    })
    .await;
    read(&daemon, "one", "blocks").await.unwrap();
    let mut called = 0;
    while let Some(message) = call.message().await.unwrap() {
        called += message.data.len();
    }
    assert_eq!(called, 32 << 20);
    let mut whole = vec![0; 32 << 20];
    body.read_exact(&mut whole).await.unwrap();
    assert!(whole.iter().all(|byte| *byte == 7));
    daemon.stop().await;
}

#[tokio::test]
async fn scores_need_no_more_memory_than_their_principal_has() {
    // Scenario: a principal with 64 KiB of response memory scores 1,024 vectors of 512 bytes. Expectation: it
    // gets its scores, since candidates are read in parts that fit.
    let setup = served(&lines(&[("small", "small", "wide memory=64KiB")]));
    setup.file("wide.bin", &vec![0; 1024 * 512]);
    let daemon = with_wide(setup, 128).start();
    let request = v1::ScoreVectorsRequest {
        limit: 3,
        ..wire::best("wide", vec![1.0; 128], (0..1024).collect())
    };
    let scored = daemon
        .fetch()
        .await
        .score_vectors(with("small", request))
        .await
        .unwrap();
    assert_eq!(scored.into_inner().results[0].ids, [0, 1, 2]);
    daemon.stop().await;
}

#[tokio::test]
async fn a_limit_of_its_own_is_named_to_its_principal() {
    // Scenario: a principal that may have one request in flight, or 64 KiB of response memory, makes several requests at once,
    // next to an unread response to a long object. Expectation: at least one is refused by its own limit, which is named;
    // another principal is served; and so is the first once that response has ended. A batch that its memory
    // can never hold is too large.
    let sixteen: Vec<u64> = (0..16).collect();
    for (limit, reason) in [
        ("requests=1", "principal_requests"),
        ("memory=64KiB", "principal_memory"),
    ] {
        own_limit(limit, reason, &sixteen).await;
    }
    let setup = served(&lines(&[("one", "one", "blocks memory=64KiB")]));
    let daemon = setup.start();
    let seventeen: Vec<u64> = (0..17).collect();
    let call = daemon
        .fetch()
        .await
        .fetch_blocks(with("one", wire::blocks("blocks", &seventeen)))
        .await;
    let refused = call.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    for part in ["split the batch", "65536 bytes (memory= of the principal)"] {
        assert!(refused.message().contains(part), "{refused:?}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn an_item_above_its_principals_memory_is_told_how_to_be_read() {
    // Scenario: a principal with 64 KiB of response memory fetches single items that are longer, with a short one in
    // their batch and without; another principal without limits fetches one that is longer than any response.
    // Expectation: the item fails alone, with the limit that it exceeds and a remedy for a single item, which works.
    let rights = [("small", "small", "* memory=64KiB"), ("root", "root", "*")];
    let setup = served(&lines(&rights));
    setup.file("objects/long", &vec![7; 4 << 20]);
    setup.file("wide.bin", &vec![7; 2 * 80_000]);
    let daemon = with_wide(setup, 20_000).start();
    let mut fetch = daemon.fetch().await;
    let says = |message: &str, parts: &[&str]| {
        let missing = parts.iter().find(|part| !message.contains(**part));
        assert_eq!(missing, None, "{message}");
        assert!(!message.contains("split the batch"), "{message}");
    };
    let own = ["65536", "memory= of the principal", "fetch it in ranges"];
    for ranges in [&[(0, 65_537)][..], &[(0, 65_537), (0, 4096)]] {
        let request = with("small", wire::ranges("blocks", ranges));
        let answer = fetch.fetch_ranges(request).await.unwrap().into_inner();
        assert_eq!((answer.errors.len(), answer.errors[0].item), (1, 0));
        says(&answer.errors[0].message, &own);
        assert_eq!(answer.data.len(), 4096 * (ranges.len() - 1));
    }
    let request = with("small", wire::vectors("wide", &[1]));
    let answer = fetch.fetch_vectors(request).await.unwrap().into_inner();
    says(&answer.errors[0].message, &own);
    let vector = get(&daemon, "small", "/v1/datasets/wide/vectors/1").await;
    vector.is_problem(413, "item-too-large", Some("id"), &own);
    let halves = [(80_000, 40_000), (120_000, 40_000)];
    for half in halves {
        let request = with("small", wire::ranges("wide", &[half]));
        let answer = fetch.fetch_ranges(request).await.unwrap().into_inner();
        assert_eq!((answer.errors.len(), answer.data.len()), (0, 40_000));
    }
    let most = ["3145728", "limits.response_bytes", "ReadObject"];
    for (token, parts) in [("small", own), ("root", most)] {
        let request = with(token, wire::objects("objects", &["long"]));
        let answer = fetch.fetch_objects(request).await.unwrap().into_inner();
        says(&answer.errors[0].message, &parts);
    }
    let long = get(&daemon, "small", "/v1/datasets/objects/objects/long").await;
    assert_eq!((long.status.as_u16(), long.body.len()), (200, 4 << 20));
    daemon.stop().await;
}

async fn own_limit(limit: &str, reason: &str, blocks: &[u64]) {
    let granted = format!("blocks,objects {limit}");
    let rights = [("one", "one", &granted[..]), ("root", "root", "*")];
    let setup = served(&lines(&rights));
    setup.file("objects/long", &vec![7; 64 << 20]);
    let daemon = setup.start();
    let mut unread = TcpStream::connect(daemon.http).await.unwrap();
    let request = "GET /v1/datasets/objects/objects/long HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one\r\n\r\n";
    unread.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    unread.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 200");
    let fetch = daemon.fetch().await;
    let ask = async |token| {
        let request = with(token, wire::blocks("blocks", blocks));
        fetch.clone().fetch_blocks(request).await
    };
    // While the sockets' buffers fill, the response may hold less for a moment.
    let mut refusals = Vec::new();
    eventually_async("one is refused", async || {
        let answers = futures_util::future::join_all((0..8).map(|_| ask("one"))).await;
        refusals.extend(answers.into_iter().filter_map(Result::err));
        (!refusals.is_empty()).then_some(())
    })
    .await;
    let (name, _) = limit.split_once('=').unwrap();
    for refused in &refusals {
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(refused.message().contains(&format!("{name}=")), "{refused:?}");
    }
    ask("root").await.unwrap();
    let seen = metrics(&daemon, "root").await;
    let refused = |name: &str| seen.sum(name, &[("reason", reason)]);
    let refusals = refusals.len() as u64;
    assert_eq!(refused("ringfetch_principal_rejected_total"), refusals);
    assert_eq!(refused("ringfetch_rejected_total"), refusals);
    drop(unread);
    eventually_async("it is served", async || ask("one").await.ok()).await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_bad_file_is_refused_at_the_start_and_changes_nothing_later() {
    // Scenario: files that are missing, empty, not regular, blank, with a line that is too short,
    // with one credential twice; at startup and while the daemon serves. Expectation: exit code 2, or 3 where it may pass, with key,
    // file and remedy; later the reload fails with the key, the log says that the old file stays in force,
    // and it does; no part of a hash is printed.
    let good = lines(&[("a", "a", "blocks"), ("root", "root", "@admin")]);
    let twice = good.repeat(2);
    let short = format!("a sha256:{}\n", hash("a"));
    let bad = [
        (None, "cannot be read"),
        (Some(""), "is empty"),
        (Some(" \n\n"), "has no text"),
        (Some(&short[..]), "line 1 must have three or four words"),
        (Some(&twice[..]), "line 3 repeats the credential of line 1"),
    ];
    for (text, said) in bad {
        let setup = served(text.unwrap_or_default());
        if text.is_none() {
            fs::remove_file(setup.path("principals")).unwrap();
        }
        for refused in [setup.refused(), setup.run(&["check-config", "--open"])] {
            let code = if text.is_none_or(str::is_empty) { 3 } else { 2 };
            refused.with(code, &["access.principals", "/principals: ", said]);
            assert!(!refused.said.contains(&hash("a")[..8]), "{}", refused.said);
        }
    }
    let daemon = served(&good).start();
    for (text, said) in bad {
        match text {
            Some(text) => rewrite(&daemon, text),
            None => fs::remove_file(daemon.path("principals")).unwrap(),
        }
        let reload = with("root", v1::ReloadRequest {});
        let refused = daemon.admin_client().await.reload(reload).await.unwrap_err();
        assert!(refused.message().contains("access.principals"), "{refused:?}");
        assert!(refused.message().contains(said), "{refused:?}");
        assert_eq!(read(&daemon, "a", "blocks").await, Ok(()));
        assert_eq!(read(&daemon, "a", "hidden").await, Err(Code::PermissionDenied));
    }
    daemon.logged(&["the principals file cannot be used; the old one stays in force"]);
    assert!(!daemon.log().join("\n").contains(&hash("a")[..8]));
    rewrite(&daemon, &lines(&[("a", "a", "hidden")]));
    // One response decides: the file may be read between two.
    eventually_async("the good file is read", async || {
        let answer = get(&daemon, "a", "/v1/datasets/hidden/blocks/1").await;
        (answer.status == 200).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
#[ignore = "needs root and /dev/fuse"]
async fn a_file_system_that_does_not_respond_is_reported() {
    // Scenario: the principals file is on a file system that stops responding; later it responds again. Expectation: the log
    // reports it, and the daemon serves with the old file; then the file that has been written meanwhile is in force.
    let directory = tempfile::tempdir().unwrap();
    let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
    fs::create_dir_all(&source).unwrap();
    fs::create_dir_all(&mountpoint).unwrap();
    let (both, root) = (
        [("a", "a", "blocks"), ("root", "root", "*")],
        ("root", "root", "*"),
    );
    fs::write(source.join("principals"), lines(&both)).unwrap();
    let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
    let file = disk.path().join("principals");
    let daemon = served("")
        .set("access.principals", file.to_str().unwrap())
        .start();
    disk.hold_attributes();
    let reported = eventually_async("it is reported", async || {
        let has_line = |line: &String| line.contains("reading TLS or principals files again takes long");
        daemon.log().iter().any(has_line).then_some(())
    });
    // A daemon whose thread waits for the disk cannot be killed.
    let reported = timeout(PATIENCE, reported).await;
    let served = read(&daemon, "a", "blocks").await;
    fs::write(source.join("principals"), lines(&[root])).unwrap();
    disk.release_attributes();
    reported.expect("it is reported");
    assert_eq!(served, Ok(()));
    eventually_async("the principal is removed", async || {
        // The removal closes a connection whose answer is not sent yet (docs/ACCESS.md).
        let (http, header) = (daemon.http_client(), [("authorization", "Bearer a")]);
        let answer = http.try_get("/v1/datasets/blocks/blocks/1", &header).await?;
        (answer.status == 401).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_principal_is_removed_also_while_connections_hold_all_descriptors() {
    // Scenario: a principal's stream, and silent connections that have taken every descriptor; the principal is removed.
    // Expectation: its stream ends, although nobody gives a descriptor back.
    let root = ("root", "root", "*");
    let daemon = served(&lines(&[("a", "a", "blocks"), root]))
        .set("timeouts.handshake_ms", "0")
        .set("timeouts.head_ms", "0")
        .start();
    let stream = Stream::open(&daemon, "a").await;
    let descriptors = format!("/proc/{}/fd", daemon.pid().as_raw_nonzero());
    let open = || fs::read_dir(&descriptors).unwrap().count();
    let (before, mut silent) = (open(), Vec::new());
    for _ in 0..40 {
        silent.push(TcpStream::connect(daemon.http).await.unwrap());
    }
    eventually_async("they are accepted", async || {
        (open() >= before + silent.len()).then_some(())
    })
    .await;
    let limit = Rlimit {
        current: (0..).find(|fd| !has_open(&daemon, *fd)),
        ..getrlimit(Resource::Nofile)
    };
    prlimit(Some(daemon.pid()), Resource::Nofile, limit).unwrap();
    rewrite(&daemon, &lines(&[root]));
    stream.ends().await;
    drop(silent);
    daemon.stop().await;
}

#[tokio::test]
async fn a_file_that_moves_is_checked_in_its_new_place_only() {
    // Scenario: principals, certificate and key are moved, and the configuration names the new place, with a mistake in a
    // file there, and without; then it turns both off. It names an access log that cannot be written. Expectation: a reload with the mistake is refused, with the new
    // path; the others succeed and report the keys, although the old files are gone.
    let authority = Authority::new();
    let setup = Setup::new("mmap");
    setup.file("blocks.bin", &[7; 4096]);
    let text = |keys: &str| file(&format!("{}\n{keys}", engine("mmap")), &["blocks"]);
    let named = |place: &str| {
        text(&format!(
            "access: {{principals: {place}principals}}\ntls: {{certificate: {place}chain.pem, key: {place}key.pem, ports: [grpc]}}"
        ))
    };
    let pair = authority.pair("daemon");
    let principals = lines(&[("root", "root", "*,@admin")]);
    for (name, bytes) in [
        ("chain.pem", &pair.chain),
        ("key.pem", &pair.key),
        ("principals", &principals),
    ] {
        setup.file(&format!("old/{name}"), bytes.as_bytes());
    }
    let daemon = setup.whole(&named("old/")).start();
    let reload = async || {
        let request = with("root", v1::ReloadRequest {});
        let answer = daemon.admin_client().await.reload(request).await;
        answer.map(tonic::Response::into_inner)
    };
    fs::rename(daemon.path("old"), daemon.path("new")).unwrap();
    daemon.rewrite(&named("new/"));
    for (name, good) in [("chain.pem", &pair.chain), ("principals", &principals)] {
        fs::write(daemon.path("new").join(name), "nonsense").unwrap();
        let refused = reload().await.unwrap_err();
        assert!(refused.message().contains(&format!("new/{name}")), "{refused:?}");
        fs::write(daemon.path("new").join(name), good).unwrap();
    }
    let keys = ["tls.certificate", "tls.key", "access.principals"];
    daemon.rewrite(&text("access_log: {path: gone/access.log}"));
    let refused = reload().await.unwrap_err();
    assert!(refused.message().contains("gone/access.log"), "{refused:?}");
    for text in [named("new/"), text("")] {
        daemon.rewrite(&text);
        let answer = reload().await.unwrap();
        let waiting: Vec<_> = answer
            .needs_restart
            .iter()
            .map(|change| &change.key[..])
            .collect();
        assert!(keys.iter().all(|key| waiting.contains(key)), "{waiting:?}");
    }
    daemon.stop().await;
}
