//! `adversary`: one command per case, and `victim`; each prints its counts as one JSON object.
#![forbid(unsafe_code)]

use adversary::cases::{
    big_answers, floods, friendly, half_open, herd, paced, partial_bodies, pinned_buffers, stalled,
};
use adversary::{Hold, Process, Protocol, Tally, Target, Victim};
use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use serde_json::json;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Attacks a running daemon on loopback, or reads from it as a friendly client, for a time; prints counts as JSON.
#[derive(Parser)]
#[command(name = "adversary", version)]
struct Arguments {
    #[command(flatten)]
    daemon: DaemonArguments,
    #[command(subcommand)]
    case: Case,
}

#[derive(Args)]
struct DaemonArguments {
    /// The daemon's gRPC address.
    #[arg(long, global = true, default_value = "127.0.0.1:7410")]
    grpc: SocketAddr,
    /// The daemon's HTTP address.
    #[arg(long, global = true, default_value = "127.0.0.1:7411")]
    http: SocketAddr,
    /// The daemon's admin address.
    #[arg(long, global = true, default_value = "127.0.0.1:7412")]
    admin: SocketAddr,
    /// Source address of connections: 127.0.0.2 is a different caller from 127.0.0.1.
    #[arg(long, global = true)]
    from: Option<IpAddr>,
    /// A dataset of blocks.
    #[arg(long, global = true, default_value = "blocks")]
    dataset: String,
    /// How many blocks it has. As the length, of the demo by default.
    #[arg(long, global = true, default_value_t = 32_768, value_parser = clap::value_parser!(u64).range(1..))]
    blocks: u64,
    /// How long each is.
    #[arg(long, global = true, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    block_bytes: u32,
    /// Seed of the pattern (`ringfetch dataset make`) that its blocks have. Without it only the lengths of answers are checked.
    #[arg(long, global = true)]
    seed: Option<u64>,
    /// Bearer token of gRPC calls.
    #[arg(long, global = true)]
    token: Option<String>,
    /// How long.
    #[arg(long, global = true, default_value_t = 10.0)]
    seconds: f64,
}

#[derive(Subcommand)]
enum Case {
    /// Requests that are announced, sent in part and never ended.
    PartialBodies(partial_bodies::Options),
    /// Few bytes of which the daemon may keep whole buffers, between frames that are read.
    PinnedBuffers(pinned_buffers::Options),
    /// Readers that ask for large answers and do not take them.
    StalledReaders(stalled::Options),
    /// Connections that never make a whole request, and idle ones.
    HalfOpen(half_open::Options),
    /// Callers that fetch large answers without pause, and read them. With many calls and scattered blocks: overload.
    BigAnswers(big_answers::Options),
    /// Many callers that ask for one block at the same moment.
    Herd(herd::Options),
    /// Frames that cost the sender little and the daemon much.
    Flood(floods::Options),
    /// The control run: as many connections, from clients that behave.
    WellBehaved(friendly::Options),
    /// A reader of single blocks at a steady rate, measured; on its connection another principal that reads all it can.
    Paced(paced::Options),
    /// The friendly client: a reader, newcomers and /livez, measured.
    Victim {
        /// What the reader speaks.
        #[arg(long, value_enum, default_value = "grpc")]
        protocol: Protocol,
        /// The daemon's process, to sample its memory and CPU time.
        #[arg(long)]
        pid: Option<u32>,
    },
}

async fn run(arguments: Arguments) -> anyhow::Result<serde_json::Value> {
    let DaemonArguments {
        grpc,
        http,
        admin,
        from,
        dataset,
        blocks,
        block_bytes,
        seed,
        token,
        seconds,
    } = arguments.daemon;
    let target = Target {
        from,
        seed,
        token,
        ..Target::new(grpc, http, admin, &dataset, blocks, block_bytes)?
    };
    let time = Duration::try_from_secs_f64(seconds).context("--seconds")?;
    let (hold, _release) = Hold::at_most(time);
    let tally = Tally::default();
    match arguments.case {
        Case::PartialBodies(options) => partial_bodies::run(&target, &options, &hold, &tally).await?,
        Case::PinnedBuffers(options) => pinned_buffers::run(&target, &options, &hold, &tally).await?,
        Case::StalledReaders(options) => stalled::run(&target, &options, &hold, &tally).await?,
        Case::HalfOpen(options) => half_open::run(&target, &options, &hold, &tally).await?,
        Case::BigAnswers(options) => big_answers::run(&target, &options, &hold, &tally).await?,
        Case::Herd(options) => herd::run(&target, &options, &hold, &tally).await?,
        Case::Flood(options) => floods::run(&target, &options, &hold, &tally).await?,
        Case::WellBehaved(options) => friendly::run(&target, &options, &hold, &tally).await?,
        Case::Paced(options) => {
            let rate = options.rate;
            anyhow::ensure!(rate > 0.0 && rate <= 1e6, "--rate: from 0 to 1000000");
            let reader = paced::run(&target, &options, &hold, &tally).await?;
            return Ok(json!({ "reader": reader, "beside": tally.counts() }));
        }
        Case::Victim { protocol, pid } => {
            let process = pid.map(Process::new).transpose().context("--pid")?;
            let victim = Victim {
                target,
                protocol,
                process,
            };
            return Ok(json!(victim.run(&hold).await?));
        }
    }
    Ok(json!(tally.counts()))
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    // 10,000 connections need as many descriptors.
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit {
        current: limits.maximum,
        ..limits
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).context("limit of open files")?;
    // One thread per usable CPU.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let counts = runtime.block_on(run(arguments))?;
    // Do not wait for tasks whose connections are still being closed.
    runtime.shutdown_background();
    writeln!(std::io::stdout(), "{counts}").context("stdout")
}
