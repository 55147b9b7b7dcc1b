//! What a test needs of the host, determined by using it, once per run. docs/ARCHITECTURE.md ("Tests") lists
//! the reasons.

use crate::harness::temporary_directory;
use crate::machine::{Device, FileSystem, Mounted};
use crate::wait::alone;
use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::OpenFile;
use ringfetch_engine::probe;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Need {
    /// A ring: seccomp profiles of containers, sysctls and old kernels refuse it.
    IoUring,
    /// Direct I/O on the file system of the build.
    DirectIo,
    /// Loop devices: need root, and some containers have none even then.
    LoopDevice,
    /// Compressed devices in memory: need root, and a kernel with CONFIG_ZRAM.
    Zram,
    /// A file system that can be created and mounted here: needs root, its tools, and a kernel that supports
    /// it.
    FileSystem(FileSystem),
}

impl Need {
    /// Whether tests that need it run wherever it is. Others run on demand only, as with `#[ignore]`.
    pub(crate) fn is_common(self) -> bool {
        matches!(self, Self::IoUring | Self::DirectIo)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::DirectIo => "direct I/O",
            Self::LoopDevice => "a loop device",
            Self::Zram => "zram",
            Self::FileSystem(kind) => kind.name(),
        }
    }

    /// Why this need is not met here, if it is not.
    pub(crate) fn missing(self) -> Option<String> {
        static FOUND: Mutex<Option<HashMap<Need, Option<String>>>> = Mutex::new(None);
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        let found = found.get_or_insert_default();
        found.entry(self).or_insert_with(|| self.examine()).clone()
    }

    fn examine(self) -> Option<String> {
        let tried = match self {
            Self::IoUring => probe::probe().map(drop).map_err(|refusal| refusal.cause()),
            Self::DirectIo => direct_io(),
            Self::LoopDevice => loop_device(),
            Self::Zram => in_machine(|| Device::in_memory(1 << 20).map(drop)),
            Self::FileSystem(kind) => in_machine(|| Mounted::new(kind).map(drop)),
        };
        tried
            .err()
            .map(|reason| format!("needs {}: {reason}", self.name()))
    }
}

fn in_machine(attempt: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let _alone = alone();
    attempt()
}

fn loop_device() -> Result<(), String> {
    let directory = temporary_directory();
    let file = directory.path().join("file");
    std::fs::write(&file, [0; 8192]).map_err(|error| error.to_string())?;
    in_machine(|| Device::on_file(&file, 512, true).map(drop))
}

fn direct_io() -> Result<(), String> {
    let directory = temporary_directory();
    let file = directory.path().join("file");
    std::fs::write(&file, [0; 8192]).map_err(|error| error.to_string())?;
    let opened = OpenFile::open(&file, DirectIo::Required);
    opened.map(drop).map_err(|error| error.to_string())
}
