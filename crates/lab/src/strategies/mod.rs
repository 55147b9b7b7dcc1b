//! The strategies, all of one shape: a name, a description, and how it makes a job's reads.
//!
//! The engine's are the engine itself; the others are the baselines that it is compared with.

mod aio;
mod daemon;
mod engine;
mod pread;
mod preadv2_hipri;
mod ring;
mod tokio_fs;

use crate::drive::engine::{Choice, drive};
use crate::job::Job;
use crate::setup::{Heat, Setup};
use ringfetch_engine::config::BackendKind;
use std::sync::Arc;

/// How the note begins of a step that asked for polled completions and had no queues for them.
pub(crate) const NOT_POLLED: &str = "not polled: queue/io_poll is 0";

/// A way to read.
#[derive(Debug)]
pub(crate) struct Strategy {
    /// Name in tables and for `--only`.
    pub(crate) name: &'static str,
    /// One line for the report.
    pub(crate) about: &'static str,
    /// Most reads in flight that it supports.
    pub(crate) depth_max: usize,
    pub(crate) run: Run,
}

/// How a job's reads are made.
#[derive(Debug)]
pub(crate) enum Run {
    /// By the engine, with the settings chosen for a step.
    Engine(fn(&Setup) -> Choice),
    Own(fn(&Arc<Job>) -> Result<(), String>),
}

impl Strategy {
    /// Makes the job's reads.
    pub(crate) fn run(&self, job: &Arc<Job>) -> Result<(), String> {
        match self.run {
            Run::Engine(choice) => drive(job, job.setup.engine.unwrap_or_else(|| choice(&job.setup))),
            Run::Own(run) => run(job),
        }
    }

    /// Whether its reads go past the page cache; `None`: perhaps, those of `auto` as it decides. For a daemon it is not
    /// known.
    pub(crate) fn past_cache(&self, setup: &Setup) -> Option<bool> {
        let backend = match self.run {
            Run::Engine(choice) => Some(setup.engine.unwrap_or_else(|| choice(setup)).backend),
            Run::Own(_) => None,
        };
        match (setup.heat, backend) {
            (Heat::Direct, Some(BackendKind::Auto)) => None,
            (Heat::Direct, backend) => Some(backend != Some(BackendKind::Mmap)),
            (Heat::Cold | Heat::Warm | Heat::AsFound, _) => Some(false),
        }
    }
}

/// All of them, in the order of tables.
pub(crate) static ALL: [&Strategy; 14] = [
    &pread::ONE_THREAD,
    &pread::THREADED,
    &preadv2_hipri::STRATEGY,
    &tokio_fs::STRATEGY,
    &aio::STRATEGY,
    &ring::INTERRUPTED,
    &ring::POLLED,
    &engine::URING,
    &engine::URING_BATCH,
    &engine::AUTO,
    &engine::MMAP,
    &engine::MMAP_PLAIN,
    &engine::PREAD,
    &daemon::STRATEGY,
];

pub(crate) fn named(name: &str) -> Option<&'static Strategy> {
    ALL.into_iter().find(|strategy| strategy.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::Material;
    use crate::material::tests::{scratch, small};
    use crate::setup::{Amount, Shape};
    use std::sync::atomic::AtomicBool;

    /// Runs a strategy with every byte checked; returns the reads it made.
    fn reads(name: &str, material: &Arc<Material>, setup: Setup) -> u64 {
        let strategy = named(name).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let job = Job::new(material, setup, 3, true, &stop).unwrap();
        strategy
            .run(&job)
            .unwrap_or_else(|problem| panic!("{name} {setup:?}: {problem}"));
        job.outcome().unwrap().reads
    }

    /// Blocks of several sizes, deep and shallow, at random and in order, through the page cache; then whole
    /// files, opened in advance and each time, with and without reused buffers.
    fn return_the_right_bytes(names: &str) {
        let directory = scratch();
        let blocks = Arc::new(small(directory.path()));
        let files = Arc::new(Material::many(directory.path(), 20, 48 << 10, &mut |_| true).unwrap());
        for name in names.split(' ') {
            let most = named(name).unwrap().depth_max;
            for (block_bytes, depth, random) in [(512, 4, true), (4096, 32, true), (1 << 20, 2, false)] {
                let window_bytes = 4 << 20;
                let shape = Shape::Blocks {
                    block_bytes,
                    window_bytes,
                    random,
                };
                let setup = Setup::new(Heat::Cold, shape, Amount::Reads(1000), most.min(depth));
                let all = setup.reads(&blocks).positions;
                assert_eq!(reads(name, &blocks, setup), all.min(1000), "{name} {block_bytes}");
            }
            for (open_each, pooled) in [(false, true), (true, false)] {
                let (shape, amount) = (Shape::Files { count: 20 }, Amount::Reads(u64::MAX));
                let setup = Setup::new(Heat::Warm, shape, amount, most.min(7));
                let setup = Setup {
                    open_each,
                    pooled,
                    ..setup
                };
                assert_eq!(reads(name, &files, setup), 20, "{name}");
            }
        }
    }

    /// O_DIRECT at every depth that the study uses.
    fn return_the_right_bytes_direct(names: &str) {
        let directory = scratch();
        let blocks = Arc::new(small(directory.path()));
        for (name, depth) in names.split(' ').flat_map(|name| [(name, 1), (name, 64)]) {
            let depth = named(name).unwrap().depth_max.min(depth);
            let shape = Shape::random(4096, 4 << 20);
            let setup = Setup::new(Heat::Direct, shape, Amount::Reads(2000), depth);
            assert_eq!(reads(name, &blocks, setup), 1024, "{name} {depth}");
        }
    }

    const WITHOUT_RING: &str = "pread threaded-pread preadv2-hipri tokio-fs aio engine-pread";
    const WITH_RING: &str = "ring uring uring-batch auto";

    #[test]
    fn strategies_without_a_ring_return_the_right_bytes() {
        return_the_right_bytes(&format!("{WITHOUT_RING} mmap mmap-plain"));
    }

    #[test]
    #[ignore = "needs io_uring"]
    fn strategies_with_a_ring_return_the_right_bytes() {
        return_the_right_bytes(WITH_RING);
    }

    #[test]
    #[ignore = "needs direct I/O"]
    fn strategies_without_a_ring_return_the_right_bytes_direct() {
        return_the_right_bytes_direct(WITHOUT_RING);
    }

    #[test]
    #[ignore = "needs io_uring and direct I/O"]
    fn strategies_with_a_ring_return_the_right_bytes_direct() {
        return_the_right_bytes_direct(WITH_RING);
    }

    #[test]
    fn a_mapping_counts_pages_whatever_is_asked_of_it() {
        // Scenario: ten direct reads of 512 bytes, of which the device read five pages: 20,480 bytes. Expected: half of the
        // pages by a mapping; four times the bytes by pread; all of them by auto, which does either. Cold, half by all.
        let directory = scratch();
        let material = Arc::new(small(directory.path()));
        for heat in [Heat::Direct, Heat::Cold] {
            let setup = Setup::new(heat, Shape::random(512, 4 << 20), Amount::Reads(10), 1);
            let job = Job::new(&material, setup, 1, false, &Arc::new(AtomicBool::new(false))).unwrap();
            let mut lane = job.lane();
            job.begin();
            while let Some(read) = job.next() {
                lane.counted(read.offset, read.length, std::time::Instant::now());
            }
            drop(lane);
            let names = ["mmap", "mmap-plain", "engine-pread", "aio", "auto"];
            let shares = names.map(|name| job.device_share(20_480, named(name).unwrap().past_cache(&setup)));
            let expected = if heat == Heat::Direct {
                [0.5, 0.5, 4.0, 4.0, 1.0]
            } else {
                [0.5; 5]
            };
            assert_eq!(shares, expected, "{heat:?}");
        }
    }

    #[test]
    fn names_are_unique_and_found() {
        // Scenario: every strategy by its name, and an unknown name. Expected: itself; nothing.
        for strategy in ALL {
            let found = named(strategy.name).unwrap();
            assert!(std::ptr::eq(found, strategy) && !strategy.about.is_empty());
        }
        assert!(named("io_uring").is_none());
    }
}
