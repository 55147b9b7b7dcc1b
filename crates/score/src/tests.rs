//! Scores against a reference in f64, and their order.

use super::*;
use proptest::prelude::*;

const METRICS: [Metric; 4] = [Metric::Dot, Metric::Cosine, Metric::Euclidean, Metric::Manhattan];

/// The stated tolerance, relative to the sum of the terms' magnitudes.
const TOLERANCE: f64 = 1e-12;

/// A vector as it is stored, and the values of its elements.
#[derive(Debug, Clone)]
struct Stored {
    dtype: Dtype,
    bytes: Vec<u8>,
    values: Vec<f64>,
}

/// The types that can be scored.
fn scored_types() -> impl Iterator<Item = Dtype> {
    Dtype::ALL.into_iter().filter(|dtype| *dtype != Dtype::I32)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates, which is a value as good as any"
)]
fn stored(dtype: Dtype, raw: &[f64]) -> Stored {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    let mut put = |element: &[u8], value: f64| {
        bytes.extend_from_slice(element);
        values.push(value);
    };
    for &value in raw {
        match dtype {
            Dtype::F32 => put(&(value as f32).to_le_bytes(), f64::from(value as f32)),
            Dtype::F16 => {
                let value = half::f16::from_f64(value);
                put(&value.to_le_bytes(), value.to_f64());
            }
            Dtype::Bf16 => {
                let value = half::bf16::from_f64(value);
                put(&value.to_le_bytes(), value.to_f64());
            }
            Dtype::F64 => put(&value.to_le_bytes(), value),
            Dtype::U8 => put(&[value as u8], f64::from(value as u8)),
            Dtype::I8 => put(&(value as i8).to_le_bytes(), f64::from(value as i8)),
            Dtype::I32 => put(&(value as i32).to_le_bytes(), f64::from(value as i32)),
        }
    }
    Stored { dtype, bytes, values }
}

/// The largest element of a type.
fn largest(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => half::f16::MAX.to_f64(),
        Dtype::Bf16 => half::bf16::MAX.to_f64(),
        Dtype::F64 => f64::MAX,
        Dtype::F32 | Dtype::U8 | Dtype::I8 | Dtype::I32 => f64::from(f32::MAX),
    }
}

fn score(metric: Metric, query: &[f32], vector: &Stored, piece: usize) -> f64 {
    let scorer = Scorer::new(metric, vector.dtype).unwrap();
    let mut sums = Sums::default();
    let element_bytes = vector.dtype.bytes() as usize;
    for (query, elements) in query
        .chunks(piece)
        .zip(vector.bytes.chunks(piece * element_bytes))
    {
        scorer.add(&mut sums, query, elements);
    }
    scorer.finish(&sums, scorer.query_norm(query))
}

/// (score, sum of the terms' magnitudes), with compensated sums.
fn reference(metric: Metric, query: &[f32], vector: &Stored) -> (f64, f64) {
    let pairs = || {
        query
            .iter()
            .map(|value| f64::from(*value))
            .zip(vector.values.iter().copied())
    };
    match metric {
        Metric::Dot => (
            exact(pairs().map(|(q, x)| q * x)),
            exact(pairs().map(|(q, x)| (q * x).abs())),
        ),
        Metric::Cosine => {
            let norms = exact(pairs().map(|(q, _)| q * q)).sqrt() * exact(pairs().map(|(_, x)| x * x)).sqrt();
            if norms == 0.0 || exact(pairs().map(|(_, x)| x * x)).sqrt() < NORM_MIN {
                return (0.0, 0.0);
            }
            // An overflowing norm leaves nothing to compare with.
            let magnitude = if norms.is_finite() { 1.0 } else { f64::INFINITY };
            (exact(pairs().map(|(q, x)| q * x)) / norms, magnitude)
        }
        Metric::Euclidean => {
            let distance = exact(pairs().map(|(q, x)| (q - x) * (q - x))).sqrt();
            (distance, distance)
        }
        Metric::Manhattan => {
            let distance = exact(pairs().map(|(q, x)| (q - x).abs()));
            (distance, distance)
        }
    }
}

/// Neumaier's sum.
fn exact(terms: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut lost) = (0.0_f64, 0.0_f64);
    for term in terms {
        let next = sum + term;
        lost += if sum.abs() >= term.abs() {
            (sum - next) + term
        } else {
            (term - next) + sum
        };
        sum = next;
    }
    sum + lost
}

#[expect(clippy::cast_possible_truncation, reason = "clamped; digits are lost")]
fn single(value: f64) -> f32 {
    value.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32
}

fn agrees(metric: Metric, query: &[f32], vector: &Stored) -> Result<(), String> {
    let (expected, magnitude) = reference(metric, query, vector);
    for piece in [LANES, PIECE_ELEMENTS] {
        let got = score(metric, query, vector, piece);
        // If f64 cannot add the terms, there is no meaningful tolerance.
        let overflows = magnitude > f64::MAX / 2.0 || magnitude.is_nan();
        let near = (got - expected).abs() <= TOLERANCE * magnitude + NORM_MIN;
        if !(near || overflows) {
            return Err(format!("{metric:?} of {vector:?}: {got}, not {expected}"));
        }
    }
    Ok(())
}

/// Elements of any size: subnormal, tiny, ordinary, whole, the largest of several types.
fn element() -> impl Strategy<Value = f64> {
    prop_oneof![
        -1.0_f64..1.0,
        -300.0_f64..300.0,
        (-128_i16..=255).prop_map(f64::from),
        prop::sample::select(vec![
            0.0,
            -0.0,
            1e-45,
            6e-8,
            f64::from(f32::MIN_POSITIVE),
            f64::from(f32::MAX),
            f64::from(f32::MIN),
            65_504.0
        ]),
        // Only f64 has these; the others take their largest, or 0.
        prop::sample::select(vec![5e-324, 1e-200, 3e-150, 1e100, -1e150, 1e200, f64::MAX]),
    ]
}

proptest! {
    #[test]
    fn scores_agree_with_the_reference(
        pairs in prop::collection::vec((element(), element()), 1..200),
        cancels: bool,
    ) {
        // Queries and vectors of any dimension and every type: each metric within the stated tolerance, in
        // one piece and in many; and with every term but the last cancelling another one.
        let mut pairs = pairs;
        if cancels {
            let opposite: Vec<_> = pairs.iter().map(|(query, element)| (*query, -element)).collect();
            pairs.extend(opposite);
            pairs.push((1.0, 1e-3));
        }
        for dtype in scored_types() {
            let query: Vec<f32> = pairs.iter().map(|(query, _)| single(*query)).collect();
            let most = largest(dtype);
            let raw: Vec<f64> = pairs.iter().map(|(_, element)| element.clamp(-most, most)).collect();
            let vector = stored(dtype, &raw);
            for metric in METRICS {
                let agreed = agrees(metric, &query, &vector);
                prop_assert!(agreed.is_ok(), "{agreed:?}");
            }
        }
    }

    #[test]
    fn the_best_come_first_and_ties_by_id(
        scores in prop::collection::vec(-3_i8..3, 0..60),
        limit in 1_usize..70,
        metric in prop::sample::select(METRICS.to_vec()),
    ) {
        // Few different scores: what is kept is what sorting everything would have kept.
        let scored = |(id, score): (u64, &i8)| Scored { id, score: f64::from(*score) };
        let mut ranked: Vec<Scored> = (0..).zip(&scores).map(scored).collect();
        let mut sorted = ranked.clone();
        let sign = if matches!(metric, Metric::Dot | Metric::Cosine) { -1.0 } else { 1.0 };
        sorted.sort_by(|one, other| (one.score * sign).total_cmp(&(other.score * sign)).then(one.id.cmp(&other.id)));
        sorted.truncate(limit);
        metric.rank(&mut ranked, limit);
        prop_assert_eq!(ranked, sorted);
    }
}

#[test]
fn long_vectors_and_dimension_one_agree() {
    // One element; and more than a piece holds, with terms that cancel.
    let long: Vec<f64> = (0..3 * PIECE_ELEMENTS + 5)
        .map(|place| if place % 2 == 0 { 1e15 } else { -1e15 } + 1.0)
        .collect();
    let ones = vec![1.0; long.len()];
    for metric in METRICS {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F64] {
            agrees(metric, &ones, &stored(dtype, &long)).unwrap();
        }
        agrees(metric, &[2.0], &stored(Dtype::I8, &[-128.0])).unwrap();
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    // The lowest instruction set against the best of this machine.
    let query: Vec<f32> = (0..777_u16).map(|place| (f32::from(place) * 0.7).sin()).collect();
    let raw: Vec<f64> = (0..777_u16)
        .map(|place| (f64::from(place) * 1.3).cos() * 90.0)
        .collect();
    for dtype in scored_types() {
        let vector = stored(dtype, &raw);
        for metric in METRICS {
            let best = Scorer::new(metric, dtype).unwrap();
            let plain = Scorer {
                level: Level::baseline(),
                ..best
            };
            let bits = [best, plain].map(|scorer| {
                let mut sums = Sums::default();
                scorer.add(&mut sums, &query, &vector.bytes);
                scorer.finish(&sums, scorer.query_norm(&query)).to_bits()
            });
            assert_eq!(bits[0], bits[1], "{metric:?} {dtype}");
        }
    }
}

#[test]
fn a_norm_of_zero_has_cosine_zero() {
    // Zeros on either side, and on both; subnormal vectors have a norm.
    let zero = stored(Dtype::F32, &[0.0, -0.0]);
    assert_eq!(score(Metric::Cosine, &[1.0, 2.0], &zero, LANES).to_bits(), 0);
    assert_eq!(score(Metric::Cosine, &[0.0, 0.0], &zero, LANES).to_bits(), 0);
    let tiny = stored(Dtype::F32, &[1e-45, 0.0]);
    assert!((score(Metric::Cosine, &[1e-45, 0.0], &tiny, LANES) - 1.0).abs() < 1e-15);
    assert_eq!(score(Metric::Cosine, &[0.0, 0.0], &tiny, LANES).to_bits(), 0);
}

#[test]
fn a_vector_that_is_not_finite_has_no_finite_score() {
    // NaN and infinities in a vector, with the query's element zero and not, and a query of zeros.
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64] {
            let vector = stored(dtype, &[1.0, bad, 2.0]);
            for metric in METRICS {
                for query in [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0; 3]] {
                    assert!(
                        !score(metric, &query, &vector, LANES).is_finite(),
                        "{metric:?} {bad}"
                    );
                }
            }
        }
    }
}

#[test]
fn sums_that_f64_cannot_hold_are_no_scores() {
    // f64 elements whose squares overflow, also for a query of zeros, and whose squares underflow: no score; and the
    // score of zeros.
    let (huge, tiny) = (
        stored(Dtype::F64, &[1e200, 1.0]),
        stored(Dtype::F64, &[1e-200, 1e-170]),
    );
    let of = |metric, vector| score(metric, &[1.0, 2.0], vector, LANES);
    assert!(!of(Metric::Cosine, &huge).is_finite() && !of(Metric::Euclidean, &huge).is_finite());
    assert!(!score(Metric::Cosine, &[0.0, 0.0], &huge, LANES).is_finite());
    assert_eq!(
        (of(Metric::Dot, &huge), of(Metric::Manhattan, &huge)),
        (1e200, 1e200)
    );
    assert_eq!(of(Metric::Cosine, &tiny).to_bits(), 0);
}

#[test]
fn zero_has_one_sign() {
    // A product of -0.0 ties with one of 0.0, so that their ids decide.
    let vector = stored(Dtype::F32, &[-0.0]);
    assert_eq!(score(Metric::Dot, &[1.0], &vector, LANES).to_bits(), 0);
}

#[test]
fn a_threshold_is_reached_in_the_direction_of_the_metric() {
    // At least, for similarities; at most, for distances; an equal score reaches both.
    assert!(Metric::Dot.reaches(2.0, 1.0) && !Metric::Cosine.reaches(0.5, 1.0));
    assert!(Metric::Euclidean.reaches(0.5, 1.0) && !Metric::Manhattan.reaches(2.0, 1.0));
    assert!(Metric::Dot.reaches(1.0, 1.0) && Metric::Manhattan.reaches(1.0, 1.0));
}

#[test]
fn ids_have_no_scores() {
    // i32 vectors are lists of neighbours.
    assert!(Scorer::new(Metric::Dot, Dtype::I32).is_none());
    assert_eq!(Metric::from_word("cosine"), Some(Metric::Cosine));
    assert_eq!(Metric::from_word("l2"), None);
}
