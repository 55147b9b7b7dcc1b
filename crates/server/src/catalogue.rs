//! The open datasets, and which of them stay open under a new configuration.
//!
//! A reload opens every dataset of the new configuration again, which finds errors and files that were
//! replaced. A dataset that is still the same keeps its open files, and with them its counters and caches.

use crate::file_step;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, Kind, OpenError, free_descriptors};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
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

/// An open dataset.
#[derive(Debug, Clone)]
struct Entry {
    dataset: Arc<Dataset>,
    /// Device and inode of an objects dataset's directory; its entity tag also changes with every file
    /// created in it.
    directory: Option<(u64, u64)>,
}

/// Open datasets by their names.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    entries: BTreeMap<String, Entry>,
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
        let open = |spec: &DatasetSpec| {
            begins(spec);
            Ok(Entry::open(spec))
        };
        Ok(Self::default().renewed_by(specs, open)?.0)
    }

    /// The catalogue of a new configuration; datasets that are still the same stay open. Ends with the first dataset whose
    /// file system does not respond.
    ///
    /// # Errors
    /// As [`Catalogue::open`].
    pub fn renewed(&self, specs: &[DatasetSpec]) -> Result<(Self, CatalogueDiff), OpenErrors> {
        self.renewed_by(specs, Entry::open_in_time)
    }

    /// An outer error of `open` ends it.
    fn renewed_by(
        &self,
        specs: &[DatasetSpec],
        open: impl Fn(&DatasetSpec) -> Result<Result<Entry, OpenError>, OpenError>,
    ) -> Result<(Self, CatalogueDiff), OpenErrors> {
        let mut next = Self::default();
        let mut difference = CatalogueDiff::default();
        let (mut errors, mut is_refused) = (Vec::new(), false);
        for spec in specs {
            let name = &spec.name;
            let fresh = match open(spec) {
                Ok(Err(error)) if error.is_refused_by_host && !is_refused => {
                    // Cached objects give way, and what was opened only to compare it is closed.
                    free_descriptors();
                    open(spec)
                }
                opened => opened,
            };
            let fresh = match fresh {
                Ok(opened) => opened,
                Err(hangs) => {
                    errors.push(hangs);
                    break;
                }
            };
            let (entry, list) = match (fresh, self.entries.get(name)) {
                (Ok(fresh), None) => (fresh, &mut difference.added),
                // At once, so that no more than one dataset is open twice.
                (Ok(fresh), Some(open)) if open.is_same(&fresh) => (open.clone(), &mut difference.unchanged),
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
            next.entries.insert(name.clone(), entry);
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
        let gone = |name: &&String| !next.entries.contains_key(*name);
        difference.removed = self.entries.keys().filter(gone).cloned().collect();
        Ok((next, difference))
    }

    /// Every dataset.
    pub fn datasets(&self) -> Vec<Arc<Dataset>> {
        let entries = self.entries.values();
        entries.map(|entry| Arc::clone(&entry.dataset)).collect()
    }
}

impl Entry {
    fn open(spec: &DatasetSpec) -> Result<Self, OpenError> {
        // Before the open: if the directory is replaced in between, the next reload detects it.
        let directory = spec.paths.first().and_then(|path| identity_of(path));
        let dataset = Arc::new(Dataset::open(spec)?);
        let directory = match dataset.kind() {
            Kind::Objects => directory,
            Kind::Blocks { .. } | Kind::Vectors { .. } => None,
        };
        Ok(Self { dataset, directory })
    }

    /// An outer error: it is not open in time.
    fn open_in_time(spec: &DatasetSpec) -> Result<Result<Self, OpenError>, OpenError> {
        let count = u32::try_from(spec.paths.len()).unwrap_or(u32::MAX);
        let limit = file_step::WITHIN.saturating_add(FILE_WITHIN.saturating_mul(count));
        let files: Vec<_> = spec.paths.iter().map(|path| path.display()).collect();
        let opened = {
            let spec = spec.clone();
            file_step::run(&files, limit, move || Self::open(&spec))
        };
        opened.map_err(|problem| OpenError {
            dataset: spec.name.clone(),
            field: "path",
            problem,
            is_refused_by_host: true,
        })
    }

    fn is_same(&self, fresh: &Self) -> bool {
        let (open, new) = (&self.dataset, &fresh.dataset);
        let same_files = match new.kind() {
            Kind::Objects => self.directory == fresh.directory,
            Kind::Blocks { .. } | Kind::Vectors { .. } => open.etag() == new.etag(),
        };
        same_files && open.spec() == new.spec() && open.kind() == new.kind() && open.direct() == new.direct()
    }
}

fn identity_of(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}
