//! What is registered with a ring: the response memory, and files of address spaces.

use crate::dataset::OpenFile;
use crate::shard::NumberHasher;
use io_uring::types;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// Largest piece of memory that can be registered as one buffer (io_uring_register(2)).
const REGISTERED_BUFFER_BYTES_MAX: usize = 1 << 30;

/// Registered response memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Registered {
    base: usize,
    bytes: usize,
}

impl Registered {
    /// Registers memory that outlives the ring. Pins all of it.
    ///
    /// # Errors
    /// errno: ENOMEM if RLIMIT_MEMLOCK is too low.
    pub(super) fn add(ring: RawFd, base: *mut u8, bytes: usize) -> io::Result<Self> {
        let pieces: Vec<libc::iovec> = (0..bytes.div_ceil(REGISTERED_BUFFER_BYTES_MAX))
            .map(|index| {
                let start = index * REGISTERED_BUFFER_BYTES_MAX;
                libc::iovec {
                    iov_base: base.wrapping_add(start).cast(),
                    iov_len: REGISTERED_BUFFER_BYTES_MAX.min(bytes - start),
                }
            })
            .collect();
        const IORING_REGISTER_BUFFERS: libc::c_uint = 0;
        // The kernel pins these pages, which the arena keeps mapped for longer than any ring.
        let count = u32::try_from(pieces.len()).unwrap_or(0);
        register(ring, IORING_REGISTER_BUFFERS, pieces.as_ptr().cast(), count)?;
        Ok(Self {
            base: base as usize,
            bytes,
        })
    }

    /// Unregisters the memory.
    pub(super) fn give_back(self, ring: RawFd) -> io::Result<()> {
        const IORING_UNREGISTER_BUFFERS: libc::c_uint = 1;
        register(ring, IORING_UNREGISTER_BUFFERS, std::ptr::null(), 0)
    }

    /// The registered buffer that contains the whole destination.
    pub(super) fn index(self, destination: *mut u8, length: u32) -> Option<u16> {
        let start = (destination as usize).checked_sub(self.base)?;
        let end = start.checked_add(length as usize)?;
        let index = start / REGISTERED_BUFFER_BYTES_MAX;
        let same = end <= self.bytes && (end.max(1) - 1) / REGISTERED_BUFFER_BYTES_MAX == index;
        if same { u16::try_from(index).ok() } else { None }
    }
}

/// Registered files: a read by table index avoids looking up and counting the descriptor.
///
/// A file stays in the table, and open, until it is forgotten: only files of datasets' address spaces are added.
#[derive(Debug, Default)]
pub(super) struct FileTable {
    /// Whether the ring has the table.
    is_made: bool,
    /// Whether the table could not be created, or an update failed.
    is_broken: bool,
    /// Indices by [`key`], and those that are free again.
    places: HashMap<u64, u32, BuildHasherDefault<NumberHasher>>,
    free: Vec<u32>,
    /// What was found last, with its key: most reads are of one file.
    last: Option<(u64, u32)>,
}

/// Entries of the table. Further files are read by descriptor.
const FILE_PLACES: u32 = 256;

/// One of the two ways to read a file. Files are numbered from 1.
fn key(file: u64, direct: bool) -> u64 {
    file << 1 | u64::from(direct)
}

impl FileTable {
    pub(super) fn place(&mut self, file: &OpenFile, direct: bool) -> Option<types::Fixed> {
        let key = key(file.id, direct);
        let (_, place) = match self.last {
            Some(last @ (found, _)) if found == key => last,
            Some(_) | None => *self.last.insert((key, *self.places.get(&key)?)),
        };
        Some(types::Fixed(place))
    }

    /// Adds the entries of a file; returns its id, or `None` if there is no room for any.
    pub(super) fn add(&mut self, ring: RawFd, file: &OpenFile) -> Option<u64> {
        self.next_place()?;
        let descriptors = [(file.direct_fd(), true), (Some(file.buffered_fd()), false)];
        for (descriptor, direct) in descriptors {
            if let Some(descriptor) = descriptor
                && let Some(place) = self.next_place()
            {
                self.is_broken = self.store(ring, place, descriptor.as_raw_fd()).is_err();
                if !self.is_broken {
                    self.free.pop();
                    self.places.insert(key(file.id, direct), place);
                }
            }
        }
        Some(file.id)
    }

    /// The place of the next entry.
    fn next_place(&self) -> Option<u32> {
        if self.is_broken {
            return None;
        }
        // If none is free again, all those before are taken.
        let used = u32::try_from(self.places.len()).ok();
        let next = self.free.last().copied().or(used);
        next.filter(|place| *place < FILE_PLACES)
    }

    /// Removes the entries of a file, so that the ring no longer holds it open.
    pub(super) fn remove(&mut self, ring: RawFd, file: u64) {
        self.last = None;
        for key in [true, false].map(|direct| key(file, direct)) {
            // An entry that cannot be cleared is kept: it still names the file that it holds.
            if let Some(place) = self.places.get(&key).copied()
                && self.store(ring, place, -1).is_ok()
            {
                self.places.remove(&key);
                self.free.push(place);
            }
        }
    }

    /// Removes the table from the ring.
    pub(super) fn give_back(&mut self, ring: RawFd) -> io::Result<()> {
        const IORING_UNREGISTER_FILES: libc::c_uint = 3;
        if !std::mem::take(&mut self.is_made) {
            return Ok(());
        }
        register(ring, IORING_UNREGISTER_FILES, std::ptr::null(), 0)
    }

    /// Sets an entry to a descriptor; -1 clears it.
    fn store(&mut self, ring: RawFd, place: u32, descriptor: RawFd) -> io::Result<()> {
        const IORING_REGISTER_FILES: libc::c_uint = 2;
        const IORING_REGISTER_FILES_UPDATE: libc::c_uint = 6;
        if !self.is_made {
            let empty = [-1; FILE_PLACES as usize];
            register(ring, IORING_REGISTER_FILES, empty.as_ptr().cast(), FILE_PLACES)?;
            self.is_made = true;
        }
        let descriptors = [descriptor];
        let update = FilesUpdate {
            offset: place,
            resv: 0,
            descriptors: descriptors.as_ptr() as u64,
        };
        register(
            ring,
            IORING_REGISTER_FILES_UPDATE,
            std::ptr::from_ref(&update).cast(),
            1,
        )
    }
}

/// `struct io_uring_files_update` of io_uring_register(2).
#[repr(C)]
struct FilesUpdate {
    offset: u32,
    resv: u32,
    descriptors: u64,
}

/// io_uring_register(2): `argument` points to what the operation reads.
pub(super) fn register(
    ring: RawFd,
    operation: libc::c_uint,
    argument: *const libc::c_void,
    count: u32,
) -> io::Result<()> {
    // SAFETY: every caller passes what the operation's manual page names, alive until the call returns.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_register, ring, operation, argument, count) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
