//! The stages of `calibrate`: what to measure next, given the results so far.

use super::REPETITIONS;
use super::found::Found;
use super::subject::Subject;
use crate::drive::engine::Choice;
use crate::setup::{Amount, Heat, Setup, Shape};
use crate::strategies::named;
use crate::study::{Cell, Rows, pair};
use ringfetch_engine::config::BackendKind;
use std::time::{Duration, Instant};

/// The deepest ring tried.
pub(super) const DEPTH_MAX: u32 = 512;
/// Shorter steps would measure their start. It may make the whole longer than requested.
const STEP_MIN: Duration = Duration::from_millis(20);
/// Overhead of a step besides its reads, before it is known.
const BESIDE_STEP: Duration = Duration::from_millis(60);

#[derive(Debug)]
struct Step {
    stage: &'static str,
    setting: String,
    choice: Choice,
    direct: bool,
    warm: bool,
    asked: u32,
}

impl Subject {
    /// The steps of a stage, from 0; `None` after the last.
    fn stage(&self, number: usize, rows: &Rows) -> Option<Vec<Step>> {
        use BackendKind::{Mmap, Pread, Uring};
        let found = Found::new(self, rows, false);
        let direct = found.direct();
        let step = |stage, setting: &dyn ToString, choice: Choice| Step {
            stage,
            setting: setting.to_string(),
            choice,
            direct,
            warm: false,
            asked: found.asked(&choice),
        };
        let (ring, mapped) = (found.chosen(Uring), found.chosen(Mmap));
        let steps = match number {
            0 => {
                let base = self.base(if self.has_ring() { Uring } else { Pread });
                let depths = powers_to(DEPTH_MAX.min(self.fitting())).into_iter().map(|depth| {
                    let choice = with(base, |choice| {
                        // There is something to see beyond the tags, too.
                        (choice.batch, choice.queue_depth, choice.device_tags) = (1, Some(depth), None);
                    });
                    with(step("depth", &depth, choice), |step| step.asked = depth)
                });
                // More threads than CPUs, since they wait for faults at the same time.
                let threads = powers_to(self.cpus.saturating_mul(2).min(256)).into_iter();
                let threads = threads.map(|threads| {
                    let choice = with(self.base(Mmap), |choice| choice.mmap_threads = threads);
                    step("mmap threads", &threads, choice)
                });
                depths.chain(threads).collect()
            }
            1 => {
                let one = |name, choice| step("settings", &name, choice);
                let silent = with(mapped, |choice| choice.announce = false);
                let mut steps = vec![one("announce on", mapped), one("announce off", silent)];
                if self.has_ring() {
                    let patient = with(ring, |choice| choice.eager_flush_reads = 0);
                    steps.extend([one("default", ring), one("eager flush 0", patient)]);
                }
                if self.has_ring() && ring.registered_buffers {
                    let unregistered = with(ring, |choice| choice.registered_buffers = false);
                    steps.push(one("registered buffers off", unregistered));
                }
                if self.has_ring() && self.direct {
                    steps.push(with(one("direct off", ring), |step| step.direct = false));
                }
                steps
            }
            2 if self.has_ring() && self.cpus > 1 => {
                let counts = powers_to(self.cpus).into_iter();
                let of = |rings| with(ring, |choice| choice.rings = rings);
                counts.map(|rings| step("rings", &rings, of(rings))).collect()
            }
            3 | 4 if number == 3 || self.warm_bytes > 0 => {
                let (warm, stage) = (number == 4, if number == 4 { "warm" } else { "cold" });
                let both = |backend| {
                    let choice = found.chosen(backend);
                    let alone = with(choice, |choice| (choice.batch, choice.rings) = (1, 1));
                    let one = with(step(stage, &"one", alone), |step| step.asked = 1);
                    [step(stage, &"many", choice), one].map(|step| with(step, |step| step.warm = warm))
                };
                self.candidates(warm).into_iter().flat_map(both).collect()
            }
            2..=4 => Vec::new(),
            _ => return None,
        };
        Some(steps)
    }

    fn cell(&self, step: &Step, time: Duration) -> Option<Cell> {
        let backend = step.choice.backend;
        let heat = match (step.warm, step.direct && backend != BackendKind::Mmap) {
            (true, _) => Heat::Warm,
            (false, true) => Heat::Direct,
            (false, false) => Heat::Cold,
        };
        let strategy = match backend == BackendKind::Pread {
            true => "engine-pread",
            false => backend.as_str(),
        };
        let window_bytes = if step.warm {
            self.warm_bytes
        } else {
            self.length_bytes
        };
        let shape = Shape::random(self.block_bytes as usize, window_bytes);
        Some(Cell {
            key: vec![
                pair("stage", step.stage),
                pair("backend", backend),
                pair("setting", &step.setting),
                pair("heat", heat.as_str()),
            ],
            strategy: named(strategy)?,
            setup: Setup {
                engine: Some(step.choice),
                ..Setup::new(heat, shape, Amount::For(time), step.asked as usize)
            },
        })
    }

    /// The cells of the next stage that has any.
    pub(super) fn next(&self, stage: &mut usize, rows: &Rows, pace: &Pace) -> Vec<Cell> {
        // The steps of later stages, as far as they are known.
        let left = (*stage..).map_while(|number| self.stage(number, rows));
        let time = pace.step(left.map(|steps| steps.len()).sum(), rows);
        while let Some(steps) = self.stage(*stage, rows) {
            *stage += 1;
            if !steps.is_empty() {
                return steps.iter().filter_map(|step| self.cell(step, time)).collect();
            }
        }
        Vec::new()
    }
}

/// A copy with the changes of `change`.
fn with<T>(mut value: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut value);
    value
}

/// How long each step may take, so that the whole takes the requested time.
#[derive(Debug)]
pub(super) struct Pace {
    pub(super) begun: Instant,
    pub(super) budget: Duration,
}

impl Pace {
    fn step(&self, cells_left: usize, rows: &Rows) -> Duration {
        let (mut steps, mut reading) = (0u32, Duration::ZERO);
        for sample in rows.0.iter().flat_map(|row| row.measured()) {
            steps += 1;
            reading += Duration::try_from_secs_f64(sample.seconds).unwrap_or_default();
        }
        // Of a run that is resumed, the earlier part is over, too.
        let took = self.begun.elapsed().max(reading);
        let beside = match steps {
            0 => BESIDE_STEP,
            steps => took.saturating_sub(reading) / steps,
        };
        let cells = u32::try_from(cells_left).unwrap_or(u32::MAX).max(1);
        let each = self.budget.saturating_sub(took) / cells.saturating_mul(REPETITIONS);
        each.saturating_sub(beside).max(STEP_MIN)
    }
}

/// 1, 2, 4 and so on, and the end itself: 6 gives 1, 2, 4, 6.
pub(super) fn powers_to(end: u32) -> Vec<u32> {
    let end = end.max(1);
    let powers = (0..32).map(|bit| 1u32 << bit).take_while(|power| *power < end);
    powers.chain([end]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::studies::calibrate::advice::tests::{measured, subject};
    use ringfetch_host::block::Tags;

    #[test]
    fn threads_have_work_and_backends_the_same_cores() {
        // Scenario: 64 CPUs: the curve of mmap's threads; then the backends, after 64 rings have paid. Expected: two
        // batches for each thread; the same cores for all.
        let subject = Subject {
            cpus: 64,
            warm_bytes: 1 << 20,
            ..subject()
        };
        let first = subject.stage(0, &Rows::default()).unwrap();
        let curve = first.iter().filter(|step| step.stage == "mmap threads");
        let most = curve.map(|step| {
            let threads = step.choice.mmap_threads;
            assert!(
                step.asked as usize / step.choice.batch >= 2 * threads as usize,
                "{step:?}"
            );
            threads
        });
        assert_eq!(most.max(), Some(128));
        let rings = powers_to(64).into_iter();
        let rings = rings.map(|rings| measured("rings", "uring", &rings.to_string(), u64::from(rings), 2.0));
        let rows = Rows(rings.collect());
        for step in [3, 4]
            .into_iter()
            .flat_map(|stage| subject.stage(stage, &rows).unwrap())
        {
            let cores = if step.setting == "many" { 64 } else { 1 };
            assert_eq!(step.choice.rings, cores, "{step:?}");
        }
    }

    #[test]
    fn pread_has_as_many_reads_in_flight_as_the_rings() {
        // Scenario: rings of 64 of which two pay, without tags, and with tags for 90 reads in all; depths that were not all
        // measured; no ring, and 64 threads. Expected: pread is measured with the reads in flight of both rings, and those
        // threads are advised, with the reason: 128, then 45 for each ring; 128 for each; its own knee.
        let unlimited = Subject {
            tags: None,
            ..subject()
        };
        let tags = Some(Tags {
            of_queue: 96,
            cpus_of_queue: None,
        });
        let refusal = Some("a seccomp filter refuses it".to_owned());
        let limited = Subject { tags, ..subject() };
        let without = Subject { refusal, ..subject() };
        let rings = "as measured: as many as 2 rings have reads in flight; all cores share them";
        let none = "as measured; what more or fewer would do was not";
        let own = "threads of all cores: 100 reads/s, the most; p99 300 us";
        for (subject, depth, threads, why) in [
            (&unlimited, Some("uring"), 128, rings),
            (&limited, Some("uring"), 90, rings),
            (&unlimited, None, 256, none),
            (&without, Some("pread"), 64, own),
        ] {
            let mut rows = Rows(vec![
                measured("cold", "mmap", "many", 50, 2.0),
                measured("cold", "pread", "many", 90, 2.0),
            ]);
            rows.0
                .extend(depth.map(|backend| measured("depth", backend, "64", 100, 2.0)));
            if subject.has_ring() {
                let pay = [("1", 100), ("2", 150)];
                let pay = pay.map(|(rings, reads)| measured("rings", "uring", rings, reads, 2.0));
                rows.0.extend(pay);
            }
            let cold = subject.stage(3, &rows).unwrap();
            let pread = |step: &&Step| step.choice.backend == BackendKind::Pread && step.setting == "many";
            let pread = cold.iter().find(pread).unwrap();
            assert_eq!(pread.choice.queue_depth, Some(threads));
            assert!(pread.asked >= threads, "{pread:?}");
            let advice = Found::new(subject, &rows, false).advice();
            let line = advice.iter().find(|line| line.key == "engine.pread.threads");
            let line = line.unwrap();
            assert_eq!(
                (line.value.as_str(), line.why.as_str()),
                (threads.to_string().as_str(), why)
            );
        }
    }
}
