//! Objects read as streams, from a server that refuses, stalls, lies and disconnects midway. Time is paused: waits are exact and
//! take no real time.

use crate::failover::of_two;
use crate::fake::{Dialled, Fake, ObjectMessages, Pipes, STILL, builder, with_hint};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use ringfetch_client::{Client, Code, Error, ObjectPart, ObjectStream, RetryBudget, RetryPolicy};
use ringfetch_proto::v1 as wire;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;
use tonic::Status;

const VERSION: &str = "v1";
/// Of the object, and of each message but the last.
const LENGTH: u64 = 9_500;
const STEP: u64 = 1_000;

/// Bytes of the object. 251 is prime, so a gap or a repetition shows.
fn bytes(from: u64, to: u64) -> Vec<u8> {
    (from..to).map(|offset| (offset % 251) as u8).collect()
}

fn head(request: &wire::ReadObjectRequest) -> wire::ReadObjectResponse {
    wire::ReadObjectResponse {
        etag: VERSION.to_owned(),
        object_length_bytes: LENGTH,
        offset: request.offset,
        ..Default::default()
    }
}

fn data(from: u64, to: u64) -> wire::ReadObjectResponse {
    wire::ReadObjectResponse {
        offset: from,
        data: bytes(from, to).into(),
        ..Default::default()
    }
}

/// The messages of the correct answer.
fn messages(request: &wire::ReadObjectRequest) -> Vec<Result<wire::ReadObjectResponse, Status>> {
    let end = match request.length {
        0 => LENGTH,
        length => request.offset + length,
    };
    let steps = (request.offset..end).step_by(STEP as usize);
    let steps = steps.map(|from| data(from, end.min(from + STEP)));
    std::iter::once(head(request)).chain(steps).map(Ok).collect()
}

/// The first messages of the correct answer, and nothing more.
fn first(request: &wire::ReadObjectRequest, count: usize) -> Vec<Result<wire::ReadObjectResponse, Status>> {
    let mut messages = messages(request);
    messages.truncate(count);
    messages
}

fn sent(messages: Vec<Result<wire::ReadObjectResponse, Status>>) -> ObjectMessages {
    stream::iter(messages).boxed()
}

/// What was requested: offset, length and version.
type Log = Arc<Mutex<Vec<(u64, u64, String)>>>;

fn note(log: &Log, request: &wire::ReadObjectRequest) {
    let entry = (request.offset, request.length, request.if_match.clone());
    log.lock().unwrap().push(entry);
}

/// A fake whose first call sends two chunks and ends in this way, and whose others are right.
fn breaks_once(log: &Log, ending: impl Fn() -> ObjectMessages + Send + Sync + 'static) -> Fake {
    let log = Arc::clone(log);
    Fake::new().on_object(move |n, request| {
        note(&log, &request);
        Ok(match n {
            0 => sent(first(&request, 3)).chain(ending()).boxed(),
            _ => sent(messages(&request)),
        })
    })
}

async fn open(client: &Client) -> ObjectStream {
    client.read_object("d", &ObjectPart::whole("o")).await.unwrap()
}

/// What is left of it.
async fn rest(object: &mut ObjectStream) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = object.try_next().await? {
        assert!(!chunk.is_empty());
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

#[tokio::test(start_paused = true)]
async fn an_object_arrives_in_order_and_its_version_and_length_are_known_first() {
    // Scenario: an object whole, in part, and from its end on; a part of no bytes. Expected: version, length and bytes of each;
    // the last is never sent.
    let fake = Fake::new().on_object(|_, request| Ok(sent(messages(&request))));
    let client = fake.client();
    let parts = [
        (0, None),
        (2_500, None),
        (2_500, Some(10)),
        (0, Some(LENGTH)),
        (LENGTH, None),
    ];
    for (offset, length) in parts {
        let part = ObjectPart::new("o", offset, length);
        let mut object = client.read_object("d", &part).await.unwrap();
        let end = length.map_or(LENGTH, |length| offset + length);
        let known = (object.etag(), object.object_length_bytes(), object.length_bytes());
        assert_eq!(known, (VERSION, LENGTH, end - offset));
        assert!(rest(&mut object).await.unwrap() == bytes(offset, end), "{part:?}");
        assert!(object.next().await.is_none());
    }
    let error = client.read_object("d", &ObjectPart::new("o", 0, 0)).await;
    let error = error.unwrap_err();
    assert!(
        matches!(error, Error::Invalid { field: "length", .. }),
        "{error:?}"
    );
    assert_eq!(fake.calls(), parts.len());
}

#[tokio::test(start_paused = true)]
async fn a_read_that_breaks_goes_on_with_the_same_version() {
    // Scenario: midway the connection breaks, or the server ends the call: UNAVAILABLE, or RESOURCE_EXHAUSTED with a hint of
    // 400 ms. Expected: all bytes; a second call for what is missing, of the version that the first had, after the hint.
    let hint = Duration::from_millis(400);
    let endings: [Option<Status>; 3] = [
        None,
        Some(Status::unavailable("draining")),
        Some(with_hint(tonic::Code::ResourceExhausted, hint)),
    ];
    for ending in endings {
        let (log, pipes) = (Log::default(), Pipes::default());
        let (is_cut, has_hint) = (
            ending.is_none(),
            ending.as_ref().is_some_and(|end| !end.details().is_empty()),
        );
        let fake = breaks_once(&log, move || match &ending {
            None => stream::pending().boxed(),
            Some(status) => sent(vec![Err(status.clone())]),
        });
        let client = builder().connect_lazy_with(pipes.through(fake.connector()));
        let begin = Instant::now();
        let mut object = open(&client.unwrap()).await;
        let mut found = object.try_next().await.unwrap().unwrap().to_vec();
        if is_cut {
            pipes.cut();
        }
        found.extend(rest(&mut object).await.unwrap());
        assert!(found == bytes(0, LENGTH));
        let log = log.lock().unwrap();
        let [_, (from, length, version)] = &log[..] else {
            panic!("{log:?}");
        };
        // When the connection breaks, the second chunk may be on its way.
        assert!(*from == 2 * STEP || (is_cut && *from == STEP), "{log:?}");
        assert_eq!((from + length, &version[..]), (LENGTH, VERSION));
        assert!(!has_hint || begin.elapsed() >= hint, "{:?}", begin.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn attempts_are_counted_from_the_last_byte() {
    // Scenario: every call ends after one chunk; then the second and all later ones are refused; the first time without retries.
    // Expected: all bytes, with a call for each chunk; the refusal, after as many calls as the policy has attempts.
    let fake = Fake::new().on_object(|_, request| {
        let ending = sent(vec![Err(Status::unavailable("draining"))]);
        Ok(sent(first(&request, 2)).chain(ending).boxed())
    });
    let found = rest(&mut open(&fake.client()).await).await.unwrap();
    assert!(found == bytes(0, LENGTH));
    assert_eq!(fake.calls(), 10);

    for (policy, calls) in [(RetryPolicy::none(), 1), (RetryPolicy::default(), 15)] {
        let fake = Fake::new().on_object(|n, request| match n {
            0 => Ok(sent(first(&request, 2))
                .chain(sent(vec![Err(Status::unavailable("draining"))]))
                .boxed()),
            _ => Err(Status::unavailable("draining")),
        });
        let client = fake.client_with(builder().retry(policy).timeout(None));
        let error = rest(&mut open(&client).await).await.unwrap_err();
        assert_eq!(error.code(), Some(Code::Unavailable), "{error:?}");
        assert_eq!(fake.calls(), calls);
    }
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_gone_ends_the_read_with_an_error_that_says_so() {
    // Scenario: the object is written to while it is sent; it was replaced, or removed, when the read goes on. Then there is none
    // from the start. Expected: VersionLost, with the first byte that is missing and the server's code, and no more; the
    // status, since nothing was read.
    for code in [
        tonic::Code::Aborted,
        tonic::Code::FailedPrecondition,
        tonic::Code::NotFound,
    ] {
        let fake = Fake::new().on_object(move |n, request| {
            let ending = if code == tonic::Code::Aborted {
                Status::new(code, "it is written to")
            } else {
                Status::unavailable("draining")
            };
            match n {
                0 => Ok(sent(first(&request, 3)).chain(sent(vec![Err(ending)])).boxed()),
                _ => Err(Status::new(code, "another version")),
            }
        });
        let mut object = open(&fake.client()).await;
        let error = rest(&mut object).await.unwrap_err();
        let at = 2 * STEP;
        assert!(
            matches!(error, Error::VersionLost { offset, .. } if offset == at),
            "{error:?}"
        );
        assert_eq!(error.code(), Code::from_number(code.into()));
        assert_eq!((error.label(), error.is_retryable()), ("VERSION_LOST", false));
        assert!(error.to_string().contains("from byte 2000 on"), "{error}");
        assert!(object.next().await.is_none());
    }
    let fake = Fake::new().on_object(|_, _| Err(Status::not_found("no such object")));
    let error = fake.client().read_object("d", &ObjectPart::whole("o")).await;
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Status(_)), "{error:?}");
    assert_eq!(fake.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn another_server_goes_on_only_with_the_same_version() {
    // Scenario: of two servers, the one that sends an object goes away. The other one has the same files; has copies; has
    // copies, and the first one returns. Expected: all bytes, from the other one; VersionLost; all bytes, from the first.
    for (is_same, returns) in [(true, false), (false, false), (false, true)] {
        let (log, pipes) = (Log::default(), Pipes::default());
        let home = breaks_once(&log, || stream::pending().boxed());
        let other = Fake::new().on_object(move |_, request| {
            assert_eq!(request.if_match, VERSION);
            if is_same {
                return Ok(sent(messages(&request)));
            }
            Err(Status::failed_precondition("another version"))
        });
        let (to_home, to_other) = (pipes.through(home.connector()), other.connector());
        let dials = AtomicUsize::new(0);
        let client = builder()
            .endpoint("http://fake:2")
            .connect_lazy_with(move || -> Dialled {
                match dials.fetch_add(1, Ordering::SeqCst) {
                    0 => to_home(),
                    2 => to_other(),
                    3.. if returns => to_home(),
                    _ => Box::pin(async { Err(std::io::ErrorKind::ConnectionRefused.into()) }),
                }
            });
        let mut object = open(&client.unwrap()).await;
        let mut found = object.try_next().await.unwrap().unwrap().to_vec();
        pipes.cut();
        let outcome = rest(&mut object).await;
        if is_same || returns {
            found.extend(outcome.unwrap());
            assert!(found == bytes(0, LENGTH));
        } else {
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::VersionLost { .. }), "{error:?}");
            assert_eq!(error.code(), Some(Code::FailedPrecondition));
        }
        assert!(other.calls() >= 1);
        assert_eq!(home.calls(), if returns { 2 } else { 1 });
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_has_another_version_is_asked_within_the_budget() {
    // Scenario: of two servers, the one that sends an object goes away for good, and the other one has copies; the client may retry
    // once. Expected: VersionLost, after one call of the other one.
    let (log, pipes) = (Log::default(), Pipes::default());
    let home = breaks_once(&log, || stream::pending().boxed());
    let other = Fake::new().on_object(|_, _| Err(Status::failed_precondition("another version")));
    let (to_home, to_other) = (pipes.through(home.connector()), other.connector());
    let dials = AtomicUsize::new(0);
    let mut budget = RetryBudget::default();
    // Half of them are for retries, and the last failure takes one, too.
    budget.tokens_max = 4;
    let client = builder()
        .retry_budget(budget)
        .endpoint("http://fake:2")
        .connect_lazy_with(move || -> Dialled {
            match dials.fetch_add(1, Ordering::SeqCst) {
                0 => to_home(),
                2 => to_other(),
                _ => Box::pin(async { Err(std::io::ErrorKind::ConnectionRefused.into()) }),
            }
        });
    let mut object = open(&client.unwrap()).await;
    object.try_next().await.unwrap().unwrap();
    pipes.cut();
    let error = rest(&mut object).await.unwrap_err();
    assert!(matches!(error, Error::VersionLost { .. }), "{error:?}");
    assert_eq!((home.calls(), other.calls()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_a_read_gets_the_next_calls_last() {
    // Scenario: the first of two servers ends a read with UNAVAILABLE, without retries; then four calls. Expected: all go to the
    // other one.
    let home = breaks_once(&Log::default(), || {
        sent(vec![Err(Status::unavailable("draining"))])
    });
    let other = Fake::new();
    let settings = builder().retry(RetryPolicy::none());
    let client = of_two(settings, home.connector(), other.connector());
    rest(&mut open(&client).await).await.unwrap_err();
    for _ in 0..4 {
        client.fetch_blocks("d", &[1]).await.unwrap();
    }
    assert_eq!((home.calls(), other.calls()), (1, 4));
}

#[tokio::test(start_paused = true)]
async fn the_timeout_is_for_each_wait() {
    // Scenario: with a timeout of 10 s, a chunk every 9 s; a caller that takes one chunk an hour; a server that stops midway, and
    // one that does not begin. Expected: all bytes, twice; DeadlineExceeded after 10 s, twice.
    let slow = Fake::new().on_object(|_, request| {
        // The head and the first chunk come together.
        let later = messages(&request).into_iter().skip(2);
        let later = stream::iter(later).then(|message| async {
            tokio::time::sleep(Duration::from_secs(9)).await;
            message
        });
        Ok(sent(first(&request, 2)).chain(later).boxed())
    });
    let begin = Instant::now();
    let found = rest(&mut open(&slow.client()).await).await.unwrap();
    assert!(found == bytes(0, LENGTH));
    assert!(begin.elapsed() >= Duration::from_secs(8 * 9));

    let whole = Fake::new().on_object(|_, request| Ok(sent(messages(&request))));
    let (mut object, mut found) = (open(&whole.client()).await, Vec::new());
    while let Some(chunk) = object.try_next().await.unwrap() {
        found.extend_from_slice(&chunk);
        // The caller's own work: time has to pass.
        tokio::time::sleep(Duration::from_secs(3600)).await;
    }
    assert!(found == bytes(0, LENGTH));

    for count in [3, 0] {
        let stops = Fake::new()
            .on_object(move |_, request| Ok(sent(first(&request, count)).chain(stream::pending()).boxed()));
        let begin = Instant::now();
        let object = stops.client().read_object("d", &ObjectPart::whole("o")).await;
        let error = match object {
            Ok(mut object) => rest(&mut object).await.unwrap_err(),
            Err(error) => error,
        };
        assert!(matches!(error, Error::DeadlineExceeded), "{error:?}");
        assert_eq!((begin.elapsed().as_secs(), stops.calls()), (10, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_does_not_read_stops_its_server_and_nobody_else() {
    // Scenario: an object of 32 MiB, of which the caller takes one chunk, with one call in flight at most. Expected: the server
    // sends what the window and the pipes hold, 6 MiB at most; another call is answered meanwhile; then the rest arrives.
    const MESSAGE: u64 = 256 << 10;
    const COUNT: u64 = 128;
    let made = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&made);
    let fake = Fake::new().on_object(move |_, request| {
        let head = wire::ReadObjectResponse {
            object_length_bytes: COUNT * MESSAGE,
            ..head(&request)
        };
        let made = Arc::clone(&count);
        let chunks = (0..COUNT).map(move |number| {
            made.fetch_add(1, Ordering::SeqCst);
            Ok(wire::ReadObjectResponse {
                offset: number * MESSAGE,
                data: vec![number as u8; MESSAGE as usize].into(),
                ..Default::default()
            })
        });
        Ok(stream::iter(std::iter::once(Ok(head)).chain(chunks)).boxed())
    });
    let client = fake.client_with(builder().max_in_flight(1));
    let mut object = open(&client).await;
    let chunk = object.try_next().await.unwrap().unwrap();
    tokio::time::sleep(STILL).await;
    let sent = made.load(Ordering::SeqCst) as u64 * MESSAGE;
    assert!(sent <= 6 << 20, "{sent} bytes");
    client.fetch_blocks("d", &[1]).await.unwrap();
    let mut left = COUNT * MESSAGE - chunk.len() as u64;
    while let Some(chunk) = object.try_next().await.unwrap() {
        assert!(chunk.len() <= 256 << 10);
        left -= chunk.len() as u64;
    }
    assert_eq!((left, made.load(Ordering::SeqCst) as u64), (0, COUNT));
}

#[tokio::test(start_paused = true)]
async fn what_contradicts_the_request_is_a_protocol_error() {
    // Scenario: answers that begin elsewhere, have no version, a gap, a repetition, an empty message, too many bytes or too few, or
    // an object that is too short for the part; a second call that has another version. Expected: a protocol error each, and no
    // byte of it.
    type Lie = fn(wire::ReadObjectRequest) -> Vec<wire::ReadObjectResponse>;
    let lies: [(&str, Lie); 9] = [
        ("nothing", |_| vec![]),
        ("elsewhere", |request| {
            let offset = 1;
            vec![wire::ReadObjectResponse {
                offset,
                ..head(&request)
            }]
        }),
        ("no version", |request| {
            let etag = String::new();
            vec![
                wire::ReadObjectResponse {
                    etag,
                    ..head(&request)
                },
                data(0, 2_000),
            ]
        }),
        ("a gap", |request| {
            vec![head(&request), data(0, 1_000), data(1_001, 2_000)]
        }),
        ("a repetition", |request| {
            vec![head(&request), data(0, 1_000), data(0, 1_000)]
        }),
        ("an empty message", |request| {
            vec![head(&request), data(0, 0), data(0, 2_000)]
        }),
        ("too many", |request| vec![head(&request), data(0, 2_001)]),
        ("too few", |request| vec![head(&request), data(0, 1_999)]),
        ("too short", |request| {
            let object_length_bytes = 1_999;
            vec![
                wire::ReadObjectResponse {
                    object_length_bytes,
                    ..head(&request)
                },
                data(0, 1_999),
            ]
        }),
    ];
    for (case, lie) in lies {
        let fake =
            Fake::new().on_object(move |_, request| Ok(sent(lie(request).into_iter().map(Ok).collect())));
        let object = fake
            .client()
            .read_object("d", &ObjectPart::new("o", 0, 2_000))
            .await;
        let error = match object {
            Ok(mut object) => rest(&mut object).await.unwrap_err(),
            Err(error) => error,
        };
        assert!(matches!(error, Error::Protocol { .. }), "{case}: {error:?}");
        assert_eq!(fake.calls(), 1, "{case}");
    }
    let fake = Fake::new().on_object(|n, request| {
        let etag = format!("v{}", n + 1);
        let begin = [
            Ok(wire::ReadObjectResponse {
                etag,
                ..head(&request)
            }),
            Ok(data(request.offset, request.offset + 1)),
            Err(Status::unavailable("draining")),
        ];
        Ok(sent(begin.into()))
    });
    let mut object = open(&fake.client()).await;
    assert_eq!(object.try_next().await.unwrap().unwrap(), bytes(0, 1)[..]);
    let error = rest(&mut object).await.unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
}
