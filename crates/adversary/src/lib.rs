//! Careless and hostile clients for a running daemon, and the friendly client that they must not disturb.
//!
//! # Use
//! Each case in [`cases`] is one function: it opens its connections to a [`Target`], misbehaves until its [`Hold`]
//! ends, and counts what it did and what the daemon did about it in a [`Tally`], which can be watched meanwhile. A
//! [`Victim`] reads single blocks like any client and measures what it gets; [`Process`] watches the daemon's memory
//! and CPU. Tests end a hold when they have seen enough; the command line ends it after a time.
//!
//! ```no_run
//! # async fn example(target: adversary::Target) -> std::io::Result<()> {
//! use adversary::{Hold, Tally, cases};
//!
//! let (hold, release) = Hold::until_released();
//! let tally = Tally::default();
//! let options = cases::herd::Options { callers: 1_000, connections: 50, block: 0 };
//! let attack = tokio::spawn({
//!     let (target, tally) = (target.clone(), tally.clone());
//!     async move { cases::herd::run(&target, &options, &hold, &tally).await }
//! });
//! tally.wait_until(|counts| counts.answers >= 100 || counts.refused_total() > 0).await;
//! drop(release);
//! attack.await??;
//! println!("{:?}", tally.counts());
//! # Ok(()) }
//! ```
//!
//! # What it is careful about
//! It talks to loopback addresses only, and every loop ends with its hold. Source addresses are chosen with
//! [`Target::from`], so that attacker and victim are different callers, or one.
#![forbid(unsafe_code)]

pub mod cases;
mod frames;
mod grpc;
mod hold;
mod http1;
mod process;
mod tally;
mod target;
mod victim;

pub use hold::{Hold, Release};
pub use process::{Process, Usage};
pub use tally::{Counts, Tally};
pub use target::Target;
pub use victim::{Figures, Protocol, Victim, VictimReport};
