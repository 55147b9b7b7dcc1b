//! The inbox of a shard: batches on one channel, control messages on another, so that control never waits
//! behind data.
//!
//! One waker for both: a control message is followed by a nudge on the batches' channel. If that channel is
//! full, the shard is already awake. Once it has ended, the control messages' own waker is used.

use crate::planned_batch::PlannedBatch;
use std::task::{Context, Poll};
use tokio::sync::{mpsc, oneshot};

/// Most batches between two polls of a shard. The limit of queued *reads* is the finer one.
const BATCHES_MAX: usize = 4096;

/// Most control messages between two polls of a shard: a drain, and the rest every second or less.
const CONTROLS_MAX: usize = 64;

#[derive(Debug)]
pub(crate) enum Control {
    /// Finish what was accepted, accept nothing more, end.
    Drain,
    /// Release what is held for datasets without other users.
    Sweep,
    /// Look after reads that wait or are in flight for long.
    Tend,
    /// Reply, as a heartbeat.
    Beat(oneshot::Sender<()>),
}

/// A message on the batches' channel; `None` is a nudge to check the control messages.
type Delivery = Option<Box<PlannedBatch>>;

/// The sending half.
#[derive(Debug, Clone)]
pub(crate) struct Mailbox {
    batches: mpsc::Sender<Delivery>,
    control: mpsc::Sender<Control>,
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct Inbox {
    batches: mpsc::Receiver<Delivery>,
    control: mpsc::Receiver<Control>,
    /// Received while the task waited for it, after the batches had ended.
    received: Option<Control>,
    ended: bool,
}

/// Why a message was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendError {
    Full,
    /// The shard accepts no more batches, or has ended.
    Closed,
}

/// Creates a shard's inbox and its sending half.
pub(crate) fn inbox() -> (Mailbox, Inbox) {
    let (batches, received) = mpsc::channel(BATCHES_MAX);
    let (control, controls) = mpsc::channel(CONTROLS_MAX);
    let inbox = Inbox {
        batches: received,
        control: controls,
        received: None,
        ended: false,
    };
    (Mailbox { batches, control }, inbox)
}

impl Mailbox {
    /// Sends a batch.
    ///
    /// # Errors
    /// The batch was refused.
    pub(crate) fn deliver(&self, batch: Box<PlannedBatch>) -> Result<(), SendError> {
        self.batches.try_send(Some(batch)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => SendError::Full,
            mpsc::error::TrySendError::Closed(_) => SendError::Closed,
        })
    }

    /// Sends a control message if there is room.
    pub(crate) fn try_command(&self, control: Control) {
        if self.control.try_send(control).is_ok() {
            self.nudge();
        }
    }

    /// Sends a control message. Waits for room.
    ///
    /// # Errors
    /// The shard has ended.
    pub(crate) async fn command(&self, control: Control) -> Result<(), SendError> {
        self.control.send(control).await.map_err(|_| SendError::Closed)?;
        self.nudge();
        Ok(())
    }

    /// Resolves when the shard accepts no more batches.
    pub(crate) async fn closed(&self) {
        self.batches.closed().await;
    }

    fn nudge(&self) {
        // Full: the shard is awake. Closed: it is ending, and waits for control messages themselves.
        let _awake_or_ending = self.batches.try_send(None);
    }
}

impl Inbox {
    /// The next control message. Does not register the waker: [`Inbox::poll_batch`] does.
    pub(super) fn control(&mut self) -> Option<Control> {
        if self.received.is_some() {
            return self.received.take();
        }
        // Empty in nearly every turn; this check takes no locked instruction.
        if self.control.is_empty() {
            return None;
        }
        self.control.try_recv().ok()
    }

    /// The next batch. If there is none, the next message of either kind wakes the task.
    pub(super) fn poll_batch(&mut self, cx: &mut Context<'_>) -> Option<Box<PlannedBatch>> {
        while !self.ended {
            match self.batches.poll_recv(cx) {
                Poll::Ready(Some(Some(batch))) => return Some(batch),
                Poll::Ready(Some(None)) => {
                    if !self.control.is_empty() {
                        // The turn requested here checks the control messages.
                        cx.waker().wake_by_ref();
                        return None;
                    }
                }
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => return None,
            }
        }
        // Reads may be in flight for long, and are looked after meanwhile.
        if self.received.is_none()
            && let Poll::Ready(Some(control)) = self.control.poll_recv(cx)
        {
            self.received = Some(control);
            cx.waker().wake_by_ref();
        }
        None
    }

    /// Refuses batches from now on; those already sent still arrive.
    pub(super) fn close(&mut self) {
        self.batches.close();
    }

    /// Whether no further batch will ever arrive.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::time::Duration;

    #[test]
    fn no_message_of_another_thread_is_missed() {
        // Scenario: a thread sends control messages and waits for the reply to each, while the inbox's task
        // is checking or has just checked: twenty thousand times, then as often after a drain, as while reads are in flight.
        // Expectation: each is answered; a lost wake-up would hang.
        const BEATS: usize = 20_000;
        let (mailbox, mut inbox) = inbox();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let thread = std::thread::spawn(move || {
            let mut beats = 0;
            runtime.block_on(poll_fn(move |cx| {
                while let Some(control) = inbox.control() {
                    match control {
                        Control::Beat(reply) => {
                            beats += 1;
                            let _gone = reply.send(());
                        }
                        Control::Drain => inbox.close(),
                        Control::Sweep | Control::Tend => {}
                    }
                }
                while inbox.poll_batch(cx).is_some() {}
                if inbox.has_ended() && beats == 2 * BEATS {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            }));
        });
        let asking = tokio::runtime::Builder::new_current_thread().enable_all().build();
        asking.expect("a runtime").block_on(async {
            for number in 0..2 * BEATS {
                if number == BEATS {
                    mailbox.command(Control::Drain).await.expect("taken");
                    mailbox.closed().await;
                }
                let (reply, answer) = oneshot::channel();
                mailbox.command(Control::Beat(reply)).await.expect("taken");
                let answered = tokio::time::timeout(Duration::from_secs(30), answer).await;
                answered
                    .unwrap_or_else(|_| panic!("message {number} is missed"))
                    .expect("an answer");
            }
        });
        thread.join().expect("no panic");
    }
}
