//! Offset arithmetic: pure, checked, property-tested against a byte-array model.
//!
//! Block index, vector id and byte range become an [`Extent`] of the address space, which becomes extents of
//! the files that form it; `plan` aligns them. Nothing here wraps, panics or touches a file.

use crate::error::ReadError;

/// `length` bytes from `offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Extent {
    /// The byte after the last one: offset 4096 + length 512 = 4608. `None` past 2^64 - 1.
    pub fn end(self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }
}

/// The extent of block `index` of `count`: block 3 of 4096 bytes is 4096 bytes from 3 x 4096 = 12288.
///
/// # Errors
/// `IndexOutOfRange`; `RangeOverflow` if the offset does not fit 64 bits (no open dataset has such a block).
#[inline]
pub fn block_extent(index: u64, block_bytes: u32, count: u64) -> Result<Extent, ReadError> {
    if index >= count {
        return Err(ReadError::IndexOutOfRange {
            what: "block",
            index,
            count,
        });
    }
    let length = u64::from(block_bytes);
    let extent = index.checked_mul(length).map(|offset| Extent { offset, length });
    extent
        .filter(|extent| extent.end().is_some())
        .ok_or(ReadError::RangeOverflow {
            offset: u64::MAX,
            length,
        })
}

/// Where vectors are in the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VectorGrid {
    /// Where vector 0's elements begin.
    pub base_offset: u64,
    /// Distance between two vectors.
    pub stride_bytes: u64,
    /// Bytes of one vector's elements.
    pub vector_bytes: u32,
    /// Vectors.
    pub count: u64,
}

/// The extent of a vector's elements. Vector 2 of an `.fvecs` of 100 dimensions (base 4, stride 4 + 400): 400 bytes
/// from 4 + 2 x 404 = 812.
///
/// # Errors
/// `IndexOutOfRange`; `RangeOverflow` if the offset does not fit 64 bits (no open dataset has such a vector).
pub fn vector_extent(id: u64, grid: VectorGrid) -> Result<Extent, ReadError> {
    if id >= grid.count {
        return Err(ReadError::IndexOutOfRange {
            what: "vector",
            index: id,
            count: grid.count,
        });
    }
    let length = u64::from(grid.vector_bytes);
    let offset = id
        .checked_mul(grid.stride_bytes)
        .and_then(|distance| distance.checked_add(grid.base_offset));
    offset
        .map(|offset| Extent { offset, length })
        .filter(|extent| extent.end().is_some())
        .ok_or(ReadError::RangeOverflow {
            offset: u64::MAX,
            length,
        })
}

/// Checks a byte range against an end. With end 100: (90, 10) is valid, (90, 11) and (100, 1) are out of
/// range.
///
/// # Errors
/// In this order: `ZeroLength`, `RangeOverflow`, `RangeOutOfRange`.
pub fn check_range(offset: u64, length: u64, end: u64) -> Result<Extent, ReadError> {
    if length == 0 {
        return Err(ReadError::ZeroLength);
    }
    let extent = Extent { offset, length };
    match extent.end() {
        None => Err(ReadError::RangeOverflow { offset, length }),
        Some(range_end) if range_end > end => Err(ReadError::RangeOutOfRange { offset, length, end }),
        Some(_) => Ok(extent),
    }
}

/// Files laid end to end as one address space.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileSpan {
    /// Where each file ends in the address space, in ascending order (equal for empty files).
    ends: Vec<u64>,
}

impl FileSpan {
    /// Files of these lengths, in order: lengths 10, 20, 5 end at 10, 30, 35. `None` if the sum does not fit
    /// 64 bits.
    pub fn new(lengths: impl IntoIterator<Item = u64>) -> Option<Self> {
        let mut end = 0u64;
        let mut ends = Vec::new();
        for length in lengths {
            end = end.checked_add(length)?;
            ends.push(end);
        }
        Some(Self { ends })
    }

    /// Length of the whole address space.
    pub fn length_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Calls `out` with (file index, extent in that file) for each file that `extent` of the address space
    /// overlaps, in order. Bytes past the end of the address space are ignored.
    ///
    /// Files of 10, 20 and 5 bytes, 24 bytes from 8: (0, 2 from 8), (1, 20 from 0), (2, 2 from 0).
    #[inline]
    pub fn locate(&self, extent: Extent, out: &mut impl FnMut(usize, Extent)) {
        let Some(end) = extent.end() else { return };
        // A single file is by far the most common case: no search.
        match self.ends[..] {
            [only] if end <= only && extent.length > 0 => out(0, extent),
            _ => self.search(extent, end, out),
        }
    }

    fn search(&self, extent: Extent, end: u64, out: &mut impl FnMut(usize, Extent)) {
        let mut at = extent.offset;
        // The first file that ends after `at`: with ends 10, 30, 35 and at = 10 that is file 1.
        let first = self.ends.partition_point(|&file_end| file_end <= at);
        let mut file_start = first
            .checked_sub(1)
            .and_then(|before| self.ends.get(before))
            .copied()
            .unwrap_or(0);
        for (index, &file_end) in self.ends.iter().enumerate().skip(first) {
            if at >= end {
                return;
            }
            let piece_end = end.min(file_end);
            if piece_end > at {
                out(
                    index,
                    Extent {
                        offset: at - file_start,
                        length: piece_end - at,
                    },
                );
                at = piece_end;
            }
            file_start = file_end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(span: &FileSpan, offset: u64, length: u64) -> Vec<(usize, Extent)> {
        let mut out = Vec::new();
        span.locate(Extent { offset, length }, &mut |file, extent| {
            out.push((file, extent));
        });
        out
    }

    /// The functions return the worked numbers of their docs.
    #[test]
    fn worked_numbers() {
        assert_eq!(
            block_extent(3, 4096, 4),
            Ok(Extent {
                offset: 12288,
                length: 4096
            })
        );
        let grid = VectorGrid {
            base_offset: 4,
            stride_bytes: 404,
            vector_bytes: 400,
            count: 3,
        };
        assert_eq!(
            vector_extent(2, grid),
            Ok(Extent {
                offset: 812,
                length: 400
            })
        );
        let span = FileSpan::new([10, 20, 5]).unwrap();
        let expected = [(0, (8, 2)), (1, (0, 20)), (2, (0, 2))];
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(file, (offset, length))| (file, Extent { offset, length }))
            .collect();
        assert_eq!(pieces(&span, 8, 24), expected);
        assert_eq!(span.length_bytes(), 35);
    }

    /// Values that cannot be represented are refused, and nothing panics at the edge of 64 bits.
    #[test]
    fn edges_of_64_bits() {
        assert_eq!(
            block_extent(u64::MAX - 1, 2, u64::MAX),
            Err(ReadError::RangeOverflow {
                offset: u64::MAX,
                length: 2
            })
        );
        let grid = VectorGrid {
            base_offset: 8,
            stride_bytes: 1,
            vector_bytes: 1,
            count: u64::MAX,
        };
        assert!(vector_extent(u64::MAX - 8, grid).is_err());
        assert_eq!(FileSpan::new([u64::MAX, 1]), None);
        let whole = FileSpan::new([u64::MAX]).unwrap();
        assert_eq!(pieces(&whole, u64::MAX, 1), []);
        assert_eq!(
            pieces(&whole, u64::MAX - 1, 1),
            [(
                0,
                Extent {
                    offset: u64::MAX - 1,
                    length: 1
                }
            )]
        );
        assert_eq!(pieces(&FileSpan::new([]).unwrap(), 0, 1), []);
    }

    /// Zero length is reported before overflow, overflow before the end.
    #[test]
    fn range_errors_in_order() {
        assert_eq!(check_range(u64::MAX, 0, 0), Err(ReadError::ZeroLength));
        assert_eq!(
            check_range(u64::MAX, 1, 0),
            Err(ReadError::RangeOverflow {
                offset: u64::MAX,
                length: 1
            })
        );
        assert_eq!(
            check_range(90, 11, 100),
            Err(ReadError::RangeOutOfRange {
                offset: 90,
                length: 11,
                end: 100
            })
        );
        assert_eq!(
            check_range(100, 1, 100),
            Err(ReadError::RangeOutOfRange {
                offset: 100,
                length: 1,
                end: 100
            })
        );
        assert_eq!(
            check_range(90, 10, 100),
            Ok(Extent {
                offset: 90,
                length: 10
            })
        );
    }

    /// The first index at the count is refused with both numbers, the last below it is accepted.
    #[test]
    fn index_errors() {
        assert_eq!(
            block_extent(4, 512, 4),
            Err(ReadError::IndexOutOfRange {
                what: "block",
                index: 4,
                count: 4
            })
        );
        let grid = VectorGrid {
            base_offset: 0,
            stride_bytes: 4,
            vector_bytes: 4,
            count: 1,
        };
        assert_eq!(
            vector_extent(1, grid),
            Err(ReadError::IndexOutOfRange {
                what: "vector",
                index: 1,
                count: 1
            })
        );
        assert!(vector_extent(0, grid).is_ok());
    }

    proptest! {
        /// Any extent over files of any lengths (empty ones too): the pieces, read from the files, are the model's bytes.
        #[test]
        fn pieces_are_the_models_bytes(
            lengths in prop::collection::vec(0usize..40, 0..8),
            offset in 0usize..300,
            length in 0usize..300,
        ) {
            let mut next = 0u8;
            let files: Vec<Vec<u8>> = lengths
                .iter()
                .map(|&n| (0..n).map(|_| { next = next.wrapping_add(1); next }).collect())
                .collect();
            let model: Vec<u8> = files.concat();
            let span = FileSpan::new(lengths.iter().map(|&n| n as u64)).unwrap();
            prop_assert_eq!(span.length_bytes(), model.len() as u64);
            let mut read = Vec::new();
            for (file, piece) in pieces(&span, offset as u64, length as u64) {
                prop_assert!(piece.length > 0);
                let from = usize::try_from(piece.offset).unwrap();
                let to = usize::try_from(piece.end().unwrap()).unwrap();
                read.extend_from_slice(&files[file][from..to]);
            }
            let from = offset.min(model.len());
            let to = (offset + length).min(model.len());
            prop_assert_eq!(&read[..], &model[from..to]);
        }

        /// Any numbers at all: an accepted range ends within the end, a refused one does not (in 128-bit
        /// arithmetic).
        #[test]
        fn ranges_agree_with_wide_arithmetic(offset: u64, length: u64, end: u64) {
            let fits = length > 0 && u128::from(offset) + u128::from(length) <= u128::from(end);
            prop_assert_eq!(check_range(offset, length, end).is_ok(), fits);
        }

        /// Blocks of a model file: block `i` is the model's `i`-th chunk.
        #[test]
        fn blocks_are_the_models_chunks(block_bytes in 1u32..64, count in 1u64..64, pick: prop::sample::Index) {
            let model: Vec<u64> = (0..u64::from(block_bytes) * count).collect();
            let index = pick.index(usize::try_from(count).unwrap());
            let extent = block_extent(index as u64, block_bytes, count).unwrap();
            let chunk = model.chunks(block_bytes as usize).nth(index).unwrap();
            prop_assert_eq!(extent.offset, chunk[0]);
            prop_assert_eq!(extent.length, chunk.len() as u64);
        }
    }
}
