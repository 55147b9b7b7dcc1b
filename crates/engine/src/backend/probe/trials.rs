//! What the uring backend does with a file and with its memory, tried with a ring of its own: for examining a host. The
//! engine tries them as it uses them.

use super::{UringRefusal, completed};
use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd};

/// Smallest and most pieces of memory that are registered in place of a large one (io_uring_register(2): at
/// most 16384 buffers since kernel 5.13, 1024 before).
const PIECE_BYTES_MIN: usize = 1 << 20;
const PIECES_MAX: usize = 1024;
/// Largest piece of memory that can be registered as one buffer (io_uring_register(2)).
const PIECE_BYTES_MAX: usize = 1 << 30;

/// Reads `length_bytes` at an offset of an open file through a ring, into memory aligned to exactly
/// `memory_alignment_bytes` (a power of two). Returns the number of bytes read; the bytes are dropped.
///
/// # Errors
/// The error of io_uring_setup, io_uring_enter or the read.
pub fn read_through_ring(
    file: impl AsFd,
    offset: u64,
    length_bytes: u32,
    memory_alignment_bytes: u32,
) -> io::Result<u32> {
    const STEP: &str = "a read";
    if !memory_alignment_bytes.is_power_of_two() || i64::try_from(offset).is_err() {
        return Err(Errno::INVAL.into());
    }
    let (length, alignment) = (length_bytes as usize, memory_alignment_bytes as usize);
    let mut ring = IoUring::new(8)?;
    // Leaked if a completion is missing, since the kernel may still write to it.
    let mut memory = ManuallyDrop::new(vec![0_u8; length.saturating_add(3 * alignment)]);
    // With 512: the next multiple of 1024, plus 512, is a multiple of 512 and not of 1024.
    let start = memory
        .as_ptr()
        .align_offset(2 * alignment)
        .saturating_add(alignment);
    let Some(place) = memory.get_mut(start..start.saturating_add(length)) else {
        return Err(Errno::NOMEM.into());
    };
    let fd = types::Fd(file.as_fd().as_raw_fd());
    let entry = opcode::Read::new(fd, place.as_mut_ptr(), length_bytes)
        .offset(offset)
        .build();
    let result = completed(STEP, &mut ring, &entry).map_err(|refusal| match refusal {
        UringRefusal::Other { errno, .. } => io::Error::from_raw_os_error(errno),
        UringRefusal::Kernel { .. }
        | UringRefusal::Sysctl { .. }
        | UringRefusal::Seccomp { .. }
        | UringRefusal::Denied { .. }
        | UringRefusal::Memlock { .. }
        | UringRefusal::Files { .. } => io::Error::other(refusal),
    })?;
    drop(ring);
    drop(ManuallyDrop::into_inner(memory));
    u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.saturating_neg()))
}

/// Checks that `bytes` of memory can be registered with each of `rings` rings at once, as the engine does
/// with its response memory. Uses little memory: the kernel counts every registration against RLIMIT_MEMLOCK,
/// even of pages already registered, so a small piece is registered repeatedly.
///
/// # Errors
/// ENOMEM: RLIMIT_MEMLOCK is too low. Otherwise the error of io_uring_setup or io_uring_register.
pub fn register_memory(bytes: u64, rings: u32) -> io::Result<()> {
    let bytes = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
    let piece = PIECE_BYTES_MIN
        .max(bytes.div_ceil(PIECES_MAX))
        .next_multiple_of(1 << 12)
        .min(PIECE_BYTES_MAX);
    let memory = Piece::new(piece)?;
    let full = libc::iovec {
        iov_base: memory.base,
        iov_len: piece,
    };
    let mut pieces = vec![full; bytes / piece];
    if bytes % piece > 0 {
        pieces.push(libc::iovec {
            iov_base: memory.base,
            iov_len: bytes % piece,
        });
    }
    // All at once, since they count together.
    let mut held = Vec::new();
    for _ in 0..rings {
        let ring = IoUring::new(8)?;
        // SAFETY: the rings are dropped before the memory, and nothing is ever read into it.
        unsafe { ring.submitter().register_buffers(&pieces) }?;
        held.push(ring);
    }
    drop(held);
    Ok(())
}

/// Private memory of small pages: a huge page counts only once, however often it is registered.
struct Piece {
    base: *mut libc::c_void,
    bytes: usize,
}

impl Piece {
    fn new(bytes: usize) -> io::Result<Self> {
        // SAFETY: no fixed address, so no existing mapping is replaced; the memory is never referenced by Rust.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let piece = Self { base, bytes };
        // Fails if the kernel has no huge pages, which is harmless.
        // SAFETY: exactly the range mapped above; the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxNoHugepage) };
        Ok(piece)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped, with no address into it left.
        let _ = unsafe { rustix::mm::munmap(self.base, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::probe::{probe, refused, resident_pages};
    use std::mem::discriminant;

    /// Where no ring can be made, every function here must return what the probe does.
    fn assert_refused_alike(error: &io::Error, refusal: &UringRefusal) {
        let told = refused("io_uring_setup", error);
        assert_eq!(discriminant(&told), discriminant(refusal), "{error}");
    }

    #[test]
    fn a_ring_reads_what_is_there() {
        // Scenario: a file of 5000 bytes read through a ring: whole, at its end, past it, and with an invalid
        // alignment. Expectation: the bytes there are, 0, an error; where io_uring is refused, that refusal
        // each time.
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), vec![7; 5000]).expect("write");
        let read = |offset, alignment| read_through_ring(file.as_file(), offset, 4096, alignment);
        let directory = std::fs::File::open("/").expect("directory");
        let of_directory = || read_through_ring(&directory, 0, 512, 1);
        if let Err(refusal) = probe() {
            for refused in [read(0, 1), read(4096, 512), read(8192, 4096), of_directory()] {
                assert_refused_alike(&refused.expect_err("a refusal"), &refusal);
            }
        } else {
            assert_eq!(read(0, 1).expect("read"), 4096);
            assert_eq!(read(4096, 512).expect("read"), 904);
            assert_eq!(read(8192, 4096).expect("read"), 0);
            let error = of_directory().expect_err("a directory");
            assert_eq!(error.raw_os_error(), Some(libc::EISDIR));
        }
        assert!(read(0, 3).is_err());
    }

    #[test]
    fn memory_is_registered_without_being_there() {
        // Scenario: register 3 GiB and a bit with two rings, as the user who runs the tests. Expectation: it
        // works, or fails only for the limit on locked memory or for what refuses io_uring; and this process
        // grew by far less.
        match (probe(), register_memory((3 << 30) + 4097, 2)) {
            (Ok(_), Ok(())) => {}
            (Ok(_), Err(error)) => assert_eq!(error.raw_os_error(), Some(libc::ENOMEM), "{error}"),
            (Err(refusal), registered) => {
                assert_refused_alike(&registered.expect_err("a refusal"), &refusal);
            }
        }
        let status = std::fs::read_to_string("/proc/self/status").expect("status");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak: u64 = peak
            .and_then(|text| text.trim().strip_suffix(" kB")?.trim().parse().ok())
            .expect("VmHWM");
        assert!(peak < 2 << 20, "{peak} KiB");
    }

    #[test]
    fn fresh_pages_are_resident() {
        // Scenario: a file just written; a query of no bytes. Expectation: all of its pages are resident, and
        // none; or the kernel is too old to say.
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), vec![7; 10_000]).expect("write");
        match resident_pages(file.as_file(), 10_000) {
            Ok(pages) => assert_eq!(pages, 10_000_u64.div_ceil(rustix::param::page_size() as u64)),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOSYS)),
        }
        assert_eq!(resident_pages(file.as_file(), 0).expect("nothing asked"), 0);
    }
}
