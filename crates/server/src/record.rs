//! What is recorded about a request, from its head to the last byte of its response, or about one request of
//! a FetchStream. The access log and the span exporter receive each record when it ends.
//!
//! Records are not passed as arguments: while a request is polled, its record is the current one of the
//! thread, and code that learns something about the request calls `note`. Without a [`Recorder`] there are no
//! records, and a request pays only a few branches.

use crate::access_log::AccessLog;
use crate::rpc_metrics::{Method as _, Outcome, grpc_code_name, grpc_method_of, http_code_name, is_success};
use crate::spans::Spans;
use crate::trace_context::TraceContext;
use crate::{admin, grpc};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header};
use pin_project_lite::pin_project;
use ringfetch_engine::batch::Fetched;
use ringfetch_engine::sync::lock;
use std::cell::RefCell;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};
use tonic::{Code, Status};

/// Sent by the client or generated; returned in the response.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest request id that is accepted from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;
/// Longest dataset name that is recorded, in characters: clients may send any name.
const NAME_CHARS_MAX: usize = 128;
/// The method of requests that match no known method.
const OTHER: &str = "other";

/// Creates the records of a port. Clones share the access log and the exporter.
#[derive(Debug, Clone)]
pub struct Recorder {
    access_log: Option<AccessLog>,
    spans: Option<Spans>,
}

/// What is known about a request.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) request_id: String,
    /// Its trace: the client's, or a new one if the client sent none and the request is sampled.
    pub(crate) trace: Option<TraceContext>,
    pub(crate) span_id: u64,
    /// The principal, if known.
    pub(crate) principal: Option<Arc<str>>,
    pub(crate) peer: Option<IpAddr>,
    /// The port: `grpc`, `http` or `admin`.
    pub(crate) transport: &'static str,
    /// The name that metrics use.
    pub(crate) method: &'static str,
    /// The id of a request of a FetchStream.
    pub(crate) batch: Option<u64>,
    /// The requested name, whether such a dataset exists or not.
    pub(crate) dataset: Option<String>,
    pub(crate) items: u64,
    pub(crate) failed_items: u64,
    /// Bytes of items that were read.
    pub(crate) bytes: u64,
    /// Bytes of the response's body that were written to the socket; `None` for a request of a stream.
    pub(crate) sent_bytes: Option<u64>,
    /// Time in the queue and on the disk, summed over its reads.
    pub(crate) queue: Duration,
    pub(crate) disk: Duration,
    /// When the response's head was ready.
    answered: Option<Instant>,
    /// The name that metrics use.
    pub(crate) code: Option<&'static str>,
}

impl Facts {
    /// How the request ended. Without a whole response: cancelled by its client.
    pub(crate) fn code(&self) -> &'static str {
        self.code.unwrap_or(match self.transport {
            "http" => "499",
            _ => grpc_code_name(Code::Cancelled),
        })
    }

    /// Whether the request, or one of its items, failed.
    pub(crate) fn is_error(&self) -> bool {
        self.failed_items > 0 || !is_success(self.code())
    }

    fn set_dataset(&mut self, name: &str) {
        if self.dataset.as_deref() != Some(name) {
            self.dataset = Some(name.chars().take(NAME_CHARS_MAX).collect());
        }
    }

    /// Forgets what was requested and read: it changed meanwhile, and is requested again for the same request.
    pub(crate) fn begin_again(&mut self) {
        (self.items, self.failed_items, self.bytes) = (0, 0, 0);
    }

    /// Counts requested items.
    pub(crate) fn add_items(&mut self, items: usize) {
        self.items = self.items.saturating_add(items as u64);
    }

    /// Counts requested items that failed.
    pub(crate) fn add_failed(&mut self, items: usize) {
        self.failed_items = self.failed_items.saturating_add(items as u64);
    }

    /// Counts what was read.
    pub(crate) fn add_read(&mut self, fetched: &Fetched) {
        let times = fetched.times;
        self.bytes = self.bytes.saturating_add(fetched.data.len() as u64);
        self.queue += Duration::from_nanos(times.queue_ns);
        self.disk += Duration::from_nanos(times.total_ns.saturating_sub(times.queue_ns));
    }
}

/// The record of one request. It is reported when it is dropped.
#[derive(Debug)]
pub(crate) struct Record {
    recorder: Recorder,
    arrived: SystemTime,
    started: Instant,
    facts: Mutex<Facts>,
}

/// When a request arrived, and how long it took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) arrived: SystemTime,
    pub(crate) duration: Duration,
    /// From the response's head to its last byte.
    pub(crate) send: Option<Duration>,
}

impl Recorder {
    /// Reports to the access log and the span exporter; `None` without either.
    pub fn new(access_log: Option<AccessLog>, spans: Option<Spans>) -> Option<Self> {
        (access_log.is_some() || spans.is_some()).then_some(Self { access_log, spans })
    }

    /// Starts the record of a request.
    pub(crate) fn begin<B>(
        &self,
        request: &Request<B>,
        peer: Option<IpAddr>,
        transport: &'static str,
    ) -> Arc<Record> {
        let headers = request.headers();
        let path = request.uri().path();
        let method = match transport {
            "http" => OTHER,
            "admin" => grpc_method_of(path, admin::SERVICES).name(),
            _ => grpc_method_of(path, grpc::SERVICES).name(),
        };
        let facts = Facts {
            request_id: request_id(headers),
            trace: TraceContext::of(headers).or_else(|| self.spans.as_ref()?.new_trace()),
            span_id: fastrand::u64(1..),
            principal: None,
            peer: peer.map(|peer| peer.to_canonical()),
            transport,
            method,
            batch: None,
            dataset: None,
            items: 0,
            failed_items: 0,
            bytes: 0,
            sent_bytes: Some(0),
            queue: Duration::ZERO,
            disk: Duration::ZERO,
            answered: None,
            code: None,
        };
        Arc::new(Record {
            recorder: self.clone(),
            arrived: SystemTime::now(),
            started: Instant::now(),
            facts: Mutex::new(facts),
        })
    }
}

/// The client's request id if it is one short word, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).map(HeaderValue::as_bytes);
    let is_word =
        |id: &&[u8]| (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic);
    let given = given.filter(is_word).and_then(|id| std::str::from_utf8(id).ok());
    given.map_or_else(|| format!("{:032x}", fastrand::u128(..)), str::to_owned)
}

impl Record {
    fn change(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut lock(&self.facts));
    }

    /// The head of the response is ready. Adds the request id to it.
    pub(crate) fn answered(&self, status: StatusCode, headers: &mut HeaderMap) {
        let code_of_head = match headers.get(Status::GRPC_STATUS) {
            Some(code) => Some(grpc_code_name(Code::from_bytes(code.as_bytes()))),
            None if is_grpc(headers) => None,
            None => Some(http_code_name(status)),
        };
        self.change(|facts| {
            facts.answered = Some(Instant::now());
            facts.code = facts.code.or(code_of_head);
            if let Ok(id) = HeaderValue::from_str(&facts.request_id) {
                headers.insert(REQUEST_ID, id);
            }
        });
    }

    /// The response has ended: `outcome` as metrics count it, if they do, and whether it was sent completely.
    pub(crate) fn ended(&self, sent_bytes: u64, outcome: Option<Outcome>, is_sent: bool) {
        self.change(|facts| {
            facts.sent_bytes = Some(sent_bytes);
            facts.code = match outcome {
                Some(outcome) => Some(outcome.code_name()),
                None => facts.code.filter(|code| is_sent || !is_success(code)),
            };
        });
    }

    /// The record of one request of this stream.
    fn part(&self, started: Instant, id: u64, method: &'static str) -> Arc<Self> {
        let facts = lock(&self.facts);
        let parent_id = facts.span_id;
        let facts = Facts {
            trace: facts.trace.map(|trace| TraceContext { parent_id, ..trace }),
            span_id: fastrand::u64(1..),
            method,
            batch: Some(id),
            sent_bytes: None,
            code: None,
            answered: None,
            ..facts.clone()
        };
        Arc::new(Self {
            recorder: self.recorder.clone(),
            arrived: SystemTime::now()
                .checked_sub(started.elapsed())
                .unwrap_or(self.arrived),
            started,
            facts: Mutex::new(facts),
        })
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    let media_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    media_type.is_some_and(|media_type| media_type.starts_with(b"application/grpc"))
}

impl Drop for Record {
    fn drop(&mut self) {
        let facts = self.facts.get_mut().unwrap_or_else(PoisonError::into_inner);
        let times = Times {
            arrived: self.arrived,
            duration: self.started.elapsed(),
            send: facts.answered.map(|answered| answered.elapsed()),
        };
        if let Some(log) = &self.recorder.access_log {
            log.write(facts, times);
        }
        if let Some(spans) = &self.recorder.spans {
            spans.report(facts, times);
        }
    }
}

thread_local! {
    /// The record of the request that is being polled.
    static CURRENT: RefCell<Option<Arc<Record>>> = const { RefCell::new(None) };
}

/// Records something about the request that is being polled, if it is recorded.
pub(crate) fn note(change: impl FnOnce(&mut Facts)) {
    // There is none while the thread ends.
    let _none = CURRENT.try_with(|current| {
        if let Some(record) = &*current.borrow() {
            record.change(change);
        }
    });
}

/// Records the requested dataset.
pub(crate) fn note_dataset(name: &str) {
    note(|facts| facts.set_dataset(name));
}

/// Polls something as part of this request, if it is recorded.
pub(crate) fn within<T>(record: Option<&Arc<Record>>, poll: impl FnOnce() -> T) -> T {
    struct Restore(Option<Arc<Record>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let Some(record) = record else { return poll() };
    let _restore = Restore(CURRENT.replace(Some(Arc::clone(record))));
    poll()
}

pin_project! {
    /// A request of a stream, with a record of its own.
    pub(crate) struct RecordedPart<F> {
        #[pin]
        future: F,
        record: Option<Arc<Record>>,
        stream_deadline: Option<Instant>,
    }

    impl<F> PinnedDrop for RecordedPart<F> {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            // Not answered: the stream has ended. Its client may have left before the deadline, but not after it.
            if let (Some(record), Some(deadline)) = (this.record, *this.stream_deadline)
                && tokio::time::Instant::now() >= deadline.into()
            {
                let code = grpc_code_name(Code::DeadlineExceeded);
                record.change(|facts| facts.code = facts.code.or(Some(code)));
            }
        }
    }
}

/// Starts a record for one request of the stream that is being polled, if that is recorded. `future` reports
/// failures to [`note`], and the dataset unless it is refused before that is known.
pub(crate) fn part<F>(
    started: Instant,
    id: u64,
    method: &'static str,
    refused_dataset: Option<&str>,
    stream_deadline: Option<Instant>,
    future: F,
) -> RecordedPart<F> {
    let record = CURRENT.with_borrow(|stream| stream.as_ref().map(|stream| stream.part(started, id, method)));
    if let (Some(record), Some(name)) = (&record, refused_dataset) {
        record.change(|facts| facts.set_dataset(name));
    }
    RecordedPart {
        future,
        record,
        stream_deadline,
    }
}

impl<F: Future> Future for RecordedPart<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let polled = within(this.record.as_ref(), || this.future.poll(cx));
        if polled.is_ready()
            && let Some(record) = this.record.take()
        {
            record.change(|facts| facts.code = facts.code.or(Some(grpc_code_name(Code::Ok))));
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_short_word_is_a_request_id() {
        // Scenario: request ids from clients: words, none, empty, with blanks, too long. Expectation: words
        // are accepted as they are; the others are replaced by a new id, never the same.
        let id = |given: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for given in given {
                headers.append(REQUEST_ID, HeaderValue::from_static(given));
            }
            request_id(&headers)
        };
        for word in ["a", "7f3c-11", "\"quoted\"", "a/b:c=d"] {
            assert_eq!(id(&[word]), word);
        }
        let long: &'static str = "a".repeat(REQUEST_ID_BYTES_MAX + 1).leak();
        assert_eq!(id(&[&long[1..]]), long[1..]);
        for bad in [&[][..], &[""], &["a b"], &[long]] {
            let made = id(bad);
            assert!(made.len() == 32 && made != id(bad), "{bad:?}: {made}");
        }
    }
}
