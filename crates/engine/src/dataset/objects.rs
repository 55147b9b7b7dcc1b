//! Objects: files of a directory, opened on request and kept open in a bounded cache.
//!
//! A descriptor is trusted for `revalidate`; then its name is looked up again, and the cached file is kept
//! only if the name still leads to it (device, inode, length, mtime), and so does its descriptor. A request
//! that holds a file keeps it open, cached or not; one budget bounds both. `directory` resolves names and `listing` lists them.

use super::direct;
use super::directory::{self, Directory, is_absent};
use super::file::{Accept, FileError, OpenFile, OpenOptions};
use super::identity::Identity;
use super::listing::{self, NAME_BYTES_MAX};
use super::open_error::{ErrorContext, file_problem, refusal_reason};
use super::{DirectFacts, ObjectEntry, OpenError, reaper};
use crate::config::DirectIo;
use crate::error::{ReadError, Resource, as_of_page_cache};
use crate::sync::lock;
use lru::LruCache;
use rustix::io::Errno;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Descriptors that requests in flight may hold open in addition to the cache's: three requests of 4,096
/// objects (the default of `limits.items_per_request`), each read directly. Callers share them by what is
/// free, so one such request fits while others hold a third.
pub const IN_FLIGHT_DESCRIPTORS_MAX: usize = 3 * 4096 * 2;

/// Most opens in progress: each may hold two descriptors that the cache does not count yet.
pub(super) const OPENS_MAX: usize = 64;

/// After so many objects whose first block cannot be read none is tried any more to decide about direct I/O: a failing
/// disk may take half a minute for each.
const BROKEN_MAX: usize = 8;

/// How many idle cached files are closed at a time when requests need descriptors, and how many are examined
/// for that.
const IDLE_FORGOTTEN: usize = 16;
const IDLE_LOOKED_AT: usize = 1024;

type Cache = Mutex<LruCache<Box<str>, Cached>>;

/// The caches of all datasets, which share the descriptors of the process.
static CACHES: Mutex<Vec<Weak<Cache>>> = Mutex::new(Vec::new());

/// The files of one directory.
#[derive(Debug)]
pub(super) struct Objects {
    directory: Directory,
    cache: Arc<Cache>,
    revalidate: Duration,
    options: OpenOptions,
    pub(super) opens: Arc<Semaphore>,
    /// One permit for each descriptor of an object, whether the cache or a request holds it.
    descriptors: Arc<Semaphore>,
}

#[derive(Debug)]
struct Cached {
    file: Arc<OpenFile>,
    /// When its name was last looked up.
    validated: Instant,
}

impl Objects {
    /// Opens the directory and decides about direct I/O by trying some file in it.
    pub(super) fn open(
        path: &Path,
        max_open_files: usize,
        revalidate: Duration,
        direct_io: DirectIo,
        context: ErrorContext<'_>,
    ) -> Result<(Self, DirectFacts), OpenError> {
        let directory = Directory::open(path).map_err(|error| {
            if let FileError::NotAFile(found) = error {
                let shown = path.display();
                let problem =
                    format!("{shown} is {found}: objects need a directory; for one file set kind: blocks");
                return context.field("path", problem);
            }
            file_problem(path, error, context)
        })?;
        let (options, facts) = try_direct(&directory, path, direct_io, context)?;
        // A file that is read directly has two descriptors: 1000 descriptors hold 500 files.
        let each = descriptors_each(options.direct_io) as usize;
        let files = NonZeroUsize::new(max_open_files / each).unwrap_or(NonZeroUsize::MIN);
        // `new` would allocate the whole table at once, for a limit that may never be reached.
        let cache = Arc::new(Mutex::new(LruCache::sparse(files)));
        let mut caches = lock(&CACHES);
        caches.retain(|cache| cache.strong_count() > 0);
        caches.push(Arc::downgrade(&cache));
        drop(caches);
        let objects = Self {
            directory,
            cache,
            revalidate,
            options,
            opens: Arc::new(Semaphore::new(OPENS_MAX)),
            descriptors: Arc::new(Semaphore::new(
                max_open_files
                    .saturating_add(IN_FLIGHT_DESCRIPTORS_MAX)
                    .min(Semaphore::MAX_PERMITS),
            )),
        };
        Ok((objects, facts))
    }

    pub(super) fn identity(&self) -> Result<Identity, Errno> {
        self.directory.identity()
    }

    /// See [`Directory::place`].
    pub(super) fn place(&self) -> Result<(u64, u64, u64), Errno> {
        self.directory.place()
    }

    /// The cached file, while it is trusted. Does not block.
    pub(super) fn cached(&self, name: &str) -> Option<Arc<OpenFile>> {
        let mut cache = self.lock();
        let cached = cache.get(name)?;
        (cached.validated.elapsed() < self.revalidate).then(|| Arc::clone(&cached.file))
    }

    pub(super) fn forget(&self, name: &str) {
        let forgotten = self.lock().pop(name);
        // After the lock is released.
        drop(forgotten);
    }

    pub(super) fn list(
        &self,
        after: &str,
        limit: usize,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<ObjectEntry>, Errno> {
        let list = || listing::list(&self.directory, after, limit, is_wanted);
        self.give_way(list, |listed| {
            listed
                .as_ref()
                .is_err_and(|errno| directory::is_out_of_descriptors(*errno))
        })
    }

    /// Opens a file, or confirms that the cached one is still current. Blocks.
    pub(super) fn look_up(&self, name: &str) -> Result<Arc<OpenFile>, ReadError> {
        // Another request may have opened it while this one waited.
        if let Some(file) = self.cached(name) {
            return Ok(file);
        }
        let began = Instant::now();
        let open = || self.open_or_keep(name);
        let opened = self.give_way(open, |opened| {
            matches!(opened, Err(Failure::File(FileError::Open(error))) if is_out_of_descriptors(error))
        });
        let result = match opened {
            Err(Failure::Budget) => {
                self.forget_idle();
                self.open_or_keep(name)
            }
            result => result,
        };
        match result {
            Ok(file) => {
                self.keep(name, &file, began);
                Ok(file)
            }
            Err(Failure::File(error)) => {
                self.forget(name);
                Err(read_error(name, error))
            }
            Err(Failure::Budget) => Err(ReadError::Overloaded {
                resource: Resource::OpenObjects,
            }),
        }
    }

    /// Caches the file that a look-up found, which began at `began`, unless a later one has found another meanwhile.
    fn keep(&self, name: &str, file: &Arc<OpenFile>, began: Instant) {
        let cached = Cached {
            file: Arc::clone(file),
            validated: began,
        };
        let mut cache = self.lock();
        if cache.peek(name).is_some_and(|known| known.validated > began) {
            return;
        }
        let replaced = cache.push(name.into(), cached);
        drop(cache);
        // After the lock is released.
        drop(replaced);
    }

    fn open_or_keep(&self, name: &str) -> Result<Arc<OpenFile>, Failure> {
        let kept = self.lock().peek(name).map(|cached| Arc::clone(&cached.file));
        if let Some(kept) = kept {
            let now = self.directory.open_object(name)?;
            if Identity::of(&now)? == kept.identity() && kept.is_reachable() {
                return Ok(kept);
            }
        }
        // Before the file is opened, so that the budget is never exceeded.
        let permit = Arc::clone(&self.descriptors)
            .try_acquire_many_owned(descriptors_each(self.options.direct_io))
            .map_err(|_| Failure::Budget)?;
        let descriptor = self.directory.open_object(name)?;
        let (mut file, _) = OpenFile::from_descriptor(descriptor, self.options)?;
        file.charge(permit);
        Ok(Arc::new(file))
    }

    /// Attempts something that needs descriptors. If there are none, closes half of the cached files and tries again; then
    /// half of every dataset's.
    fn give_way<T>(&self, attempt: impl Fn() -> T, is_out: impl Fn(&T) -> bool) -> T {
        let mut result = attempt();
        if is_out(&result) {
            forget_half([Arc::clone(&self.cache)]);
            reaper::settle();
            result = attempt();
        }
        if is_out(&result) {
            free_descriptors();
            result = attempt();
        }
        result
    }

    /// Closes some of the less recently used files that no read holds, and waits until that is done.
    fn forget_idle(&self) {
        let mut forgotten = Vec::new();
        {
            let mut cache = self.lock();
            let oldest = cache.iter().rev().take(IDLE_LOOKED_AT);
            let idle = oldest.filter(|(_, cached)| Arc::strong_count(&cached.file) == 1);
            let idle: Vec<Box<str>> = idle.take(IDLE_FORGOTTEN).map(|(name, _)| name.clone()).collect();
            forgotten.extend(idle.iter().map(|name| cache.pop(name)));
        }
        drop(forgotten);
        reaper::settle();
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<Box<str>, Cached>> {
        // Nothing panics while it holds the lock, and a cache cannot become inconsistent.
        lock(&self.cache)
    }
}

/// Closes the less recently used half of every dataset's cached objects soon, except those held by reads, for others that
/// need descriptors. Returns whether there were any.
pub fn close_cached_objects() -> bool {
    let caches = lock(&CACHES).clone();
    forget_half(caches.iter().filter_map(Weak::upgrade))
}

/// As [`close_cached_objects`], and waits until that is done. Blocks.
pub fn free_descriptors() {
    close_cached_objects();
    reaper::settle();
}

/// Closes the less recently used half of each cache soon, except files held by reads. Returns whether there were any.
///
/// They may be a million: the caller, who may accept connections, leaves closing them to the reaper, and cores wait for the
/// lock while one is removed, not for all.
fn forget_half(caches: impl IntoIterator<Item = Arc<Cache>>) -> bool {
    let mut forgotten = Vec::new();
    for cache in caches {
        let all = lock(&cache).len();
        let keep = all / 2;
        // Other threads may add files, or forget half of them, too.
        let oldest = std::iter::from_fn(|| pop_beyond(keep, &cache));
        forgotten.extend(oldest.take(all - keep));
    }
    if forgotten.is_empty() {
        return false;
    }
    reaper::drop_later(Box::new(forgotten));
    true
}

/// Removes the least recently used file, unless at most `keep` are left.
fn pop_beyond(keep: usize, cache: &Cache) -> Option<(Box<str>, Cached)> {
    let mut cache = lock(cache);
    if cache.len() > keep { cache.pop_lru() } else { None }
}

/// Why an object was not opened.
enum Failure {
    File(FileError),
    /// The budget of descriptors is used up.
    Budget,
}

impl<E: Into<FileError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::File(error.into())
    }
}

/// Descriptors of one object: one for each way to read.
fn descriptors_each(direct_io: DirectIo) -> u32 {
    if direct_io == DirectIo::Off { 1 } else { 2 }
}

fn try_direct(
    directory: &Directory,
    path: &Path,
    direct_io: DirectIo,
    context: ErrorContext<'_>,
) -> Result<(OpenOptions, DirectFacts), OpenError> {
    let options = |direct_io, tried| OpenOptions {
        accept: Accept::FilesOnly,
        direct_io,
        tried,
    };
    if direct_io == DirectIo::Off {
        return Ok((
            options(DirectIo::Off, None),
            DirectFacts::buffered("off by configuration"),
        ));
    }
    let mut broken = 0;
    let tried = listing::some_file(directory, |name| {
        let opened = directory.open_object(&name);
        match opened.and_then(|file| OpenFile::from_descriptor(file, options(direct_io, None))) {
            Err(FileError::Open(error)) if is_out_of_descriptors(&error) => {
                Some(Some((name, Err(FileError::Open(error)))))
            }
            // An object that is missing, unreadable or broken says nothing about the others.
            Err(FileError::Open(_) | FileError::NotAFile(_)) => None,
            Err(FileError::TrialRead(_)) => {
                broken += 1;
                (broken == BROKEN_MAX).then_some(None)
            }
            answer => Some(Some((name, answer))),
        }
    });
    let tried = tried.map_err(|errno| context.io(path, &errno.into()))?;
    let Some((name, answer)) = tried.flatten() else {
        let why = if broken > 0 {
            "the objects that were tried cannot be read: check the device (the kernel log says more)"
        } else {
            "the directory has no object to try yet"
        };
        // 4096 is the assumed alignment; each object has its own.
        let facts = DirectFacts {
            direct: true,
            reason: format!("O_DIRECT is decided per object; {why}"),
            offset_alignment_bytes: 4096,
            memory_alignment_bytes: 4096,
        };
        return Ok((options(direct_io, None), facts));
    };
    let tried = path.join(name);
    let (file, refusal) = answer.map_err(|error| file_problem(&tried, error, context))?;
    if let Some(reason) = refusal {
        return Ok((
            options(DirectIo::Off, None),
            DirectFacts::buffered(refusal_reason(&tried, &reason)),
        ));
    }
    let in_memory = direct::is_on_tmpfs(file.buffered()).then_some(path);
    let facts = DirectFacts::aligned(file.alignment(), in_memory);
    Ok((
        options(direct_io, Some((file.identity().dev(), file.alignment()))),
        facts,
    ))
}

/// The rules of a name that need no file system.
///
/// # Errors
/// `ObjectNameInvalid`.
pub(super) fn check_name(name: &str) -> Result<(), ReadError> {
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.len() > NAME_BYTES_MAX {
        "it is longer than 4096 bytes"
    } else if name.starts_with('/') {
        "it is absolute; names are relative to the dataset's directory"
    } else if name.contains('\0') {
        "it holds a NUL byte"
    } else if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        "it has an empty, `.` or `..` part"
    } else {
        return Ok(());
    };
    let shown = name.chars().take(200).collect();
    Err(ReadError::ObjectNameInvalid { name: shown, reason })
}

fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(directory::is_out_of_descriptors)
}

fn read_error(name: &str, error: FileError) -> ReadError {
    let name = name.to_owned();
    let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let errno = match error {
        FileError::NotAFile(_) => return ReadError::ObjectNotFound { name },
        FileError::Open(error) if Errno::from_io_error(&error).is_some_and(is_absent) => {
            return ReadError::ObjectNotFound { name };
        }
        FileError::Open(error) => errno(error),
        FileError::TrialRead(error) => as_of_page_cache(errno(error)),
        FileError::DirectRefused(_) => libc::EINVAL,
    };
    ReadError::ObjectUnreadable { name, errno }
}

#[cfg(test)]
mod tests;
