//! Raw reads that studies compare the engine with: Linux AIO and bare io_uring, polled or not, behind one
//! safe trait. Baselines only: the daemon never reads through this crate.
//!
//! Invariant: a queue owns file and buffer of each read in flight, and returns the buffer when the kernel is
//! done with it. A dropped queue waits for its reads; if it cannot, it leaks their buffers.
#![allow(unsafe_code, reason = "raw system calls that write to memory")]

mod aio;
mod buffer;
mod ring;

pub use aio::AioQueue;
pub use buffer::Buffer;
pub use ring::{RingOptions, RingQueue};

use std::fs::File;
use std::io;
use std::sync::Arc;

/// Most reads in flight per queue.
pub const DEPTH_MAX: usize = 4096;

/// A read to make.
#[derive(Debug)]
pub struct Read {
    /// Returned with the result.
    pub tag: u64,
    /// What to read from. The queue keeps it open while the read is in flight.
    pub file: Arc<File>,
    /// File offset.
    pub offset: u64,
    /// Bytes, at most the buffer's length.
    pub length: usize,
    /// The destination.
    pub buffer: Buffer,
}

/// A finished read.
#[derive(Debug)]
pub struct Finished {
    /// As in [`Read`].
    pub tag: u64,
    /// Bytes read, which may be fewer than requested.
    pub result: io::Result<usize>,
    /// The buffer that was read into.
    pub buffer: Buffer,
}

/// A queue of reads in flight.
pub trait ReadQueue {
    /// Reads started and not finished.
    fn in_flight(&self) -> usize;

    /// Queues a read; [`ReadQueue::wait`] submits it to the kernel.
    ///
    /// # Errors
    /// The queue is full, or the buffer is shorter than the read.
    fn start(&mut self, read: Read) -> io::Result<()>;

    /// Submits queued reads, waits until at least one read in flight has finished, and appends the finished
    /// ones.
    ///
    /// # Errors
    /// errno of the system call. Reads stay in flight.
    fn wait(&mut self, finished: &mut Vec<Finished>) -> io::Result<()>;
}

/// The reads in flight of a queue, by the number that the kernel returns.
#[derive(Debug)]
struct Slots {
    reads: Vec<Option<Read>>,
    free: Vec<usize>,
}

impl Slots {
    fn new(depth: usize) -> io::Result<Self> {
        if !(1..=DEPTH_MAX).contains(&depth) {
            return Err(invalid("a depth of 1 to 4096"));
        }
        Ok(Self {
            reads: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
        })
    }

    fn in_flight(&self) -> usize {
        self.reads.len().saturating_sub(self.free.len())
    }

    /// Stores a read; returns its slot and the address for its bytes.
    fn put(&mut self, mut read: Read) -> io::Result<(usize, *mut u8)> {
        if read.length > read.buffer.len() || u32::try_from(read.length).is_err() {
            return Err(invalid("a buffer as long as the read, below 4 GiB"));
        }
        let Some(slot) = self.free.pop() else {
            return Err(invalid("no more reads in flight than the depth"));
        };
        // The bytes are on the heap: moving the buffer does not move them.
        let place = read.buffer.as_mut_ptr();
        if let Some(entry) = self.reads.get_mut(slot) {
            *entry = Some(read);
        }
        Ok((slot, place))
    }

    /// Removes a finished read: `result` is bytes, or a negative errno.
    fn take(&mut self, slot: u64, result: i64) -> Option<Finished> {
        let slot = usize::try_from(slot).ok()?;
        let read = self.reads.get_mut(slot)?.take()?;
        self.free.push(slot);
        let result = usize::try_from(result).map_err(|_| {
            io::Error::from_raw_os_error(i32::try_from(result.saturating_neg()).unwrap_or(libc::EIO))
        });
        Some(Finished {
            tag: read.tag,
            result,
            buffer: read.buffer,
        })
    }

    /// Abandons the reads in flight: the kernel may still write to their buffers.
    fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.reads));
    }
}

fn invalid(needs: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("this queue needs {needs}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    /// 64 pages, each filled with its number.
    fn numbered() -> Arc<File> {
        let mut file = tempfile::tempfile().unwrap();
        for page in 0..64u8 {
            file.write_all(&[page; 4096]).unwrap();
        }
        Arc::new(file)
    }

    /// Reads every page through a queue, `depth` at a time, and the end of the file.
    fn reads_all(queue: &mut dyn ReadQueue, buffers: Vec<Buffer>) {
        let file = numbered();
        let (mut next, mut seen, mut finished, mut buffers) = (0u64, [0u32; 65], Vec::new(), buffers);
        while next < 65 || queue.in_flight() > 0 {
            while let Some(buffer) = (next < 65).then(|| buffers.pop()).flatten() {
                let read = Read {
                    tag: next,
                    file: Arc::clone(&file),
                    offset: next * 4096,
                    length: 4096,
                    buffer,
                };
                queue.start(read).unwrap();
                next += 1;
            }
            queue.wait(&mut finished).unwrap();
            for one in finished.drain(..) {
                let length = one.result.unwrap();
                assert_eq!(length, if one.tag < 64 { 4096 } else { 0 });
                assert!(
                    one.buffer[..length]
                        .iter()
                        .all(|byte| u64::from(*byte) == one.tag)
                );
                seen[usize::try_from(one.tag).unwrap()] += 1;
                buffers.push(one.buffer);
            }
        }
        assert_eq!(seen, [1; 65]);
    }

    fn buffers(count: usize) -> Vec<Buffer> {
        (0..count).map(|_| Buffer::zeroed(4096).unwrap()).collect()
    }

    #[test]
    fn aio_reads_the_right_bytes_at_every_depth() {
        // Scenario: 64 numbered pages and the end of the file, at depths 1, 3 and 64. Expected: each once,
        // with its bytes.
        for depth in [1, 3, 64] {
            reads_all(&mut AioQueue::open(depth).unwrap(), buffers(depth));
        }
    }

    #[test]
    #[ignore = "needs io_uring"]
    fn a_bare_ring_reads_the_right_bytes_with_and_without_registered_buffers() {
        // Scenario: as above, over plain and registered buffers. Expected: each page once, with its bytes.
        for depth in [1, 3, 64] {
            let mut ring = RingQueue::open(depth, &RingOptions::default()).unwrap();
            reads_all(&mut ring, buffers(depth));
            let mut registered = buffers(depth);
            let mut ring = RingQueue::open(depth, &RingOptions::default()).unwrap();
            ring.register(&mut registered).unwrap();
            reads_all(&mut ring, registered);
        }
    }

    #[test]
    fn a_queue_refuses_what_it_has_no_room_for() {
        // Scenario: depths of 0 and 5000; a second read at depth 1; a read longer than its buffer; an
        // unreadable file. Expected: errors that say what is needed, and the file's own error with the
        // buffer.
        assert!(AioQueue::open(0).is_err() && AioQueue::open(5000).is_err());
        let file = numbered();
        let read = |length| Read {
            tag: 0,
            file: Arc::clone(&file),
            offset: 0,
            length,
            buffer: Buffer::zeroed(4096).unwrap(),
        };
        let mut queue = AioQueue::open(1).unwrap();
        assert!(queue.start(read(8192)).is_err());
        queue.start(read(4096)).unwrap();
        assert!(queue.start(read(4096)).unwrap_err().to_string().contains("depth"));
        drop(queue);

        let directory = Arc::new(File::open("/").unwrap());
        let mut queue = AioQueue::open(1).unwrap();
        let started = queue.start(Read {
            file: directory,
            ..read(4096)
        });
        let mut finished = Vec::new();
        let failed = started
            .and_then(|()| queue.wait(&mut finished))
            .and_then(|()| finished.remove(0).result.map(drop));
        assert!(failed.is_err());
    }
}
