//! `ringfetch load` and `load-merge`. `shape` describes the datasets, `resolve` checks what is asked of them, `workload` and
//! `choice` choose the items, `transport` sends them, ringfetch-pace times them, `driver` runs the threads. `recorder` and
//! `histogram` measure here, `counters` and `cpu` on the daemon's side. `report`, `text` and `series` show the results;
//! `require` and `knee` check conditions on them.
//!
//! Invariant: closed loop or open, a request that starts inside the window is measured and waited for.

/// Adds fields of one value to the same fields of another.
macro_rules! add_fields {
    ($mine:ident += $other:ident: $($field:ident),+) => { $($mine.$field += $other.$field;)+ };
}

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
mod resolve;
mod scores;
mod series;
mod shape;
mod text;
mod transport;
mod watch;
mod workload;

use crate::args::{Global, INPUT_BYTES_MAX};
use crate::daemon::client;
use crate::outcome::Failure;
use crate::stop::StopSignals;
use crate::table::printable;
use args::{Load, Merge, TransportArg};
use driver::LoadThreads;
use report::{Knee, Report};
use require::{Figure, Requirement};
use ringfetch_command::input_file;
use ringfetch_command::part_file::regular_file;
use ringfetch_command::quantity::grouped;
use ringfetch_pace::{Pacer, Ramp};
use shape::Describer;
use std::collections::HashMap;
use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use text::Hgrm;
use tokio::time::Instant;
use transport::{Credentials, Endpoints};
use watch::{Monitor, STOPPED};
use workload::Workload;

/// Of a step of a search: it says nothing about its rate.
const NOTHING_DUE: &str = "no request was due in the window";
/// Where the demo and the default configuration listen.
const HTTP_DEFAULT: &str = "http://127.0.0.1:7411";

pub(crate) async fn run(global: &Global, args: &Load) -> Result<(), Failure> {
    if args.requests.is_none() && args.seconds.is_zero() {
        let problem = "--seconds 0: measure for some time, or use --requests";
        return Err(Failure::Usage(problem.to_owned()));
    }
    // Not where arguments are parsed: that error would show the address, which may have a password.
    if args.http.as_ref().is_some_and(|url| !transport::is_site(url)) {
        let problem = "--http: is not of the form http://HOST:PORT or https://HOST:PORT";
        return Err(Failure::Usage(problem.to_owned()));
    }
    driver::check(args)?;
    check_files(&[
        ("--trace", args.trace.as_deref()),
        ("--csv", args.csv.as_deref()),
        ("--hgrm", args.hgrm.as_deref()),
    ])?;
    let measured = require::Measured {
        arrivals: args.rates().is_some(),
        server_cpu: args.http.is_some() || args.server_pid.is_some() || args.transport == TransportArg::Http,
        bytes: args.verify,
    };
    require::check_available(args.require.iter().chain(&args.objective), measured)?;
    // Before the signals: a pipe that nobody reads takes forever to open. Before what has a temporary file: a signal leaves it.
    let series = args.csv.as_deref().map(series::Series::open).transpose()?;
    let hgrm = Hgrm::create(args.hgrm.as_deref())?;
    cpu::Snapshot::take(args.server_pid).map_err(Failure::Failed)?;
    let mut stop = StopSignals::catch()?;
    let http_transport = args.transport == TransportArg::Http;
    let http = args.http.clone().unwrap_or_else(|| HTTP_DEFAULT.to_owned());
    let endpoints = Endpoints {
        credentials: Credentials {
            tls: global.tls.of_urls(&[&global.grpc, &http])?,
            token: global.token()?,
        },
        grpc: global.grpc.clone(),
        http,
        transport: args.transport,
        timeout: global.timeout,
    };
    let describer = Describer {
        client: &client(global)?,
        global,
        endpoints: &endpoints,
    };
    let workload = stop.unless(resolve::resolve(&describer, args)).await?;
    let workload = Arc::new(workload);
    let started = LoadThreads::start(args, &endpoints, &workload);
    let load_threads = stop.unless(started).await?;
    let series = series.map(series::Series::begin).transpose()?;
    let mut test = LoadTest {
        args,
        monitor: Monitor {
            server: args.server_pid,
            http: (args.http.is_some() || http_transport).then(|| endpoints.http.clone()),
            credentials: endpoints.credentials.clone(),
            timeout: global.timeout,
            interval: args.interval,
            series,
            series_broken: None,
            stop,
            is_stopped: false,
        },
        load_threads,
        workload,
    };
    let result = if args.step_to_knee {
        test.step_to_knee().await
    } else {
        test.measure(args.rates()).await.map(|(report, _)| report)
    };
    let report = result?;
    tokio::select! {
        () = test.load_threads.end() => {}
        () = test.monitor.stop.next() => test.monitor.is_stopped = true,
    }
    let Monitor {
        stop,
        is_stopped,
        series_broken,
        ..
    } = test.monitor;
    // On a thread: a reader that does not read must not keep signals out.
    let json = global.json;
    let published = tokio::task::spawn_blocking(move || (publish(json, &report, hgrm), report));
    let (published, report) = stop.end_in_order(published, &AtomicBool::new(is_stopped)).await?;
    let published = published.and_then(|()| outcome(&report, &args.require));
    series_broken.map_or(published, Err)?;
    if let Some(knee) = &report.knee {
        if let Some(why) = &knee.ended {
            let problem = format!("the search for the knee ended early: {why}");
            return Err(Failure::Failed(problem));
        }
        if knee.rate.is_none() {
            let objective = knee.objective.join(", ");
            return Err(Failure::Condition(format!("not met: no rate held {objective}")));
        }
    }
    require::check(&args.require, |figure| report.figure(figure))
}

/// Refuses two names of one file: what is written there would be lost, or replace what is read.
fn check_files(files: &[(&str, Option<&Path>)]) -> Result<(), Failure> {
    let mut names = HashMap::new();
    for (name, path) in files {
        if let Some(earlier) = path.and_then(|path| names.insert(regular_file(path), name)) {
            let problem = format!("{earlier} and {name} name the same file; name two");
            return Err(Failure::Usage(problem));
        }
    }
    Ok(())
}

/// Writes a report, to both places even if one fails. The file first: who reads stdout may not read on.
fn publish(json: bool, report: &Report, hgrm: Hgrm) -> Result<(), Failure> {
    let written = hgrm.write(report);
    text::print(report, json).and(written)
}

/// Fails if nothing was read, bytes were wrong, or reads failed and no condition allows that.
fn outcome(report: &Report, require: &[Requirement]) -> Result<(), Failure> {
    report.outcome(require.iter().any(Requirement::is_of_errors))
}

/// Merges results that `load --json` printed.
pub(crate) fn merge(global: &Global, args: &Merge) -> Result<(), Failure> {
    for path in &args.results {
        let result = (&*path.display().to_string(), Some(path.as_path()));
        check_files(&[result, ("--hgrm", args.hgrm.as_deref())])?;
    }
    let mut merged: Option<Report> = None;
    let (mut texts, mut total) = (HashMap::new(), 0.0);
    for path in &args.results {
        let named = |problem: String| Failure::Failed(format!("{}: {problem}", path.display()));
        let text = input_file::read_text(path, INPUT_BYTES_MAX).map_err(|error| named(error.to_string()))?;
        let report = Report::read(&text, &mut total).map_err(named)?;
        // No two runs measure the same to the last digit: it would count twice.
        if let Some(earlier) = texts.insert(text, path) {
            let (path, earlier) = (path.display(), earlier.display());
            return Err(Failure::Usage(format!(
                "{path}: is the same result as {earlier}; name each once"
            )));
        }
        match &mut merged {
            Some(merged) => merged.merge(&report),
            None => merged = Some(report),
        }
    }
    let merged = merged.ok_or_else(|| Failure::Usage("name at least one result".to_owned()))?;
    let hgrm = Hgrm::create(args.hgrm.as_deref())?;
    publish(global.json, &merged, hgrm)?;
    outcome(&merged, &args.require)?;
    require::check(&args.require, |figure| merged.figure(figure))
}

/// State shared by all measurements of a run.
struct LoadTest<'a> {
    args: &'a Load,
    workload: Arc<Workload>,
    load_threads: LoadThreads,
    monitor: Monitor,
}

impl LoadTest<'_> {
    /// One measurement, and whether Ctrl-C stopped the run.
    async fn measure(&mut self, rates: Option<Ramp>) -> Result<(Report, bool), Failure> {
        let args = self.args;
        let window = args.requests.map_or(Ok(args.seconds), Err);
        let open = rates.map(|rates| (rates, args.arrivals));
        let pacer = || Pacer::new(Instant::now(), args.warmup_seconds, window, open);
        let (pacer, measured) = self.monitor.measure(&mut self.load_threads, pacer).await?;
        let threads = self.load_threads.threads();
        let report = Report::new(args, threads, &self.workload, &pacer, rates, measured);
        Ok((report, pacer.is_stopped()))
    }

    /// Measures at one rate after another; the report is that of the highest rate that held, or of the last one.
    /// A step that says nothing about its rate ends the search, and what was measured until then is reported. Wrong bytes
    /// end it with the report of their step.
    async fn step_to_knee(&mut self) -> Result<Report, Failure> {
        let objective = &self.args.objective;
        let mut search = knee::Search::new(self.args.rate.unwrap_or(1.0));
        let (mut steps, mut best, mut ended) = (Vec::new(), None, None);
        while let (Some(rate), None) = (search.next(), &ended) {
            if self.monitor.is_stopped {
                // After the last response of a step, which counts.
                ended = Some(STOPPED.to_owned());
                break;
            }
            let (report, stopped) = match self.measure(Some(Ramp::constant(rate))).await {
                Err(Failure::Failed(problem)) if best.is_some() => {
                    ended = Some(problem);
                    break;
                }
                measured => measured?,
            };
            let wrong = report.wrong_bytes;
            ended = if wrong > 0 {
                Some(format!("{} wrong bytes", grouped(wrong)))
            } else if stopped {
                Some(STOPPED.to_owned())
            } else {
                report.unreachable()
            };
            let broken = ended.clone().or_else(|| broken(objective, &report));
            let held = broken.is_none();
            if std::io::stderr().is_terminal() {
                let rate = crate::quantity::rate(rate);
                let outcome = printable(broken.as_deref().unwrap_or("held"));
                // Nothing depends on this line.
                let _ = writeln!(std::io::stderr(), "{rate} requests/s: {outcome}");
            }
            let is_empty = broken.as_deref() == Some(NOTHING_DUE);
            steps.push(report.step(rate, broken));
            if is_empty {
                // If no higher rate held, no lower one will.
                ended = search.knee().map(|_| NOTHING_DUE.to_owned());
                best.get_or_insert(report);
                break;
            }
            if ended.is_none() {
                search.record(rate, held);
            }
            if wrong > 0 || held || best.is_none() || ended.is_none() && search.knee().is_none() {
                best = Some(report);
            }
        }
        let mut report = best.ok_or_else(|| Failure::Failed("no step was measured".to_owned()))?;
        let texts = objective.iter().map(|objective| objective.text().to_owned());
        report.knee = Some(Knee {
            objective: texts.collect(),
            rate: search.knee(),
            ended,
            steps,
        });
        Ok(report)
    }
}

/// Why a rate did not hold. Errors and arrivals that were never sent break any objective.
fn broken(objective: &[Requirement], report: &Report) -> Option<String> {
    if report.open_loop.as_ref().is_some_and(|open| open.arrivals == 0) {
        return Some(NOTHING_DUE.to_owned());
    }
    if report.errors > 0 {
        return Some(format!("{} errors", report.errors));
    }
    let mut objective = objective.iter();
    let unmet = objective.find_map(|objective| objective.unmet(|figure| report.figure(figure)));
    if unmet.is_some() {
        return unmet;
    }
    let missed = report.open_loop.as_ref()?.missed;
    let share = report.figure(Figure::MissedShare)?;
    (share > knee::MISSED_SHARE_MAX).then(|| format!("{missed} arrivals were never sent"))
}
