//! The client against a server that refuses, stalls, lies and disconnects.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "clippy.toml allows it in tests, but does not see that these functions are only called by some"
)]

mod calls;
mod failover;
mod fake;
mod kept;
mod lists;
mod objects;
mod sockets;
mod stream;
