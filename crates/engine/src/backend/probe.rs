//! Finds out by use whether io_uring is available: sets up a ring, then makes a no-op, a read, and a read
//! into registered memory. A kernel version is not enough (TRAPS 12): seccomp profiles, a sysctl and limits
//! refuse io_uring on new kernels.
//!
//! Invariants: causes are distinguished, and each names its remedy. "Not available" may fall back to another
//! backend; "out of memory or files" must not, since it would silently become a slower engine. Every wait has
//! a bound. Direct I/O is tried for each file when it is opened. Checks that the engine does not need are in `trials` and
//! `residency`.

mod refusal;
mod residency;
mod trials;

pub use refusal::UringRefusal;
pub use residency::resident_pages;
pub use trials::{read_through_ring, register_memory};

use io_uring::{IoUring, opcode, types};
use refusal::Seen;
use std::io::{ErrorKind, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Length of the trial read.
const READ_BYTES: usize = 4096;
/// Timeout of one operation; they take microseconds.
const WAIT: Duration = Duration::from_secs(5);

/// Properties of io_uring here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UringFacts {
    /// `uname -r`.
    pub kernel_release: String,
    /// The relevant features that the kernel announced, separated by spaces.
    pub features: String,
    /// Whether a read into registered memory works, or why not. Optional: without it reads use unregistered
    /// memory.
    pub registered_buffers: Result<(), String>,
}

/// Tries io_uring with real operations. Blocks for well under a millisecond on success.
///
/// # Errors
/// Why it is unavailable, with the remedy.
pub fn probe() -> Result<UringFacts, UringRefusal> {
    let mut ring = ring()?;
    one("a no-op", &mut ring, &opcode::Nop::new().build())?;

    let file = bytes_to_read()?;
    // Leaked if the read failed, since one that timed out may still write to it.
    let mut memory = ManuallyDrop::new(vec![0_u8; READ_BYTES]);
    let fd = types::Fd(file.as_raw_fd());
    let length = u32::try_from(READ_BYTES).unwrap_or(0);
    let plain = opcode::Read::new(fd, memory.as_mut_ptr(), length).build();
    let read = one("a read", &mut ring, &plain)?;
    check_bytes("a read", read, &memory)?;
    let registered_buffers = registered_read(&mut ring, ManuallyDrop::into_inner(memory));
    let features = features_of(&ring);

    Ok(UringFacts {
        kernel_release: kernel_release(),
        features,
        registered_buffers,
    })
}

/// Registers the memory, reads into it, unregisters it.
fn registered_read(ring: &mut IoUring, mut memory: Vec<u8>) -> Result<(), String> {
    const STEP: &str = "a read into registered memory";
    let file = bytes_to_read().map_err(|refusal| refusal.to_string())?;
    let fd = types::Fd(file.as_raw_fd());
    memory.fill(0);
    let vector = libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: memory.len(),
    };
    // SAFETY: the memory is freed below, after it was unregistered and if nothing is written to it any more.
    unsafe { ring.submitter().register_buffers(&[vector]) }
        .map_err(|error| refused("registering memory", &error).to_string())?;
    // As above.
    let mut memory = ManuallyDrop::new(memory);
    let length = u32::try_from(memory.len()).unwrap_or(0);
    let fixed = opcode::ReadFixed::new(fd, memory.as_mut_ptr(), length, 0).build();
    let outcome = one(STEP, ring, &fixed)
        .and_then(|read| check_bytes(STEP, read, &memory))
        .map_err(|refusal| refusal.to_string());
    // Closing the ring unregisters too, so a failure here loses nothing.
    let _ = ring.submitter().unregister_buffers();
    if outcome.is_ok() {
        drop(ManuallyDrop::into_inner(memory));
    }
    outcome
}

/// A ring, if the kernel is new enough.
fn ring() -> Result<IoUring, UringRefusal> {
    let ring = IoUring::new(8).map_err(|error| refused("io_uring_setup", &error))?;
    check_features(&features_of(&ring))?;
    Ok(ring)
}

/// Refuses kernels before 5.11, whose waits have no bound; docs/OPERATIONS.md promises the fallback there.
fn check_features(features: &str) -> Result<(), UringRefusal> {
    if features.split(' ').any(|feature| feature == "ext_arg") {
        return Ok(());
    }
    Err(UringRefusal::Kernel {
        release: kernel_release(),
    })
}

/// Submits one operation and waits for its result.
fn one(step: &'static str, ring: &mut IoUring, entry: &io_uring::squeue::Entry) -> Result<i32, UringRefusal> {
    let result = completed(step, ring, entry)?;
    if result >= 0 {
        return Ok(result);
    }
    Err(Seen::now(-result).refusal(step))
}

/// Submits one operation and waits for its result; negative values are errnos.
fn completed(
    step: &'static str,
    ring: &mut IoUring,
    entry: &io_uring::squeue::Entry,
) -> Result<i32, UringRefusal> {
    let push = |ring: &mut IoUring| {
        // SAFETY: the entry's memory and descriptor are kept by the callers until the ring is gone.
        let pushed = unsafe { ring.submission().push(entry) };
        pushed.map_err(|_| UringRefusal::Other {
            step,
            errno: libc::EBUSY,
        })
    };
    push(ring)?;
    let deadline = Instant::now() + WAIT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = types::Timespec::from(left);
        let waited = ring
            .submitter()
            .submit_with_args(1, &types::SubmitArgs::new().timespec(&limit));
        let result = ring.completion().next().map(|completion| completion.result());
        match result {
            // Signals kept the kernel from creating a thread for it: TRAPS 36.
            Some(result) if result == -libc::ECANCELED && !left.is_zero() => {
                push(ring)?;
                continue;
            }
            Some(result) => return Ok(result),
            None => {}
        }
        match waited {
            // A signal ends the wait: with what was submitted, or with EINTR if nothing was.
            Ok(_) if !left.is_zero() => {}
            Err(error) if error.kind() == ErrorKind::Interrupted && !left.is_zero() => {}
            Ok(_) => {
                return Err(UringRefusal::Other {
                    step,
                    errno: libc::ETIME,
                });
            }
            Err(error) => return Err(refused(step, &error)),
        }
    }
}

fn check_bytes(step: &'static str, read: i32, memory: &[u8]) -> Result<(), UringRefusal> {
    if usize::try_from(read) == Ok(READ_BYTES) && memory.iter().all(|&byte| byte == 0xA5) {
        return Ok(());
    }
    Err(UringRefusal::Other {
        step,
        errno: libc::EIO,
    })
}

/// A descriptor with `READ_BYTES` to read, once: a pipe, which needs no directory and is no file that RLIMIT_FSIZE forbids to
/// write. Even the smallest one has room for a page.
fn bytes_to_read() -> Result<OwnedFd, UringRefusal> {
    let step = "something to read";
    // Other causes are not io_uring's.
    let refused = |error: std::io::Error| match error.raw_os_error().unwrap_or(libc::EIO) {
        errno @ (libc::EMFILE | libc::ENFILE) => Seen::now(errno).refusal(step),
        errno => UringRefusal::Other { step, errno },
    };
    let (reader, mut writer) = std::io::pipe().map_err(refused)?;
    writer.write_all(&[0xA5; READ_BYTES]).map_err(refused)?;
    Ok(reader.into())
}

fn refused(step: &'static str, error: &std::io::Error) -> UringRefusal {
    Seen::now(error.raw_os_error().unwrap_or(libc::EINVAL)).refusal(step)
}

fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn features_of(ring: &IoUring) -> String {
    let params = ring.params();
    let all = [
        ("single_mmap", params.is_feature_single_mmap()),
        ("nodrop", params.is_feature_nodrop()),
        ("submit_stable", params.is_feature_submit_stable()),
        ("rw_cur_pos", params.is_feature_rw_cur_pos()),
        ("fast_poll", params.is_feature_fast_poll()),
        ("ext_arg", params.is_feature_ext_arg()),
        ("native_workers", params.is_feature_native_workers()),
        ("rsrc_tags", params.is_feature_resource_tagging()),
        ("cqe_skip", params.is_feature_skip_cqe_on_success()),
        ("linked_file", params.is_feature_linked_file()),
    ];
    all.iter()
        .filter(|(_, has)| *has)
        .map(|(name, _)| *name)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests;
