//! What is measured: one tally per thread, taken and summed by the monitor. A request that failed as a whole
//! has no latency; an item that failed is not a read.

use super::histogram::Durations;
use super::transport::{Body, RequestError, Response};
use super::workload::{Choice, Workload};
use ringfetch_pace::Permit;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// One thread's counts since they were last taken. Only its own thread locks it, except once per interval.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    tally: Mutex<(Tally, Vec<u8>)>,
    in_flight: AtomicU32,
}

/// Counts over a period; only measured requests, unless a field says otherwise.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    /// Requests that were answered.
    pub(crate) requests: u64,
    /// Items that were read.
    pub(crate) reads: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// Requests and items that failed, by code.
    pub(crate) request_errors: BTreeMap<String, u64>,
    pub(crate) item_errors: BTreeMap<String, u64>,
    /// The first error, whole or item, in words.
    pub(crate) first_error: Option<String>,
    /// Bytes that differ from the pattern.
    pub(crate) wrong_bytes: u64,
    /// The first of them, in words.
    pub(crate) first_wrong: Option<String>,
    /// Time that requests were in flight, answered or not, summed.
    pub(crate) in_flight: Duration,
    /// When the last request ended.
    pub(crate) last_end: Option<Instant>,
    /// From the start (in an open loop: the arrival) to the response.
    pub(crate) latency: Durations,
    /// From arrival to sending, for all requests of an open loop.
    pub(crate) lateness: Durations,
    /// Requests that arrived when all slots were busy.
    pub(crate) late: u64,
    /// Requests and reads of each part of the workload.
    pub(crate) parts: Vec<(u64, u64)>,
    /// Items read, measured or not.
    pub(crate) reads_in_all: u64,
}

/// A request in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    permit: Permit,
    at: Instant,
}

impl Recorder {
    /// Marks a request as sent now.
    pub(crate) fn send(&self, permit: Permit, is_open: bool) -> Sent {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        // A closed loop's permit starts now.
        let at = if is_open { Instant::now() } else { permit.start };
        Sent { permit, at }
    }

    /// Counts a request that ended now, and checks its bytes if the workload verifies. Returns when it ended.
    pub(crate) fn end(
        &self,
        workload: &Workload,
        choice: &Choice,
        sent: Sent,
        is_open: bool,
        answer: &Result<Response, RequestError>,
    ) -> Instant {
        let end = Instant::now();
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        let mut guard = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        let (tally, scratch) = &mut *guard;
        if sent.permit.measured {
            tally.in_flight += end.saturating_duration_since(sent.at);
            tally.last_end = tally.last_end.max(Some(end));
            if is_open {
                tally
                    .lateness
                    .record(sent.at.saturating_duration_since(sent.permit.start));
                tally.late += u64::from(sent.permit.late);
            }
        }
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                if sent.permit.measured {
                    count_error(&mut tally.request_errors, &error.label);
                    tally.first_error.get_or_insert_with(|| error.message.clone());
                }
                return end;
            }
        };
        let reads = answer.reads();
        tally.reads_in_all += reads;
        // Those of the warm-up too: bytes are wrong at any time.
        let part = workload.part(choice.part);
        if let Body::Ranked(ranking) = &answer.body
            && answer.failed.is_empty()
            && let Some((problem, places)) = part.check_ranking(&choice.items, ranking)
        {
            // An id and a score are 16 bytes.
            tally.wrong_bytes += places.saturating_mul(16);
            tally.first_wrong.get_or_insert(problem);
        } else if part.verifies() {
            answer.each(|i, bytes| {
                let Some(&item) = choice.items.get(i) else { return };
                if let Some(wrong) = part.check(item, bytes, scratch) {
                    tally.wrong_bytes += wrong.count;
                    tally.first_wrong.get_or_insert_with(|| {
                        format!("{}, byte {}: {wrong}", part.describe(item), wrong.at)
                    });
                }
            });
        }
        if !sent.permit.measured {
            return end;
        }
        tally.requests += 1;
        tally
            .latency
            .record(end.saturating_duration_since(sent.permit.start));
        tally.bytes += answer.bytes;
        tally.reads += reads;
        if tally.parts.len() <= choice.part {
            tally.parts.resize(choice.part + 1, (0, 0));
        }
        let (part_requests, part_reads) = &mut tally.parts[choice.part];
        *part_requests += 1;
        *part_reads += reads;
        for item in &answer.failed {
            count_error(&mut tally.item_errors, &item.label);
            tally.first_error.get_or_insert_with(|| item.message.clone());
        }
        end
    }

    /// Requests in flight now.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// The counts so far; resets them to 0.
    pub(crate) fn take(&self) -> Tally {
        std::mem::take(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner).0)
    }
}

fn count_error(errors: &mut BTreeMap<String, u64>, label: &str) {
    match errors.get_mut(label) {
        Some(count) => *count += 1,
        None => drop(errors.insert(label.to_owned(), 1)),
    }
}

/// Adds counts by code.
pub(crate) fn add_errors(mine: &mut BTreeMap<String, u64>, theirs: &BTreeMap<String, u64>) {
    for (code, count) in theirs {
        *mine.entry(code.clone()).or_default() += count;
    }
}

impl Tally {
    /// Adds another tally's counts.
    pub(crate) fn add(&mut self, other: &Self) {
        add_fields!(self += other: requests, reads, bytes, wrong_bytes, in_flight, late, reads_in_all);
        add_errors(&mut self.request_errors, &other.request_errors);
        add_errors(&mut self.item_errors, &other.item_errors);
        self.first_error = self.first_error.take().or_else(|| other.first_error.clone());
        self.first_wrong = self.first_wrong.take().or_else(|| other.first_wrong.clone());
        self.last_end = self.last_end.max(other.last_end);
        self.latency.add(&other.latency);
        self.lateness.add(&other.lateness);
        self.parts.resize(self.parts.len().max(other.parts.len()), (0, 0));
        for (mine, theirs) in self.parts.iter_mut().zip(&other.parts) {
            mine.0 += theirs.0;
            mine.1 += theirs.1;
        }
    }

    /// Number of failed requests and items.
    pub(crate) fn errors(&self) -> u64 {
        self.request_errors.values().sum::<u64>() + self.item_errors.values().sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn errors_have_no_latency() {
        // Three failed requests of 5 ms each, then one before the window.
        let (recorder, workload) = (Recorder::default(), Workload::of_blocks(10));
        let choice = Choice {
            part: 0,
            items: vec![1],
        };
        let mut end = Instant::now();
        for measured in [true, true, true, false] {
            let permit = Permit {
                start: Instant::now(),
                measured,
                late: false,
            };
            let sent = recorder.send(permit, false);
            assert_eq!(recorder.in_flight(), 1);
            tokio::time::advance(Duration::from_millis(5)).await;
            let ended = recorder.end(&workload, &choice, sent, false, &Err(RequestError::timeout()));
            end = if measured { ended } else { end };
        }
        let tally = recorder.take();
        assert_eq!(
            (tally.requests, tally.errors(), tally.latency.percentile(50.0)),
            (0, 3, None)
        );
        assert_eq!(tally.request_errors["DEADLINE_EXCEEDED"], 3);
        assert_eq!(
            (tally.in_flight, tally.last_end),
            (Duration::from_millis(15), Some(end))
        );
        assert_eq!((recorder.take().errors(), recorder.in_flight()), (0, 0));
    }
}
