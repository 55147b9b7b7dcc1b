//! What a shard receives: batches on one channel, control messages on another, so that control never waits behind data.

use crate::work::Work;
use std::task::{Context, Poll, Waker};
use tokio::sync::{mpsc, oneshot};

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
        match self.receiver.poll_recv(cx) {
            Poll::Ready(Some(message)) => Some(message),
            Poll::Ready(None) => {
                self.ended = true;
                None
            }
            Poll::Pending => {
                self.waker = Some(cx.waker().clone());
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
