//! Windows, yielding and results that are left out, over a simulated disk that answers when a test says so.

use super::*;
use crate::access::tests::User;
use crate::access::{Grant, Principal, PrincipalLimits};
use futures_util::FutureExt as _;
use ringfetch_engine::config::{DirectIo, EngineConfig, PlanConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, Dtype, KindSpec};
use ringfetch_engine::engine::Engine;
use ringfetch_engine::error::Resource;
use ringfetch_engine::sim::{Fault, FaultPlan, SimControl};
use rustix::io::Errno;
use std::future::Future as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

const SOON: Duration = Duration::from_secs(60);

struct Rig {
    fetcher: Fetcher,
    control: SimControl,
    _directory: tempfile::TempDir,
}

/// A fetcher over f32 vectors that reads each vector separately.
fn rig(vectors: &[Vec<f32>]) -> Rig {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vectors");
    let bytes: Vec<u8> = vectors
        .iter()
        .flatten()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    std::fs::write(&path, bytes).unwrap();
    let kind = KindSpec::raw_vectors(vectors[0].len().try_into().unwrap(), Dtype::F32, 0);
    let spec = DatasetSpec::new("v", path, kind, DirectIo::Off);
    let config = EngineConfig {
        pin: false,
        plan: PlanConfig {
            merge_gap_bytes: 0,
            max_read_bytes: 1 << 20,
        },
        ..EngineConfig::default()
    };
    let control = SimControl::from_environment();
    let engine = Engine::start_sim(&config, &control).unwrap();
    let limits = Limits {
        deadline: None,
        ..Limits::default()
    };
    Rig {
        fetcher: Fetcher::new(engine, vec![Arc::new(Dataset::open(&spec).unwrap())], limits),
        control,
        _directory: directory,
    }
}

/// A request with the inner product and no threshold.
fn scoring<'a>(queries: &[(&'a [f32], &'a [u64])], limit: u32) -> Scoring<'a> {
    Scoring {
        queries: queries
            .iter()
            .map(|&(vector, ids)| ScoreQuery { vector, ids })
            .collect(),
        metric: Some(Metric::Dot),
        limit,
        threshold: None,
    }
}

impl Rig {
    async fn score(&self, scoring: &Scoring<'_>) -> Result<Vec<Ranking>, FetchError> {
        let context = RequestContext::default();
        let (_, rankings) = self.fetcher.score("v", "", scoring, &context).await?;
        Ok(rankings)
    }
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

fn best(ranking: &Ranking) -> Vec<(u64, f64)> {
    ranking
        .best
        .iter()
        .map(|scored| (scored.id, scored.score))
        .collect()
}

#[tokio::test]
async fn a_deadline_ends_a_request_that_computes() {
    // A request computes past its deadline: it ends the next time it yields.
    let deadline = Instant::now() + Duration::from_millis(1);
    let mut turn = Turn::new(Some(deadline));
    while Instant::now() <= deadline + TURN {
        std::hint::spin_loop();
    }
    let late = turn.worked(PIECE_ELEMENTS).await;
    assert_eq!(late, Err(ReadError::DeadlineExceeded.into()));
}

#[tokio::test]
async fn windows_are_read_ahead_and_no_further() {
    // Vectors of 64 KiB, 8 per window, every second one, while the disk holds everything back: four windows
    // are requested. When the first has arrived, a fifth is; in the end every vector has been scored.
    let vectors: Vec<Vec<f32>> = (0..160_u16).map(|id| vec![f32::from(id); 1 << 14]).collect();
    let rig = rig(&vectors);
    let ids: Vec<u64> = (0..160).step_by(2).collect();
    let mut query = vec![0.0; 1 << 14];
    query[77] = 2.0;
    let scoring = scoring(&[(&query, &ids)], 80);
    rig.control.hold();
    let mut asked = Box::pin(rig.score(&scoring));
    while rig.control.started_total() < 32 {
        assert!(asked.as_mut().now_or_never().is_none());
        tokio::task::yield_now().await;
    }
    assert!(rig.control.wait_in_flight(32, SOON));
    assert!(asked.as_mut().now_or_never().is_none());
    assert_eq!(rig.control.started_total(), 32);
    rig.control.release(8);
    while rig.control.started_total() < 40 {
        assert!(asked.as_mut().now_or_never().is_none());
        tokio::task::yield_now().await;
    }
    assert_eq!(rig.control.max_in_flight(), 32);
    rig.control.release_all();
    let rankings = asked.await.unwrap();
    let expected: Vec<(u64, f64)> = (0..160_u16)
        .rev()
        .filter(|id| id % 2 == 0)
        .map(|id| (id.into(), f64::from(id) * 2.0))
        .collect();
    assert_eq!(best(&rankings[0]), expected);
    assert_eq!(rig.control.started_total(), 80);
}

#[tokio::test]
async fn a_candidate_of_several_queries_is_read_once() {
    // Three queries with the same candidates in different orders, twice each: the disk is read once for each
    // candidate.
    let vectors: Vec<Vec<f32>> = (0..40_u16).map(|id| vec![f32::from(id); 1100]).collect();
    let rig = rig(&vectors);
    let mut ids: Vec<u64> = (0..40).step_by(2).collect();
    ids.extend(ids.clone());
    let reversed: Vec<u64> = ids.iter().rev().copied().collect();
    let query = vec![1.0; 1100];
    let queries = [(&query[..], &ids[..]), (&query, &reversed), (&query, &ids[5..])];
    let rankings = rig.score(&scoring(&queries, 40)).await.unwrap();
    assert_eq!(rig.control.started_total(), 20);
    assert_eq!(best(&rankings[0]).len(), 20);
    assert_eq!(rankings[0], rankings[1]);
    assert_eq!(rankings[0], rankings[2]);
}

#[test]
fn others_have_their_turn_while_much_is_computed() {
    // 200 queries for 8 vectors that have been read. Expectation: the request yields again and again, and
    // another caller's read is answered between two of its turns.
    let vectors: Vec<Vec<f32>> = (0..9_u16).map(|id| vec![f32::from(id); 1 << 14]).collect();
    let rig = rig(&vectors);
    let (query, ids) = (vec![1.0; 1 << 14], (0..8).collect::<Vec<u64>>());
    let scoring = scoring(&[(&query[..], &ids[..]); 200], 8);
    let mut asked = Box::pin(rig.score(&scoring));
    // Woken once, when everything that it reads has arrived; from then on only its own yielding makes it
    // wait.
    rig.control.hold();
    let read = loop {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        assert!(asked.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        if !woken.0.load(Ordering::Acquire) {
            break woken;
        }
    };
    rig.control.release_all();
    while !read.0.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    let (mut turns, mut other_done) = (0_u32, false);
    let context = RequestContext::default();
    let rankings = loop {
        if let Some(rankings) = asked.as_mut().now_or_never() {
            break rankings.unwrap();
        }
        turns += 1;
        if !other_done {
            let items = Items::Vectors(&[8]);
            let mut other = Box::pin(rig.fetcher.fetch("v", "", &items, &context));
            while other.as_mut().now_or_never().is_none() {
                std::thread::yield_now();
            }
            other_done = true;
        }
    };
    assert!(other_done && turns > 20, "{turns} turns");
    assert_eq!(rankings.len(), 200);
}

#[test]
fn others_have_their_turn_while_queries_are_checked() {
    // 200 queries of 16,384 elements for a vector that is not read yet. Expectation: the request yields before it asks for
    // the vector, while it checks their elements, and while it computes their norms.
    let rig = rig(&[vec![1.0; 1 << 14]]);
    let query = vec![1.0; 1 << 14];
    let mut scoring = scoring(&[(&query[..], &[0][..]); 200], 1);
    scoring.metric = Some(Metric::Cosine);
    rig.control.hold();
    let yielded = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&yielded));
    let mut asked = Box::pin(rig.score(&scoring));
    assert!(asked.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    assert!(yielded.0.load(Ordering::Acquire), "it waits for the disk");
    drop(asked);
    let dataset = rig.fetcher.open("v", RequiredKind::Vectors, None).unwrap();
    let scorer = Scorer::new(Metric::Cosine, Dtype::F32).unwrap();
    let mut turn = Turn::new(None);
    assert!(
        Work::new(&scoring, &dataset, scorer, &mut turn)
            .now_or_never()
            .is_none()
    );
}

#[tokio::test]
async fn scores_need_memory_for_one_window_and_cost_nothing_without() {
    // Scenario: a principal with 64 KiB of memory and 64 KiB a second, whose memory is used up, asks a hundred times for scores
    // of 64 vectors of 1 KiB; then 24 KiB are free, for one window of 16 KiB but not two. Expectation: it is refused because
    // of its memory each time; then it gets its scores, and 64 KiB are counted for it.
    let vectors: Vec<Vec<f32>> = (0..64_u16).map(|id| vec![f32::from(id); 256]).collect();
    let rig = rig(&vectors);
    let principal = Principal::new("a");
    principal.set_limits(PrincipalLimits {
        memory_bytes: 64 << 10,
        bytes_per_s: 64 << 10,
        ..PrincipalLimits::NONE
    });
    let connection = rig
        .fetcher
        .callers()
        .connect("192.0.2.1".parse().unwrap(), u64::MAX);
    let grant = Grant::for_tests(&principal, 1);
    let connection = connection.granted(&grant, &Arc::new(User::default())).unwrap();
    let context = RequestContext {
        connection: Some(Arc::clone(&connection)),
        ..RequestContext::default()
    };
    let (query, ids) = (vec![1.0; 256], (0..64).collect::<Vec<u64>>());
    let scoring = scoring(&[(&query, &ids)], 64);
    let mut held = connection.account().memory().charge(64 << 10).unwrap();
    for _ in 0..100 {
        let refused = rig.fetcher.score("v", "", &scoring, &context).await;
        let resource = Resource::PrincipalMemory;
        assert_eq!(refused.map(drop), Err(ReadError::Overloaded { resource }.into()));
    }
    held.resize(40 << 10).unwrap();
    let (_, rankings) = rig.fetcher.score("v", "", &scoring, &context).await.unwrap();
    assert_eq!((rankings[0].best.len(), principal.bytes()), (64, 64 << 10));
}

#[tokio::test]
async fn the_item_that_ends_a_request_is_named() {
    // Scenario: with `fail_fast`, vectors of which one is past the end, while the disk holds everything back; then vectors,
    // one of them alone, and scores, whose second or only read fails. Expectation: the first without a read; each error
    // names its item if there are several.
    let rig = rig(&(0..8_u16).map(|id| vec![f32::from(id); 1100]).collect::<Vec<_>>());
    let context = RequestContext {
        fail_fast: true,
        ..RequestContext::default()
    };
    let fetch = async |ids: &[u64]| {
        let fetched = rig.fetcher.fetch("v", "", &Items::Vectors(ids), &context).await;
        fetched.unwrap_err().to_string()
    };
    rig.control.hold();
    assert_eq!(
        fetch(&[4, 8, 9]).await,
        "item 1: vector 8 is out of range: the dataset has 8 (vector 0 to 7)"
    );
    assert_eq!(rig.control.started_total(), 0);
    rig.control.release_all();
    let failing = || {
        rig.control.set_faults(FaultPlan::script(&[
            Fault::None,
            Fault::Errno(Errno::IO.raw_os_error()),
        ]));
    };
    failing();
    let failed = "reading bytes 17600..22000 failed: Input/output error (os error 5)";
    assert_eq!(fetch(&[2, 4]).await, format!("item 1: {failed}"));
    rig.control
        .set_faults(FaultPlan::script(&[Fault::Errno(Errno::IO.raw_os_error())]));
    assert_eq!(fetch(&[4]).await, failed);
    failing();
    let query = vec![1.0; 1100];
    let several = scoring(&[(&query[..], &[4, 2][..])], 1);
    let scored = rig.fetcher.score("v", "", &several, &context).await;
    assert_eq!(scored.unwrap_err().to_string(), format!("vector 4: {failed}"));
    rig.control
        .set_faults(FaultPlan::script(&[Fault::Errno(Errno::IO.raw_os_error())]));
    for (ids, named) in [
        (&[4][..], failed),
        (
            &[9, 4, 8],
            "vector 8: vector 8 is out of range: the dataset has 8 (vector 0 to 7)",
        ),
        // Several items, although of one vector.
        (
            &[9, 9],
            "vector 9: vector 9 is out of range: the dataset has 8 (vector 0 to 7)",
        ),
    ] {
        let scoring = scoring(&[(&query[..], ids)], 1);
        let scored = rig.fetcher.score("v", "", &scoring, &context).await;
        assert_eq!(scored.unwrap_err().to_string(), named);
    }
}

#[tokio::test]
async fn a_vector_too_long_to_be_scored_is_told_which_limit_to_raise() {
    // There is no other way to score it: neither fewer candidates nor ranges help.
    let rig = rig(&[vec![1.0; 1100]]);
    let limits = Limits {
        response_bytes: 4096,
        ..Limits::default()
    };
    let opened = rig.fetcher.open("v", RequiredKind::Vectors, None).unwrap();
    let (query, context) = (vec![1.0; 1100], RequestContext::default());
    let one = scoring(&[(&query, &[0])], 1);
    let refused = rig.fetcher.score_within(&limits, &opened, &one, &context).await;
    let wanted = "a vector has 4400 bytes, and one can be scored that has at most 4096 bytes (limits.response_bytes): raise that limit";
    assert_eq!(refused.unwrap_err().to_string(), wanted);
}

#[tokio::test]
async fn too_many_queries_are_counted_whether_they_have_candidates_or_not() {
    // One query without candidates more than a request may have items: the error tells how many there are.
    let rig = rig(&[vec![1.0]]);
    let max = Limits::default().items_per_request;
    let queries = vec![(&[1.0][..], &[][..]); max as usize + 1];
    let items = queries.len();
    let refused = rig.score(&scoring(&queries, 1)).await;
    let field = "queries.ids";
    assert_eq!(refused, Err(FetchError::TooManyItems { field, items, max }));
}

#[tokio::test]
async fn what_has_no_score_is_left_out_and_counted() {
    // Vectors with NaN and infinities, zero vectors, and equal ones; an id past the end, twice. Expectation:
    // the rules of docs/API.md for each metric, with a limit and a threshold.
    let rig = rig(&[
        vec![3.0, 4.0],
        vec![f32::NAN, 0.0],
        vec![0.0, 0.0],
        vec![3.0, 4.0],
        vec![f32::INFINITY, 1.0],
        vec![-3.0, -4.0],
    ]);
    let ids = [5, 4, 3, 9, 2, 1, 0, 9];
    let query = [3.0, 4.0];
    let mut scoring = scoring(&[(&query, &ids)], 8);
    let dot = rig.score(&scoring).await.unwrap().remove(0);
    assert_eq!(best(&dot), [(0, 25.0), (3, 25.0), (2, 0.0), (5, -25.0)]);
    assert_eq!(dot.unscored, 2);
    let failed: Vec<u32> = dot.errors.iter().map(|error| error.item).collect();
    assert_eq!(failed, [3, 7]);
    scoring.metric = Some(Metric::Cosine);
    scoring.threshold = Some(0.0);
    let cosine = rig.score(&scoring).await.unwrap().remove(0);
    assert_eq!(best(&cosine), [(0, 1.0), (3, 1.0), (2, 0.0)]);
    scoring.metric = Some(Metric::Euclidean);
    (scoring.threshold, scoring.limit) = (Some(5.0), 2);
    let near = rig.score(&scoring).await.unwrap().remove(0);
    assert_eq!(best(&near), [(0, 0.0), (3, 0.0)]);
    scoring.metric = Some(Metric::Manhattan);
    (scoring.threshold, scoring.limit) = (Some(7.0), 8);
    let near = rig.score(&scoring).await.unwrap().remove(0);
    assert_eq!(best(&near), [(0, 0.0), (3, 0.0), (2, 7.0)]);
}
