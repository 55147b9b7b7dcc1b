//! The data that a study reads: pattern files that it makes once and keeps, or a file or device that is there; and the
//! page cache above them.
//!
//! Invariant: a file that was there is only read; what is made gets its name when it is whole.

use crate::error::LabError;
use crate::facts::Place;
use crate::quantity::{approximate, exact_size, size};
use crate::questions::Questions;
use crate::served::{Items, Served};
use ringfetch_pattern as pattern;
use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::{self, File};
use std::io::{IoSliceMut, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where made data lies below the directory that was given.
const DIRECTORY: &str = "ringfetch-lab-data";
/// Of made data: it is the same on every machine.
const SEED: u64 = 42;
const PAGE_BYTES: u64 = 4096;
const WARM_CHUNK_BYTES: usize = 1 << 20;
/// Pages that are asked after where the kernel has no cachestat(2).
const SAMPLED_PAGES: u64 = 64;
/// Data with at most so much in memory is cold, with at least so much warm.
pub(crate) const COLD_SHARE_MAX: f64 = 0.02;
pub(crate) const WARM_SHARE_MIN: f64 = 0.98;
/// Below this a file says nothing about a device.
const LENGTH_MIN_BYTES: u64 = 1 << 20;

/// A file of the data.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    /// Below the directory of [`Material::directory`].
    pub(crate) name: String,
    pub(crate) length_bytes: u64,
    /// Of the pattern in it; `None`: its bytes are not known.
    pub(crate) seed: Option<u64>,
}

/// What is read.
#[derive(Debug)]
pub(crate) struct Material {
    pub(crate) files: Vec<DataFile>,
    /// Where several files lie.
    pub(crate) directory: PathBuf,
    pub(crate) place: Place,
    pub(crate) is_device: bool,
    /// The daemon that reads it, for strategies that ask one.
    pub(crate) served: Option<Arc<Served>>,
    /// Of vectors: what they are scored for.
    pub(crate) questions: Option<Questions>,
}

/// Called with bytes made so far; false stops.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(u64) -> bool;

impl Material {
    /// One file: the path itself, or one of `size_bytes` that is made below a directory.
    ///
    /// # Errors
    /// One line that names the option.
    pub(crate) fn one(path: &Path, size_bytes: u64, progress: Progress<'_>) -> Result<Self, LabError> {
        let meta = metadata(path)?;
        if !meta.is_dir() {
            if !meta.is_file() && !meta.file_type().is_block_device() {
                let what = "is neither a directory, a regular file nor a block device";
                return Err(LabError::Usage(format!("--path: {} {what}", path.display())));
            }
            let length_bytes = open(path)?
                .seek(SeekFrom::End(0))
                .map_err(|e| at_path(path, &e))?;
            if length_bytes < LENGTH_MIN_BYTES {
                let (shown, least) = (path.display(), size(LENGTH_MIN_BYTES));
                let problem = format!("--path: {shown} has {}: at least {least}", size(length_bytes));
                return Err(LabError::Usage(problem));
            }
            let file = DataFile {
                path: path.to_owned(),
                name: String::new(),
                length_bytes,
                seed: None,
            };
            return Self::of(vec![file], PathBuf::new(), !meta.is_file());
        }
        if size_bytes < LENGTH_MIN_BYTES || !size_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(LabError::Usage(format!(
                "--size: {size_bytes}: at least {} and a multiple of {PAGE_BYTES}",
                size(LENGTH_MIN_BYTES)
            )));
        }
        let directory = below(path)?;
        let name = format!("blocks-{}.dat", exact_size(size_bytes));
        let made = directory.join(&name);
        if fs::metadata(&made).is_ok_and(|meta| meta.len() != size_bytes) {
            let problem = "is not a file that this command made; move it away";
            return Err(LabError::Usage(format!("--path: {} {problem}", made.display())));
        }
        if !made.exists() {
            room_for(&directory, size_bytes)?;
            pattern::write_blocks(&made, SEED, size_bytes, progress).map_err(|e| at_path(&made, &e))?;
        }
        let file = DataFile {
            path: made,
            name,
            length_bytes: size_bytes,
            seed: Some(SEED),
        };
        Self::of(vec![file], directory, false)
    }

    /// What lies at a path, whatever it is and however large: only looked at.
    ///
    /// # Errors
    /// One line that names the option.
    pub(crate) fn found(path: &Path) -> Result<Self, LabError> {
        let meta = metadata(path)?;
        let data = meta.is_file().then(|| DataFile {
            path: path.to_owned(),
            name: String::new(),
            length_bytes: meta.len(),
            seed: None,
        });
        let is_device = meta.file_type().is_block_device();
        Self::of(data.into_iter().collect(), path.to_owned(), is_device)
    }

    /// One file below a directory, which `write` makes unless it is there, of this length. Nothing is left of one that was
    /// not finished.
    ///
    /// # Errors
    /// One line that names the option.
    pub(crate) fn made(
        path: &Path,
        name: &str,
        bytes: u64,
        write: impl FnOnce(&mut dyn std::io::Write) -> std::io::Result<()>,
    ) -> Result<Self, LabError> {
        if !metadata(path)?.is_dir() {
            let problem = "this study makes its data: name a directory";
            return Err(LabError::Usage(format!("--path: {}: {problem}", path.display())));
        }
        // Where they are already, the disk may be read-only.
        let made = path.join(DIRECTORY).join(name);
        if !made.exists() {
            let directory = below(path)?;
            room_for(&directory, bytes)?;
            let part = made.with_extension("part");
            let written = File::create(&part).and_then(|file| {
                let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
                write(&mut out)?;
                out.into_inner()?.sync_all()?;
                fs::rename(&part, &made)
            });
            if let Err(error) = written {
                // The error that led here is the one to report.
                let _removed = fs::remove_file(&part);
                return Err(at_path(&made, &error));
            }
        }
        let material = Self::found(&made)?;
        if material.length_bytes() != bytes {
            let problem = "is not a file that this command made; move it away";
            return Err(LabError::Usage(format!("--path: {} {problem}", made.display())));
        }
        Ok(material)
    }

    /// `count` files of `file_bytes` each, made below a directory.
    ///
    /// # Errors
    /// One line that names the option.
    pub(crate) fn many(
        path: &Path,
        count: u64,
        file_bytes: u64,
        progress: Progress<'_>,
    ) -> Result<Self, LabError> {
        if !metadata(path)?.is_dir() {
            let problem = "this study reads many files: name a directory";
            return Err(LabError::Usage(format!("--path: {}: {problem}", path.display())));
        }
        let directory = below(path)?.join(format!("objects-{count}x{}", exact_size(file_bytes)));
        // The first two objects of a made directory are always empty and of one byte: they are not read.
        let skipped = 2;
        if !directory.exists() {
            let part = directory.with_extension("part");
            room_for(&below(path)?, count.saturating_mul(file_bytes))?;
            if part.exists() {
                fs::remove_dir_all(&part).map_err(|e| at_path(&part, &e))?;
            }
            fs::create_dir(&part).map_err(|e| at_path(&part, &e))?;
            pattern::write_objects(&part, SEED, count + skipped, file_bytes, file_bytes, progress)
                .map_err(|e| at_path(&part, &e))?;
            let _synced = rustix::fs::syncfs(open(&part)?);
            fs::rename(&part, &directory).map_err(|e| at_path(&directory, &e))?;
        }
        let file = |index| {
            let name = pattern::object_name(index);
            DataFile {
                path: directory.join(&name),
                length_bytes: file_bytes,
                seed: Some(pattern::object_seed(SEED, &name)),
                name,
            }
        };
        let files = (skipped..count + skipped).map(file).collect();
        Self::of(files, directory, false)
    }

    fn of(files: Vec<DataFile>, directory: PathBuf, is_device: bool) -> Result<Self, LabError> {
        let first = files.first().map_or(directory.as_path(), |file| &file.path);
        let material = Self {
            place: Place::of(&open(first)?),
            files,
            directory,
            is_device,
            served: None,
            questions: None,
        };
        material.recognise()?;
        Ok(material)
    }

    /// Whether the first bytes of some files are what was made.
    fn recognise(&self) -> Result<(), LabError> {
        for data in self.files.iter().step_by((self.files.len() / 16).max(1)) {
            let Some(seed) = data.seed else { continue };
            let mut found = [0u8; 64];
            let read = open(&data.path)?.read_exact(&mut found);
            read.map_err(|error| at_path(&data.path, &error))?;
            if pattern::first_difference(seed, 0, &found).is_some() {
                let problem = "does not hold what this command makes; move it away";
                return Err(LabError::Usage(format!(
                    "--path: {} {problem}",
                    data.path.display()
                )));
            }
        }
        Ok(())
    }

    /// Whether somebody else reads it and its page cache is left alone.
    pub(crate) fn is_looked_at(&self) -> bool {
        let items = self.served.as_ref().map(|served| &served.items);
        items.is_some_and(|items| !matches!(items, Items::Ranges))
    }

    /// Bytes of all files.
    pub(crate) fn length_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.length_bytes).sum()
    }

    /// The share of the bytes that have no blocks on a device.
    pub(crate) fn holes_share(&self) -> f64 {
        if self.is_device || self.files.is_empty() {
            return 0.0;
        }
        let stored = |file: &DataFile| fs::metadata(&file.path).map_or(0, |meta| meta.blocks() * 512);
        let stored: u64 = self.files.iter().map(stored).sum();
        (1.0 - approximate(stored) / approximate(self.length_bytes().max(1))).max(0.0)
    }

    /// Which data this is, to recognise them when a run is resumed.
    pub(crate) fn identity(&self) -> String {
        let first = self.files.first();
        let meta = first.and_then(|file| fs::metadata(&file.path).ok());
        let inode = meta.map_or(0, |meta| if self.is_device { meta.rdev() } else { meta.ino() });
        format!(
            "{} files, {} bytes, inode {inode}",
            self.files.len(),
            self.length_bytes()
        )
    }

    /// Drops the data from the page cache, those that were just written too.
    pub(crate) fn make_cold(&self, files: usize) -> Result<(), LabError> {
        for data in self.files.iter().take(files) {
            let file = open(&data.path)?;
            // A device node may take no sync: then it is reported that it does not get cold.
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
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(at_path(&data.path, &error)),
                }
            }
        }
        Ok(())
    }

    /// The share of the first `window_bytes` of each file that is in the page cache: by cachestat(2), else by reads that
    /// must not wait, of a sample. `None`: neither says.
    pub(crate) fn resident_share(&self, files: usize, window_bytes: u64) -> Option<f64> {
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

/// Asking brings in what was not there, so it is asked before the data are evicted once more.
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

fn metadata(path: &Path) -> Result<fs::Metadata, LabError> {
    fs::metadata(path).map_err(|error| at_path(path, &error))
}

fn open(path: &Path) -> Result<File, LabError> {
    File::open(path).map_err(|error| at_path(path, &error))
}

fn at_path(path: &Path, error: &std::io::Error) -> LabError {
    LabError::at(format_args!("--path: {}", path.display()), error)
}

fn below(path: &Path) -> Result<PathBuf, LabError> {
    let directory = path.join(DIRECTORY);
    fs::create_dir_all(&directory).map_err(|error| at_path(&directory, &error))?;
    Ok(directory)
}

fn room_for(directory: &Path, bytes: u64) -> Result<(), LabError> {
    let system = rustix::fs::statvfs(directory).map_err(|error| at_path(directory, &error.into()))?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    // What else lives there needs room, too: a twentieth of it all, of little data only some times as much.
    let twentieth = system.f_blocks.saturating_mul(system.f_frsize) / 20;
    let kept = twentieth.min(bytes.saturating_mul(4));
    if free < bytes.saturating_add(kept) {
        return Err(LabError::Failed(format!(
            "--path: {} has {} free, {} are needed, and {} are to stay free: see --size",
            directory.display(),
            size(free),
            size(bytes),
            size(kept)
        )));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Beside the test's program: temporary directories are often memory.
    pub(crate) fn scratch() -> tempfile::TempDir {
        let program = std::env::current_exe().unwrap();
        tempfile::tempdir_in(program.parent().unwrap()).unwrap()
    }

    pub(crate) fn small(directory: &Path) -> Material {
        Material::one(directory, 4 << 20, &mut |_| true).unwrap()
    }

    #[test]
    fn made_data_are_recognised_and_foreign_ones_refused() {
        // Scenario: a file made, used again, overwritten, cut short; a directory without room; many files twice.
        // Expected: accepted twice, then refused with the option and the path.
        let directory = scratch();
        let first = small(directory.path()).identity();
        assert_eq!(small(directory.path()).identity(), first);
        let path = small(directory.path()).files[0].path.clone();
        let again = || Material::one(directory.path(), 4 << 20, &mut |_| true);
        fs::write(&path, vec![7; 4 << 20]).unwrap();
        let problem = again().unwrap_err().to_string();
        assert!(
            problem.contains("--path") && problem.contains("blocks-4MiB.dat"),
            "{problem}"
        );
        fs::write(&path, b"short").unwrap();
        assert!(again().is_err());
        let huge = Material::one(directory.path(), 1 << 55, &mut |_| true);
        assert!(huge.unwrap_err().to_string().contains("free"));

        let many = || Material::many(directory.path(), 3, 16 << 10, &mut |_| true).unwrap();
        assert_eq!((many().files.len(), many().length_bytes()), (3, 48 << 10));
    }

    #[test]
    fn a_stopped_making_leaves_nothing_under_a_final_name() {
        // Scenario: making is stopped half way, for one file and for many. Expected: an error, no file, no directory.
        let directory = scratch();
        assert!(Material::one(directory.path(), 8 << 20, &mut |done| done < 2 << 20).is_err());
        assert!(Material::many(directory.path(), 9, 1 << 20, &mut |done| done < 2 << 20).is_err());
        let left: Vec<String> = fs::read_dir(directory.path().join(DIRECTORY))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        assert_eq!(left, ["objects-9x1MiB.part"]);
    }

    #[test]
    #[ignore = "needs a disk"]
    fn files_made_warm_and_cold_are_recognised_as_such() {
        // Scenario: data just written, evicted, half of it warmed, all of it. Expected: the share in memory follows.
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

    #[test]
    fn bad_paths_are_named() {
        // Scenario: no such path; a character device; a file too small; sizes that make no file.
        // Expected: an error that names the option and, where it is one, the path.
        let directory = scratch();
        let tiny = directory.path().join("tiny");
        fs::write(&tiny, b"x").unwrap();
        for path in [Path::new("/no/such"), Path::new("/dev/null"), &tiny] {
            let problem = Material::one(path, 1 << 20, &mut |_| true)
                .unwrap_err()
                .to_string();
            assert!(problem.starts_with("--path"), "{problem}");
            assert!(problem.contains(&path.display().to_string()), "{problem}");
        }
        let odd = Material::one(directory.path(), (1 << 20) + 1, &mut |_| true);
        assert!(odd.unwrap_err().to_string().starts_with("--size"));
        assert!(Material::many(&tiny, 1, 1, &mut |_| true).is_err());
    }
}
