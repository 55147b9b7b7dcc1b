//! Batches that nobody waits for any more must not hold memory until their turn: a device may hang, and no turn comes.

use super::Shard;
use crate::backend::Backend;
use std::time::{Duration, Instant};

/// Waiting batches checked for cancellation for each admitted one.
pub(super) const LOOKED_OVER_PER_BATCH: usize = 2;

/// The same for each [`Engine::tend`](crate::Engine::tend): batches that wait for a slow device are released even if nothing
/// else happens.
const LOOKED_OVER_PER_TEND: usize = 4096;

/// Most joiners that each lets go: the next one begins with those that are left.
const LET_GO_PER_TEND: usize = 4096;

/// Reads in flight for less are not asked who joined them: most end soon.
const JOINED_FOR: Duration = Duration::from_secs(1);

/// Closed batches that keep their number until their turn. If there are more, and every second number is such a one, they are
/// searched for.
const CLOSED_WAITING_MAX: usize = 64;

impl<B: Backend> Shard<B> {
    /// What is done every second or so while reads are queued.
    pub(super) fn tend(&mut self, now: Instant) {
        self.let_joiners_go(now);
        self.look_over(LOOKED_OVER_PER_TEND, now);
        self.find_stalled(now);
    }

    /// Takes reads that nobody waits for any more from those in flight that they joined. The kernel does not write to their
    /// memory, so it need not wait.
    fn let_joiners_go(&mut self, now: Instant) {
        let Some(before) = now.checked_sub(JOINED_FOR) else {
            return;
        };
        let mut left = Vec::new();
        for joiners in self.in_flight.joiners_since(before) {
            joiners.retain(|joiner| {
                if left.len() == LET_GO_PER_TEND {
                    return true;
                }
                let Some(active) = self.actives.get_mut(joiner.active).and_then(Option::as_mut) else {
                    return false;
                };
                let leaves = active.is_unwanted(now);
                if leaves {
                    active.outstanding -= 1;
                    left.push(joiner.active);
                }
                !leaves
            });
        }
        self.unqueue(left.len());
        for key in left {
            self.close_if_done(key, now);
        }
    }

    /// Checks whether the next `count` waiting batches are still wanted, and closes those that are not, so
    /// that they do not hold memory until their turn.
    pub(super) fn look_over(&mut self, count: usize, now: Instant) {
        for _ in 0..count.min(self.actives.len()) {
            let key = self.look_from;
            self.look_from = (key + 1) % self.actives.len();
            let Some(active) = self.actives.get_mut(key).and_then(Option::as_mut) else {
                continue;
            };
            let dropped = if active.waits {
                active.drop_unwanted(now)
            } else {
                0
            };
            let closes = dropped > 0 && active.outstanding == 0;
            self.unqueue(dropped);
            if closes {
                self.close(key, now);
            }
        }
        if self.closed_waiting > CLOSED_WAITING_MAX.max(self.actives.len() / 2) {
            self.forget_closed();
        }
    }

    /// Takes the numbers of closed batches from those that wait.
    fn forget_closed(&mut self) {
        if let Some((turn, bytes)) = self.turn.take() {
            self.turns.took(&turn, bytes, false);
        }
        let (actives, free) = (&self.actives, &mut self.free_actives);
        let mut is_open = |key: usize| {
            let is_open = actives.get(key).is_some_and(Option::is_some);
            if !is_open {
                free.push(key);
            }
            is_open
        };
        self.turns.retain(&mut is_open);
        self.stalled.parked.retain(|key| is_open(*key));
        self.closed_waiting = 0;
    }

    /// Frees the number of a batch that was closed while it waited, and waits no more.
    pub(super) fn forget(&mut self, key: usize) {
        self.closed_waiting -= 1;
        self.free_actives.push(key);
    }
}
