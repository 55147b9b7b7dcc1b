use super::super::close;
use super::super::progress::{ConnectionEvent, SeenEvents};
use super::*;
use std::task::Poll;

const HEAD: &[u8] = b"GET /v1/datasets HTTP/1.1\r\n";

/// Checks once a second, at most this many times, until there is a decision; returns when, and which.
async fn until_decided(
    watch: &mut TimeoutTracker,
    times: &Timeouts,
    progress: &Progress,
    most: u64,
) -> Option<(u64, CloseDecision)> {
    for second in 1..=most {
        tokio::time::advance(Duration::from_secs(1)).await;
        if let Some(decision) = watch.check(times, progress).decision {
            return Some((second, decision));
        }
    }
    None
}

fn times() -> Timeouts {
    let seconds = Duration::from_secs;
    Timeouts {
        handshake: seconds(5),
        head: seconds(10),
        body: seconds(20),
        body_bytes_min: 100,
        send: seconds(20),
        send_bytes_min: 100,
        idle: seconds(50),
        connection_age: seconds(1000),
        connection_age_grace: seconds(30),
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_does_not_begin_is_closed() {
    // Scenario: 23 bytes; an HTTP/1 head that stays incomplete; a preface without a request. Expectation:
    // closed with reason handshake; closed with reason head; closed gracefully with reason head.
    let mut watch = TimeoutTracker::new(0, 256);
    let progress = Progress::default();
    progress.read(&PREFACE[..23]);
    let decided = until_decided(&mut watch, &times(), &progress, 60).await;
    assert_eq!(decided, Some((5, CloseDecision::Close(CloseReason::Handshake))));
    for (bytes, decision) in [
        (HEAD, CloseDecision::Close(CloseReason::Head)),
        (PREFACE, CloseDecision::GoAway(CloseReason::Head)),
    ] {
        let mut watch = TimeoutTracker::new(0, 256);
        let progress = Progress::default();
        progress.read(bytes);
        let decided = until_decided(&mut watch, &times(), &progress, 60).await;
        assert_eq!(decided, Some((11, decision)));
    }
    // Without timeouts, never.
    let off = Timeouts {
        handshake: Duration::ZERO,
        ..times()
    };
    let mut watch = TimeoutTracker::new(0, 256);
    assert_eq!(
        until_decided(&mut watch, &off, &Progress::default(), 800).await,
        None
    );
}

#[tokio::test(start_paused = true)]
async fn a_later_head_has_its_own_time_and_an_idle_connection_another() {
    // Scenario: a request every six seconds, the half of whose head arrives that much earlier, then nothing; the same, then
    // half a head. Expectation: closed gracefully, then finished; closed at once.
    let progress = Arc::new(Progress::default());
    progress.read(HEAD);
    let mut watch = TimeoutTracker::new(0, 256);
    for _ in 0..10 {
        drop(progress.open(true));
        progress.read(HEAD);
        assert_eq!(until_decided(&mut watch, &times(), &progress, 6).await, None);
    }
    drop(progress.open(true));
    let decided = until_decided(&mut watch, &times(), &progress, 60).await;
    assert_eq!(decided, Some((51, CloseDecision::GoAway(CloseReason::Idle))));
    let decided = until_decided(&mut watch, &times(), &progress, 60).await;
    assert_eq!(decided, Some((3, CloseDecision::Finish(CloseReason::Idle))));

    let mut watch = TimeoutTracker::new(0, 256);
    assert_eq!(until_decided(&mut watch, &times(), &progress, 5).await, None);
    progress.read(HEAD);
    let decided = until_decided(&mut watch, &times(), &progress, 60).await;
    assert_eq!(decided, Some((11, CloseDecision::Close(CloseReason::Head))));
}

#[tokio::test(start_paused = true)]
async fn who_receives_the_end_of_an_answer_is_not_cut_off_for_being_idle() {
    // Scenario: a connection is idle for long; its last answer is written, but the client takes its time to receive it.
    // Expectation: it is finished, which waits for the client, and closed only for its age.
    let progress = Arc::new(Progress::default());
    progress.read(HEAD);
    let mut watch = TimeoutTracker::new(0, 256);
    drop(progress.open(true));
    progress.set_unreceived(true);
    let idle = CloseDecision::GoAway(CloseReason::Idle);
    assert_eq!(
        until_decided(&mut watch, &times(), &progress, 60).await,
        Some((51, idle))
    );
    let mut since = 51;
    let close = loop {
        match until_decided(&mut watch, &times(), &progress, 2000).await {
            Some((more, CloseDecision::Finish(_))) => since += more,
            decided => break decided,
        }
    };
    assert_eq!(close, Some((1, CloseDecision::Close(CloseReason::Age))));
    assert!((929..1130).contains(&since), "{since}");
}

#[tokio::test(start_paused = true)]
async fn what_brings_no_data_begins_no_head() {
    // Scenario: after a request over TLS, a record without data. Expectation: the connection is idle.
    let progress = Arc::new(Progress::default());
    progress.read(HEAD);
    let mut watch = TimeoutTracker::new(0, 256);
    drop(progress.open(true));
    progress.received(26);
    let decided = until_decided(&mut watch, &times(), &progress, 60).await;
    assert_eq!(decided, Some((51, CloseDecision::GoAway(CloseReason::Idle))));
}

#[tokio::test(start_paused = true)]
async fn a_body_must_bring_bytes_and_a_stream_may_pause() {
    // Scenario: a body that arrives at 10 bytes a second; one at 4; one whose response has begun.
    // Expectation: only the second is aborted.
    for (bytes_per_s, has_answer, stalls) in [(10, false, false), (4, false, true), (0, true, false)] {
        let progress = Arc::new(Progress::default());
        progress.read(HEAD);
        let mut watch = TimeoutTracker::new(0, 256);
        let exchange = progress.open(false);
        if has_answer {
            exchange.mark_answered();
        }
        let mut stalled = 0;
        for _ in 0..60 {
            tokio::time::advance(Duration::from_secs(1)).await;
            exchange.received(bytes_per_s);
            std::future::poll_fn(|cx| {
                exchange.await_body(cx);
                Poll::Ready(())
            })
            .await;
            let look = watch.check(&times(), &progress);
            assert_eq!(look.decision, None);
            stalled += look.stalled_bodies;
        }
        assert_eq!((stalled, exchange.is_stalled()), (u32::from(stalls), stalls));
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_must_be_taken() {
    // Scenario: a response that is read at 10 bytes a second; at 4; at 4 next to another one that is read
    // fast; a blocked socket. Expectation: continues; closed; closed gracefully, then at once after the
    // grace period; closed.
    for (bytes_per_s, fast, expected) in [
        (10, 0, None),
        (4, 0, Some((21, CloseDecision::Close(CloseReason::Send)))),
        (4, 1000, Some((21, CloseDecision::GoAway(CloseReason::Send)))),
    ] {
        let progress = Arc::new(Progress::default());
        progress.read(PREFACE);
        let mut watch = TimeoutTracker::new(0, 256);
        let (slow, other) = (progress.open(true), progress.open(true));
        slow.produced(1 << 20);
        other.produced(if fast > 0 { 1 << 20 } else { 0 });
        let mut decided = Vec::new();
        for second in 1..=60 {
            tokio::time::advance(Duration::from_secs(1)).await;
            slow.sent(bytes_per_s);
            other.sent(fast);
            progress.wrote(&Poll::Ready(Ok::<_, ()>(bytes_per_s + fast)));
            decided.extend(
                watch
                    .check(&times(), &progress)
                    .decision
                    .map(|decision| (second, decision)),
            );
        }
        assert_eq!(decided.first().copied(), expected, "{decided:?}");
        if fast > 0 {
            assert_eq!(
                decided.get(1),
                Some(&(51, CloseDecision::Close(CloseReason::Send)))
            );
        }
    }
    let progress = Arc::new(Progress::default());
    progress.read(PREFACE);
    let _open = progress.open(true);
    progress.wrote(&Poll::<Result<usize, ()>>::Pending);
    let mut watch = TimeoutTracker::new(0, 256);
    let decided = until_decided(&mut watch, &times(), &progress, 60).await;
    assert_eq!(decided, Some((21, CloseDecision::Close(CloseReason::Send))));
}

#[tokio::test(start_paused = true)]
async fn an_old_connection_leaves_and_gets_its_grace() {
    // Scenario: connections with a request that never ends. Expectation: each is closed gracefully at a
    // slightly different age, its request is told so after half of the grace period, and it is closed at once after
    // all of it.
    let mut ages = Vec::new();
    for salt in 0..20 {
        let progress = Arc::new(Progress::default());
        progress.read(HEAD);
        let mut watch = TimeoutTracker::new(salt, 256);
        let stream = progress.open(true);
        let (age, decision) = until_decided(&mut watch, &times(), &progress, 1200)
            .await
            .unwrap();
        assert_eq!(decision, CloseDecision::GoAway(CloseReason::Age));
        assert!((900..1101).contains(&age), "{age}");
        ages.push(age);
        for is_leaving in [false, true] {
            assert_eq!(until_decided(&mut watch, &times(), &progress, 14).await, None);
            assert_eq!(stream.is_leaving(), is_leaving);
        }
        let decided = until_decided(&mut watch, &times(), &progress, 60).await;
        assert_eq!(decided, Some((2, CloseDecision::Close(CloseReason::Age))));
    }
    ages.sort_unstable();
    ages.dedup();
    assert!(ages.len() > 10, "{ages:?}");
}

#[tokio::test(start_paused = true)]
async fn an_old_connection_of_http1_may_ask_again_until_it_is_idle() {
    // Scenario: a connection that becomes too old, sends one more request, takes ten seconds to read the response, and then
    // sends nothing, with HTTP/1 and with HTTP/2. Expectation: closed after the idle timeout, and soon after the response.
    let times = Timeouts {
        connection_age_grace: Duration::from_secs(300),
        ..times()
    };
    for (beginning, seconds) in [(HEAD, 51), (PREFACE, 3)] {
        let progress = Arc::new(Progress::default());
        progress.read(beginning);
        let mut watch = TimeoutTracker::new(0, 256);
        let request = progress.open(true);
        let (_, decision) = until_decided(&mut watch, &times, &progress, 1200).await.unwrap();
        assert_eq!(decision, CloseDecision::GoAway(CloseReason::Age));
        progress.decide(decision);
        drop(request);
        assert_eq!(until_decided(&mut watch, &times, &progress, 1).await, None);
        let request = progress.open(true);
        assert_eq!(until_decided(&mut watch, &times, &progress, 100).await, None);
        drop(request);
        progress.wrote(&Poll::<Result<usize, ()>>::Pending);
        assert_eq!(until_decided(&mut watch, &times, &progress, 10).await, None);
        progress.wrote(&Poll::Ready(Ok::<_, ()>(1)));
        let decided = until_decided(&mut watch, &times, &progress, 60).await;
        assert_eq!(decided, Some((seconds, CloseDecision::Finish(CloseReason::Age))));
    }
}

#[tokio::test(start_paused = true)]
async fn a_core_checks_connections_as_long_as_it_has_any() {
    // Scenario: a connection that sends nothing; then none; then another one that sends nothing. Expectation: both are told
    // to close after their time, and nothing is kept of them.
    let caller = CallerKey::of([192, 0, 2, 1].into());
    let registry = prometheus::Registry::new();
    let counters = CloseCounters::new(&close::metric(&registry).unwrap(), "grpc");
    let limits = ConnectionLimits::new(&crate::config::Limits::default(), 4096);
    limits.set_timeouts(&times());
    for _ in 0..2 {
        let (progress, mut seen) = (Arc::new(Progress::default()), SeenEvents::default());
        let guard = WatchGuard::start(TimeoutTracker::new(0, 256), &progress, &counters, caller, &limits);
        let event = std::future::poll_fn(|cx| progress.poll_event(cx, &mut seen));
        let event = tokio::time::timeout(times().head, event).await;
        let close = CloseDecision::Close(CloseReason::Handshake);
        assert_eq!(event, Ok(ConnectionEvent::Close(close)));
        drop(guard);
        tokio::time::sleep(2 * TICK_MAX).await;
        assert!(CORE.with_borrow(|core| core.watched.is_empty()));
    }
}

#[tokio::test(start_paused = true)]
async fn all_requests_that_may_be_open_may_be_cancelled_at_once() {
    // Scenario: ticks of 75 ms, in the first of which a client cancels the 256 requests that it may have open, as when
    // their deadlines pass; the same again and again. Expectation: only the latter is a flood.
    let progress = Arc::new(Progress::default());
    progress.read(PREFACE);
    let mut watch = TimeoutTracker::new(0, 256);
    let mut tick = async || {
        (0..256).for_each(|_| drop(progress.open(true)));
        tokio::time::advance(Duration::from_millis(75)).await;
        watch.check(&times(), &progress).decision
    };
    assert_eq!(tick().await, None);
    assert_eq!(tick().await, Some(CloseDecision::Close(CloseReason::Flood)));
}

#[tokio::test(start_paused = true)]
async fn requests_that_are_given_up_by_the_thousand_are_a_flood() {
    // Scenario: 500 cancelled requests a second; 5000 requests, half of them answered; 5000 cancelled; for three seconds.
    // Expectation: only the last is a flood.
    for (given_up, answered, expected) in [
        (500, 0, None),
        (2500, 2500, None),
        (5000, 0, Some(CloseDecision::Close(CloseReason::Flood))),
    ] {
        let progress = Arc::new(Progress::default());
        progress.read(PREFACE);
        let mut watch = TimeoutTracker::new(0, 256);
        for _ in 0..3 {
            (0..given_up).for_each(|_| drop(progress.open(true)));
            (0..answered).for_each(|_| progress.open(true).mark_answered());
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(watch.check(&times(), &progress).decision, expected, "{given_up}");
        }
    }
}
