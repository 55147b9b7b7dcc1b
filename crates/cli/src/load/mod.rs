//! `ringfetch load` and `load-merge`. Which items: `workload`, `choice`. How they travel: `transport`. When:
//! ringfetch-pace. By whom: `driver`. What is measured: `recorder`, `histogram`, and on the other side `counters` and `cpu`.
//! What is told: `report`, `text`, `series`. What is demanded: `require`, `knee`.
//!
//! Invariant: closed loop or open, a request that starts inside the window is measured and waited for.

pub(crate) mod args;
mod choice;
mod counters;
mod cpu;
mod driver;
mod histogram;
mod knee;
mod recorder;
mod report;
mod require;
mod scores;
mod series;
mod text;
mod transport;
mod watch;
mod workload;

use crate::args::Global;
use crate::daemon::client;
use crate::outcome::Failure;
use args::{Load, Merge, TransportArg};
use driver::Crew;
use report::{Knee, Report};
use ringfetch_pace::{Pacer, Ramp};
use std::sync::Arc;
use tokio::time::Instant;
use transport::Endpoints;
use watch::Watcher;
use workload::Workload;

/// Where the demo and the default configuration listen.
const HTTP_DEFAULT: &str = "http://127.0.0.1:7411";

pub(crate) async fn run(global: &Global, args: &Load) -> Result<(), Failure> {
    if args.requests.is_none() && args.seconds.is_zero() {
        return Err(Failure::Usage(
            "--seconds 0: measure for some time, or use --requests".to_owned(),
        ));
    }
    driver::check(args)?;
    let setup = client(global)?;
    let workload = Arc::new(workload::resolve(&setup, global, args).await?);
    drop(setup);
    let http_transport = args.transport == TransportArg::Http;
    let endpoints = Endpoints {
        grpc: global.grpc.clone(),
        http: args.http.clone().unwrap_or_else(|| HTTP_DEFAULT.to_owned()),
        transport: args.transport,
        timeout: global.timeout,
    };
    let mut bench = Bench {
        args,
        watcher: Watcher {
            server: args.server_pid.map(cpu::Process::new).transpose()?,
            http: (args.http.is_some() || http_transport).then(|| endpoints.http.clone()),
            timeout: global.timeout,
            interval: args.interval,
            series: args.csv.as_deref().map(series::Series::create).transpose()?,
        },
        crew: Crew::start(args, &endpoints, &workload).await?,
        workload,
    };
    let result = if args.step_to_knee {
        bench.step_to_knee().await
    } else {
        bench.measure(args.rates()).await.map(|(report, _)| report)
    };
    bench.crew.end()?;
    let report = result?;
    text::publish(&report, global.json, args.hgrm.as_deref(), args.hdr.as_deref())?;
    report.outcome()?;
    if let Some(Knee {
        rate: None,
        objective,
        ..
    }) = &report.knee
    {
        let objective = objective.join(", ");
        return Err(Failure::Condition(format!("not met: no rate held {objective}")));
    }
    require::check(&args.require, |figure| report.figure(figure))
}

/// Merges results that `load --json` printed.
pub(crate) fn merge(global: &Global, args: &Merge) -> Result<(), Failure> {
    let mut merged: Option<Report> = None;
    for path in &args.results {
        let named = |problem: String| Failure::Failed(format!("{}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
        let report = Report::read(&text).map_err(named)?;
        match &mut merged {
            Some(merged) => merged.merge(&report),
            None => merged = Some(report),
        }
    }
    let merged = merged.ok_or_else(|| Failure::Usage("name at least one result".to_owned()))?;
    text::publish(&merged, global.json, args.hgrm.as_deref(), args.hdr.as_deref())?;
    merged.outcome()?;
    require::check(&args.require, |figure| merged.figure(figure))
}

/// Everything a measurement needs, for as many as there are.
struct Bench<'a> {
    args: &'a Load,
    workload: Arc<Workload>,
    crew: Crew,
    watcher: Watcher,
}

impl Bench<'_> {
    /// One measurement, and whether it was stopped by hand.
    async fn measure(&mut self, rates: Option<Ramp>) -> Result<(Report, bool), Failure> {
        let args = self.args;
        let window = args.requests.map_or(Ok(args.seconds), Err);
        let open = rates.map(|rates| (rates, args.arrivals));
        let pacer = Arc::new(Pacer::new(Instant::now(), args.warmup_seconds, window, open));
        let measured = self.watcher.measure(&mut self.crew, &pacer).await?;
        let rates = rates.map(|rates| (rates.from, rates.to));
        let report = Report::new(args, self.crew.threads(), &self.workload, &pacer, rates, measured);
        Ok((report, pacer.is_stopped()))
    }

    /// Measures at one rate after another; the report is that of the highest rate that held, or of the last one.
    async fn step_to_knee(&mut self) -> Result<Report, Failure> {
        let objective = &self.args.objective;
        let mut search = knee::Search::new(self.args.rate.unwrap_or(1.0));
        let (mut steps, mut best) = (Vec::new(), None);
        while let Some(rate) = search.next() {
            let (report, stopped) = self.measure(Some(Ramp { from: rate, to: rate })).await?;
            let broken = broken(objective, &report);
            let held = broken.is_none();
            eprint_step(rate, broken.as_deref());
            steps.push(report.step(rate, broken));
            search.tell(rate, held);
            if held || search.knee().is_none() {
                best = Some(report);
            }
            if stopped {
                break;
            }
        }
        let mut report = best.ok_or_else(|| Failure::Failed("no step was measured".to_owned()))?;
        report.knee = Some(Knee {
            objective: objective
                .iter()
                .map(|objective| objective.text().to_owned())
                .collect(),
            rate: search.knee(),
            steps,
        });
        Ok(report)
    }
}

/// Why a rate did not hold. Errors and arrivals that were never sent break any objective.
fn broken(objective: &[require::Requirement], report: &Report) -> Option<String> {
    if let Some(why) = objective
        .iter()
        .find_map(|objective| objective.unmet(|figure| report.figure(figure)))
    {
        return Some(why);
    }
    if report.errors > 0 {
        return Some(format!("{} errors", report.errors));
    }
    let open = report.open_loop.as_ref()?;
    let share =
        crate::quantity::approximate(open.missed) / crate::quantity::approximate(open.arrivals.max(1));
    (share > knee::MISSED_SHARE_MAX).then(|| format!("{} arrivals were never sent", open.missed))
}

/// A line for those who wait, where stderr is a terminal.
fn eprint_step(rate: f64, broken: Option<&str>) {
    use std::io::IsTerminal as _;
    if std::io::stderr().is_terminal() {
        eprintln!(
            "{} requests/s: {}",
            crate::quantity::rate(rate),
            broken.unwrap_or("held")
        );
    }
}
