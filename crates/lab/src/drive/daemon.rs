//! Reads through a daemon, by the client: as many calls in flight as the depth, from a few threads with their
//! own connections.

use crate::job::{Job, Lane};
use crate::served::Served;
use ringfetch_client::Client;
use ringfetch_pace::Gate;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

const THREADS_MAX: usize = 4;
/// A call that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How many threads make requests, if there are as many connections: the daemon may be on this machine, too.
pub(crate) fn threads() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    (cpus / 2).clamp(1, THREADS_MAX)
}

/// A thread that is connected, and has what it counts with.
struct Ready {
    runtime: Runtime,
    client: Client,
    /// Most calls in flight.
    calls: usize,
    lane: Arc<Mutex<Lane>>,
}

impl Ready {
    fn new(job: &Arc<Job>, served: &Served, connections: usize, calls: usize) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let client = runtime.block_on(served.connect(TIMEOUT, connections, calls));
        Ok(Self {
            client: client.map_err(|error| error.to_string())?,
            runtime,
            calls,
            lane: Arc::new(Mutex::new(job.lane())),
        })
    }
}

/// Keeps `depth` requests in flight.
pub(crate) fn drive(job: &Arc<Job>) -> Result<(), String> {
    let served = job.material.served.clone().ok_or("no daemon was named")?;
    let depth = job.setup.depth.max(1);
    let connections = served.connections.min(depth);
    let threads = threads().min(connections);
    let share = |all: usize, thread: usize| all / threads + usize::from(thread < all % threads);
    let ready =
        (0..threads).map(|thread| Ready::new(job, &served, share(connections, thread), share(depth, thread)));
    let ready: Vec<Ready> = ready.collect::<Result<_, String>>()?;
    job.begin_daemon();
    std::thread::scope(|scope| {
        for (thread, ready) in ready.into_iter().enumerate() {
            let served = &served;
            let drive = move || {
                let Ready {
                    runtime,
                    client,
                    calls,
                    lane,
                } = ready;
                runtime.block_on(slots(job, served, &client, (calls, lane), (thread, threads)));
            };
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, drive) {
                job.fail(format!("cannot start {threads} threads: {error}"));
            }
        }
    });
    Ok(())
}

async fn slots(
    job: &Arc<Job>,
    served: &Arc<Served>,
    client: &Client,
    (calls, lane): (usize, Arc<Mutex<Lane>>),
    (thread, threads): (usize, usize),
) {
    let gate = job.gate(thread, threads);
    let mut all = JoinSet::new();
    for _ in 0..calls {
        let (job, served, client) = (Arc::clone(job), Arc::clone(served), client.clone());
        let (gate, lane) = (gate.clone(), Arc::clone(&lane));
        all.spawn(async move {
            if let Err(problem) = slot(&job, &served, &client, &lane, gate.as_deref()).await {
                job.fail(problem);
            }
        });
    }
    // Panics if one of them did.
    all.join_all().await;
}

async fn slot(
    job: &Arc<Job>,
    served: &Served,
    client: &Client,
    lane: &Mutex<Lane>,
    gate: Option<&Gate>,
) -> Result<(), String> {
    let mut reads = Vec::new();
    let most = job.reads.group;
    // No code panics under this lock.
    let lane = || lane.lock().unwrap_or_else(PoisonError::into_inner);
    while let Some(started) = job.turn(gate).await {
        if !job.group(most, &mut reads) {
            break;
        }
        let failed = |error: ringfetch_client::Error| format!("--server: {error}");
        let query = reads.first().and_then(|read| read.query);
        if let (Some(query), Some(questions)) = (query, &job.material.questions) {
            let request = served.scores(questions.query(query), &reads, questions.limit());
            let scores = client.score_vectors(request).await.map_err(failed)?;
            let ranking = scores.results.first().ok_or("no scores")?;
            if let Some(error) = ranking.errors.first() {
                return Err(error.to_string());
            }
            let mut lane = lane();
            for read in &reads {
                lane.counted(read.offset, read.length, started);
            }
            lane.ranking(query, ranking.best.iter().map(|(_, score)| *score).collect());
            continue;
        }
        let answer = client.fetch(served.request(&reads)).await.map_err(failed)?;
        let mut lane = lane();
        for (read, item) in reads.iter().zip(answer.items().iter()) {
            let data = item.map_err(|error| format!("--server: {error}"))?;
            if read.length == 0 {
                lane.counted(0, data.len(), started);
            } else {
                lane.done(read, started, &data);
            }
        }
    }
    Ok(())
}
