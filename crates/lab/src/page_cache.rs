//! The page cache above a study's data: drops, fills and queries it.

use crate::error::LabError;
use crate::material::{Material, at_path, open};
use crate::setup::Heat;
use ringfetch_command::quantity::approximate;
use ringfetch_engine::probe::resident_pages;
use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::{self, ErrorKind, IoSliceMut};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGE_BYTES: u64 = 4096;
const WARM_CHUNK_BYTES: usize = 1 << 20;
/// Pages sampled if the kernel has no cachestat(2).
const SAMPLED_PAGES: u64 = 64;
/// Data with at most this share in memory are cold; with at least [`WARM_SHARE_MIN`], warm.
pub(crate) const COLD_SHARE_MAX: f64 = 0.02;
pub(crate) const WARM_SHARE_MIN: f64 = 0.98;

/// Counts the pages in memory of a file's first bytes. Tests have another one than cachestat(2).
pub(crate) type Counted = fn(&File, u64) -> io::Result<u64>;
pub(crate) const CACHESTAT: Counted = |file, bytes| resident_pages(file, bytes);

impl Material {
    /// Prepares the page cache for a step, and returns the share of the bytes to read that it had then. `None`: not known.
    pub(crate) fn prepare(
        &self,
        heat: Heat,
        (files, window_bytes): (usize, u64),
        counted: Counted,
        stop: &AtomicBool,
    ) -> Result<Option<f64>, LabError> {
        let share = || self.resident_share(files, window_bytes, counted, heat != Heat::AsFound);
        match heat {
            Heat::Direct | Heat::Cold => {
                self.make_cold(files)?;
                let found = share();
                // Samples are in memory now.
                self.make_cold(files)?;
                Ok(found)
            }
            Heat::Warm => {
                if share() != Some(1.0) {
                    self.make_warm(files, window_bytes, stop)?;
                }
                Ok(share())
            }
            Heat::AsFound => Ok(share()),
        }
    }

    /// Drops the data from the page cache, including data just written.
    pub(crate) fn make_cold(&self, files: usize) -> Result<(), LabError> {
        for data in self.files.iter().take(files) {
            let file = open(&data.path)?;
            // A device node may refuse the sync: then the report says that it does not get cold.
            let _synced = rustix::fs::fdatasync(&file);
            let _advised = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        }
        Ok(())
    }

    /// Reads the first `window_bytes` of each file into the page cache.
    pub(crate) fn make_warm(
        &self,
        files: usize,
        window_bytes: u64,
        stop: &AtomicBool,
    ) -> Result<(), LabError> {
        let mut chunk = vec![0; WARM_CHUNK_BYTES];
        for data in self.files.iter().take(files) {
            let (file, mut read) = (open(&data.path)?, 0);
            while read < data.length_bytes.min(window_bytes) && !stop.load(Ordering::Relaxed) {
                match file.read_at(&mut chunk, read) {
                    Ok(0) => break,
                    Ok(bytes) => read += bytes as u64,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(at_path(&data.path, &error)),
                }
            }
        }
        Ok(())
    }

    /// The share of the first `window_bytes` of each file that is in the page cache: by cachestat(2), else, where that does
    /// no harm, by sample reads. `None`: neither works.
    fn resident_share(
        &self,
        files: usize,
        window_bytes: u64,
        counted: Counted,
        may_read: bool,
    ) -> Option<f64> {
        if self.place.is_overlay {
            return None;
        }
        let (mut resident, mut asked) = (0.0, 0.0);
        for data in self.files.iter().take(files) {
            let file = File::open(&data.path).ok()?;
            let window = data.length_bytes.min(window_bytes);
            let pages = approximate(window.div_ceil(PAGE_BYTES).max(1));
            let share = match counted(&file, window) {
                Ok(found) => approximate(found) / pages,
                Err(_) if may_read => sampled_share(&file, window)?,
                Err(_) => return None,
            };
            resident += share.min(1.0) * pages;
            asked += pages;
        }
        (asked > 0.0).then(|| resident / asked)
    }
}

/// Samples residency by reads that must not wait. They start to read what is missing (TRAPS 16): it is in memory at the
/// end.
fn sampled_share(file: &File, window_bytes: u64) -> Option<f64> {
    // No page beside the sampled ones is read.
    let _advised = rustix::fs::fadvise(file, 0, None, Advice::Random);
    let pages = (window_bytes / PAGE_BYTES).max(1);
    let (sampled, mut resident, mut missed) = (pages.min(SAMPLED_PAGES), 0, Vec::new());
    for number in 0..sampled {
        // Each from another part: the second look at a page would find the first one's read.
        let part = pages * number / sampled..pages * (number + 1) / sampled;
        let (mut byte, offset) = ([0u8], fastrand::u64(part) * PAGE_BYTES);
        let mut place = [IoSliceMut::new(&mut byte)];
        match rustix::io::preadv2(file, &mut place, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => resident += 1,
            Err(Errno::AGAIN) => missed.push(offset),
            Err(_) => return None,
        }
    }
    for offset in missed {
        // A page cannot be evicted while it is being read.
        let _read = file.read_at(&mut [0u8], offset);
    }
    Some(approximate(resident) / approximate(sampled))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::tests::{scratch, small};
    use std::time::{Duration, Instant};

    #[test]
    fn an_overlay_hides_what_is_in_memory() {
        // Scenario: data that are in the page cache, as if on overlayfs. Expected: not known, rather than nothing.
        let directory = scratch();
        let mut material = small(directory.path());
        material.place.is_overlay = true;
        assert_eq!(material.resident_share(1, 4 << 20, CACHESTAT, true), None);
    }

    #[test]
    #[ignore = "needs a disk"]
    fn what_was_sampled_is_evicted_again() {
        // Scenario: files of 16 KiB and of 4 MiB on a kernel without cachestat(2), to be read cold, directly, as found, and warm.
        // Expected: nothing and everything in memory, and known as that; as found, nothing is read, so it is not known.
        let directory = scratch();
        let short = Material::many(directory.path(), 3, 16 << 10, &mut |_| true).unwrap();
        let without: Counted = |_, _| Err(Errno::NOSYS.into());
        for (material, files, bytes) in [(&small(directory.path()), 1, 4 << 20), (&short, 3, 16 << 10)] {
            let prepared = |heat| {
                let share = material.prepare(heat, (files, bytes), without, &AtomicBool::new(false));
                let each = material.files.iter().take(files);
                let pages = each.map(|data| resident_pages(File::open(&data.path).unwrap(), bytes).unwrap());
                (share.unwrap(), pages.sum::<u64>())
            };
            for heat in [Heat::Cold, Heat::Direct] {
                // Again, since the kernel keeps what somebody uses at that moment.
                let deadline = Instant::now() + Duration::from_secs(30);
                loop {
                    let (share, pages) = prepared(heat);
                    if pages == 0 && share.is_some_and(|share| share <= COLD_SHARE_MAX) {
                        break;
                    }
                    assert!(Instant::now() < deadline, "{heat:?}: {share:?} {pages}");
                }
            }
            assert_eq!(prepared(Heat::AsFound), (None, 0));
            assert_eq!(
                prepared(Heat::Warm),
                (Some(1.0), files as u64 * bytes / PAGE_BYTES)
            );
        }
    }

    #[test]
    #[ignore = "needs a disk"]
    fn files_made_warm_and_cold_are_recognised_as_such() {
        // Scenario: data just written, evicted, half of it warmed, all of it. Expected: the resident share
        // follows.
        let directory = scratch();
        let material = small(directory.path());
        let share = || {
            material
                .resident_share(1, 4 << 20, CACHESTAT, true)
                .expect("cachestat(2) or RWF_NOWAIT")
        };
        // Again, since the kernel keeps what somebody uses at that moment.
        let make_cold = || {
            let deadline = Instant::now() + Duration::from_secs(30);
            loop {
                material.make_cold(1).unwrap();
                if share() <= COLD_SHARE_MAX {
                    break;
                }
                assert!(Instant::now() < deadline, "{}", share());
            }
        };
        make_cold();
        let stop = AtomicBool::new(false);
        make_cold();
        let random = |file| rustix::fs::fadvise(file, 0, None, Advice::Random);
        let half = File::open(&material.files[0].path).unwrap();
        random(&half).unwrap();
        half.read_exact_at(&mut vec![0; 2 << 20], 0).unwrap();
        assert!((0.45..0.75).contains(&share()), "{}", share());
        material.make_warm(1, 4 << 20, &stop).unwrap();
        assert!(share() >= WARM_SHARE_MIN, "{}", share());
    }
}
