//! All numbers of a run, as they are written to JSON, read back and merged. `text` prints them for people.

use super::args::Load;
use super::counters::Counted;
use super::cpu::Snapshot;
use super::histogram::Durations;
use super::recorder::{Tally, add_errors};
use super::require::Figure;
use super::workload::Workload;
use crate::outcome::Failure;
use crate::quantity::{approximate, grouped};
use ringfetch_pace::{Arrivals, Pacer, per_second, quantile_of_sent};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Most that all numbers of the results of a merge may add up to: an exabyte read.
const TOTAL_MAX: f64 = 1e18;

/// Codes of requests whose deadline passed.
const TIMED_OUT: [&str; 2] = ["DEADLINE_EXCEEDED", "HTTP_504"];

/// What one run measured. The names are a contract: scripts read them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Number of runs in these figures.
    pub(crate) instances: u64,
    /// The datasets, with their shares if there are several.
    pub(crate) dataset: String,
    pub(crate) what: String,
    pub(crate) pattern: String,
    /// closed or open.
    pub(crate) loop_kind: String,
    pub(crate) transport: String,
    pub(crate) connections: u64,
    pub(crate) threads: u64,
    /// Reads per request: at most, at least.
    pub(crate) batch: u32,
    pub(crate) batch_min: u32,
    pub(crate) choice_seed: u64,
    pub(crate) warmup_seconds: f64,
    /// From the window's start to the end of the last request that started in it.
    pub(crate) seconds: f64,
    pub(crate) requests: u64,
    pub(crate) requests_per_second: f64,
    pub(crate) reads: u64,
    pub(crate) reads_per_second: f64,
    pub(crate) read_bytes: u64,
    pub(crate) megabytes_per_second: f64,
    /// Requests in flight: requested, and the average over time.
    pub(crate) outstanding: u64,
    pub(crate) outstanding_achieved: f64,
    /// Of answered requests; null if there were none. In an open loop from their arrival.
    pub(crate) latency_us: Option<LatencyMicros>,
    /// The same as one HdrHistogram (V2, compressed, base64), in nanoseconds.
    pub(crate) latency_histogram: Option<String>,
    /// Null for a closed loop.
    pub(crate) open_loop: Option<OpenLoop>,
    pub(crate) errors: u64,
    pub(crate) request_errors: BTreeMap<String, u64>,
    pub(crate) item_errors: BTreeMap<String, u64>,
    pub(crate) first_error: Option<String>,
    pub(crate) verified: bool,
    pub(crate) wrong_bytes: u64,
    pub(crate) first_wrong: Option<String>,
    /// Reads of each dataset of a mix.
    pub(crate) mix: Vec<MixPart>,
    pub(crate) own_cpu: Cpu,
    /// Of --server-pid, or the daemon's own figures; null without either.
    pub(crate) server_cpu: Option<Cpu>,
    /// The two figures above, where scripts expect them.
    pub(crate) cpu_us_per_read: Option<f64>,
    pub(crate) server_cpu_us_per_read: Option<f64>,
    /// What the daemon counted over the window, for all clients; null without --http.
    pub(crate) server: Option<Counted>,
    /// Why a requested figure of the daemon is unknown: it has ended, or was restarted. Otherwise null.
    #[serde(default)]
    pub(crate) server_unknown: Option<String>,
    /// Reads of the whole run, warm-up included, as both sides counted them; null without --http.
    pub(crate) reads_in_all: Option<BothSides>,
    /// The steps of --step-to-knee; the other figures are those of the step at the knee.
    pub(crate) knee: Option<Knee>,
    /// `latency_histogram`, decoded.
    #[serde(skip)]
    latency: Durations,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LatencyMicros {
    pub(crate) min: f64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p99_9: f64,
    pub(crate) max: f64,
}

/// How well the run kept up with the arrivals.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OpenLoop {
    /// constant or poisson.
    pub(crate) arrivals_kind: Arrivals,
    /// Requests a second at the start and at the end of the window.
    pub(crate) rate_from: f64,
    pub(crate) rate_to: f64,
    /// Requests that arrived in the window, in all and per second.
    pub(crate) arrivals: u64,
    pub(crate) intended_per_second: f64,
    /// Arrivals that were never sent, in all and per second.
    pub(crate) missed: u64,
    pub(crate) missed_per_second: f64,
    /// Arrivals that found all slots busy.
    pub(crate) late: u64,
    /// From arrival to sending, for requests that were sent; null if none was.
    pub(crate) lateness_us: Option<LatencyMicros>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MixPart {
    pub(crate) dataset: String,
    pub(crate) share: f64,
    pub(crate) requests: u64,
    pub(crate) reads: u64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Cpu {
    pub(crate) seconds: f64,
    /// Cores kept busy.
    pub(crate) cores: f64,
    /// Null if nothing was read.
    pub(crate) us_per_read: Option<f64>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct BothSides {
    pub(crate) client: u64,
    pub(crate) server: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Knee {
    pub(crate) objective: Vec<String>,
    /// The highest rate that held, requests a second; null if none did.
    pub(crate) rate: Option<f64>,
    /// Why the search ended before it had found the knee; null if it found it or no rate held.
    #[serde(default)]
    pub(crate) ended: Option<String>,
    /// In the order they were tried.
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) rate: f64,
    pub(crate) requests_per_second: f64,
    pub(crate) reads_per_second: f64,
    /// Of all arrivals; null if it is that of one that was never sent or timed out.
    pub(crate) p50_us: Option<f64>,
    /// See `p50_us`.
    pub(crate) p99_us: Option<f64>,
    pub(crate) errors: u64,
    pub(crate) missed: u64,
    /// Why it did not hold; null if it did.
    pub(crate) broken: Option<String>,
}

/// Everything that was measured, before it becomes a report.
pub(crate) struct Measured {
    pub(crate) tally: Tally,
    pub(crate) before: Snapshot,
    pub(crate) after: Snapshot,
    pub(crate) server: Option<Counted>,
    pub(crate) server_unknown: Option<String>,
    pub(crate) reads_in_all: Option<BothSides>,
}

impl Report {
    pub(crate) fn new(
        args: &Load,
        threads: u32,
        workload: &Workload,
        pacer: &Pacer,
        rates: Option<ringfetch_pace::Ramp>,
        measured: Measured,
    ) -> Self {
        let Measured {
            tally,
            before,
            after,
            server,
            server_unknown,
            reads_in_all,
        } = measured;
        // The whole window, including parts without a response, and the responses after it.
        let end = tally.last_end.max(pacer.end()).unwrap_or(pacer.measure_from());
        let elapsed = end.saturating_duration_since(pacer.measure_from());
        let seconds = elapsed.as_secs_f64();
        let rate = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        // Not those of the window: that may have ended before its last request, or have been stopped before it began.
        let between = after.since(&before).as_secs_f64().max(1e-9);
        let cpu = |used: Duration| Cpu::new(used.as_secs_f64(), used.as_secs_f64() / between, tally.reads);
        let own_cpu = cpu(after.own_since(&before));
        let by_pid = after.server_since(&before).map(cpu);
        let server_cpu = by_pid.or_else(|| server.as_ref().map(Cpu::of_server));
        let open_loop = rates.map(|rates| {
            // The last requests may have ended later.
            let window = pacer.arriving().unwrap_or(elapsed);
            let arrivals = tally.lateness.count() + pacer.missed();
            OpenLoop {
                arrivals_kind: args.arrivals,
                rate_from: rates.from,
                rate_to: rates.to,
                arrivals,
                intended_per_second: per_second(arrivals, window),
                missed: pacer.missed(),
                missed_per_second: per_second(pacer.missed(), window),
                late: tally.late,
                lateness_us: LatencyMicros::of(&tally.lateness),
            }
        });
        let several = workload.parts().len() > 1;
        let counts = tally.parts.iter().copied().chain(std::iter::repeat((0, 0)));
        let mix: Vec<MixPart> = workload
            .parts()
            .zip(counts)
            .map(|((part, share), (requests, reads))| MixPart {
                dataset: part.dataset().to_owned(),
                share,
                requests,
                reads,
            })
            .collect();
        let names: Vec<String> = match &mix[..] {
            [part] => vec![part.dataset.clone()],
            parts => parts
                .iter()
                .map(|part| format!("{}={:.3}", part.dataset, part.share))
                .collect(),
        };
        let whats: Vec<String> = workload.parts().map(|(part, _)| part.what()).collect();
        Self {
            instances: 1,
            dataset: names.join(","),
            what: whats.join(", "),
            pattern: workload.part(0).order().to_owned(),
            loop_kind: if open_loop.is_some() { "open" } else { "closed" }.to_owned(),
            transport: args.transport.to_string(),
            connections: args.connections().into(),
            threads: threads.into(),
            batch: args.batch.max,
            batch_min: args.batch.min,
            choice_seed: args.choice_seed,
            warmup_seconds: args.warmup_seconds.as_secs_f64(),
            seconds,
            requests: tally.requests,
            requests_per_second: rate(approximate(tally.requests)),
            reads: tally.reads,
            reads_per_second: rate(approximate(tally.reads)),
            read_bytes: tally.bytes,
            megabytes_per_second: rate(approximate(tally.bytes) / 1e6),
            outstanding: args.outstanding.into(),
            // Little's law: time in flight summed over requests, divided by time.
            outstanding_achieved: rate(tally.in_flight.as_secs_f64()),
            latency_us: LatencyMicros::of(&tally.latency),
            latency_histogram: tally.latency.encode(),
            open_loop,
            errors: tally.errors(),
            verified: workload.verifies(),
            mix: if several { mix } else { Vec::new() },
            cpu_us_per_read: own_cpu.us_per_read,
            server_cpu_us_per_read: server_cpu.as_ref().and_then(|cpu| cpu.us_per_read),
            own_cpu,
            server_cpu,
            server,
            server_unknown,
            reads_in_all,
            knee: None,
            request_errors: tally.request_errors,
            item_errors: tally.item_errors,
            first_error: tally.first_error,
            wrong_bytes: tally.wrong_bytes,
            first_wrong: tally.first_wrong,
            latency: tally.latency,
        }
    }

    /// The latencies of answered requests.
    pub(crate) fn latency(&self) -> &Durations {
        &self.latency
    }

    /// Reads a result that `load --json` printed. `total`: of all numbers of the results read so far.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub(crate) fn read(text: &str, total: &mut f64) -> Result<Self, String> {
        let foreign = |error| format!("is not a result of `ringfetch load --json`: {error}");
        let mut report: Self = serde_json::from_str(text).map_err(foreign)?;
        check_total(&serde_json::from_str(text).map_err(foreign)?, "", total)?;
        report.latency = match (&report.latency_us, &report.latency_histogram) {
            (Some(us), Some(histogram)) => {
                let duration = |us: f64| Duration::try_from_secs_f64(us / 1e6).unwrap_or_default();
                let ns = |us: f64| u64::try_from(duration(us).as_nanos()).unwrap_or(u64::MAX);
                Durations::decode(histogram, ns(us.min), ns(us.max), us.mean * 1e3)
                    .map_err(|problem| format!("latency_histogram {problem}"))?
            }
            (None, None) => Durations::default(),
            (Some(_), None) | (None, Some(_)) => {
                return Err("has only one of latency_us and latency_histogram".to_owned());
            }
        };
        let (counted, requests) = (report.latency.count(), report.requests);
        if counted != requests {
            return Err(format!(
                "latency_histogram has {counted} requests, and requests is {requests}"
            ));
        }
        Ok(report)
    }

    /// Adds another instance's numbers. Assumes that both drove one daemon at the same time: rates are added,
    /// and of the daemon's counters and CPU the larger is taken, since both saw all of them.
    pub(crate) fn merge(&mut self, other: &Self) {
        add_fields!(self += other: instances, connections, threads, requests, requests_per_second, reads,
            reads_per_second, read_bytes, megabytes_per_second, outstanding, outstanding_achieved, errors, wrong_bytes);
        for (mine, theirs) in [
            (&mut self.dataset, &other.dataset),
            (&mut self.what, &other.what),
            (&mut self.pattern, &other.pattern),
            (&mut self.loop_kind, &other.loop_kind),
            (&mut self.transport, &other.transport),
        ] {
            if mine != theirs {
                *mine = format!("{mine} + {theirs}");
            }
        }
        self.batch = self.batch.max(other.batch);
        self.batch_min = self.batch_min.min(other.batch_min);
        self.warmup_seconds = self.warmup_seconds.min(other.warmup_seconds);
        self.seconds = self.seconds.max(other.seconds);
        self.latency.add(&other.latency);
        self.latency_us = LatencyMicros::of(&self.latency);
        self.latency_histogram = self.latency.encode();
        self.open_loop = match (self.open_loop.take(), other.open_loop.clone()) {
            (Some(mine), Some(theirs)) => Some(mine.merge(theirs)),
            (mine, theirs) => mine.or(theirs),
        };
        add_errors(&mut self.request_errors, &other.request_errors);
        add_errors(&mut self.item_errors, &other.item_errors);
        self.first_error = self.first_error.take().or_else(|| other.first_error.clone());
        self.verified &= other.verified;
        self.first_wrong = self.first_wrong.take().or_else(|| other.first_wrong.clone());
        self.mix.extend(other.mix.iter().cloned());
        let cpu = |seconds: f64, cores: f64| Cpu::new(seconds, cores, self.reads);
        self.own_cpu = cpu(
            self.own_cpu.seconds + other.own_cpu.seconds,
            self.own_cpu.cores + other.own_cpu.cores,
        );
        let reads = |server: &Option<Counted>| server.as_ref().map_or(0, Counted::reads_ok);
        if reads(&other.server) > reads(&self.server) {
            self.server = other.server.clone();
        }
        self.server_unknown = self
            .server_unknown
            .take()
            .or_else(|| other.server_unknown.clone());
        let both = [self.server_cpu.take(), other.server_cpu.clone()]
            .into_iter()
            .flatten();
        let larger =
            both.reduce(|mine, theirs| cpu(mine.seconds.max(theirs.seconds), mine.cores.max(theirs.cores)));
        let by_pid = larger.map(|larger| cpu(larger.seconds, larger.cores));
        self.server_cpu = self.server.as_ref().map(Cpu::of_server).or(by_pid);
        self.cpu_us_per_read = self.own_cpu.us_per_read;
        self.server_cpu_us_per_read = self.server_cpu.as_ref().and_then(|cpu| cpu.us_per_read);
        self.reads_in_all = match (self.reads_in_all, other.reads_in_all) {
            (Some(mine), Some(theirs)) => Some(BothSides {
                client: mine.client + theirs.client,
                server: mine.server.max(theirs.server),
            }),
            // One side of the sum is unknown.
            (_, _) => None,
        };
        self.knee = None;
    }

    /// This step of a search.
    pub(crate) fn step(&self, rate: f64, broken: Option<String>) -> Step {
        let us = |percentile| {
            let ns = self.figure(Figure::Percentile(percentile));
            ns.filter(|ns| ns.is_finite()).map(|ns| ns / 1e3)
        };
        Step {
            rate,
            requests_per_second: self.requests_per_second,
            reads_per_second: self.reads_per_second,
            p50_us: us(50.0),
            p99_us: us(99.0),
            errors: self.errors,
            missed: self.open_loop.as_ref().map_or(0, |open| open.missed),
            broken,
        }
    }

    /// Why the daemon was not reached at all; `None`: it answered something.
    pub(crate) fn unreachable(&self) -> Option<String> {
        let only_transport = self.request_errors.keys().all(|code| code == "TRANSPORT");
        let why = self.first_error.as_deref()?;
        (self.requests == 0 && only_transport).then(|| format!("no request was answered: {why}"))
    }

    /// A figure for a condition; `None`: this run does not have it.
    pub(crate) fn figure(&self, figure: Figure) -> Option<f64> {
        // 0 of 0 is 0.
        let share = |part: u64, whole: u64| approximate(part) / approximate(whole.max(1));
        let latency = self.latency();
        let arrivals = self.open_loop.as_ref().map(|open| open.arrivals);
        let missed = self.open_loop.as_ref().map_or(0, |open| open.missed);
        // Slower than all others, too: otherwise a shorter --timeout would make a percentile better.
        let timed_out = TIMED_OUT.iter().filter_map(|&code| self.request_errors.get(code));
        let endless = missed + timed_out.sum::<u64>();
        let never = |figure: Option<f64>| if endless > 0 { Some(f64::INFINITY) } else { figure };
        match figure {
            Figure::Percentile(percentile) if endless > 0 => {
                let of_answered = quantile_of_sent(percentile, latency.count(), endless);
                let known = latency.percentile(of_answered.min(100.0));
                if of_answered > 100.0 { never(known) } else { known }
            }
            Figure::Percentile(percentile) => latency.percentile(percentile),
            Figure::LatencyMin => latency.min_ns().map(approximate),
            Figure::LatencyMean => never(latency.mean_ns()),
            Figure::LatencyMax => never(latency.max_ns().map(approximate)),
            Figure::Errors => Some(approximate(self.errors)),
            // Share of failed requests or of failed items, whichever is worse.
            Figure::ErrorShare => {
                let requests: u64 = self.request_errors.values().sum();
                let items: u64 = self.item_errors.values().sum();
                let of_requests = share(requests, requests + self.requests);
                Some(of_requests.max(share(items, items + self.reads)))
            }
            Figure::Missed => Some(approximate(self.open_loop.as_ref()?.missed)),
            Figure::MissedShare => Some(share(self.open_loop.as_ref()?.missed, arrivals?)),
            Figure::Late => Some(approximate(self.open_loop.as_ref()?.late)),
            Figure::LateShare => Some(share(self.open_loop.as_ref()?.late, arrivals?)),
            // Of what was not compared nothing is known.
            Figure::WrongBytes => self.verified.then(|| approximate(self.wrong_bytes)),
            Figure::ReadsPerSecond => Some(self.reads_per_second),
            Figure::RequestsPerSecond => Some(self.requests_per_second),
            Figure::MegabytesPerSecond => Some(self.megabytes_per_second),
            Figure::CpuPerRead => self.cpu_us_per_read,
            Figure::ServerCpuPerRead => self.server_cpu_us_per_read,
        }
    }

    /// Fails if nothing was read or anything was wrong, errors included unless a condition of the caller covers
    /// them. A knee search has errors by design: its objective covers them.
    pub(crate) fn outcome(&self, errors_covered: bool) -> Result<(), Failure> {
        let problem = if self.wrong_bytes > 0 {
            format!("{} wrong bytes", grouped(self.wrong_bytes))
        } else if self.reads == 0 && !self.knee.as_ref().is_some_and(Knee::has_read) {
            let why = self.first_error.as_deref();
            format!(
                "nothing was read: {}",
                why.unwrap_or("no request was made in the window")
            )
        } else if self.errors > 0 && !errors_covered && self.knee.is_none() {
            let [requests, items] =
                [&self.request_errors, &self.item_errors].map(|errors| grouped(errors.values().sum::<u64>()));
            let first = self.first_error.as_deref().unwrap_or("unknown");
            format!(
                "{requests} requests and {items} items failed, the first: {first}; \
                 --require 'errors<1%' allows some"
            )
        } else {
            return Ok(());
        };
        Err(Failure::Failed(problem))
    }
}

/// Adds all numbers of a result to `total`, which a real run does not bring near the limit, not even in bytes: below it, no
/// sum of any of them overflows.
fn check_total(value: &serde_json::Value, path: &str, total: &mut f64) -> Result<(), String> {
    let below = |name: &str| format!("{path}{}{name}", if path.is_empty() { "" } else { "." });
    use serde_json::Value;
    match value {
        // Any number is a seed.
        Value::Object(fields) => fields
            .iter()
            .filter(|(name, _)| *name != "choice_seed")
            .try_for_each(|(name, value)| check_total(value, &below(name), total)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .try_for_each(|(at, item)| check_total(item, &below(&at.to_string()), total)),
        Value::Number(number) => {
            let figure = number.as_f64().unwrap_or(f64::INFINITY);
            *total += figure;
            match figure < 0.0 || *total > TOTAL_MAX {
                true => Err(format!("{path}: {number} is no figure of a run")),
                false => Ok(()),
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) => Ok(()),
    }
}

impl Knee {
    /// Whether any step has read something.
    fn has_read(&self) -> bool {
        self.steps.iter().any(|step| step.reads_per_second > 0.0)
    }
}

impl Cpu {
    fn of_server(counted: &Counted) -> Self {
        let (seconds, elapsed) = (counted.cpu_seconds, counted.seconds);
        let cores = if elapsed > 0.0 { seconds / elapsed } else { 0.0 };
        let us_per_read = counted.cpu_us_per_read();
        Self {
            seconds,
            cores,
            us_per_read,
        }
    }

    fn new(seconds: f64, cores: f64, reads: u64) -> Self {
        let us_per_read = (reads > 0).then(|| seconds * 1e6 / approximate(reads));
        Self {
            seconds,
            cores,
            us_per_read,
        }
    }
}

impl OpenLoop {
    fn merge(mut self, other: Self) -> Self {
        add_fields!(self += other: rate_from, rate_to, arrivals, intended_per_second, missed, missed_per_second, late);
        // Percentiles cannot be added, and these have no histogram in the file: keep the worse ones.
        let both = [self.lateness_us.take(), other.lateness_us].into_iter().flatten();
        self.lateness_us = both.reduce(|mine, theirs| if theirs.p99 > mine.p99 { theirs } else { mine });
        self
    }
}

impl LatencyMicros {
    fn of(durations: &Durations) -> Option<Self> {
        let percentile = |percentile| durations.percentile(percentile).map(|ns| ns / 1e3);
        Some(Self {
            min: approximate(durations.min_ns()?) / 1e3,
            mean: durations.mean_ns()? / 1e3,
            p50: percentile(50.0)?,
            p90: percentile(90.0)?,
            p99: percentile(99.0)?,
            p99_9: percentile(99.9)?,
            max: approximate(durations.max_ns()?) / 1e3,
        })
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
pub(super) mod tests;
