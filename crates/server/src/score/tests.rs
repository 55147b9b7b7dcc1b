//! Scores against a reference in f64, and their order.

use super::*;
use proptest::prelude::*;

const METRICS: [Metric; 4] = [Metric::Dot, Metric::Cosine, Metric::Euclidean, Metric::Manhattan];

/// The stated tolerance, of the sum of the terms' magnitudes.
const TOLERANCE: f64 = 1e-12;

/// A vector as it is stored, and the values of its elements.
#[derive(Debug, Clone)]
struct Stored {
    dtype: Dtype,
    bytes: Vec<u8>,
    values: Vec<f64>,
}

fn stored(dtype: Dtype, raw: &[f32]) -> Stored {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for &value in raw {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates, which is a value as good as any"
        )]
        match dtype {
            Dtype::F32 | Dtype::I32 => {
                bytes.extend(value.to_le_bytes());
                values.push(f64::from(value));
            }
            Dtype::F16 => {
                let value = half::f16::from_f32(value);
                bytes.extend(value.to_le_bytes());
                values.push(value.to_f64());
            }
            Dtype::U8 => {
                bytes.push(value as u8);
                values.push(f64::from(value as u8));
            }
            Dtype::I8 => {
                bytes.extend((value as i8).to_le_bytes());
                values.push(f64::from(value as i8));
            }
        }
    }
    Stored { dtype, bytes, values }
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
            if norms == 0.0 {
                return (0.0, 0.0);
            }
            (exact(pairs().map(|(q, x)| q * x)) / norms, 1.0)
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

fn agrees(metric: Metric, query: &[f32], vector: &Stored) -> Result<(), String> {
    let (expected, magnitude) = reference(metric, query, vector);
    for piece in [LANES, PIECE_ELEMENTS] {
        let got = score(metric, query, vector, piece);
        let error = (got - expected).abs();
        if error > TOLERANCE * magnitude {
            return Err(format!("{metric:?} of {vector:?}: {got}, not {expected}"));
        }
    }
    Ok(())
}

/// Elements of any size: subnormal, tiny, ordinary, whole, the largest.
fn element() -> impl Strategy<Value = f32> {
    prop_oneof![
        -1.0_f32..1.0,
        -300.0_f32..300.0,
        (-128_i16..=255).prop_map(f32::from),
        prop::sample::select(vec![
            0.0,
            -0.0,
            f32::MIN_POSITIVE / 3.0,
            f32::MIN_POSITIVE,
            6e-8,
            f32::MAX,
            f32::MIN,
            65_504.0
        ]),
    ]
}

fn finite(vector: &Stored) -> bool {
    vector.values.iter().all(|value| value.is_finite())
}

proptest! {
    #[test]
    fn scores_agree_with_the_reference(
        pairs in prop::collection::vec((element(), element()), 1..200),
        dtype in prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::U8, Dtype::I8]),
    ) {
        // Queries and vectors of any dimension and type: each metric within the stated tolerance, in one piece and in many.
        let (query, raw): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
        let vector = stored(dtype, &raw);
        prop_assume!(finite(&vector));
        for metric in METRICS {
            let agreed = agrees(metric, &query, &vector);
            prop_assert!(agreed.is_ok(), "{agreed:?}");
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
    let long: Vec<f32> = (0..3 * PIECE_ELEMENTS + 5)
        .map(|place| if place % 2 == 0 { 1e15 } else { -1e15 } + 1.0)
        .collect();
    let ones = vec![1.0; long.len()];
    for metric in METRICS {
        agrees(metric, &ones, &stored(Dtype::F32, &long)).unwrap();
        agrees(metric, &[2.0], &stored(Dtype::I8, &[-128.0])).unwrap();
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    // The plainest level that there is against the best of this machine.
    let query: Vec<f32> = (0..777_u16).map(|place| (f32::from(place) * 0.7).sin()).collect();
    let raw: Vec<f32> = (0..777_u16).map(|place| (f32::from(place) * 1.3).cos()).collect();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::U8, Dtype::I8] {
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
    // On either side, and on both; subnormal vectors have a norm.
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
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for dtype in [Dtype::F32, Dtype::F16] {
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
fn zero_has_one_sign() {
    // A product of -0.0 ties with one of 0.0, so that their ids decide.
    let vector = stored(Dtype::F32, &[-0.0]);
    assert_eq!(score(Metric::Dot, &[1.0], &vector, LANES).to_bits(), 0);
}

#[test]
fn a_threshold_is_reached_in_the_direction_of_the_metric() {
    // At least, for similarities; at most, for distances; equal reaches both.
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
