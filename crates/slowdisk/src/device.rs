//! The disk behind the file system: accepts reads, answers each when it is due, counts them.
//!
//! A few threads share one schedule. The one that waits for the next due read passes that duty to another
//! before it answers, so that reads due together are answered in parallel.

use crate::counts::{Counts, Outcome, ReadRecord, Reads};
use crate::error::Error;
use crate::faults::{Fate, Read, decide};
use crate::parameters::Parameters;
use crate::schedule::{At, Schedule};
use fuser::{Errno, FileAttr, ReplyAttr, ReplyData};
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A read with everything needed to answer it.
struct Job {
    read: Read,
    fate: Fate,
    file: Arc<File>,
    reply: ReplyData,
}

struct State {
    parameters: Parameters,
    schedule: Schedule<Job>,
    counts: Counts,
    /// Number of the last read. Resets keep it, since faults depend on it.
    number: u64,
    held: bool,
    /// Queries for attributes that wait for the end of a hold; `None`: they are answered at once.
    held_attributes: Option<Vec<(ReplyAttr, FileAttr)>>,
    closing: bool,
    watchers: usize,
}

/// One disk.
pub(crate) struct Device {
    started: Instant,
    state: Mutex<State>,
    /// Notified when the schedule may have work.
    work: Condvar,
    /// Notified when the counts changed.
    counted: Condvar,
}

impl Device {
    pub(crate) fn new(parameters: Parameters) -> Self {
        let state = State {
            parameters,
            schedule: Schedule::new(),
            counts: Counts::default(),
            number: 0,
            held: false,
            held_attributes: None,
            closing: false,
            watchers: 0,
        };
        Self {
            started: Instant::now(),
            state: Mutex::new(state),
            work: Condvar::new(),
            counted: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> At {
        self.started.elapsed()
    }

    /// Accepts a read. The reply is sent when the read is due.
    pub(crate) fn arrive(
        &self,
        file: Arc<File>,
        (offset, length_bytes): (u64, u32),
        direct: bool,
        reply: ReplyData,
    ) {
        let mut state = self.lock();
        if state.closing {
            drop(state);
            return reply.error(Errno::EIO);
        }
        state.number = state.number.saturating_add(1);
        let read = Read {
            number: state.number,
            offset,
            length_bytes,
            direct,
        };
        let (fate, service) = decide(&state.parameters, read);
        let job = Job {
            read,
            fate,
            file,
            reply,
        };
        let State {
            parameters,
            schedule,
            counts,
            held,
            watchers,
            ..
        } = &mut *state;
        let next_before = schedule.next_due();
        schedule.arrive(self.now(), service, job, parameters);
        counts.arrive(schedule.waiting(), schedule.in_service());
        let is_next = schedule.next_due() != next_before && !*held;
        let watched = *watchers > 0;
        drop(state);
        if is_next {
            self.work.notify_one();
        }
        if watched {
            self.counted.notify_all();
        }
    }

    /// The loop of a worker: answers reads until the disk closes.
    pub(crate) fn serve(&self) {
        // The default slack of 50 us would be most of the inaccuracy. If this fails, the disk is only less
        // precise.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut buffer = Vec::new();
        let mut state = self.lock();
        loop {
            if state.closing {
                let jobs = state.schedule.take_all();
                drop(state);
                for job in jobs {
                    self.answer(job, &mut buffer);
                }
                return;
            }
            let now = self.now();
            let State {
                parameters,
                schedule,
                held,
                ..
            } = &mut *state;
            let popped = if *held {
                None
            } else {
                schedule.pop_due(now, parameters)
            };
            let next = if *held { None } else { schedule.next_due() };
            if let Some(job) = popped {
                drop(state);
                if next.is_some() {
                    self.work.notify_one();
                }
                self.answer(job, &mut buffer);
                state = self.lock();
                continue;
            }
            state = match next {
                None => self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(due) => {
                    let waited = self.work.wait_timeout(state, due.saturating_sub(now));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Reads from the source, counts, and only then replies, so that an answered read is already counted.
    fn answer(&self, job: Job, buffer: &mut Vec<u8>) {
        let Job {
            read,
            fate,
            file,
            reply,
        } = job;
        let length_bytes = match fate {
            Fate::Served => read.length_bytes,
            Fate::Short(length_bytes) => length_bytes,
            Fate::Failed => 0,
        };
        let length = usize::try_from(length_bytes).unwrap_or(0);
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        let got = match fate {
            Fate::Failed => Err(io::Error::from(rustix::io::Errno::IO)),
            Fate::Served | Fate::Short(_) => read_fully(&file, &mut buffer[..length], read.offset),
        };
        let outcome = match (&got, fate) {
            (_, Fate::Failed) => Outcome::Failed,
            (Err(_), _) => Outcome::SourceFailed,
            (Ok(_), Fate::Short(_)) => Outcome::Short,
            (Ok(_), Fate::Served) => Outcome::Served,
        };
        let record = ReadRecord {
            offset: read.offset,
            length_bytes: read.length_bytes,
            direct: read.direct,
            outcome,
        };
        let mut state = self.lock();
        state.counts.answer(record, got.as_ref().copied().unwrap_or(0));
        let watched = state.watchers > 0;
        drop(state);
        if watched {
            self.counted.notify_all();
        }
        match got {
            Ok(length) => reply.data(&buffer[..length]),
            Err(error) => reply.error(error.into()),
        }
    }

    pub(crate) fn parameters(&self) -> Parameters {
        self.lock().parameters.clone()
    }

    pub(crate) fn set<T>(&self, change: impl FnOnce(&mut Parameters) -> T) -> Result<T, Error> {
        let mut state = self.lock();
        let mut next = state.parameters.clone();
        let done = change(&mut next);
        next.check()?;
        let State {
            parameters,
            schedule,
            held,
            ..
        } = &mut *state;
        *parameters = next;
        if !*held {
            schedule.resume(self.now(), parameters);
        }
        drop(state);
        self.work.notify_all();
        Ok(done)
    }

    pub(crate) fn hold(&self, held: bool) {
        let mut state = self.lock();
        let State {
            parameters,
            schedule,
            held: holds,
            ..
        } = &mut *state;
        if *holds && !held {
            schedule.resume(self.now(), parameters);
        }
        *holds = held;
        drop(state);
        self.work.notify_all();
    }

    /// Answers a query for attributes, which are valid for no time, so that each fstat is a query.
    pub(crate) fn attributes(&self, reply: ReplyAttr, attributes: FileAttr) {
        if let Some(held) = &mut self.lock().held_attributes {
            return held.push((reply, attributes));
        }
        reply.attr(&Duration::ZERO, &attributes);
    }

    pub(crate) fn hold_attributes(&self, held: bool) {
        let next = held.then(Vec::new);
        let released = std::mem::replace(&mut self.lock().held_attributes, next);
        for (reply, attributes) in released.into_iter().flatten() {
            reply.attr(&Duration::ZERO, &attributes);
        }
    }

    pub(crate) fn attributes_held(&self) -> usize {
        self.lock().held_attributes.as_ref().map_or(0, Vec::len)
    }

    pub(crate) fn reads(&self) -> Reads {
        Self::reads_of(&self.lock())
    }

    fn reads_of(state: &State) -> Reads {
        state
            .counts
            .reads(state.schedule.waiting(), state.schedule.in_service())
    }

    pub(crate) fn records(&self) -> Vec<ReadRecord> {
        self.lock().counts.records()
    }

    pub(crate) fn reset(&self) {
        self.lock().counts = Counts::default();
    }

    /// Waits for a condition of the counts. `false`: timed out.
    pub(crate) fn wait_until(&self, within: Duration, mut condition: impl FnMut(&Reads) -> bool) -> bool {
        let mut state = self.lock();
        state.watchers = state.watchers.saturating_add(1);
        let unmet = |state: &mut State| !condition(&Self::reads_of(state));
        let waited = self.counted.wait_timeout_while(state, within, unmet);
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state.watchers = state.watchers.saturating_sub(1);
        !timeout.timed_out()
    }

    /// Answers everything at once and ends the workers; later reads fail.
    pub(crate) fn close(&self) {
        self.hold_attributes(false);
        self.lock().closing = true;
        self.work.notify_all();
    }
}

/// Reads as many bytes as the file has there, up to the buffer's length.
fn read_fully(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        let at = offset.saturating_add(u64::try_from(done).unwrap_or(u64::MAX));
        match file.read_at(&mut buffer[done..], at) {
            Ok(0) => break,
            Ok(length) => done = done.saturating_add(length),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
