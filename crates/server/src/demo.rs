//! The demo that runs without a configuration: creates a directory of self-describing data once, and prints
//! commands to try.
//!
//! Only files that this module created are overwritten: while the data is incomplete a marker names what was made,
//! which is made again; other files of these names are an error. The bytes are those of `pattern` with seed
//! [`SEED`], so any client can check them.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use ringfetch_command::table::Table;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::dataset::{Dataset, Dtype, Kind, Layout};
use ringfetch_engine::engine::BackendStatus;
use ringfetch_pattern as pattern;
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
/// Exists while the data is being made, and after that was interrupted. Its lines are the names made so far.
const PARTIAL_NAME: &str = ".ringfetch-demo-partial";
/// Exists once the data is complete.
const COMPLETE_NAME: &str = ".ringfetch-demo-complete";

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
    prepare_bytes(directory, total_bytes())
}

fn prepare_bytes(directory: &Path, needed: u64) -> Result<(), DemoError> {
    let fail = |problem: String| DemoError {
        directory: directory.to_owned(),
        problem,
        is_temporary: false,
    };
    let errno = |what: &str, error: &std::io::Error| {
        fail(format!(
            "{what}: {error}; choose another one with --demo-dir, or serve your own data with --config"
        ))
    };
    if is_complete(directory) {
        return Ok(());
    }
    std::fs::create_dir_all(directory).map_err(|error| errno("cannot be made", &error))?;
    let partial = directory.join(PARTIAL_NAME);
    let marker = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .open(&partial);
    let mut marker: File = marker.map_err(|error| errno("cannot be written", &error))?;
    match marker.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let problem = "another process is making it; wait for that one, or use --demo-dir";
            return Err(DemoError {
                is_temporary: true,
                ..fail(problem.to_owned())
            });
        }
        Err(TryLockError::Error(error)) => return Err(errno("cannot be locked", &error)),
    }
    let mut made = String::new();
    let read = marker.read_to_string(&mut made);
    read.map_err(|error| errno("cannot be read", &error))?;
    let present = [BLOCKS_NAME, VECTORS_NAME, OBJECTS_NAME].map(|name| (name, directory.join(name)));
    let present = || present.iter().filter(|(_, path)| path.symlink_metadata().is_ok());
    if let Some((name, _)) = present().find(|(name, _)| made.lines().all(|line| line != *name)) {
        if made.is_empty() {
            let _best_effort = std::fs::remove_file(&partial);
        }
        return Err(fail(format!(
            "it has {name}, which was not made by this demo; choose another one with --demo-dir"
        )));
    }
    for (name, path) in present() {
        let removed = if *name == OBJECTS_NAME {
            std::fs::remove_dir_all(path)
        } else {
            std::fs::remove_file(path)
        };
        removed.map_err(|error| errno(&format!("{name} is incomplete and cannot be removed"), &error))?;
    }
    // What is put there from now on is somebody else's.
    marker
        .set_len(0)
        .map_err(|error| errno("cannot be written", &error))?;
    if let Ok(space) = rustix::fs::statvfs(directory) {
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        if free < needed {
            let _best_effort = std::fs::remove_file(&partial);
            let (needed, free) = (BinaryBytes(needed), BinaryBytes(free));
            return Err(fail(format!(
                "the demo's data has {needed} and the disk has {free} free; make room, or use --demo-dir elsewhere"
            )));
        }
    }
    make(directory, needed, &marker).map_err(|error| errno("writing failed", &error))?;
    std::fs::rename(&partial, directory.join(COMPLETE_NAME))
        .map_err(|error| errno("cannot be completed", &error))
}

fn vectors_bytes() -> u64 {
    VECTORS * u64::from(VECTOR_DIM) * 4
}

fn total_bytes() -> u64 {
    let object = |index| pattern::object_length(SEED, index, OBJECT_BYTES_MIN, OBJECT_BYTES_MAX);
    BLOCKS_BYTES + vectors_bytes() + (0..OBJECTS).map(object).sum::<u64>()
}

fn make(directory: &Path, total_bytes: u64, mut marker: &File) -> std::io::Result<()> {
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
    // Once it exists: a kill in between leaves a file that is refused, but removes none that somebody else puts there.
    let mut made = |name: &str| writeln!(marker, "{name}");
    bar.set_message("blocks");
    pattern::write_blocks(&directory.join(BLOCKS_NAME), SEED, blocks, &mut from(0))?;
    made(BLOCKS_NAME)?;
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
    made(VECTORS_NAME)?;
    bar.set_message("objects");
    let path = directory.join(OBJECTS_NAME);
    std::fs::create_dir(&path)?;
    made(OBJECTS_NAME)?;
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
mod tests {
    use super::*;

    fn is_refused(directory: &Path, problem: &str) {
        // More than any disk has, so that nothing is written.
        let error = prepare_bytes(directory, u64::MAX)
            .expect_err("refused")
            .to_string();
        assert!(error.contains(problem), "{error}");
    }

    #[test]
    fn a_refused_demo_leaves_nothing_behind() {
        // Scenario: no room; then the operator's own objects are put there. Expectation: both are refused; the objects remain.
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path();
        is_refused(directory, "make room");
        let theirs = directory.join(OBJECTS_NAME).join("theirs");
        std::fs::create_dir(directory.join(OBJECTS_NAME)).expect("a directory");
        std::fs::write(&theirs, b"theirs").expect("a file");
        is_refused(directory, "has objects, which was not made by this demo");
        assert!(theirs.exists());
        assert!(!directory.join(PARTIAL_NAME).exists());
    }

    #[test]
    fn only_what_a_demo_made_that_was_cut_short_is_removed() {
        // Scenario: a demo was ended while it made the objects. The operator adds vectors; takes them away; then puts own
        // blocks there. Expectation: while something foreign is there, nothing is removed; then what the demo made is, once.
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path();
        let [blocks, vectors, objects] =
            [BLOCKS_NAME, VECTORS_NAME, OBJECTS_NAME].map(|name| directory.join(name));
        std::fs::write(directory.join(PARTIAL_NAME), b"blocks.bin\nobjects\n").expect("a marker");
        std::fs::create_dir(&objects).expect("a directory");
        for file in [&blocks, &vectors, &objects.join("00000000")] {
            std::fs::write(file, b"bytes").expect("a file");
        }
        is_refused(directory, "has vectors.npy, which was not made by this demo");
        assert!(blocks.exists() && vectors.exists() && objects.exists());
        std::fs::remove_file(vectors).expect("a file");
        is_refused(directory, "make room");
        assert!(!blocks.exists() && !objects.exists());
        std::fs::write(&blocks, b"theirs").expect("a file");
        is_refused(directory, "has blocks.bin, which was not made by this demo");
        assert!(blocks.exists());
    }
}
