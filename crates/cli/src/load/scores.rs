//! `--score`: candidates ranked by the daemon, or here from fetched vectors, and the expected ranking.

use super::args::{Load, ScoreAt};
use crate::expected::engine_dtype;
use crate::score::MetricName;
use ringfetch_client::{Dtype, ScoreRequest};
use ringfetch_pattern as pattern;
use ringfetch_score::{Scored, Scorer};

/// Made before the run, so that they cost no time during it.
const QUERIES: u64 = 64;

/// Ids with their scores, best first.
pub(crate) type Ranking = Vec<(u64, f64)>;

/// How the vectors of one dataset are scored.
#[derive(Debug)]
pub(crate) struct Scoring {
    metric: MetricName,
    scorer: Scorer,
    limit: u32,
    pub(super) at: ScoreAt,
    dtype: Dtype,
    dim: u32,
    /// Each with its norm.
    queries: Vec<(Vec<f32>, f64)>,
}

impl Scoring {
    /// `None` if no scores were requested. The error says why the dataset cannot be scored.
    pub(super) fn new(args: &Load, vectors: Option<(Dtype, u32)>) -> Result<Option<Self>, String> {
        let Some(metric) = args.score else { return Ok(None) };
        let (dtype, dim) = vectors.ok_or("its items are not vectors")?;
        let scorer = Scorer::new(metric.into(), engine_dtype(dtype))
            .ok_or_else(|| format!("vectors of {dtype} have no scores"))?;
        let query = |number: u64| {
            let mut bytes = vec![0; usize::try_from(dim).unwrap_or(0).saturating_mul(4)];
            let first = number.wrapping_mul(dim.into());
            pattern::fill_elements(!args.choice_seed, engine_dtype(Dtype::F32), first, &mut bytes);
            let query: Vec<f32> = bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b))
                .collect();
            let norm = scorer.query_norm(&query);
            (query, norm)
        };
        Ok(Some(Self {
            metric,
            scorer,
            limit: args.score_limit,
            at: args.score_at,
            dtype,
            dim,
            queries: (0..QUERIES).map(query).collect(),
        }))
    }

    /// A description for people: `scored by dot`.
    pub(super) fn what(&self) -> String {
        let here = if self.at == ScoreAt::Client { " here" } else { "" };
        format!("scored{here} by {}", self.scorer.metric().as_str())
    }

    /// The query of a request, with its norm, chosen by the request's first candidate.
    fn query(&self, items: &[u64]) -> (&[f32], f64) {
        let first = items.first().copied().unwrap_or(0) % QUERIES;
        let (query, norm) = &self.queries[usize::try_from(first).unwrap_or(0)];
        (query, *norm)
    }

    fn limit(&self, items: &[u64]) -> u32 {
        self.limit.min(u32::try_from(items.len()).unwrap_or(u32::MAX))
    }

    pub(super) fn request(&self, dataset: &str, items: &[u64]) -> ScoreRequest {
        let limit = self.limit(items);
        ScoreRequest::new(dataset, self.metric.into(), limit).query(self.query(items).0, items)
    }

    pub(super) fn json(&self, items: &[u64]) -> serde_json::Value {
        serde_json::json!({
            "queries": [{ "vector": self.query(items).0, "ids": items }],
            "metric": self.scorer.metric().as_str(),
            "limit": self.limit(items),
        })
    }

    /// Ranks vectors; `each` passes them with their positions in the request.
    pub(super) fn rank(&self, items: &[u64], each: impl FnOnce(&mut dyn FnMut(usize, &[u8]))) -> Ranking {
        let (query, norm) = self.query(items);
        let mut scored = Vec::with_capacity(items.len());
        each(&mut |position, elements| {
            let Some(&id) = items.get(position) else { return };
            let score = self.scorer.score(query, norm, elements);
            scored.push(Scored { id, score });
        });
        // A repeated vector is scored once.
        scored.sort_unstable_by_key(|scored| scored.id);
        scored.dedup_by_key(|scored| scored.id);
        let limit = usize::try_from(self.limit(items)).unwrap_or(usize::MAX);
        self.scorer.metric().rank(&mut scored, limit);
        scored.iter().map(|scored| (scored.id, scored.score)).collect()
    }

    /// The first position where a ranking differs from that of the pattern's vectors, and the number of such
    /// positions.
    pub(super) fn check(&self, seed: u64, items: &[u64], got: &Ranking) -> Option<(String, u64)> {
        let expected = self.rank(items, |look| {
            let bytes = self.dtype.size_bytes().saturating_mul(self.dim);
            let mut elements = vec![0; usize::try_from(bytes).unwrap_or(0)];
            for (position, id) in items.iter().enumerate() {
                let first = id.wrapping_mul(self.dim.into());
                pattern::fill_elements(seed, engine_dtype(self.dtype), first, &mut elements);
                look(position, &elements);
            }
        });
        // Parsing JSON may lose the last bit.
        let same = |(one, other): (&(u64, f64), &(u64, f64))| {
            one.0 == other.0 && (one.1 - other.1).abs() <= 2.0 * f64::EPSILON * one.1.abs()
        };
        let right = expected.iter().zip(got).filter(|pair| same(*pair)).count();
        let wrong = expected.len().max(got.len()) - right;
        let place = expected
            .iter()
            .zip(got)
            .position(|pair| !same(pair))
            .unwrap_or(right);
        let difference = || {
            let (expected, got) = (expected.get(place), got.get(place));
            format!("result {place}: expected {expected:?}, got {got:?}")
        };
        (wrong > 0).then(|| (difference(), u64::try_from(wrong).unwrap_or(u64::MAX)))
    }
}

impl From<MetricName> for ringfetch_score::Metric {
    fn from(name: MetricName) -> Self {
        match name {
            MetricName::Dot => Self::Dot,
            MetricName::Cosine => Self::Cosine,
            MetricName::Euclidean => Self::Euclidean,
            MetricName::Manhattan => Self::Manhattan,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Arguments {
        #[command(flatten)]
        load: Load,
    }

    fn scoring(metric: &str, vectors: Option<(Dtype, u32)>) -> Result<Scoring, String> {
        let words = ["load", "--dataset", "v", "--score", metric, "--score-limit", "3"];
        let arguments = Arguments::try_parse_from(words).unwrap();
        Scoring::new(&arguments.load, vectors).map(Option::unwrap)
    }

    #[test]
    fn a_ranking_is_held_against_the_patterns() {
        // The pattern's own vectors, one of them twice: their ranking is right. With two results swapped, one
        // missing, another score, and another seed: the first wrong position and how many there are.
        let items = [9, 4, 9, 70, 2];
        let scoring = scoring("euclidean", Some((Dtype::F16, 24))).unwrap();
        let of_seed = |seed| {
            scoring.rank(&items, |look| {
                for (position, id) in items.iter().enumerate() {
                    let mut bytes = [0; 48];
                    pattern::fill_elements(seed, engine_dtype(Dtype::F16), id * 24, &mut bytes);
                    look(position, &bytes);
                }
            })
        };
        let right = of_seed(7);
        assert_eq!(right.len(), 3);
        assert!(right.is_sorted_by(|one, other| one.1 <= other.1));
        assert_eq!(scoring.check(7, &items, &right), None);
        let mut exchanged = right.clone();
        exchanged.swap(1, 2);
        let (difference, wrong) = scoring.check(7, &items, &exchanged).unwrap();
        assert!(
            difference.starts_with("result 1: expected") && wrong == 2,
            "{difference}, {wrong}"
        );
        let (difference, wrong) = scoring.check(7, &items, &right[..2].to_vec()).unwrap();
        assert!(
            difference.ends_with("got None") && wrong == 1,
            "{difference}, {wrong}"
        );
        let mut other = right;
        other[0].1 += 1e-9;
        assert_eq!(scoring.check(7, &items, &other).unwrap().1, 1);
        assert!(scoring.check(7, &items, &of_seed(8)).is_some());
    }

    #[test]
    fn what_has_no_scores_is_refused() {
        // Integer vectors, and items that are not vectors.
        assert!(scoring("dot", Some((Dtype::I32, 4))).unwrap_err().contains("i32"));
        assert!(scoring("dot", None).is_err());
    }
}
