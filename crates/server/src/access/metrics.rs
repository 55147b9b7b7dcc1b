//! Metrics by principal: those in the file, and `anonymous`.

use super::Access;
use super::table::ANONYMOUS;
use crate::fetch::Rejection;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGaugeVec, Opts};
use std::sync::atomic::Ordering;

const LABELS: [&str; 1] = ["principal"];

/// What principals have done and hold, collected at scrape time.
#[derive(Debug)]
pub(super) struct ByPrincipal {
    access: Access,
    /// For their descriptions; without series.
    families: Families,
}

#[derive(Debug)]
struct Families {
    requests: IntCounterVec,
    bytes: IntCounterVec,
    rejected: IntCounterVec,
    in_flight: IntGaugeVec,
    memory: IntGaugeVec,
}

impl Families {
    fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            requests: IntCounterVec::new(
                Opts::new(
                    "ringfetch_principal_requests_total",
                    "Requests admitted, by principal.",
                ),
                &LABELS,
            )?,
            bytes: IntCounterVec::new(
                Opts::new(
                    "ringfetch_principal_read_bytes_total",
                    "Bytes that were read for answers, by principal.",
                ),
                &LABELS,
            )?,
            rejected: IntCounterVec::new(
                Opts::new(
                    "ringfetch_principal_rejected_total",
                    "Requests refused because of a limit, a deadline or the drain, by principal and reason.",
                ),
                &["principal", "reason"],
            )?,
            in_flight: IntGaugeVec::new(
                Opts::new(
                    "ringfetch_principal_requests_in_flight",
                    "Requests in flight, by principal.",
                ),
                &LABELS,
            )?,
            memory: IntGaugeVec::new(
                Opts::new(
                    "ringfetch_principal_memory_bytes",
                    "Response memory held, by principal.",
                ),
                &LABELS,
            )?,
        })
    }

    fn all(&self) -> [&dyn Collector; 5] {
        [
            &self.requests,
            &self.bytes,
            &self.rejected,
            &self.in_flight,
            &self.memory,
        ]
    }

    fn fill(&self, access: &Access) {
        let table = access.inner.table.load();
        let signed = |value| i64::try_from(value).unwrap_or(i64::MAX);
        for principal in table.principals() {
            let name = [principal.name()];
            let (in_flight, memory) = principal.held();
            self.requests
                .with_label_values(&name)
                .inc_by(principal.requests());
            self.bytes.with_label_values(&name).inc_by(principal.bytes());
            for (reason, label) in Rejection::all() {
                let rejected = principal.rejected(reason);
                // Limits of the principal's own are always exported, so that `rate()` starts from 0; other
                // reasons only once they have occurred.
                if rejected > 0 || reason.is_principals() {
                    let series = [principal.name(), label];
                    self.rejected.with_label_values(&series).inc_by(rejected);
                }
            }
            self.in_flight.with_label_values(&name).set(signed(in_flight));
            self.memory.with_label_values(&name).set(signed(memory));
        }
        let anonymous = access.inner.anonymous_requests.load(Ordering::Relaxed);
        self.requests.with_label_values(&[ANONYMOUS]).inc_by(anonymous);
    }
}

impl ByPrincipal {
    pub(super) fn new(access: Access) -> Result<Self, prometheus::Error> {
        Ok(Self {
            access,
            families: Families::new()?,
        })
    }
}

impl Collector for ByPrincipal {
    fn desc(&self) -> Vec<&Desc> {
        self.families
            .all()
            .into_iter()
            .flat_map(Collector::desc)
            .collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        // New families each time, so that principals that are gone have no series.
        let Ok(families) = Families::new() else {
            return Vec::new();
        };
        families.fill(&self.access);
        families.all().into_iter().flat_map(Collector::collect).collect()
    }
}
