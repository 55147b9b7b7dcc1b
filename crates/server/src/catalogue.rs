//! The open datasets, and which of them stay open under a new configuration.
//!
//! A reload opens every dataset of the new configuration again, which finds errors and files that were
//! replaced. A dataset that is still the same keeps its open files, and with them its counters and caches.

use crate::file_step;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, OpenError, free_descriptors};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Time to open a file, besides that of any step.
const FILE_WITHIN: Duration = Duration::from_millis(20);

/// Errors of all datasets that cannot be opened; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenErrors(pub Vec<OpenError>);

impl std::fmt::Display for OpenErrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lines: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n  "))
    }
}

impl std::error::Error for OpenErrors {}

/// Open datasets by their names.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    datasets: BTreeMap<String, Arc<Dataset>>,
}

/// How a reload changed the datasets: names, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CatalogueDiff {
    /// New names.
    pub added: Vec<String>,
    /// Names that no longer exist.
    pub removed: Vec<String>,
    /// Opened again: other files, or another configuration.
    pub replaced: Vec<String>,
    /// Kept open.
    pub unchanged: Vec<String>,
}

impl Catalogue {
    /// Opens every dataset; `begins` is called before each.
    ///
    /// # Errors
    /// The errors of all datasets that cannot be opened; of those that this host refuses only the first, since the others
    /// might open without it.
    pub fn open(specs: &[DatasetSpec], begins: impl Fn(&DatasetSpec)) -> Result<Self, OpenErrors> {
        let open = |spec: &DatasetSpec, _: Option<&Arc<Dataset>>| {
            begins(spec);
            Ok(Dataset::open(spec).map(Arc::new))
        };
        Ok(Self::default().renewed_by(specs, open)?.0)
    }

    /// The catalogue of a new configuration; datasets that are still the same stay open. Ends with the first dataset whose
    /// file system does not respond.
    ///
    /// # Errors
    /// As [`Catalogue::open`].
    pub fn renewed(&self, specs: &[DatasetSpec]) -> Result<(Self, CatalogueDiff), OpenErrors> {
        self.renewed_by(specs, open_in_time)
    }

    /// `open` gets what is open under this name, and returns it if it is still the same. An outer error of it ends this.
    fn renewed_by(
        &self,
        specs: &[DatasetSpec],
        open: impl Fn(&DatasetSpec, Option<&Arc<Dataset>>) -> Result<Result<Arc<Dataset>, OpenError>, OpenError>,
    ) -> Result<(Self, CatalogueDiff), OpenErrors> {
        let mut next = Self::default();
        let mut difference = CatalogueDiff::default();
        let (mut errors, mut is_refused) = (Vec::new(), false);
        for spec in specs {
            let name = &spec.name;
            let known = self.datasets.get(name);
            let opened = match open(spec, known) {
                Ok(Err(error)) if error.is_refused_by_host && !is_refused => {
                    // Cached objects give way, and what was opened only to compare it is closed.
                    free_descriptors();
                    open(spec, known)
                }
                opened => opened,
            };
            let opened = match opened {
                Ok(opened) => opened,
                Err(hangs) => {
                    errors.push(hangs);
                    break;
                }
            };
            let (dataset, list) = match (opened, known) {
                (Ok(fresh), None) => (fresh, &mut difference.added),
                (Ok(kept), Some(known)) if Arc::ptr_eq(&kept, known) => (kept, &mut difference.unchanged),
                (Ok(fresh), Some(_)) => (fresh, &mut difference.replaced),
                (Err(error), _) => {
                    if !error.is_refused_by_host || !is_refused {
                        is_refused |= error.is_refused_by_host;
                        errors.push(error);
                    }
                    continue;
                }
            };
            list.push(name.clone());
            next.datasets.insert(name.clone(), dataset);
        }
        if !errors.is_empty() {
            return Err(OpenErrors(errors));
        }
        for names in [
            &mut difference.added,
            &mut difference.unchanged,
            &mut difference.replaced,
        ] {
            names.sort_unstable();
        }
        let gone = |name: &&String| !next.datasets.contains_key(*name);
        difference.removed = self.datasets.keys().filter(gone).cloned().collect();
        Ok((next, difference))
    }

    /// Every dataset.
    pub fn datasets(&self) -> Vec<Arc<Dataset>> {
        self.datasets.values().map(Arc::clone).collect()
    }
}

/// Opens a dataset, or keeps the known one if it is still the same: no more than one dataset is open twice. An outer error: that
/// is not done in time.
fn open_in_time(
    spec: &DatasetSpec,
    known: Option<&Arc<Dataset>>,
) -> Result<Result<Arc<Dataset>, OpenError>, OpenError> {
    let count = u32::try_from(spec.paths.len()).unwrap_or(u32::MAX);
    let limit = file_step::WITHIN.saturating_add(FILE_WITHIN.saturating_mul(count));
    let files: Vec<_> = spec.paths.iter().map(|path| path.display()).collect();
    let opened = {
        // Does not keep it open: a step that hangs may outlive the reload that removes it.
        let (spec, known) = (spec.clone(), known.map(Arc::downgrade));
        file_step::run(&files, limit, move || {
            let fresh = Dataset::open(&spec)?;
            Ok(known
                .and_then(|known| known.upgrade())
                .filter(|open| is_same(open, &fresh))
                .unwrap_or_else(|| Arc::new(fresh)))
        })
    };
    opened.map_err(|problem| OpenError {
        dataset: spec.name.clone(),
        field: "path",
        problem,
        is_refused_by_host: true,
    })
}

fn is_same(open: &Dataset, fresh: &Dataset) -> bool {
    open.spec() == fresh.spec()
        && open.kind() == fresh.kind()
        && open.direct() == fresh.direct()
        && open.has_files_of(fresh)
}
