//! The connections: n HTTP/2 channels to one address, of which the least busy is taken. Invariant: a lease counts on
//! its channel for as long as it lives. Reconnecting is the channels' own business.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tonic::transport::Channel;

/// A channel and how many leases are on it.
#[derive(Debug)]
struct Slot {
    channel: Channel,
    outstanding: AtomicUsize,
}

/// The channels of one client.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: Vec<Arc<Slot>>,
    /// Where the next search begins, so that equally busy channels take turns.
    turn: AtomicUsize,
}

impl Pool {
    /// A pool of at least one channel.
    pub(crate) fn new(first: Channel, others: impl IntoIterator<Item = Channel>) -> Self {
        let slots = std::iter::once(first)
            .chain(others)
            .map(|channel| {
                Arc::new(Slot {
                    channel,
                    outstanding: AtomicUsize::new(0),
                })
            })
            .collect();
        Self {
            slots,
            turn: AtomicUsize::new(0),
        }
    }

    /// The channel with the fewest leases. Under contention it may be one of the fewest: the counts are only read.
    pub(crate) fn lease(&self) -> Lease {
        let count = self.slots.len();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut best = &self.slots[turn % count];
        let mut best_outstanding = best.outstanding.load(Ordering::Relaxed);
        for step in 1..count {
            if best_outstanding == 0 {
                break;
            }
            let slot = &self.slots[turn.wrapping_add(step) % count];
            let outstanding = slot.outstanding.load(Ordering::Relaxed);
            if outstanding < best_outstanding {
                (best, best_outstanding) = (slot, outstanding);
            }
        }
        best.outstanding.fetch_add(1, Ordering::Relaxed);
        Lease {
            slot: Arc::clone(best),
        }
    }
}

/// The use of one channel, for a call or for a stream's life.
#[derive(Debug)]
pub(crate) struct Lease {
    slot: Arc<Slot>,
}

impl Lease {
    /// The channel, for one call.
    pub(crate) fn channel(&self) -> Channel {
        self.slot.channel.clone()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.slot.outstanding.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::transport::Endpoint;

    #[tokio::test]
    async fn the_least_busy_channel_is_taken() {
        // Scenario: three channels, six leases, then the two of one channel are dropped and two more taken.
        // Expected: two leases on each channel, and both new ones on the channel that became free.
        let channel = || Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let pool = Pool::new(channel(), [channel(), channel()]);
        let counts = |pool: &Pool| -> Vec<usize> {
            pool.slots
                .iter()
                .map(|slot| slot.outstanding.load(Ordering::Relaxed))
                .collect()
        };
        let mut leases: Vec<Lease> = (0..6).map(|_| pool.lease()).collect();
        assert_eq!(counts(&pool), [2, 2, 2]);
        leases.retain(|lease| !Arc::ptr_eq(&lease.slot, &pool.slots[1]));
        assert_eq!(counts(&pool), [2, 0, 2]);
        leases.push(pool.lease());
        leases.push(pool.lease());
        assert_eq!(counts(&pool), [2, 2, 2]);
    }
}
