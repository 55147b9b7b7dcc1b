//! The demo that runs without a configuration: creates a directory of self-describing data once, and prints
//! commands to try.
//!
//! The data is made in a directory of its own within that one, and moved out of it once all is made. So only what is in
//! there is ever removed; other files of these names stay, and are an error. The bytes are those of `pattern` with
//! seed [`SEED`], so any client can check them.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use ringfetch_command::table::Table;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::dataset::{Dataset, Dtype, Kind, Layout};
use ringfetch_engine::engine::BackendStatus;
use ringfetch_pattern as pattern;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use serde_yaml::{Mapping, Value};

use crate::config::GRPC_PORT;
use crate::listener::Addresses;

/// Default of `--demo-dir`.
pub const DIRECTORY_DEFAULT: &str = "ringfetch-demo";
/// Seed of all demo data.
pub const SEED: u64 = 42;

const BLOCKS_BYTES: u64 = 128 << 20;
const BLOCK_BYTES: u32 = 4096;
const VECTORS: u64 = 65_536;
const VECTOR_DIM: u32 = 128;
const OBJECTS: u64 = 200;
/// Shortest and longest object, but for the first two: the defaults of `ringfetch dataset make` and `verify`, so that
/// the demo is verified without further flags.
pub const OBJECT_BYTES_MIN: u64 = 1 << 10;
/// See [`OBJECT_BYTES_MIN`].
pub const OBJECT_BYTES_MAX: u64 = 64 << 10;

const BLOCKS_NAME: &str = "blocks.bin";
const VECTORS_NAME: &str = "vectors.npy";
const OBJECTS_NAME: &str = "objects";
const NAMES: [&str; 3] = [BLOCKS_NAME, VECTORS_NAME, OBJECTS_NAME];
/// The directory in which the data is made. Who has locked it owns all that is in it.
const PARTIAL_NAME: &str = ".ringfetch-demo-partial";
/// In there once all is made and on the disk: what is no longer in there has been moved. Becomes [`COMPLETE_NAME`].
const READY_NAME: &str = "ready";
/// Exists once the data is complete.
const COMPLETE_NAME: &str = ".ringfetch-demo-complete";
/// Each one that is in vain has seen another process end.
const LOCK_ATTEMPTS: u32 = 8;

/// Why there is no demo data. The message names the directory and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("demo directory {}: {problem}", .directory.display())]
pub struct DemoError {
    /// The directory.
    pub directory: PathBuf,
    /// What is wrong and how to fix it.
    pub problem: String,
    /// Whether it passes by itself.
    pub is_temporary: bool,
}

/// The demo's configuration: its `datasets`; everything else is default.
pub fn dataset_list(directory: &Path) -> Value {
    let entry = |name: &str, kind: &str, file: &str| {
        let path = directory.join(file).to_string_lossy().into_owned();
        let mut entry = Mapping::new();
        for (key, value) in [("name", name), ("kind", kind), ("path", &path)] {
            entry.insert(key.into(), value.into());
        }
        entry
    };
    let mut blocks = entry("blocks", "blocks", BLOCKS_NAME);
    blocks.insert("block_bytes".into(), BLOCK_BYTES.into());
    let vectors = entry("vectors", "vectors", VECTORS_NAME);
    let objects = entry("objects", "objects", OBJECTS_NAME);
    let datasets: Vec<Value> = [blocks, vectors, objects]
        .into_iter()
        .map(Value::Mapping)
        .collect();
    Value::Mapping(Mapping::from_iter([("datasets".into(), datasets.into())]))
}

/// Whether the data is there.
pub fn is_complete(directory: &Path) -> bool {
    directory.join(COMPLETE_NAME).exists()
}

/// Makes the data unless it exists. Blocking; shows progress on a terminal.
///
/// # Errors
/// The directory cannot be written, contains other files of these names, or is being created by another
/// process, or the disk is too full.
pub fn prepare(directory: &Path) -> Result<(), DemoError> {
    let needed = total_bytes();
    let demo = Demo {
        directory,
        partial: directory.join(PARTIAL_NAME),
        needed,
    };
    demo.prepare(&mut || {}, &mut |partial| make(partial, needed))
}

struct Demo<'a> {
    directory: &'a Path,
    partial: PathBuf,
    needed: u64,
}

impl Demo<'_> {
    fn fail(&self, problem: String) -> DemoError {
        DemoError {
            directory: self.directory.to_owned(),
            problem,
            is_temporary: false,
        }
    }

    fn errno(&self, what: &str, error: &io::Error) -> DemoError {
        self.fail(format!(
            "{what}: {error}; choose another one with --demo-dir, or serve your own data with --config"
        ))
    }

    /// `opened` is called before each attempt to lock; `make` fills the directory that it is given.
    fn prepare(
        &self,
        opened: &mut dyn FnMut(),
        make: &mut dyn FnMut(&Path) -> io::Result<()>,
    ) -> Result<(), DemoError> {
        let Some(locked) = self.lock(opened)? else {
            return Ok(());
        };
        let placed = |name| is_in(self.directory, name);
        let made = |name| is_in(&self.partial, name);
        // Where a name is missing, somebody has removed it since: all of it is made again.
        let is_ready = made(READY_NAME) && NAMES.into_iter().all(|name| placed(name) || made(name));
        let pending = NAMES.into_iter().filter(|name| !is_ready || made(name));
        let pending: Vec<&str> = pending.collect();
        let check_names = || match pending.iter().find(|name| placed(name)) {
            Some(name) => Err(self.foreign(name)),
            None => Ok(()),
        };
        if !is_ready {
            let what = format!("{PARTIAL_NAME} is incomplete and cannot be removed");
            self.empty().map_err(|error| self.errno(&what, &error))?;
            check_names()?;
            self.check_space()?;
            let outcome = make(&self.partial).and_then(|()| {
                // Objects are not synced as they are written. What is moved later is not on the disk before this.
                rustix::fs::syncfs(&locked)?;
                File::create_new(self.partial.join(READY_NAME)).map(drop)
            });
            outcome.map_err(|error| self.refused(self.errno("writing failed", &error)))?;
        }
        check_names()?;
        let moves = pending.iter().map(|&name| (name, name));
        for (from, to) in moves.chain([(READY_NAME, COMPLETE_NAME)]) {
            match move_new(&self.partial.join(from), &self.directory.join(to)) {
                Ok(()) => {}
                Err(Errno::EXIST) => return Err(self.foreign(to)),
                Err(error) => return Err(self.errno("cannot be completed", &error.into())),
            }
        }
        self.discard();
        Ok(())
    }

    /// Makes and locks the directory for the data; `None` if the data is complete.
    fn lock(&self, opened: &mut dyn FnMut()) -> Result<Option<File>, DemoError> {
        let unwritable = |error: io::Error| self.errno("cannot be written", &error);
        for _ in 0..LOCK_ATTEMPTS {
            if is_complete(self.directory) {
                return Ok(None);
            }
            std::fs::create_dir_all(self.directory).map_err(|error| self.errno("cannot be made", &error))?;
            match std::fs::create_dir(&self.partial) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(unwritable(error)),
                Ok(()) | Err(_) => {}
            }
            // What a link leads to is not ours, nor is a file.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let locked = match rustix::fs::open(&self.partial, flags, Mode::empty()) {
                Ok(descriptor) => File::from(descriptor),
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(unwritable(error.into())),
            };
            opened();
            match locked.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(self.busy()),
                Err(TryLockError::Error(error)) => return Err(self.errno("cannot be locked", &error)),
            }
            let (ours, there) = (locked.metadata(), self.partial.symlink_metadata());
            let (ours, there) = (ours.map_err(unwritable)?, there.ok());
            // The process that had the lock has removed it in the meantime.
            if there.is_none_or(|there| (there.dev(), there.ino()) != (ours.dev(), ours.ino())) {
                continue;
            }
            if is_complete(self.directory) {
                self.discard();
            } else {
                return Ok(Some(locked));
            }
        }
        Err(self.busy())
    }

    fn busy(&self) -> DemoError {
        let problem = "another process is making it; wait for that one, or use --demo-dir";
        DemoError {
            is_temporary: true,
            ..self.fail(problem.to_owned())
        }
    }

    fn foreign(&self, name: &str) -> DemoError {
        self.refused(self.fail(format!(
            "it has {name}, which was not made by this demo; choose another one with --demo-dir"
        )))
    }

    fn check_space(&self) -> Result<(), DemoError> {
        let Ok(space) = rustix::fs::statvfs(self.directory) else {
            return Ok(());
        };
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        if free >= self.needed {
            return Ok(());
        }
        let (needed, free) = (BinaryBytes(self.needed), BinaryBytes(free));
        Err(self.refused(self.fail(format!(
            "the demo's data has {needed} and the disk has {free} free; make room, or use --demo-dir elsewhere"
        ))))
    }

    fn refused(&self, error: DemoError) -> DemoError {
        self.discard();
        error
    }

    /// Removes the locked directory. What cannot be removed now is by the next start.
    fn discard(&self) {
        let _best_effort = self.empty().and_then(|()| std::fs::remove_dir(&self.partial));
    }

    fn empty(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.partial)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                std::fs::remove_dir_all(entry.path())?;
            } else {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

fn is_in(directory: &Path, name: &str) -> bool {
    directory.join(name).symlink_metadata().is_ok()
}

/// Renames, but replaces nothing.
fn move_new(from: &Path, to: &Path) -> Result<(), Errno> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Network file systems and old FUSE programs do not know the flag.
        Err(Errno::INVAL | Errno::NOSYS) => match to.symlink_metadata() {
            Ok(_) => Err(Errno::EXIST),
            Err(_) => rustix::fs::rename(from, to),
        },
        outcome => outcome,
    }
}

fn vectors_bytes() -> u64 {
    VECTORS * u64::from(VECTOR_DIM) * 4
}

fn total_bytes() -> u64 {
    let object = |index| pattern::object_length(SEED, index, OBJECT_BYTES_MIN, OBJECT_BYTES_MAX);
    BLOCKS_BYTES + vectors_bytes() + (0..OBJECTS).map(object).sum::<u64>()
}

fn make(directory: &Path, total_bytes: u64) -> io::Result<()> {
    // Drawn to stderr; indicatif hides it unless that is a terminal.
    let bar = ProgressBar::new(total_bytes);
    if let Ok(style) =
        ProgressStyle::with_template("making {msg:12} [{bar:40}] {binary_bytes}/{binary_total_bytes}")
    {
        bar.set_style(style.progress_chars("=> "));
    }
    let (blocks, vectors) = (BLOCKS_BYTES, vectors_bytes());
    let from = |done: u64| {
        let bar = &bar;
        move |bytes: u64| {
            bar.set_position(done + bytes);
            true
        }
    };
    bar.set_message("blocks");
    pattern::write_blocks(&directory.join(BLOCKS_NAME), SEED, blocks, &mut from(0))?;
    bar.set_message("vectors");
    let path = directory.join(VECTORS_NAME);
    pattern::write_vectors(
        &path,
        SEED,
        Layout::Npy,
        Dtype::F32,
        VECTOR_DIM,
        VECTORS,
        &mut from(blocks),
    )?;
    bar.set_message("objects");
    let path = directory.join(OBJECTS_NAME);
    std::fs::create_dir(&path)?;
    let progress = &mut from(blocks + vectors);
    pattern::write_objects(&path, SEED, OBJECTS, OBJECT_BYTES_MIN, OBJECT_BYTES_MAX, progress)?;
    bar.finish_and_clear();
    Ok(())
}

/// Printed once the demo serves: datasets, backend and reason, and commands to paste.
pub fn greeting(datasets: &[Arc<Dataset>], backend: &BackendStatus, addresses: &Addresses) -> String {
    let mut table = Table::new(&[]);
    table.row(["dataset", "kind", "count", "size", "backend", "direct"]);
    for dataset in datasets {
        let size = || BinaryBytes(dataset.length_bytes()).to_string();
        let (kind, count, size) = match dataset.kind() {
            Kind::Blocks { block_bytes, count } => {
                (format!("blocks of {block_bytes} B"), count.to_string(), size())
            }
            Kind::Vectors {
                dim, dtype, count, ..
            } => (
                format!("vectors, {dim} x {}", dtype.as_str()),
                count.to_string(),
                size(),
            ),
            Kind::Objects => ("objects".to_owned(), OBJECTS.to_string(), "-".to_owned()),
        };
        // mmap always reads through the page cache.
        let direct = dataset.direct().direct && backend.backend != BackendKind::Mmap;
        let direct = if direct { "yes" } else { "no" };
        table.row([
            dataset.name().to_owned(),
            kind,
            count,
            size,
            backend.backend.to_string(),
            direct.to_owned(),
        ]);
    }
    let Addresses { grpc, http, admin } = addresses;
    // The command line has the default address built in.
    let grpc_flag = if grpc.port() == GRPC_PORT {
        String::new()
    } else {
        format!(" --grpc http://{grpc}")
    };
    let admin = admin.map_or_else(|| "off".to_owned(), |address| address.to_string());
    let other = if backend.requested == BackendKind::Mmap {
        BackendKind::Uring
    } else {
        BackendKind::Mmap
    };
    format!(
        "
{table}
backend  {}: {}
gRPC     {grpc}
HTTP     http://{http}/ (open it in a browser for live status)
admin    {admin}

Try:
  curl -s http://{http}/v1/datasets/blocks/blocks/7 | xxd | head -2
  grpcurl -plaintext -d '{{\"dataset\":\"vectors\",\"ids\":[17,4711,5]}}' {grpc} ringfetch.v1.FetchService/FetchVectors
  cargo run --release --bin ringfetch -- load{grpc_flag} --dataset blocks --seconds 5 --verify

To run the other engine:
  RINGFETCH__ENGINE__BACKEND={other} cargo run --release
",
        backend.backend, backend.reason
    )
}

#[cfg(test)]
mod tests;
