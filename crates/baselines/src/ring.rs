//! io_uring without an engine: one ring, one thread, optionally with polled completions.

use crate::{Buffer, Finished, Read, ReadQueue, Slots};
use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

/// How a ring is set up. Options that the kernel does not support are left out, except `polled`.
#[derive(Debug, Clone, Default)]
pub struct RingOptions {
    /// Poll for completions (IORING_SETUP_IOPOLL): needs O_DIRECT and poll queues.
    pub polled: bool,
    /// The file to register with the ring; reads of other files use their descriptor.
    pub registered_file: Option<Arc<File>>,
}

/// A ring.
pub struct RingQueue {
    /// `None` once it has been abandoned.
    ring: Option<IoUring>,
    slots: Slots,
    registered_file: Option<Arc<File>>,
    flags: &'static str,
    /// A ring with SINGLE_ISSUER belongs to the thread that created it.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl std::fmt::Debug for RingQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RingQueue")
            .field("slots", &self.slots)
            .field("flags", &self.flags)
            .finish_non_exhaustive()
    }
}

impl RingQueue {
    /// A ring for this many reads in flight.
    ///
    /// # Errors
    /// An invalid depth; errno of io_uring_setup or io_uring_register.
    pub fn open(depth: usize, options: &RingOptions) -> io::Result<Self> {
        let slots = Slots::new(depth)?;
        let entries = u32::try_from(depth).unwrap_or(u32::MAX);
        let build = |issuer: bool, cooperative: bool| {
            let mut builder = IoUring::builder();
            if issuer {
                builder.setup_single_issuer();
            }
            if cooperative {
                builder.setup_coop_taskrun();
            }
            if options.polled {
                builder.setup_iopoll();
            }
            builder.build(entries)
        };
        // Kernels before 6.0 do not know SINGLE_ISSUER, those before 5.19 not COOP_TASKRUN.
        let (ring, flags) = build(true, true)
            .map(|ring| (ring, "SINGLE_ISSUER, COOP_TASKRUN"))
            .or_else(|_| build(false, true).map(|ring| (ring, "COOP_TASKRUN")))
            .or_else(|_| build(false, false).map(|ring| (ring, "no flags")))?;
        if let Some(file) = &options.registered_file {
            ring.submitter().register_files(&[file.as_raw_fd()])?;
        }
        Ok(Self {
            ring: Some(ring),
            slots,
            registered_file: options.registered_file.clone(),
            flags,
            _not_send: std::marker::PhantomData,
        })
    }

    /// The flags that the kernel accepted.
    pub fn flags(&self) -> &'static str {
        self.flags
    }

    /// Registers buffers, once: reads into them skip the mapping of their pages.
    ///
    /// # Errors
    /// errno of io_uring_register: ENOMEM beyond RLIMIT_MEMLOCK, EBUSY for a second call.
    pub fn register(&mut self, buffers: &mut [Buffer]) -> io::Result<()> {
        let pieces: Vec<libc::iovec> = buffers
            .iter_mut()
            .map(|buffer| libc::iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            })
            .collect();
        let Some(ring) = &self.ring else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        // SAFETY: the kernel pins the pages. A buffer that is freed meanwhile is no longer read into through
        // its number.
        unsafe { ring.submitter().register_buffers(&pieces) }?;
        for (number, buffer) in buffers.iter_mut().enumerate() {
            buffer.registered = u16::try_from(number).ok();
        }
        Ok(())
    }
}

impl ReadQueue for RingQueue {
    fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    fn start(&mut self, read: Read) -> io::Result<()> {
        let Some(ring) = &mut self.ring else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let is_registered = |file: &Arc<File>| Arc::ptr_eq(file, &read.file);
        let registered_file = self.registered_file.as_ref().is_some_and(is_registered);
        let descriptor = read.file.as_raw_fd();
        let (number, offset) = (read.buffer.registered, read.offset);
        let length = u32::try_from(read.length).unwrap_or(u32::MAX);
        let (slot, place) = self.slots.put(read)?;
        macro_rules! entry {
            ($target:expr) => {
                match number {
                    Some(number) => opcode::ReadFixed::new($target, place, length, number)
                        .offset(offset)
                        .build(),
                    None => opcode::Read::new($target, place, length)
                        .offset(offset)
                        .build(),
                }
            };
        }
        let entry = if registered_file {
            entry!(types::Fixed(0))
        } else {
            entry!(types::Fd(descriptor))
        };
        // SAFETY: `slots` holds buffer and file until the completion has arrived.
        let pushed = unsafe { ring.submission().push(&entry.user_data(slot as u64)) };
        if pushed.is_err() {
            let _buffer = self.slots.take(slot as u64, 0);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) -> io::Result<()> {
        let want = usize::from(self.slots.in_flight() > 0);
        let Some(ring) = &mut self.ring else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let before = finished.len();
        loop {
            match ring.submit_and_wait(want) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            for done in ring.completion() {
                finished.extend(self.slots.take(done.user_data(), done.result().into()));
            }
            if finished.len() > before || self.slots.in_flight() == 0 {
                return Ok(());
            }
        }
    }
}

impl Drop for RingQueue {
    fn drop(&mut self) {
        let mut finished = Vec::new();
        while self.slots.in_flight() > 0 {
            if self.wait(&mut finished).is_err() {
                // The kernel may still write: neither the buffers nor the ring may be freed.
                self.slots.leak();
                std::mem::forget(self.ring.take());
                return;
            }
            finished.clear();
        }
    }
}
