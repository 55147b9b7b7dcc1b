//! Devices and file systems of this machine, set up for one test and removed after it; or why that does not
//! work here.

use crate::harness::temporary_directory;
use crate::wait::WAIT;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Runs a command to its end. Returns what it printed, or the reason for its failure in one line.
fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{program} does not run: {error}"))?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        let line = told.lines().find(|line| !line.trim().is_empty());
        return Err(format!("{program}: {}", line.unwrap_or("failed")));
    }
    String::from_utf8(output.stdout).map_err(|error| error.to_string())
}

/// A block device, and how to remove it.
pub(crate) struct Device {
    path: PathBuf,
    zram: Option<String>,
}

impl Device {
    /// A loop device over a file.
    pub(crate) fn on_file(backing: &Path, sector_bytes: u32, read_only: bool) -> Result<Self, String> {
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", "--direct-io=on", "--sector-size"]);
        command.arg(sector_bytes.to_string());
        command.args(read_only.then_some("--read-only"));
        let path = PathBuf::from(run(command.arg(backing))?.trim());
        Ok(Self { path, zram: None })
    }

    /// A compressed device in memory. Its driver announces that 512-byte aligned memory is enough, but
    /// mishandles it.
    pub(crate) fn in_memory(length_bytes: u64) -> Result<Self, String> {
        const ADD: &str = "/sys/class/zram-control/hot_add";
        let number = std::fs::read_to_string(ADD).map_err(|error| format!("{ADD}: {error}"))?;
        let number = number.trim().to_owned();
        let device = Self {
            path: PathBuf::from(format!("/dev/zram{number}")),
            zram: Some(number.clone()),
        };
        let size = format!("/sys/block/zram{number}/disksize");
        std::fs::write(&size, length_bytes.to_string()).map_err(|error| format!("{size}: {error}"))?;
        Ok(device)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A failure here must not hide the test's own.
        match &self.zram {
            // Both are refused while the device is open, and an engine's threads close its files a moment
            // later.
            Some(number) => {
                let deadline = Instant::now() + WAIT;
                let reset = || std::fs::write(format!("/sys/block/zram{number}/reset"), "1").is_ok();
                while !reset() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                let _removed = std::fs::write("/sys/class/zram-control/hot_remove", number);
            }
            // It detaches when the last descriptor is closed.
            None => {
                let _detached = Command::new("losetup").arg("--detach").arg(&self.path).status();
            }
        }
    }
}

/// A file system, mounted as long as this lives.
pub(crate) struct Mounted {
    directory: TempDir,
    _device: Device,
    _backing: Option<TempDir>,
}

/// Enough for every case, and for the smallest XFS.
const FILE_SYSTEM_BYTES: u64 = 320 << 20;

/// Which file system a suite runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum FileSystem {
    /// ext4 on zram, whose sectors have 4,096 bytes.
    Zram,
    /// XFS on a loop device.
    Xfs,
    /// Btrfs on a loop device.
    Btrfs,
    /// The same, compressing every file.
    BtrfsCompressed,
}

impl FileSystem {
    pub(crate) const ALL: [Self; 4] = [Self::Zram, Self::Xfs, Self::Btrfs, Self::BtrfsCompressed];

    /// What the host must support for it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Zram => "zram and ext4",
            Self::Xfs => "XFS",
            Self::Btrfs | Self::BtrfsCompressed => "Btrfs",
        }
    }

    /// Its module in the names of tests.
    pub(crate) fn module(self) -> &'static str {
        match self {
            Self::Zram => "zram",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
            Self::BtrfsCompressed => "btrfs_compressed",
        }
    }
}

impl Mounted {
    pub(crate) fn new(kind: FileSystem) -> Result<Self, String> {
        let (device, backing) = if kind == FileSystem::Zram {
            (Device::in_memory(FILE_SYSTEM_BYTES)?, None)
        } else {
            let backing = temporary_directory();
            let image = backing.path().join("image");
            let file = std::fs::File::create(&image).map_err(|error| error.to_string())?;
            file.set_len(FILE_SYSTEM_BYTES)
                .map_err(|error| error.to_string())?;
            (Device::on_file(&image, 512, false)?, Some(backing))
        };
        let (maker, type_name, options): (&[&str], _, _) = match kind {
            FileSystem::Zram => (&["mkfs.ext4", "-q", "-F"], "ext4", "noatime"),
            FileSystem::Xfs => (&["mkfs.xfs", "-q", "-f"], "xfs", "noatime"),
            FileSystem::Btrfs => (&["mkfs.btrfs", "-q", "-f"], "btrfs", "noatime"),
            FileSystem::BtrfsCompressed => (
                &["mkfs.btrfs", "-q", "-f"],
                "btrfs",
                "noatime,compress-force=zstd",
            ),
        };
        run(Command::new(maker[0]).args(&maker[1..]).arg(device.path()))?;
        let directory = temporary_directory();
        run(Command::new("mount")
            .args(["-t", type_name, "-o", options])
            .arg(device.path())
            .arg(directory.path()))?;
        Ok(Self {
            directory,
            _device: device,
            _backing: backing,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazy: files that are still being closed keep it busy for a moment; it is unmounted with the last of
        // them.
        let _unmounted = Command::new("umount")
            .arg("--lazy")
            .arg(self.directory.path())
            .status();
    }
}
