//! The file or device that is calibrated, and the page cache above it: what may be measured here, and how it is made
//! cold and warm.
//!
//! Invariant: a step's dataset is opened for it and dropped after it, for the kernel keeps the pages of a mapping
//! whatever it is told. Whether pages are resident is asked by reads that must not wait (RWF_NOWAIT), of a sample.
//! Absent: directories of objects; one large file of theirs tells the same about the device.

use crate::outcome::Failure;
use crate::quantity::size;
use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, PartialTail};
use ringfetch_host::View;
use ringfetch_host::block::Device;
use ringfetch_host::cgroup::Cgroup;
use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Below this a file is over before a step is.
const LENGTH_MIN_BYTES: u64 = 16 << 20;
/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of linux/magic.h.
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];
const PAGE_BYTES: u64 = 4096;
/// Pages asked after. One of them found resident is 1.6 %.
const SAMPLED_PAGES: u64 = 64;
/// A file with at most so much left in memory is cold, one with at least so much is warm.
pub(super) const COLD_SHARE_MAX: f64 = 0.02;
pub(super) const WARM_SHARE_MIN: f64 = 0.98;
/// What is warmed for the warm steps, at most: beyond the CPU's caches, and read in a second.
const WARM_WINDOW_BYTES_MAX: u64 = 256 << 20;
const WARM_CHUNK_BYTES: usize = 1 << 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) path: PathBuf,
    file: File,
    pub(super) length_bytes: u64,
    pub(super) block_bytes: u32,
    pub(super) is_device: bool,
    /// What the block layer says; `None` where there is no single device beneath.
    pub(super) device: Option<Device>,
    /// Whether it takes O_DIRECT, and why or why not.
    pub(super) direct: bool,
    pub(super) direct_reason: String,
    /// Memory that the page cache could grow to, if that is known.
    pub(super) memory_bytes: Option<u64>,
    /// Share of the file that has no blocks on the device: read from nowhere.
    pub(super) holes_share: f64,
}

impl Target {
    /// Opens the path and finds out whether it can be calibrated.
    ///
    /// # Errors
    /// One line that names what is wrong with it and what would do.
    pub(super) fn open(path: &Path, block_bytes: u32) -> Result<Self, Failure> {
        let shown = path.display();
        let found = std::fs::metadata(path);
        if found.as_ref().is_ok_and(std::fs::Metadata::is_dir) {
            return Err(Failure::Failed(format!(
                "{shown} is a directory: name one file or block device; for objects, the largest file among them"
            )));
        }
        if let Ok(length) = found.as_ref().map(std::fs::Metadata::len)
            && found.as_ref().is_ok_and(std::fs::Metadata::is_file)
        {
            check_length(path, length)?;
        }
        let dataset = open_dataset(path, block_bytes, true)?;
        let length_bytes = dataset.length_bytes();
        check_length(path, length_bytes)?;
        let opened = |error: std::io::Error| Failure::Failed(format!("{shown}: {error}"));
        let file = File::open(path).map_err(opened)?;
        let system = rustix::fs::fstatfs(&file).map_err(|errno| opened(errno.into()))?;
        let meta = file.metadata().map_err(opened)?;
        let is_device = !meta.is_file();
        let in_memory = u64::try_from(system.f_type).is_ok_and(|kind| MEMORY_FILE_SYSTEMS.contains(&kind));
        if in_memory && !is_device {
            return Err(Failure::Failed(format!(
                "{shown} is on tmpfs: memory has no cold reads and no queue to find the depth of; name a file on the \
                 device in question"
            )));
        }
        let holes_share = if is_device {
            0.0
        } else {
            let stored = crate::quantity::approximate(meta.blocks().saturating_mul(512));
            (1.0 - stored / crate::quantity::approximate(length_bytes)).max(0.0)
        };
        if holes_share > 0.5 {
            return Err(Failure::Failed(format!(
                "{shown} is mostly holes, which are read from nowhere: name a file that was written (`ringfetch dataset \
                 make blocks` makes one)"
            )));
        }
        // What was written and not yet stored cannot be evicted. It may take no sync (a device node): then it is told
        // that it does not get cold.
        let _synced = rustix::fs::fdatasync(&file);
        let _advised = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        let view = View::real();
        Ok(Self {
            path: path.to_owned(),
            length_bytes,
            block_bytes,
            is_device,
            device: Device::of_file(&file),
            direct: dataset.direct().direct,
            direct_reason: dataset.direct().reason.clone(),
            memory_bytes: Cgroup::of_this_process(&view).available_bytes(&view),
            holes_share,
            file,
        })
    }

    /// Whether all of it can be in memory at once; `false` where that is not known.
    pub(super) fn fits_memory(&self) -> bool {
        self.memory_bytes
            .is_some_and(|memory| self.length_bytes <= memory)
    }

    /// A dataset for one step.
    pub(super) fn dataset(&self, direct: bool) -> Result<Arc<Dataset>, Failure> {
        open_dataset(&self.path, self.block_bytes, direct).map(Arc::new)
    }

    /// Drops the file's pages from the page cache. Returns the share that is still there, if that can be asked.
    pub(super) fn evict(&self) -> Option<f64> {
        let drop_pages = || {
            let _advised = rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed);
        };
        drop_pages();
        let left = self.resident_share(self.length_bytes);
        // Asking reads what was not there.
        drop_pages();
        left
    }

    /// The share of the first `window_bytes` that is in the page cache. `None`: the file system does not tell.
    pub(super) fn resident_share(&self, window_bytes: u64) -> Option<f64> {
        let pages = (window_bytes / PAGE_BYTES).max(1);
        let mut resident = 0;
        for _ in 0..SAMPLED_PAGES {
            let (mut byte, offset) = ([0u8], fastrand::u64(..pages) * PAGE_BYTES);
            let mut place = [IoSliceMut::new(&mut byte)];
            match rustix::io::preadv2(&self.file, &mut place, offset, ReadWriteFlags::NOWAIT) {
                Ok(_) => resident += 1,
                Err(Errno::AGAIN) => {}
                Err(_) => return None,
            }
        }
        Some(crate::quantity::approximate(resident) / crate::quantity::approximate(SAMPLED_PAGES))
    }

    /// Reads the beginning of the file into the page cache until `until`, or `stop` says so. Returns how many bytes are
    /// there: a whole number of blocks and pages.
    pub(super) fn warm(&self, until: Instant, stop: impl Fn() -> bool) -> Result<u64, Failure> {
        let window = self.length_bytes.min(WARM_WINDOW_BYTES_MAX);
        let mut chunk = vec![0; WARM_CHUNK_BYTES];
        let mut warmed = 0;
        while warmed < window && Instant::now() < until && !stop() {
            match self.file.read_at(&mut chunk, warmed) {
                Ok(0) => break,
                Ok(read) => warmed += read as u64,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::Failed(format!("{}: {error}", self.path.display()))),
            }
        }
        let whole = PAGE_BYTES.max(u64::from(self.block_bytes));
        Ok(warmed.min(window) / whole * whole)
    }
}

fn check_length(path: &Path, length_bytes: u64) -> Result<(), Failure> {
    let shown = path.display();
    if length_bytes == 0 {
        return Err(Failure::Failed(format!(
            "{shown} is empty: name a file of at least {}",
            size(LENGTH_MIN_BYTES)
        )));
    }
    if length_bytes < LENGTH_MIN_BYTES {
        return Err(Failure::Failed(format!(
            "{shown} has {}, too little to measure: name a file of at least {}, better one larger than memory",
            size(length_bytes),
            size(LENGTH_MIN_BYTES)
        )));
    }
    Ok(())
}

fn open_dataset(path: &Path, block_bytes: u32, direct: bool) -> Result<Dataset, Failure> {
    let spec = DatasetSpec {
        name: "calibrated".to_owned(),
        paths: vec![path.to_owned()],
        kind: KindSpec::Blocks {
            block_bytes,
            partial_tail: PartialTail::Ignore,
        },
        direct_io: if direct {
            DirectIo::Preferred
        } else {
            DirectIo::Off
        },
    };
    Dataset::open(&spec).map_err(|error| Failure::Failed(error.problem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn a_file_is_made_warm_and_cold() {
        // Scenario: 16 MiB just written into the build's directory, warmed, then evicted.
        // Expected: all of it resident, then next to nothing; or no answer at all where the file system gives none.
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all(&vec![7; 16 << 20]).unwrap();
        let target = match Target::open(file.path(), 4096) {
            Ok(target) => target,
            Err(Failure::Failed(message)) if message.contains("tmpfs") => return,
            Err(other) => panic!("{other:?}"),
        };
        let until = Instant::now() + std::time::Duration::from_secs(60);
        assert_eq!(target.warm(until, || false).unwrap(), 16 << 20);
        if let Some(share) = target.resident_share(16 << 20) {
            assert!(share >= WARM_SHARE_MIN, "{share}");
            let left = target.evict().unwrap();
            assert!(left <= COLD_SHARE_MAX, "{left}");
        }
        assert_eq!(target.warm(Instant::now(), || false).unwrap(), 0);
    }
}
