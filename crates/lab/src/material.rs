//! The data that a study reads: pattern files that it makes once and keeps, or an existing file or device.
//!
//! Invariant: an existing file is only read; a file that is made gets its name when it is complete.

use crate::error::LabError;
use crate::facts::Place;
use crate::questions::Questions;
use crate::served::{Items, Served};
use ringfetch_command::quantity::{approximate, exact_size, size};
use ringfetch_pattern as pattern;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where data are made, below the given directory.
const DIRECTORY: &str = "ringfetch-lab-data";
/// Seed of made data: the same on every machine.
const SEED: u64 = 42;
const PAGE_BYTES: u64 = 4096;
/// A smaller file says nothing about a device.
const LENGTH_MIN_BYTES: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    /// Below the directory of [`Material::directory`].
    pub(crate) name: String,
    pub(crate) length_bytes: u64,
    /// Seed of the pattern in it; `None`: its bytes are not known.
    pub(crate) seed: Option<u64>,
}

/// What is read.
#[derive(Debug)]
pub(crate) struct Material {
    pub(crate) files: Vec<DataFile>,
    /// The directory of several files.
    pub(crate) directory: PathBuf,
    pub(crate) place: Place,
    pub(crate) is_device: bool,
    /// Of the first file, or the number of the device.
    inode: u64,
    /// The daemon that reads it, for strategies that use one.
    pub(crate) served: Option<Arc<Served>>,
    /// Queries for vectors.
    pub(crate) questions: Option<Questions>,
}

/// Called with the bytes made so far; returning false stops.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(u64) -> bool;

impl DataFile {
    fn found(path: &Path, length_bytes: u64) -> Self {
        Self {
            path: path.to_owned(),
            name: String::new(),
            length_bytes,
            seed: None,
        }
    }
}

impl Material {
    /// One file: the path itself, or one of `size_bytes` made below a directory.
    pub(crate) fn one(path: &Path, size_bytes: u64, progress: Progress<'_>) -> Result<Self, LabError> {
        let meta = metadata(path)?;
        if !meta.is_dir() {
            if !meta.is_file() && !meta.file_type().is_block_device() {
                return Err(usage(
                    path,
                    "is neither a directory, a regular file nor a block device",
                ));
            }
            let end = open(path)?.seek(SeekFrom::End(0));
            let length_bytes = end.map_err(|error| at_path(path, &error))?;
            if length_bytes < LENGTH_MIN_BYTES {
                let (has, least) = (size(length_bytes), size(LENGTH_MIN_BYTES));
                return Err(usage(path, &format!("has {has}: at least {least}")));
            }
            let file = DataFile::found(path, length_bytes);
            return Self::of(vec![file], PathBuf::new(), !meta.is_file());
        }
        if size_bytes < LENGTH_MIN_BYTES || !size_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(LabError::Usage(format!(
                "--size: {size_bytes}: at least {} and a multiple of {PAGE_BYTES}",
                size(LENGTH_MIN_BYTES)
            )));
        }
        let name = format!("blocks-{}.dat", exact_size(size_bytes));
        let write = |part: &Path| pattern::write_blocks(part, SEED, size_bytes, progress);
        let mut material = Self::made(path, &name, ("--size", size_bytes), write)?;
        material.files.iter_mut().for_each(|file| file.seed = Some(SEED));
        material.recognised()
    }

    /// What exists at a path, of any kind and size: only inspected.
    pub(crate) fn found(path: &Path) -> Result<Self, LabError> {
        let meta = metadata(path)?;
        let data = meta.is_file().then(|| DataFile::found(path, meta.len()));
        let is_device = meta.file_type().is_block_device();
        Self::of(data.into_iter().collect(), path.to_owned(), is_device)
    }

    /// One file below a directory, of the length that an option defines, which `write` makes if it is missing.
    pub(crate) fn made(
        path: &Path,
        name: &str,
        (option, bytes): (&str, u64),
        write: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<Self, LabError> {
        let material = Self::found(&whole(path, name, (option, bytes), write)?)?;
        if material.length_bytes() != bytes {
            let made = material.files.first().map_or(path, |file| &file.path);
            return Err(usage(made, "is not a file that this command made; move it away"));
        }
        Ok(material)
    }

    /// `count` files of `file_bytes` each, made below a directory.
    pub(crate) fn many(
        path: &Path,
        count: u64,
        file_bytes: u64,
        progress: Progress<'_>,
    ) -> Result<Self, LabError> {
        // The first two objects of a made directory are always empty and of one byte, so they are not read.
        let skipped = 2;
        let name = format!("objects-{count}x{}", exact_size(file_bytes));
        let bytes = count.saturating_mul(file_bytes);
        let directory = whole(path, &name, ("--bytes-max", bytes), |part| {
            fs::create_dir(part)?;
            pattern::write_objects(part, SEED, count + skipped, file_bytes, file_bytes, progress)?;
            Ok(rustix::fs::syncfs(File::open(part)?)?)
        })?;
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
        Self::of(files, directory, false)?.recognised()
    }

    fn of(files: Vec<DataFile>, directory: PathBuf, is_device: bool) -> Result<Self, LabError> {
        let first = files.first().map_or(directory.as_path(), |file| &file.path);
        let first = open(first)?;
        let meta = first.metadata().map_err(|error| at_path(&directory, &error))?;
        Ok(Self {
            place: Place::of(&first),
            inode: inode(&meta),
            files,
            directory,
            is_device,
            served: None,
            questions: None,
        })
    }

    /// Checks that the first bytes of some files are the pattern's.
    fn recognised(self) -> Result<Self, LabError> {
        for data in self.files.iter().step_by((self.files.len() / 16).max(1)) {
            let Some(seed) = data.seed else { continue };
            let mut found = [0u8; 64];
            let read = open(&data.path)?.read_exact(&mut found);
            read.map_err(|error| at_path(&data.path, &error))?;
            if pattern::first_difference(seed, 0, &found).is_some() {
                return Err(foreign(&data.path));
            }
        }
        Ok(self)
    }

    /// Whether another process reads it, so that its page cache is left alone.
    pub(crate) fn is_looked_at(&self) -> bool {
        let items = self.served.as_ref().map(|served| &served.items);
        items.is_some_and(|items| !matches!(items, Items::Ranges))
    }

    /// Bytes of all files.
    pub(crate) fn length_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.length_bytes).sum()
    }

    /// The share of the bytes that are holes.
    pub(crate) fn holes_share(&self) -> f64 {
        if self.is_device || self.files.is_empty() {
            return 0.0;
        }
        let stored = |file: &DataFile| fs::metadata(&file.path).map_or(0, |meta| meta.blocks() * 512);
        let stored: u64 = self.files.iter().map(stored).sum();
        (1.0 - approximate(stored) / approximate(self.length_bytes().max(1))).max(0.0)
    }

    /// Identifies the data when a run is resumed.
    pub(crate) fn identity(&self) -> String {
        let (files, bytes, inode) = (self.files.len(), self.length_bytes(), self.inode);
        format!("{files} files, {bytes} bytes, inode {inode}")
    }

    /// Refuses data whose first file was replaced or cut since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), LabError> {
        let Some(file) = self.files.first() else {
            return Ok(());
        };
        let now = metadata(&file.path)?;
        if inode(&now) == self.inode && (self.is_device || now.len() == file.length_bytes) {
            return Ok(());
        }
        Err(usage(
            &file.path,
            "changed during the study: its figures would be those of other data",
        ))
    }
}

/// What identifies a file, or a device.
fn inode(meta: &fs::Metadata) -> u64 {
    match meta.file_type().is_block_device() {
        true => meta.rdev(),
        false => meta.ino(),
    }
}

fn metadata(path: &Path) -> Result<fs::Metadata, LabError> {
    fs::metadata(path).map_err(|error| at_path(path, &error))
}

pub(crate) fn open(path: &Path) -> Result<File, LabError> {
    File::open(path).map_err(|error| at_path(path, &error))
}

pub(crate) fn at_path(path: &Path, error: &io::Error) -> LabError {
    LabError::at(format_args!("--path: {}", path.display()), error)
}

fn usage(path: &Path, problem: &str) -> LabError {
    LabError::Usage(format!("--path: {} {problem}", path.display()))
}

/// The error for data with other bytes than the pattern's.
pub(crate) fn foreign(path: &Path) -> LabError {
    usage(path, "does not hold what this command makes; move it away")
}

/// A file or directory below the directory `path`, which `write` makes if it is missing. An unfinished one is
/// removed.
fn whole(
    path: &Path,
    name: &str,
    (option, bytes): (&str, u64),
    write: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<PathBuf, LabError> {
    if !metadata(path)?.is_dir() {
        return Err(usage(
            path,
            "is no directory, and this study makes its data in one",
        ));
    }
    let directory = path.join(DIRECTORY);
    let (made, part) = (directory.join(name), directory.join(format!("{name}.part")));
    // If it exists, the disk may be read-only.
    if made.exists() {
        return Ok(made);
    }
    fs::create_dir_all(&directory).map_err(|error| at_path(&directory, &error))?;
    let lock = open(&directory)?;
    // Not every file system can lock a directory.
    if let Err(TryLockError::WouldBlock) = lock.try_lock() {
        let shown = directory.display();
        let problem = format!("--path: another process makes data in {shown}; try again when it has ended");
        return Err(LabError::Failed(problem));
    }
    if made.exists() {
        return Ok(made);
    }
    room_for(&directory, option, bytes)?;
    let removed = |part: &Path| fs::remove_file(part).or_else(|_| fs::remove_dir_all(part));
    // Left by a run that was killed.
    let _removed = removed(&part);
    pattern::remove_partial_files(&directory);
    let written = write(&part).and_then(|()| fs::rename(&part, &made));
    written.map_err(|error| {
        // The error that led here is the one to report.
        let _removed = removed(&part);
        if error.kind() == io::ErrorKind::Interrupted {
            return LabError::Failed("stopped; no data were made".to_owned());
        }
        at_path(&made, &error)
    })?;
    Ok(made)
}

fn room_for(directory: &Path, option: &str, bytes: u64) -> Result<(), LabError> {
    let system = rustix::fs::statvfs(directory).map_err(|error| at_path(directory, &error.into()))?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    // Leave room for others: a twentieth of the file system, but at most four times the data.
    let twentieth = system.f_blocks.saturating_mul(system.f_frsize) / 20;
    let kept = twentieth.min(bytes.saturating_mul(4));
    if free < bytes.saturating_add(kept) {
        return Err(LabError::Failed(format!(
            "--path: {} has {} free, {} needed, and {} must stay free: see {option}",
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

    /// Next to the test binary: temporary directories are often in memory.
    pub(crate) fn scratch() -> tempfile::TempDir {
        let program = std::env::current_exe().unwrap();
        tempfile::tempdir_in(program.parent().unwrap()).unwrap()
    }

    pub(crate) fn small(directory: &Path) -> Material {
        Material::one(directory, 4 << 20, &mut |_| true).unwrap()
    }

    #[test]
    fn made_data_are_recognised_and_foreign_ones_refused() {
        // Scenario: a file made, reused, overwritten, truncated; a directory without room; many files twice.
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
        // Each names the option that its study has.
        let at = directory.path();
        let huge = Material::one(at, 1 << 55, &mut |_| true).unwrap_err().to_string();
        assert!(huge.contains("free") && huge.ends_with("see --size"), "{huge}");
        let huge = Material::many(at, 1 << 20, 1 << 35, &mut |_| true);
        assert!(huge.unwrap_err().to_string().ends_with("see --bytes-max"));

        let many = || Material::many(directory.path(), 3, 16 << 10, &mut |_| true).unwrap();
        assert_eq!((many().files.len(), many().length_bytes()), (3, 48 << 10));
    }

    #[test]
    fn a_stopped_making_leaves_nothing_under_a_final_name() {
        // Scenario: making is stopped half way, for one file and for many. Expected: an error, nothing else.
        let directory = scratch();
        assert!(Material::one(directory.path(), 8 << 20, &mut |done| done < 2 << 20).is_err());
        assert!(Material::many(directory.path(), 9, 1 << 20, &mut |done| done < 2 << 20).is_err());
        let left = fs::read_dir(directory.path().join(DIRECTORY)).unwrap();
        assert_eq!(left.count(), 0);
    }

    #[test]
    fn what_a_killed_run_left_is_removed_and_what_another_writes_is_not() {
        // Scenario: partial files of a run that was killed and of one that still writes, whose lock it holds.
        // Expected: making data removes the first and leaves the second.
        let directory = scratch();
        let data = directory.path().join(DIRECTORY);
        fs::create_dir(&data).unwrap();
        let [left, written] = ["left", "written"].map(|name| data.join(format!(".ringfetch-{name}.partial")));
        fs::write(&left, "x").unwrap();
        let writer = File::create(&written).unwrap();
        writer.lock().unwrap();
        small(directory.path());
        assert!(!left.exists() && written.exists());
    }

    #[test]
    fn data_that_another_process_makes_are_left_alone() {
        // Scenario: another process makes data in the same directory; it ends. Expected: an error that names the
        // option and the directory, and nothing is made or removed; then the data.
        let directory = scratch();
        let data = directory.path().join(DIRECTORY);
        fs::create_dir_all(data.join("objects-3x16KiB.part")).unwrap();
        let maker = File::open(&data).unwrap();
        maker.lock().unwrap();
        let many = || Material::many(directory.path(), 3, 16 << 10, &mut |_| true);
        let problem = many().unwrap_err().to_string();
        assert!(
            problem.starts_with("--path: ") && problem.contains("another process"),
            "{problem}"
        );
        let left = || {
            fs::read_dir(&data)
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
        };
        assert_eq!(left().collect::<Vec<_>>(), ["objects-3x16KiB.part"]);
        drop(maker);
        many().unwrap();
        assert_eq!(left().collect::<Vec<_>>(), ["objects-3x16KiB"]);
    }

    #[test]
    fn bad_paths_are_named() {
        // Scenario: no such path; a character device; a file too small; invalid sizes. Expected: an error
        // that names the option and, if there is one, the path.
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
