//! Copying that is done in parts, between which the thread serves others: what a shared read brought to those who joined it,
//! and the gaps that failed items leave.

use super::answer::Answer;
use super::in_flight::{Joiner, Over};
use super::{Shard, TURN_COPY_BYTES};
use crate::backend::Backend;
use crate::work::Shortfall;
use std::time::Instant;

/// See the module.
pub(super) enum Chore {
    Share(Box<Shared>),
    Answer(Box<Answer>),
}

/// A read that is over, with readers that joined it.
pub(super) struct Shared {
    pub(super) over: Over,
    pub(super) errno: Option<i32>,
    /// Those that are still to be served.
    pub(super) joiners: std::vec::IntoIter<Joiner>,
}

impl<B: Backend> Shard<B> {
    /// Copies what is to be copied, as much as a turn allows.
    pub(super) fn do_chores(&mut self) {
        if self.chores.is_empty() {
            return;
        }
        let now = Instant::now();
        while self.copied < TURN_COPY_BYTES
            && let Some(chore) = self.chores.pop_front()
        {
            match chore {
                Chore::Share(mut shared) => {
                    if let Some(joiner) = shared.joiners.next() {
                        self.serve(&joiner, &shared.over, shared.errno, now);
                        self.chores.push_front(Chore::Share(shared));
                    } else {
                        self.settle(&shared.over, shared.errno, now);
                    }
                }
                Chore::Answer(mut answer) => {
                    let (copied, ready) = answer.advance(TURN_COPY_BYTES - self.copied);
                    self.copied += copied;
                    if ready {
                        answer.send(&self.metrics, now);
                    } else {
                        self.chores.push_back(Chore::Answer(answer));
                    }
                }
            }
        }
    }

    /// Gives a read that joined another one what that one brought, or has it read on its own.
    fn serve(&mut self, joiner: &Joiner, over: &Over, errno: Option<i32>, now: Instant) {
        let read = &joiner.read;
        let reached = over.reached.saturating_sub(over.distance(read)).min(read.length);
        // Short of what it wants itself, a read without an error has met the end of the file.
        let at_end = errno.is_none() && over.reached < over.read.needed;
        let shared_error = errno.filter(|_| read.pieces == 1 && over.is_same_range(read));
        let owner = self.actives.get(over.active).and_then(Option::as_ref);
        let active = self.actives.get(joiner.active).and_then(Option::as_ref);
        let (Some(owner), Some(active)) = (owner, active) else {
            return;
        };
        let wanted = !active.work.reply.is_closed();
        let served = reached >= read.needed || at_end || shared_error.is_some();
        if wanted && served {
            let distance = over.distance(read);
            owner
                .work
                .share(&over.read, distance, &active.work, read, reached);
            self.copied += u64::from(reached);
        }
        let Some(active) = self.actives.get_mut(joiner.active).and_then(Option::as_mut) else {
            return;
        };
        active.outstanding -= 1;
        if wanted && !served {
            // It failed, perhaps for the sake of other bytes. Still queued, as before.
            active.work.plan.reads.push(*read);
            return self.wait_for_turn(joiner.active);
        }
        if wanted {
            let shortfall = shared_error.map_or(Shortfall::EndOfFile, Shortfall::Errno);
            self.copied += active.work.deliver(read, reached, shortfall);
        }
        self.unqueue(1);
        self.close_if_done(joiner.active, now);
    }
}
