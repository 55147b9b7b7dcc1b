//! The ways to read, a file each, all in one shape: a name, what it is, and how it makes a job's reads.
//!
//! Those of the engine are the engine itself; the others are the baselines that it is compared with.

mod aio;
mod daemon;
mod engine_auto;
mod engine_mmap;
mod engine_mmap_plain;
mod engine_pread;
mod engine_uring;
mod engine_uring_batch;
mod pread;
mod preadv2_hipri;
mod ring;
mod ring_polled;
mod threaded_pread;
mod tokio_fs;

use crate::job::Job;
use std::sync::Arc;

/// The engine has no bound of its own: memory bounds it.
const DEPTH_MAX: usize = 1 << 20;

/// A way to read.
#[derive(Debug)]
pub(crate) struct Strategy {
    /// As in tables and `--only`.
    pub(crate) name: &'static str,
    /// One line for the report.
    pub(crate) about: &'static str,
    /// Most reads in flight that it can have.
    pub(crate) depth_max: usize,
    /// Makes the job's reads.
    pub(crate) run: fn(&Arc<Job>) -> Result<(), String>,
}

/// All of them, in the order of tables.
pub(crate) static ALL: [&Strategy; 14] = [
    &pread::STRATEGY,
    &threaded_pread::STRATEGY,
    &preadv2_hipri::STRATEGY,
    &tokio_fs::STRATEGY,
    &aio::STRATEGY,
    &ring::STRATEGY,
    &ring_polled::STRATEGY,
    &engine_uring::STRATEGY,
    &engine_uring_batch::STRATEGY,
    &engine_auto::STRATEGY,
    &engine_mmap::STRATEGY,
    &engine_mmap_plain::STRATEGY,
    &engine_pread::STRATEGY,
    &daemon::STRATEGY,
];

/// The strategy of this name.
pub(crate) fn named(name: &str) -> Option<&'static Strategy> {
    ALL.into_iter().find(|strategy| strategy.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Amount, Heat, Setup, Shape};
    use crate::material::Material;
    use crate::material::tests::{scratch, small};
    use std::sync::atomic::AtomicBool;

    /// Runs a strategy with every byte checked; returns the reads it made.
    fn reads(name: &str, material: &Arc<Material>, setup: Setup) -> u64 {
        let strategy = named(name).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let job = Job::new(material, setup, 3, true, &stop).unwrap();
        (strategy.run)(&job).unwrap_or_else(|problem| panic!("{name} {setup:?}: {problem}"));
        let sample = job
            .outcome()
            .unwrap_or_else(|problem| panic!("{name} {setup:?}: {problem}"));
        sample.reads
    }

    /// Blocks of several sizes, deep and shallow, at random and in order, through the page cache; then whole files, opened
    /// before and each time, with and without buffers that are used again.
    fn returns_the_right_bytes(name: &str) {
        let directory = scratch();
        let blocks = Arc::new(small(directory.path()));
        let files = Arc::new(Material::many(directory.path(), 20, 48 << 10, &mut |_| true).unwrap());
        let most = named(name).unwrap().depth_max;
        for (block_bytes, depth, random) in [(512, 4, true), (4096, 32, true), (1 << 20, 2, false)] {
            let shape = Shape::Blocks {
                block_bytes,
                window_bytes: 4 << 20,
                random,
            };
            let setup = Setup::new(Heat::Cold, shape, Amount::Reads(1000), most.min(depth));
            let all = (4 << 20) / (block_bytes as u64).max(if random { 4096 } else { 1 });
            assert_eq!(reads(name, &blocks, setup), all.min(1000), "{name} {block_bytes}");
        }
        for (open_each, pooled) in [(false, true), (true, false)] {
            let shape = Shape::Files { count: 20 };
            let setup = Setup {
                open_each,
                pooled,
                ..Setup::new(Heat::Warm, shape, Amount::Reads(u64::MAX), most.min(7))
            };
            assert_eq!(reads(name, &files, setup), 20, "{name}");
        }
    }

    macro_rules! right_bytes {
        ($($test:ident: $name:literal $(, $needs:literal)?;)*) => {
            $(
                #[test]
                $(#[ignore = $needs])?
                fn $test() {
                    returns_the_right_bytes($name);
                }
            )*
        };
    }

    right_bytes! {
        pread_returns_the_right_bytes: "pread";
        threaded_pread_returns_the_right_bytes: "threaded-pread";
        preadv2_hipri_returns_the_right_bytes: "preadv2-hipri";
        tokio_fs_returns_the_right_bytes: "tokio-fs";
        aio_returns_the_right_bytes: "aio";
        ring_returns_the_right_bytes: "ring", "needs io_uring";
        engine_uring_returns_the_right_bytes: "uring", "needs io_uring";
        engine_uring_batch_returns_the_right_bytes: "uring-batch", "needs io_uring";
        engine_auto_returns_the_right_bytes: "auto", "needs io_uring";
        engine_mmap_returns_the_right_bytes: "mmap";
        engine_mmap_plain_returns_the_right_bytes: "mmap-plain";
        engine_pread_returns_the_right_bytes: "engine-pread";
    }

    /// O_DIRECT at every depth that the study uses.
    fn returns_the_right_bytes_direct(names: &[&str]) {
        let directory = scratch();
        let blocks = Arc::new(small(directory.path()));
        for name in names {
            for depth in [1, 64] {
                let shape = Shape::random(4096, 4 << 20);
                let depth = depth.min(named(name).unwrap().depth_max);
                let setup = Setup::new(Heat::Direct, shape, Amount::Reads(2000), depth);
                assert_eq!(reads(name, &blocks, setup), 1024, "{name} {depth}");
            }
        }
    }

    #[test]
    #[ignore = "needs direct I/O"]
    fn strategies_without_a_ring_return_the_right_bytes_direct() {
        returns_the_right_bytes_direct(&[
            "pread",
            "threaded-pread",
            "preadv2-hipri",
            "tokio-fs",
            "aio",
            "engine-pread",
        ]);
    }

    #[test]
    #[ignore = "needs io_uring and direct I/O"]
    fn strategies_with_a_ring_return_the_right_bytes_direct() {
        returns_the_right_bytes_direct(&["ring", "uring", "uring-batch", "auto"]);
    }

    #[test]
    fn names_are_unique_and_found() {
        // Scenario: every strategy by its name, and a name of none. Expected: itself; nothing.
        for strategy in ALL {
            assert!(
                std::ptr::eq(named(strategy.name).unwrap(), strategy),
                "{}",
                strategy.name
            );
            assert!(!strategy.about.is_empty());
        }
        assert!(named("io_uring").is_none());
    }
}
