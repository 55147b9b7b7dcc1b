//! Mounting and unmounting: the handle that tests and the command line hold.

use crate::counts::{ReadRecord, Reads};
use crate::device::Device;
use crate::error::Error;
use crate::parameters::Parameters;
use crate::passthrough::Passthrough;
use fuser::{BackgroundSession, Config, MountOption, SessionACL};
use rustix::mount::{UnmountFlags, unmount};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fs, io};

/// Threads that take requests from the kernel, and threads that answer reads.
const REQUEST_THREADS: usize = 2;
const ANSWER_THREADS: usize = 4;
/// How long unmounting waits for processes with open files. Their reads fail afterwards.
const END_WITHIN: Duration = Duration::from_secs(1);

/// A mounted disk. Dropping it answers reads in service and unmounts.
pub struct SlowDisk {
    device: Arc<Device>,
    path: PathBuf,
    mountpoint: PathBuf,
    created: bool,
    session: Option<BackgroundSession>,
    workers: Vec<JoinHandle<()>>,
}

impl SlowDisk {
    /// Mounts `source`, a file, or a directory and what is below it. A missing mount point is created, and removed at
    /// the end. Needs `/dev/fuse`, and root or `fusermount3`.
    ///
    /// # Errors
    /// `Parameter` for one out of bounds, `Source` or `Mount` if the system refuses.
    pub fn mount(source: &Path, mountpoint: &Path, parameters: &Parameters) -> Result<Self, Error> {
        parameters.check()?;
        let source_error = |error| Error::Source {
            path: source.to_owned(),
            source: error,
        };
        let mount_error = |error| Error::Mount {
            path: mountpoint.to_owned(),
            source: error,
        };
        let source = source.canonicalize().map_err(source_error)?;
        let device = Arc::new(Device::new(parameters.clone()));
        let files = Passthrough::new(&source, Arc::clone(&device)).map_err(source_error)?;

        let created = !mountpoint.exists();
        if created {
            fs::create_dir_all(mountpoint).map_err(mount_error)?;
        }
        let mountpoint = mountpoint.canonicalize().map_err(mount_error)?;
        if mountpoint.starts_with(&source) || source.starts_with(&mountpoint) {
            // A look-up in the source would return to this disk and wait for itself.
            return Err(mount_error(io::Error::other(
                "one of source and mount point is inside the other",
            )));
        }
        let path = if source.is_file() {
            mountpoint.join(source.file_name().unwrap_or_default())
        } else {
            mountpoint.clone()
        };
        let mut disk = Self {
            device,
            path,
            mountpoint,
            created,
            session: None,
            workers: Vec::new(),
        };
        for number in 0..ANSWER_THREADS {
            let device = Arc::clone(&disk.device);
            let builder = thread::Builder::new().name(format!("slowdisk-{number}"));
            disk.workers
                .push(builder.spawn(move || device.serve()).map_err(mount_error)?);
        }
        let session =
            fuser::spawn_mount(files, &disk.mountpoint, &config(parameters)).map_err(mount_error)?;
        disk.session = Some(session);
        Ok(disk)
    }

    /// The path to read: the mount point, or the file in it if the source is a file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The parameters in force.
    #[must_use]
    pub fn parameters(&self) -> Parameters {
        self.device.parameters()
    }

    /// Changes parameters. Latency and faults apply to reads that arrive from now on; slots change at once.
    ///
    /// # Errors
    /// `Parameter` if a value would be out of bounds; then nothing changes.
    pub fn set<T>(&self, change: impl FnOnce(&mut Parameters) -> T) -> Result<T, Error> {
        self.device.set(change)
    }

    /// Answers nothing until [`Self::release`]; reads still arrive and are counted.
    pub fn hold(&self) {
        self.device.hold(true);
    }

    /// Ends a hold. Reads in service are answered if they are due; waiting ones start now.
    pub fn release(&self) {
        self.device.hold(false);
    }

    /// Answers no query for attributes (fstat, stat) until [`Self::release_attributes`].
    pub fn hold_attributes(&self) {
        self.device.hold_attributes(true);
    }

    /// Ends that hold and answers what waits.
    pub fn release_attributes(&self) {
        self.device.hold_attributes(false);
    }

    /// Queries for attributes that wait for the end of a hold.
    #[must_use]
    pub fn attributes_held(&self) -> usize {
        self.device.attributes_held()
    }

    /// Totals. A read is counted before its answer is sent.
    #[must_use]
    pub fn reads(&self) -> Reads {
        self.device.reads()
    }

    /// The first million answered reads since the mount or the last reset, in order of their answers.
    #[must_use]
    pub fn records(&self) -> Vec<ReadRecord> {
        self.device.records()
    }

    /// Clears totals and records.
    pub fn reset(&self) {
        self.device.reset();
    }

    /// Waits until a condition of the totals holds. `false`: timed out.
    pub fn wait_until(&self, within: Duration, condition: impl FnMut(&Reads) -> bool) -> bool {
        self.device.wait_until(within, condition)
    }
}

impl std::fmt::Debug for SlowDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlowDisk")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        self.device.close();
        if let Some(session) = self.session.take() {
            // Lazily: it succeeds while files are open. Without the permission, the session uses fusermount.
            let detached = unmount(&self.mountpoint, UnmountFlags::DETACH).is_ok();
            let deadline = Instant::now() + END_WITHIN;
            while detached && !session.guard.is_finished() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            drop(session);
        }
        for worker in self.workers.drain(..) {
            // A worker that panicked has printed the reason.
            let _ = worker.join();
        }
        if self.created {
            let _ = fs::remove_dir(&self.mountpoint);
        }
    }
}

/// The mount's source states the disk's latency, for those who read from it.
fn config(parameters: &Parameters) -> Config {
    let latency = humantime::format_duration(parameters.latency).to_string();
    let source = format!(
        "slowdisk:{}:{}-concurrent",
        latency.replace(' ', "+"),
        parameters.concurrency
    );
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::RO,
        MountOption::FSName(source),
        MountOption::Subtype("slowdisk".to_owned()),
        MountOption::DefaultPermissions,
    ];
    config.n_threads = Some(REQUEST_THREADS);
    config.clone_fd = true;
    if rustix::process::geteuid().is_root() {
        // A daemon under test may run as another user. Without root this needs a line in /etc/fuse.conf.
        config.acl = SessionACL::All;
    }
    config
}
