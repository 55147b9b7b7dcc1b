//! As many connections as an attack has, from clients that behave: the control run.

use super::{OPENING_AT_A_TIME, RECONNECT_AFTER, again, each};
use crate::grpc::{Connection, Ended, fetch_blocks};
use crate::hold::Hold;
use crate::http1;
use crate::tally::{Tally, cause};
use crate::target::Target;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Number of connections and their rate.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Connections; every second one speaks HTTP/1.1, the others gRPC.
    #[arg(long, default_value_t = 64)]
    pub connections: usize,
    /// Milliseconds between the requests of a connection, each for one block.
    #[arg(long, default_value_t = 1000)]
    pub every_ms: u64,
}

/// Runs the case.
///
/// # Errors
/// A task panicked.
pub async fn run(target: &Target, options: &Options, hold: &Hold, tally: &Tally) -> io::Result<()> {
    let every = Duration::from_millis(options.every_ms);
    let opening = Arc::new(Semaphore::new(OPENING_AT_A_TIME));
    each(options.connections, |number| {
        let (target, hold, tally) = (target.clone(), hold.clone(), tally.clone());
        let opening = Arc::clone(&opening);
        async move {
            let (target, hold, tally) = (&target, &hold, &tally);
            // Spread over the interval, so that not all ask at the same moment.
            if !hold.pause(every.mul_f64(fastrand::f64())).await {
                return;
            }
            let next = move || fastrand::u64(..target.blocks);
            let connect = || async {
                let _permit = opening.acquire().await;
                if number % 2 == 0 {
                    target.connect(target.http).await.map(Client::Http)
                } else {
                    Connection::open(target).await.map(Client::Grpc)
                }
            };
            let ask = |mut client: Client| async move {
                while client.ask(target, next(), hold, tally).await && hold.pause(every).await {}
            };
            again(hold, tally, Some(RECONNECT_AFTER), connect, ask).await;
        }
    })
    .await
}

enum Client {
    Http(tokio::net::TcpStream),
    Grpc(Connection),
}

impl Client {
    /// One request. `false`: the connection or the hold has ended.
    async fn ask(&mut self, target: &Target, block: u64, hold: &Hold, tally: &Tally) -> bool {
        tally.change(|counts| counts.calls += 1);
        let begun = Instant::now();
        let asked = async {
            match self {
                Self::Http(stream) => match http1::get(stream, &target.block_path(block)).await {
                    Ok(answer) if answer.status == 200 => Ended::Answered(answer.body),
                    Ok(answer) => Ended::Refused(format!("HTTP {}", answer.status)),
                    Err(error) => Ended::Broken(cause(&error)),
                },
                Self::Grpc(connection) => connection.call(&fetch_blocks(target, [block])).await,
            }
        };
        let Some(ended) = hold.unless_ended(asked).await else {
            return false;
        };
        ended.count(begun.elapsed(), tally);
        !matches!(ended, Ended::Broken(_))
    }
}
