//! Steps of a reload that use files, bounded in time: a file system that does not respond must not block the changes after
//! it, one of which may remove what is on it.

use crate::config::listed;
use ringfetch_engine::blocking::BlockingPool;
use ringfetch_engine::sync::lock;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Threads for the steps. One that waits for a file system stays behind, and a reload leaves at most one.
const STEPS_MAX: usize = 16;
static STEPS: BlockingPool = BlockingPool::new("rf-change-file", STEPS_MAX);

/// The steps that run, by what they use.
static RUNNING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// How long a step may take; longer if it opens many files.
pub(crate) const WITHIN: Duration = Duration::from_secs(10);
/// A step that takes longer is logged.
const LONG: Duration = Duration::from_secs(5);

struct Running(String);

impl Drop for Running {
    fn drop(&mut self) {
        lock(&RUNNING).remove(&self.0);
    }
}

/// Makes a step that uses `files`, at most for `limit`. Blocks.
///
/// # Errors
/// It is not over by then, nor is an earlier one that uses this; or there is no thread. As text that names the first ones.
pub(crate) fn run<T: Send + 'static>(
    files: &[impl fmt::Display],
    limit: Duration,
    step: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let file = listed(files, ", ");
    // All of them: nobody knows which one hangs, and a step that leaves that one out is another.
    let names: Vec<_> = files.iter().map(ToString::to_string).collect();
    let all = names.join(", ");
    let running = {
        let mut running = lock(&RUNNING);
        if running.contains(&all) {
            return Err(format!(
                "{file}: its file system has not responded to an earlier reload yet, or another program keeps its lease; name other files, or \
                 retry when it has"
            ));
        }
        if running.len() >= STEPS_MAX {
            return Err(format!(
                "{file}: {STEPS_MAX} earlier reloads wait for file systems that do not respond; restart the daemon"
            ));
        }
        running.insert(all.clone());
        Running(all)
    };
    let (done, result) = sync_channel(1);
    let call = move || {
        let value = step();
        drop(running);
        // An error means that nobody waits any more.
        let _gone = done.send(value);
    };
    STEPS
        .run(call)
        .map_err(|error| format!("{file}: no thread: {error}; retry after a moment"))?;
    let mut waited = result.recv_timeout(LONG.min(limit));
    if matches!(waited, Err(RecvTimeoutError::Timeout)) && LONG < limit {
        tracing::warn!(file, "a reload takes long: its file system may not respond");
        waited = result.recv_timeout(limit - LONG);
    }
    waited.map_err(|error| match error {
        RecvTimeoutError::Timeout => format!(
            "{file}: its file system has not responded for {} s, or another program keeps its lease; name other files, or retry when it \
             has",
            limit.as_secs()
        ),
        RecvTimeoutError::Disconnected => format!("{file}: reading it panicked; report this defect"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn of_many_files_a_refusal_names_the_first_ones() {
        // Scenario: a step that uses 30 files does not return; then it is made again, and without the last file. Expectation:
        // 20 names and the number of the others; as much; the third is another step, and made.
        let (release, hang) = channel::<()>();
        let files: Vec<_> = (0..30).map(|number| format!("file-{number}")).collect();
        let late = run(&files, Duration::ZERO, move || _ = hang.recv());
        let again = run(&files, WITHIN, || ());
        for problem in [late, again] {
            let problem = problem.unwrap_err();
            assert!(problem.contains("file-19, and 10 more: its"), "{problem}");
        }
        assert_eq!(run(&files[..29], WITHIN, || 7), Ok(7));
        drop(release);
    }

    #[test]
    fn a_step_that_hangs_is_left_behind_once() {
        // Scenario: a step that does not return; another one for the same file; one for another file; the first one ends.
        // Expectation: the first two are refused and name the file, the second at once; the third is made; and then one
        // for the first file, too.
        let (release, hang) = channel::<()>();
        let (left, ended) = channel();
        let first = run(&["hangs"], Duration::ZERO, move || {
            let _released = hang.recv();
            left.send(()).unwrap();
        });
        assert!(first.unwrap_err().starts_with("hangs: its file system"));
        let again = run(&["hangs"], WITHIN, || ());
        assert!(again.unwrap_err().contains("an earlier reload"));
        assert_eq!(run(&["answers"], WITHIN, || 7), Ok(7));
        drop(release);
        ended.recv().unwrap();
        while lock(&RUNNING).contains("hangs") {
            std::thread::yield_now();
        }
        assert_eq!(run(&["hangs"], WITHIN, || 7), Ok(7));
    }
}
