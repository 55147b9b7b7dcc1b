//! A batch: many items of one dataset, checked and laid out in one response buffer before anything is queued.
//!
//! Items are back to back in request order. An item that is known to fail takes no space; the space of one
//! that fails on the device is closed afterwards (ADR 0007).

use crate::dataset::{Dataset, Kind, OpenFile};
use crate::error::{ItemError, ReadError, ResponseMax};
use crate::geometry::{self, Extent, VectorGrid};
use crate::shard::NumberHasher;
use bytes::Bytes;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;

/// Longest single item: lengths and offsets in a response are 32-bit on the wire.
const ITEM_BYTES_MAX: u64 = 1 << 31;

/// Up to so many objects of a batch are searched one by one; more have a table.
const SEARCHED_OBJECTS_MAX: usize = 8;

/// Items to read, in response order. An invalid item is recorded as an error and takes no space.
#[derive(Debug)]
pub struct Batch {
    pub(crate) dataset: Arc<Dataset>,
    /// The objects read; other kinds read the files of the dataset.
    pub(crate) objects: Objects,
    /// Index into `objects` by object id, if there are many: a request may name thousands.
    object_places: HashMap<u64, usize, BuildHasherDefault<NumberHasher>>,
    pub(crate) segments: SmallVec<[Segment; 1]>,
    pub(crate) items: SmallVec<[Item; 1]>,
    pub(crate) errors: Vec<ItemError>,
    data_bytes: u64,
}

/// Stores one inline: most requests for objects name one.
pub(crate) type Objects = SmallVec<[Arc<OpenFile>; 1]>;

/// The part of an item in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Index into the dataset's files, or into `Batch::objects`.
    pub(crate) file: u32,
    /// The item's position in the batch.
    pub(crate) item: u32,
    /// File offset.
    pub(crate) offset: u64,
    /// Bytes; at least 1.
    pub(crate) length: u32,
    /// Offset of the first byte in the response.
    pub(crate) target: u32,
}

/// An item, for the layout and for error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    /// Offset in the address space or the object.
    pub(crate) offset: u64,
    /// Bytes in the response; 0 for an item that is known to fail.
    pub(crate) length: u32,
}

impl Batch {
    /// An empty batch with capacity for `items`.
    pub fn new(dataset: Arc<Dataset>, items: usize) -> Self {
        Self {
            dataset,
            objects: Objects::new(),
            object_places: HashMap::default(),
            segments: SmallVec::with_capacity(items),
            items: SmallVec::with_capacity(items),
            errors: Vec::new(),
            data_bytes: 0,
        }
    }

    /// The dataset that it reads.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// Appends a whole block. The dataset must be of kind blocks.
    #[inline]
    pub fn push_block(&mut self, index: u64) {
        let Kind::Blocks { block_bytes, count } = self.dataset.kind() else {
            return self.push_failed(ReadError::IndexOutOfRange {
                what: "block",
                index,
                count: 0,
            });
        };
        match geometry::block_extent(index, block_bytes, count) {
            Ok(extent) => self.push_extent(extent),
            Err(error) => self.push_failed(error),
        }
    }

    /// Appends a vector's elements. The dataset must be of kind vectors.
    pub fn push_vector(&mut self, id: u64) {
        let Kind::Vectors {
            vector_bytes,
            stride_bytes,
            base_offset,
            count,
            ..
        } = self.dataset.kind()
        else {
            return self.push_failed(ReadError::IndexOutOfRange {
                what: "vector",
                index: id,
                count: 0,
            });
        };
        let grid = VectorGrid {
            base_offset,
            stride_bytes,
            vector_bytes,
            count,
        };
        match geometry::vector_extent(id, grid) {
            Ok(extent) => self.push_extent(extent),
            Err(error) => self.push_failed(error),
        }
    }

    /// Appends a byte range of the address space. The dataset must be of kind blocks or vectors.
    pub fn push_range(&mut self, offset: u64, length: u64) {
        match geometry::check_range(offset, length, self.dataset.length_bytes()) {
            Ok(extent) => self.push_extent(extent),
            Err(error) => self.push_failed(error),
        }
    }

    /// Appends `length` bytes (`None`: to the end) of an object from `offset`. A whole empty object is an item of
    /// no bytes.
    pub fn push_object(&mut self, object: &Arc<OpenFile>, offset: u64, length: Option<u64>) {
        let end = object.length_bytes();
        let length = match length {
            Some(length) => length,
            None if offset == end => return self.items.push(Item { offset, length: 0 }),
            // Past the end: one byte, so that the check below refuses it as out of range.
            None => end.saturating_sub(offset).max(1),
        };
        let extent = match geometry::check_range(offset, length, end) {
            Ok(extent) => extent,
            Err(error) => return self.push_failed(error),
        };
        let file = self.place_of(object);
        let Some(item) = self.open_item(extent) else {
            return;
        };
        let target = self.data_bytes;
        push_segment(&mut self.segments, file, item, extent, target);
        self.data_bytes += extent.length;
    }

    /// The object's index in `objects`, to which it is added if it is new.
    fn place_of(&mut self, object: &Arc<OpenFile>) -> usize {
        let next = self.objects.len();
        let found = if next <= SEARCHED_OBJECTS_MAX {
            self.objects.iter().position(|known| known.id == object.id)
        } else {
            self.object_places.get(&object.id).copied()
        };
        if let Some(place) = found {
            return place;
        }
        self.objects.push(Arc::clone(object));
        if next == SEARCHED_OBJECTS_MAX {
            self.object_places = self.objects.iter().map(|known| known.id).zip(0..).collect();
        } else if next > SEARCHED_OBJECTS_MAX {
            self.object_places.insert(object.id, next);
        }
        next
    }

    /// Appends an item that is already known to fail.
    pub fn push_failed(&mut self, error: ReadError) {
        let item = self.next_item();
        self.errors.push(ItemError { item, error });
        self.items.push(Item { offset: 0, length: 0 });
    }

    /// Items so far, failed ones included.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Bytes of the response so far.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// The errors so far, in item order.
    pub fn errors(&self) -> &[ItemError] {
        &self.errors
    }

    /// The file of a segment.
    pub(crate) fn file(&self, index: u32) -> Option<&Arc<OpenFile>> {
        file_of(&self.dataset, &self.objects, index)
    }

    #[inline]
    fn push_extent(&mut self, extent: Extent) {
        let Some(item) = self.open_item(extent) else {
            return;
        };
        let mut target = self.data_bytes;
        let segments = &mut self.segments;
        self.dataset.locate(extent, &mut |file, part| {
            push_segment(segments, file, item, part, target);
            target += part.length;
        });
        self.data_bytes += extent.length;
    }

    /// Records the item, or the error of one that is too long for any response.
    fn open_item(&mut self, extent: Extent) -> Option<u32> {
        let item = self.next_item();
        match u32::try_from(extent.length) {
            Ok(length) if extent.length <= ITEM_BYTES_MAX => {
                self.items.push(Item {
                    offset: extent.offset,
                    length,
                });
                Some(item)
            }
            Ok(_) | Err(_) => {
                self.push_failed(ReadError::ItemTooLarge {
                    length: extent.length,
                    max: ResponseMax::of_any(ITEM_BYTES_MAX),
                });
                None
            }
        }
    }

    fn next_item(&self) -> u32 {
        u32::try_from(self.items.len()).unwrap_or(u32::MAX)
    }
}

/// File `index` of a batch: an objects dataset has no files of its own.
pub(crate) fn file_of<'a>(
    dataset: &'a Dataset,
    objects: &'a [Arc<OpenFile>],
    index: u32,
) -> Option<&'a Arc<OpenFile>> {
    dataset
        .files()
        .get(index as usize)
        .or_else(|| objects.get(index as usize))
}

/// A batch of over 4 GiB would not fit `target`; the engine refuses it by `data_bytes` before it uses these.
fn push_segment(segments: &mut SmallVec<[Segment; 1]>, file: usize, item: u32, part: Extent, target: u64) {
    segments.push(Segment {
        file: u32::try_from(file).unwrap_or(u32::MAX),
        item,
        offset: part.offset,
        length: u32::try_from(part.length).unwrap_or(u32::MAX),
        target: u32::try_from(target).unwrap_or(u32::MAX),
    });
}

/// A finished batch.
#[derive(Debug)]
pub struct Fetched {
    /// The good items back to back, in request order. Pooled memory: it returns to the pool when the last
    /// clone or slice is dropped, so do not keep it.
    pub data: Bytes,
    /// Length of each item in `data`.
    pub lengths: Lengths,
    /// The failed items, in item order. They have no bytes in `data`.
    pub errors: Vec<ItemError>,
    /// How long it took.
    pub times: Times,
}

/// How long a batch took, in nanoseconds; the histograms record the same values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// Until its last read was submitted.
    pub queue_ns: u64,
    /// From its acceptance to its reply.
    pub total_ns: u64,
}

/// Length of each item of a finished batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lengths {
    /// Every item has `item_bytes`; there are no errors.
    Uniform {
        /// Bytes of each.
        item_bytes: u32,
        /// Items.
        items: u32,
    },
    /// One length per item; 0 for a failed one.
    Each(Vec<u32>),
}

impl Lengths {
    /// The lengths of items none of which failed.
    pub(crate) fn of(items: &[Item]) -> Self {
        let first = items.first().map_or(0, |item| item.length);
        if items.iter().all(|item| item.length == first) {
            Self::Uniform {
                item_bytes: first,
                items: u32::try_from(items.len()).unwrap_or(u32::MAX),
            }
        } else {
            Self::Each(items.iter().map(|item| item.length).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DirectIo;
    use crate::dataset::{DatasetSpec, KindSpec};
    use std::time::Duration;

    /// Objects in any order, some repeated: each is held once, and every segment refers to the right one.
    #[test]
    fn an_object_is_held_once_however_often_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let files: Vec<_> = (0..20_u8)
            .map(|number| {
                let path = dir.path().join(number.to_string());
                std::fs::write(&path, vec![number; 10]).unwrap();
                Arc::new(OpenFile::open(&path, DirectIo::Off).unwrap())
            })
            .collect();
        let kind = KindSpec::objects(8, Duration::ZERO);
        let spec = DatasetSpec::new("objects", dir.path(), kind, DirectIo::Off);
        let mut batch = Batch::new(Arc::new(Dataset::open(&spec).unwrap()), 0);
        let order: Vec<usize> = (0..100).map(|number| number * number % 20).chain(0..20).collect();
        for &file in &order {
            batch.push_object(&files[file], 0, Some(1));
        }
        assert_eq!(batch.objects.len(), 20);
        for (segment, &file) in batch.segments.iter().zip(&order) {
            assert!(Arc::ptr_eq(batch.file(segment.file).unwrap(), &files[file]));
        }
    }
}
