//! Tests of one ring, made by hand.

use super::*;
use crate::backend::residency::Residency;
use crate::buffer::Arena;
use crate::config::DirectIo;

/// Three backends on one ring, one after the other: each can register the memory and files, since the one
/// before unregistered both.
#[test]
#[ignore = "needs io_uring"]
fn a_backend_leaves_its_ring_as_it_found_it() {
    let named = tempfile::NamedTempFile::new().expect("a file");
    let file = Arc::new(OpenFile::open(named.path(), DirectIo::Off).expect("open"));
    let arena = Arena::new(1 << 20, 1).expect("memory");
    let runtime = RingRuntime::new(8).expect("a ring");
    for _ in 0..3 {
        let mut backend = runtime.handle().backend(8);
        let (base, bytes) = arena.region();
        backend.register_memory(base, bytes).expect("registered memory");
        backend.introduce(std::slice::from_ref(&file));
        assert!(backend.files.place(&file, false).is_some());
    }
}

/// A file of 64 KiB, each byte 7, and the same opened for reads through the page cache.
fn sevens() -> (tempfile::NamedTempFile, Arc<OpenFile>) {
    let named = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(named.path(), [7; 64 << 10]).expect("data");
    let file = Arc::new(OpenFile::open(named.path(), DirectIo::Off).expect("open"));
    (named, file)
}

/// A read through the page cache of the block in the slot's place, into the same place of `bytes`.
fn buffered(file: &Arc<OpenFile>, slot: u32, length: u32, bytes: &mut [u8]) -> Attempt {
    let from = slot * length;
    Attempt {
        slot,
        file: HeldFile::from(file),
        direct: false,
        may_copy: false,
        residency: Residency::Ask,
        offset: from.into(),
        destination: bytes[from as usize..].as_mut_ptr(),
        length,
    }
}

/// Scenario: 64 reads through the page cache of a file that is truncated while they are in flight. Expectation: each returns no
/// more than the file has.
#[test]
#[ignore = "needs io_uring"]
fn reads_that_end_together_are_held_against_the_files_length() {
    let (named, file) = sevens();
    let runtime = RingRuntime::new(64).expect("a ring");
    let mut bytes = vec![0_u8; 64 << 10];
    let mut backend = runtime.handle().backend(64);
    let mut finished = Vec::new();
    runtime.block_on(async {
        for slot in 0..64_u32 {
            backend.start(buffered(&file, slot, 1 << 10, &mut bytes));
        }
        backend.flush();
        named.as_file().set_len((32 << 10) + 100).expect("cut");
        while finished.len() < 64 {
            std::future::poll_fn(|cx| backend.poll_completions(cx, &mut finished)).await;
        }
    });
    for Completion { slot, result } in finished {
        let left = ((32 << 10) + 100_u32).saturating_sub(slot << 10);
        assert_eq!(result, Ok(left.min(1 << 10)), "{slot}");
    }
}

/// A lone read in flight is left in the queue for the thread to submit when it parks. A thread that never
/// parks, because a task keeps yielding, submits it too.
#[test]
#[ignore = "needs io_uring"]
fn a_read_that_was_left_is_made_on_a_thread_that_does_not_park() {
    const TURNS_MAX: u32 = 10_000_000;
    let named = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(named.path(), [7; 4096]).expect("data");
    let file = Arc::new(OpenFile::open(named.path(), DirectIo::Off).expect("open"));
    let runtime = RingRuntime::new(8).expect("a ring");
    let mut bytes = vec![0_u8; 4096];
    let mut backend = runtime.handle().backend(8);
    let mut finished = Vec::new();
    runtime.block_on(async {
        backend.start(buffered(&file, 0, 4096, &mut bytes));
        assert_eq!(backend.flush(), 1);
        let (_, parked) = LEFT.get().expect("it is left");
        let mut turns = 0;
        std::future::poll_fn(|cx| {
            turns += 1;
            assert!(turns < TURNS_MAX, "it is not submitted");
            crate::cores::give_way(cx);
            backend.poll_completions(cx, &mut finished)
        })
        .await;
        assert_eq!(parks(), Some(parked), "the thread parked");
    });
    assert_eq!(finished.len(), 1);
    assert_eq!(finished[0].result, Ok(4096));
    assert!(bytes.iter().all(|byte| *byte == 7));
}

/// Twice as many reads as the ring's queue has entries are started before any is flushed, as beside those of a disk that hangs.
/// Expectation: what is queued is submitted to make room, and each read is reported once, with its bytes.
#[test]
#[ignore = "needs io_uring"]
fn reads_beyond_the_queue_of_the_ring_are_made() {
    let (_named, file) = sevens();
    let runtime = RingRuntime::new(8).expect("a ring");
    let mut bytes = vec![0_u8; 64 << 10];
    let mut backend = runtime.handle().backend(8);
    let mut finished = Vec::new();
    runtime.block_on(async {
        for slot in 0..backend.slots(8) {
            backend.start(buffered(&file, slot, 1 << 12, &mut bytes));
        }
        while finished.len() < 16 {
            backend.flush();
            std::future::poll_fn(|cx| backend.poll_completions(cx, &mut finished)).await;
        }
    });
    assert!(!has_reads_in_flight());
    finished.sort_by_key(|finished| finished.slot);
    assert!(finished.iter().map(|finished| finished.slot).eq(0..16));
    assert!(finished.iter().all(|finished| finished.result == Ok(1 << 12)));
    assert!(bytes.iter().all(|byte| *byte == 7));
}

/// This process's descriptors of epoll, of which a runtime has several.
fn descriptors() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("procfs").flatten();
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets
        .filter(|target| target.as_os_str() == "anon_inode:[eventpoll]")
        .count()
}

/// The kernel refuses the best flags (here TASKRUN_FLAG without COOP_TASKRUN, in place of flags that it does not know), for 100
/// rings. Expectation: each works without them, and no descriptors remain. (Other tests have some at the same time.)
#[test]
#[ignore = "needs io_uring"]
fn flags_that_the_kernel_does_not_know_leave_no_descriptors() {
    const REFUSED: Flags = |ring| {
        ring.setup_taskrun_flag();
    };
    let before = descriptors();
    for _ in 0..100 {
        let runtime = RingRuntime::with_builder(&builder_of(&[REFUSED, |_| {}]).expect("a ring"), 8);
        assert!(runtime.expect("a ring").ring.is_some());
    }
    assert!(descriptors() < before + 100, "{before} before");
}

/// Threads create and drop rings to which the kernel lets any thread submit, as all are before Linux 6.0. Each finds one, and no
/// two the same.
#[test]
#[ignore = "needs io_uring"]
fn every_runtime_finds_its_own_ring_among_those_that_take_all_submissions() {
    let in_use = Mutex::new(std::collections::HashSet::new());
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                let builder = builder_of(&[|_| {}]).expect("a ring");
                for _ in 0..20 {
                    let runtime = RingRuntime::with_builder(&builder, 8).expect("a ring");
                    let ring = runtime.ring.expect("its descriptor");
                    assert!(lock(&in_use).insert(ring), "two have ring {ring}");
                    std::thread::yield_now();
                    assert!(lock(&in_use).remove(&ring));
                }
            });
        }
    });
}

/// Sixteen threads create and drop rings at the same time. Each finds its own descriptor, however numbers
/// are reused: an operation in its queue is submitted through it.
#[test]
#[ignore = "needs io_uring"]
fn every_runtime_finds_its_own_ring() {
    let threads: Vec<_> = (0..16)
        .map(|_| {
            std::thread::spawn(|| {
                for _ in 0..20 {
                    let runtime = RingRuntime::new(8).expect("a ring");
                    let ring = runtime.ring.expect("its descriptor");
                    runtime.block_on(async {
                        let operation = UnsubmittedOneshot::new((), NopTransform, opcode::Nop::new().build());
                        let operation = operation.submit();
                        assert_eq!(enter(ring, 1), 1, "another ring's descriptor");
                        operation.await;
                    });
                }
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().expect("no panic"));
}

/// Scenario: 300 files, more than the table has entries, are added; one is removed, and another added. Expectation: the first 256
/// have an entry each, and are to be forgotten; the other one gets what has become free, and the rest has none.
#[test]
#[ignore = "needs io_uring"]
fn each_file_has_its_own_entry_in_the_table() {
    let named = tempfile::NamedTempFile::new().expect("a file");
    let open = || Arc::new(OpenFile::open(named.path(), DirectIo::Off).expect("open"));
    let mut files: Vec<_> = (0..300).map(|_| open()).collect();
    let runtime = RingRuntime::new(8).expect("a ring");
    let mut backend = runtime.handle().backend(8);
    let ids: Vec<u64> = files.iter().map(|file| file.id).collect();
    assert_eq!(backend.introduce(&files), ids[..256]);
    let places = |backend: &mut UringBackend, files: &[Arc<OpenFile>]| -> Vec<Option<u32>> {
        let place = |file: &Arc<OpenFile>| backend.files.place(file, false).map(|place| place.0);
        files.iter().map(place).collect()
    };
    let mut expected: Vec<Option<u32>> = (0..300)
        .map(|place| Some(place).filter(|place| *place < 256))
        .collect();
    assert_eq!(places(&mut backend, &files), expected);
    assert_eq!(
        backend.files.place(&files[3], false).map(|place| place.0),
        Some(3)
    );
    backend.forget(&[files[3].id]);
    expected[3] = None;
    assert_eq!(places(&mut backend, &files[3..4]), [None]);
    files.push(open());
    backend.introduce(&files[300..]);
    expected.push(Some(3));
    assert_eq!(places(&mut backend, &files), expected);
}
