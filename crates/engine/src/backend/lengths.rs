//! The lengths of files, queried once for all reads that ended before that: truncation moves the end of a file before it zeroes
//! pages, so that a later query is enough for each of them ([`OpenFile::kept`]).

use crate::dataset::{OpenFile, bytes_before};
use crate::shard::NumberHasher;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lengths {
    /// By `OpenFile::id`.
    known: HashMap<u64, Result<u64, i32>, BuildHasherDefault<NumberHasher>>,
    /// Most reads are of the same file as the one before.
    last: Option<(u64, Result<u64, i32>)>,
}

impl Lengths {
    /// Forgets them: other reads have ended since.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.last = None;
    }

    /// How many of `bytes` that a read from `offset` returned belong to the file.
    ///
    /// # Errors
    /// errno of the query.
    pub(super) fn kept(&mut self, file: &OpenFile, offset: u64, bytes: u32) -> Result<u32, i32> {
        let (_, end) = match self.last {
            Some(known @ (id, _)) if id == file.id => known,
            Some(_) | None => {
                let end = *self.known.entry(file.id).or_insert_with(|| file.known_length());
                *self.last.insert((file.id, end))
            }
        };
        bytes_before(end, offset, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DirectIo;

    #[test]
    fn a_length_is_queried_once_until_it_is_forgotten() {
        let files = [10_000, 5000].map(|bytes| {
            let named = tempfile::NamedTempFile::new().expect("a file");
            named.as_file().set_len(bytes).expect("data");
            let open = OpenFile::open(named.path(), DirectIo::Off).expect("open");
            (named, open)
        });
        let mut lengths = Lengths::default();
        let mut of_all = || files.each_ref().map(|(_, open)| lengths.kept(open, 4096, 4096));
        assert_eq!(of_all(), [Ok(4096), Ok(904)]);
        files
            .iter()
            .for_each(|(named, _)| named.as_file().set_len(4100).expect("cut"));
        assert_eq!(of_all(), [Ok(4096), Ok(904)]);
        lengths.forget();
        assert_eq!(lengths.kept(&files[0].1, 4096, 4096), Ok(4));
    }
}
