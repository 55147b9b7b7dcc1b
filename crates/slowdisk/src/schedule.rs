//! When each read is due: slots and latencies, on a clock that the caller supplies. Pure.
//!
//! A slot that becomes free takes the next waiting read at the moment its last read was due, not when a
//! thread noticed: threads that wake up late do not lower the disk's throughput. 64 slots of 2 ms are 32,000
//! reads a second.

use crate::parameters::Parameters;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

/// A point in time: the time since the disk was mounted.
pub(crate) type At = Duration;

struct Waiting<T> {
    arrived: At,
    service: Duration,
    job: T,
}

struct InService<T> {
    due: At,
    order: u64,
    job: T,
}

/// Reads that wait and reads in service.
pub(crate) struct Schedule<T> {
    waiting: VecDeque<Waiting<T>>,
    in_service: BinaryHeap<InService<T>>,
    /// Nothing starts earlier: the end of the last hold.
    not_before: At,
    order: u64,
}

impl<T> Schedule<T> {
    pub(crate) fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            in_service: BinaryHeap::new(),
            not_before: At::ZERO,
            order: 0,
        }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn in_service(&self) -> usize {
        self.in_service.len()
    }

    /// Accepts a read; it starts now if a slot is free.
    pub(crate) fn arrive(&mut self, now: At, service: Duration, job: T, parameters: &Parameters) {
        self.waiting.push_back(Waiting {
            arrived: now,
            service,
            job,
        });
        self.start(now, parameters);
    }

    /// When the next read is due.
    pub(crate) fn next_due(&self) -> Option<At> {
        self.in_service.peek().map(|read| read.due)
    }

    /// The next read that is due by now; its slot takes the next one.
    pub(crate) fn pop_due(&mut self, now: At, parameters: &Parameters) -> Option<T> {
        if self.next_due()? > now {
            return None;
        }
        let read = self.in_service.pop()?;
        self.start(read.due, parameters);
        Some(read.job)
    }

    /// Starts waiting reads from now on: after a hold, and when there may be more slots than before.
    pub(crate) fn resume(&mut self, now: At, parameters: &Parameters) {
        self.not_before = now;
        self.start(now, parameters);
    }

    /// Removes all reads, in no particular order.
    pub(crate) fn take_all(&mut self) -> Vec<T> {
        let started = std::mem::take(&mut self.in_service).into_vec();
        let waiting = std::mem::take(&mut self.waiting);
        let started = started.into_iter().map(|read| read.job);
        started.chain(waiting.into_iter().map(|read| read.job)).collect()
    }

    fn start(&mut self, free_at: At, parameters: &Parameters) {
        while self.in_service.len() < parameters.concurrency {
            let Some(read) = self.waiting.pop_front() else {
                return;
            };
            let begin = read.arrived.max(free_at).max(self.not_before);
            self.order = self.order.wrapping_add(1);
            self.in_service.push(InService {
                due: begin.saturating_add(read.service),
                order: self.order,
                job: read.job,
            });
        }
    }
}

impl<T> PartialEq for InService<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for InService<T> {}

impl<T> PartialOrd for InService<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for InService<T> {
    // Reversed: the heap's greatest element is the read due first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.order).cmp(&(self.due, self.order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn due(schedule: &mut Schedule<u32>, parameters: &Parameters) -> Vec<(At, u32)> {
        std::iter::from_fn(|| Some((schedule.next_due()?, schedule.pop_due(Duration::MAX, parameters)?)))
            .collect()
    }

    fn slots(concurrency: usize) -> Parameters {
        Parameters {
            concurrency,
            ..Parameters::default()
        }
    }

    #[test]
    fn reads_over_the_concurrency_wait_for_a_slot() {
        // Scenario: five reads of 2 ms at once, two slots. Expectation: due at 2, 2, 4, 4 and 6 ms, in order.
        let (mut schedule, parameters) = (Schedule::new(), slots(2));
        for job in 0..5 {
            schedule.arrive(At::ZERO, 2 * MS, job, &parameters);
        }
        assert_eq!((schedule.in_service(), schedule.waiting()), (2, 3));
        let expected = [(2 * MS, 0), (2 * MS, 1), (4 * MS, 2), (4 * MS, 3), (6 * MS, 4)];
        assert_eq!(due(&mut schedule, &parameters), expected);
    }

    #[test]
    fn nothing_is_answered_before_it_is_due() {
        // Scenario: a read of 2 ms that arrives at 5 ms. Expectation: due at 7 ms, not at 6.9 ms.
        let (mut schedule, parameters) = (Schedule::new(), slots(1));
        schedule.arrive(5 * MS, 2 * MS, 1, &parameters);
        assert_eq!(schedule.next_due(), Some(7 * MS));
        assert_eq!(schedule.pop_due(Duration::from_micros(6900), &parameters), None);
        assert_eq!(schedule.pop_due(7 * MS, &parameters), Some(1));
    }

    #[test]
    fn a_late_thread_costs_no_throughput() {
        // Scenario: one slot, two reads of 2 ms, polled only after 10 ms. Expectation: still due at 2 and at
        // 4 ms.
        let (mut schedule, parameters) = (Schedule::new(), slots(1));
        schedule.arrive(At::ZERO, 2 * MS, 1, &parameters);
        schedule.arrive(At::ZERO, 2 * MS, 2, &parameters);
        assert_eq!(schedule.next_due(), Some(2 * MS));
        assert_eq!(schedule.pop_due(10 * MS, &parameters), Some(1));
        assert_eq!(schedule.next_due(), Some(4 * MS));
        assert_eq!(schedule.pop_due(10 * MS, &parameters), Some(2));
    }

    #[test]
    fn more_slots_start_what_waits() {
        // Scenario: three reads, one slot, then three slots. Expectation: the two waiting reads start when
        // the slots appear.
        let (mut schedule, parameters) = (Schedule::new(), slots(1));
        for job in 0..3 {
            schedule.arrive(At::ZERO, 2 * MS, job, &parameters);
        }
        schedule.resume(MS, &slots(3));
        assert_eq!(
            due(&mut schedule, &slots(3)),
            [(2 * MS, 0), (3 * MS, 1), (3 * MS, 2)]
        );
    }

    #[test]
    fn a_hold_does_not_speed_up_what_waited() {
        // Scenario: two reads, one slot, held from 0 to 100 ms. Expectation: the second starts at 100 ms.
        let (mut schedule, parameters) = (Schedule::new(), slots(1));
        schedule.arrive(At::ZERO, 2 * MS, 1, &parameters);
        schedule.arrive(At::ZERO, 2 * MS, 2, &parameters);
        schedule.resume(100 * MS, &parameters);
        assert_eq!(due(&mut schedule, &parameters), [(2 * MS, 1), (102 * MS, 2)]);
    }

    #[test]
    fn everything_can_be_taken_at_the_end() {
        // Scenario: a slot in use and one read waiting. Expectation: both are returned, none is left.
        let (mut schedule, parameters) = (Schedule::new(), slots(1));
        schedule.arrive(At::ZERO, MS, 1, &parameters);
        schedule.arrive(At::ZERO, MS, 2, &parameters);
        assert_eq!(schedule.take_all(), [1, 2]);
        assert_eq!((schedule.in_service(), schedule.waiting()), (0, 0));
    }
}
