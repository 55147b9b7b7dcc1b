//! Files with credentials and keys: read whole, within a size limit, and again when they change.

use prometheus::{IntCounter, IntCounterVec, Opts, Registry};
use ringfetch_engine::blocking::BlockingPool;
use ringfetch_engine::dataset::{free_descriptors, is_refused_by_host};
use ringfetch_engine::sync::lock;
use rustix::fs::{Mode, OFlags};
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};
use tokio::time::{MissedTickBehavior, timeout};

/// How often the files are read again.
pub const REREAD: Duration = Duration::from_secs(5);
/// A changed file is used if it is still the same after this long. One that is written in place is a different valid file
/// meanwhile: a line of principals that is cut off may lack its limits. At a start a wrong file that has changed within this time
/// is read once more after it.
const SETTLE: Duration = if cfg!(any(test, fuzzing)) {
    Duration::ZERO
} else {
    Duration::from_millis(100)
};
/// How often a file that is being written is read again at once.
const SETTLES_MAX: usize = 20;
/// A certificate chain has a few KiB; this also limits what is read by mistake.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The remedy where this host has no descriptor or no memory left.
pub const HOST_REMEDY: &str = "raise the limit of open files (ulimit -n, LimitNOFILE), or free memory";

/// A file that cannot be used. Contains none of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileError {
    /// The configuration key that names the file.
    pub key: &'static str,
    /// The file.
    pub path: String,
    /// What is wrong.
    pub problem: String,
    /// How to fix it.
    pub remedy: &'static str,
    /// Further problems of the same file.
    pub more: Vec<Self>,
    /// Whether it may pass without anybody: the clock is wrong after a boot, or the files are being replaced.
    pub may_pass: bool,
}

impl FileError {
    fn new(key: &'static str, path: &Path, problem: impl Into<String>, remedy: &'static str) -> Self {
        Self {
            key,
            path: path.display().to_string(),
            problem: problem.into(),
            remedy,
            more: Vec::new(),
            may_pass: false,
        }
    }

    /// The loads of a file cannot be counted. The names of metrics are constants that the crate accepts, which a test checks.
    pub(crate) fn uncounted(key: &'static str, path: &Path, error: &prometheus::Error) -> Self {
        let problem = format!("its loads cannot be counted: {error}");
        Self::new(key, path, problem, "report this defect")
    }

    pub(crate) fn passing(self) -> Self {
        Self {
            may_pass: true,
            ..self
        }
    }

    /// Whether this host had no descriptor or no memory left to read the file.
    pub fn is_refused_by_host(&self) -> bool {
        self.remedy == HOST_REMEDY
    }
}

/// One problem per line.
impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}: {}; {}",
            self.key, self.path, self.problem, self.remedy
        )?;
        for problem in &self.more {
            write!(f, "\n  {problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for FileError {}

pub(crate) struct KeyFile<'a> {
    key: &'static str,
    path: &'a Path,
    pub(crate) bytes: Vec<u8>,
}

/// Does not print the file's bytes.
impl fmt::Debug for KeyFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeyFile").field(&self.path).finish()
    }
}

impl<'a> KeyFile<'a> {
    pub(crate) fn read(key: &'static str, path: &'a Path) -> Result<Self, FileError> {
        let mut file = Self {
            key,
            path,
            bytes: Vec::new(),
        };
        let open = || open_regular(path);
        let opened = match open() {
            Err(error) if is_refused_by_host(&error) => {
                drop(lock(&SPARE).take());
                open()
            }
            opened => opened,
        };
        let read = opened.and_then(|open| match open {
            None => Ok(None),
            Some(open) => open
                .take(FILE_BYTES_MAX + 1)
                .read_to_end(&mut file.bytes)
                .map(Some),
        });
        keep_spare();
        match read {
            Err(error) => Err(FileError {
                may_pass: error.kind() == io::ErrorKind::NotFound,
                ..file.error(
                    format!("cannot be read: {error}"),
                    remedy_of(&error, "name a file that the daemon may read"),
                )
            }),
            Ok(None) => Err(file.error("is not a regular file", "name a file")),
            Ok(Some(0)) => {
                let remedy = "write it again, by rename while the daemon runs; to revoke all principals, leave a comment in their file";
                Err(file.error("is empty", remedy).passing())
            }
            Ok(Some(_)) if file.bytes.len() as u64 > FILE_BYTES_MAX => Err(file.error(
                format!("has more than {FILE_BYTES_MAX} bytes"),
                "name another file",
            )),
            // The PEM parser would skip the line that it hides, and a client authority with it.
            Ok(Some(_)) if file.bytes.starts_with(b"\xef\xbb\xbf") => {
                Err(file.error("begins with a byte order mark", "save it as UTF-8 without one"))
            }
            Ok(Some(_)) => Ok(file),
        }
    }

    pub(crate) fn error(&self, problem: impl Into<String>, remedy: &'static str) -> FileError {
        FileError::new(self.key, self.path, problem, remedy)
    }
}

/// Reads files at a start, where nothing is in force yet. One that is wrong and has just changed may be half written: all are
/// read once more, [`SETTLE`] later. What is still wrong then, and has changed again, may pass.
pub(crate) fn read_first<T>(
    paths: &[&Path],
    read: impl Fn() -> Result<T, FileError>,
) -> Result<T, FileError> {
    read_twice(SETTLE, paths, read)
}

fn read_twice<T>(
    settle: Duration,
    paths: &[&Path],
    read: impl Fn() -> Result<T, FileError>,
) -> Result<T, FileError> {
    // The error, and whether a file has changed since shortly before the read.
    let attempt = || {
        let since = SystemTime::now().checked_sub(settle);
        read().map_err(|error| {
            let modified = |path: &&Path| path.metadata().and_then(|found| found.modified()).ok();
            let has_changed = paths.iter().filter_map(modified).any(|at| Some(at) >= since);
            (error, has_changed)
        })
    };
    attempt().or_else(|(error, has_changed)| {
        if !has_changed {
            return Err(error);
        }
        std::thread::sleep(settle);
        attempt().map_err(|(error, has_changed)| if has_changed { error.passing() } else { error })
    })
}

/// A descriptor that gives way to these files: connections that hold all others must not keep a principal from being
/// removed.
static SPARE: Mutex<Option<File>> = Mutex::new(None);

fn keep_spare() {
    let mut spare = lock(&SPARE);
    if spare.is_none() {
        // Without it, the next file may have to wait for a descriptor.
        *spare = File::open("/dev/null").ok();
    }
}

/// The remedy for a file that cannot be opened.
pub(crate) fn remedy_of(error: &io::Error, otherwise: &'static str) -> &'static str {
    if is_refused_by_host(error) {
        HOST_REMEDY
    } else if error.kind() == io::ErrorKind::PermissionDenied {
        // As of a dataset.
        "let the daemon's user read it, and search every directory above it"
    } else {
        otherwise
    }
}

/// Opens a file; `None` if it is not a regular file. Does not wait for the writer of a FIFO. If no descriptor is left, cached
/// objects give way.
pub(crate) fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let open = || rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from);
    let file = match open() {
        Err(error) if is_refused_by_host(&error) => {
            free_descriptors();
            open()?
        }
        opened => opened?,
    };
    let file = File::from(file);
    Ok(file.metadata()?.is_file().then_some(file))
}

/// Files that are read again when they change, by a reload and by the watch. The later read may be installed first: what was
/// read earlier must not replace it, since that may be what somebody has just revoked.
#[derive(Debug)]
pub(crate) struct Rereads {
    /// Held while files are read; counts the reads.
    reads: Mutex<u64>,
    /// The number of the read that is in force. Not held during a read: a file system that hangs delays no installation.
    in_force: Mutex<u64>,
    /// The last problem found, so that each is logged once.
    problem: Mutex<Option<FileError>>,
    /// The problem of a file that changes all the time.
    unsettled: FileError,
    loads: IntCounterVec,
    ok: IntCounter,
    failed: IntCounter,
}

/// What a read returned. Later reads have higher numbers.
#[derive(Debug)]
pub(crate) struct Numbered<T> {
    read: T,
    number: u64,
}

impl Rereads {
    /// With a name and a help text for the counter of loads. `key`, `path`: of the first file.
    pub(crate) fn new(counter: &str, help: &str, key: &'static str, path: &Path) -> Result<Self, FileError> {
        let loads = IntCounterVec::new(Opts::new(counter, help), &["result"])
            .map_err(|error| FileError::uncounted(key, path, &error))?;
        let problem = "or a file that belongs to it, changes all the time";
        Ok(Self {
            reads: Mutex::new(0),
            in_force: Mutex::new(0),
            problem: Mutex::new(None),
            unsettled: FileError::new(key, path, problem, "replace it by rename").passing(),
            ok: loads.with_label_values(&["ok"]),
            failed: loads.with_label_values(&["failed"]),
            loads,
        })
    }

    pub(crate) fn register_metrics(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(self.loads.clone()))
    }

    /// Reads, one caller at a time. `None`: what is in force is unchanged. `read` returns `None` if the file is the same as what
    /// it is given, or, given nothing, as what is in force.
    pub(crate) fn read<T>(
        &self,
        read: impl Fn(Option<&T>) -> Result<Option<T>, FileError>,
    ) -> Result<Option<Numbered<T>>, FileError> {
        let mut reads = lock(&self.reads);
        *reads += 1;
        let number = *reads;
        let changed = self.settled(read).inspect_err(|_| self.failed.inc())?;
        if changed.is_none() {
            *lock(&self.in_force) = number;
        }
        Ok(changed.map(|read| Numbered { read, number }))
    }

    fn settled<T>(
        &self,
        read: impl Fn(Option<&T>) -> Result<Option<T>, FileError>,
    ) -> Result<Option<T>, FileError> {
        for _ in 0..SETTLES_MAX {
            let Some(changed) = read(None)? else {
                return Ok(None);
            };
            std::thread::sleep(SETTLE);
            if read(Some(&changed))?.is_none() {
                return Ok(Some(changed));
            }
        }
        Err(self.unsettled.clone())
    }

    /// Installs what was read, unless something that was read later is in force. `install` returns whether it has.
    pub(crate) fn install<T>(&self, Numbered { read, number }: Numbered<T>, install: impl FnOnce(T) -> bool) {
        let mut in_force = lock(&self.in_force);
        if number > *in_force {
            *in_force = number;
            if install(read) {
                self.ok.inc();
            }
        }
    }

    /// The successful result of a read. Calls `log` for a problem that differs from the previous one.
    pub(crate) fn check<T>(&self, read: Result<Option<T>, FileError>, log: fn(&FileError)) -> Option<T> {
        let mut last = lock(&self.problem);
        match read {
            Ok(changed) => {
                *last = None;
                changed
            }
            Err(problem) => {
                if last.as_ref() != Some(&problem) {
                    log(&problem);
                    *last = Some(problem);
                }
                None
            }
        }
    }

    /// Calls `renew` every [`REREAD`], on a thread for that. A read that does not end, or cannot begin, counts as failed each time.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect on what is in force.
    pub(crate) async fn watch(&self, renew: impl Fn() + Clone + Send + 'static) {
        let mut ticks = tokio::time::interval(REREAD);
        // A file system that hung has cost reads that nobody needs afterwards.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match REREADERS.run(renew.clone()) {
                Ok(mut renewed) => {
                    let mut is_late = false;
                    // Its own error is a panic there, which is a defect; what is in force stays.
                    while timeout(REREAD, &mut renewed).await.is_err() {
                        self.failed.inc();
                        if !std::mem::replace(&mut is_late, true) {
                            tracing::warn!(
                                "reading TLS or principals files again takes long; until it ends, what is in force stays"
                            );
                        }
                    }
                }
                Err(error) => {
                    self.failed.inc();
                    tracing::warn!(%error, "no thread to read TLS or principals files again; what is in force stays");
                }
            }
        }
    }
}

/// The threads for that: one for each kind of file.
static REREADERS: BlockingPool = BlockingPool::new("rf-reread", 2);

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, mknodat};
    use rustix::io::Errno;
    use std::io::Write as _;

    #[test]
    fn a_file_that_may_not_be_read_is_to_be_made_readable() {
        // Scenario: EACCES, as of root's key for a service's user, and ENOENT. Expectation: who may read it, and another file.
        for (errno, part) in [(Errno::ACCESS, "the daemon's user"), (Errno::NOENT, "another")] {
            let remedy = remedy_of(&errno.into(), "name another file");
            assert!(remedy.contains(part), "{remedy}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        // Scenario: a FIFO without a writer, a directory, an endless device, and a file. Expectation: only
        // the file is read, and its bytes are not printed; nothing blocks.
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for path in [fifo.as_path(), directory.path(), Path::new("/dev/zero")] {
            let error = KeyFile::read("tls.key", path).unwrap_err();
            assert_eq!(
                (error.key, &error.problem[..]),
                ("tls.key", "is not a regular file")
            );
        }
        let file = directory.path().join("file");
        std::fs::write(&file, "text").unwrap();
        let read = KeyFile::read("tls.key", &file).unwrap();
        assert_eq!(read.bytes, b"text");
        let printed = format!("{read:?}");
        assert!(!printed.contains("text") && !printed.contains("116"), "{printed}");
    }

    #[test]
    fn a_file_that_is_half_written_at_a_start_is_read_once_more() {
        // Scenario: at the first read a file is half written, and another thread writes the rest after it; one that another
        // thread goes on writing, which stays wrong; one that nobody writes any more; one that is an hour old. Expectation: the
        // whole of the first; the second may pass, and the others may not; the last one is read once.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        // More than the clock of the file system may be behind.
        let settle = Duration::from_millis(50);
        let read_by = |written: &str, more: &str, age: Duration| {
            std::fs::write(&path, written).unwrap();
            let file = File::options().append(true).open(&path).unwrap();
            if !age.is_zero() {
                file.set_modified(SystemTime::now() - age).unwrap();
            }
            let reads = std::cell::Cell::new(0);
            let found = read_twice(settle, &[&path], || {
                reads.set(reads.get() + 1);
                let read = KeyFile::read("tls.key", &path)?;
                let write = || (&file).write_all(more.as_bytes()).unwrap();
                std::thread::scope(|scope| scope.spawn(write).join()).unwrap();
                match &read.bytes[..] {
                    b"whole" => Ok(()),
                    _ => Err(read.error("is wrong", "correct it")),
                }
            });
            (found.map_err(|error| error.may_pass), reads.get())
        };
        let hour = Duration::from_secs(3600);
        assert_eq!(read_by("wh", "ole", Duration::ZERO), (Ok(()), 2));
        assert_eq!(read_by("wr", "ong", Duration::ZERO), (Err(true), 2));
        assert_eq!(read_by("wrong", "", Duration::ZERO).0, Err(false));
        assert_eq!(read_by("wrong", "", hour), (Err(false), 1));
    }

    fn rereads() -> Rereads {
        Rereads::new("loads_total", "loads", "key", Path::new("path")).unwrap()
    }

    #[test]
    fn a_file_that_is_being_written_is_not_used() {
        // Scenario: a file grows between two reads, twice, and then stays; one that never stays the same. Expectation: the
        // whole of the first; the second is refused, and counted.
        let rereads = rereads();
        let contents = std::cell::RefCell::new(vec!["abc", "abc", "ab", "a", "a", ""]);
        let read = |same: Option<&&'static str>| {
            let mut contents = contents.borrow_mut();
            let now = contents.pop().unwrap();
            Ok(Some(now).filter(|now| same != Some(now)))
        };
        assert_eq!(rereads.read(read).unwrap().unwrap().read, "abc");
        let count = std::cell::Cell::new(0);
        let grows = |_: Option<&u32>| Ok(Some(count.replace(count.get() + 1)));
        assert_eq!(rereads.read(grows).unwrap_err(), rereads.unsettled);
        assert_eq!(rereads.failed.get(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_that_hangs_counts_as_failed_again_and_again() {
        // Scenario: a file system does not respond to a read by the watch. Expectation: it counts every time at which the file
        // should have been read, as a file that cannot be used does, so that the same alert fires.
        let rereads = rereads();
        let (release, hang) = std::sync::mpsc::channel::<()>();
        let hang = std::sync::Arc::new(Mutex::new(hang));
        let later = async {
            for _ in 0..10 {
                tokio::time::sleep(REREAD).await;
            }
        };
        tokio::select! {
            () = rereads.watch(move || _ = lock(&hang).recv()) => {}
            () = later => {}
        }
        assert!(rereads.failed.get() >= 8, "{}", rereads.failed.get());
        drop(release);
    }

    #[test]
    fn documents_tell_how_often_files_are_read_again() {
        // Scenario: docs/ACCESS.md. Expectation: it has the time within which a principal is revoked.
        let seconds = REREAD.as_secs();
        let documents = include_str!("../../../docs/ACCESS.md");
        for told in [
            format!("the daemon rereads the file every {seconds} s and at each reload"),
            format!("The daemon rereads them every {seconds} seconds and at each reload"),
        ] {
            assert!(documents.contains(&told), "{told}");
        }
    }

    #[test]
    fn what_was_read_earlier_does_not_replace_what_was_read_later() {
        // Scenario: a file that has changed is read; it changes back, and is read again, unchanged; the first read is
        // installed. Then it changes twice, and the second read is installed before the first. Expectation: what was read
        // last is in force, so that a token revoked by a reload does not come back.
        let rereads = rereads();
        let read = |content: Option<char>| {
            let read = |same: Option<&char>| Ok(content.filter(|content| same != Some(content)));
            rereads.read(read).unwrap()
        };
        let installed = |numbered| {
            let mut content = None;
            rereads.install(numbered, |read: char| {
                content = Some(read);
                true
            });
            content
        };
        let earlier = read(Some('a')).unwrap();
        assert!(read(None).is_none());
        assert_eq!(installed(earlier), None);
        let [second, third] = ['b', 'c'].map(|content| read(Some(content)).unwrap());
        assert_eq!(installed(third), Some('c'));
        assert_eq!(installed(second), None);
        assert_eq!(rereads.ok.get(), 1);
    }

    #[test]
    fn a_problem_is_logged_once_until_it_changes() {
        // Scenario: a problem twice, a good file, the problem again. Expectation: the first and the last are logged.
        static LOGGED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let log = |_: &FileError| {
            LOGGED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        };
        let problem = || KeyFile::read("k", Path::new("/nonexistent")).map(|_| Some(()));
        let rereads = rereads();
        for read in [problem(), problem(), Ok(Some(())), problem()] {
            rereads.check(read, log);
        }
        assert_eq!(LOGGED.load(std::sync::atomic::Ordering::Relaxed), 2);
    }
}
