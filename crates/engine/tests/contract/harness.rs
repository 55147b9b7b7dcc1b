//! An engine over one variant of a backend, a directory for its files, and the checks after every case.
//!
//! `fetch` submits from outside and from each core, and demands equal answers. Every wait has a deadline.

use crate::needs::Need;
use crate::wait::{WAIT, runtime, wait_until};
use prometheus::Registry;
use ringfetch_engine::batch::{Batch, Fetched, Lengths};
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig, OnUnavailable, Placement};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, PartialTail};
use ringfetch_engine::engine::{Engine, SubmitOptions, Ticket};
use ringfetch_engine::error::{ItemError, ReadError};
use ringfetch_engine::sim::SimControl;
use ringfetch_pattern as pattern;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use tempfile::TempDir;

/// Response memory of an engine: holds the 5 MiB object four times, since a response must leave room for
/// others.
pub(crate) const MEMORY_BYTES: u64 = 24 << 20;

/// Reads in flight per shard.
pub(crate) const DEPTH: u32 = 16;

/// Longest device read.
pub(crate) const MAX_READ_BYTES: u32 = 128 << 10;

/// A backend with its settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) backend: BackendKind,
    /// The backend that its engine starts on, before it switches and runs the case.
    pub(crate) started_on: Option<BackendKind>,
    pub(crate) placement: Placement,
    pub(crate) registered: bool,
    pub(crate) announce: bool,
    pub(crate) direct_io: DirectIo,
}

const URING: Variant = Variant {
    name: "uring_direct",
    backend: BackendKind::Uring,
    started_on: None,
    placement: Placement::SameThread,
    registered: true,
    announce: true,
    direct_io: DirectIo::Required,
};

impl Variant {
    /// Whether a ring is part of it.
    pub(crate) fn has_ring(&self) -> bool {
        let rings = [BackendKind::Uring, BackendKind::Auto];
        rings.contains(&self.backend) || self.started_on.is_some_and(|backend| rings.contains(&backend))
    }

    /// What it needs to read files on the file system of the build.
    pub(crate) fn needs(&self) -> Vec<Need> {
        let ring = self.has_ring().then_some(Need::IoUring);
        let direct = (self.direct_io == DirectIo::Required).then_some(Need::DirectIo);
        ring.into_iter().chain(direct).collect()
    }
}

/// Every variant that must fulfil the contract.
pub(crate) static VARIANTS: [Variant; 13] = [
    URING,
    Variant {
        name: "uring_buffered",
        registered: false,
        direct_io: DirectIo::Off,
        ..URING
    },
    Variant {
        name: "uring_own_thread",
        placement: Placement::OwnThread,
        registered: false,
        ..URING
    },
    Variant {
        name: "uring_own_thread_buffered",
        placement: Placement::OwnThread,
        direct_io: DirectIo::Off,
        ..URING
    },
    Variant {
        name: "auto",
        backend: BackendKind::Auto,
        ..URING
    },
    Variant {
        name: "mmap",
        backend: BackendKind::Mmap,
        direct_io: DirectIo::Preferred,
        ..URING
    },
    Variant {
        name: "mmap_plain",
        backend: BackendKind::Mmap,
        announce: false,
        direct_io: DirectIo::Off,
        ..URING
    },
    Variant {
        name: "pread",
        backend: BackendKind::Pread,
        ..URING
    },
    Variant {
        name: "pread_buffered",
        backend: BackendKind::Pread,
        direct_io: DirectIo::Off,
        ..URING
    },
    Variant {
        name: "uring_after_mmap",
        started_on: Some(BackendKind::Mmap),
        ..URING
    },
    Variant {
        name: "auto_after_uring",
        backend: BackendKind::Auto,
        started_on: Some(BackendKind::Uring),
        ..URING
    },
    Variant {
        name: "mmap_after_uring",
        backend: BackendKind::Mmap,
        started_on: Some(BackendKind::Uring),
        direct_io: DirectIo::Preferred,
        ..URING
    },
    Variant {
        name: "sim",
        backend: BackendKind::Sim,
        direct_io: DirectIo::Preferred,
        ..URING
    },
];

/// A case of the contract, with its name.
pub(crate) type Case = (&'static str, fn(&Harness));

/// The result of a batch, copied to the test's own memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) data: Vec<u8>,
    pub(crate) lengths: Lengths,
    pub(crate) errors: Vec<ItemError>,
}

impl From<Fetched> for Answer {
    fn from(fetched: Fetched) -> Self {
        Self {
            data: fetched.data.to_vec(),
            lengths: fetched.lengths,
            errors: fetched.errors,
        }
    }
}

/// The expected answer: the items in order, each its bytes or its error.
pub(crate) fn expected(items: &[Result<&[u8], ReadError>]) -> Answer {
    let errors: Vec<ItemError> = (0..)
        .zip(items)
        .filter_map(|(item, result)| {
            let error = result.as_ref().err()?.clone();
            Some(ItemError { item, error })
        })
        .collect();
    let lengths: Vec<u32> = items
        .iter()
        .map(|result| u32::try_from(result.as_ref().map_or(0, |bytes| bytes.len())).expect("short"))
        .collect();
    let first = lengths.first().copied().unwrap_or(0);
    let uniform = errors.is_empty() && lengths.iter().all(|length| *length == first);
    Answer {
        data: items
            .iter()
            .flatten()
            .flat_map(|bytes| bytes.iter().copied())
            .collect(),
        lengths: if uniform {
            Lengths::Uniform {
                item_bytes: first,
                items: u32::try_from(items.len()).expect("few"),
            }
        } else {
            Lengths::Each(lengths)
        },
        errors,
    }
}

/// Fails with a message that fits a terminal, instead of megabytes of differing bytes.
#[track_caller]
pub(crate) fn assert_answer(found: &Answer, wanted: &Answer, who: &str) {
    assert_eq!(found.errors, wanted.errors, "{who}: errors");
    assert_eq!(found.lengths, wanted.lengths, "{who}: lengths");
    assert_eq!(found.data.len(), wanted.data.len(), "{who}: bytes of data");
    let first = found.data.iter().zip(&wanted.data).position(|(a, b)| a != b);
    assert_eq!(first, None, "{who}: first wrong byte of data");
}

/// See the module.
pub(crate) struct Harness {
    pub(crate) variant: Variant,
    pub(crate) engine: Engine,
    pub(crate) directory: TempDir,
    /// Of the simulated backend.
    pub(crate) sim: Option<SimControl>,
    pub(crate) runtime: tokio::runtime::Runtime,
    registry: Registry,
    /// Items of batches that were accepted.
    accepted: AtomicU64,
}

impl Harness {
    /// Runs a case on a variant, then the final checks.
    pub(crate) fn run(variant: &Variant, case: fn(&Self)) {
        let harness = Self::with(*variant, |_| {});
        case(&harness);
        harness.finish();
    }

    /// Runs a case on a variant with its files beneath `directory`, then the final checks.
    pub(crate) fn run_in(directory: &Path, variant: Variant, case: impl FnOnce(&Self)) {
        let mut harness = Self::with(variant, |_| {});
        harness.directory = tempfile::tempdir_in(directory).expect("a directory");
        case(&harness);
        harness.finish();
    }

    /// An engine with the settings of the suite, changed by `change`.
    pub(crate) fn with(variant: Variant, change: impl FnOnce(&mut EngineConfig)) -> Self {
        let mut config = EngineConfig {
            backend: variant.started_on.unwrap_or(variant.backend),
            on_unavailable: OnUnavailable::Fail,
            cores: 2,
            pin: false,
            memory_budget_bytes: MEMORY_BYTES,
            connection_bytes: MEMORY_BYTES / 2,
            ..EngineConfig::default()
        };
        config.uring.queue_depth = DEPTH;
        config.uring.placement = variant.placement;
        config.uring.registered_buffers = variant.registered;
        config.mmap.announce = variant.announce;
        config.pread.threads = 4;
        config.plan.max_read_bytes = MAX_READ_BYTES;
        change(&mut config);
        let sim = (variant.backend == BackendKind::Sim).then(SimControl::from_environment_silently);
        let engine = match &sim {
            Some(control) => Engine::start_sim(&config, control),
            None => Engine::start(&config),
        };
        let engine = engine.unwrap_or_else(|error| panic!("{}: {error}", variant.name));
        if variant.started_on.is_some() {
            let status = engine.set_backend(variant.backend).expect("a switch");
            assert_eq!(status.backend, variant.backend, "{}", variant.name);
        }
        let registry = Registry::new();
        engine.register_metrics(&registry).expect("free names");
        Self {
            variant,
            engine,
            directory: temporary_directory(),
            sim,
            runtime: runtime(),
            registry,
            accepted: AtomicU64::new(0),
        }
    }

    /// A simulated engine with its control, and [`Self::of_blocks`].
    pub(crate) fn simulated(length: usize, block_bytes: u32) -> (Self, SimControl, Arc<Dataset>, Vec<u8>) {
        let harness = Self::with(VARIANTS[VARIANTS.len() - 1], |_| {});
        let control = harness.sim.clone().expect("a simulation");
        let (dataset, model) = harness.of_blocks(length, block_bytes);
        (harness, control, dataset, model)
    }

    /// As [`Self::simulated`], with 6 MiB and a batch whose reads fill the queue and are held.
    pub(crate) fn stuck() -> (Self, SimControl, Arc<Dataset>, Ticket) {
        let (harness, control, dataset, _) = Self::simulated(6 << 20, 1);
        control.hold();
        let stuck = ranges_of(&dataset, &[(0, 2 << 20)]);
        let stuck = harness.submit(stuck, SubmitOptions::default()).expect("accepted");
        assert!(control.wait_started(u64::from(DEPTH), WAIT));
        (harness, control, dataset, stuck)
    }

    /// The variant's name, for messages.
    pub(crate) fn name(&self) -> &'static str {
        self.variant.name
    }

    /// Writes a file of `length` pattern bytes; returns its path and the bytes.
    ///
    /// Each byte has 4 random bits, so that compressing file systems do compress, and is never 0, which the
    /// kernel puts where a file has no data.
    pub(crate) fn file(&self, name: &str, length: usize) -> (PathBuf, Vec<u8>) {
        let path = self.path(name);
        let mut bytes = vec![0; length];
        pattern::fill(pattern::object_seed(1, name), 0, &mut bytes);
        bytes.iter_mut().for_each(|byte| *byte = *byte % 16 + 1);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
        std::fs::write(&path, &bytes).expect("write");
        (path, bytes)
    }

    /// A file `file` of `length` bytes: blocks over it, and the bytes.
    pub(crate) fn of_blocks(&self, length: usize, block_bytes: u32) -> (Arc<Dataset>, Vec<u8>) {
        let (path, model) = self.file("file", length);
        (self.blocks(block_bytes, &[&path]), model)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Opens a dataset with this variant's settings.
    pub(crate) fn open(&self, kind: KindSpec, paths: &[&Path]) -> Arc<Dataset> {
        let spec = DatasetSpec {
            name: "contract".to_owned(),
            paths: paths.iter().map(|path| path.to_path_buf()).collect(),
            kind,
            direct_io: self.variant.direct_io,
        };
        Arc::new(Dataset::open(&spec).unwrap_or_else(|error| panic!("{}: {error}", self.name())))
    }

    /// Blocks over files; bytes after the last whole block are left out.
    pub(crate) fn blocks(&self, block_bytes: u32, paths: &[&Path]) -> Arc<Dataset> {
        let kind = KindSpec::Blocks {
            block_bytes,
            partial_tail: PartialTail::Ignore,
        };
        self.open(kind, paths)
    }

    /// Cuts a file.
    pub(crate) fn truncate(&self, path: &Path, length: u64) {
        let file = OpenOptions::new().write(true).open(path).expect("open to cut");
        file.set_len(length).expect("cut");
    }

    /// Submits, and counts what was accepted.
    pub(crate) fn submit(&self, batch: Batch, options: SubmitOptions) -> Result<Ticket, ReadError> {
        let items = batch.len() as u64;
        let ticket = self.engine.submit(batch, options)?;
        self.accepted.fetch_add(items, Ordering::Relaxed);
        Ok(ticket)
    }

    /// Counts items that a test submitted by other means.
    pub(crate) fn count_accepted(&self, items: u64) {
        self.accepted.fetch_add(items, Ordering::Relaxed);
    }

    /// The answer to a ticket.
    pub(crate) fn await_answer(&self, ticket: Ticket) -> Result<Fetched, ReadError> {
        let answer = async move { tokio::time::timeout(WAIT, ticket).await };
        let answer = self.runtime.block_on(answer);
        answer.unwrap_or_else(|_| panic!("{}: a ticket is never answered", self.name()))
    }

    /// Submits from outside, and waits.
    pub(crate) fn fetch_outside(&self, batch: Batch, options: SubmitOptions) -> Result<Answer, ReadError> {
        let ticket = self.submit(batch, options)?;
        self.await_answer(ticket).map(Answer::from)
    }

    /// Submits on a core, and waits.
    pub(crate) fn fetch_on(
        &self,
        core: usize,
        batch: Batch,
        options: SubmitOptions,
    ) -> Result<Answer, ReadError> {
        let (tell, told) = mpsc::channel();
        let engine = self.engine.clone();
        let items = batch.len() as u64;
        let spawned = self.engine.spawn_on(core, move || async move {
            let (accepted, answer) = match engine.submit(batch, options) {
                Ok(ticket) => (items, ticket.await.map(Answer::from)),
                Err(error) => (0, Err(error)),
            };
            // Before the answer is sent: the receiver may then require the engine to be idle.
            drop(engine);
            tell.send((accepted, answer)).expect("the test waits");
        });
        assert!(spawned, "{}: core {core} is gone", self.name());
        let (accepted, answer) = told.recv_timeout(WAIT).expect("an answer in time");
        self.accepted.fetch_add(accepted, Ordering::Relaxed);
        answer
    }

    /// The answer to a batch, which must be the same from outside and from either core.
    pub(crate) fn fetch(&self, build: impl Fn() -> Batch) -> Result<Answer, ReadError> {
        self.fetch_with(build, SubmitOptions::default())
    }

    /// As [`Self::fetch`].
    pub(crate) fn fetch_with(
        &self,
        build: impl Fn() -> Batch,
        options: SubmitOptions,
    ) -> Result<Answer, ReadError> {
        let outside = self.fetch_outside(build(), options.clone());
        for core in 0..self.engine.core_count() {
            let inside = self.fetch_on(core, build(), options.clone());
            match (&inside, &outside) {
                (Ok(inside), Ok(outside)) => {
                    assert_answer(inside, outside, &format!("{} on core {core}", self.name()));
                }
                _ => assert_eq!(inside, outside, "{}: core {core} and outside", self.name()),
            }
        }
        outside
    }

    /// Demands exactly these items for a batch, from outside and from each core.
    #[track_caller]
    pub(crate) fn expect(&self, build: impl Fn() -> Batch, items: &[Result<&[u8], ReadError>]) {
        let found = self
            .fetch(build)
            .unwrap_or_else(|error| panic!("{}: {error}", self.name()));
        assert_answer(&found, &expected(items), self.name());
    }

    /// Demands the bytes of these ranges (offset, length) of a model.
    #[track_caller]
    pub(crate) fn expect_ranges(&self, dataset: &Arc<Dataset>, model: &[u8], ranges: &[(usize, usize)]) {
        let items: Vec<_> = ranges
            .iter()
            .map(|&(offset, length)| Ok(&model[offset..offset + length]))
            .collect();
        self.expect(|| ranges_of(dataset, ranges), &items);
    }

    /// Demands the bytes of these blocks of a model.
    #[track_caller]
    pub(crate) fn expect_blocks(
        &self,
        dataset: &Arc<Dataset>,
        model: &[u8],
        block_bytes: usize,
        blocks: &[usize],
    ) {
        let items: Vec<_> = blocks
            .iter()
            .map(|block| Ok(&model[block * block_bytes..(block + 1) * block_bytes]))
            .collect();
        self.expect(|| blocks_of(dataset, blocks), &items);
    }

    /// Device reads of all shards so far.
    pub(crate) fn device_reads(&self) -> u64 {
        self.engine
            .shards()
            .iter()
            .map(|shard| shard.device_reads_total)
            .sum()
    }

    /// Sum over the results of `ringfetch_reads_total`.
    pub(crate) fn counted_reads(&self) -> u64 {
        self.counted("ringfetch_reads_total")
    }

    /// Reads that joined one in flight.
    pub(crate) fn joined_reads(&self) -> u64 {
        self.counted("ringfetch_joined_reads_total")
    }

    fn counted(&self, counter: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == counter);
        family.map_or(0, |family| {
            let counters = family
                .get_metric()
                .iter()
                .map(|metric| metric.get_counter().get_value());
            whole(counters.sum())
        })
    }

    /// Waits until nothing is queued, in flight or held, and the metrics include every accepted item.
    pub(crate) fn wait_idle(&self) {
        wait_until(
            || {
                self.engine
                    .shards()
                    .iter()
                    .all(|shard| shard.in_flight == 0 && shard.queued == 0)
            },
            || format!("{}: not idle: {:?}", self.name(), self.engine.shards()),
        );
        wait_until(
            || self.engine.memory().0 == 0,
            || format!("{}: {} bytes never returned", self.name(), self.engine.memory().0),
        );
        let accepted = self.accepted.load(Ordering::Relaxed);
        wait_until(
            || self.counted_reads() == accepted,
            || {
                format!(
                    "{}: {} items counted of {accepted}",
                    self.name(),
                    self.counted_reads()
                )
            },
        );
        assert_eq!(
            self.engine.totals().reads,
            accepted,
            "{}: the status answer's count",
            self.name()
        );
    }

    /// The checks after every case: the engine is idle, and drains cleanly.
    pub(crate) fn finish(self) {
        self.wait_idle();
        let deadline = Instant::now() + WAIT;
        let report = self.runtime.block_on(self.engine.drain(deadline));
        assert_eq!(report.abandoned_reads, 0, "{}: a drain when idle", self.name());
        assert!(Instant::now() < deadline, "{}: the drain hung", self.name());
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        if let (true, Some(control)) = (std::thread::panicking(), &self.sim) {
            eprintln!("{control}");
        }
    }
}

/// Converts a count, which Prometheus keeps as a float.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a small whole number"
)]
fn whole(value: f64) -> u64 {
    value as u64
}

/// A batch of ranges (offset, length).
pub(crate) fn ranges_of(dataset: &Arc<Dataset>, ranges: &[(usize, usize)]) -> Batch {
    let mut batch = Batch::new(Arc::clone(dataset), ranges.len());
    for &(offset, length) in ranges {
        batch.push_range(offset as u64, length as u64);
    }
    batch
}

pub(crate) fn blocks_of(dataset: &Arc<Dataset>, blocks: &[usize]) -> Batch {
    let mut batch = Batch::new(Arc::clone(dataset), blocks.len());
    for &block in blocks {
        batch.push_block(block as u64);
    }
    batch
}

/// A directory on the file system of the build, which is more likely to support O_DIRECT than that of `/tmp`.
pub(crate) fn temporary_directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}
