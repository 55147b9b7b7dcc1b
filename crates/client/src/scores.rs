//! Scores: vectors ranked by the server, without their bytes.

use crate::error::Error;
use crate::items::{ItemError, check_errors};
use crate::request::check_version;
use ringfetch_proto::v1 as wire;

/// How near a vector is to a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Metric {
    /// Inner product; larger is better.
    Dot,
    /// Cosine of the angle; larger is better. 0 where either norm is 0.
    Cosine,
    /// Root of the sum of the squared differences; smaller is better.
    Euclidean,
    /// Sum of the absolute differences; smaller is better.
    Manhattan,
}

impl From<Metric> for wire::Metric {
    fn from(metric: Metric) -> Self {
        match metric {
            Metric::Dot => Self::Dot,
            Metric::Cosine => Self::Cosine,
            Metric::Euclidean => Self::Euclidean,
            Metric::Manhattan => Self::Manhattan,
        }
    }
}

/// Queries against candidates of one dataset of kind vectors.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreRequest {
    message: wire::ScoreVectorsRequest,
}

impl ScoreRequest {
    /// A request without queries, for at most `limit` results for each.
    pub fn new(dataset: impl Into<String>, metric: Metric, limit: u32) -> Self {
        Self {
            message: wire::ScoreVectorsRequest {
                dataset: dataset.into(),
                metric: wire::Metric::from(metric).into(),
                limit,
                ..Default::default()
            },
        }
    }

    /// Adds a query: as many finite elements as a vector has, and the ids of its candidates.
    #[must_use]
    pub fn query(mut self, vector: impl Into<Vec<f32>>, ids: impl Into<Vec<u64>>) -> Self {
        self.message.queries.push(wire::ScoreQuery {
            vector: vector.into(),
            ids: ids.into(),
        });
        self
    }

    /// Only results with this score or a better one.
    #[must_use]
    pub fn threshold(mut self, threshold: f64) -> Self {
        self.message.threshold = Some(threshold);
        self
    }

    /// Requires this version of the dataset, as in [`Scores::etag`].
    #[must_use]
    pub fn if_match(mut self, etag: impl Into<String>) -> Self {
        self.message.if_match = etag.into();
        self
    }

    /// The wire message, and what to check its answer against.
    pub(crate) fn into_wire(self, fail_fast: bool) -> (wire::ScoreVectorsRequest, WantedScores) {
        let mut request = self.message;
        request.fail_fast = fail_fast;
        let wanted = WantedScores {
            candidates: request.queries.iter().map(|query| query.ids.len()).collect(),
            limit: request.limit,
            if_match: request.if_match.clone(),
        };
        (request, wanted)
    }
}

/// What an answer is checked against.
#[derive(Debug)]
pub(crate) struct WantedScores {
    /// How many each query has.
    candidates: Vec<usize>,
    limit: u32,
    /// Empty: any.
    if_match: String,
}

/// The answer to a [`ScoreRequest`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Scores {
    /// One for each query, in request order.
    pub results: Vec<Ranking>,
    /// The version of the dataset.
    pub etag: String,
}

/// The best candidates of one query.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Ranking {
    /// (id, score), best first; those with equal scores by id.
    pub best: Vec<(u64, f64)>,
    /// Candidates left out because their score is not a finite number.
    pub unscored: u32,
    /// Candidates that could not be read, by their position in the query's ids.
    pub errors: Vec<ItemError>,
}

impl Scores {
    pub(crate) fn check(wanted: &WantedScores, answer: wire::ScoreVectorsResponse) -> Result<Self, Error> {
        let (candidates, limit) = (&wanted.candidates, wanted.limit);
        if !wanted.if_match.is_empty() {
            check_version(&wanted.if_match, &answer.etag)?;
        }
        if answer.results.len() != candidates.len() {
            return Err(Error::protocol(format!(
                "{} results for {} queries",
                answer.results.len(),
                candidates.len()
            )));
        }
        let ranking = |(result, candidates): (wire::ScoreResult, &usize)| {
            let (ids, scores) = (result.ids, result.scores);
            if ids.len() != scores.len() || ids.len() > limit as usize {
                return Err(Error::protocol(format!(
                    "{} ids with {} scores, but at most {limit} were requested",
                    ids.len(),
                    scores.len()
                )));
            }
            // Each candidate is at most one of these.
            let unscored = usize::try_from(result.unscored).unwrap_or(usize::MAX);
            let outcomes = unscored.saturating_add(ids.len() + result.errors.len());
            if outcomes > *candidates {
                return Err(Error::protocol(format!(
                    "{outcomes} results and errors for {candidates} candidates"
                )));
            }
            Ok(Ranking {
                best: ids.into_iter().zip(scores).collect(),
                unscored: result.unscored,
                errors: check_errors(result.errors, *candidates)?,
            })
        };
        let results = answer.results.into_iter().zip(candidates).map(ranking);
        Ok(Self {
            results: results.collect::<Result<_, _>>()?,
            etag: answer.etag,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(ids: &[u64], scores: &[f64], failed: &[u32]) -> wire::ScoreVectorsResponse {
        let error = |item: &u32| wire::ItemError {
            item: *item,
            code: 11,
            message: String::new(),
        };
        let result = wire::ScoreResult {
            ids: ids.to_vec(),
            scores: scores.to_vec(),
            unscored: 0,
            errors: failed.iter().map(error).collect(),
        };
        wire::ScoreVectorsResponse {
            results: vec![result],
            etag: "v".into(),
        }
    }

    #[test]
    fn an_answer_that_does_not_fit_is_refused() {
        // One query of three candidates, at most two results: a valid answer, and each kind of invalid one.
        let wanted = |candidates: &[usize], if_match: &str| WantedScores {
            candidates: candidates.to_vec(),
            limit: 2,
            if_match: if_match.into(),
        };
        let scores = Scores::check(&wanted(&[3], "v"), answer(&[7, 5], &[2.0, 1.0], &[2])).unwrap();
        assert_eq!(scores.results[0].best, [(7, 2.0), (5, 1.0)]);
        assert_eq!((scores.results[0].errors[0].item, scores.etag.as_str()), (2, "v"));
        for (wanted, answer) in [
            (wanted(&[3, 3], ""), answer(&[7], &[1.0], &[])),
            (wanted(&[3], ""), answer(&[7, 5, 3], &[3.0, 2.0, 1.0], &[])),
            (wanted(&[3], ""), answer(&[7, 5], &[1.0], &[])),
            (wanted(&[3], ""), answer(&[7], &[1.0], &[3])),
            (wanted(&[1], ""), answer(&[7, 5], &[2.0, 1.0], &[])),
            (wanted(&[2], ""), answer(&[7, 5], &[2.0, 1.0], &[1])),
            (wanted(&[3], "w"), answer(&[7], &[1.0], &[])),
        ] {
            let refused = Scores::check(&wanted, answer);
            assert!(matches!(refused, Err(Error::Protocol { .. })), "{refused:?}");
        }
    }
}
