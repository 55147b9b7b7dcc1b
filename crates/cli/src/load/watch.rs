//! Watches a measurement from outside: the line on the terminal, the series, Ctrl-C, the sums, and the CPU
//! times and daemon counters before and after.

use super::counters::{Counted, Page};
use super::cpu::Snapshot;
use super::driver::LoadThreads;
use super::recorder::Tally;
use super::report::{BothSides, Measured};
use super::series::{self, Series};
use super::transport::{Credentials, RequestError};
use crate::connect::remedy;
use crate::outcome::Failure;
use crate::progress;
use crate::quantity::{latency, rate};
use crate::stop::StopSignals;
use ringfetch_pace::{Pacer, per_second};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior};

pub(super) const STOPPED: &str = "it was stopped";

/// The counters to read before and after, and where to report intervals.
pub(super) struct Monitor {
    /// The daemon's process, if its CPU time is to be read.
    pub(super) server: Option<u32>,
    /// The daemon's HTTP address, if its counters are to be read.
    pub(super) http: Option<String>,
    pub(super) credentials: Credentials,
    pub(super) timeout: Duration,
    pub(super) interval: Duration,
    pub(super) series: Option<Series>,
    /// Why the series ended before the run, which it stops.
    pub(super) series_broken: Option<Failure>,
    /// One for the whole run: it remembers a signal that arrives while it is not awaited.
    pub(super) stop: StopSignals,
    /// Whether there was one.
    pub(super) is_stopped: bool,
}

/// Why the daemon's counters cannot be read.
enum PageError {
    /// The principal has no right to them. It may have all rights that the load needs.
    Forbidden(String),
    Failed(String),
}

impl Monitor {
    /// The daemon's counters now, if they are wanted.
    fn page(&self) -> impl Future<Output = Result<Option<Page>, PageError>> + use<> {
        let (http, credentials, timeout) = (self.http.clone(), self.credentials.clone(), self.timeout);
        async move {
            let Some(http) = http else { return Ok(None) };
            let failed = |RequestError { label, message, .. }| match &*label {
                "HTTP_403" => PageError::Forbidden(format!("cannot read the counters of {http} ({message})")),
                _ => {
                    let remedy = remedy(&message, "http", &http);
                    PageError::Failed(format!(
                        "cannot read the counters of {http} ({message}); {remedy}"
                    ))
                }
            };
            let page = Page::read(&http, &credentials, timeout).await;
            page.map(Some).map_err(failed)
        }
    }

    /// Measures once with all threads, from the warm-up to the last response. Ctrl-C and the like end it early, and
    /// the result counts; a second signal ends it at once, without one.
    pub(super) async fn measure(
        &mut self,
        load_threads: &mut LoadThreads,
        pacer: impl FnOnce() -> Pacer,
    ) -> Result<(Arc<Pacer>, Measured), Failure> {
        let page = self.page();
        let page = tokio::select! {
            page = page => page,
            () = self.stop.next() => {
                self.is_stopped = true;
                return Err(Failure::Failed(STOPPED.to_owned()));
            }
        };
        let at_first = match page {
            Err(PageError::Failed(problem)) => return Err(Failure::Failed(problem)),
            // The readings of the window report it.
            Err(PageError::Forbidden(_)) => None,
            Ok(page) => page,
        };
        // Its time begins here.
        let pacer = Arc::new(pacer());
        load_threads.measure(&pacer).await;
        match self.watch(load_threads, &pacer, at_first).await {
            Ok(measured) => Ok((pacer, measured)),
            Err(failure) => {
                // Otherwise the threads would drive load to the end before it is reported.
                pacer.stop();
                Err(failure)
            }
        }
    }

    /// Watches the threads until they are done.
    async fn watch(
        &mut self,
        load_threads: &mut LoadThreads,
        pacer: &Pacer,
        at_first: Option<Page>,
    ) -> Result<Measured, Failure> {
        let mut run = Run {
            line: progress::line(),
            total: Tally::default(),
            last: pacer.measure_from(),
            running: load_threads.threads(),
        };
        run.line.set_message("warming up");
        run.line.tick();
        tokio::select! {
            () = tokio::time::sleep_until(pacer.measure_from()) => {}
            () = self.stop.next() => self.on_signal(&run, pacer, "the load warmed up")?,
        }
        let mut unknown = None;
        let before = self.snapshot(&mut unknown);
        let page_before = self.page_if_any(&run, pacer, &mut unknown).await?;
        let mut ticks = ticks(self.interval);
        while run.running > 0 {
            tokio::select! {
                done = load_threads.done() => {
                    done?;
                    run.running -= 1;
                }
                () = self.stop.next() => self.on_signal(&run, pacer, "requests were in flight")?,
                now = ticks.tick() => {
                    if !is_last(now, pacer.end(), self.interval) {
                        self.report_interval(&mut run, load_threads, pacer).await?;
                    }
                }
            }
        }
        let after = self.snapshot(&mut unknown);
        let page_after = match page_before {
            Some(_) => self.page_if_any(&run, pacer, &mut unknown).await?,
            None => None,
        };
        self.report_interval(&mut run, load_threads, pacer).await?;
        run.line.finish_and_clear();
        let mut between = |before: &Option<Page>| {
            let counted = Counted::between(before.as_ref()?, page_after.as_ref()?);
            counted.map_err(|problem| unknown = Some(problem)).ok()
        };
        let client = run.total.reads_in_all;
        let (server, whole) = (between(&page_before), between(&at_first));
        Ok(Measured {
            tally: run.total,
            before,
            after,
            server,
            server_unknown: unknown,
            reads_in_all: whole.map(|whole| BothSides {
                client,
                server: whole.reads_ok(),
            }),
        })
    }

    /// CPU times now; if the server has ended, without its own, and the reason in `unknown`: figures until
    /// then are reported.
    fn snapshot(&self, unknown: &mut Option<String>) -> Snapshot {
        Snapshot::take(self.server).unwrap_or_else(|problem| {
            *unknown = Some(problem);
            Snapshot::own()
        })
    }

    /// The daemon's counters, handled likewise. A signal leaves them unknown, and stops the load; the second one
    /// ends the run.
    async fn page_if_any(
        &mut self,
        run: &Run,
        pacer: &Pacer,
        unknown: &mut Option<String>,
    ) -> Result<Option<Page>, Failure> {
        let meanwhile = "the daemon's counters were read";
        let page = self.page();
        let page = tokio::select! {
            biased;
            page = page => page,
            () = self.stop.next() => {
                self.on_signal(run, pacer, meanwhile)?;
                Err(PageError::Failed(format!("stopped while {meanwhile}")))
            }
        };
        Ok(page.unwrap_or_else(|error| {
            let (PageError::Forbidden(problem) | PageError::Failed(problem)) = error;
            *unknown = Some(problem);
            None
        }))
    }

    /// Ends the run on a signal: in order, on the second one at once.
    fn on_signal(&mut self, run: &Run, pacer: &Pacer, meanwhile: &str) -> Result<(), Failure> {
        if std::mem::replace(&mut self.is_stopped, true) {
            let problem = format!("stopped a second time, while {meanwhile}");
            return Err(Failure::Failed(problem));
        }
        // Otherwise it was measured in full.
        if run.running > 0 {
            pacer.stop();
        }
        Ok(())
    }

    /// Collects an interval and reports it.
    async fn report_interval(
        &mut self,
        run: &mut Run,
        load_threads: &LoadThreads,
        pacer: &Pacer,
    ) -> Result<(), Failure> {
        let mut interval = Tally::default();
        let mut in_flight = 0;
        for recorder in load_threads.recorders() {
            interval.add(&recorder.take());
            in_flight += recorder.in_flight();
        }
        let now = Instant::now();
        let length = now.saturating_duration_since(run.last);
        let intended = pacer.rate_between(run.last, now);
        run.total.add(&interval);
        let since = run.last.saturating_duration_since(pacer.measure_from());
        run.last = now;
        // A rest after the end is reported only if there is anything in it.
        if length.is_zero() || interval.requests == 0 && interval.errors() == 0 && length < self.interval / 2
        {
            return Ok(());
        }
        if let Some(series) = self.series.take() {
            let line = series::line(since + length, length, intended, &interval, in_flight);
            self.write(series, line, run, pacer).await?;
        }
        if run.line.is_hidden() {
            return Ok(());
        }
        let [p50, p99] = [50.0, 99.0].map(|percentile| {
            let ns = interval.latency.percentile(percentile);
            ns.map_or_else(|| "-".to_owned(), latency)
        });
        let late = run.total.late;
        let intended = intended.map(|intended| format!(" of {} intended  late {late}", rate(intended)));
        let intended = intended.unwrap_or_default();
        run.line.set_message(format!(
            "{} s  {} requests/s{intended}  {} reads/s  p50 {p50}  p99 {p99}  in flight {in_flight}  errors {}",
            pacer.measured().as_secs(),
            rate(per_second(interval.requests, length)),
            rate(per_second(interval.reads, length)),
            run.total.errors(),
        ));
        run.line.tick();
        Ok(())
    }

    /// Adds a line to the series, on a thread: its reader may not read.
    async fn write(
        &mut self,
        mut series: Series,
        line: String,
        run: &Run,
        pacer: &Pacer,
    ) -> Result<(), Failure> {
        let mut written = tokio::task::spawn_blocking(move || series.write(&line).map(|()| series));
        let written = loop {
            tokio::select! {
                written = &mut written => break written,
                () = self.stop.next() => self.on_signal(run, pacer, "the series was written")?,
            }
        };
        let panicked = |_| {
            Err(Failure::Failed(
                "the thread that writes the series panicked".to_owned(),
            ))
        };
        match written.unwrap_or_else(panicked) {
            Ok(series) => self.series = Some(series),
            Err(failure) => {
                self.series_broken = Some(failure);
                pacer.stop();
            }
        }
        Ok(())
    }
}

/// The ends of intervals. After one that took longer, as in a process that was stopped, the next are as long as any: those
/// that were missed would be lines of microseconds.
fn ticks(interval: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Whether an interval that ends `now` goes on to the last response: the few responses after the window come within
/// milliseconds, and would be a line of their own, with a rate that nobody drove.
fn is_last(now: Instant, end: Option<Instant>, interval: Duration) -> bool {
    end.is_some_and(|end| {
        let apart = now.max(end).saturating_duration_since(now.min(end));
        apart <= interval / 2
    })
}

/// A measurement in progress.
struct Run {
    line: indicatif::ProgressBar,
    total: Tally,
    /// The end of the last interval.
    last: Instant,
    /// Threads that drive load.
    running: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn intervals_after_a_long_one_are_regular() {
        // Scenario: intervals of 1 s; the process is stopped in the second one, until 5.5 s. Expected: one long one, then
        // intervals of 1 s.
        let begin = Instant::now();
        let (mut ticks, mut ends) = (ticks(Duration::from_secs(1)), Vec::new());
        for interval in 0..4 {
            if interval == 1 {
                tokio::time::advance(Duration::from_millis(4500)).await;
            }
            ticks.tick().await;
            ends.push(begin.elapsed().as_millis());
        }
        assert_eq!(ends, [1000, 5500, 6500, 7500]);
    }

    #[test]
    fn the_interval_at_the_end_of_the_window_takes_the_rest_with_it() {
        // Intervals of 2 s that end at, up to half of one before and after, and further from the end; and without an end.
        let interval = Duration::from_secs(2);
        let end = Instant::now() + Duration::from_secs(60);
        let second = Duration::from_secs(1);
        for last in [end - second, end, end + second] {
            assert!(is_last(last, Some(end), interval), "{last:?}");
            assert!(!is_last(last, None, interval));
        }
        let tick = Duration::from_millis(1);
        for other in [end - second - tick, end + second + tick] {
            assert!(!is_last(other, Some(end), interval), "{other:?}");
        }
    }
}
