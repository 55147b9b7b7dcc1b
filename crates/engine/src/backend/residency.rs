//! How much of a file the page cache holds: queried from the kernel (cachestat(2)), guessed from recent
//! results, or found out by a read that does not wait (preadv2(2) with RWF_NOWAIT).

mod regions;

#[cfg(test)]
pub(crate) use regions::forget_faults;
pub(crate) use regions::{Tick, watch};

use super::mmap::is_up_to_date;
use crate::dataset::OpenFile;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of files whose temperature is tracked; further files share their entries.
const REMEMBERED_FILES: usize = 64;

/// A cold file is queried once in this many reads.
const COLD_ASKS_ONE_IN: u32 = 16;

/// Below this share of hits a file counts as cold: querying every read then costs more than the hits save
/// (0.3 us against 1/20 of some 2 us).
const COLD_HITS_PER_MILLE: u32 = 50;

/// The histories of the files read by one thread.
#[derive(Debug)]
pub(crate) struct ResidencyHistories(pub(super) Vec<ResidencyHistory>);

impl Default for ResidencyHistories {
    fn default() -> Self {
        Self(vec![ResidencyHistory::default(); REMEMBERED_FILES])
    }
}

impl ResidencyHistories {
    pub(crate) fn of(&mut self, file: u64) -> Option<&mut ResidencyHistory> {
        self.0
            .get_mut(usize::try_from(file).unwrap_or(0) % REMEMBERED_FILES)
    }

    /// What is known about bytes, after a query if it is worth one.
    pub(crate) fn known(
        &mut self,
        file: &OpenFile,
        offset: u64,
        length: u32,
        now: Tick,
        region_queries: &mut u32,
    ) -> Residency {
        if trusted(file, offset, length, now) {
            return Residency::Trusted;
        }
        let Some(history) = self.of(file.id) else {
            return Residency::Cold;
        };
        if history.guess() == Residency::Cold {
            return Residency::Cold;
        }
        let resident = ask(file, offset, length, now, region_queries);
        history.learn(resident);
        if resident {
            Residency::Resident
        } else {
            Residency::Missing
        }
    }
}

/// How often a file was resident recently, and how often it is queried.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResidencyHistory {
    /// Moving average over about 64 queries.
    pub(super) hits_per_mille: u32,
    unasked: u32,
}

/// What is known about a read's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Residency {
    /// Unknown: query.
    Ask,
    /// Queried, and not resident.
    Missing,
    /// Probably not resident, like nearly everything queried recently.
    Cold,
    /// Queried, and in the page cache, but perhaps still on their way from the device.
    Resident,
    /// Their regions were complete a few seconds ago: see [`trusted`].
    Trusted,
}

impl Default for ResidencyHistory {
    fn default() -> Self {
        // Unknown files count as warm: a wrong guess costs a query, the opposite guess a disk read.
        Self {
            hits_per_mille: 1000,
            unasked: 0,
        }
    }
}

impl ResidencyHistory {
    /// What to expect of the next read.
    pub(crate) fn guess(&mut self) -> Residency {
        if self.hits_per_mille >= COLD_HITS_PER_MILLE {
            return Residency::Ask;
        }
        self.unasked += 1;
        if self.unasked < COLD_ASKS_ONE_IN {
            return Residency::Cold;
        }
        self.unasked = 0;
        Residency::Ask
    }

    /// Records whether a read's bytes were resident.
    pub(crate) fn learn(&mut self, hit: bool) {
        // Worked: 190 misses in a row bring 1000 below 50; from there one hit in 16 queries brings it back.
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
/// errno; EAGAIN if nothing is resident.
///
/// # Safety
/// `destination` has `length` bytes, which nobody else touches.
pub(crate) unsafe fn pread_no_wait(
    file: &OpenFile,
    offset: u64,
    destination: *mut u8,
    length: u32,
) -> Result<u32, i32> {
    // SAFETY: as the caller promises.
    let read = unsafe { pread_no_wait_unchecked(file, offset, destination, length) }?;
    // The file may have been truncated meanwhile, and its last page zeroed.
    file.kept(offset, read, false)
}

/// As [`pread_no_wait`]; of the bytes only those before the end of the file count.
///
/// # Errors
/// As above.
///
/// # Safety
/// As above.
pub(super) unsafe fn pread_no_wait_unchecked(
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
    u32::try_from(read).map_err(|_| {
        std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO)
    })
}

/// `struct cachestat_range` of cachestat(2).
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// `struct cachestat` of cachestat(2); only the first count is used.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached_pages: u64,
    dirty_pages: u64,
    writeback_pages: u64,
    evicted_pages: u64,
    recently_evicted_pages: u64,
}

/// Whether bytes may be copied from a mapping without a query: their regions were completely resident a few seconds ago.
pub(crate) fn trusted(file: &OpenFile, offset: u64, length: u32, now: Tick) -> bool {
    regions::trusts(file.pages, offset, length, now)
}

/// Queries whether every page of the bytes is in the page cache; false if unknown. Also queries the whole
/// region (20 to 50 us) where that is worth it and `region_queries` are left.
fn ask(file: &OpenFile, offset: u64, length: u32, now: Tick, region_queries: &mut u32) -> bool {
    let hit = resident(file, offset, length);
    if let Some(begin) = regions::learn(file.pages, offset, length, hit, now)
        && let Some(left) = region_queries.checked_sub(1)
    {
        *region_queries = left;
        #[expect(clippy::cast_possible_truncation, reason = "2 MiB")]
        let bytes = regions::REGION_BYTES as u32;
        // The page cache counts a page from when its read begins, whoever reads it.
        let complete = resident(file, begin, bytes) && is_up_to_date(file, begin, bytes);
        regions::settle(file.pages, begin, complete, now);
    }
    hit
}

/// Records that bytes were not resident, whatever was known before.
pub(crate) fn missed(file: &OpenFile, offset: u64, length: u32) {
    regions::learn(file.pages, offset, length, false, Tick::now());
}

/// Whether every page of the bytes is in the page cache; false if unknown.
pub(crate) fn is_known_resident(file: &OpenFile, offset: u64, length: u32) -> bool {
    queried(file, offset, length).unwrap_or(false)
}

/// As [`is_known_resident`]; warns once where that cannot be known.
pub(super) fn resident(file: &OpenFile, offset: u64, length: u32) -> bool {
    match queried(file, offset, length) {
        Ok(resident) => resident,
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

/// Whether every page of the bytes is in the page cache.
fn queried(file: &OpenFile, offset: u64, length: u32) -> Result<bool, i32> {
    let end = file.length_bytes().min(offset + u64::from(length));
    let Some(last) = end.checked_sub(1).filter(|last| *last >= offset) else {
        return Ok(false);
    };
    let page_bytes = rustix::param::page_size() as u64;
    // Worked, pages of 4096: bytes 4000 to 8192 lie on pages 0 and 1.
    let pages = last / page_bytes - offset / page_bytes + 1;
    Ok(cached_pages(file.buffered_fd(), offset, end - offset)? >= pages)
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

/// Drops what the page cache has of a file from `offset` on, and waits until it is gone: the kernel keeps what somebody uses at that
/// moment, as folios that compaction moves. None of it may be mapped.
#[cfg(test)]
pub(crate) fn evict(file: &OpenFile, offset: u64) {
    let deadline = std::time::Instant::now() + super::trait_suite::WAIT;
    loop {
        rustix::fs::fdatasync(file.buffered_fd()).unwrap();
        rustix::fs::fadvise(file.buffered_fd(), offset, None, rustix::fs::Advice::DontNeed).unwrap();
        let left = cached_pages(file.buffered_fd(), offset, file.length_bytes() - offset).unwrap();
        if left == 0 {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{left} pages stay");
        std::thread::yield_now();
    }
}

/// Trusts all of a file, whatever is resident.
#[cfg(test)]
pub(crate) fn trust(file: &OpenFile) {
    let regions = file.length_bytes().div_ceil(regions::REGION_BYTES);
    (0..regions)
        .for_each(|region| regions::settle(file.pages, region * regions::REGION_BYTES, true, Tick::now()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DirectIo;
    use crate::dataset::tests::file_on_disk;

    /// Fresh pages are resident. After the second half is dropped, ranges in it or reaching into it are not.
    /// (Halves of 8 MiB: the cache drops only whole folios, of up to 2 MiB.)
    #[test]
    fn residency_is_what_the_page_cache_says() {
        const HALF: u32 = 8 << 20;
        let file = file_on_disk();
        std::fs::write(file.path(), vec![7_u8; 2 * HALF as usize]).unwrap();
        let open = OpenFile::open(file.path(), DirectIo::Off).unwrap();
        assert!(resident(&open, 0, 2 * HALF));
        assert!(resident(&open, 4000, 200));
        evict(&open, HALF.into());
        assert!(resident(&open, 0, HALF / 2));
        assert!(!resident(&open, u64::from(HALF) + (4 << 20), 4096));
        assert!(!resident(&open, 0, 2 * HALF));
        assert!(
            !resident(&open, 2 * u64::from(HALF), 4096),
            "past the end is nowhere"
        );
    }

    /// A file is open twice, as by two datasets. Expectation: both trust it, until a page was missing for one of them. Another
    /// version of the file is another page cache, since its inode may be that of a file that was deleted.
    #[test]
    fn a_miss_ends_the_trust_of_all_who_have_the_file_open() {
        let file = file_on_disk();
        std::fs::write(file.path(), [7; 8192]).unwrap();
        let open = || OpenFile::open(file.path(), DirectIo::Off).unwrap();
        let files = [open(), open()];
        trust(&files[0]);
        forget_faults();
        let now = Tick::now();
        let trusting = |file: &OpenFile| trusted(file, 0, 4096, now);
        assert!(files.iter().all(trusting));
        file.as_file().set_len(4096).unwrap();
        assert!(!trusting(&open()));
        missed(&files[1], 4096, 4096);
        assert!(!files.iter().any(trusting));
    }

    /// A cold file is queried ever less often, yet often enough to notice that it warms up.
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
