//! Scores of vectors, computed as the vectors arrive.
//!
//! The candidates of all queries are sorted by id, so that a vector that several queries share is read once,
//! and neighbours are read together. They are read in windows, the next ones while one is scored, so a
//! request holds little memory however many candidates it has. The arithmetic runs on the request's core, and yields
//! after every [`TURN`], so that other tasks on the core wait for at most one turn of each request that computes;
//! those of other callers for less (`listener::core_turns`). Requests do not wait for each other: one whose response the
//! client does not read is not polled, and would keep its place.

use super::handle::{DatasetHandle, Kind, RequiredKind};
use super::planning::plan;
use super::rates::{charge_bytes, count_bytes, give_back_bytes};
use super::request::{FetchError, Items, RequestContext};
use super::{Fetcher, timeout_at};
use crate::config::Limits;
use crate::record;
use ringfetch_engine::batch::{Fetched, Lengths};
use ringfetch_engine::engine::{SubmitOptions, Ticket};
use ringfetch_engine::error::{ItemError, ReadError};
use ringfetch_score::{Metric, PIECE_ELEMENTS, Scored, Scorer, Sums};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long scores are computed before the core's other tasks get a turn.
const TURN: Duration = Duration::from_micros(50);

/// Bytes of a window, unless a single vector has more.
const WINDOW_BYTES: usize = 512 << 10;

/// Windows that are being read while one is scored.
const WINDOWS_AHEAD: usize = 4;

/// What to score.
#[derive(Debug, Clone)]
pub struct Scoring<'a> {
    /// At least one.
    pub queries: Vec<ScoreQuery<'a>>,
    /// `None`: no metric was named, or it is unknown.
    pub metric: Option<Metric>,
    /// Most results for each query.
    pub limit: u32,
    /// Only scores at least this good.
    pub threshold: Option<f64>,
}

impl Scoring<'_> {
    /// The candidates of all queries. A query without any is refused later; until then it takes as much memory as one.
    pub(crate) fn items(&self) -> usize {
        let ids = self.queries.iter().map(|query| query.ids.len().max(1));
        ids.fold(0, usize::saturating_add)
    }
}

/// A query and its candidates.
#[derive(Debug, Clone, Copy)]
pub struct ScoreQuery<'a> {
    /// As many elements as a vector has.
    pub vector: &'a [f32],
    /// The candidates.
    pub ids: &'a [u64],
}

/// The result of one query.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Ranking {
    /// The best, best first.
    pub(crate) best: Vec<Scored>,
    /// Candidates without a finite score.
    pub(crate) unscored: u32,
    /// Candidates that could not be read, by their position in the query's ids.
    pub(crate) errors: Vec<ItemError>,
}

/// A query's candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    id: u64,
    query: u32,
    /// Index in the query's ids.
    position: u32,
}

/// A checked request.
struct Work<'a> {
    scorer: Scorer,
    metric: Metric,
    threshold: Option<f64>,
    queries: &'a [ScoreQuery<'a>],
    /// The norm of each query.
    norms: Vec<f64>,
    /// Ascending.
    candidates: Vec<Candidate>,
    /// The distinct ids of the candidates, ascending.
    ids: Vec<u64>,
    vector_bytes: usize,
    rankings: Vec<Ranking>,
}

impl Fetcher {
    /// Scores the candidates of each query. Item errors, versions and deadlines are as for [`Fetcher::fetch`].
    ///
    /// # Errors
    /// Whatever fails the request as a whole.
    ///
    /// # Cancel safety
    /// As [`Fetcher::fetch`].
    pub(crate) async fn score(
        &self,
        dataset: &str,
        if_match: &str,
        scoring: &Scoring<'_>,
        context: &RequestContext,
    ) -> Result<(DatasetHandle, Vec<Ranking>), FetchError> {
        let opened = self.open(dataset, RequiredKind::Vectors, context.connection.as_ref())?;
        opened.check_version(if_match)?;
        let rankings = self.score_of(&opened, scoring, context).await?;
        Ok((opened, rankings))
    }

    /// As [`Self::score`], for a dataset of kind vectors that was looked up before.
    ///
    /// # Errors
    /// As [`Self::score`].
    ///
    /// # Cancel safety
    /// As [`Fetcher::fetch`].
    pub(crate) async fn score_of(
        &self,
        dataset: &DatasetHandle,
        scoring: &Scoring<'_>,
        context: &RequestContext,
    ) -> Result<Vec<Ranking>, FetchError> {
        record::note(|facts| facts.add_items(scoring.queries.iter().map(|query| query.ids.len()).sum()));
        let result = self.score_within(&self.limits(), dataset, scoring, context).await;
        self.count_rejection(result, context.connection.as_ref())
    }

    async fn score_within(
        &self,
        limits: &Limits,
        dataset: &DatasetHandle,
        scoring: &Scoring<'_>,
        context: &RequestContext,
    ) -> Result<Vec<Ranking>, FetchError> {
        let mut turn = Turn::new(None);
        let scorer = check(scoring, dataset, limits, &mut turn).await?;
        let (_in_flight, deadline) = self.admit(limits, context)?;
        turn.deadline = deadline;
        let mut work = Work::new(scoring, dataset, scorer, &mut turn).await?;
        if context.fail_fast {
            work.check_range(dataset)?;
        }
        let (bytes, length) = (work.read_bytes(dataset), work.vector_bytes as u64);
        let max = self.response_max(limits, context.connection.as_ref());
        if bytes > 0 && length > max.bytes {
            return Err(FetchError::VectorTooLong { length, max });
        }
        // Charges what is read, although the response is small.
        charge_bytes(context, bytes)?;
        let mut unread = windows(work.ids.len(), work.vector_bytes, self.window_bytes(context)).peekable();
        let mut reading: VecDeque<(Range<usize>, Ticket)> = VecDeque::with_capacity(WINDOWS_AHEAD);
        let mut scored = 0;
        loop {
            while reading.len() < WINDOWS_AHEAD
                && let Some(window) = unread.peek()
            {
                match self.read_window(limits, dataset, &work.ids[window.clone()], deadline, context) {
                    Ok(ticket) => {
                        reading.push_back((window.clone(), ticket));
                        unread.next();
                    }
                    // It fits once the windows before it are done.
                    Err(ReadError::Overloaded { .. }) if !reading.is_empty() => break,
                    Err(error) => {
                        if scored == 0 && reading.is_empty() {
                            give_back_bytes(context, bytes);
                        }
                        return Err(error.into());
                    }
                }
            }
            let Some((window, ticket)) = reading.pop_front() else {
                break;
            };
            let late = || FetchError::from(ReadError::DeadlineExceeded);
            let fetched = timeout_at(deadline, ticket).await.ok_or_else(late)??;
            if let (true, Some(failed)) = (context.fail_fast, fetched.errors.first()) {
                let id = work.ids.get(window.start.saturating_add(failed.item as usize));
                return Err(work.failed(id.copied().unwrap_or_default(), failed.error.clone()));
            }
            record::note(|facts| facts.add_read(&fetched));
            count_bytes(context, fetched.data.len());
            // Keeps the disk busy while this window is scored.
            if let Some(next) = unread.peek()
                && let Ok(ticket) =
                    self.read_window(limits, dataset, &work.ids[next.clone()], deadline, context)
            {
                reading.push_back((next.clone(), ticket));
                unread.next();
            }
            turn.begin();
            scored = work.score(window, scored, &fetched, &mut turn).await?;
        }
        turn.begin();
        work.finish(scoring.limit, &mut turn).await
    }

    /// Bytes of a window: small enough that several fit in a small memory budget, and in what the caller may hold.
    fn window_bytes(&self, context: &RequestContext) -> usize {
        let connection = context.connection.as_ref();
        let share = connection.map_or(u64::MAX, |connection| connection.account().memory().most());
        let room = (self.inner.engine.response_bytes_max() / 8).min(share / 4);
        WINDOW_BYTES.min(usize::try_from(room).unwrap_or(usize::MAX))
    }

    fn read_window(
        &self,
        limits: &Limits,
        DatasetHandle(dataset): &DatasetHandle,
        ids: &[u64],
        deadline: Option<Instant>,
        context: &RequestContext,
    ) -> Result<Ticket, ReadError> {
        let connection = context.connection.as_ref();
        let batch = plan(
            dataset,
            &Items::Vectors(ids),
            self.response_max(limits, connection),
        );
        let options = SubmitOptions {
            deadline,
            account: connection.map(|connection| Arc::clone(connection.account())),
        };
        self.inner.engine.submit(batch, options)
    }
}

/// Ranges of vectors that are read together.
fn windows(vectors: usize, vector_bytes: usize, window_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let step = (window_bytes / vector_bytes.max(1)).max(1);
    (0..vectors)
        .step_by(step)
        .map(move |first| first..first.saturating_add(step).min(vectors))
}

/// Checks what needs no access to files.
async fn check(
    scoring: &Scoring<'_>,
    dataset: &DatasetHandle,
    limits: &Limits,
    turn: &mut Turn,
) -> Result<Scorer, FetchError> {
    let malformed = |field: String, problem: String| Err(FetchError::Malformed { field, problem });
    let queries = &scoring.queries;
    if queries.is_empty() {
        return Err(FetchError::EmptyBatch { field: "queries" });
    }
    let items = scoring.items();
    if !u32::try_from(items).is_ok_and(|items| items <= limits.items_per_request) {
        return Err(FetchError::TooManyItems {
            field: "queries.ids",
            items,
            max: limits.items_per_request,
        });
    }
    let Kind::Vectors { dim, dtype, .. } = dataset.kind() else {
        return Err(ReadError::ShardFailed.into());
    };
    let Some(metric) = scoring.metric else {
        let known = "name one of dot, cosine, euclidean and manhattan";
        return malformed("metric".to_owned(), known.to_owned());
    };
    let Some(scorer) = Scorer::new(metric, dtype) else {
        return malformed(
            "metric".to_owned(),
            format!(
                "{} does not fit the elements of {:?}, which are {dtype}: those of f32, f16, bf16, f64, u8 and i8 can be scored",
                metric.as_str(),
                dataset.name()
            ),
        );
    };
    for (number, query) in queries.iter().enumerate() {
        if query.vector.len() != dim as usize {
            return malformed(
                format!("queries[{number}].vector"),
                format!(
                    "it has {} elements; vectors of {:?} have {dim}",
                    query.vector.len(),
                    dataset.name()
                ),
            );
        }
        if let Some(place) = query.vector.iter().position(|value| !value.is_finite()) {
            let value = query.vector.get(place).copied().unwrap_or_default();
            return malformed(
                format!("queries[{number}].vector"),
                format!("element {place} is {value}: elements must be finite"),
            );
        }
        if query.ids.is_empty() {
            let problem = "it is empty: name at least one candidate".to_owned();
            return malformed(format!("queries[{number}].ids"), problem);
        }
        turn.worked(query.vector.len()).await?;
    }
    let most = queries.iter().map(|query| query.ids.len()).max().unwrap_or(0);
    if scoring.limit == 0 || scoring.limit as usize > most {
        return malformed(
            "limit".to_owned(),
            format!(
                "it is {}; it must be from 1 to {most}, the largest number of candidates in a query",
                scoring.limit
            ),
        );
    }
    if scoring.threshold.is_some_and(f64::is_nan) {
        return malformed(
            "threshold".to_owned(),
            "it is NaN: give a number, or none".to_owned(),
        );
    }
    Ok(scorer)
}

impl<'a> Work<'a> {
    async fn new(
        scoring: &'a Scoring<'a>,
        dataset: &DatasetHandle,
        scorer: Scorer,
        turn: &mut Turn,
    ) -> Result<Self, FetchError> {
        let queries = &scoring.queries;
        let mut candidates: Vec<Candidate> = (0_u32..)
            .zip(queries)
            .flat_map(|(query, of)| {
                (0_u32..).zip(of.ids).map(move |(position, id)| Candidate {
                    id: *id,
                    query,
                    position,
                })
            })
            .collect();
        candidates.sort_unstable();
        turn.worked(sorting(candidates.len())).await?;
        let mut ids: Vec<u64> = candidates.iter().map(|candidate| candidate.id).collect();
        ids.dedup();
        let vector_bytes = match dataset.kind() {
            Kind::Vectors { vector_bytes, .. } => vector_bytes as usize,
            Kind::Blocks { .. } | Kind::Objects => 0,
        };
        let mut norms = Vec::with_capacity(queries.len());
        for query in queries {
            norms.push(scorer.query_norm(query.vector));
            turn.worked(query.vector.len()).await?;
        }
        Ok(Self {
            scorer,
            metric: scorer.metric(),
            threshold: scoring.threshold,
            queries,
            norms,
            candidates,
            ids,
            vector_bytes,
            rankings: queries.iter().map(|_| Ranking::default()).collect(),
        })
    }

    /// Bytes of the distinct candidates that the dataset has.
    fn read_bytes(&self, dataset: &DatasetHandle) -> u64 {
        let Kind::Vectors { count, .. } = dataset.kind() else {
            return 0;
        };
        let there = self.ids.partition_point(|id| *id < count);
        u64::try_from(there.saturating_mul(self.vector_bytes)).unwrap_or(u64::MAX)
    }

    /// The error for an id past the end, before anything is read.
    fn check_range(&self, dataset: &DatasetHandle) -> Result<(), FetchError> {
        let Kind::Vectors { count, .. } = dataset.kind() else {
            return Ok(());
        };
        // They are in order.
        let within = self.ids.partition_point(|id| *id < count);
        match self.ids.get(within).copied() {
            Some(index) => {
                let what = "vector";
                Err(self.failed(index, ReadError::IndexOutOfRange { what, index, count }))
            }
            None => Ok(()),
        }
    }

    /// The error of a request that ends with this vector.
    fn failed(&self, id: u64, error: ReadError) -> FetchError {
        record::note(|facts| facts.add_failed(1));
        if self.candidates.len() == 1 {
            return error.into();
        }
        FetchError::Item {
            what: "vector",
            number: id,
            error: Box::new(error),
        }
    }

    /// Scores the vectors of a window. `scored` counts the candidates that are done; returns the new count.
    async fn score(
        &mut self,
        window: Range<usize>,
        mut scored: usize,
        fetched: &Fetched,
        turn: &mut Turn,
    ) -> Result<usize, FetchError> {
        let mut failed = fetched.errors.iter().peekable();
        let mut data = &fetched.data[..];
        for (item, place) in (0_u32..).zip(window) {
            let Some(&id) = self.ids.get(place) else { break };
            let error = failed.next_if(|failed| failed.item == item);
            let length = match (&fetched.lengths, error) {
                (_, Some(_)) => 0,
                (Lengths::Uniform { item_bytes, .. }, None) => *item_bytes as usize,
                (Lengths::Each(lengths), None) => {
                    lengths.get(item as usize).map_or(0, |length| *length as usize)
                }
            };
            let (elements, rest) = data.split_at_checked(length).unwrap_or((&[], &[]));
            data = rest;
            let mut before = None;
            while let Some(&candidate) = self.candidates.get(scored)
                && candidate.id == id
            {
                scored += 1;
                // An id that a query lists more than once has one score, and an error at each position.
                let repeated = before.replace(candidate.query) == Some(candidate.query);
                match error {
                    Some(failed) => self.fail(candidate, &failed.error),
                    None if repeated => {}
                    None => self.score_one(candidate, elements, turn).await?,
                }
            }
        }
        Ok(scored)
    }

    fn fail(&mut self, candidate: Candidate, error: &ReadError) {
        record::note(|facts| facts.add_failed(1));
        if let Some(ranking) = self.rankings.get_mut(candidate.query as usize) {
            ranking.errors.push(ItemError {
                item: candidate.position,
                error: error.clone(),
            });
        }
    }

    async fn score_one(
        &mut self,
        candidate: Candidate,
        elements: &[u8],
        turn: &mut Turn,
    ) -> Result<(), FetchError> {
        let query = candidate.query as usize;
        let (Some(of), Some(norm), Some(ranking)) = (
            self.queries.get(query),
            self.norms.get(query),
            self.rankings.get_mut(query),
        ) else {
            return Ok(());
        };
        let element_bytes = elements.len() / of.vector.len().max(1);
        let pieces = elements.chunks((PIECE_ELEMENTS * element_bytes).max(1));
        let mut sums = Sums::default();
        for (query, elements) in of.vector.chunks(PIECE_ELEMENTS).zip(pieces) {
            self.scorer.add(&mut sums, query, elements);
            turn.worked(query.len()).await?;
        }
        let score = self.scorer.finish(&sums, *norm);
        if !score.is_finite() {
            ranking.unscored = ranking.unscored.saturating_add(1);
        } else if self
            .threshold
            .is_none_or(|threshold| self.metric.reaches(score, threshold))
        {
            ranking.best.push(Scored {
                id: candidate.id,
                score,
            });
        }
        Ok(())
    }

    async fn finish(mut self, limit: u32, turn: &mut Turn) -> Result<Vec<Ranking>, FetchError> {
        for ranking in &mut self.rankings {
            let elements = sorting(ranking.best.len());
            self.metric.rank(&mut ranking.best, limit as usize);
            ranking.errors.sort_unstable_by_key(|error| error.item);
            turn.worked(elements).await?;
        }
        Ok(self.rankings)
    }
}

/// Sorting costs about as much per candidate as scoring some tens of elements.
fn sorting(candidates: usize) -> usize {
    candidates.saturating_mul(32)
}

/// The time that a request computes without yielding.
struct Turn {
    began: Instant,
    /// Elements processed since the clock was last read.
    elements: usize,
    deadline: Option<Instant>,
}

impl Turn {
    fn new(deadline: Option<Instant>) -> Self {
        Self {
            began: Instant::now(),
            elements: 0,
            deadline,
        }
    }

    /// Call after a wait.
    fn begin(&mut self) {
        self.began = Instant::now();
    }

    /// Yields if it has computed for long enough.
    async fn worked(&mut self, elements: usize) -> Result<(), FetchError> {
        // Reading the clock after each short vector would cost as much as its score.
        self.elements = self.elements.saturating_add(elements);
        if self.elements < PIECE_ELEMENTS {
            return Ok(());
        }
        self.elements = 0;
        if self.began.elapsed() < TURN {
            return Ok(());
        }
        // As `ringfetch_engine::cores::give_way`.
        ringfetch_engine::cores::submit_left();
        tokio::task::yield_now().await;
        self.begin();
        match self.deadline {
            Some(deadline) if deadline <= self.began => Err(ReadError::DeadlineExceeded.into()),
            Some(_) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
