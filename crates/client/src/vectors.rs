//! Vectors: items with a shape. Elements are little-endian on the wire; numbers are returned in native order.

use crate::error::Error;
use crate::items::{Expected, Items};
use crate::message::Data;
use ringfetch_proto::v1 as wire;
use std::ops::Deref;

/// Element type of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// 32-bit signed.
    I32,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE 754 binary64.
    F64,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size_bytes(self) -> u32 {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F64 => 8,
            Self::U8 | Self::I8 => 1,
        }
    }

    /// The word in configuration and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I32 => "i32",
            Self::Bf16 => "bf16",
            Self::F64 => "f64",
        }
    }

    /// The type of a wire value; `None` for an unknown one.
    pub fn from_wire(dtype: i32) -> Option<Self> {
        match wire::Dtype::try_from(dtype) {
            Ok(wire::Dtype::F32) => Some(Self::F32),
            Ok(wire::Dtype::F16) => Some(Self::F16),
            Ok(wire::Dtype::U8) => Some(Self::U8),
            Ok(wire::Dtype::I8) => Some(Self::I8),
            Ok(wire::Dtype::I32) => Some(Self::I32),
            Ok(wire::Dtype::Bf16) => Some(Self::Bf16),
            Ok(wire::Dtype::F64) => Some(Self::F64),
            Ok(wire::Dtype::Unspecified) | Err(_) => None,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Vectors, in request order. Derefs to [`Items`], which slices their bytes (elements only, little-endian).
#[derive(Debug, Clone)]
pub struct Vectors {
    items: Items,
    dim: u32,
    dtype: Dtype,
}

impl Vectors {
    pub(crate) fn check(
        expected: &Expected,
        answer: wire::FetchVectorsResponse,
        data: Data,
    ) -> Result<Self, Error> {
        let dtype = Dtype::from_wire(answer.dtype)
            .ok_or_else(|| Error::protocol(format!("unknown dtype {}", answer.dtype)))?;
        if answer.dim == 0 {
            return Err(Error::protocol("vectors of 0 elements"));
        }
        let vector_bytes = u64::from(answer.dim) * u64::from(dtype.size_bytes());
        let items = Items::check(expected, Some(vector_bytes), &answer.lengths, answer.errors, data)?;
        Ok(Self {
            items: items.of_version(answer.etag),
            dim: answer.dim,
            dtype,
        })
    }

    /// Elements of one vector.
    pub fn dim(&self) -> u32 {
        self.dim
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Vector `i` as `dim` floats, whatever its element type. f64 elements, and i32 ones beyond 2^24, are
    /// rounded. `None` if the vector could not be read ([`Items::get`] says why) or the request had no vector
    /// `i`.
    pub fn as_f32(&self, i: usize) -> Option<Vec<f32>> {
        let bytes = self.items.get(i).ok()?;
        Some(match self.dtype {
            Dtype::F32 => floats(&bytes, f32::from_le_bytes),
            Dtype::F16 => floats(&bytes, |b| half::f16::from_le_bytes(b).to_f32()),
            Dtype::Bf16 => floats(&bytes, |b| half::bf16::from_le_bytes(b).to_f32()),
            #[expect(clippy::cast_possible_truncation, reason = "documented: rounded")]
            Dtype::F64 => floats(&bytes, |b| f64::from_le_bytes(b) as f32),
            Dtype::U8 => floats(&bytes, |[b]| f32::from(b)),
            Dtype::I8 => floats(&bytes, |b| f32::from(i8::from_le_bytes(b))),
            #[expect(clippy::cast_precision_loss, reason = "documented: rounded beyond 2^24")]
            Dtype::I32 => floats(&bytes, |b| i32::from_le_bytes(b) as f32),
        })
    }
}

fn floats<const N: usize>(bytes: &[u8], element: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| element(*bytes)).collect()
}

impl Deref for Vectors {
    type Target = Items;

    fn deref(&self) -> &Items {
        &self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn vectors(dtype: wire::Dtype, dim: u32, items: usize, data: &[u8]) -> Result<Vectors, Error> {
        let answer = wire::FetchVectorsResponse {
            dim,
            dtype: dtype.into(),
            ..Default::default()
        };
        Vectors::check(
            &Expected::Uniform { items },
            answer,
            Bytes::copy_from_slice(data).into(),
        )
    }

    #[test]
    fn every_element_type_converts_to_floats() {
        // Scenario: the second of two vectors of two elements, in each element type.
        // Expected: its numbers; nothing for a third vector.
        let f32s: Vec<u8> = [0.0f32, 0.0, 1.5, -2.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let f16s: Vec<u8> = [0.0f32, 0.0, 1.5, -2.0]
            .iter()
            .flat_map(|&x| half::f16::from_f32(x).to_le_bytes())
            .collect();
        let bf16s = [0, 0, 0, 0, 0xc0, 0x3f, 0, 0xc0];
        let f64s: Vec<u8> = [0.0f64, 0.0, 1.5, -2.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let i32s: Vec<u8> = [0i32, 0, 70_000, -2]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        for (dtype, data, want) in [
            (wire::Dtype::F32, f32s.as_slice(), [1.5, -2.0]),
            (wire::Dtype::F16, &f16s, [1.5, -2.0]),
            (wire::Dtype::U8, &[0, 0, 1, 255], [1.0, 255.0]),
            (wire::Dtype::I8, &[0, 0, 1, 255], [1.0, -1.0]),
            (wire::Dtype::I32, &i32s, [70_000.0, -2.0]),
            (wire::Dtype::Bf16, &bf16s, [1.5, -2.0]),
            (wire::Dtype::F64, &f64s, [1.5, -2.0]),
        ] {
            let vectors = vectors(dtype, 2, 2, data).unwrap();
            assert_eq!(vectors.as_f32(1).unwrap(), want, "{dtype:?}");
            assert!(vectors.as_f32(2).is_none());
        }
    }

    #[test]
    fn a_shape_that_cannot_be_is_refused() {
        // Scenario: an unknown dtype, no elements, a dim that does not match the data, the largest dim there is.
        // Expected: a protocol error for each.
        for answer in [
            vectors(wire::Dtype::Unspecified, 2, 1, &[0; 2]),
            vectors(wire::Dtype::U8, 0, 1, &[]),
            vectors(wire::Dtype::F32, 2, 1, &[0; 4]),
            vectors(wire::Dtype::F32, u32::MAX, 3, &[0; 4]),
        ] {
            assert!(matches!(answer, Err(Error::Protocol { .. })), "{answer:?}");
        }
    }
}
