//! A batch: many items of one dataset, checked and laid out in one response buffer before anything is queued.

use crate::dataset::{Dataset, OpenFile};
use crate::error::{ItemError, ReadError};
use bytes::Bytes;
use std::sync::Arc;

/// Items to read, in response order. An item that cannot be is recorded as an error and takes no room.
#[derive(Debug)]
pub struct Batch {}

impl Batch {
    /// An empty batch with room for `items`.
    pub fn new(dataset: Arc<Dataset>, items: usize) -> Self {
        let _ = (dataset, items);
        todo!()
    }
    /// Appends a whole block. The dataset must be of kind blocks.
    pub fn push_block(&mut self, index: u64) {
        let _ = index;
        todo!()
    }
    /// Appends a vector's elements. The dataset must be of kind vectors.
    pub fn push_vector(&mut self, id: u64) {
        let _ = id;
        todo!()
    }
    /// Appends a byte range of the address space. The dataset must be of kind blocks or vectors.
    pub fn push_range(&mut self, offset: u64, length: u64) {
        let _ = (offset, length);
        todo!()
    }
    /// Appends `length` bytes (`None`: to the end) of an object from `offset`. A whole empty object is an item of
    /// no bytes.
    pub fn push_object(&mut self, object: &Arc<OpenFile>, offset: u64, length: Option<u64>) {
        let _ = (object, offset, length);
        todo!()
    }
    /// Appends an item that is already known to fail.
    pub fn push_failed(&mut self, error: ReadError) {
        let _ = error;
        todo!()
    }
    /// Items so far, failed ones included.
    pub fn len(&self) -> usize {
        todo!()
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Bytes of the response so far.
    pub fn data_bytes(&self) -> u64 {
        todo!()
    }
    /// The errors so far, in item order.
    pub fn errors(&self) -> &[ItemError] {
        todo!()
    }
}

/// A finished batch.
#[derive(Debug)]
pub struct Fetched {
    /// The good items back to back, in request order. Pooled memory: it returns to the pool when the last clone or
    /// slice is dropped, so do not keep it.
    pub data: Bytes,
    /// Length of each item in `data`.
    pub lengths: Lengths,
    /// The failed items, in item order. They have no bytes in `data`.
    pub errors: Vec<ItemError>,
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
    /// One length an item; 0 for a failed one.
    Each(Vec<u32>),
}
