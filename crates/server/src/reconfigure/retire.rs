//! Datasets that are no longer served but still being read. Once the last reader is gone, a task frees what
//! the engine holds for them. The task runs only while there are such datasets.

use ringfetch_engine::dataset::{Dataset, WeakDataset};
use ringfetch_engine::engine::Engine;
use ringfetch_engine::sync::lock;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Handle;

/// Delay of the first check; it doubles up to the longest.
const LOOK_FIRST: Duration = Duration::from_millis(20);
const LOOK_LONGEST: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct State {
    datasets: Vec<WeakDataset>,
    watched: bool,
}

#[derive(Debug, Default)]
pub(super) struct RetiredDatasets {
    state: Mutex<State>,
}

impl RetiredDatasets {
    /// Adds a dataset that is no longer served. Before the engine retires its name.
    pub(super) fn add(&self, dataset: &Dataset) {
        let mut state = lock(&self.state);
        state.datasets.push(dataset.downgrade());
    }

    /// Starts the task, unless it is running or there are no datasets.
    pub(super) fn watch(self: &Arc<Self>, runtime: &Handle, engine: &Engine) {
        let mut state = lock(&self.state);
        if state.watched {
            return;
        }
        if state.datasets.is_empty() {
            engine.retired_are_closed();
            return;
        }
        state.watched = true;
        runtime.spawn(Arc::clone(self).sweep(engine.clone()));
    }

    async fn sweep(self: Arc<Self>, engine: Engine) {
        let mut wait = LOOK_FIRST;
        let mut again = false;
        loop {
            tokio::time::sleep(wait).await;
            let some = self.drop_gone();
            if some || again {
                engine.sweep();
                wait = LOOK_FIRST;
            } else {
                wait = (wait * 2).min(LOOK_LONGEST);
            }
            // Sweep once more, for shards whose inbox was full.
            again = some;
            let mut state = lock(&self.state);
            if state.datasets.is_empty() && !again {
                engine.retired_are_closed();
                state.watched = false;
                return;
            }
        }
    }

    /// Removes datasets without readers; returns whether there were any.
    fn drop_gone(&self) -> bool {
        let mut state = lock(&self.state);
        let before = state.datasets.len();
        state.datasets.retain(|dataset| dataset.is_open());
        state.datasets.len() < before
    }
}
