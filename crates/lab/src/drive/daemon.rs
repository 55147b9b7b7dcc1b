//! Reads through a daemon, by the client: as many calls in flight as the depth, from a few threads with their
//! own connections.

use crate::job::Job;
use crate::served::Served;
use ringfetch_client::Client;
use ringfetch_pace::Gate;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

const THREADS_MAX: usize = 4;
/// A call that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How many connections requests share, if as many are in flight: the daemon may be on this machine, too.
pub(crate) fn connections() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    (cpus / 2).clamp(1, THREADS_MAX)
}

/// Keeps `depth` requests in flight.
pub(crate) fn drive(job: &Arc<Job>) -> Result<(), String> {
    let served = job.material.served.clone().ok_or("no daemon was named")?;
    let depth = job.setup.depth.max(1);
    let threads = connections().min(depth);
    // All are connected before the clock starts.
    let connected = (0..threads).map(|_| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let client = runtime.block_on(served.connect(TIMEOUT));
        client
            .map(|client| (runtime, client))
            .map_err(|error| error.to_string())
    });
    let connected: Vec<(Runtime, Client)> = connected.collect::<Result<_, String>>()?;
    job.begin_daemon();
    std::thread::scope(|scope| {
        for (thread, (runtime, client)) in connected.into_iter().enumerate() {
            let (served, share) = (&served, depth / threads + usize::from(thread < depth % threads));
            let drive = move || runtime.block_on(slots(job, served, &client, share, (thread, threads)));
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
    slots: usize,
    (thread, threads): (usize, usize),
) {
    let gate = job.gate(thread, threads);
    let mut all = JoinSet::new();
    for _ in 0..slots {
        let (job, served, client, gate) = (Arc::clone(job), Arc::clone(served), client.clone(), gate.clone());
        all.spawn(async move {
            if let Err(problem) = slot(&job, &served, &client, gate.as_deref()).await {
                job.fail(problem);
            }
        });
    }
    // Panics if one of them did.
    all.join_all().await;
}

async fn slot(job: &Arc<Job>, served: &Served, client: &Client, gate: Option<&Gate>) -> Result<(), String> {
    let (mut lane, mut reads) = (job.lane(), Vec::new());
    let most = job.reads.group;
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
            for read in &reads {
                lane.counted(read.offset, read.length, started);
            }
            lane.ranking(query, ranking.best.iter().map(|(_, score)| *score).collect());
            continue;
        }
        let answer = client.fetch(served.request(&reads)).await.map_err(failed)?;
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
