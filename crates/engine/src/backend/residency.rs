//! What of a file the page cache holds: asked of the kernel (cachestat(2)), guessed from what was found lately, or found out
//! by a read that does not wait (preadv2(2) with RWF_NOWAIT).

use crate::dataset::OpenFile;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of files whose temperature is tracked; others share an entry with them.
const REMEMBERED_FILES: usize = 64;

/// A cold file is queried once in so many reads.
const COLD_ASKS_ONE_IN: u32 = 16;

/// Below this share of hits a file counts as cold: querying every read then costs more than the hits save (0.3 us
/// against 1/20 of some 2 us).
const COLD_HITS_PER_MILLE: u32 = 50;

/// After so many hits in a row a file is trusted: it is queried once in [`TRUSTED_ASKS_ONE_IN`] reads, and the others
/// are copied without. High, since an evicted page blocks a network thread for a device read: 65,536 copies take 33 ms,
/// to which a fault of 2 ms on a slow disk adds 6 %; below it querying, at 0.3 us, is cheaper.
pub(super) const TRUSTED_AFTER: u32 = 65_536;

/// See [`TRUSTED_AFTER`].
const TRUSTED_ASKS_ONE_IN: u32 = 16;

/// The histories of the files read by one thread.
#[derive(Debug)]
pub(crate) struct ResidencyHistories(pub(super) Vec<ResidencyHistory>);

impl Default for ResidencyHistories {
    fn default() -> Self {
        Self(vec![ResidencyHistory::default(); REMEMBERED_FILES])
    }
}

impl ResidencyHistories {
    /// The history of a file.
    pub(crate) fn of(&mut self, file: u64) -> Option<&mut ResidencyHistory> {
        let history = self.0.get_mut(place_of(file))?;
        history.is_of(file);
        Some(history)
    }

    /// Whether everything of a file was resident for long.
    pub(super) fn trusts(&self, file: u64) -> bool {
        let history = self.0.get(place_of(file));
        history.is_some_and(|known| known.file == file && known.hits_in_a_row >= TRUSTED_AFTER)
    }

    /// Queries everything again.
    pub(super) fn distrust(&mut self) {
        self.0.iter_mut().for_each(|file| file.hits_in_a_row = 0);
    }
}

fn place_of(file: u64) -> usize {
    usize::try_from(file).unwrap_or(0) % REMEMBERED_FILES
}

/// How often a file was resident recently, and how often it is queried.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResidencyHistory {
    /// Moving average over some 64 queries.
    pub(super) hits_per_mille: u32,
    pub(super) hits_in_a_row: u32,
    /// The file that the hits in a row are of: files that share an entry do not share trust.
    pub(super) file: u64,
    pub(super) unasked: u32,
}

/// What is known about a read without a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Residency {
    /// Not enough.
    Ask,
    /// Resident, like everything queried recently.
    Resident,
    /// Not resident, like nearly everything queried recently.
    Cold,
}

impl Default for ResidencyHistory {
    fn default() -> Self {
        // Unknown files count as warm: a wrong guess costs a query, the opposite guess a disk read.
        Self {
            hits_per_mille: 1000,
            hits_in_a_row: 0,
            file: 0,
            unasked: 0,
        }
    }
}

impl ResidencyHistory {
    /// Sets the file of the next attempts.
    pub(super) fn is_of(&mut self, file: u64) {
        if self.file != file {
            self.file = file;
            self.hits_in_a_row = 0;
        }
    }

    /// What to expect of the next read.
    pub(crate) fn guess(&mut self) -> Residency {
        let (one_in, otherwise) = if self.hits_in_a_row >= TRUSTED_AFTER {
            (TRUSTED_ASKS_ONE_IN, Residency::Resident)
        } else if self.hits_per_mille < COLD_HITS_PER_MILLE {
            (COLD_ASKS_ONE_IN, Residency::Cold)
        } else {
            return Residency::Ask;
        };
        self.unasked += 1;
        if self.unasked < one_in {
            return otherwise;
        }
        self.unasked = 0;
        Residency::Ask
    }

    /// Records whether a read's bytes were resident.
    pub(crate) fn learn(&mut self, hit: bool) {
        self.hits_in_a_row = if hit {
            self.hits_in_a_row.saturating_add(1)
        } else {
            0
        };
        // Worked: at 1000, 190 misses in a row bring it below 50; from there one hit in 16 questions brings it back.
        self.hits_per_mille = if hit {
            self.hits_per_mille + (1000 - self.hits_per_mille).div_ceil(16)
        } else {
            self.hits_per_mille - self.hits_per_mille.div_ceil(64)
        };
    }
}

/// Reads from the page cache, without waiting for the device.
///
/// # Errors
/// errno; EAGAIN where nothing is there.
///
/// # Safety
/// `destination` has `length` bytes, which nobody else touches.
pub(crate) unsafe fn pread_no_wait(
    file: &OpenFile,
    offset: u64,
    destination: *mut u8,
    length: u32,
) -> Result<u32, i32> {
    let vector = libc::iovec {
        iov_base: destination.cast(),
        iov_len: length as usize,
    };
    let from = i64::try_from(offset).map_err(|_| libc::EINVAL)?;
    let descriptor = file.buffered_fd().as_raw_fd();
    // SAFETY: one vector, whose memory is valid and exclusive by the caller's promise.
    let read = unsafe { libc::preadv2(descriptor, &raw const vector, 1, from, libc::RWF_NOWAIT) };
    let read = u32::try_from(read).map_err(|_| {
        std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO)
    })?;
    // The file may have been truncated in between, and its last page zeroed.
    file.kept_without_waiting(offset, read)
}

/// `struct cachestat_range` of cachestat(2).
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// `struct cachestat` of cachestat(2); only the first count is looked at.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached_pages: u64,
    dirty_pages: u64,
    writeback_pages: u64,
    evicted_pages: u64,
    recently_evicted_pages: u64,
}

/// Whether every page of the bytes is in the page cache; false if unknown.
pub(super) fn resident(file: &OpenFile, offset: u64, length: u32) -> bool {
    let end = file.length_bytes().min(offset + u64::from(length));
    let Some(last) = end.checked_sub(1).filter(|last| *last >= offset) else {
        return false;
    };
    let page_bytes = rustix::param::page_size() as u64;
    // Worked, pages of 4096: bytes 4000 to 8192 lie on pages 0 and 1.
    let pages = last / page_bytes - offset / page_bytes + 1;
    match cached_pages(file.buffered_fd(), offset, end - offset) {
        Ok(cached) => cached >= pages,
        Err(errno) => {
            static TOLD: AtomicBool = AtomicBool::new(false);
            if !TOLD.swap(true, Ordering::Relaxed) {
                let error = std::io::Error::from_raw_os_error(errno);
                tracing::warn!(
                    %error,
                    "backend auto cannot query the page cache and reads everything from the device (EPERM: the daemon's \
                     user must own the files or be able to write to them; ENOSYS: kernel before 6.5)"
                );
            }
            false
        }
    }
}

/// Pages of a range that the page cache holds.
pub(super) fn cached_pages(file: BorrowedFd<'_>, offset: u64, length: u64) -> Result<u64, i32> {
    /// The same number on every architecture; libc has no constant for it on some.
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = CachestatRange { offset, length };
    let mut stat = Cachestat::default();
    // SAFETY: the kernel reads one range and fills one stat, both of which live until the call returns.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            std::ptr::from_ref(&range),
            std::ptr::from_mut(&mut stat),
            0 as libc::c_uint,
        )
    };
    if result == 0 {
        Ok(stat.cached_pages)
    } else {
        Err(std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DirectIo;
    use rustix::fs::{Advice, fadvise};

    /// Fresh pages are resident; after the second half is dropped, what lies in it or reaches into it is not. (Halves of
    /// 8 MiB: the cache drops whole folios only, which have up to 2 MiB.)
    #[test]
    fn residency_is_what_the_page_cache_says() {
        const HALF: u32 = 8 << 20;
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::write(file.path(), vec![7_u8; 2 * HALF as usize]).unwrap();
        rustix::fs::fsync(file.as_file()).unwrap();
        let open = OpenFile::open(file.path(), DirectIo::Off).unwrap();
        assert!(resident(&open, 0, 2 * HALF));
        assert!(resident(&open, 4000, 200));
        fadvise(file.as_file(), u64::from(HALF), None, Advice::DontNeed).unwrap();
        assert!(resident(&open, 0, HALF / 2));
        assert!(!resident(&open, u64::from(HALF) + (4 << 20), 4096));
        assert!(!resident(&open, 0, 2 * HALF));
        assert!(
            !resident(&open, 2 * u64::from(HALF), 4096),
            "past the end is nowhere"
        );
    }

    /// A file of which everything was resident for long is asked about once in 16 reads; the first miss, or a fault, ends
    /// that.
    #[test]
    fn what_was_always_resident_is_trusted() {
        let mut history = ResidencyHistory::default();
        for _ in 0..TRUSTED_AFTER {
            assert_eq!(history.guess(), Residency::Ask);
            history.learn(true);
        }
        let guesses: Vec<Residency> = (0..32).map(|_| history.guess()).collect();
        let asked = guesses.iter().filter(|guess| **guess == Residency::Ask).count();
        assert_eq!(asked, 2);
        assert!(guesses.iter().all(|guess| *guess != Residency::Cold));
        history.learn(false);
        assert_eq!(history.guess(), Residency::Ask);
    }

    /// A cold file is asked about ever less, yet often enough that its warming up is noticed.
    #[test]
    fn asking_stops_where_it_is_not_worth_it() {
        let mut history = ResidencyHistory::default();
        let mut asked_cold = 0;
        for _ in 0..10_000 {
            if history.guess() == Residency::Ask {
                history.learn(false);
                asked_cold += 1;
            }
        }
        assert!(asked_cold < 1000, "{asked_cold} questions about a cold file");
        let mut asked_warm = 0;
        for _ in 0..1000 {
            if history.guess() == Residency::Ask {
                history.learn(true);
                asked_warm += 1;
            }
        }
        assert!(
            asked_warm > 900,
            "{asked_warm} questions about a file that warmed up"
        );
    }
}
