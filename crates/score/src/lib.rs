//! Scores of vectors against a query. Pure: no reads, no waiting.
//!
//! All arithmetic is in f64, without fused operations: `LANES` sums over each `PIECE_ELEMENTS` elements,
//! which are added pairwise. So every CPU gives the same score, to the last bit, and its error is below 1e-12
//! of the sum of the terms' magnitudes plus [`NORM_MIN`]. Sums of f64 elements may overflow; then there is no
//! score. `fearless_simd` compiles the loops for each instruction set and chooses at run time.
#![forbid(unsafe_code)]

use fearless_simd::{Level, dispatch};
use half::slice::HalfFloatSliceExt as _;
use ringfetch_engine::dataset::Dtype;
use std::cmp::Ordering;

/// Number of parallel sums.
const LANES: usize = 16;

/// Elements added at a time: some microseconds of work. A multiple of 16.
pub const PIECE_ELEMENTS: usize = 1 << 14;

/// A smaller norm counts as 0: the squares of such elements, which only f64 has, are too small for f64.
pub const NORM_MIN: f64 = 1e-145;

/// How near a vector is to a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Inner product; larger is better.
    Dot,
    /// Cosine of the angle, from -1 to 1; larger is better. 0 if either norm is 0, or below [`NORM_MIN`].
    Cosine,
    /// Root of the sum of squared differences; smaller is better.
    Euclidean,
    /// Sum of absolute differences; smaller is better.
    Manhattan,
}

impl Metric {
    /// The name in JSON and on command lines.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Dot => "dot",
            Self::Cosine => "cosine",
            Self::Euclidean => "euclidean",
            Self::Manhattan => "manhattan",
        }
    }

    /// The metric with this name.
    pub fn from_word(word: &str) -> Option<Self> {
        [Self::Dot, Self::Cosine, Self::Euclidean, Self::Manhattan]
            .into_iter()
            .find(|metric| metric.as_str() == word)
    }

    /// Whether a score is as good as a threshold, or better.
    pub fn reaches(self, score: f64, threshold: f64) -> bool {
        match self {
            Self::Dot | Self::Cosine => score >= threshold,
            Self::Euclidean | Self::Manhattan => score <= threshold,
        }
    }

    /// The better one first; ties by id.
    fn order(self, one: &Scored, other: &Scored) -> Ordering {
        let ascending = one.score.total_cmp(&other.score);
        let by_score = match self {
            Self::Dot | Self::Cosine => ascending.reverse(),
            Self::Euclidean | Self::Manhattan => ascending,
        };
        by_score.then(one.id.cmp(&other.id))
    }

    /// Keeps the `limit` best, best first.
    pub fn rank(self, scored: &mut Vec<Scored>, limit: usize) {
        if limit < scored.len() {
            scored.select_nth_unstable_by(limit, |one, other| self.order(one, other));
            scored.truncate(limit);
        }
        scored.sort_unstable_by(|one, other| self.order(one, other));
    }
}

/// A vector's score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scored {
    /// The vector's id.
    pub id: u64,
    /// Always finite.
    pub score: f64,
}

/// Scores vectors of one element type by one metric.
#[derive(Debug, Clone, Copy)]
pub struct Scorer {
    metric: Metric,
    kernel: Kernel,
    level: Level,
}

/// The element types that can be scored.
#[derive(Debug, Clone, Copy)]
enum Kernel {
    F32,
    F16,
    Bf16,
    F64,
    U8,
    I8,
}

/// The sums over a vector so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    terms: f64,
    /// Squares of the vector's elements, for its norm.
    squares: f64,
}

/// The sums of one piece.
#[derive(Debug, Clone, Copy, Default)]
struct Lanes {
    terms: [f64; LANES],
    squares: [f64; LANES],
}

impl Scorer {
    /// `None` for an element type that cannot be scored: i32 is for ids of neighbours.
    pub fn new(metric: Metric, dtype: Dtype) -> Option<Self> {
        let kernel = match dtype {
            Dtype::F32 => Kernel::F32,
            Dtype::F16 => Kernel::F16,
            Dtype::Bf16 => Kernel::Bf16,
            Dtype::F64 => Kernel::F64,
            Dtype::U8 => Kernel::U8,
            Dtype::I8 => Kernel::I8,
            Dtype::I32 => return None,
        };
        Some(Self {
            metric,
            kernel,
            level: Level::new(),
        })
    }

    /// Its metric.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// The norm of a query, if the metric needs it.
    pub fn query_norm(&self, query: &[f32]) -> f64 {
        let mut sum = 0.0;
        if self.metric == Metric::Cosine {
            for piece in query.chunks(PIECE_ELEMENTS) {
                let mut squares = [0.0; LANES];
                for block in piece.chunks(LANES) {
                    for (sum, value) in squares.iter_mut().zip(block) {
                        *sum += f64::from(*value) * f64::from(*value);
                    }
                }
                sum += total(squares);
            }
        }
        sum.sqrt()
    }

    /// Adds a piece of a vector, little-endian, and the query's piece at the same position. Every piece
    /// except the last has [`PIECE_ELEMENTS`].
    pub fn add(&self, sums: &mut Sums, query: &[f32], elements: &[u8]) {
        let mut lanes = Lanes::default();
        dispatch!(self.level, _simd => add(self.kernel, self.metric, &mut lanes, query, elements));
        sums.terms += total(lanes.terms);
        sums.squares += total(lanes.squares);
    }

    /// The score of a whole vector.
    pub fn score(&self, query: &[f32], query_norm: f64, elements: &[u8]) -> f64 {
        let piece_bytes = PIECE_ELEMENTS * (elements.len() / query.len().max(1)).max(1);
        let mut sums = Sums::default();
        for (query, elements) in query.chunks(PIECE_ELEMENTS).zip(elements.chunks(piece_bytes)) {
            self.add(&mut sums, query, elements);
        }
        self.finish(&sums, query_norm)
    }

    /// The score. It is not finite if the vector has an element that is not, or if a sum overflows.
    pub fn finish(&self, sums: &Sums, query_norm: f64) -> f64 {
        let sum = sums.terms;
        let score = match self.metric {
            Metric::Dot | Metric::Manhattan => sum,
            Metric::Euclidean => sum.sqrt(),
            Metric::Cosine => {
                let norm = sums.squares.sqrt();
                if !norm.is_finite() {
                    norm
                } else if query_norm == 0.0 || norm < NORM_MIN {
                    0.0
                } else {
                    (sum / (query_norm * norm)).clamp(-1.0, 1.0)
                }
            }
        };
        // Normalises zero: -0.0 would sort before 0.0.
        score + 0.0
    }
}

fn total(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        for (sum, more) in low.iter_mut().zip(high) {
            *sum += *more;
        }
        width /= 2;
    }
    lanes[0]
}

trait Element {
    const BYTES: usize;
    /// Decodes [`LANES`] elements.
    fn decode(bytes: &[u8]) -> [f64; LANES];
}

/// An [`Element`] with a lossless conversion from its bytes.
macro_rules! element {
    ($name:ident, $bytes:literal, $of:expr) => {
        struct $name;
        impl Element for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            fn decode(bytes: &[u8]) -> [f64; LANES] {
                let mut values = [0.0; LANES];
                if let Some(bytes) = bytes.first_chunk::<{ LANES * $bytes }>() {
                    for (value, raw) in values.iter_mut().zip(bytes.as_chunks::<$bytes>().0) {
                        *value = f64::from($of(*raw));
                    }
                }
                values
            }
        }
    };
}

element!(F32, 4, f32::from_le_bytes);
element!(F64, 8, f64::from_le_bytes);
element!(Bf16, 2, |raw| f32::from_bits(
    u32::from(u16::from_le_bytes(raw)) << 16
));
element!(U8, 1, u8::from_le_bytes);
element!(I8, 1, i8::from_le_bytes);

struct F16;

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn decode(bytes: &[u8]) -> [f64; LANES] {
        let mut halves = [half::f16::ZERO; LANES];
        for (value, raw) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = half::f16::from_le_bytes(*raw);
        }
        let mut values = [0.0_f32; LANES];
        halves.convert_to_f32_slice(&mut values);
        values.map(f64::from)
    }
}

#[inline(always)]
fn add(kernel: Kernel, metric: Metric, lanes: &mut Lanes, query: &[f32], elements: &[u8]) {
    match kernel {
        Kernel::F32 => add_all::<F32>(metric, lanes, query, elements),
        Kernel::F16 => add_all::<F16>(metric, lanes, query, elements),
        Kernel::Bf16 => add_all::<Bf16>(metric, lanes, query, elements),
        Kernel::F64 => add_all::<F64>(metric, lanes, query, elements),
        Kernel::U8 => add_all::<U8>(metric, lanes, query, elements),
        Kernel::I8 => add_all::<I8>(metric, lanes, query, elements),
    }
}

#[inline(always)]
fn add_all<E: Element>(metric: Metric, lanes: &mut Lanes, query: &[f32], elements: &[u8]) {
    match metric {
        Metric::Dot => add_each::<E, false>(lanes, query, elements, dot),
        Metric::Cosine => add_each::<E, true>(lanes, query, elements, dot),
        Metric::Euclidean => add_each::<E, false>(lanes, query, elements, squared_difference),
        Metric::Manhattan => add_each::<E, false>(lanes, query, elements, difference),
    }
}

#[inline(always)]
fn dot(query: f64, element: f64) -> f64 {
    query * element
}

#[inline(always)]
fn squared_difference(query: f64, element: f64) -> f64 {
    (query - element) * (query - element)
}

#[inline(always)]
fn difference(query: f64, element: f64) -> f64 {
    (query - element).abs()
}

#[inline(always)]
fn add_each<E: Element, const SQUARES: bool>(
    lanes: &mut Lanes,
    query: &[f32],
    elements: &[u8],
    term: impl Fn(f64, f64) -> f64 + Copy,
) {
    let mut added = *lanes;
    let (blocks, rest) = query.as_chunks::<LANES>();
    let mut raw = elements.chunks_exact(LANES * E::BYTES);
    for (query, elements) in blocks.iter().zip(&mut raw) {
        added = add_block::<SQUARES>(added, query, E::decode(elements), term);
    }
    if !rest.is_empty() {
        // Zeros on both sides add nothing, for any metric.
        let (mut query, mut elements) = ([0.0; LANES], [0_u8; LANES * 8]);
        for (place, value) in query.iter_mut().zip(rest) {
            *place = *value;
        }
        for (place, byte) in elements.iter_mut().zip(raw.remainder()) {
            *place = *byte;
        }
        added = add_block::<SQUARES>(added, &query, E::decode(&elements), term);
    }
    *lanes = added;
}

#[inline(always)]
fn add_block<const SQUARES: bool>(
    mut lanes: Lanes,
    query: &[f32; LANES],
    values: [f64; LANES],
    term: impl Fn(f64, f64) -> f64,
) -> Lanes {
    for ((sum, query), value) in lanes.terms.iter_mut().zip(query).zip(values) {
        *sum += term(f64::from(*query), value);
    }
    if SQUARES {
        for (sum, value) in lanes.squares.iter_mut().zip(values) {
            *sum += value * value;
        }
    }
    lanes
}

#[cfg(test)]
mod tests;
