//! Linux AIO (io_setup(2), io_submit(2), io_getevents(2)): asynchronous for O_DIRECT only; a read through the
//! page cache is made inside io_submit.

use crate::{Finished, Read, ReadQueue, Slots};
use std::io;
use std::os::fd::AsRawFd as _;

/// `IOCB_CMD_PREAD` of linux/aio_abi.h.
const PREAD: u16 = 0;
const EVENTS_AT_ONCE: usize = 64;

/// `struct iocb` of linux/aio_abi.h, for little-endian machines (others swap `aio_key` and `aio_rw_flags`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_descriptor: u32,
}

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Event {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// A context of Linux AIO.
#[derive(Debug)]
pub struct AioQueue {
    context: libc::c_ulong,
    slots: Slots,
    /// Queued, not submitted; the kernel copies them at submission.
    queued: Vec<Iocb>,
}

impl AioQueue {
    /// A context for this many reads in flight.
    ///
    /// # Errors
    /// An invalid depth; errno of io_setup: EAGAIN beyond fs.aio-max-nr, ENOSYS without CONFIG_AIO.
    pub fn open(depth: usize) -> io::Result<Self> {
        let slots = Slots::new(depth)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one context id, which must be 0 before.
        let code = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        if code != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            context,
            slots,
            queued: Vec::with_capacity(depth),
        })
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.queued.is_empty() {
            let pointers: Vec<*const Iocb> = self.queued.iter().map(std::ptr::from_ref).collect();
            // SAFETY: each points to an iocb whose buffer and file `slots` holds until its event has arrived.
            let code = unsafe {
                libc::syscall(
                    libc::SYS_io_submit,
                    self.context,
                    pointers.len(),
                    pointers.as_ptr(),
                )
            };
            match usize::try_from(code) {
                Ok(accepted) if accepted > 0 => drop(self.queued.drain(..accepted)),
                Ok(_) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}

impl ReadQueue for AioQueue {
    fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    fn start(&mut self, read: Read) -> io::Result<()> {
        let descriptor = u32::try_from(read.file.as_raw_fd()).unwrap_or(u32::MAX);
        let (offset, bytes) = (read.offset, read.length as u64);
        let (slot, place) = self.slots.put(read)?;
        self.queued.push(Iocb {
            data: slot as u64,
            opcode: PREAD,
            descriptor,
            buffer: place as u64,
            bytes,
            offset: i64::try_from(offset).unwrap_or(i64::MAX),
            ..Iocb::default()
        });
        Ok(())
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) -> io::Result<()> {
        self.submit()?;
        let mut events = [Event::default(); EVENTS_AT_ONCE];
        loop {
            let least = usize::from(self.slots.in_flight() > 0);
            // SAFETY: there is room for the stated number of events; no time limit.
            let code = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    least,
                    EVENTS_AT_ONCE,
                    events.as_mut_ptr(),
                    std::ptr::null_mut::<libc::timespec>(),
                )
            };
            let Ok(count) = usize::try_from(code) else {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return Err(error);
            };
            for event in events.iter().take(count) {
                finished.extend(self.slots.take(event.data, event.result));
            }
            return Ok(());
        }
    }
}

impl Drop for AioQueue {
    fn drop(&mut self) {
        // Those that were never submitted are only in our slots.
        for iocb in std::mem::take(&mut self.queued) {
            let _buffer = self.slots.take(iocb.data, 0);
        }
        // SAFETY: the context is this queue's own. The call waits for reads that cannot be cancelled.
        let code = unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
        if code != 0 {
            self.slots.leak();
        }
    }
}
