//! Parses the JSON of requests. A core that parses a long one would serve nobody meanwhile, so threads do that: for each caller
//! one at a time, so that nobody waits for all that another has sent (ADR 0013). What nobody waits for any more, because its
//! client is gone or its deadline has passed, is not parsed.

use super::batch_request::parse;
use super::problem::Problem;
use crate::caller::Connection;
use crate::fetch::{Fetcher, timeout_at, within};
use bytes::Bytes;
use memchr::memmem;
use ringfetch_engine::blocking::BlockingPool;
use ringfetch_engine::share::Charge;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest body that a core parses itself: up to 2.7 ms (measured, a score's ids of one digit; items of a full batch have 64 bytes
/// each). One of 4 MiB takes up to 75 ms.
const PARSED_AT_ONCE_BYTES_MAX: usize = 256 << 10;

/// At most one request of each caller waits for them.
static PARSERS: BlockingPool = BlockingPool::new("rf-parse", 2);

/// A member of every request, as its text has it.
const DEADLINE: &[u8] = br#""deadline_ms""#;

/// Most places that are looked at, since each takes time: a hostile request has 280,000. In an honest one, others are objects of this
/// name.
const PLACES_MAX: usize = 1000;

/// A long request, until it is parsed or nobody waits for that any more.
struct LongRequest {
    body: Bytes,
    /// For its memory.
    charge: Option<Charge>,
}

/// Parses a request's JSON as [`parse`] does. `charge`, for its memory, is returned with it.
///
/// # Errors
/// As those of [`parse`]; or `DeadlineExceeded`, of a long request that has to wait until then.
pub(super) async fn parse_body<R: DeserializeOwned + Send + 'static>(
    fetcher: &Fetcher,
    connection: Option<&Arc<Connection>>,
    body: Bytes,
    items_max: usize,
    charge: Option<Charge>,
    arrival: Instant,
) -> Result<(R, usize, Option<Charge>), Problem> {
    if body.len() <= PARSED_AT_ONCE_BYTES_MAX {
        let (request, listed) = parse(&body, items_max)?;
        return Ok((request, listed, charge));
    }
    let stated = stated_deadline(&body).map(|deadline| arrival + deadline);
    let deadline = within(&fetcher.limits(), arrival, stated);
    let long = LongRequest { body, charge };
    let parsing = parse_long(&PARSERS, connection, long, deadline, move |body| {
        parse(body, items_max)
    });
    // Boxed, so that the state of short requests is not enlarged.
    let parsed = timeout_at(deadline, Box::pin(parsing)).await.flatten();
    let (parsed, charge) = parsed.ok_or_else(|| fetcher.deadline_rejection(connection))?;
    let (request, listed) = parsed?;
    Ok((request, listed, charge))
}

/// Has a thread of the pool parse a request in its caller's turn. `None`: its deadline had passed before.
///
/// # Cancel safety
/// If the future is dropped, the request is not parsed, unless that has begun.
async fn parse_long<T: Send + 'static>(
    pool: &'static BlockingPool,
    connection: Option<&Arc<Connection>>,
    long: LongRequest,
    deadline: Option<Instant>,
    parse: impl Fn(&[u8]) -> T + Clone + Send + 'static,
) -> Option<(T, Option<Charge>)> {
    let turn = match connection {
        Some(connection) => Some(connection.parsing_turn().await),
        None => None,
    };
    let long = Arc::new(long);
    // Only this future and the thread that parses it keep its memory.
    let (waiting, on_this_thread) = (Arc::downgrade(&long), parse.clone());
    let parsing = pool.run(move || {
        let _turn = turn;
        let long = waiting.upgrade()?;
        let is_late = deadline.is_some_and(|deadline| deadline <= Instant::now());
        (!is_late).then(|| parse(&long.body))
    });
    let parsed = match parsing {
        Ok(parsing) => parsing.await.ok(),
        Err(_no_thread) => None,
    };
    let parsed = parsed.unwrap_or_else(|| Some(on_this_thread(&long.body)))?;
    Some((parsed, Arc::into_inner(long).and_then(|long| long.charge)))
}

/// The deadline that a request states, found without parsing it. The text of a valid request has `"deadline_ms"` before a colon
/// nowhere else: quotes within strings are escaped.
fn stated_deadline(body: &[u8]) -> Option<Duration> {
    let mut places = memmem::find_iter(body, DEADLINE).take(PLACES_MAX);
    let stated = places.find_map(|place| {
        let rest = body.get(place + DEADLINE.len()..)?.trim_ascii_start();
        let value = rest.strip_prefix(b":")?.trim_ascii_start();
        let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
        std::str::from_utf8(value.get(..digits)?)
            .ok()?
            .parse::<u32>()
            .ok()
    });
    // 0: none.
    let stated = stated.filter(|milliseconds| *milliseconds > 0)?;
    Some(Duration::from_millis(stated.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use crate::fetch::RequestMemory;
    use crate::fetch::tests::without_datasets;
    use crate::http::batch_request::tests::rendered;
    use futures_util::future::{FutureExt as _, join_all};
    use serde::Deserialize;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Which thread has parsed it.
    #[derive(Debug)]
    struct ParsedBy(Option<String>);

    impl<'de> Deserialize<'de> for ParsedBy {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            serde::de::IgnoredAny::deserialize(deserializer)?;
            Ok(Self(std::thread::current().name().map(str::to_owned)))
        }
    }

    /// A body of this many bytes.
    fn padded(json: &str, bytes: usize) -> Bytes {
        (json.to_owned() + &" ".repeat(bytes - json.len())).into()
    }

    /// Its charge in `fetcher`'s request memory.
    fn charged(fetcher: &Fetcher, bytes: usize) -> Option<Charge> {
        let mut memory = RequestMemory::new(fetcher, None);
        memory.whole(bytes, 0).unwrap();
        memory.into_charge()
    }

    #[tokio::test]
    async fn a_long_body_is_not_parsed_by_the_core() {
        // Scenario: the longest body that a core parses, one that is longer, and one that is not JSON, all charged. Expectation: the
        // second is parsed by another thread; both are still charged then; the third is refused, and charged no more.
        let fetcher = without_datasets(Limits::default());
        let used = || fetcher.callers().budgets().request_memory.used();
        let parsed = async |bytes: usize, json: &str| {
            let charge = charged(&fetcher, bytes);
            parse_body::<ParsedBy>(&fetcher, None, padded(json, bytes), 1, charge, Instant::now()).await
        };
        let most = PARSED_AT_ONCE_BYTES_MAX;
        for (bytes, is_long) in [(most, false), (most + 1, true)] {
            let (ParsedBy(thread), _, charge) = parsed(bytes, "{}").await.unwrap();
            assert_eq!(thread.as_deref() == Some("rf-parse"), is_long, "{thread:?}");
            assert!(charge.is_some_and(|charge| charge.amount() == used()));
        }
        assert!(parsed(most + 1, "{").await.is_err());
        assert_eq!(used(), 0);
    }

    /// What a thread does until the test lets it go on: notes the body's length, and waits.
    #[derive(Clone)]
    struct Slow {
        begin: Sender<usize>,
        held: Arc<Mutex<Receiver<()>>>,
    }

    impl Slow {
        /// Also what has begun, and what lets all go on once it is dropped.
        fn new() -> (Self, Receiver<usize>, Sender<()>) {
            let ((begin, begun), (release, held)) = (channel(), channel());
            let held = Arc::new(Mutex::new(held));
            (Self { begin, held }, begun, release)
        }

        fn parse(&self, body: &[u8]) {
            self.begin.send(body.len()).expect("the test");
            let _released = self.held.lock().expect("the test").recv();
        }
    }

    fn long(bytes: usize, charge: Option<Charge>) -> LongRequest {
        let body = vec![b' '; bytes].into();
        LongRequest { body, charge }
    }

    #[tokio::test]
    async fn a_callers_long_bodies_do_not_keep_others_waiting() {
        // Scenario: on two threads, a caller with three bodies on two connections, of which the first is being parsed, and then another
        // caller with one. Expectation: that is parsed meanwhile; then the first caller's others, in the order of arrival.
        static POOL: BlockingPool = BlockingPool::new("rf-test-turns", 2);
        let fetcher = without_datasets(Limits::default());
        let connect = |address: &str| fetcher.callers().connect(address.parse().unwrap(), 1 << 20);
        let (first, second) = (connect("192.0.2.1"), connect("192.0.2.1"));
        let (slow, begun, release) = Slow::new();
        let parse = |connection, bytes| {
            let slow = slow.clone();
            let parse = move |body: &[u8]| slow.parse(body);
            Box::pin(parse_long(
                &POOL,
                Some(connection),
                long(bytes, None),
                None,
                parse,
            ))
        };
        let mut own = [parse(&first, 1), parse(&second, 2), parse(&first, 3)];
        for parsing in &mut own {
            assert!(parsing.as_mut().now_or_never().is_none());
        }
        assert_eq!(begun.recv(), Ok(1));
        let other = connect("192.0.2.2");
        let others = parse_long(&POOL, Some(&other), long(4, None), None, <[u8]>::len);
        assert_eq!(others.await.map(|(length, _)| length), Some(4));
        assert!(begun.try_recv().is_err());
        drop(release);
        assert!(join_all(own).await.iter().all(Option::is_some));
        assert!(begun.try_iter().eq([2, 3]));
    }

    #[tokio::test]
    async fn what_nobody_waits_for_is_not_parsed_and_holds_nothing() {
        // Scenario: the only thread is busy; of another caller, one body waits for it and one for its turn, when their client leaves;
        // then one comes, and one whose deadline has passed. Expectation: the first two hold no memory any more; only the third is
        // parsed.
        static POOL: BlockingPool = BlockingPool::new("rf-test-gone", 1);
        let fetcher = without_datasets(Limits::default());
        let used = || fetcher.callers().budgets().request_memory.used();
        let connect = |address: &str| fetcher.callers().connect(address.parse().unwrap(), 1 << 20);
        let (greedy, other) = (connect("192.0.2.1"), connect("192.0.2.2"));
        let (slow, begun, release) = Slow::new();
        let parse = |connection, bytes, deadline| {
            let (slow, charge) = (slow.clone(), charged(&fetcher, 1 << 20));
            let parse = move |body: &[u8]| slow.parse(body);
            Box::pin(parse_long(
                &POOL,
                Some(connection),
                long(bytes, charge),
                deadline,
                parse,
            ))
        };
        let mut busy = parse(&greedy, 1, None);
        assert!(busy.as_mut().now_or_never().is_none());
        assert_eq!(begun.recv(), Ok(1));
        let mut gone = [parse(&other, 2, None), parse(&other, 3, None)];
        for parsing in &mut gone {
            assert!(parsing.as_mut().now_or_never().is_none());
        }
        assert_eq!(used(), 3 << 20);
        drop(gone);
        assert_eq!(used(), 1 << 20);
        let mut comes = parse(&other, 4, None);
        assert!(comes.as_mut().now_or_never().is_none());
        drop(release);
        assert!(busy.await.is_some());
        assert!(comes.await.is_some());
        assert!(parse(&other, 5, Some(Instant::now())).await.is_none());
        assert!(begun.try_iter().eq([4]));
        assert_eq!(used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_body_waits_no_longer_than_its_deadline() {
        // Scenario: another body of the caller is being parsed; one comes that states a deadline of 2 s, and one without. Expectation:
        // 504 after 2 s, and at the daemon's deadline, after 60 s; neither holds memory.
        let fetcher = without_datasets(Limits::default());
        let connection = fetcher.callers().connect("192.0.2.1".parse().unwrap(), 1 << 20);
        let _turn = connection.parsing_turn().await;
        let bytes = PARSED_AT_ONCE_BYTES_MAX + 1;
        let begin = tokio::time::Instant::now();
        for (json, seconds) in [(r#"{"deadline_ms": 2000}"#, 2), ("{}", 60)] {
            let (body, charge, arrival) = (padded(json, bytes), charged(&fetcher, bytes), begin.into_std());
            let parsed = parse_body::<ParsedBy>(&fetcher, Some(&connection), body, 1, charge, arrival).await;
            assert_eq!(rendered(parsed.unwrap_err()).await.0, 504);
            assert_eq!(begin.elapsed().as_secs(), seconds);
        }
        assert_eq!(fetcher.callers().budgets().request_memory.used(), 0);
    }

    #[test]
    fn the_deadline_is_found_wherever_it_is_stated() {
        // Texts with the member first, last, with spaces, after a name and a value of the same letters; then without it, with none,
        // too large, as text, within a string, and cut off. Expectation: its value; none.
        for (text, expected) in [
            (r#"{"deadline_ms":50,"ids":[1]}"#, Some(50)),
            ("{\"ids\":[1],\"deadline_ms\" :\n 4294967295}", Some(u32::MAX)),
            (r#"{"names":["deadline_ms","x"],"deadline_ms":7}"#, Some(7)),
            (r#"{"ids":[1]}"#, None),
            (r#"{"deadline_ms":0}"#, None),
            (r#"{"deadline_ms":4294967296}"#, None),
            (r#"{"deadline_ms":"5"}"#, None),
            (r#"{"names":["\"deadline_ms\":5"]}"#, None),
            (r#"{"deadline_ms""#, None),
        ] {
            let expected = expected.map(|milliseconds| Duration::from_millis(milliseconds.into()));
            assert_eq!(stated_deadline(text.as_bytes()), expected, "{text}");
        }
    }
}
