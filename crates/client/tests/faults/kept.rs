//! Calls that are polled once and then kept, as a slow branch of `select!` keeps them, and calls that are given up.

use crate::fake::{Fake, LONG, STILL, block, builder};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use ringfetch_client::Error;
use ringfetch_proto::v1 as wire;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::{Notify, Semaphore, mpsc};

#[tokio::test(start_paused = true)]
async fn answers_that_nobody_takes_hold_up_no_other_call() {
    // Scenario: 70 calls with answers of 256 KiB on one connection, each polled once and then kept; one more. Expected: its
    // answer; then those of the others.
    let fake = Fake::new().on_blocks(|_, request| async move {
        Ok(wire::FetchBlocksResponse {
            block_bytes: 4096,
            data: vec![7; request.get_ref().indices.len() * 4096].into(),
            ..Default::default()
        })
    });
    let client = fake.client().with_timeout(None);
    client.fetch_blocks("d", &[1]).await.unwrap();
    let mut kept: Vec<_> = (0..70)
        .map(|_| Box::pin(client.fetch_blocks("d", &[1; 64])))
        .collect();
    assert!(kept.iter_mut().all(|call| call.now_or_never().is_none()));
    // What arrives waits in the connection, where nothing shows it.
    tokio::time::sleep(STILL).await;
    let other = tokio::time::timeout(LONG, client.fetch_blocks("d", &[1; 64])).await;
    assert_eq!(other.expect("the call hangs").unwrap().len(), 64);
    assert!(join_all(kept).await.iter().all(Result::is_ok));
    assert_eq!(fake.connections(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_kept_while_it_waits_for_its_turn_holds_up_no_other() {
    // Scenario: one call may be in flight, and the server answers it late; a second waits for its turn, whose caller does not
    // poll it any more, then a third. Expected: all are answered, the third without the second being polled.
    let may_answer = Arc::new(Semaphore::new(0));
    let fake = Fake::new().gated(&may_answer);
    let client = fake.client_with(builder().max_in_flight(1).timeout(None));
    let mut first = pin!(client.fetch_blocks("d", &[1]));
    let mut kept = pin!(client.fetch_blocks("d", &[2]));
    let mut third = pin!(client.fetch_blocks("d", &[3]));
    for waiting in [&mut first, &mut kept] {
        assert!(tokio::time::timeout(STILL, waiting.as_mut()).await.is_err());
    }
    assert!(tokio::time::timeout(STILL, third.as_mut()).await.is_err());
    may_answer.add_permits(1);
    first.await.unwrap();
    let third = tokio::time::timeout(LONG, third)
        .await
        .expect("the third call hangs");
    assert_eq!(third.unwrap().get(0).unwrap(), block(3)[..]);
    assert_eq!(kept.await.unwrap().get(0).unwrap(), block(2)[..]);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_given_up_while_it_waits_for_its_turn_is_not_sent() {
    // Scenario: one call may be in flight, and the server answers none until two others, which waited, have given up: one by
    // its timeout, one whose caller left. Expected: DeadlineExceeded for the former; neither reaches the server.
    let may_answer = Arc::new(Semaphore::new(0));
    let fake = Fake::new().gated(&may_answer);
    let client = fake.client_with(builder().max_in_flight(1).timeout(None));
    let mut first = pin!(client.fetch_blocks("d", &[1]));
    assert!(tokio::time::timeout(STILL, first.as_mut()).await.is_err());
    let late = client.with_timeout(STILL).fetch_blocks("d", &[2]).await;
    assert!(matches!(late, Err(Error::DeadlineExceeded)), "{late:?}");
    let left = tokio::time::timeout(STILL, client.fetch_blocks("d", &[3]));
    assert!(left.await.is_err());
    may_answer.add_permits(1);
    first.await.unwrap();
    client.fetch_blocks("d", &[4]).await.unwrap();
    assert_eq!(fake.calls(), 2);
}

const DATA: u8 = 0;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;

fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    out.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// A peer that answers pings alone, and sends what it is given. Says when its own ping is answered.
fn raw(
    far: DuplexStream,
    mut given: mpsc::UnboundedReceiver<Vec<u8>>,
    to_send: mpsc::UnboundedSender<Vec<u8>>,
    answered: Arc<Notify>,
) {
    let (mut reader, mut writer) = tokio::io::split(far);
    tokio::spawn(async move {
        while let Some(bytes) = given.recv().await {
            writer.write_all(&bytes).await.unwrap();
        }
    });
    tokio::spawn(async move {
        reader.read_exact(&mut [0; 24]).await.unwrap();
        let mut head = [0; 9];
        while reader.read_exact(&mut head).await.is_ok() {
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            reader.read_exact(&mut payload).await.unwrap();
            match (head[3], head[4]) {
                (PING, ACK) => answered.notify_one(),
                (PING, _) => {
                    let mut pong = Vec::new();
                    frame(&mut pong, PING, ACK, 0, &payload);
                    to_send.send(pong).unwrap();
                }
                _ => {}
            }
        }
    });
}

#[tokio::test(start_paused = true)]
async fn late_answers_to_calls_that_were_given_up_leave_the_connection_open() {
    // Scenario: 6000 calls, more than a connection remembers, are given up before their answers arrive, each in ten small
    // frames. Expected: the connection answers a ping after them, and is not replaced.
    const CALLS: u32 = 6000;
    let dials = Arc::new(AtomicUsize::new(0));
    let (send, given) = mpsc::unbounded_channel();
    let answered = Arc::new(Notify::new());
    let peer = std::sync::Mutex::new(Some((given, send.clone(), Arc::clone(&answered))));
    let count = Arc::clone(&dials);
    let mut hello = Vec::new();
    frame(&mut hello, SETTINGS, 0, 0, &[]);
    frame(&mut hello, SETTINGS, ACK, 0, &[]);
    send.send(hello).unwrap();
    let client = builder()
        .timeout(Duration::from_millis(1))
        .connect_lazy_with(move || {
            count.fetch_add(1, Ordering::SeqCst);
            let peer = peer.lock().unwrap().take();
            async move {
                let (given, send, answered) = peer.ok_or(std::io::ErrorKind::ConnectionRefused)?;
                let (near, far) = tokio::io::duplex(1 << 16);
                raw(far, given, send, answered);
                Ok(near)
            }
        })
        .unwrap();
    for _ in 0..CALLS / 1000 {
        let calls = join_all((0..1000).map(|_| client.fetch_blocks("d", &[1]))).await;
        for outcome in calls {
            assert!(matches!(outcome, Err(Error::DeadlineExceeded)), "{outcome:?}");
        }
    }
    let mut late = Vec::new();
    for call in 0..CALLS {
        for _ in 0..10 {
            frame(&mut late, DATA, 0, 2 * call + 1, &[0]);
        }
    }
    frame(&mut late, PING, 0, 0, &[1; 8]);
    send.send(late).unwrap();
    let alive = tokio::time::timeout(LONG, answered.notified());
    alive.await.expect("the connection has ended");
    assert_eq!(dials.load(Ordering::SeqCst), 1);
}
