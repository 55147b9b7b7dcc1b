//! Requests counted and timed, in the same way for every transport:
//! `ringfetch_rpc_requests_total{transport,method,code}` and
//! `ringfetch_rpc_duration_seconds{transport,method}`.
//!
//! Each thread counts in its own slot, merged at scrape, so that counting a request moves no cache line
//! between cores. Labels are closed sets: methods are enums, codes are tables.
//!
//! A request of a port is timed until its response's head and counted when its response has ended, since the end
//! may change its code: see `Outcome`.
//!
//! A FetchStream counts as one call; its reads are in the engine's metrics. Series appear with their first
//! request.

mod labels;
mod outcome;

use crate::record;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use ringfetch_engine::series::{Catalog, DURATION_BOUNDS_NS, HistogramTotal};
use std::borrow::Borrow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use self::labels::{GRPC_CODES, HTTP_CLIENT_LEFT, HTTP_CODES, grpc_code_index, http_code_index};
pub use self::labels::{GrpcMethod, HttpOperation, grpc_code_name};
pub(crate) use self::labels::{grpc_method_of, http_code_name, is_common_service};
pub(crate) use self::outcome::{Collected, Outcome, collect, cut_short, is_success, replaced};

const REQUESTS: &str = "ringfetch_rpc_requests_total";
const DURATION: &str = "ringfetch_rpc_duration_seconds";

const GRPC: usize = 0;
const HTTP: usize = 1;
const TRANSPORTS: [&str; 2] = ["grpc", "http"];
const METHODS_MAX: usize = 20;
const CODES_MAX: usize = 27;

/// Number of slots. If there are more threads, they share slots, which is only slower.
const SLOTS: usize = 32;

/// Counts of a method in a slot. Aligned so that slots never share a cache line (128: x86 fetches lines in pairs).
#[derive(Debug)]
#[repr(align(128))]
struct Counts {
    codes: [AtomicU64; CODES_MAX],
    /// The last one is for values above every bound.
    buckets: [AtomicU64; DURATION_BOUNDS_NS.len() + 1],
    sum_ns: AtomicU64,
}

impl Counts {
    const fn new() -> Self {
        Self {
            codes: [const { AtomicU64::new(0) }; CODES_MAX],
            buckets: [const { AtomicU64::new(0) }; DURATION_BOUNDS_NS.len() + 1],
            sum_ns: AtomicU64::new(0),
        }
    }
}

type Slot = [[Counts; METHODS_MAX]; TRANSPORTS.len()];

#[derive(Debug)]
struct Inner {
    slots: Vec<Box<Slot>>,
    catalog: Catalog,
}

/// Counts and times requests. Clones share the counts.
#[derive(Debug, Clone)]
pub struct RpcMetrics {
    inner: Arc<Inner>,
}

/// A method of a transport, with its status codes.
pub trait Method: Copy {
    /// The transport's status code.
    type Code;
    /// Which transport.
    const TRANSPORT: usize;
    /// The number of the code of a request that its client cancelled.
    const ABANDONED: usize;
    /// `method` labels, by number.
    const METHOD_LABELS: &[&'static str];
    /// `code` labels, by number.
    const CODE_LABELS: &[&'static str];

    /// Its number.
    fn index(self) -> usize;
    /// Its `method` label.
    fn name(self) -> &'static str {
        Self::METHOD_LABELS[self.index()]
    }
    /// The number of a code.
    fn code_index(code: Self::Code) -> usize;
}

impl Method for GrpcMethod {
    type Code = tonic::Code;
    const TRANSPORT: usize = GRPC;
    const ABANDONED: usize = tonic::Code::Cancelled as usize;
    const METHOD_LABELS: &[&'static str] = Self::LABELS;
    const CODE_LABELS: &[&'static str] = &GRPC_CODES;

    fn index(self) -> usize {
        self as usize
    }
    fn code_index(code: tonic::Code) -> usize {
        grpc_code_index(code)
    }
}

impl Method for HttpOperation {
    type Code = ::http::StatusCode;
    const TRANSPORT: usize = HTTP;
    /// The code that nginx logs.
    const ABANDONED: usize = HTTP_CLIENT_LEFT;
    const METHOD_LABELS: &[&'static str] = Self::LABELS;
    const CODE_LABELS: &[&'static str] = &HTTP_CODES;

    fn index(self) -> usize {
        self as usize
    }
    fn code_index(code: ::http::StatusCode) -> usize {
        http_code_index(code)
    }
}

impl RpcMetrics {
    /// Creates and registers the metrics. Called once; transports get clones.
    ///
    /// # Errors
    /// A name is already registered.
    pub fn new(registry: &prometheus::Registry) -> Result<Self, prometheus::Error> {
        let inner = Arc::new(Inner {
            slots: (0..SLOTS)
                .map(|_| Box::new([const { [const { Counts::new() }; METHODS_MAX] }; 2]))
                .collect(),
            catalog: Catalog::new(&[
                (
                    REQUESTS,
                    "Requests whose response has ended, by transport, method and status code.",
                ),
                (
                    DURATION,
                    "Time from a request's head to its response's head (for streams, to the end).",
                ),
            ])?,
        });
        let metrics = Self { inner };
        registry.register(Box::new(metrics.clone()))?;
        Ok(metrics)
    }

    /// Counts one request that was answered with `code` after `elapsed`.
    pub fn observe<M: Method>(&self, method: M, code: M::Code, elapsed: Duration) {
        self.observe_index(method, M::code_index(code), elapsed);
    }

    fn observe_index<M: Method>(&self, method: M, code: usize, elapsed: Duration) {
        record::note(|facts| {
            facts.method = method.name();
            facts.code = Some(M::CODE_LABELS[code]);
        });
        let method = method.index();
        self.inner.time(M::TRANSPORT, method, elapsed);
        let outcome = Outcome::new(M::TRANSPORT, method, code);
        if !outcome::leave_to_collector(outcome) {
            self.inner.count(outcome);
        }
    }

    /// How many calls ended with this code.
    #[cfg(test)]
    pub(crate) fn counted(&self, method: GrpcMethod, code: tonic::Code) -> usize {
        let code = grpc_code_index(code);
        let calls = self.inner.sum(GRPC, method.index(), |counts| &counts.codes[code]);
        usize::try_from(calls).unwrap_or(usize::MAX)
    }

    /// Counts a request that has ended.
    pub(crate) fn count(&self, outcome: Outcome) {
        self.inner.count(outcome);
    }
}

/// A request that is not answered yet. Counted once: by [`Self::end`], or, if it is dropped before, as cancelled by its
/// client: CANCELLED, or 499.
#[derive(Debug)]
pub(crate) struct RequestTimer<M: Method, R: Borrow<RpcMetrics>> {
    rpc: R,
    method: M,
    started: Instant,
    is_ended: bool,
}

/// Of a gRPC call whose status is known only at the end of its body.
pub(crate) type CallTimer = RequestTimer<GrpcMethod, RpcMetrics>;

impl<M: Method, R: Borrow<RpcMetrics>> RequestTimer<M, R> {
    /// For a request that began at `started`.
    pub(crate) fn new(rpc: R, method: M, started: Instant) -> Self {
        record::note(|facts| facts.method = method.name());
        Self {
            rpc,
            method,
            started,
            is_ended: false,
        }
    }

    /// Whether it is counted.
    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Counts the request.
    pub(crate) fn end(&mut self, code: M::Code) {
        self.end_with(M::code_index(code));
    }

    fn end_with(&mut self, code: usize) {
        if !std::mem::replace(&mut self.is_ended, true) {
            let rpc = self.rpc.borrow();
            rpc.observe_index(self.method, code, self.started.elapsed());
        }
    }
}

impl<M: Method, R: Borrow<RpcMetrics>> Drop for RequestTimer<M, R> {
    fn drop(&mut self) {
        self.end_with(M::ABANDONED);
    }
}

/// The calling thread's slot; threads are numbered when they first count.
fn slot_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SLOT: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SLOTS;
    }
    SLOT.with(|slot| *slot)
}

impl Inner {
    fn count(&self, outcome: Outcome) {
        let counts = &self.slots[slot_of_thread()][outcome.transport()][outcome.method()];
        counts.codes[outcome.code()].fetch_add(1, Ordering::Relaxed);
    }

    fn time(&self, transport: usize, method: usize, elapsed: Duration) {
        let counts = &self.slots[slot_of_thread()][transport][method];
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        let bucket = DURATION_BOUNDS_NS.partition_point(|bound| *bound < elapsed_ns);
        counts.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        counts.sum_ns.fetch_add(elapsed_ns, Ordering::Relaxed);
    }

    fn sum(&self, transport: usize, method: usize, of: impl Fn(&Counts) -> &AtomicU64) -> u64 {
        self.slots
            .iter()
            .map(|slot| of(&slot[transport][method]).load(Ordering::Relaxed))
            .sum()
    }

    fn scrape(&self) -> Vec<MetricFamily> {
        let mut scrape = self.catalog.scrape();
        for (transport, methods, codes) in [
            (GRPC, GrpcMethod::LABELS, &GRPC_CODES[..]),
            (HTTP, HttpOperation::LABELS, &HTTP_CODES[..]),
        ] {
            for (method, name) in methods.iter().enumerate() {
                // In the order of their names, as the encoder and the registry expect.
                let labels = [("method", *name), ("transport", TRANSPORTS[transport])];
                for (code, code_label) in codes.iter().enumerate() {
                    let count = self.sum(transport, method, |counts| &counts.codes[code]);
                    if count > 0 {
                        scrape.counter(REQUESTS, &[("code", *code_label), labels[0], labels[1]], count);
                    }
                }
                let sum = |bucket: usize| self.sum(transport, method, |counts| &counts.buckets[bucket]);
                let buckets: Vec<u64> = (0..DURATION_BOUNDS_NS.len()).map(sum).collect();
                let total = HistogramTotal {
                    count: buckets.iter().sum::<u64>() + sum(buckets.len()),
                    buckets,
                    sum: self.sum(transport, method, |counts| &counts.sum_ns),
                };
                if total.count > 0 {
                    scrape.durations(DURATION, &labels, &total);
                }
            }
        }
        scrape.finish()
    }
}

impl Collector for RpcMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.inner.catalog.descriptions()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.inner.scrape()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_many_threads_are_merged_at_scrape() {
        // Forty threads, more than there are slots, count the same call: the scrape shows forty, in the right
        // bucket.
        let registry = prometheus::Registry::new();
        let metrics = RpcMetrics::new(&registry).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..40 {
                scope.spawn(|| {
                    metrics.observe(GrpcMethod::FetchBlocks, tonic::Code::Ok, Duration::from_micros(3));
                });
            }
        });
        let status = ::http::StatusCode::RANGE_NOT_SATISFIABLE;
        metrics.observe(HttpOperation::GetBytes, status, Duration::from_secs(60));
        let text = prometheus::TextEncoder::new()
            .encode_to_string(&registry.gather())
            .unwrap();
        for line in [
            r#"ringfetch_rpc_requests_total{code="OK",method="FetchBlocks",transport="grpc"} 40"#,
            r#"ringfetch_rpc_requests_total{code="416",method="GetBytes",transport="http"} 1"#,
            r#"ringfetch_rpc_duration_seconds_bucket{method="FetchBlocks",transport="grpc",le="0.000002"} 0"#,
            r#"ringfetch_rpc_duration_seconds_bucket{method="FetchBlocks",transport="grpc",le="0.000005"} 40"#,
            r#"ringfetch_rpc_duration_seconds_bucket{method="GetBytes",transport="http",le="10"} 0"#,
            r#"ringfetch_rpc_duration_seconds_bucket{method="GetBytes",transport="http",le="+Inf"} 1"#,
            r#"ringfetch_rpc_duration_seconds_count{method="FetchBlocks",transport="grpc"} 40"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_fresh_registry_can_be_scraped() {
        // Nothing has been counted yet: the scrape has no series of ours and does not fail.
        let registry = prometheus::Registry::new();
        let _metrics = RpcMetrics::new(&registry).unwrap();
        assert!(registry.gather().is_empty());
    }

    #[test]
    fn only_methods_of_the_port_have_names() {
        // Paths of a port with one service of two: its methods and those of health and reflection have their names;
        // another port's, unknown, misspelt and longer ones are `other`.
        let services = ["ringfetch.v1.FetchService"];
        for (path, expected) in [
            ("/ringfetch.v1.FetchService/ReadObject", GrpcMethod::ReadObject),
            ("/grpc.health.v1.Health/Check", GrpcMethod::HealthCheck),
            ("/ringfetch.v1.AdminService/Reload", GrpcMethod::Other),
            ("/ringfetch.v1.FetchService/Reload", GrpcMethod::Other),
            ("/ringfetch.v1.fetchservice/ReadObject", GrpcMethod::Other),
            ("/ringfetch.v1.FetchService/ReadObject/", GrpcMethod::Other),
            ("/ReadObject", GrpcMethod::Other),
        ] {
            assert_eq!(grpc_method_of(path, &services), expected, "{path}");
        }
    }

    #[test]
    fn every_method_and_code_has_its_label() {
        // The tables have every method and code.
        assert_eq!(GrpcMethod::LABELS[GrpcMethod::Other as usize], "other");
        assert_eq!(HttpOperation::LABELS[HttpOperation::Other as usize], "other");
        assert_eq!(HTTP_CODES[HTTP_CLIENT_LEFT], "499");
        assert!(METHODS_MAX >= GrpcMethod::LABELS.len().max(HttpOperation::LABELS.len()));
        assert!(CODES_MAX >= GRPC_CODES.len().max(HTTP_CODES.len()));
        assert_eq!(grpc_code_name(tonic::Code::Unauthenticated), "UNAUTHENTICATED");
        assert_eq!(
            HTTP_CODES[http_code_index(::http::StatusCode::IM_A_TEAPOT)],
            "other"
        );
    }

    #[test]
    fn what_is_collected_is_counted_by_its_collector() {
        // A request of a port whose client leaves, one whose body fails, and one that fails before its client
        // leaves. Expectation: nothing is counted until its collector counts it; the codes are those of the end,
        // and a failure stays what it was.
        let registry = prometheus::Registry::new();
        let metrics = RpcMetrics::new(&registry).unwrap();
        let ended = |code| {
            let observe = || metrics.observe(HttpOperation::GetBytes, code, Duration::from_micros(3));
            collect(observe).1.added_to(None).unwrap()
        };
        let sent = ended(::http::StatusCode::PARTIAL_CONTENT);
        let ((), cut) = collect(|| cut_short(::http::StatusCode::INTERNAL_SERVER_ERROR));
        let cut = cut.added_to(Some(sent)).unwrap();
        let failed = ended(::http::StatusCode::NOT_FOUND);
        let names = [sent, sent.unsent(), cut.unsent(), failed.unsent()].map(Outcome::code_name);
        assert_eq!(names, ["206", "499", "500", "404"]);
        let codes = || {
            let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather());
            text.unwrap().matches("ringfetch_rpc_requests_total{").count()
        };
        assert_eq!(codes(), 0);
        assert_eq!(Outcome::unpack(cut.pack()), Some(cut));
        metrics.count(cut);
        assert_eq!((codes(), Outcome::unpack(0)), (1, None));
        let ((), nothing) = collect(|| ());
        assert_eq!(nothing.added_to(None), None);
    }
}
