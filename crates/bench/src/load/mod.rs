//! `ringfetch load`: a closed loop of slots, each with one request in flight, spread over threads that share nothing
//! but a clock. Which items: `workload`. How they travel: `transport`. When: `pacer`. What is measured: `recorder`.
//! What is told: `report`. Invariant: a request is measured if it starts inside the window, and then it is waited
//! for, so that a stall at the end is not lost. A closed loop slows down with the server and so hides what a steady
//! rate of arrivals would have waited; the report says that it was one.

mod cpu;
mod pacer;
mod recorder;
mod report;
mod transport;
mod workload;

use crate::args::{Global, Load};
use crate::inspect::client;
use crate::outcome::Failure;
use crate::progress;
use crate::quantity::{latency, rate};
use pacer::Pacer;
use recorder::{Recorder, Tally};
use report::Report;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use transport::Transport;
use workload::Workload;

pub(crate) async fn run(global: &Global, args: &Load) -> Result<(), Failure> {
    if args.requests.is_none() && args.seconds.is_zero() {
        return Err(Failure::Usage(
            "--seconds 0: measure for some time, or use --requests".to_owned(),
        ));
    }
    let server = args.server_pid.map(cpu::Process::new).transpose()?;
    let setup = client(global)?;
    let workload = Arc::new(workload::resolve(&setup, global, args).await?);
    drop(setup);

    // A thread without a connection or without a slot would only idle.
    let threads = args.threads.min(args.connections).min(args.outstanding);
    let (ready, mut is_ready) = mpsc::channel(1024);
    let (start, started) = watch::channel(None);
    let mut joins = Vec::new();
    let mut recorders = Vec::new();
    for thread in 0..threads {
        let recorder = Arc::new(Recorder::default());
        recorders.push(Arc::clone(&recorder));
        let driver = Driver {
            grpc: global.grpc.clone(),
            timeout: global.timeout,
            connections: share(args.connections, threads, thread),
            slots: share(args.outstanding, threads, thread),
            // Every slot of every thread chooses its own items, the same ones in each run.
            seed: args.choice_seed.wrapping_add(u64::from(thread) << 32),
            batch: args.batch,
            transport: args.transport,
            workload: Arc::clone(&workload),
            recorder,
            ready: ready.clone(),
            started: started.clone(),
        };
        let name = format!("load-{thread}");
        joins.push(
            std::thread::Builder::new()
                .name(name)
                .spawn(move || driver.run())?,
        );
    }
    drop((ready, started));
    for _ in 0..threads {
        match is_ready.recv().await {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(Failure::call(&error, "grpc", &global.grpc)),
            None => return Err(Failure::Failed("a load thread failed to start".to_owned())),
        }
    }

    let measure_from = Instant::now() + args.warmup_seconds;
    let pacer = Arc::new(match args.requests {
        Some(requests) => Pacer::count(measure_from, requests),
        None => Pacer::window(measure_from, args.seconds),
    });
    let _ = start.send(Some(Arc::clone(&pacer)));
    let mut watcher = Watcher {
        recorders,
        pacer,
        total: Tally::default(),
        line: progress::line(),
    };
    watcher.until(measure_from).await;
    let before = cpu::Snapshot::take(server.as_ref())?;
    watcher.until_ended(is_ready).await;
    let after = cpu::Snapshot::take(server.as_ref())?;
    for join in joins {
        join.join()
            .map_err(|_| Failure::Failed("a load thread panicked".to_owned()))?;
    }
    let total = watcher.finish();
    let report = Report::new(args, threads, &workload, measure_from, total, &before, &after);
    report.print(global.json)?;
    report.outcome()
}

/// Part `part` of `whole` split as evenly as can be: 10 over 4 is 3, 3, 2, 2.
fn share(whole: u32, parts: u32, part: u32) -> u32 {
    whole / parts + u32::from(part < whole % parts)
}

/// One thread's work.
struct Driver {
    grpc: String,
    timeout: Duration,
    connections: u32,
    slots: u32,
    seed: u64,
    batch: u32,
    transport: crate::args::TransportArg,
    workload: Arc<Workload>,
    recorder: Arc<Recorder>,
    /// Told once when connected; closed when all is done.
    ready: mpsc::Sender<Result<(), ringfetch_client::Error>>,
    started: watch::Receiver<Option<Arc<Pacer>>>,
}

impl Driver {
    fn run(self) {
        // One thread with its own connections: nothing of a read crosses threads, and the generator stays cheap.
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
            return;
        };
        runtime.block_on(self.drive());
    }

    async fn drive(mut self) {
        let transport = Transport::connect(&self.grpc, self.transport, self.connections, self.timeout).await;
        let transport = match transport {
            Ok(transport) => Arc::new(transport),
            Err(error) => {
                let _ = self.ready.send(Err(error)).await;
                return;
            }
        };
        let _ = self.ready.send(Ok(())).await;
        // Ends without a pacer if another thread could not connect.
        let pacer = match self.started.wait_for(Option::is_some).await {
            Ok(pacer) => pacer.clone(),
            Err(_) => None,
        };
        let Some(pacer) = pacer else { return };
        let mut slots = tokio::task::JoinSet::new();
        for slot in 0..self.slots {
            slots.spawn(drive_slot(
                slot,
                fastrand::Rng::with_seed(self.seed.wrapping_add(u64::from(slot))),
                self.batch,
                Arc::clone(&pacer),
                Arc::clone(&self.workload),
                Arc::clone(&transport),
                Arc::clone(&self.recorder),
            ));
        }
        while slots.join_next().await.is_some() {}
    }
}

/// One request in flight, again and again.
async fn drive_slot(
    slot: u32,
    mut random: fastrand::Rng,
    batch: u32,
    pacer: Arc<Pacer>,
    workload: Arc<Workload>,
    transport: Arc<Transport>,
    recorder: Arc<Recorder>,
) {
    let mut items = Vec::new();
    while let Some(turn) = pacer.next() {
        workload.choose(&mut random, batch, &mut items);
        let request = workload.request(&items);
        let answer = transport.fetch(slot, request).await;
        let ended = Instant::now();
        if turn.measured {
            recorder.record(&workload, &items, turn.start, ended, &answer);
        }
        if let Err(error) = answer {
            pacer.pause(error.retry_after()).await;
        }
    }
}

/// Watches the run from the outside: a line a second, Ctrl-C, the sums.
struct Watcher {
    recorders: Vec<Arc<Recorder>>,
    pacer: Arc<Pacer>,
    total: Tally,
    line: indicatif::ProgressBar,
}

impl Watcher {
    /// Sleeps until the warm-up is over. Ctrl-C ends it early, and the run with it.
    async fn until(&self, instant: Instant) {
        self.line.set_message("warming up");
        self.line.tick();
        tokio::select! {
            () = tokio::time::sleep_until(instant.into()) => {}
            _ = tokio::signal::ctrl_c() => self.pacer.stop(),
        }
    }

    /// Until every thread has let go of its end of `running`. Ctrl-C ends the run early, and it is reported.
    async fn until_ended(&mut self, mut running: mpsc::Receiver<Result<(), ringfetch_client::Error>>) {
        let mut second = tokio::time::interval_at(
            tokio::time::Instant::now() + Duration::from_secs(1),
            Duration::from_secs(1),
        );
        let mut last = Instant::now();
        loop {
            tokio::select! {
                _ = running.recv() => return,
                _ = tokio::signal::ctrl_c() => self.pacer.stop(),
                _ = second.tick() => {
                    let now = Instant::now();
                    let interval = self.collect();
                    self.tell(&interval, now - last);
                    last = now;
                }
            }
        }
    }

    /// Moves what the threads have counted since the last time into the total.
    fn collect(&mut self) -> Tally {
        let mut interval = Tally::default();
        for recorder in &self.recorders {
            interval.add(&recorder.take());
        }
        self.total.add(&interval);
        interval
    }

    fn tell(&self, interval: &Tally, length: Duration) {
        if self.line.is_hidden() {
            return;
        }
        let per_second = |count: u64| crate::quantity::approximate(count) / length.as_secs_f64().max(1e-9);
        let [p50, p99] =
            [50.0, 99.0].map(|percentile| interval.percentile(percentile).map_or("-".to_owned(), latency));
        self.line.set_message(format!(
            "{} s  {} reads/s  {} MB/s  p50 {p50}  p99 {p99}  errors {}",
            self.pacer.measured().as_secs(),
            rate(per_second(interval.reads)),
            rate(per_second(interval.bytes) / 1e6),
            self.total.errors(),
        ));
        self.line.tick();
    }

    fn finish(mut self) -> Tally {
        self.collect();
        self.line.finish_and_clear();
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_even_and_whole() {
        // Scenario: 10 slots over 4 threads, 3 over 3.
        // Expected: 3, 3, 2, 2 and 1, 1, 1.
        assert_eq!([0, 1, 2, 3].map(|part| share(10, 4, part)), [3, 3, 2, 2]);
        assert_eq!([0, 1, 2].map(|part| share(3, 3, part)), [1, 1, 1]);
    }
}
