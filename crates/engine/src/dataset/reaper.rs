//! Where files end: a thread that unmaps and closes what nobody uses any more.
//!
//! The last request to hold a removed dataset may end on a core, and so may the last one to hold an object that the
//! cache has evicted. Unmapping 100 GB takes milliseconds, and closing a file of a network file system asks its
//! server. A core serves all its connections meanwhile, so it only sends what it has to a thread.

use std::any::Any;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::Builder;

/// What is dropped by the thread.
pub(super) type Remains = Box<dyn Any + Send>;

/// What may wait for the thread. Beyond it, whoever drops closes it there and then, so that opening can never outrun
/// closing.
const WAITING_MAX: usize = 8192;

/// The name of the thread.
const NAME: &str = "rf-reaper";

/// The way to the thread, which is started with the first call and lives as long as the process; `None` if it cannot be.
fn reaper() -> Option<&'static SyncSender<Remains>> {
    static REAPER: OnceLock<Option<SyncSender<Remains>>> = OnceLock::new();
    let start = || {
        let (sender, remains) = sync_channel::<Remains>(WAITING_MAX);
        let serve = move || remains.iter().for_each(drop);
        match Builder::new().name(NAME.to_owned()).spawn(serve) {
            Ok(_) => Some(sender),
            Err(error) => {
                tracing::warn!(%error, "no thread for closing files: they are closed where they are last used");
                None
            }
        }
    };
    REAPER.get_or_init(start).as_ref()
}

/// Drops this on the thread. Does not block, unless [`WAITING_MAX`] others wait.
pub(super) fn drop_later(remains: Remains) {
    // What the thread drops may itself have something to drop: sending that to itself would gain nothing.
    if std::thread::current().name() == Some(NAME) {
        return;
    }
    let Some(reaper) = reaper() else { return };
    match reaper.try_send(remains) {
        Ok(()) => {}
        Err(TrySendError::Full(remains) | TrySendError::Disconnected(remains)) => drop(remains),
    }
}

/// Waits until everything that was sent so far is dropped: for who needs the descriptors back. Blocks.
pub(super) fn settle() {
    struct Tell(SyncSender<()>);
    impl Drop for Tell {
        fn drop(&mut self) {
            let _gone = self.0.send(());
        }
    }
    let (dropped, wait) = sync_channel(1);
    if let Some(reaper) = reaper()
        && reaper.send(Box::new(Tell(dropped))).is_ok()
    {
        // An error would be a marker that was dropped without a word, which it never is.
        let _told = wait.recv();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DirectIo;
    use crate::dataset::{Dataset, DatasetSpec, KindSpec, OpenFile, PartialTail};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::Duration;

    /// One of these tests fills the queue, in which case the other's file would be closed where it is dropped.
    static ALONE: Mutex<()> = Mutex::new(());

    fn alone() -> MutexGuard<'static, ()> {
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the name of the thread that drops it.
    struct Witness(Sender<Option<String>>);

    impl Drop for Witness {
        fn drop(&mut self) {
            let name = std::thread::current().name().map(str::to_owned);
            self.0.send(name).unwrap();
        }
    }

    fn watched(file: &OpenFile) -> Receiver<Option<String>> {
        let (tell, told) = channel();
        assert!(file.attached.set(Box::new(Witness(tell))).is_ok());
        told
    }

    #[test]
    fn a_file_is_unmapped_and_closed_by_the_reaper() {
        let _alone = alone();
        // Scenario: the last reference to a file, and to a dataset, is dropped here. Expectation: what is attached to
        // the file (a mapping, say) is dropped by the thread for that, and then the descriptors are closed.
        let named = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(named.path(), [1; 4096]).unwrap();
        let file = OpenFile::open(named.path(), DirectIo::Preferred).unwrap();
        let told = watched(&file);
        drop(file);
        let by = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(by.as_deref(), Some(NAME));

        let kind = KindSpec::Blocks {
            block_bytes: 4096,
            partial_tail: PartialTail::Refuse,
        };
        let spec = DatasetSpec {
            name: "d".to_owned(),
            paths: vec![named.path().to_owned()],
            kind,
            direct_io: DirectIo::Preferred,
        };
        let dataset = Dataset::open(&spec).unwrap();
        let told = watched(&dataset.files()[0]);
        drop(dataset);
        let by = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(by.as_deref(), Some(NAME));

        settle();
        let held = std::fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
            let target = entry
                .as_ref()
                .ok()
                .and_then(|entry| std::fs::read_link(entry.path()).ok());
            target.as_deref() == Some(named.path())
        });
        // `named` itself has one.
        assert_eq!(held.count(), 1);
    }

    #[test]
    fn what_the_reaper_drops_may_drop_more() {
        let _alone = alone();
        // Scenario: something whose drop sends something to be dropped, often. Expectation: all is dropped, no hang.
        struct Nested(Sender<Option<String>>);
        impl Drop for Nested {
            fn drop(&mut self) {
                drop_later(Box::new(Witness(self.0.clone())));
            }
        }
        let (tell, told) = channel();
        for _ in 0..2 * WAITING_MAX {
            drop_later(Box::new(Nested(tell.clone())));
        }
        settle();
        assert_eq!(told.try_iter().count(), 2 * WAITING_MAX);
    }
}
