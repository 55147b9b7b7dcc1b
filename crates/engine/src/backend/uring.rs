//! io_uring through tokio-uring: the only place that names it (ADR 0001).
//!
//! One dispatcher (the shard) per ring and no task per read. Every operation goes through
//! `UnsubmittedOneshot`, is polled once to store its waker, and polled again only when that waker has set its
//! bit: the cost of a turn depends on what finished, not on what is in flight. Submission does not wait for
//! the thread to park (TRAPS 3): the ring's descriptor is found once and `io_uring_enter` called on it, which
//! is also how buffers are registered (TRAPS 6). There is no cancellation: a read is owned until its
//! completion (TRAPS 10).

mod registered;
#[cfg(test)]
mod tests;

use self::registered::{FileTable, Registered, register};
use super::lengths::Lengths;
use super::ready::Ready;
use super::{Attempt, Backend, Completion, ReadSource};
use crate::dataset::{HeldFile, OpenFile};
use crate::sync::lock;
use io_uring::{cqueue, opcode, types};
use std::cell::{Cell, OnceCell};
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use tokio::runtime::RuntimeMetrics;
use tokio_uring::{InFlightOneshot, OneshotOutputTransform, UnsubmittedOneshot};

/// A current-thread runtime with a ring, for the thread that creates it.
pub(crate) struct RingRuntime {
    runtime: tokio_uring::Runtime,
    ring: Option<RawFd>,
}

/// Sets flags of a ring.
type Flags = fn(&mut io_uring::Builder);

/// Flags of our rings, the best first: one thread submits; completions wait for it rather than interrupt it. DEFER_TASKRUN
/// would hang: epoll waits for completions and nothing asks the ring for events (TRAPS 4).
const FLAGS: [Flags; 3] = [
    // Linux 6.0.
    |ring| {
        ring.setup_coop_taskrun().setup_single_issuer();
    },
    // Linux 5.19.
    |ring| {
        ring.setup_coop_taskrun();
    },
    |_| {},
];

/// A builder with the first of these flags that the kernel knows. Tried with a ring of its own: a runtime of tokio-uring
/// whose ring fails leaves its other descriptors open.
fn builder_of(flags: &[Flags]) -> io::Result<io_uring::Builder> {
    for set in flags {
        let mut builder = tokio_uring::uring_builder();
        set(&mut builder);
        match builder.build(1) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            tried => return tried.map(|_| builder),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EINVAL))
}

impl RingRuntime {
    /// Makes a ring of at least `entries` submissions and twice as many completions.
    ///
    /// # Errors
    /// errno of io_uring_setup or of the descriptors of the runtime.
    pub(crate) fn new(entries: u32) -> io::Result<Self> {
        static BUILDER: OnceLock<io_uring::Builder> = OnceLock::new();
        if let Some(builder) = BUILDER.get() {
            return Self::with_builder(builder, entries);
        }
        let builder = builder_of(&FLAGS)?;
        Self::with_builder(BUILDER.get_or_init(|| builder), entries)
    }

    fn with_builder(ring: &io_uring::Builder, entries: u32) -> io::Result<Self> {
        static FINDING: Mutex<()> = Mutex::new(());
        let _alone = lock(&FINDING);
        let mut builder = tokio_uring::builder();
        builder.entries(entries.next_power_of_two()).uring_builder(ring);
        let runtime = tokio_uring::Runtime::new(&builder)?;
        let ring = runtime.block_on(async {
            count_parks();
            own_ring().await
        });
        if ring.is_none() {
            tracing::warn!(
                "the ring's descriptor cannot be found (is /proc mounted?): reads are submitted less eagerly, and the \
                 response memory is not registered"
            );
        }
        Ok(Self { runtime, ring })
    }

    /// Runs a future, and what it spawns locally, on this thread.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// The ring, for backends that are created later on this thread.
    pub(crate) fn handle(&self) -> RingHandle {
        RingHandle(self.ring)
    }
}

/// The ring of the runtime that runs on this thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingHandle(Option<RawFd>);

impl RingHandle {
    /// Allows the kernel's worker threads on these CPUs. They make the reads that a device or file system
    /// cannot start without sleeping, and inherit the affinity of the ring's thread: if that is pinned, it
    /// would share its CPU with them (TRAPS 14). An empty list changes nothing.
    ///
    /// # Errors
    /// errno: EINVAL before Linux 5.14, where workers are not pinned.
    pub(crate) fn run_workers_on(self, cpus: &[usize]) -> io::Result<()> {
        const IORING_REGISTER_IOWQ_AFF: libc::c_uint = 17;
        const BITS: usize = usize::BITS as usize;
        let (Some(ring), Some(last)) = (self.0, cpus.iter().max()) else {
            return Ok(());
        };
        let mut mask = vec![0_usize; last / BITS + 1];
        for cpu in cpus {
            if let Some(word) = mask.get_mut(cpu / BITS) {
                *word |= 1 << (cpu % BITS);
            }
        }
        let bytes = libc::c_uint::try_from(size_of_val(mask.as_slice())).unwrap_or(libc::c_uint::MAX);
        register(ring, IORING_REGISTER_IOWQ_AFF, mask.as_ptr().cast(), bytes)
    }

    /// Whether its descriptor was found.
    pub(crate) fn is_known(self) -> bool {
        self.0.is_some()
    }

    /// A backend on this ring for its only shard, with at most `queue_depth` reads in flight. Use it only on
    /// the ring's thread.
    pub(crate) fn backend(self, queue_depth: u32) -> UringBackend {
        UringBackend::new(self.0, queue_depth)
    }
}

/// The descriptor of the ring of this thread's runtime, which tokio-uring does not expose (TRAPS 6).
///
/// To find it among the process's rings, an operation is left in the submission queue: only its own ring has
/// one entry to submit. So may one that serves, where the kernel lets other threads submit (without SINGLE_ISSUER): hardly
/// each time. One thread at a time looks.
async fn own_ring() -> Option<RawFd> {
    let mut found: Vec<RawFd> = rings().collect();
    for _ in 0..3 {
        let operation = UnsubmittedOneshot::new((), NopTransform, opcode::Nop::new().build()).submit();
        found.retain(|ring| enter(*ring, 1) == 1);
        // Submitted by now, or by the runtime when the thread parks.
        operation.await;
    }
    match found[..] {
        [own] => Some(own),
        _ => None,
    }
}

/// Descriptors of this process that are rings.
fn rings() -> impl Iterator<Item = RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            std::fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == "anon_inode:[io_uring]")
        })
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Submits up to `entries` entries of a ring's queue; returns how many it had, or -1.
fn enter(ring: RawFd, entries: u32) -> libc::c_long {
    // SAFETY: plain submission; no argument is a pointer, and a descriptor that is not a ring causes an
    // error.
    unsafe {
        libc::syscall(
            libc::SYS_io_uring_enter,
            ring,
            entries,
            0 as libc::c_uint,
            0 as libc::c_uint,
            std::ptr::null::<libc::c_void>(),
            0_usize,
        )
    }
}

thread_local! {
    /// Counts how often this thread's runtime has parked.
    static PARKS: OnceCell<RuntimeMetrics> = const { OnceCell::new() };
    /// Reads in flight on this thread's ring.
    static IN_FLIGHT: Cell<u32> = const { Cell::new(0) };
    /// An entry left in this ring's queue until the thread parks, and the number of parks so far.
    static LEFT: Cell<Option<(RawFd, u64)>> = const { Cell::new(None) };
}

/// Whether a completion of this thread's ring may arrive at any moment.
pub(crate) fn has_reads_in_flight() -> bool {
    IN_FLIGHT.get() > 0
}

/// From now on, counts how often the current runtime parks this thread.
pub fn count_parks() {
    let metrics = tokio::runtime::Handle::current().metrics();
    PARKS.with(|parks| drop(parks.set(metrics)));
}

/// How often this thread's runtime was idle and parked; `None` if that is not counted here.
pub fn parks() -> Option<u64> {
    PARKS.with(|parks| parks.get().map(|metrics| metrics.worker_park_count(0)))
}

/// Submits the read left for this thread to submit when it parks, if it has not parked since. Call it
/// wherever a task begins that may keep the thread busy.
pub fn submit_left() {
    if let Some(ring) = left()
        && enter(ring, 1) < 0
    {
        // It stays in the queue.
        leave(ring);
    }
}

/// Takes the entry that was left, unless the runtime has submitted it: the ring.
fn left() -> Option<RawFd> {
    let (ring, parked) = LEFT.take()?;
    (parks() == Some(parked)).then_some(ring)
}

/// Leaves the entry in the ring's queue to the runtime; false if parks are not counted, so that this could
/// not be checked later.
fn leave(ring: RawFd) -> bool {
    let parked = parks();
    LEFT.set(parked.map(|parked| (ring, parked)));
    parked.is_some()
}

/// The completion of an operation that does nothing.
struct NopTransform;

impl OneshotOutputTransform for NopTransform {
    type Output = ();
    type StoredData = ();

    fn transform_oneshot_output(self, (): (), _: cqueue::Entry) {}
}

struct SlotWaker {
    ready: Arc<Ready>,
    slot: u32,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.set(self.slot);
    }
}

/// Turns a completion into its result; the file is held until then.
struct ResultTransform {
    offset: u64,
    is_direct: bool,
}

/// A read that has ended.
enum Ended {
    Result(Result<u32, i32>),
    /// Of these bytes only those before the end of the file count.
    Unchecked {
        file: HeldFile,
        offset: u64,
        bytes: u32,
    },
}

impl OneshotOutputTransform for ResultTransform {
    type Output = Ended;
    type StoredData = HeldFile;

    fn transform_oneshot_output(self, file: HeldFile, completion: cqueue::Entry) -> Self::Output {
        let Self { offset, is_direct } = self;
        let result = completion.result();
        match u32::try_from(result) {
            Err(_) => Ended::Result(Err(result.saturating_neg())),
            Ok(bytes) if file.keeps_all(is_direct) => Ended::Result(Ok(bytes)),
            Ok(bytes) => Ended::Unchecked { file, offset, bytes },
        }
    }
}

type Operation = InFlightOneshot<HeldFile, ResultTransform>;

/// The slot of a read that has ended, its file, offset and bytes.
type Unchecked = (u32, HeldFile, u64, u32);

/// Reads through one ring.
pub(crate) struct UringBackend {
    ring: Option<RawFd>,
    operations: Vec<Option<Operation>>,
    wakers: Vec<Waker>,
    ready: Arc<Ready>,
    unsubmitted: u32,
    registered: Option<Registered>,
    files: FileTable,
    /// Reads that have ended, and which of their bytes belong to the file is to be checked.
    unchecked: Vec<Unchecked>,
    lengths: Lengths,
}

impl UringBackend {
    fn new(ring: Option<RawFd>, queue_depth: u32) -> Self {
        // Twice as many as are in flight: the reads of a device that does not answer keep their slots.
        let slots = 2 * queue_depth;
        let ready = Arc::new(Ready::new(slots));
        let wakers = (0..slots)
            .map(|slot| {
                Waker::from(Arc::new(SlotWaker {
                    ready: Arc::clone(&ready),
                    slot,
                }))
            })
            .collect();
        let operations = (0..slots).map(|_| None).collect();
        let backend = Self {
            ring,
            operations,
            wakers,
            ready,
            unsubmitted: 0,
            registered: None,
            files: FileTable::default(),
            unchecked: Vec::new(),
            lengths: Lengths::default(),
        };
        if let Err(error) = backend.allow_workers(slots) {
            tracing::debug!(%error, "the number of the kernel's worker threads cannot be set");
        }
        backend
    }

    /// Registers the response memory with the ring, so that reads need not look up its pages. Pins all of it.
    ///
    /// # Errors
    /// errno: ENOMEM if RLIMIT_MEMLOCK is too low; the backend then continues without.
    pub(crate) fn register_memory(&mut self, base: *mut u8, bytes: usize) -> io::Result<()> {
        let Some(ring) = self.ring else {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        };
        self.registered = Some(Registered::add(ring, base, bytes)?);
        Ok(())
    }

    /// Allows as many of the kernel's worker threads, which serve reads that have to wait in the kernel (network file systems,
    /// FUSE; TRAPS 14); by itself it has four for each CPU. With fewer than the reads in flight, those of a disk that hangs could
    /// keep all of them, and others would wait in the kernel, where nobody sees it. They start as they are needed.
    fn allow_workers(&self, workers: u32) -> io::Result<()> {
        let Some(ring) = self.ring else {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        };
        const IORING_REGISTER_IOWQ_MAX_WORKERS: libc::c_uint = 19;
        // The kernel stores the previous limits here.
        let mut limits: [libc::c_uint; 2] = [workers, workers];
        register(
            ring,
            IORING_REGISTER_IOWQ_MAX_WORKERS,
            limits.as_mut_ptr().cast_const().cast(),
            2,
        )
    }

    /// Polls one operation; stores its waker if it is pending. A read that has ended may be added to `unchecked` instead.
    fn poll_slot(
        slot: u32,
        operations: &mut [Option<Operation>],
        wakers: &[Waker],
        unchecked: &mut Vec<Unchecked>,
    ) -> Option<Completion> {
        let operation = operations.get_mut(slot as usize)?;
        let waker = wakers.get(slot as usize)?;
        let polled = Pin::new(operation.as_mut()?).poll(&mut Context::from_waker(waker));
        match polled {
            Poll::Pending => None,
            Poll::Ready(ended) => {
                *operation = None;
                IN_FLIGHT.set(IN_FLIGHT.get().saturating_sub(1));
                match ended {
                    Ended::Result(result) => Some(Completion { slot, result }),
                    Ended::Unchecked { file, offset, bytes } => {
                        unchecked.push((slot, file, offset, bytes));
                        None
                    }
                }
            }
        }
    }

    /// Completes the reads that have ended by now, with one query for each file.
    fn check_lengths(&mut self, finished: &mut Vec<Completion>) {
        self.lengths.forget();
        for (slot, file, offset, bytes) in self.unchecked.drain(..) {
            let result = self.lengths.kept(&file, offset, bytes);
            finished.push(Completion { slot, result });
        }
    }
}

impl Drop for UringBackend {
    /// Restores the ring, since it outlives a shard that never served (its group did not start) and accepts
    /// memory and a file table only once.
    fn drop(&mut self) {
        let in_flight = self.operations.iter().flatten().count();
        IN_FLIGHT.set(
            IN_FLIGHT
                .get()
                .saturating_sub(u32::try_from(in_flight).unwrap_or(u32::MAX)),
        );
        // With reads in flight the shard has failed and the process ends; unregistering would wait for them.
        let Some(ring) = self.ring.filter(|_| in_flight == 0) else {
            return;
        };
        let memory = self
            .registered
            .take()
            .map_or(Ok(()), |memory| memory.give_back(ring));
        if let Err(error) = memory.and(self.files.give_back(ring)) {
            tracing::warn!(%error, "cannot unregister memory or files from a ring");
        }
    }
}

impl Backend for UringBackend {
    fn slots(&self, _depth: u32) -> u32 {
        u32::try_from(self.operations.len()).unwrap_or(u32::MAX)
    }

    fn introduce(&mut self, files: &[Arc<OpenFile>]) -> Vec<u64> {
        let Some(ring) = self.ring else {
            return Vec::new();
        };
        // A dataset may have a million files: those beyond the table are not looked at, on a core.
        let added = files.iter().map_while(|file| self.files.add(ring, file));
        added.collect()
    }

    fn forget(&mut self, files: &[u64]) {
        if let Some(ring) = self.ring {
            files.iter().for_each(|file| self.files.remove(ring, *file));
        }
    }

    fn start(&mut self, attempt: Attempt) -> ReadSource {
        let Attempt {
            slot,
            file,
            direct,
            may_copy: _,
            residency: _,
            offset,
            destination,
            length,
        } = attempt;
        let (descriptor, is_direct): (BorrowedFd<'_>, _) = match file.direct_fd() {
            Some(direct_descriptor) if direct => (direct_descriptor, true),
            Some(_) | None => (file.buffered_fd(), false),
        };
        let buffer = self
            .registered
            .and_then(|registered| registered.index(destination, length));
        let place = self.files.place(&file, is_direct);
        let fd = types::Fd(descriptor.as_raw_fd());
        let entry = match (buffer, place) {
            (Some(buffer), Some(place)) => opcode::ReadFixed::new(place, destination, length, buffer)
                .offset(offset)
                .build(),
            (Some(buffer), None) => opcode::ReadFixed::new(fd, destination, length, buffer)
                .offset(offset)
                .build(),
            (None, Some(place)) => opcode::Read::new(place, destination, length)
                .offset(offset)
                .build(),
            (None, None) => opcode::Read::new(fd, destination, length).offset(offset).build(),
        };
        let operation = UnsubmittedOneshot::new(file, ResultTransform { offset, is_direct }, entry).submit();
        self.unsubmitted += 1;
        let slot = slot as usize;
        if let (Some(place), Some(waker)) = (self.operations.get_mut(slot), self.wakers.get(slot)) {
            IN_FLIGHT.set(IN_FLIGHT.get() + 1);
            // What was queued before may have been submitted to make room for it, but it was not: this only stores the waker.
            let polled = Pin::new(place.insert(operation)).poll(&mut Context::from_waker(waker));
            assert!(polled.is_pending(), "a read has ended that was not submitted");
        }
        ReadSource::Device
    }

    fn flush(&mut self) -> u32 {
        let Some(ring) = self.ring else {
            // The runtime submits when the thread parks.
            return u32::from(std::mem::take(&mut self.unsubmitted) > 0);
        };
        if self.unsubmitted == 0 {
            return 0;
        }
        // A lone read in flight is left to the runtime, which submits the queue when the thread parks: one
        // system call less for clients that read one by one. If the thread does not park, see `submit_left`.
        // If the kernel refuses (ENOMEM), the next park tries again, after a tick of the core's connections
        // or a sweep at the latest.
        if IN_FLIGHT.get() == 1 && leave(ring) {
            self.unsubmitted = 0;
            return 1;
        }
        self.unsubmitted += u32::from(left().is_some());
        self.unsubmitted = match u32::try_from(enter(ring, self.unsubmitted)) {
            // None were left: the runtime's park hook had submitted them.
            Ok(0) => 0,
            Ok(taken) => self.unsubmitted.saturating_sub(taken),
            Err(_) => match io::Error::last_os_error().raw_os_error() {
                // The entries stay in the queue, and the next turn submits them.
                Some(libc::EAGAIN | libc::EBUSY | libc::EINTR) => self.unsubmitted,
                // Not an errno expected of our rings; another attempt would fail too. The runtime submits.
                errno => {
                    tracing::error!(
                        ?errno,
                        "cannot submit early to the ring; its runtime submits from now on"
                    );
                    self.ring = None;
                    0
                }
            },
        };
        1
    }

    fn poll_completions(&mut self, cx: &mut Context<'_>, finished: &mut Vec<Completion>) -> Poll<()> {
        if self.unsubmitted > 0 {
            // For example, the kernel had no memory for requests. With nothing in flight nothing else would
            // wake the task.
            cx.waker().wake_by_ref();
        }
        let before = finished.len();
        let any = self.ready.poll(cx, |slot| {
            finished.extend(Self::poll_slot(
                slot,
                &mut self.operations,
                &self.wakers,
                &mut self.unchecked,
            ));
        });
        if !any {
            return Poll::Pending;
        }
        if !self.unchecked.is_empty() {
            self.check_lengths(finished);
        }
        if finished.len() > before {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}
