//! The datasets that a shard has read: their counters, and the files introduced to its backend.

use crate::backend::Backend;
use crate::config::BackendKind;
use crate::dataset::WeakDataset;
use crate::metrics::{DatasetCounters, ShardMetrics};
use crate::planned_batch::PlannedBatch;
use std::sync::Arc;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct KnownDatasets(Vec<Known>);

#[derive(Debug)]
struct Known {
    id: u64,
    /// Shows whether the dataset has other users.
    dataset: WeakDataset,
    /// Its files that were introduced to the backend.
    files: Vec<u64>,
    /// One for each backend that read it.
    counters: Vec<(BackendKind, Arc<DatasetCounters>)>,
}

impl KnownDatasets {
    /// The counters of a batch's dataset and backend; introduces a new dataset to the backend.
    pub(super) fn counters_of<B: Backend>(
        &mut self,
        batch: &PlannedBatch,
        backend: &mut B,
        metrics: &ShardMetrics,
    ) -> Arc<DatasetCounters> {
        let id = batch.dataset.id();
        if let Some(known) = self.0.iter().find(|known| known.id == id)
            && let Some((_, counters)) = known.counters.iter().find(|(of, _)| *of == batch.backend)
        {
            return Arc::clone(counters);
        }
        let counters = metrics.dataset(batch.dataset.name(), batch.backend);
        let of_backend = (batch.backend, Arc::clone(&counters));
        if let Some(known) = self.0.iter_mut().find(|known| known.id == id) {
            known.counters.push(of_backend);
            return counters;
        }
        self.0.push(Known {
            id,
            dataset: batch.dataset.downgrade(),
            files: backend.introduce(batch.dataset.files()),
            counters: vec![of_backend],
        });
        counters
    }

    /// Forgets the datasets without other users.
    pub(super) fn sweep<B: Backend>(&mut self, backend: &mut B) {
        // A batch holds its dataset until the reply, so nothing in flight is forgotten.
        self.0.retain(|known| {
            let held = known.dataset.is_open();
            if !held {
                backend.forget(&known.files);
            }
            held
        });
    }
}
