//! Batches that nobody waits for any more must not hold memory until their turn: a device may hang, and no turn comes.

use super::Shard;
use crate::backend::Backend;
use std::time::Instant;

/// Waiting batches checked for cancellation for each admitted one.
pub(super) const LOOKED_OVER_PER_BATCH: usize = 2;

/// The same for each heartbeat: batches that wait for a slow device are released even if nothing else
/// happens.
pub(super) const LOOKED_OVER_PER_BEAT: usize = 4096;

/// Closed batches that keep their number until their turn. If there are more, and every second number is such a one, they are
/// searched for.
const CLOSED_WAITING_MAX: usize = 64;

impl<B: Backend> Shard<B> {
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
