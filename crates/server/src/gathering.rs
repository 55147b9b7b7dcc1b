//! Figures gathered on a thread that is no core: with a thousand datasets they take 70 ms, for which a core would serve nobody.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringfetch_engine::blocking::BlockingPool;

static GATHERER: BlockingPool = BlockingPool::new("rf-metrics", 1);

/// Figures of one kind. They are gathered once at a time, for all that were waiting when that began, so that nobody waits for
/// more than two.
#[derive(Debug)]
pub(crate) struct Gathering<T> {
    /// How long figures are given to those that come later.
    fresh_for: Duration,
    /// The last figures, and when gathering began, while they are fresh or awaited. Locked while others are gathered.
    last: Arc<tokio::sync::Mutex<Option<(Instant, T)>>>,
    waiting: Arc<AtomicUsize>,
}

/// One that waits for its turn.
struct Waits<'a>(&'a AtomicUsize);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<T: Clone + Send + 'static> Gathering<T> {
    pub(crate) fn new(fresh_for: Duration) -> Self {
        Self {
            fresh_for,
            last: Arc::default(),
            waiting: Arc::default(),
        }
    }

    /// Figures that are fresh and `is_current`, or what `gather` returns.
    ///
    /// # Errors
    /// Gathering panicked.
    pub(crate) async fn get(
        &self,
        is_current: impl Fn(&T) -> bool,
        gather: impl Fn() -> T + Clone + Send + 'static,
    ) -> Result<T, &'static str> {
        let asked = Instant::now();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let waits = Waits(&self.waiting);
        let mut turn = Arc::clone(&self.last).lock_owned().await;
        drop(waits);
        let (fresh_for, waiting) = (self.fresh_for, Arc::clone(&self.waiting));
        let is_kept = move || !fresh_for.is_zero() || waiting.load(Ordering::Relaxed) > 0;
        let last = turn.take();
        let is_fresh = |(begun, figures): &(Instant, T)| *begun + fresh_for >= asked && is_current(figures);
        if let Some((begun, figures)) = last.filter(is_fresh) {
            *turn = is_kept().then(|| (begun, figures.clone()));
            return Ok(figures);
        }
        let on_this_thread = gather.clone();
        // The turn ends with the figures, even if nobody waits for them any more.
        let gathered = GATHERER.run(move || {
            let begun = Instant::now();
            let figures = gather();
            *turn = is_kept().then(|| (begun, figures.clone()));
            figures
        });
        match gathered {
            Ok(gathered) => gathered.await.map_err(|_dropped| "gathering them panicked"),
            Err(_no_thread) => Ok(on_this_thread()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::{FutureExt as _, join_all};
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    #[tokio::test]
    async fn those_that_wait_get_the_same_figures() {
        // Scenario: figures are being gathered; ten more clients come, of which one leaves; it ends. Expectation: they are gathered
        // once more, for all of them, and not kept; for a later client anew.
        let (began, gathers) = channel();
        let (release, held) = channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let gather = move || {
            began.send(()).expect("the test");
            // An error: the test releases everything.
            let _released = held.lock().expect("the test").recv();
        };
        let gathering = Gathering::new(Duration::ZERO);
        let get = || Box::pin(gathering.get(|()| true, gather.clone()));
        let mut first = get();
        assert!(first.as_mut().now_or_never().is_none());
        gathers.recv().expect("they are gathered");
        let mut others: Vec<_> = (0..10).map(|_| get()).collect();
        assert!(
            others
                .iter_mut()
                .all(|other| other.as_mut().now_or_never().is_none())
        );
        others.pop();
        drop(release);
        first.await.expect("figures");
        assert!(join_all(others).await.iter().all(Result::is_ok));
        assert!(gathering.last.lock().await.is_none());
        assert_eq!(gathers.try_iter().count(), 1);
        get().await.expect("figures");
        assert_eq!(gathers.try_iter().count(), 1);
    }

    #[tokio::test]
    async fn fresh_figures_are_given_again_unless_they_are_not_current() {
        // Figures that stay fresh for an hour, asked for twice; then by one to whom they are not current.
        let gathered = Arc::new(AtomicUsize::new(0));
        let gather = {
            let gathered = Arc::clone(&gathered);
            move || gathered.fetch_add(1, Ordering::Relaxed)
        };
        let gathering = Gathering::new(Duration::from_secs(3600));
        assert_eq!(gathering.get(|_| true, gather.clone()).await, Ok(0));
        assert_eq!(gathering.get(|_| true, gather.clone()).await, Ok(0));
        assert_eq!(gathering.get(|figures| *figures > 0, gather).await, Ok(1));
        assert_eq!(gathered.load(Ordering::Relaxed), 2);
    }
}
