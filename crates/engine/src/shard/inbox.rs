//! What a shard receives: batches on one channel, control messages on another, so that control never waits behind data.

use crate::work::Work;
use std::task::{Context, Poll, Waker};
use tokio::sync::{mpsc, oneshot};
use tokio::task::coop::has_budget_remaining;

/// Batches between two polls of a shard. The bound on queued *reads* is the finer one.
const BATCHES_MAX: usize = 4096;

/// Control messages between two polls of a shard: a drain, and the sweeps and heartbeats of a supervisor that asks every
/// few seconds.
const CONTROLS_MAX: usize = 64;

/// What a shard is asked to do beside its reads.
#[derive(Debug)]
pub(crate) enum Control {
    /// Finish what was accepted, take nothing more, end.
    Drain,
    /// Release what is held of datasets that nobody else holds any more.
    Sweep,
    /// Answer.
    Beat(oneshot::Sender<()>),
}

/// The sending half.
#[derive(Debug, Clone)]
pub(crate) struct Mailbox {
    pub(crate) batches: mpsc::Sender<Box<Work>>,
    pub(crate) control: mpsc::Sender<Control>,
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct Inbox {
    batches: Channel<Box<Work>>,
    control: Channel<Control>,
}

/// A channel that is looked at in every turn of the shard, mostly in vain.
#[derive(Debug)]
struct Channel<T> {
    receiver: mpsc::Receiver<T>,
    /// Left with the channel, which has not used it since: nothing has come.
    waker: Option<Waker>,
    ended: bool,
}

impl<T> Channel<T> {
    fn new(receiver: mpsc::Receiver<T>) -> Self {
        Self {
            receiver,
            waker: None,
            ended: false,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Option<T> {
        // To leave a waker again costs four locked instructions, which shows at a million reads a second.
        let waits = self
            .waker
            .as_ref()
            .is_some_and(|waker| waker.will_wake(cx.waker()))
            && self.receiver.is_empty()
            && !self.receiver.is_closed();
        if self.ended || waits {
            return None;
        }
        self.waker = None;
        // A task that has used up its budget is told that nothing is there, is woken at once, and leaves no waker.
        let has_budget = has_budget_remaining();
        match self.receiver.poll_recv(cx) {
            Poll::Ready(Some(message)) => Some(message),
            Poll::Ready(None) => {
                self.ended = true;
                None
            }
            Poll::Pending => {
                self.waker = has_budget.then(|| cx.waker().clone());
                None
            }
        }
    }
}

/// A shard's inbox and the way to it.
pub(crate) fn inbox() -> (Mailbox, Inbox) {
    let (batches, received) = mpsc::channel(BATCHES_MAX);
    let (control, controls) = mpsc::channel(CONTROLS_MAX);
    let inbox = Inbox {
        batches: Channel::new(received),
        control: Channel::new(controls),
    };
    (Mailbox { batches, control }, inbox)
}

impl Inbox {
    /// The next control message; without one the task is woken when there is.
    pub(super) fn poll_control(&mut self, cx: &mut Context<'_>) -> Option<Control> {
        self.control.poll(cx)
    }

    /// The next batch; without one the task is woken when there is.
    pub(super) fn poll_batch(&mut self, cx: &mut Context<'_>) -> Option<Box<Work>> {
        self.batches.poll(cx)
    }

    /// Refuses batches from now on; those already sent still arrive.
    pub(super) fn close(&mut self) {
        self.batches.receiver.close();
    }

    /// Whether no further batch will ever arrive.
    pub(super) fn has_ended(&self) -> bool {
        self.batches.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::time::Duration;

    #[test]
    fn a_task_out_of_budget_is_woken_by_the_next_message() {
        // Scenario: as many messages as a task may take in one go, more, and fewer; when all are taken, one more comes.
        // Expectation: it is received.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        for count in 100..150 {
            let (sender, receiver) = mpsc::channel(200);
            let mut channel = Channel::new(receiver);
            let mut taken = 0;
            let receiving = async move {
                poll_fn(|cx| {
                    while channel.poll(cx).is_some() {
                        taken += 1;
                    }
                    if taken == count + 1 {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
            };
            for _ in 0..count {
                sender.try_send(()).expect("room");
            }
            runtime.block_on(async {
                let receiving = tokio::spawn(receiving);
                for _ in 0..10 {
                    tokio::task::yield_now().await;
                }
                sender.try_send(()).expect("room");
                let received = tokio::time::timeout(Duration::from_secs(30), receiving).await;
                received.expect("it is woken").expect("no panic");
            });
        }
    }
}
