//! The page cache above a study's data: drops, fills and queries it.

use crate::error::LabError;
use crate::material::{Material, at_path, open};
use ringfetch_command::quantity::approximate;
use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::{ErrorKind, IoSliceMut};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGE_BYTES: u64 = 4096;
const WARM_CHUNK_BYTES: usize = 1 << 20;
/// Pages sampled if the kernel has no cachestat(2).
const SAMPLED_PAGES: u64 = 64;
/// Data with at most this share in memory are cold; with at least [`WARM_SHARE_MIN`], warm.
pub(crate) const COLD_SHARE_MAX: f64 = 0.02;
pub(crate) const WARM_SHARE_MIN: f64 = 0.98;

impl Material {
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

    /// The share of the first `window_bytes` of each file that is in the page cache: by cachestat(2), else by
    /// sample reads that must not wait. `None`: neither works.
    pub(crate) fn resident_share(&self, files: usize, window_bytes: u64) -> Option<f64> {
        if self.place.is_overlay {
            return None;
        }
        let (mut resident, mut asked) = (0.0, 0.0);
        for data in self.files.iter().take(files) {
            let file = File::open(&data.path).ok()?;
            let window = data.length_bytes.min(window_bytes);
            let pages = approximate(window.div_ceil(PAGE_BYTES).max(1));
            let share = match ringfetch_engine::probe::resident_pages(&file, window) {
                Ok(found) => approximate(found) / pages,
                Err(_) => sampled_share(&file, window)?,
            };
            resident += share.min(1.0) * pages;
            asked += pages;
        }
        (asked > 0.0).then(|| resident / asked)
    }
}

/// Samples residency by reads, which start to fetch missing pages: so the data must be evicted again
/// afterwards.
fn sampled_share(file: &File, window_bytes: u64) -> Option<f64> {
    let (pages, mut resident) = ((window_bytes / PAGE_BYTES).max(1), 0);
    for _ in 0..SAMPLED_PAGES {
        let (mut byte, offset) = ([0u8], fastrand::u64(..pages) * PAGE_BYTES);
        let mut place = [IoSliceMut::new(&mut byte)];
        match rustix::io::preadv2(file, &mut place, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => resident += 1,
            Err(Errno::AGAIN) => {}
            Err(_) => return None,
        }
    }
    Some(approximate(resident) / approximate(SAMPLED_PAGES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::tests::{scratch, small};

    #[test]
    fn an_overlay_hides_what_is_in_memory() {
        // Scenario: data that are in the page cache, as if on overlayfs. Expected: not known, rather than nothing.
        let directory = scratch();
        let mut material = small(directory.path());
        material.place.is_overlay = true;
        assert_eq!(material.resident_share(1, 4 << 20), None);
    }

    #[test]
    #[ignore = "needs a disk"]
    fn files_made_warm_and_cold_are_recognised_as_such() {
        // Scenario: data just written, evicted, half of it warmed, all of it. Expected: the resident share
        // follows.
        let directory = scratch();
        let material = small(directory.path());
        material.make_cold(1).unwrap();
        let share = || {
            material
                .resident_share(1, 4 << 20)
                .expect("cachestat(2) or RWF_NOWAIT")
        };
        assert!(share() <= COLD_SHARE_MAX, "{}", share());
        let stop = AtomicBool::new(false);
        material.make_cold(1).unwrap();
        let random = |file| rustix::fs::fadvise(file, 0, None, Advice::Random);
        let half = File::open(&material.files[0].path).unwrap();
        random(&half).unwrap();
        half.read_exact_at(&mut vec![0; 2 << 20], 0).unwrap();
        assert!((0.45..0.75).contains(&share()), "{}", share());
        material.make_warm(1, 4 << 20, &stop).unwrap();
        assert!(share() >= WARM_SHARE_MIN, "{}", share());
    }
}
