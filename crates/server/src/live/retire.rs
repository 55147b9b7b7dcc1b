//! Datasets that are served no more and still read: when the last of their readers is gone, what the engine holds of them
//! is let go of. Looked at now and then, by one task, only while there are any.

use crate::fetch::Fetcher;
use ringfetch_engine::dataset::Dataset;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::runtime::Handle;

/// The first look; later ones wait twice as long each, up to the longest.
const LOOK_FIRST: Duration = Duration::from_millis(20);
const LOOK_LONGEST: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct State {
    /// With its id, which outlives it.
    datasets: Vec<(u64, Weak<Dataset>)>,
    watched: bool,
}

/// The retired datasets.
#[derive(Debug, Default)]
pub(super) struct Retired {
    state: Mutex<State>,
}

impl Retired {
    /// Adds one that is not served any more.
    pub(super) fn add(&self, dataset: &Arc<Dataset>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.datasets.push((dataset.id(), Arc::downgrade(dataset)));
    }

    /// Watches them, unless there are none or it is done already.
    pub(super) fn watch(self: &Arc<Self>, runtime: &Handle, fetcher: &Fetcher) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.watched || state.datasets.is_empty() {
            return;
        }
        state.watched = true;
        runtime.spawn(Arc::clone(self).let_go(fetcher.clone()));
    }

    async fn let_go(self: Arc<Self>, fetcher: Fetcher) {
        let mut wait = LOOK_FIRST;
        loop {
            tokio::time::sleep(wait).await;
            let gone = self.take_gone();
            if gone.is_empty() {
                wait = (wait * 2).min(LOOK_LONGEST);
            } else {
                gone.iter().for_each(|id| fetcher.forget_backend(*id));
                fetcher.engine().sweep();
                wait = LOOK_FIRST;
            }
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.datasets.is_empty() {
                state.watched = false;
                return;
            }
        }
    }

    /// Those that nobody reads any more: their ids.
    fn take_gone(&self) -> Vec<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_gone = |(_, dataset): &mut (u64, Weak<Dataset>)| dataset.strong_count() == 0;
        state.datasets.extract_if(.., is_gone).map(|(id, _)| id).collect()
    }
}
