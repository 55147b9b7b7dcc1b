//! What clients with the default settings notice of a lone daemon's restart: nothing but the time it takes.

use crate::daemon::{Setup, any_backend};
use crate::data::plain_blocks;
use ringfetch_client::Client;
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// As systemd waits before it starts a daemon that has crashed (`RestartSec`). Its start is part of it, which takes long on a busy
/// machine.
const DOWN: Duration = Duration::from_secs(2);
/// A client may retry 500 failures at once. Each of these calls fails several times meanwhile.
const CALLS: usize = 200;

#[tokio::test]
async fn calls_outlive_a_restart() {
    // Scenario: a daemon drains, and another one is killed, while a client makes one call after another on 200 tasks; after two
    // seconds one serves at the same address, which no other test uses. Expectation: no call fails.
    let serve = |address: &str| {
        let setup = Setup::new(any_backend()).set("grpc.listen", address);
        plain_blocks(setup, 8).0.start()
    };
    let begun = Instant::now();
    let mut daemon = serve("127.83.4.1:0");
    let start = begun.elapsed();
    let address = daemon.grpc.to_string();
    let client = Client::builder(format!("http://{address}"))
        .connect()
        .await
        .unwrap();
    for signal in [Signal::TERM, Signal::KILL] {
        let is_over = Arc::new(AtomicBool::new(false));
        let mut calls = JoinSet::new();
        for _ in 0..CALLS {
            let (client, is_over) = (client.clone(), Arc::clone(&is_over));
            calls.spawn(async move {
                while !is_over.load(Ordering::Relaxed) {
                    client.fetch_blocks("blocks", &[3]).await.unwrap();
                }
            });
        }
        daemon.signal(signal);
        daemon.ended().await;
        let failed = tokio::time::timeout(DOWN.saturating_sub(start), calls.join_next()).await;
        assert!(failed.is_err(), "{failed:?}");
        daemon = serve(&address);
        is_over.store(true, Ordering::Relaxed);
        while let Some(call) = calls.join_next().await {
            call.unwrap();
        }
    }
    daemon.stop().await;
}
