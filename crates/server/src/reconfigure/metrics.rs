//! Counts reloads and switches. Labels are closed sets, and every series exists from the start: a rate over a counter that
//! appears with its first failure would miss that failure.

use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use ringfetch_engine::config::BackendKind;
use std::time::{SystemTime, UNIX_EPOCH};

const OK: &str = "ok";
const FAILED: &str = "failed";
const BACKENDS: [BackendKind; 4] = [
    BackendKind::Uring,
    BackendKind::Mmap,
    BackendKind::Auto,
    BackendKind::Pread,
];

#[derive(Debug)]
pub(super) struct Metrics {
    successful: IntGauge,
    success_seconds: Gauge,
    reloads_ok: IntCounter,
    reloads_failed: IntCounter,
    switches: IntCounterVec,
}

impl Metrics {
    /// Startup counts as the first load.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let successful = IntGauge::new(
            "ringfetch_config_last_reload_successful",
            "Whether the last load of the configuration succeeded; the start counts as one.",
        )?;
        let success_seconds = Gauge::new(
            "ringfetch_config_last_reload_success_timestamp_seconds",
            "When the configuration in force was read, seconds since 1970.",
        )?;
        let reloads = IntCounterVec::new(
            Opts::new("ringfetch_config_reloads_total", "Reloads of the configuration."),
            &["result"],
        )?;
        let switches = IntCounterVec::new(
            Opts::new(
                "ringfetch_backend_switches_total",
                "Switches to a backend while serving, of the engine or of a dataset.",
            ),
            &["backend", "result"],
        )?;
        for backend in BACKENDS {
            for result in [OK, FAILED] {
                let _series = switches.with_label_values(&[backend.as_str(), result]);
            }
        }
        registry.register(Box::new(successful.clone()))?;
        registry.register(Box::new(success_seconds.clone()))?;
        registry.register(Box::new(reloads.clone()))?;
        registry.register(Box::new(switches.clone()))?;
        let metrics = Self {
            successful,
            success_seconds,
            reloads_ok: reloads.with_label_values(&[OK]),
            reloads_failed: reloads.with_label_values(&[FAILED]),
            switches,
        };
        metrics.active();
        Ok(metrics)
    }

    fn active(&self) {
        self.successful.set(1);
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        self.success_seconds
            .set(since.map_or(0.0, |since| since.as_secs_f64()));
    }

    pub(super) fn reloaded(&self) {
        self.reloads_ok.inc();
        self.active();
    }

    pub(super) fn reload_failed(&self) {
        self.reloads_failed.inc();
        self.successful.set(0);
    }

    pub(super) fn switched(&self, backend: BackendKind, ok: bool) {
        // The simulated backend, which only tests use, is not among the labels.
        if BACKENDS.contains(&backend) {
            let result = if ok { OK } else { FAILED };
            self.switches.with_label_values(&[backend.as_str(), result]).inc();
        }
    }
}
