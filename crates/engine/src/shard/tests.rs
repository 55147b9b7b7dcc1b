//! Tests that poll a shard by hand, on the simulation.

mod hanging;
mod joiners;

use super::*;
use crate::backend::residency::Residency;
use crate::backend::sim::{Fault, FaultPlan, SimBackend, SimControl};
use crate::batch::Item;
use crate::batch::{Batch, Fetched};
use crate::buffer::Arena;
use crate::config::{BackendKind, DirectIo};
use crate::dataset::{Dataset, DatasetSpec, KindSpec};
use crate::error::ReadError;
use crate::plan::{PlanRules, plan};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::task::{Poll, Wake, Waker};
use tokio::sync::oneshot;

struct World {
    file: tempfile::NamedTempFile,
    dataset: Arc<Dataset>,
    arena: Arena,
    control: SimControl,
    mailbox: Mailbox,
    metrics: Arc<ShardMetrics>,
    shard: Shard<SimBackend>,
}

type Reply = oneshot::Receiver<Result<Fetched, ReadError>>;

impl World {
    fn new(depth: u32, file_bytes: usize) -> Self {
        Self::on_disks(depth, file_bytes, &[1])
    }

    /// The dataset has a file for each of the disks, all with the same bytes.
    fn on_disks(depth: u32, file_bytes: usize, disks: &[u64]) -> Self {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let bytes: Vec<u8> = (0..=250).cycle().take(file_bytes).collect();
        std::fs::write(file.path(), bytes).expect("write");
        let mut spec = DatasetSpec::new("data", file.path(), KindSpec::blocks(1), DirectIo::Off);
        spec.paths = vec![file.path().into(); disks.len()];
        let dataset = Dataset::open(&spec);
        let control = SimControl::new(1);
        let (mailbox, inbox) = inbox();
        let metrics = ShardMetrics::new(0, BackendKind::Sim, depth);
        let backend = SimBackend::new(&control);
        Self {
            file,
            dataset: Arc::new(dataset.expect("open").on_disks(disks)),
            arena: Arena::new(64 << 20, 1).expect("memory"),
            shard: Shard::new(backend, inbox, Arc::clone(&metrics), 0),
            control,
            mailbox,
            metrics,
        }
    }

    /// Sends a range, read in pieces of 1 MiB; `change` alters the planned batch.
    fn send(&self, ranges: &[(u64, u64)], change: impl FnOnce(&mut PlannedBatch)) -> Reply {
        let (batch, answer) = self.planned(ranges, change);
        self.mailbox.deliver(batch).expect("room");
        answer
    }

    fn planned(
        &self,
        ranges: &[(u64, u64)],
        change: impl FnOnce(&mut PlannedBatch),
    ) -> (Box<PlannedBatch>, Reply) {
        let mut batch = Batch::new(Arc::clone(&self.dataset), ranges.len());
        for (offset, length) in ranges {
            batch.push_range(*offset, *length);
        }
        let rules = PlanRules {
            direct: false,
            merge: false,
            merge_gap_bytes: 0,
            max_read_bytes: 1 << 20,
        };
        let plan = plan(&batch, rules);
        let (reply, answer) = oneshot::channel();
        let buffer = self.arena.reserve(plan.data_bytes.into(), None).expect("memory");
        let mut batch = PlannedBatch {
            backend: BackendKind::Sim,
            residency: Residency::Ask,
            dataset: batch.dataset,
            origin: None,
            weight: 1,
            objects: None,
            items: batch.items,
            errors: batch.errors,
            plan,
            buffer: Some(buffer),
            scratch: None,
            _reads: None,
            accepted: Instant::now(),
            queue_ns: 0,
            deadline: None,
            reply,
        };
        change(&mut batch);
        let reads = i64::try_from(batch.plan.reads.len()).expect("few");
        self.metrics.queued.fetch_add(reads, Ordering::Relaxed);
        (Box::new(batch), answer)
    }

    /// Reads 4096 bytes from 8192, as on a file system with direct I/O aligned to 512 bytes whose first
    /// attempts return at most this many bytes.
    fn read_in_short_attempts(&mut self, bytes: &[u32]) -> Fetched {
        self.control.set_faults(FaultPlan {
            script: bytes.iter().map(|&bytes| Fault::Short { bytes }).collect(),
            ..FaultPlan::default()
        });
        let mut answer = self.send(&[(8192, 4096)], |batch| batch.plan.reads[0].alignment = 512);
        assert!(self.poll().is_pending());
        answer.try_recv().expect("answered").expect("item by item")
    }

    fn poll(&mut self) -> Poll<()> {
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut self.shard).poll(&mut cx)
    }
}

#[test]
fn a_read_that_cannot_be_attempted_fails_and_keeps_no_slot() {
    // More reads without a buffer than there are slots, as a defect of the planner would make them.
    let mut world = World::new(2, 100_000);
    let mut broken: Vec<_> = (0..5)
        .map(|number| world.send(&[(number * 10_000, 1000)], |batch| batch.buffer = None))
        .collect();
    let mut unknown = world.send(&[(50_000, 1000)], |batch| {
        for read in &mut batch.plan.reads {
            read.file = 7;
        }
    });
    let mut good = world.send(&[(60_000, 1000)], |_| {});
    assert!(world.poll().is_pending());
    for answer in broken.iter_mut().chain([&mut unknown]) {
        let fetched = answer.try_recv().expect("answered").expect("item by item");
        assert_eq!(fetched.errors[0].error, ReadError::ShardFailed);
        assert!(fetched.data.is_empty());
    }
    assert_eq!(good.try_recv().expect("answered").expect("read").data.len(), 1000);
    assert!(world.shard.is_idle());
    assert_eq!(world.metrics.queued.load(Ordering::Relaxed), 0);
}

#[test]
fn an_attempt_is_not_counted_at_its_file() {
    // All cores' reads would write to that line (ADR 0008).
    let world = World::new(1, 1000);
    let (batch, _answer) = world.planned(&[(0, 100)], |_| {});
    let file = &world.dataset.files()[0];
    let attempt = batch.attempt(0, &batch.plan.reads[0], 0).expect("an attempt");
    assert_eq!((attempt.file.id, Arc::strong_count(file)), (file.id, 1));
}

#[test]
fn a_heartbeat_comes_before_the_copies_that_are_left() {
    // The first of 32 items of 1 MiB fails, so that 31 MiB have to be moved. The thread's other tasks run,
    // and heartbeats are answered, after every 1 MiB.
    let mut world = World::new(4, 33 << 20);
    let ranges: Vec<(u64, u64)> = (0..32).map(|item| ((item << 20) + 7, 1 << 20)).collect();
    let mut answer = world.send(&ranges, |batch| {
        let failed = Item {
            offset: 0,
            length: 1 << 20,
        };
        assert_eq!(batch.items[0].length, failed.length);
        batch.errors.push(crate::error::ItemError {
            item: 0,
            error: ReadError::ShardFailed,
        });
    });
    let mut polls = 0;
    let fetched = loop {
        assert!(world.poll().is_pending());
        polls += 1;
        match answer.try_recv() {
            Ok(fetched) => break fetched.expect("read"),
            Err(_) => {
                let (reply, mut beat) = oneshot::channel();
                world.mailbox.try_command(Control::Beat(reply));
                assert!(polls < 1000, "no answer");
                assert!(world.poll().is_pending());
                assert_eq!(beat.try_recv(), Ok(()));
            }
        }
    };
    assert!(
        polls >= 15,
        "{polls} turns for 31 MiB, two in each round of this test"
    );
    assert_eq!(fetched.data.len(), 31 << 20);
    let at = |byte: usize| u8::try_from(byte % 251).expect("small");
    let first = fetched.data.first().copied();
    assert_eq!(first, Some(at((1 << 20) + 7)), "the second item");
    assert_eq!(fetched.data.last().copied(), Some(at((32 << 20) + 6)));
    assert_eq!(world.control.in_flight(), 0);
}

#[test]
fn reads_are_started_by_the_weights_of_their_callers() {
    // Two callers with 40 reads of 64 KiB each, one of weight 3, on a device that reads one at a time. Of the
    // first 40 reads the heavier caller gets 30, except for the first round.
    let mut world = World::new(1, 6 << 20);
    world.control.hold();
    let mut answers: [Vec<Reply>; 2] = Default::default();
    for number in 0..40_u64 {
        for (caller, weight) in [(0, 3), (1, 1)] {
            let range = ((number * 2 + caller) << 16, 1 << 16);
            let answer = world.send(&[range], |batch| {
                batch.origin = Some((caller, 0));
                batch.weight = weight;
            });
            answers[usize::try_from(caller).expect("small")].push(answer);
        }
    }
    assert!(world.poll().is_pending());
    for _ in 0..40 {
        assert_eq!(world.control.release(1), 1);
        assert!(world.poll().is_pending());
    }
    let [heavy, light] = answers.each_mut().map(|answers| {
        let answered = answers.iter_mut().filter_map(|answer| answer.try_recv().ok());
        answered.filter(Result::is_ok).count()
    });
    assert!(
        heavy + light == 40 && (28..=32).contains(&heavy),
        "{heavy} and {light}"
    );
}

#[test]
fn who_is_alone_has_four_times_the_bytes_in_flight() {
    // Scenario: twelve reads of 1 MiB, without a connection, and of one that has just come. Expectation: eight and two of them
    // are in flight.
    for (origin, in_flight) in [(None, 8), (Some((1, 0)), 2)] {
        let mut world = World::new(16, 12 << 20);
        world.control.hold();
        let reads =
            (0..12).map(|number| world.send(&[(number << 20, 1 << 20)], |batch| batch.origin = origin));
        let _answers: Vec<_> = reads.collect();
        assert!(world.poll().is_pending());
        assert_eq!(world.control.in_flight(), in_flight, "{origin:?}");
    }
}

#[test]
fn a_turn_that_newcomers_interrupt_is_paid_for() {
    // Scenario: two callers with a batch of forty blocks each, on a device that reads one at a time; a third one sends a block
    // each time. Expectation: of sixty reads that are made, both have their part.
    let mut world = World::new(1, 1 << 20);
    world.control.hold();
    let blocks =
        |first: u64, count: u64| -> Vec<_> { (first..first + count).map(|at| (at << 12, 1 << 12)).collect() };
    let caller = |caller| move |batch: &mut PlannedBatch| batch.origin = Some((caller, 0));
    let mut answers = Vec::from([0, 1].map(|number| world.send(&blocks(number * 40, 40), caller(number))));
    assert!(world.poll().is_pending());
    for number in 0..60 {
        answers.push(world.send(&blocks(100 + number, 1), caller(2)));
        assert!(world.poll().is_pending());
        assert_eq!(world.control.release(1), 1);
        assert!(world.poll().is_pending());
    }
    let batches = world.shard.actives.iter().flatten();
    let started: Vec<usize> = batches
        .filter(|active| active.planned == 40)
        .map(|active| active.next_read)
        .collect();
    assert!(
        started.len() == 2 && started.iter().all(|reads| *reads >= 8),
        "{started:?}"
    );
}

#[test]
fn callers_that_share_a_device_fill_half_of_its_queue() {
    // A caller with forty reads for a queue of 64, then a second one with as many. Expectation: alone it has
    // all of them in flight; together they have 32; all are answered.
    let mut world = World::new(64, 100_000);
    world.control.hold();
    let mut answers = Vec::new();
    let mut send = |world: &World, caller: u64| {
        for number in 0..40 {
            let range = (number * 1000 + caller * 200, 100);
            answers.push(world.send(&[range], |batch| batch.origin = Some((caller, 0))));
        }
    };
    send(&world, 1);
    assert!(world.poll().is_pending());
    assert_eq!(world.control.in_flight(), 40);
    send(&world, 2);
    assert!(world.poll().is_pending());
    assert_eq!(world.control.in_flight(), 40);
    for released in [5, 20, 7] {
        world.control.release(released);
        assert!(world.poll().is_pending());
    }
    assert_eq!(world.control.in_flight(), 32);
    assert_eq!(world.metrics.depth_limit.load(Ordering::Relaxed), 32);
    for _ in 0..4 {
        world.control.release_all();
        assert!(world.poll().is_pending());
    }
    let read = answers.iter_mut().filter_map(|answer| answer.try_recv().ok());
    assert_eq!(read.filter(Result::is_ok).count(), 80);
}

#[test]
fn short_attempts_that_bring_nothing_new_are_not_the_end_of_the_file() {
    // Scenario: attempts at a read that start again at the alignment and end before, or where, the previous
    // one did. Worked: 700 bytes arrive, and from 512 another 100, or 188. Expectation: the bytes, in one
    // attempt more than there were short ones.
    for short in [&[700, 100][..], &[700, 188], &[0], &[700, 0, 0, 100, 3000, 1]] {
        let mut world = World::new(2, 100_000);
        let fetched = world.read_in_short_attempts(short);
        assert!(fetched.errors.is_empty(), "{short:?}: {:?}", fetched.errors);
        let expected = (8192..8192 + 4096_usize).map(|at| u8::try_from(at % 251).expect("small"));
        assert!(fetched.data.iter().copied().eq(expected), "{short:?}");
        assert_eq!(world.control.started_total(), short.len() as u64 + 1, "{short:?}");
    }
}

#[test]
fn a_file_that_ends_where_short_attempts_ended_is_truncated() {
    // Scenario: the same, but the file was truncated 700 bytes after the start of the read. Expectation:
    // Truncated, at once.
    for short in [&[][..], &[700, 100], &[600, 10]] {
        let mut world = World::new(2, 100_000);
        world.file.as_file().set_len(8192 + 700).expect("cut");
        let fetched = world.read_in_short_attempts(short);
        let (offset, length) = (8192, 4096);
        let truncated = ReadError::Truncated { offset, length };
        assert_eq!(fetched.errors[0].error, truncated, "{short:?}");
        let attempts = world.control.started_total();
        assert!(attempts <= short.len() as u64 + 2, "{attempts} after {short:?}");
    }
}

#[test]
fn attempts_that_never_bring_anything_new_fail() {
    // Scenario: every attempt at a read returns 100 bytes from the alignment, or none. Expectation: an I/O
    // error, not a loop.
    for bytes in [0, 100] {
        let mut world = World::new(2, 100_000);
        let fetched = world.read_in_short_attempts(&[bytes; 1000]);
        let device = ReadError::Device {
            errno: libc::EIO,
            offset: 8192,
            length: 4096,
        };
        assert_eq!(fetched.errors[0].error, device, "{bytes}");
        let attempts = world.control.started_total();
        assert!(attempts < 20, "{attempts}");
        assert!(world.shard.is_idle());
    }
}

#[test]
fn an_attempt_that_starts_again_takes_back_what_it_does_not_return() {
    // Scenario: 700 bytes of a read arrive, and the attempt that starts again at 512 fails, or finds that the
    // file now ends at 620; it leaves garbage behind what it returns. Two batches have joined, for bytes 520 to
    // 620 and 600 to 700. Expectation: each gets its bytes, by a read of its own if the shared one failed; those
    // past the end are gone.
    for is_cut in [false, true] {
        let mut world = World::new(4, 100_000);
        let second = if is_cut {
            Fault::None
        } else {
            Fault::Errno(libc::EIO)
        };
        world
            .control
            .set_faults(FaultPlan::script(&[Fault::Short { bytes: 700 }, second]));
        world.control.hold();
        let _owner = world.send(&[(8192, 4096)], |batch| batch.plan.reads[0].alignment = 512);
        assert!(world.poll().is_pending());
        let offsets = [8192 + 520, 8192 + 600];
        let mut joined = offsets.map(|offset| world.send(&[(offset, 100)], |_| {}));
        assert!(world.poll().is_pending());
        assert_eq!(world.control.release(1), 1);
        assert!(world.poll().is_pending());
        assert_eq!(world.control.started_total(), 2);
        if is_cut {
            world.file.as_file().set_len(8192 + 620).expect("cut");
        }
        assert_eq!(world.control.release(1), 1);
        assert!(world.poll().is_pending());
        world.control.release_all();
        assert!(world.poll().is_pending());
        for (offset, answer) in offsets.into_iter().zip(&mut joined) {
            let fetched = answer.try_recv().expect("answered").expect("item by item");
            if is_cut && offset == 8192 + 600 {
                let length = 100;
                assert_eq!(fetched.errors[0].error, ReadError::Truncated { offset, length });
            } else {
                let expected = (offset..offset + 100).map(|at| u8::try_from(at % 251).expect("small"));
                assert!(
                    fetched.data.iter().copied().eq(expected),
                    "{offset}, cut: {is_cut}"
                );
                assert!(fetched.errors.is_empty());
            }
        }
    }
}

/// Sends a batch when it is woken.
struct SendingWaker {
    mailbox: Mailbox,
    batch: Mutex<Option<Box<PlannedBatch>>>,
}

impl Wake for SendingWaker {
    fn wake(self: Arc<Self>) {
        let batch = self.batch.lock().expect("no panic").take();
        self.mailbox.deliver(batch.expect("woken once")).expect("room");
    }
}

/// Remembers how many reads had been started when it was woken.
struct CountingWaker {
    control: SimControl,
    started: AtomicU64,
}

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        self.started
            .store(self.control.started_total(), Ordering::Relaxed);
    }
}

#[test]
fn a_batch_that_arrives_in_a_turn_of_many_has_its_turn() {
    // Scenario: on a runtime, which lets a task receive 128 messages until it yields, 200 batches of one caller
    // arrive at once, and the first is of a thousand reads; the device never makes the shard wait. When one of
    // them is answered, another caller asks for one block. Expectation: it is answered long before the thousand
    // reads are made.
    let mut world = World::new(4, 9 << 20);
    let caller = |caller| move |batch: &mut PlannedBatch| batch.origin = Some((caller, 0));
    let blocks =
        |first: u64, count: u64| -> Vec<_> { (first..first + count).map(|at| (at << 12, 1 << 12)).collect() };
    let mut answers = vec![world.send(&blocks(0, 1000), caller(1))];
    answers.extend((0..199).map(|number| world.send(&blocks(1000 + number, 1), caller(1))));
    let (batch, mut other) = world.planned(&blocks(2000, 1), caller(2));
    let sends = SendingWaker {
        mailbox: world.mailbox.clone(),
        batch: Mutex::new(Some(batch)),
    };
    let waker = Waker::from(Arc::new(sends));
    let first_single = pin!(&mut answers[1]);
    assert!(first_single.poll(&mut Context::from_waker(&waker)).is_pending());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime");
    let counts = Arc::new(CountingWaker {
        control: world.control.clone(),
        started: AtomicU64::new(u64::MAX),
    });
    let waker = Waker::from(Arc::clone(&counts));
    assert!(
        pin!(&mut other)
            .poll(&mut Context::from_waker(&waker))
            .is_pending()
    );
    let fetched = runtime.block_on(poll_fn(|cx| {
        assert!(Pin::new(&mut world.shard).poll(cx).is_pending());
        other.try_recv().map_or(Poll::Pending, Poll::Ready)
    }));
    assert_eq!(fetched.expect("read").data.len(), 4096);
    let started = counts.started.load(Ordering::Relaxed);
    assert!(started < 500, "after {started} reads");
}

/// Says, when it is dropped, whether a batch is still accepted, and whether the one in the inbox was let go.
struct Lingering {
    mailbox: Mailbox,
    late: Option<Box<PlannedBatch>>,
    waiting: Reply,
    found: Arc<Mutex<Vec<bool>>>,
}

impl Backend for Lingering {
    fn start(&mut self, _attempt: Attempt) -> ReadSource {
        ReadSource::Device
    }

    fn flush(&mut self) -> u32 {
        0
    }

    fn poll_completions(&mut self, _cx: &mut Context<'_>, _finished: &mut Vec<Completion>) -> Poll<()> {
        Poll::Pending
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let late = self.late.take().expect("dropped once");
        let is_refused = self.mailbox.deliver(late) == Err(SendError::Closed);
        let is_let_go = self.waiting.try_recv().err() == Some(oneshot::error::TryRecvError::Closed);
        *self.found.lock().expect("no panic") = vec![is_refused, is_let_go];
    }
}

#[test]
fn a_shard_that_dies_refuses_batches_before_its_backend_ends() {
    // Scenario: a shard is dropped by a panic; its backend joins threads, one of which may hang in a read.
    // Expectation: by then new batches are refused, and the one in the inbox is failed.
    let world = World::new(4, 100_000);
    let (mailbox, inbox) = inbox();
    let (waits, waiting) = world.planned(&[(0, 1000)], |_| {});
    mailbox.deliver(waits).expect("room");
    let found = Arc::new(Mutex::new(Vec::new()));
    let backend = Lingering {
        mailbox,
        late: Some(world.planned(&[(0, 1000)], |_| {}).0),
        waiting,
        found: Arc::clone(&found),
    };
    drop(Shard::new(backend, inbox, Arc::clone(&world.metrics), 0));
    assert_eq!(*found.lock().expect("no panic"), [true, true], "refused, let go");
}
