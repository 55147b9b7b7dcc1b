//! The only offset arithmetic of the crate: pure, checked, property-tested against a byte-array model.

/// `length` bytes from `offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}
