//! The friendly client that an attack must not disturb: reads single blocks, probes /livez, and measures.
//!
//! Runs three clients at once: a reader with one connection that reads without pause, a newcomer that opens a
//! new connection for each read, and a probe that does the same for `/livez`, as an orchestrator would.

use crate::hold::Hold;
use crate::http1;
use crate::process::{Process, Usage};
use crate::tally::{cause, count, micros, milliseconds};
use crate::target::Target;
use hdrhistogram::Histogram;
use ringfetch_client::{Client, RetryPolicy};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

const TIMEOUT: Duration = Duration::from_secs(5);
const NEWCOMER_EVERY: Duration = Duration::from_millis(50);
const PROBE_EVERY: Duration = Duration::from_millis(100);
const SAMPLE_EVERY: Duration = Duration::from_millis(50);
/// After a failure, so that the victim does not flood a daemon that refuses everything.
const AFTER_FAILURE: Duration = Duration::from_millis(5);
/// Why an answer with other bytes than those of the pattern failed.
pub(crate) const WRONG: &str = "wrong bytes";

/// What the reader speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Protocol {
    /// The Rust client, without retries.
    Grpc,
    /// HTTP/1.1 GET.
    Http,
}

/// Figures of one kind of request.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Figures {
    /// Answers with the right bytes (right lengths, if the target's pattern is not known).
    pub ok: u64,
    /// Refusals by gRPC code or HTTP status.
    pub refused: BTreeMap<String, u64>,
    /// Failed connections, broken ones and timeouts, by cause.
    pub failed: BTreeMap<String, u64>,
    /// Median latency of answers, milliseconds.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// The longest time of any attempt, including failed ones and the one unanswered at the end.
    pub max_ms: f64,
}

/// The victim's results, and the daemon's resource use.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct VictimReport {
    /// The reader with one connection.
    pub reader: Figures,
    /// The reader that opens a new connection each time.
    pub newcomer: Figures,
    /// `/livez`, each on a new connection.
    pub livez: Figures,
    /// The daemon's usage before, if its process was given.
    pub before: Option<Usage>,
    /// Its usage at the end; `None` also if it has ended.
    pub after: Option<Usage>,
    /// Highest resident memory sampled, MiB.
    pub resident_max_mib: Option<f64>,
}

/// A friendly client.
#[derive(Debug, Clone)]
pub struct Victim {
    /// The daemon, from the victim's address.
    pub target: Target,
    /// What the reader speaks.
    pub protocol: Protocol,
    /// The daemon's process.
    pub process: Option<Process>,
}

impl Victim {
    /// Measures until the hold ends.
    ///
    /// # Errors
    /// The client cannot be created. Failures of the daemon are counted, never returned as errors.
    pub async fn run(&self, hold: &Hold) -> io::Result<VictimReport> {
        let before = self.process.as_ref().and_then(|process| {
            // Without permission the peak since its start is reported.
            let _ = process.forget_peak();
            process.usage().ok()
        });
        let (reader, newcomer, livez, resident_max_mib) = tokio::join!(
            self.reader(hold),
            self.newcomer(hold),
            self.livez(hold),
            self.memory(hold)
        );
        let after = self.process.as_ref().and_then(|process| process.usage().ok());
        let peak = after.map(|usage| usage.resident_peak_mib);
        Ok(VictimReport {
            reader: reader?,
            newcomer,
            livez,
            before,
            after,
            resident_max_mib: resident_max_mib
                .zip(peak)
                .map(|(sampled, peak)| sampled.max(peak))
                .or(resident_max_mib),
        })
    }

    async fn reader(&self, hold: &Hold) -> io::Result<Figures> {
        match self.protocol {
            Protocol::Grpc => self.grpc_reader(hold).await,
            Protocol::Http => Ok(self.http_reader(hold).await),
        }
    }

    async fn grpc_reader(&self, hold: &Hold) -> io::Result<Figures> {
        let target = self.target.clone();
        let client = Client::builder(format!("http://{}", target.grpc))
            .timeout(TIMEOUT)
            .retry(RetryPolicy::none())
            .connect_lazy_with(move || {
                let target = target.clone();
                async move { target.connect(target.grpc).await }
            })
            .map_err(io::Error::other)?;
        let mut random = fastrand::Rng::with_seed(7);
        let mut measured = Measured::new();
        loop {
            let block = random.u64(..self.target.blocks);
            let begun = Instant::now();
            let Some(answer) = hold
                .unless_ended(client.fetch_blocks(&self.target.dataset, &[block]))
                .await
            else {
                return Ok(measured.figures_of_closed_loop(begun.elapsed()));
            };
            let after = begun.elapsed();
            let end = match answer {
                Ok(blocks) => match blocks.iter().next() {
                    Some(Ok(bytes)) if self.target.is_block(block, &bytes) => End::Ok,
                    Some(Ok(_)) | None => End::Failed(WRONG.to_owned()),
                    Some(Err(error)) => End::Failed(error.to_string()),
                },
                Err(error) if error.code().is_some() => End::Refused(error.label().to_owned()),
                Err(error) => End::Failed(error.label().to_owned()),
            };
            if !measured.end(end, after) {
                hold.pause(AFTER_FAILURE).await;
            }
        }
    }

    async fn http_reader(&self, hold: &Hold) -> Figures {
        let mut random = fastrand::Rng::with_seed(7);
        let mut measured = Measured::new();
        let mut connection = None;
        loop {
            let block = random.u64(..self.target.blocks);
            let begun = Instant::now();
            let asked = self.get(&mut connection, Some(block));
            let Some(end) = hold.unless_ended(asked).await else {
                return measured.figures_of_closed_loop(begun.elapsed());
            };
            if !measured.end(end, begun.elapsed()) {
                hold.pause(AFTER_FAILURE).await;
            }
        }
    }

    async fn newcomer(&self, hold: &Hold) -> Figures {
        let mut random = fastrand::Rng::with_seed(8);
        let mut block = || Some(random.u64(..self.target.blocks));
        self.again(hold, NEWCOMER_EVERY, &mut block).await
    }

    async fn livez(&self, hold: &Hold) -> Figures {
        self.again(hold, PROBE_EVERY, &mut || None).await
    }

    /// GETs at fixed times, each on a new connection; a late one delays only its successors.
    async fn again(
        &self,
        hold: &Hold,
        every: Duration,
        block: &mut (dyn FnMut() -> Option<u64> + Send),
    ) -> Figures {
        let mut measured = Measured::new();
        let mut ticks = tokio::time::interval(every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let block = block();
            if hold.unless_ended(ticks.tick()).await.is_none() {
                return measured.figures(Duration::ZERO);
            }
            let begun = Instant::now();
            match hold.unless_ended(self.get(&mut None, block)).await {
                None => return measured.figures(begun.elapsed()),
                Some(end) => measured.end(end, begun.elapsed()),
            };
        }
    }

    /// One GET of a block or of /livez, on the connection or on a new one, within the timeout.
    async fn get(&self, connection: &mut Option<TcpStream>, block: Option<u64>) -> End {
        let path = block.map_or_else(|| "/livez".to_owned(), |block| self.target.block_path(block));
        let run = async {
            let mut stream = match connection.take() {
                Some(stream) => stream,
                None => self.target.connect(self.target.http).await?,
            };
            let answer = http1::get(&mut stream, &path).await?;
            Ok::<_, io::Error>((stream, answer))
        };
        match tokio::time::timeout(TIMEOUT, run).await {
            Err(_) => End::Failed("timeout".to_owned()),
            Ok(Err(error)) => End::Failed(cause(&error)),
            Ok(Ok((stream, answer))) => {
                *connection = Some(stream);
                match answer.status {
                    200 if block.is_none_or(|block| self.target.is_block(block, &answer.body)) => End::Ok,
                    200 => End::Failed(WRONG.to_owned()),
                    status => End::Refused(format!("HTTP {status}")),
                }
            }
        }
    }

    async fn memory(&self, hold: &Hold) -> Option<f64> {
        let process = self.process.as_ref()?;
        let mut most = None;
        while hold.pause(SAMPLE_EVERY).await {
            if let Ok(usage) = process.usage() {
                most = Some(usage.resident_mib.max(most.unwrap_or(0.0)));
            }
        }
        most
    }
}

pub(crate) enum End {
    Ok,
    Refused(String),
    Failed(String),
}

pub(crate) struct Measured {
    figures: Figures,
    answers_us: Option<Histogram<u64>>,
    longest: Duration,
}

impl Measured {
    pub(crate) fn new() -> Self {
        // Three digits from 1 us to 10 minutes; valid bounds.
        let answers_us = Histogram::new_with_bounds(1, 600_000_000, 3).ok();
        Self {
            figures: Figures::default(),
            answers_us,
            longest: Duration::ZERO,
        }
    }

    /// Counts an attempt's end. `false`: it was not answered.
    pub(crate) fn end(&mut self, end: End, after: Duration) -> bool {
        self.longest = self.longest.max(after);
        match end {
            End::Ok => {
                self.figures.ok = self.figures.ok.saturating_add(1);
                if let Some(histogram) = &mut self.answers_us {
                    histogram.saturating_record(micros(after));
                }
                return true;
            }
            End::Refused(code) => count(&mut self.figures.refused, &code),
            End::Failed(why) => count(&mut self.figures.failed, &why),
        }
        false
    }

    /// The figures of a reader that waits for each answer before it reads again. While one is late it asks nothing, so a daemon
    /// that stops for 100 ms would have a single late answer: the reads that it would have made meanwhile, one each median
    /// answer, count too, as late as they would have been.
    pub(crate) fn figures_of_closed_loop(mut self, unanswered: Duration) -> Figures {
        self.answers_us = self.answers_us.map(|mut of| {
            let usual = of.value_at_quantile(0.5);
            if micros(unanswered) > usual {
                of.saturating_record(micros(unanswered));
            }
            of.clone_correct(usual)
        });
        self.figures(unanswered)
    }

    /// The figures, including the time of an unanswered attempt so far.
    pub(crate) fn figures(self, unanswered: Duration) -> Figures {
        let quantile = |at| {
            self.answers_us
                .as_ref()
                .map_or(0.0, |of| milliseconds(of.value_at_quantile(at)))
        };
        Figures {
            p50_ms: quantile(0.5),
            p99_ms: quantile(0.99),
            max_ms: self.longest.max(unanswered).as_secs_f64() * 1e3,
            ..self.figures
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a reader that waits for each answer finds in a second: stops of 100 ms each, and answers of 150 to 160 us between
    /// them.
    fn second_with(stops: u64) -> Measured {
        let mut measured = Measured::new();
        let stop = Duration::from_millis(100);
        for _ in 0..stops {
            measured.end(End::Ok, stop);
        }
        let mut left = Duration::from_secs(1).saturating_sub(stop * u32::try_from(stops).unwrap_or(0));
        for number in 0.. {
            let answer = Duration::from_micros(150 + number % 11);
            let Some(rest) = left.checked_sub(answer) else {
                break;
            };
            left = rest;
            measured.end(End::Ok, answer);
        }
        measured
    }

    #[test]
    fn a_daemon_that_stops_is_seen_by_a_reader_that_waits() {
        // Scenario: a daemon that never stops; one that stops five times for 100 ms, half of the second, in which 5 of some
        // 3,200 answers are late; one that stops at the end for two more seconds. Expected: p99 as answered; nearly a stop, and
        // nearly two seconds.
        let steady = second_with(0).figures_of_closed_loop(Duration::ZERO);
        assert!((0.15..0.17).contains(&steady.p99_ms), "{steady:?}");
        let stops = second_with(5).figures_of_closed_loop(Duration::ZERO);
        assert!(stops.p99_ms > 90.0, "{stops:?}");
        let ended = second_with(0).figures_of_closed_loop(Duration::from_secs(2));
        assert!(ended.p99_ms > 1900.0, "{ended:?}");
        assert_eq!(ended.ok, steady.ok);
    }
}
