//! Metrics by principal: those in the file, and `anonymous`.

use super::Access;
use super::table::ANONYMOUS;
use crate::fetch::Rejection;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use ringfetch_engine::series::{Catalog, float};
use std::sync::atomic::Ordering;

const REQUESTS: &str = "ringfetch_principal_requests_total";
const BYTES: &str = "ringfetch_principal_read_bytes_total";
const REJECTED: &str = "ringfetch_principal_rejected_total";
const IN_FLIGHT: &str = "ringfetch_principal_requests_in_flight";
const MEMORY: &str = "ringfetch_principal_memory_bytes";

const METRICS: [(&str, &str); 5] = [
    (REQUESTS, "Requests let in before routing, by principal."),
    (BYTES, "Bytes that were read for answers, by principal."),
    (
        REJECTED,
        "Requests refused because of a limit, a deadline or the drain, by principal and reason.",
    ),
    (IN_FLIGHT, "Requests in flight, by principal."),
    (MEMORY, "Response memory held, by principal."),
];

/// What principals have done and hold. Principals that are gone have no series.
#[derive(Debug)]
pub(super) struct ByPrincipal {
    access: Access,
    catalog: Catalog,
}

impl ByPrincipal {
    pub(super) fn new(access: Access) -> Result<Self, prometheus::Error> {
        Ok(Self {
            access,
            catalog: Catalog::new(&METRICS)?,
        })
    }
}

impl Collector for ByPrincipal {
    fn desc(&self) -> Vec<&Desc> {
        self.catalog.descriptions()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut scrape = self.catalog.scrape();
        for principal in self.access.inner.table.load().principals() {
            let labels = [("principal", principal.name())];
            let (in_flight, memory) = principal.held();
            scrape.counter(REQUESTS, &labels, principal.requests());
            scrape.counter(BYTES, &labels, principal.bytes());
            for (reason, label) in Rejection::all() {
                let rejected = principal.rejected(reason);
                // Limits of the principal's own are always exported, so that `rate()` starts from 0; other
                // reasons only once they have occurred.
                if rejected > 0 || reason.is_principals() {
                    scrape.counter(REJECTED, &[labels[0], ("reason", label)], rejected);
                }
            }
            scrape.gauge(IN_FLIGHT, &labels, float(in_flight));
            scrape.gauge(MEMORY, &labels, float(memory));
        }
        let anonymous = self.access.inner.anonymous_requests.load(Ordering::Relaxed);
        scrape.counter(REQUESTS, &[("principal", ANONYMOUS)], anonymous);
        scrape.finish()
    }
}
