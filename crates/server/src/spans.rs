//! Spans for OpenTelemetry: one per request, sent by OTLP over gRPC.
//!
//! OpenTelemetry's batch processor has a bounded queue and its own thread. Spans that do not fit in the queue
//! are dropped, so no request waits for a collector. Whether a request is traced is decided when it arrives:
//! by its client, or, without a `traceparent`, at random.

use crate::config::TracingConfig;
use crate::record::{Facts, Times};
use crate::rpc_metrics::is_success;
use crate::trace_context::TraceContext;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanEvents, SpanExporter, SpanLinks, SpanProcessor as _,
};
use prometheus::{IntCounter, IntCounterVec, Opts, Registry};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tonic::transport::Endpoint;

/// Most spans in the queue, of about 1 KiB each.
const QUEUE_SPANS_MAX: usize = 4096;
/// Most spans in one message.
const BATCH_SPANS_MAX: usize = 512;
/// Longest wait for further spans before a message is sent, and longest wait for the collector: for a connection, then for
/// its answer.
const DELAY: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long shutdown waits for the collector.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Reports spans. Clones share the queue.
#[derive(Debug, Clone)]
pub struct Spans {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    processor: BatchSpanProcessor,
    /// One in this many requests without a trace is traced; 0: none.
    sample: u32,
    scope: InstrumentationScope,
    made: IntCounter,
}

/// Why no spans can be sent.
#[derive(Debug, thiserror::Error)]
pub enum SpansError {
    /// The endpoint cannot be used.
    #[error("tracing.otlp_endpoint: {0}; give one such as http://127.0.0.1:4317, or off")]
    Endpoint(#[from] tonic::transport::Error),
    /// The environment has a variable of OpenTelemetry that cannot be used.
    #[error("the spans' exporter: {0}; correct the variable, or set tracing.otlp_endpoint to off")]
    Exporter(#[from] opentelemetry_otlp::ExporterBuildError),
    /// There is no thread for sending them.
    #[error(
        "tracing.otlp_endpoint: there is no thread for sending spans; raise the limit on threads (ulimit -u, or the cgroup's \
         pids.max), or set it to off"
    )]
    Thread,
    /// A metric's name is already registered.
    #[error("a metric cannot be registered: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// What `start` returns, or nothing where it panics, of which nothing is printed. Other threads' panics are, as before.
fn unless_it_panics<T>(start: impl FnOnce() -> T) -> Option<T> {
    let this = thread::current().id();
    let before = Arc::new(take_hook());
    let others = Arc::clone(&before);
    set_hook(Box::new(move |panic| {
        if thread::current().id() != this {
            others(panic);
        }
    }));
    let started = catch_unwind(AssertUnwindSafe(start));
    set_hook(Box::new(move |panic| before(panic)));
    started.ok()
}

impl Spans {
    /// Starts the thread that sends spans. Registers `ringfetch_trace_spans_total{result}`. Must be called
    /// inside a runtime, which drives the connection.
    ///
    /// # Errors
    /// The endpoint cannot be used, there is no thread, or a metric's name is already registered.
    pub fn start(config: &TracingConfig, registry: &Registry) -> Result<Self, SpansError> {
        let spans = Opts::new(
            "ringfetch_trace_spans_total",
            "Request spans: made, sent, and failed (not accepted by the collector).",
        );
        let spans = IntCounterVec::new(spans, &["result"])?;
        registry.register(Box::new(spans.clone()))?;
        // The exporter's own channel would wait for a connection as long as the kernel tries.
        let collector = Endpoint::from_shared(config.otlp_endpoint.clone())?.connect_timeout(TIMEOUT);
        let otlp = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_channel(collector.timeout(TIMEOUT).connect_lazy())
            .with_timeout(TIMEOUT)
            .build()?;
        let exporter = CountedExporter {
            otlp,
            sent: spans.with_label_values(&["sent"]),
            failed: spans.with_label_values(&["failed"]),
            is_failing: AtomicBool::new(false),
        };
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(QUEUE_SPANS_MAX)
            .with_max_export_batch_size(BATCH_SPANS_MAX)
            .with_scheduled_delay(DELAY)
            .build();
        // Where it gets no thread, it panics.
        let start = || BatchSpanProcessor::new(exporter, batches);
        let mut processor = unless_it_panics(start).ok_or(SpansError::Thread)?;
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        processor.set_resource(
            &Resource::builder()
                .with_service_name("ringfetchd")
                .with_attribute(version)
                .build(),
        );
        let inner = Inner {
            processor,
            sample: config.sample,
            scope: InstrumentationScope::builder("ringfetch").build(),
            made: spans.with_label_values(&["made"]),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// A new trace for a request without one, if the request is sampled.
    pub(crate) fn new_trace(&self) -> Option<TraceContext> {
        let sample = self.inner.sample;
        (sample > 0 && fastrand::u32(..sample) == 0).then(|| TraceContext {
            trace_id: fastrand::u128(1..),
            parent_id: 0,
            is_sampled: true,
        })
    }

    /// Reports a request, if it is traced.
    pub(crate) fn report(&self, facts: &Facts, times: Times) {
        let Some(trace) = facts.trace.filter(|trace| trace.is_sampled) else {
            return;
        };
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let microseconds = |value: Duration| i64::try_from(value.as_micros()).unwrap_or(i64::MAX);
        let code = facts.code();
        let mut attributes = vec![
            KeyValue::new("ringfetch.request_id", facts.request_id.clone()),
            KeyValue::new("ringfetch.code", code),
            KeyValue::new("ringfetch.items", number(facts.items)),
            KeyValue::new("ringfetch.failed_items", number(facts.failed_items)),
            KeyValue::new("ringfetch.bytes", number(facts.bytes)),
            KeyValue::new("ringfetch.queue_us", microseconds(facts.queue)),
            KeyValue::new("ringfetch.disk_us", microseconds(facts.disk)),
        ];
        let texts = [
            ("ringfetch.dataset", facts.dataset.clone()),
            (
                "ringfetch.principal",
                facts.principal.as_deref().map(str::to_owned),
            ),
            ("client.address", facts.peer.map(|peer| peer.to_string())),
        ];
        attributes.extend(
            texts
                .into_iter()
                .filter_map(|(key, text)| Some(KeyValue::new(key, text?))),
        );
        let trace_id = TraceId::from_bytes(trace.trace_id.to_be_bytes());
        let span_id = SpanId::from_bytes(facts.span_id.to_be_bytes());
        self.inner.made.inc();
        self.inner.processor.on_end(SpanData {
            span_context: SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, TraceState::NONE),
            parent_span_id: SpanId::from_bytes(trace.parent_id.to_be_bytes()),
            parent_span_is_remote: facts.batch.is_none() && trace.parent_id != 0,
            span_kind: SpanKind::Server,
            name: format!("{} {}", facts.transport, facts.method).into(),
            start_time: times.arrived,
            end_time: times.arrived.checked_add(times.duration).unwrap_or(times.arrived),
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: match facts.is_error() {
                true if is_success(code) => Status::error("an item failed"),
                true => Status::error(code),
                false => Status::Unset,
            },
            instrumentation_scope: self.inner.scope.clone(),
        });
    }

    /// Sends what is in the queue, for at most a second. Blocks, and needs the runtime to run meanwhile.
    pub fn flush(&self) {
        // Spans that the collector does not accept in time are lost.
        let _sent = self.inner.processor.shutdown_with_timeout(SHUTDOWN_TIMEOUT);
    }
}

/// Counts what is sent.
#[derive(Debug)]
struct CountedExporter {
    otlp: opentelemetry_otlp::SpanExporter,
    sent: IntCounter,
    failed: IntCounter,
    is_failing: AtomicBool,
}

impl SpanExporter for CountedExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let result = self.otlp.export(batch).await;
        let was_failing = self.is_failing.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Ok(()) => {
                self.sent.inc_by(spans);
                if was_failing {
                    tracing::info!("spans can be sent to the collector again");
                }
            }
            Err(error) => {
                self.failed.inc_by(spans);
                if !was_failing {
                    tracing::warn!(%error, "spans cannot be sent to the collector and are lost");
                }
            }
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> Result<(), OTelSdkError> {
        self.otlp.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.otlp.set_resource(resource);
    }
}
