//! What a shard receives: batches on one channel, control messages on another, so that control never waits behind data.

use crate::work::Work;
use std::task::{Context, Poll};
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
    batches: mpsc::Receiver<Box<Work>>,
    control: mpsc::Receiver<Control>,
    batches_ended: bool,
    control_ended: bool,
}

/// A shard's inbox and the way to it.
pub(crate) fn inbox() -> (Mailbox, Inbox) {
    let (batches, received) = mpsc::channel(BATCHES_MAX);
    let (control, controls) = mpsc::channel(CONTROLS_MAX);
    let inbox = Inbox {
        batches: received,
        control: controls,
        batches_ended: false,
        control_ended: false,
    };
    (Mailbox { batches, control }, inbox)
}

impl Inbox {
    /// The next control message; without one the task is woken when there is.
    pub(super) fn poll_control(&mut self, cx: &mut Context<'_>) -> Option<Control> {
        if self.control_ended {
            return None;
        }
        match self.control.poll_recv(cx) {
            Poll::Ready(Some(control)) => Some(control),
            Poll::Ready(None) => {
                self.control_ended = true;
                None
            }
            Poll::Pending => None,
        }
    }

    /// The next batch; without one the task is woken when there is.
    pub(super) fn poll_batch(&mut self, cx: &mut Context<'_>) -> Option<Box<Work>> {
        if self.batches_ended {
            return None;
        }
        match self.batches.poll_recv(cx) {
            Poll::Ready(Some(work)) => Some(work),
            Poll::Ready(None) => {
                self.batches_ended = true;
                None
            }
            Poll::Pending => None,
        }
    }

    /// Refuses batches from now on; those already sent still arrive.
    pub(super) fn close(&mut self) {
        self.batches.close();
    }

    /// Whether no further batch will ever arrive.
    pub(super) fn has_ended(&self) -> bool {
        self.batches_ended
    }
}
