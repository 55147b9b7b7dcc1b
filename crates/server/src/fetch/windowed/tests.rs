use super::*;
use crate::access::tests::{PrincipalsFile, User, headers_of, line};
use crate::access::{Need, PrincipalLimits};
use crate::config::Limits;
use crate::fetch::tests::{objects_of, serving};
use crate::fetch::{Items, Purpose};
use futures_util::FutureExt as _;
use http_body_util::BodyExt as _;
use ringfetch_engine::error::{Resource, ResponseMax};
use ringfetch_engine::geometry::Extent;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{self, SubscriberExt as _};

#[test]
fn waits_double_and_are_bounded() {
    // All the waits of one window: from the first, doubling, none longer than the longest, 30 s in total.
    let waits: Vec<Duration> = Backoff::default().collect();
    assert_eq!(waits.first(), Some(&WAIT_FIRST));
    assert_eq!(waits[1], WAIT_FIRST * 2);
    assert!(waits.iter().all(|wait| *wait <= WAIT_LONGEST));
    let total: Duration = waits.iter().sum();
    assert!(
        total <= WAIT_TOTAL && total > WAIT_TOTAL - WAIT_LONGEST - WAIT_LONGEST,
        "{total:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn what_a_client_that_left_would_have_read_is_given_back() {
    // Scenario: a principal at 64 KiB/s that owes a minute; a window waits until it is charged unconditionally, and
    // its client goes away. Then one is charged at once, and its client goes away. Expectation: the principal owes
    // what it did before, and nothing.
    let principal = Principal::new("reader");
    let (per_s, debt) = (64 << 10, 60 * (64 << 10));
    principal.set_limits(PrincipalLimits {
        bytes_per_s: per_s,
        ..PrincipalLimits::NONE
    });
    let owed = || {
        principal
            .take_bytes(0)
            .map_or_else(|over| over.retry_after, |()| Duration::ZERO)
    };
    principal.take_bytes(debt).unwrap();
    let before = owed();
    let minute = before + GIVES_WAY_MAX + RATE_LOOK;
    let waiting = tokio::time::timeout(minute, wait_for_rate(Arc::clone(&principal), 1000 * per_s));
    assert!(waiting.await.is_err());
    assert!(owed() <= before, "{:?} of {before:?}", owed());
    principal.give_back_bytes(debt);
    drop(wait_for_rate(Arc::clone(&principal), 1000 * per_s).await);
    assert_eq!(owed(), Duration::ZERO);
}

#[tokio::test]
async fn what_is_being_read_when_a_client_leaves_stays_charged() {
    // Scenario: a principal at 1 KiB/s; a window of 64 KiB is charged, and its client goes away while it is read; then while it
    // waits for memory. Expectation: the principal owes a minute; then nothing, since nothing is read.
    const PER_S: u64 = 1 << 10;
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("a"), vec![7; 64 << 10]).unwrap();
    let fetcher = serving(vec![objects_of(directory.path())], Limits::default());
    let connection = fetcher.callers().connect("192.0.2.1".parse().unwrap(), u64::MAX);
    let access = PrincipalsFile::new(&line("reader", "objects")).access();
    let user = Arc::new(User::default());
    let connection = access.admit(&headers_of("reader"), Need::Known, &connection, &user);
    let connection = connection.unwrap();
    let principal = connection.principal().unwrap();
    principal.set_limits(PrincipalLimits {
        bytes_per_s: PER_S,
        ..PrincipalLimits::NONE
    });
    let context = RequestContext::default();
    let version = fetcher.object("objects", "a", Purpose::Read, &context);
    let reader = SnapshotReader::new(
        fetcher.clone(),
        Some(Arc::clone(&connection)),
        version.await.unwrap(),
        std::time::Instant::now(),
    );
    let whole = Extent {
        offset: 0,
        length: 64 << 10,
    };
    let owes = || principal.take_bytes(0).is_err();
    // Whether the client went away in time: the window had been charged, and was asked for and not there.
    let leaves = async || {
        let mut window = pin!(reader.fetch_with_retry(vec![BodyPart::Extent(whole)]));
        while !owes() {
            assert!(window.as_mut().now_or_never().is_none());
            tokio::task::yield_now().await;
        }
        window.as_mut().now_or_never().is_none()
    };
    while !leaves().await {
        principal.give_back_bytes(whole.length);
    }
    assert!(owes());
    principal.give_back_bytes(whole.length);
    let mut held = Vec::new();
    for length in [whole.length, 1] {
        let window = Items::Objects {
            names: &["a".to_owned()],
            offsets: &[0],
            lengths: &[length],
            if_match: &[],
        };
        loop {
            match fetcher.fetch("objects", "", &window, &context).await {
                Ok(answer) => held.push(answer),
                Err(refused) => break assert!(is_transient(&refused), "{refused}"),
            }
        }
    }
    assert!(leaves().await);
    assert!(!owes());
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_changes_ends_the_wait_for_the_old_one() {
    // Scenario: a principal at 64 KiB/s owes a minute; a window has been charged unconditionally and waits, and the limit is
    // raised. Expectation: it waits until it looks again.
    let principal = Principal::new("reader");
    let limits = |bytes_per_s| PrincipalLimits {
        bytes_per_s,
        ..PrincipalLimits::NONE
    };
    principal.set_limits(limits(64 << 10));
    principal.take_bytes(60 * (64 << 10)).unwrap();
    let begun = Instant::now();
    let raise = async {
        tokio::time::sleep(Duration::from_secs(62)).await;
        principal.set_limits(limits(128 << 10));
    };
    let (_charged, ()) = tokio::join!(wait_for_rate(Arc::clone(&principal), 1), raise);
    assert!(begun.elapsed() < Duration::from_secs(64));
}

#[tokio::test]
async fn nothing_is_read_ahead_while_memory_is_short() {
    // Scenario: an object of three windows of 64 KiB, while little of 1 MiB of response memory is in use, and while half of it
    // is. Expectation: only in the first case is the second window read while the first is sent; all arrive in both.
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("a"), vec![7; 192 << 10]).unwrap();
    let limits = Limits {
        response_bytes: 64 << 10,
        ..Limits::default()
    };
    let fetcher = serving(vec![objects_of(directory.path())], limits);
    let context = RequestContext::default();
    let window = Items::Objects {
        names: &["a".to_owned()],
        offsets: &[0],
        lengths: &[64 << 10],
        if_match: &[],
    };
    let mut held = Vec::new();
    for (answers, is_ahead) in [(0, true), (8, false)] {
        while held.len() < answers {
            held.push(fetcher.fetch("objects", "", &window, &context).await.unwrap());
        }
        let version = fetcher
            .object("objects", "a", Purpose::Read, &context)
            .await
            .unwrap();
        let reader = SnapshotReader::new(fetcher.clone(), None, version, std::time::Instant::now());
        let whole = BodyPart::Extent(Extent {
            offset: 0,
            length: 192 << 10,
        });
        let mut body = WindowedBody::start(reader, vec![whole]).await.unwrap();
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(body.fetching.is_some() || body.fetched.is_some(), is_ahead);
        // While all of it is in use, the rest waits.
        loop {
            match fetcher.fetch("objects", "", &window, &context).await {
                Ok(answer) => held.push(answer),
                Err(refused) => break assert!(is_transient(&refused), "{refused}"),
            }
        }
        if !is_ahead {
            assert!(body.frame().now_or_never().is_none());
        }
        held.truncate(answers);
        let rest = body.collect().await.unwrap().to_bytes();
        assert_eq!(first.len() + rest.len(), 192 << 10);
    }
}

/// Counts warnings.
#[derive(Default)]
struct Warnings(Arc<AtomicUsize>);

impl<S: tracing::Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: layer::Context<'_, S>) {
        if *event.metadata().level() == tracing::Level::WARN {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[tokio::test]
async fn clients_cannot_fill_the_log_with_responses_that_are_cut_short() {
    // Scenario: of an object of three windows the first one is read, and the object is written to, five times. Expectation: each
    // response is cut short; the log has one line.
    let warnings = Arc::default();
    let subscriber = tracing_subscriber::registry().with(Warnings(Arc::clone(&warnings)));
    let _logged = tracing::subscriber::set_default(subscriber);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    let limits = Limits {
        response_bytes: 64 << 10,
        ..Limits::default()
    };
    std::fs::write(&path, vec![7; 192 << 10]).unwrap();
    let fetcher = serving(vec![objects_of(directory.path())], limits);
    let context = RequestContext::default();
    for windows in 1..6 {
        let length = windows * (192 << 10);
        let version = fetcher.object("objects", "a", Purpose::Read, &context);
        let version = version.await.unwrap();
        let reader = SnapshotReader::new(fetcher.clone(), None, version, std::time::Instant::now());
        let whole = BodyPart::Extent(Extent { offset: 0, length });
        let body = WindowedBody::start(reader, vec![whole]).await.unwrap();
        std::fs::write(&path, vec![7; usize::try_from(length + (192 << 10)).unwrap()]).unwrap();
        assert_eq!(body.collect().await.unwrap_err(), FetchError::Changed);
        fetcher.datasets()[0].forget_object("a");
    }
    assert_eq!(warnings.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn the_first_window_counts_from_the_arrival() {
    // Scenario: a limit of a minute; an object of two windows, for a request that arrived now and for one that arrived two
    // minutes ago. Expectation: for the first it comes whole; the second is past its deadline.
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("a"), vec![7; 128 << 10]).unwrap();
    let limits = Limits {
        response_bytes: 64 << 10,
        deadline: Some(Duration::from_secs(60)),
        ..Limits::default()
    };
    let fetcher = serving(vec![objects_of(directory.path())], limits);
    let start = async |arrived| {
        let context = RequestContext::default();
        let version = fetcher.object("objects", "a", Purpose::Read, &context);
        let reader = SnapshotReader::new(fetcher.clone(), None, version.await.unwrap(), arrived);
        let whole = BodyPart::Extent(Extent {
            offset: 0,
            length: 128 << 10,
        });
        WindowedBody::start(reader, vec![whole]).await
    };
    let now = std::time::Instant::now();
    let whole = start(now).await.unwrap().collect().await.unwrap();
    assert_eq!(whole.to_bytes().len(), 128 << 10);
    let late = start(now.checked_sub(Duration::from_secs(120)).unwrap()).await;
    assert_eq!(late.map(drop).unwrap_err(), ReadError::DeadlineExceeded.into());
}

#[test]
fn only_bounds_that_pass_are_waited_for() {
    // Overload is transient; a lost range, a drain and a permanent limit are not.
    assert!(is_transient(&FetchError::Read(ReadError::Overloaded {
        resource: Resource::Memory
    })));
    assert!(!is_transient(&FetchError::Read(ReadError::Draining)));
    assert!(!is_transient(&FetchError::Read(ReadError::Truncated {
        offset: 0,
        length: 1
    })));
    assert!(!is_transient(&FetchError::Read(ReadError::ResponseTooLarge {
        length: 2,
        max: ResponseMax::of_any(1),
    })));
}
