//! An open file, with an owner that keeps it open.
//!
//! Every read holds its file. Counted at the file, the reads of all cores would write to one cache line; so they are
//! counted at whoever holds the file for their batch, which is the core's own.

use super::OpenFile;
use std::any::Any;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

/// See the module. Clones count at the owner, too.
#[derive(Debug, Clone)]
pub(crate) struct HeldFile {
    _owner: Arc<dyn Any + Send + Sync>,
    /// Part of the owner, or kept by it.
    file: NonNull<OpenFile>,
}

// SAFETY: it gives access to a `&OpenFile`, which is `Send` and `Sync`, and so is its owner.
unsafe impl Send for HeldFile {}

impl HeldFile {
    /// The file that `find` returns of its owner.
    pub(crate) fn of<T: Any + Send + Sync>(
        owner: &Arc<T>,
        find: impl FnOnce(&T) -> Option<&OpenFile>,
    ) -> Option<Self> {
        let file = NonNull::from(find(owner)?);
        let owner = Arc::<T>::clone(owner);
        Some(Self { _owner: owner, file })
    }
}

impl Deref for HeldFile {
    type Target = OpenFile;

    fn deref(&self) -> &OpenFile {
        // SAFETY: `of` got it by a shared borrow of the owner, which is neither moved nor borrowed mutably while it is shared.
        unsafe { self.file.as_ref() }
    }
}

#[cfg(test)]
impl From<&Arc<OpenFile>> for HeldFile {
    fn from(file: &Arc<OpenFile>) -> Self {
        Self::of(file, |file| Some(file)).expect("always")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DirectIo;
    use crate::dataset::{Dataset, DatasetSpec, KindSpec};

    #[test]
    fn a_read_keeps_its_file_open_without_counting_at_it() {
        // TRAPS 20: the dataset goes while its file is held. Expectation: the descriptor still reads the file; it is counted
        // at this handle of the dataset only.
        let named = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(named.path(), [7; 4096]).unwrap();
        let spec = DatasetSpec::new("data", named.path(), KindSpec::blocks(4096), DirectIo::Off);
        let other = Dataset::open(&spec).unwrap();
        let own = Arc::new(other.clone());
        let held = HeldFile::of(&own, |own| own.files().first().map(|file| &**file)).unwrap();
        assert_eq!(Arc::strong_count(&other.files()[0]), 1);
        assert_eq!(Arc::strong_count(&own), 2);
        let dataset = other.downgrade();
        drop((own, other));
        let mut bytes = [0; 4096];
        assert_eq!(rustix::io::pread(held.buffered_fd(), &mut bytes[..], 0), Ok(4096));
        assert!(bytes == [7; 4096] && dataset.is_open());
        drop(held);
        assert!(!dataset.is_open());
    }
}
