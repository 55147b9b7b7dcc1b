//! `adversary`: one command per case, and `victim`; each prints its counts as one JSON object.
#![forbid(unsafe_code)]

use adversary::cases::{big_answers, floods, friendly, half_open, herd, paced, partial_bodies, stalled};
use adversary::{Hold, Process, Protocol, Tally, Target, Victim};
use anyhow::Context as _;
use clap::builder::PossibleValuesParser;
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
    /// How many blocks it has, and with --block-bytes how long each is: a daemon under attack may not answer the query.
    #[arg(long, global = true, requires = "block_bytes", value_parser = clap::value_parser!(u64).range(1..))]
    blocks: Option<u64>,
    /// See --blocks.
    #[arg(long, global = true, requires = "blocks", value_parser = clap::value_parser!(u32).range(1..))]
    block_bytes: Option<u32>,
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
    PartialBodies {
        /// gRPC connections.
        #[arg(long, default_value_t = 64)]
        connections: usize,
        /// Calls on each.
        #[arg(long, default_value_t = 200)]
        calls: usize,
        /// Bytes of each call that are sent, of 4 MiB announced.
        #[arg(long, default_value_t = (4 << 20) - 1)]
        body_bytes: usize,
    },
    /// Readers that ask for large answers and do not take them.
    StalledReaders {
        /// gRPC connections.
        #[arg(long, default_value_t = 256)]
        connections: usize,
        /// Answers that each asks for.
        #[arg(long, default_value_t = 5)]
        answers: u32,
        /// Blocks of each answer.
        #[arg(long, default_value_t = 4096)]
        answer_blocks: u64,
        /// Read nothing, 1 KB/s, or leave windows at zero, or let them grow by 1 every 10 ms.
        #[arg(long, default_value = "nothing",
            value_parser = PossibleValuesParser::new(["nothing", "slowly", "zero-window", "creeping-window"]))]
        manner: String,
        /// Do not reconnect when the daemon closes a connection.
        #[arg(long)]
        once: bool,
    },
    /// Connections that never make a whole request, and idle ones.
    HalfOpen {
        /// Connections in all.
        #[arg(long, default_value_t = 10_000)]
        connections: usize,
        /// What they do, in turn, with commas between; all kinds if left out.
        #[arg(long, value_delimiter = ',',
            value_parser = PossibleValuesParser::new(half_open::Kind::ALL.map(|(name, _)| name)))]
        kinds: Vec<String>,
        /// Do not reconnect when the daemon closes a connection.
        #[arg(long)]
        once: bool,
    },
    /// Callers that fetch large answers without pause, and read them. With many calls and scattered blocks: overload.
    BigAnswers {
        /// Callers, each with a connection.
        #[arg(long, default_value_t = 8)]
        callers: usize,
        /// Calls that each has in flight.
        #[arg(long, default_value_t = 1)]
        calls: usize,
        /// Blocks of each answer.
        #[arg(long, default_value_t = 4096)]
        answer_blocks: u64,
        /// Blocks at random places, each a read of its own, instead of neighbours.
        #[arg(long)]
        scattered: bool,
    },
    /// Many callers that ask for one block at the same moment.
    Herd {
        /// Callers.
        #[arg(long, default_value_t = 1000)]
        callers: usize,
        /// Connections that they share.
        #[arg(long, default_value_t = 50)]
        connections: usize,
        /// The block.
        #[arg(long, default_value_t = 0)]
        block: u64,
    },
    /// Frames that cost the sender little and the daemon much.
    Flood {
        /// What is sent.
        #[arg(value_parser = PossibleValuesParser::new(floods::Kind::ALL.map(|(name, _)| name)))]
        kind: String,
        /// Connections.
        #[arg(long, default_value_t = 8)]
        connections: usize,
        /// Most frames a second on each.
        #[arg(long, default_value_t = 10_000)]
        frames_per_second: u32,
    },
    /// The control run: as many connections, from clients that behave.
    WellBehaved {
        /// Connections, half HTTP/1.1 and half gRPC.
        #[arg(long, default_value_t = 64)]
        connections: usize,
        /// Milliseconds between the requests of a connection, each for one block.
        #[arg(long, default_value_t = 1000)]
        every_ms: u64,
    },
    /// A reader of single blocks at a steady rate, measured; on its connection another principal that reads all it can.
    Paced {
        /// Requests a second.
        #[arg(long, default_value_t = 1000.0)]
        rate: f64,
        /// Token of the other principal; left out, there is none.
        #[arg(long)]
        beside_token: Option<String>,
        /// Calls that it has in flight.
        #[arg(long, default_value_t = 64)]
        beside_calls: usize,
        /// Blocks of each of its answers.
        #[arg(long, default_value_t = 64)]
        beside_blocks: u64,
    },
    /// The friendly client: a reader, newcomers and /livez, measured.
    Victim {
        /// What the reader speaks.
        #[arg(long, default_value = "grpc", value_parser = PossibleValuesParser::new(["grpc", "http"]))]
        protocol: String,
        /// The daemon's process, to sample its memory and CPU time.
        #[arg(long)]
        pid: Option<u32>,
    },
}

fn named<T: Copy>(all: &[(&str, T)], name: &str) -> anyhow::Result<T> {
    let found = all.iter().find(|(known, _)| *known == name);
    found
        .map(|(_, value)| *value)
        .with_context(|| format!("{name}: no such kind"))
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
        token,
        seconds,
    } = arguments.daemon;
    let target = match blocks.zip(block_bytes) {
        Some((blocks, block_bytes)) => Target::known(grpc, http, admin, &dataset, blocks, block_bytes)?,
        None => Target::discover(grpc, http, admin, &dataset).await?,
    };
    let target = Target {
        from,
        token,
        ..target
    };
    let time = Duration::try_from_secs_f64(seconds).context("--seconds")?;
    let (hold, _release) = Hold::at_most(time);
    let tally = Tally::default();
    match arguments.case {
        Case::PartialBodies {
            connections,
            calls,
            body_bytes,
        } => {
            let options = partial_bodies::Options {
                connections,
                calls,
                body_bytes,
                ..Default::default()
            };
            partial_bodies::run(&target, &options, &hold, &tally).await?;
        }
        Case::StalledReaders {
            connections,
            answers,
            answer_blocks: blocks,
            manner,
            once,
        } => {
            let manner = match manner.as_str() {
                "slowly" => stalled::Manner::ReadsSlowly { bytes: 1000 },
                "zero-window" => stalled::Manner::ZeroWindow,
                "creeping-window" => stalled::Manner::CreepingWindow {
                    every: Duration::from_millis(10),
                },
                _ => stalled::Manner::ReadsNothing,
            };
            let options = stalled::Options {
                connections,
                answers,
                blocks,
                manner,
                reconnect: !once,
            };
            stalled::run(&target, &options, &hold, &tally).await?;
        }
        Case::HalfOpen {
            connections,
            kinds,
            once,
        } => {
            let mut options = half_open::Options {
                connections,
                reconnect: !once,
                ..Default::default()
            };
            if !kinds.is_empty() {
                let kinds = kinds.iter().map(|kind| named(&half_open::Kind::ALL, kind));
                options.kinds = kinds.collect::<Result<_, _>>()?;
            }
            half_open::run(&target, &options, &hold, &tally).await?;
        }
        Case::BigAnswers {
            callers,
            calls,
            answer_blocks: blocks,
            scattered,
        } => {
            let options = big_answers::Options {
                callers,
                calls,
                blocks,
                neighbours: !scattered,
            };
            big_answers::run(&target, &options, &hold, &tally).await?;
        }
        Case::Herd {
            callers,
            connections,
            block,
        } => {
            herd::run(
                &target,
                &herd::Options {
                    callers,
                    connections,
                    block,
                },
                &hold,
                &tally,
            )
            .await?;
        }
        Case::Flood {
            kind,
            connections,
            frames_per_second,
        } => {
            let kind = named(&floods::Kind::ALL, &kind)?;
            let options = floods::Options {
                kind,
                connections,
                frames_per_second,
            };
            floods::run(&target, &options, &hold, &tally).await?;
        }
        Case::WellBehaved {
            connections,
            every_ms,
        } => {
            let options = friendly::Options {
                connections,
                every: Duration::from_millis(every_ms),
            };
            friendly::run(&target, &options, &hold, &tally).await?;
        }
        Case::Paced {
            rate,
            beside_token,
            beside_calls: calls,
            beside_blocks: blocks,
        } => {
            anyhow::ensure!(rate > 0.0 && rate <= 1e6, "--rate: from 0 to 1000000");
            let beside = beside_token.map(|token| paced::Beside { token, calls, blocks });
            let reader = paced::run(&target, &paced::Options { rate, beside }, &hold, &tally).await?;
            return Ok(json!({ "reader": reader, "beside": tally.counts() }));
        }
        Case::Victim { protocol, pid } => {
            let protocol = if protocol == "http" {
                Protocol::Http
            } else {
                Protocol::Grpc
            };
            let process = pid.map(Process::new).transpose().context("--pid")?;
            return Ok(json!(
                Victim {
                    target,
                    protocol,
                    process
                }
                .run(&hold)
                .await?
            ));
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
