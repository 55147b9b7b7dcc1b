//! Queries of the study `rescore`: for each a vector, its candidates from the quantised copy, and the best
//! candidates' scores. `bench/candidates.py` makes them; they are stored next to the vectors.
//!
//! A file has a line of JSON, then for each query, little-endian: its elements (f32), its candidates, best
//! first (u32), and for each oversampling the best scores in order (f32).

use crate::error::LabError;
use ringfetch_engine::dataset::Dtype;
use ringfetch_score::{Metric, Scorer};
use serde::Deserialize;
use std::fs;
use std::path::Path;

pub(crate) const FORMAT: &str = "ringfetch-lab-candidates/1";
/// Scores are of unit vectors; the file rounds them to f32.
const TOLERANCE: f64 = 1e-4;
const LENGTH_MAX_BYTES: u64 = 1 << 30;

/// The first line.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Head {
    pub(crate) format: String,
    /// Elements of a vector.
    pub(crate) dim: usize,
    /// Vectors.
    pub(crate) count: u64,
    pub(crate) queries: usize,
    /// Results of a query.
    pub(crate) limit: usize,
    /// Candidates for each result, in the order of the scores.
    pub(crate) oversampling: Vec<usize>,
    /// Which program made them, in words.
    pub(crate) made_by: String,
}

impl Head {
    fn candidates(&self) -> usize {
        self.limit * self.oversampling.iter().max().copied().unwrap_or(0)
    }

    /// Four-byte words per query.
    fn words(&self) -> usize {
        self.dim + self.candidates() + self.limit * self.oversampling.len()
    }

    fn makes_sense(&self) -> bool {
        let sizes = [self.dim, self.queries, self.limit, self.oversampling.len()];
        let over = self.oversampling.iter().all(|over| (1..=64).contains(over));
        self.format == FORMAT && over && sizes.iter().all(|size| (1..=1 << 16).contains(size))
    }
}

/// All queries.
#[derive(Debug)]
pub(crate) struct Questions {
    pub(crate) head: Head,
    vectors: Vec<f32>,
    ids: Vec<u32>,
    best: Vec<f32>,
    scorer: Scorer,
}

impl Questions {
    /// Reads the file; `command` makes it.
    pub(crate) fn read(path: &Path, count: u64, command: &str) -> Result<Self, LabError> {
        let shown = path.display();
        let wrong =
            |problem: &str| LabError::Usage(format!("--path: {shown} {problem}: make it with {command}"));
        let length = fs::metadata(path).map_err(|_| wrong("is not there"))?.len();
        if length > LENGTH_MAX_BYTES {
            return Err(wrong("is too long"));
        }
        let bytes = fs::read(path).map_err(|error| LabError::at(format_args!("--path: {shown}"), error))?;
        let line = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(0);
        let (line, rest) = bytes.split_at(line);
        let head = serde_json::from_slice(line).ok().filter(Head::makes_sense);
        let head = head.ok_or_else(|| wrong("holds no candidates of this version"))?;
        if head.count != count {
            return Err(wrong("is of another number of vectors"));
        }
        let (words, _) = rest.get(1..).unwrap_or_default().as_chunks::<4>();
        if rest.len() != 1 + head.queries * head.words() * 4 {
            return Err(wrong("is cut short"));
        }
        let (mut vectors, mut ids, mut best) = (Vec::new(), Vec::new(), Vec::new());
        for query in words.chunks_exact(head.words()) {
            let (vector, others) = query.split_at(head.dim);
            let (candidates, scores) = others.split_at(head.candidates());
            vectors.extend(vector.iter().map(|word| f32::from_le_bytes(*word)));
            ids.extend(candidates.iter().map(|word| u32::from_le_bytes(*word)));
            best.extend(scores.iter().map(|word| f32::from_le_bytes(*word)));
        }
        if ids.iter().any(|id| u64::from(*id) >= count) || !vectors.iter().all(|value| value.is_finite()) {
            let what = "has a candidate past the last vector, or a query that is no number";
            return Err(wrong(what));
        }
        let scorer = Scorer::new(Metric::Dot, Dtype::F32).ok_or_else(|| wrong("cannot be scored"))?;
        Ok(Self {
            head,
            vectors,
            ids,
            best,
            scorer,
        })
    }

    pub(crate) fn limit(&self) -> usize {
        self.head.limit
    }

    pub(crate) fn vector_bytes(&self) -> usize {
        self.head.dim * 4
    }

    /// Number of candidates of a query.
    pub(crate) fn candidates(&self, oversampling: usize) -> usize {
        self.head.limit * oversampling
    }

    pub(crate) fn query(&self, query: usize) -> &[f32] {
        let from = query * self.head.dim;
        self.vectors.get(from..from + self.head.dim).unwrap_or_default()
    }

    pub(crate) fn ids(&self, query: usize, oversampling: usize) -> &[u32] {
        let from = query * self.head.candidates();
        self.ids
            .get(from..from + self.candidates(oversampling))
            .unwrap_or_default()
    }

    /// The inner product of a query and a vector, by the daemon's arithmetic.
    pub(crate) fn score(&self, query: usize, vector: &[u8]) -> f64 {
        self.scorer.score(self.query(query), 0.0, vector)
    }

    /// Ranks the scores of a query's candidates, and checks the best against the expected ones.
    pub(crate) fn check(
        &self,
        query: usize,
        oversampling: usize,
        scores: &mut Vec<f64>,
    ) -> Result<(), String> {
        let limit = self.head.limit;
        scores.sort_unstable_by(|one, other| other.total_cmp(one));
        scores.truncate(limit);
        let prepared = &self.head.oversampling;
        let part = prepared.iter().position(|known| *known == oversampling);
        let from = (query * prepared.len() + part.unwrap_or(0)) * limit;
        let best = self.best.get(from..from + limit).unwrap_or_default();
        let wrong = |what: String| Err(format!("wrong bytes: query {query} has {what}"));
        if scores.len() != limit {
            return wrong(format!("{} scores of {limit}", scores.len()));
        }
        let near = |(score, best): &(&f64, &f32)| (*score - f64::from(**best)).abs() <= TOLERANCE;
        match scores.iter().zip(best).find(|pair| !near(pair)) {
            None => Ok(()),
            Some((score, best)) => wrong(format!("a score of {score}, not {best}")),
        }
    }
}
