//! A thread that unmaps and closes files that are no longer used.
//!
//! The last reference to a removed dataset, or to an object that the cache has evicted, may be dropped on a
//! core. Unmapping 100 GB takes milliseconds, and closing a file of a network file system asks its server,
//! while the core serves its other connections. So a core only sends the remains to this thread.

use crate::blocking::unpin;
use crate::sync::lock;
use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Mutex, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// What the thread drops.
pub(super) type Remains = Box<dyn Any + Send>;

/// Most remains that may wait. Beyond that the caller drops them itself, so that opening can never outrun
/// closing.
const WAITING_MAX: usize = 8192;

/// How long [`settle`] waits: closing a local file takes a microsecond, half of a million half a second.
const SETTLES_WITHIN: Duration = Duration::from_secs(1);
/// Pause between attempts to send to a thread that has [`WAITING_MAX`] remains left.
const PAUSE: Duration = Duration::from_millis(1);

/// The name of the thread.
const NAME: &str = "rf-reaper";

/// How long no thread is started after one was refused.
const REFUSED: Duration = Duration::from_secs(1);

/// The channel to the thread, which lives as long as the process; `None` while it cannot be started.
fn reaper() -> Option<&'static SyncSender<Remains>> {
    static REAPER: Reaper = Reaper::new();
    REAPER.started(Instant::now, |serve| {
        let serve = || {
            // It may be a core that starts it.
            unpin();
            serve();
        };
        Builder::new().name(NAME.to_owned()).spawn(serve).map(drop)
    })
}

/// The thread, started when it is first needed.
struct Reaper {
    sender: OnceLock<SyncSender<Remains>>,
    /// When it was last refused. Held while it is started.
    refused: Mutex<Option<Instant>>,
}

impl Reaper {
    const fn new() -> Self {
        Self {
            sender: OnceLock::new(),
            refused: Mutex::new(None),
        }
    }

    /// The channel to the thread, which `start` starts unless it was refused just now.
    fn started(
        &self,
        now: impl FnOnce() -> Instant,
        start: impl FnOnce(Box<dyn FnOnce() + Send>) -> io::Result<()>,
    ) -> Option<&SyncSender<Remains>> {
        if let Some(sender) = self.sender.get() {
            return Some(sender);
        }
        let mut refused = lock(&self.refused);
        let now = now();
        if self.sender.get().is_some() || refused.is_some_and(|at| now < at + REFUSED) {
            return self.sender.get();
        }
        let (sender, remains) = sync_channel::<Remains>(WAITING_MAX);
        match start(Box::new(move || remains.iter().for_each(drop))) {
            Ok(()) => Some(self.sender.get_or_init(|| sender)),
            Err(error) => {
                if refused.replace(now).is_none() {
                    tracing::warn!(
                        %error,
                        "no thread for closing files: until one can be started, they are closed where they are last used"
                    );
                }
                None
            }
        }
    }
}

/// Drops this on the thread. Does not block, unless [`WAITING_MAX`] others wait.
pub(super) fn drop_later(remains: Remains) {
    // Something that the thread drops may itself call this: sending it to the same thread would gain nothing.
    if std::thread::current().name() == Some(NAME) {
        return;
    }
    let Some(reaper) = reaper() else { return };
    match reaper.try_send(remains) {
        Ok(()) => {}
        Err(TrySendError::Full(remains) | TrySendError::Disconnected(remains)) => drop(remains),
    }
}

/// Waits until everything sent so far is dropped, for callers that need the descriptors back. Blocks, at most
/// [`SETTLES_WITHIN`]: a file system that does not answer may hold the thread for any time.
pub(super) fn settle() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !settles_within(SETTLES_WITHIN) && !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "closing files takes long: a file system may not respond. Descriptors that wait to be closed count as open"
        );
    }
}

/// Waits as `settle` does, at most for `limit`; returns whether everything is dropped.
pub(super) fn settles_within(limit: Duration) -> bool {
    struct Tell(SyncSender<()>);
    impl Drop for Tell {
        fn drop(&mut self) {
            let _gone = self.0.send(());
        }
    }
    let Some(reaper) = reaper() else { return true };
    let deadline = Instant::now() + limit;
    let left = || deadline.saturating_duration_since(Instant::now());
    let (dropped, wait) = sync_channel(1);
    let mut last: Remains = Box::new(Tell(dropped));
    while let Err(refused) = reaper.try_send(last) {
        let (TrySendError::Full(back) | TrySendError::Disconnected(back)) = refused;
        if left().is_zero() {
            return false;
        }
        last = back;
        std::thread::sleep(PAUSE);
    }
    wait.recv_timeout(left()).is_ok()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::config::DirectIo;
    use crate::dataset::{Dataset, DatasetSpec, KindSpec, OpenFile};
    use std::sync::MutexGuard;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Some tests fill the queue, so that others' files would be closed by their callers.
    static ALONE: Mutex<()> = Mutex::new(());

    pub(in crate::dataset) fn alone() -> MutexGuard<'static, ()> {
        lock(&ALONE)
    }

    /// Sends the name of the thread that drops it.
    struct Witness(Sender<Option<String>>);

    impl Drop for Witness {
        fn drop(&mut self) {
            let name = std::thread::current().name().map(str::to_owned);
            // A test that has failed receives no more.
            let _gone = self.0.send(name);
        }
    }

    /// Holds up who drops it.
    struct Stuck(Receiver<()>);

    impl Drop for Stuck {
        fn drop(&mut self) {
            let _released = self.0.recv();
        }
    }

    fn watched(file: &OpenFile) -> Receiver<Option<String>> {
        let (tell, told) = channel();
        watch(file, &tell);
        told
    }

    /// Sends the name of the thread that unmaps the file.
    pub(in crate::dataset) fn watch(file: &OpenFile, tell: &Sender<Option<String>>) {
        assert!(file.attached.set(Box::new(Witness(tell.clone()))).is_ok());
    }

    /// The reaper is stuck until this is dropped, and has room for so many remains.
    pub(in crate::dataset) fn stuck_with_room_for(remains: usize) -> Sender<()> {
        let (release, released) = channel();
        drop_later(Box::new(Stuck(released)));
        (remains..WAITING_MAX).for_each(|_| drop_later(Box::new(())));
        release
    }

    /// That many files were unmapped by the reaper.
    pub(in crate::dataset) fn expect_reaped(told: &Receiver<Option<String>>, files: usize) {
        for _ in 0..files {
            let by = told.recv_timeout(Duration::from_secs(30)).unwrap();
            assert_eq!(by.as_deref(), Some(NAME));
        }
    }

    #[test]
    fn a_file_is_unmapped_and_closed_by_the_reaper() {
        let _alone = alone();
        // Scenario: the last reference to a file, and to a dataset, is dropped here. Expectation: the reaper
        // drops what is attached to the file (a mapping, for example), then closes the descriptors.
        let named = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(named.path(), [1; 4096]).unwrap();
        let file = OpenFile::open(named.path(), DirectIo::Preferred).unwrap();
        let told = watched(&file);
        drop(file);
        let by = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(by.as_deref(), Some(NAME));

        let spec = DatasetSpec::new("d", named.path(), KindSpec::blocks(4096), DirectIo::Preferred);
        let dataset = Dataset::open(&spec).unwrap();
        let told = watched(&dataset.files()[0]);
        drop(dataset);
        let by = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(by.as_deref(), Some(NAME));

        assert!(settles_within(Duration::from_secs(30)));
        let held = std::fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
            let target = entry
                .as_ref()
                .ok()
                .and_then(|entry| std::fs::read_link(entry.path()).ok());
            target.as_deref() == Some(named.path())
        });
        // The temporary file itself has one.
        assert_eq!(held.count(), 1);
    }

    #[test]
    fn a_dataset_of_many_files_is_closed_by_the_reaper() {
        let _alone = alone();
        // Scenario: the reaper is stuck, and has room for fewer remains than a dataset has files, when that is dropped.
        // Expectation: the reaper closes every file.
        const FILES: usize = 400;
        let named = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(named.path(), [1]).unwrap();
        let spec = DatasetSpec {
            name: "d".to_owned(),
            paths: vec![named.path().to_owned(); FILES],
            kind: KindSpec::blocks(1),
            direct_io: DirectIo::Off,
        };
        let dataset = Dataset::open(&spec).unwrap();
        let (tell, told) = channel();
        dataset.files().iter().for_each(|file| watch(file, &tell));
        let release = stuck_with_room_for(FILES / 2);
        drop(dataset);
        drop(release);
        expect_reaped(&told, FILES);
    }

    #[test]
    fn a_thread_that_is_refused_is_started_later() {
        // Scenario: the system refuses the thread; it is needed again at once, and a second later, when it starts.
        // Expectation: no channel, twice, without another attempt; then one to the thread, which drops what is sent.
        let (reaper, begin) = (Reaper::new(), Instant::now());
        let at = |pause: Duration| move || begin + pause;
        let refuse = |_| Err(io::Error::from_raw_os_error(libc::EAGAIN));
        assert!(reaper.started(at(Duration::ZERO), refuse).is_none());
        let again = reaper.started(at(REFUSED / 2), |_| panic!("no sooner than after a second"));
        assert!(again.is_none());
        let start = |serve| Builder::new().name("later".to_owned()).spawn(serve).map(drop);
        let (tell, told) = channel();
        reaper
            .started(at(REFUSED), start)
            .unwrap()
            .send(Box::new(Witness(tell)))
            .unwrap();
        let by = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(by.as_deref(), Some("later"));
        let there = reaper.started(at(REFUSED), |_| panic!("it is there"));
        assert!(there.is_some());
    }

    #[test]
    fn what_the_reaper_drops_may_drop_more() {
        let _alone = alone();
        // Scenario: something whose drop sends more to drop, often. Expectation: all is dropped, no hang.
        const COUNT: usize = 2 * WAITING_MAX;
        struct Nested(Sender<Option<String>>);
        impl Drop for Nested {
            fn drop(&mut self) {
                drop_later(Box::new(Witness(self.0.clone())));
            }
        }
        let (tell, told) = channel();
        for _ in 0..COUNT {
            drop_later(Box::new(Nested(tell.clone())));
        }
        for _ in 0..COUNT {
            told.recv_timeout(Duration::from_secs(30)).unwrap();
        }
    }

    #[test]
    fn a_file_system_that_does_not_respond_holds_up_nobody_who_needs_descriptors() {
        let _alone = alone();
        // Scenario: the reaper is stuck in a close, and later comes out of it. Expectation: who waits for
        // descriptors gives up, and then gets them.
        let (release, released) = channel();
        drop_later(Box::new(Stuck(released)));
        assert!(!settles_within(Duration::from_millis(10)));
        drop(release);
        assert!(settles_within(Duration::from_secs(30)));
    }
}
