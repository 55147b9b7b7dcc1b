//! Scores by plain sums over the files' elements, to check responses against.

use crate::data::Space;
use ringfetch_proto::v1;
use std::collections::BTreeMap;
use tonic::Code;

/// Checks a response against plain sums.
pub(super) fn right(
    space: &Space,
    dtype: &str,
    word: &str,
    request: &v1::ScoreVectorsRequest,
    answer: &v1::ScoreVectorsResponse,
) {
    let count = space.items.len() as u64;
    assert_eq!(answer.results.len(), request.queries.len());
    for (query, result) in request.queries.iter().zip(&answer.results) {
        let mut expected: BTreeMap<u64, f64> = BTreeMap::new();
        for &id in query.ids.iter().filter(|id| **id < count) {
            let elements = elements(&space.items[usize::try_from(id).unwrap()], dtype);
            expected.insert(id, plain_score(word, &query.vector, &elements));
        }
        let finite = expected.values().filter(|score| score.is_finite()).count();
        let unscored = expected.len() - finite;
        assert_eq!(result.unscored as usize, unscored, "{} {word}", space.name);
        assert_eq!(result.ids.len(), finite.min(20));
        assert_eq!(result.scores.len(), result.ids.len());
        for (id, score) in result.ids.iter().zip(&result.scores) {
            let expected = expected[id];
            // Noise has numbers of every magnitude, and so does the error.
            let near = (score - expected).abs() <= 1e-9 * expected.abs().max(f64::MIN_POSITIVE)
                || score == &expected
                || cancels(word);
            assert!(near, "{} {word} {id}: {score}, not {expected}", space.name);
        }
        let ordered = result.ids.iter().zip(&result.scores).collect::<Vec<_>>();
        let better = |one: f64, other: f64| match word {
            "dot" | "cosine" => one > other,
            _ => one < other,
        };
        for pair in ordered.windows(2) {
            let ((one_id, one), (other_id, other)) = (pair[0], pair[1]);
            assert!(
                better(*one, *other) || (one == other && one_id < other_id),
                "{pair:?}"
            );
        }
        let past_the_end: Vec<u32> = (0..)
            .zip(&query.ids)
            .filter(|(_, id)| **id >= count)
            .map(|(item, _)| item)
            .collect();
        let failed: Vec<u32> = result.errors.iter().map(|error| error.item).collect();
        assert_eq!(failed, past_the_end);
        for error in &result.errors {
            assert_eq!(error.code, Code::OutOfRange as i32);
            assert!(error.message.contains("out of range"), "{error:?}");
        }
    }
}

/// Whether terms of both signs are added, which leaves no relative precision; the tests of `score` cover
/// these.
fn cancels(word: &str) -> bool {
    matches!(word, "dot" | "cosine")
}

fn elements(bytes: &[u8], dtype: &str) -> Vec<f64> {
    match dtype {
        "f32" => bytes
            .chunks(4)
            .map(|raw| f64::from(f32::from_le_bytes(raw.try_into().unwrap())))
            .collect(),
        "f16" => bytes
            .chunks(2)
            .map(|raw| half::f16::from_le_bytes(raw.try_into().unwrap()).to_f64())
            .collect(),
        "bf16" => bytes
            .chunks(2)
            .map(|raw| half::bf16::from_le_bytes(raw.try_into().unwrap()).to_f64())
            .collect(),
        "f64" => bytes
            .chunks(8)
            .map(|raw| f64::from_le_bytes(raw.try_into().unwrap()))
            .collect(),
        "u8" => bytes.iter().map(|raw| f64::from(*raw)).collect(),
        "i8" => bytes.iter().map(|raw| f64::from(raw.cast_signed())).collect(),
        other => panic!("{other}"),
    }
}

fn plain_score(word: &str, query: &[f32], elements: &[f64]) -> f64 {
    let pairs = || {
        query
            .iter()
            .map(|value| f64::from(*value))
            .zip(elements.iter().copied())
    };
    let dot = || pairs().map(|(q, x)| q * x).sum::<f64>();
    match word {
        "dot" => dot(),
        "cosine" => {
            let norms = pairs().map(|(q, _)| q * q).sum::<f64>().sqrt()
                * pairs().map(|(_, x)| x * x).sum::<f64>().sqrt();
            match norms {
                0.0 => 0.0,
                f64::INFINITY => f64::NAN,
                _ => dot() / norms,
            }
        }
        "euclidean" => pairs().map(|(q, x)| (q - x) * (q - x)).sum::<f64>().sqrt(),
        _ => pairs().map(|(q, x)| (q - x).abs()).sum(),
    }
}
