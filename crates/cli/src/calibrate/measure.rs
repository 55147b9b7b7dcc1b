//! Which steps are made, in which order, and with which settings; each phase stands on what those before it found.
//!
//! Depths, threads and backends are measured in passes over all of them, every other pass backwards; two settings in
//! pairs whose order alternates. Invariants: reads through the page cache begin cold, or warm where that is the
//! question, and that is checked; a Ctrl-C ends the step under way, whose figures are dropped, and everything after it.

mod backends;

use super::args::Rounds;
use super::drive::{self, MEMORY_MAX_BYTES, Sample, Setup};
use super::findings::{Contest, Curve, Findings, Heat, Phase, Step};
use super::notes;
use super::schedule::Schedule;
use super::target::Target;
use super::walk::Walk;
use crate::outcome::Failure;
use crate::quantity::size;
use indicatif::ProgressBar;
use ringfetch_engine::config::{BackendKind, EngineConfig};
use ringfetch_engine::probe::{UringFacts, UringRefusal};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The deepest ring that is tried.
const DEPTH_MAX: u32 = 512;
/// Reads of a batch, but for the curve of depths: there each read is asked for alone, so that its latency is its own.
/// Fewer where they would be more than `BATCH_BYTES_MAX`.
const BATCH: u32 = 16;
const BATCH_BYTES_MAX: u32 = 1 << 20;
/// A setting whose typical read takes so many times its step, and so long, is the last one of its curve.
const OUTLASTS: f64 = 4.0;
const OUTLASTS_MIN_US: f64 = 250e3;
/// Reads asked for at once, at least: as many as keep two threads of mmap in announced batches.
const ASKED_MIN: usize = 128;

/// A calibration under way.
pub(super) struct Bench<'a> {
    target: &'a Target,
    rounds: Rounds,
    budget: Duration,
    cpus: u32,
    ring: Result<UringFacts, UringRefusal>,
    schedule: Schedule,
    bar: &'a ProgressBar,
    stop: watch::Receiver<bool>,
    /// The settings so far.
    base: Setup,
    steps: Vec<Step>,
    notes: Vec<String>,
    stopped: bool,
}

impl<'a> Bench<'a> {
    pub(super) fn new(
        target: &'a Target,
        (budget, rounds): (Duration, Rounds),
        ring: Result<UringFacts, UringRefusal>,
        cpus: u32,
        bar: &'a ProgressBar,
        stop: watch::Receiver<bool>,
    ) -> Self {
        let defaults = EngineConfig::default();
        let base = Setup {
            backend: BackendKind::Uring,
            direct: target.direct,
            rings: 1,
            queue_depth: defaults.uring.queue_depth,
            eager_flush_reads: defaults.uring.eager_flush_reads,
            registered_buffers: ring.as_ref().is_ok_and(|facts| facts.registered_buffers.is_ok()),
            mmap_threads: defaults.mmap.threads,
            announce: defaults.mmap.announce,
            pread_threads: defaults.pread.threads,
            batch: (BATCH_BYTES_MAX / target.block_bytes.max(1)).clamp(1, BATCH) as usize,
            asked: ASKED_MIN,
            device_tags: target
                .device
                .as_ref()
                .and_then(ringfetch_host::block::Device::queue_tags),
        };
        let mut bench = Self {
            target,
            rounds,
            budget,
            cpus: cpus.max(1),
            ring,
            schedule: Schedule::new(Instant::now(), budget, 0),
            bar,
            stop,
            base,
            steps: Vec::new(),
            notes: Vec::new(),
            stopped: false,
        };
        bench.schedule = Schedule::new(Instant::now(), budget, bench.planned());
        bench
    }

    /// Measures everything there is to measure here.
    ///
    /// # Errors
    /// A step failed.
    pub(super) async fn run(mut self) -> Result<Findings, Failure> {
        let has_ring = self.ring.is_ok();
        let depth = self.depth_curve(has_ring).await?;
        if let Some(knee) = depth.as_ref().and_then(Curve::knee) {
            // As many as the depth: a pool of pread has as many reads in flight as threads.
            self.base.pread_threads = knee.setting;
            self.base.queue_depth = knee.setting;
            self.base.asked = ASKED_MIN.max(2 * knee.setting as usize);
        }
        let mut contests = Vec::new();
        if has_ring {
            contests.extend(self.registered_buffers().await?);
            contests.extend(self.eager_flush().await?);
            contests.extend(self.direct_io().await?);
            self.rings(&mut contests).await?;
        }
        let mmap_threads = self.mmap_threads().await?;
        if let Some(knee) = mmap_threads.as_ref().and_then(Curve::knee) {
            self.base.mmap_threads = knee.setting;
        }
        contests.extend(self.announce().await?);
        let cold = self.backends(None).await?;
        let (mut warm, mut warm_window_bytes) = (None, None);
        if self.target.fits_memory() {
            warm_window_bytes = self.warmed()?;
            if let Some(window) = warm_window_bytes {
                warm = self.backends(Some(window)).await?;
            }
        }
        let closing = notes::closing(&self.steps, self.target.holes_share, depth.as_ref(), self.stopped);
        self.notes.extend(closing);
        let depth_in_force = if has_ring {
            let ring = Setup {
                backend: BackendKind::Uring,
                ..self.base
            };
            Some(drive::depth_in_force(&ring, self.target.block_bytes).await?)
        } else {
            None
        };
        Ok(Findings {
            ring_refusal: self.ring.err().map(|refusal| refusal.to_string()),
            depth,
            contests,
            mmap_threads,
            cold,
            warm,
            warm_window_bytes,
            chosen: self.base,
            depth_in_force,
            stopped: self.stopped,
            notes: self.notes,
            steps: self.steps,
        })
    }

    /// Steps of all phases, as far as can be told before.
    fn planned(&self) -> u32 {
        let (passes, pairs) = (self.rounds.passes, 2 * self.rounds.pairs);
        let rounds = self.rounds.rankings;
        let contests = if self.ring.is_ok() {
            let registered = u32::from(self.base.registered_buffers);
            registered + 1 + u32::from(self.target.direct) + count(self.ring_rungs().len())
        } else {
            0
        };
        let backends = count(self.candidates(self.target.fits_memory()).len());
        let heats = 1 + u32::from(self.target.fits_memory());
        count(self.depths().len()) * passes
            + contests * pairs
            + count(self.thread_counts().len()) * passes
            + pairs
            + backends * heats * rounds
    }

    /// Powers of two, as deep as the memory bound allows: 512 reads of 4 KiB, 64 of 1 MiB.
    fn depths(&self) -> Vec<u32> {
        let read = 2 * u64::from(self.target.block_bytes).next_multiple_of(4096);
        let fitting = u32::try_from(MEMORY_MAX_BYTES / 2 / read).unwrap_or(DEPTH_MAX);
        powers_to(DEPTH_MAX.min(fitting))
    }

    /// 1 to twice the CPUs: more threads than CPUs wait for faults at the same time.
    fn thread_counts(&self) -> Vec<u32> {
        powers_to(self.cpus.saturating_mul(2).min(256))
    }

    /// (1, 2), (2, 4), ... up to a ring a CPU.
    fn ring_rungs(&self) -> Vec<(u32, u32)> {
        let counts = powers_to(self.cpus);
        counts
            .iter()
            .copied()
            .zip(counts.iter().copied().skip(1))
            .collect()
    }

    /// One step. `None` when it was stopped.
    async fn step(
        &mut self,
        phase: Phase,
        setup: Setup,
        warm_window: Option<u64>,
    ) -> Result<Option<Sample>, Failure> {
        if self.stopped || *self.stop.borrow() {
            self.stopped = true;
            return Ok(None);
        }
        let begin = Instant::now();
        let slice = self.schedule.slice(begin);
        self.bar.set_message(what(phase, &setup));
        let through_cache = setup.backend == BackendKind::Mmap || !setup.direct;
        let target = self.target;
        let (heat, resident_before) = match warm_window {
            Some(window) => (Heat::Warm, target.resident_share(window)),
            None if through_cache => (Heat::Cold, target.evict()),
            // `auto` looks for what is in memory.
            None if setup.backend == BackendKind::Auto => (Heat::Direct, target.evict()),
            None => (Heat::Direct, None),
        };
        let ends = heat == Heat::Cold;
        let window = warm_window.unwrap_or(target.length_bytes);
        let walk = Walk::new(window, target.block_bytes, ends, self.steps.len() as u64);
        let sample = drive::drive(target, &setup, (walk, ends), slice, &mut self.stop).await?;
        self.schedule.took(slice, begin.elapsed());
        let (done, left) = self.schedule.steps();
        self.bar.set_length(u64::from(done + left));
        self.bar.set_position(u64::from(done));
        let Some(sample) = sample else {
            self.stopped = true;
            return Ok(None);
        };
        self.steps.push(Step {
            phase,
            heat,
            resident_before,
            setup,
            sample,
        });
        Ok(Some(sample))
    }

    /// A curve: `make` sets a setting. Passes alternate in direction. Where reads outlast
    /// their steps by far, nothing deeper is tried: it would only wait longer.
    async fn curve(
        &mut self,
        phase: Phase,
        mut settings: Vec<u32>,
        limit: Option<u32>,
        make: impl Fn(Setup, u32) -> Setup,
    ) -> Result<Option<Curve>, Failure> {
        let mut samples = Vec::new();
        for pass in 0..self.rounds.passes {
            let mut order = settings.clone();
            if pass % 2 == 1 {
                order.reverse();
            }
            for setting in order {
                if self.stopped {
                    break;
                }
                let slice = self.schedule.slice(Instant::now());
                let setup = make(self.base, setting);
                let Some(sample) = self.step(phase, setup, None).await? else {
                    break;
                };
                samples.push((setting, sample));
                let outlasts = sample.p50_us > OUTLASTS * slice.as_secs_f64() * 1e6;
                if pass == 0 && outlasts && sample.p50_us > OUTLASTS_MIN_US {
                    let left_out = settings.iter().filter(|other| **other > setting).count();
                    settings.retain(|other| *other <= setting);
                    self.schedule.skip(count(left_out) * self.rounds.passes);
                    self.notes.push(format!(
                        "{} beyond {setting} were left out: a read took longer than several steps; give it more --seconds",
                        if phase == Phase::Depth { "depths" } else { "threads" }
                    ));
                    break;
                }
            }
        }
        // A curve of which a part is missing has its knee where it was cut.
        let whole = settings
            .iter()
            .all(|setting| samples.iter().any(|(other, _)| other == setting));
        Ok(if whole {
            Curve::through(&samples, limit)
        } else {
            None
        })
    }

    async fn depth_curve(&mut self, has_ring: bool) -> Result<Option<Curve>, Failure> {
        let depths = self.depths();
        if depths.last() != Some(&DEPTH_MAX) {
            self.notes.push(format!(
                "depths up to {} only: more reads of {} would take more than {} of memory",
                depths.last().copied().unwrap_or(1),
                size(self.target.block_bytes.into()),
                size(MEMORY_MAX_BYTES)
            ));
        }
        let limit = if has_ring {
            let deepest = Setup {
                queue_depth: DEPTH_MAX,
                ..self.base
            };
            Some(drive::depth_in_force(&deepest, self.target.block_bytes).await?)
        } else {
            None
        };
        self.curve(Phase::Depth, depths, limit, |base, depth| Setup {
            backend: if has_ring {
                BackendKind::Uring
            } else {
                BackendKind::Pread
            },
            queue_depth: depth,
            pread_threads: depth,
            batch: 1,
            asked: depth as usize,
            // Beyond the tags there is something to be seen, too.
            device_tags: None,
            ..base
        })
        .await
    }

    /// Compares two settings; `None` when it was stopped before there was a pair.
    async fn contest(
        &mut self,
        phase: Phase,
        names: [String; 2],
        [first, second]: [Setup; 2],
    ) -> Result<Option<Contest>, Failure> {
        let mut pairs = Vec::new();
        for pair in 0..self.rounds.pairs {
            let swapped = pair % 2 == 1;
            let (before, after) = if swapped { (second, first) } else { (first, second) };
            let Some(one) = self.step(phase, before, None).await? else {
                break;
            };
            let Some(other) = self.step(phase, after, None).await? else {
                break;
            };
            pairs.push(if swapped { (other, one) } else { (one, other) });
        }
        Ok(Contest::between(phase, names, &pairs))
    }

    async fn registered_buffers(&mut self) -> Result<Option<Contest>, Failure> {
        let Ok(facts) = &self.ring else { return Ok(None) };
        if let Err(reason) = &facts.registered_buffers {
            self.notes.push(format!(
                "registered buffers are unavailable, and were not tried: {reason}"
            ));
            return Ok(None);
        }
        let limit = facts.memlock_limit_bytes;
        let pinned = self.steps.iter().any(|step| step.sample.pinned_bytes > 0);
        if let (false, Some(limit)) = (pinned, limit.filter(|limit| *limit < MEMORY_MAX_BYTES)) {
            // The probe's page fits, a daemon's memory does not.
            self.notes.push(format!(
                "registered buffers are unavailable: RLIMIT_MEMLOCK is {}; raise it (ulimit -l) to \
                 engine.memory_budget and calibrate again",
                size(limit)
            ));
            self.base.registered_buffers = false;
            self.schedule.skip(2 * self.rounds.pairs);
            return Ok(None);
        }
        let [off, on] = [false, true].map(|registered_buffers| Setup {
            registered_buffers,
            ..self.base
        });
        let contest = self
            .contest(
                Phase::RegisteredBuffers,
                ["off", "on"].map(str::to_owned),
                [off, on],
            )
            .await?;
        self.base.registered_buffers = second_unless(contest.as_ref(), true);
        Ok(contest)
    }

    async fn eager_flush(&mut self) -> Result<Option<Contest>, Failure> {
        let eager = EngineConfig::default().uring.eager_flush_reads;
        let [off, on] = [0, eager].map(|eager_flush_reads| Setup {
            eager_flush_reads,
            ..self.base
        });
        let names = [0, eager].map(|reads| reads.to_string());
        let contest = self.contest(Phase::EagerFlush, names, [off, on]).await?;
        self.base.eager_flush_reads = if second_unless(contest.as_ref(), true) {
            eager
        } else {
            0
        };
        Ok(contest)
    }

    async fn direct_io(&mut self) -> Result<Option<Contest>, Failure> {
        if !self.target.direct {
            self.notes.push(format!(
                "direct I/O was not tried: {}; all reads here go through the page cache",
                self.target.direct_reason
            ));
            return Ok(None);
        }
        let [buffered, direct] = [false, true].map(|direct| Setup { direct, ..self.base });
        let names = ["buffered", "direct"].map(str::to_owned);
        let contest = self.contest(Phase::DirectIo, names, [buffered, direct]).await?;
        self.base.direct = second_unless(contest.as_ref(), true);
        Ok(contest)
    }

    /// Doubles the rings for as long as that pays in reads.
    async fn rings(&mut self, contests: &mut Vec<Contest>) -> Result<(), Failure> {
        let rungs = self.ring_rungs();
        for (index, (few, many)) in rungs.iter().copied().enumerate() {
            let setups = [few, many].map(|rings| Setup { rings, ..self.base });
            let names = [few, many].map(|rings| rings.to_string());
            let Some(contest) = self.contest(Phase::Rings, names, setups).await? else {
                return Ok(());
            };
            let pays = contest.choice == super::judge::Choice::SecondByReads;
            contests.push(contest);
            if !pays {
                self.schedule
                    .skip(count(rungs.len() - index - 1) * 2 * self.rounds.pairs);
                break;
            }
            self.base.rings = many;
        }
        Ok(())
    }

    fn mapped(&self) -> Setup {
        Setup {
            backend: BackendKind::Mmap,
            // Its threads copy; the core that asks is one.
            rings: 1,
            ..self.base
        }
    }

    async fn mmap_threads(&mut self) -> Result<Option<Curve>, Failure> {
        let mapped = self.mapped();
        self.curve(
            Phase::MmapThreads,
            self.thread_counts(),
            None,
            |_, mmap_threads| Setup {
                mmap_threads,
                ..mapped
            },
        )
        .await
    }

    async fn announce(&mut self) -> Result<Option<Contest>, Failure> {
        let [off, on] = [false, true].map(|announce| Setup {
            announce,
            ..self.mapped()
        });
        let names = ["off", "on"].map(str::to_owned);
        let contest = self.contest(Phase::MmapAnnounce, names, [off, on]).await?;
        self.base.announce = second_unless(contest.as_ref(), true);
        Ok(contest)
    }
}

/// Whether the second side of a contest is to be taken; `default` where there was none, or neither is better.
fn second_unless(contest: Option<&Contest>, default: bool) -> bool {
    contest.and_then(Contest::takes_second).unwrap_or(default)
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// 1, 2, 4 and so on, and the end itself: 6 gives 1, 2, 4, 6.
fn powers_to(end: u32) -> Vec<u32> {
    let end = end.max(1);
    let powers = (0..32).map(|bit| 1u32 << bit).take_while(|power| *power < end);
    powers.chain([end]).collect()
}

/// What the progress line says of a step.
fn what(phase: Phase, setup: &Setup) -> String {
    let on = |is: bool| if is { "on" } else { "off" };
    match phase {
        Phase::Depth => format!("depth {}", setup.queue_depth),
        Phase::RegisteredBuffers => format!("registered buffers {}", on(setup.registered_buffers)),
        Phase::EagerFlush => format!("eager flush {}", setup.eager_flush_reads),
        Phase::DirectIo => format!("direct I/O {}", on(setup.direct)),
        Phase::Rings => format!("rings {}", setup.rings),
        Phase::MmapThreads => format!("mmap threads {}", setup.mmap_threads),
        Phase::MmapAnnounce => format!("announcing {}", on(setup.announce)),
        Phase::BackendsCold => format!("{} cold", setup.backend),
        Phase::BackendsWarm => format!("{} warm", setup.backend),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_double_up_to_the_end() {
        // Scenario: ends that are powers of two and not, one, and none. Expected: every power below, and the end.
        assert_eq!(powers_to(8), [1, 2, 4, 8]);
        assert_eq!(powers_to(6), [1, 2, 4, 6]);
        assert_eq!(powers_to(1), [1]);
        assert_eq!(powers_to(0), [1]);
        assert_eq!(powers_to(512).len(), 10);
        assert_eq!(powers_to(u32::MAX).len(), 33);
    }
}
