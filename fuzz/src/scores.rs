//! Scores by their definition (docs/API.md), added one element after the other.

use crate::{ITEMS_MAX, VECTOR_BYTES, World};
use ringfetch_proto::v1::{Metric, ScoreVectorsRequest, ScoreVectorsResponse};
use std::collections::BTreeMap;

/// How far two computations may be apart, as a part of the sum of the terms' magnitudes: over four elements each
/// rounds fewer than 16 times, by at most 2^-53. The products of f32 elements neither overflow nor underflow.
const ERROR: f64 = 1e-14;

#[derive(Debug)]
struct Score {
    value: f64,
    error: f64,
}

/// `None`: an element is not finite.
fn score(metric: Metric, query: &[f32], vector: &[u8]) -> Option<Score> {
    let (elements, _) = vector.as_chunks();
    let vector: Vec<f32> = elements.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    if !vector.iter().all(|element| element.is_finite()) {
        return None;
    }
    let norm = |of: &[f32]| {
        of.iter()
            .map(|&x| f64::from(x) * f64::from(x))
            .sum::<f64>()
            .sqrt()
    };
    let (mut sum, mut magnitude) = (0.0, 0.0);
    for (&query, &element) in query.iter().zip(&vector) {
        let (query, element) = (f64::from(query), f64::from(element));
        let term: f64 = match metric {
            Metric::Dot | Metric::Cosine => query * element,
            Metric::Euclidean => (query - element).powi(2),
            Metric::Manhattan => (query - element).abs(),
            Metric::Unspecified => unreachable!("it is not valid"),
        };
        sum += term;
        magnitude += term.abs();
    }
    let (value, magnitude) = match metric {
        Metric::Euclidean => (sum.sqrt(), sum.sqrt()),
        Metric::Cosine => match norm(query) * norm(&vector) {
            0.0 => (0.0, 0.0),
            norms => ((sum / norms).clamp(-1.0, 1.0), magnitude / norms),
        },
        _ => (sum, magnitude),
    };
    let error = magnitude * ERROR;
    Some(Score { value, error })
}

/// Whether the request follows the contract.
fn is_valid(request: &ScoreVectorsRequest) -> bool {
    let queries = &request.queries;
    let candidates: usize = queries.iter().map(|query| query.ids.len()).sum();
    let most = queries.iter().map(|query| query.ids.len()).max().unwrap_or(0);
    request.dataset == "v"
        // No input can guess the tag of a file of this run.
        && request.if_match.is_empty()
        && request.metric() != Metric::Unspecified
        && (1..=most).contains(&(request.limit as usize))
        && candidates <= ITEMS_MAX as usize
        && !request.threshold.is_some_and(f64::is_nan)
        && queries.iter().all(|query| {
            !query.ids.is_empty()
                && query.vector.len() == VECTOR_BYTES / 4
                && query.vector.iter().all(|element| element.is_finite())
        })
}

/// Whether a refusal would be a mistake.
pub fn must_succeed(world: &World, request: &ScoreVectorsRequest) -> bool {
    let mut ids = request.queries.iter().flat_map(|query| &query.ids);
    is_valid(request) && (!request.fail_fast || ids.all(|id| world.vector(*id).is_some()))
}

/// Checks an answer: the best candidates of each query in order, each with its score, and nothing is missing.
pub fn check(world: &World, request: &ScoreVectorsRequest, answer: &ScoreVectorsResponse) {
    assert!(must_succeed(world, request), "accepted: {request:?}");
    assert_eq!(answer.results.len(), request.queries.len());
    let metric = request.metric();
    // Larger is better.
    let merit = |score: f64| match metric {
        Metric::Dot | Metric::Cosine => score,
        _ => -score,
    };
    for (query, result) in request.queries.iter().zip(&answer.results) {
        let about = || format!("{metric:?} of {query:?}, {request:?}: {result:?}");
        let there = |id: &u64| world.vector(*id);
        let missing = (0..).zip(&query.ids).filter(|(_, id)| there(id).is_none());
        assert!(
            missing
                .map(|(item, _)| item)
                .eq(result.errors.iter().map(|error| error.item)),
            "{}",
            about()
        );
        let candidates = query.ids.iter().filter_map(|id| Some((*id, there(id)?)));
        let mut scores: BTreeMap<u64, Option<Score>> = candidates
            .map(|(id, vector)| (id, score(metric, &query.vector, vector)))
            .collect();
        let unscored = scores.values().filter(|score| score.is_none()).count();
        assert_eq!(result.unscored as usize, unscored, "{}", about());

        let ranked: Vec<(u64, f64)> = result
            .ids
            .iter()
            .copied()
            .zip(result.scores.iter().copied())
            .collect();
        assert!(
            result.ids.len() == result.scores.len() && ranked.len() <= request.limit as usize,
            "{}",
            about()
        );
        let is_ordered = ranked.is_sorted_by(|(one, better), (other, worse)| {
            merit(*better) > merit(*worse) || (better == worse && one < other)
        });
        assert!(is_ordered, "{}", about());
        for (id, found) in &ranked {
            let expected = scores.remove(id).flatten();
            let expected = expected.unwrap_or_else(|| panic!("{id} is no candidate, or twice: {}", about()));
            let is_near = (found - expected.value).abs() <= expected.error;
            assert!(is_near, "{id} is {expected:?}: {}", about());
            let reaches = request
                .threshold
                .is_none_or(|least| merit(*found) >= merit(least));
            assert!(reaches, "{id}: {}", about());
        }
        // The others are worse than the last one, or than the threshold.
        let last = ranked.last().filter(|_| ranked.len() == request.limit as usize);
        for (id, left) in scores
            .iter()
            .filter_map(|(id, score)| Some((id, score.as_ref()?)))
        {
            let most = |bound: f64| merit(left.value) - left.error <= merit(bound);
            let is_worse = last.is_some_and(|(last, score)| {
                most(*score) && (left.value != *score || left.error > 0.0 || id > last)
            });
            let is_below = request
                .threshold
                .is_some_and(|least| most(least) && (left.value != least || left.error > 0.0));
            assert!(is_worse || is_below, "{id}, {left:?}, is missing: {}", about());
        }
    }
}
