//! Reads by copying from a mapping. Each batch is announced to the kernel first, so that its pages are
//! fetched together before they are copied (17k to 75k reads/s on one thread, cold: MEASURED). Best for warm
//! data.
//!
//! Invariants: `poll_completions` makes attempts in order, a few at a time, on the calling thread, which a
//! cold page blocks: never use a network thread. Attempts that arrive meanwhile are announced before the next
//! ones are copied. Truncation and device errors are reported as `pread` reports them: a copy that faults is
//! repeated by `pread`, and copied bytes count only up to the file's length *after* the copy, since the
//! kernel shows zeros between the end of the file and the end of its last page. A file that cannot be mapped
//! is read by `pread`, with a warning. Without the guarded copy (any architecture but x86-64) the mapping
//! only announces, and every read is a `pread`. No direct I/O: a mapping cannot do it.
//! For `auto`, on a network thread, nothing may wait: attempts that cannot be copied at once are returned to it.

mod announce;
mod announce_policy;

use super::lengths::Lengths;
use super::map::Mapping;
use super::pread::pread_attempt;
use super::{Attempt, Backend, Completion, ReadSource};
use crate::dataset::{HeldFile, OpenFile, bytes_before};
use crate::shard::TURN_COPY_BYTES;
use announce::Announcer;
use announce_policy::AnnouncePolicy;
pub(super) use announce_policy::{major_faults, waits};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Most attempts in one go, before others can be announced: a batch of the usual size.
const MADE_AT_ONCE: usize = 64;

/// Attempts between two looks at the clock: on a slow device with nothing announced, each of them waits.
const MADE_PER_LOOK: usize = 8;

/// Longest time in one go, checked every [`MADE_PER_LOOK`] attempts: a shard answers heartbeats between two
/// goes.
const MADE_FOR: Duration = Duration::from_millis(10);

/// See the module.
#[derive(Debug)]
pub(crate) struct MmapBackend {
    /// `None`: announcing is turned off.
    announcer: Option<Announcer>,
    announce_policy: AnnouncePolicy,
    /// Started and not yet made, oldest first.
    waiting: VecDeque<Attempt>,
    made: Vec<FinishedCopy>,
    /// Bytes copied since the last `take_copied`, and the most in one go.
    copied: u64,
    copies_max: u64,
    copy: CopyAttempt,
    /// Attempts that could not be copied; `None`: `pread` reads them.
    uncopied: Option<Vec<Attempt>>,
    /// Each file's length after this turn's copies; kept between turns for its memory only.
    lengths: Lengths,
}

/// Copies an attempt's bytes, of which those before the end of the file count. `None`: it cannot.
///
/// # Safety
/// As [`Attempt`] promises: nobody else touches its memory until it is reported.
pub(super) type CopyAttempt = unsafe fn(&Attempt) -> Option<u32>;

/// An attempt that was made and not yet reported.
#[derive(Debug)]
struct FinishedCopy {
    slot: u32,
    outcome: CopyOutcome,
}

#[derive(Debug)]
enum CopyOutcome {
    /// Must be checked against the file's length.
    Copied {
        file: HeldFile,
        offset: u64,
        length: u32,
    },
    /// By `pread`: final.
    Read(Result<u32, i32>),
}

impl MmapBackend {
    /// `announce`: tell the kernel about reads before they are made (`engine.mmap.announce`).
    pub(crate) fn new(announce: bool) -> Self {
        Self {
            announcer: announce.then(Announcer::new),
            announce_policy: AnnouncePolicy::default(),
            waiting: VecDeque::new(),
            made: Vec::new(),
            copied: 0,
            copies_max: TURN_COPY_BYTES,
            // SAFETY: as the caller promises.
            copy: |attempt| unsafe {
                copy_mapped(&attempt.file, attempt.offset, attempt.destination, attempt.length)
            },
            uncopied: None,
            lengths: Lengths::default(),
        }
    }

    /// Makes attempts only by `copy`, announces nothing, and leaves the others to [`Self::take_uncopied`].
    pub(super) fn copying(copy: CopyAttempt) -> Self {
        Self {
            copy,
            uncopied: Some(Vec::new()),
            ..Self::new(false)
        }
    }

    /// Whether attempts wait to be made.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// An attempt that could not be copied, and is not reported.
    pub(super) fn take_uncopied(&mut self) -> Option<Attempt> {
        self.uncopied.as_mut()?.pop()
    }

    fn make(&mut self, attempt: Attempt) {
        if let Some(next) = self.waiting.front()
            && let Some(mapping) = mapping_of(&next.file)
        {
            mapping.prefetch(next.offset);
        }
        // SAFETY: the shard keeps the attempt's memory for us until it is reported.
        let copied = unsafe { (self.copy)(&attempt) };
        let outcome = match (copied, &mut self.uncopied) {
            (Some(length), _) => CopyOutcome::Copied {
                file: attempt.file,
                offset: attempt.offset,
                length,
            },
            (None, Some(uncopied)) => return uncopied.push(attempt),
            // SAFETY: as above.
            (None, None) => CopyOutcome::Read(unsafe {
                pread_attempt(&Attempt {
                    direct: false,
                    ..attempt
                })
            }),
        };
        self.made.push(FinishedCopy {
            slot: attempt.slot,
            outcome,
        });
    }
}

impl Backend for MmapBackend {
    fn announce(&mut self, attempts: &[Attempt]) {
        let Some(announcer) = &mut self.announcer else {
            return;
        };
        let first = attempts.first().map_or(0, |attempt| attempt.slot);
        let probe = match self.announce_policy.next_group(first) {
            announce_policy::GroupDecision::Announced => None,
            announce_policy::GroupDecision::Probed(slot) => Some(slot),
            announce_policy::GroupDecision::Unannounced => return,
        };
        let pages = attempts
            .iter()
            .filter(|attempt| Some(attempt.slot) != probe)
            .filter_map(|attempt| {
                let mapping = mapping_of(&attempt.file)?;
                mapping.pages(attempt.offset, attempt.length)
            });
        announcer.announce(pages);
    }

    fn start(&mut self, attempt: Attempt) -> ReadSource {
        self.waiting.push_back(attempt);
        ReadSource::Device
    }

    fn flush(&mut self) -> u32 {
        self.announcer.as_mut().map_or(0, Announcer::take_calls)
    }

    fn poll_completions(&mut self, _: &mut Context<'_>, finished: &mut Vec<Completion>) -> Poll<()> {
        let faults = (self.announcer.is_some() && !self.announce_policy.is_announcing()).then(major_faults);
        let (began, mut bytes) = (Instant::now(), 0);
        for number in 1..=MADE_AT_ONCE {
            let Some(attempt) = self.waiting.pop_front() else {
                break;
            };
            bytes += u64::from(attempt.length);
            if self.announce_policy.is_probe(attempt.slot) {
                let before = major_faults();
                self.make(attempt);
                self.announce_policy.probed(major_faults() > before);
            } else {
                self.make(attempt);
            }
            if bytes >= self.copies_max || (number % MADE_PER_LOOK == 0 && began.elapsed() >= MADE_FOR) {
                break;
            }
        }
        self.copied += bytes;
        if faults.is_some_and(|before| major_faults() > before) {
            self.announce_policy.faulted();
        }
        if self.made.is_empty() {
            // No attempt waits, so nothing will have to wake the task. (`auto` submits what was not copied, and goes on.)
            return Poll::Pending;
        }
        self.lengths.forget();
        let lengths = &mut self.lengths;
        finished.extend(self.made.drain(..).map(|FinishedCopy { slot, outcome }| {
            let result = match outcome {
                CopyOutcome::Read(result) => result,
                CopyOutcome::Copied { file, offset, length } => lengths.kept(&file, offset, length),
            };
            Completion { slot, result }
        }));
        Poll::Ready(())
    }

    fn shared_depth(&self, depth: u32) -> u32 {
        // Reads wait for this thread; only their pages wait for the device.
        depth
    }

    fn shares(&self) -> bool {
        false
    }

    fn bound_copies(&mut self, bytes: u64) {
        self.copies_max = bytes;
    }

    fn take_copied(&mut self) -> u64 {
        std::mem::take(&mut self.copied)
    }
}

/// Copies bytes from a file's mapping, of which those before the end of the file count; a page that is not resident blocks
/// the thread. Returns fewer than `length` where the mapping ends; `None` if it cannot be read there, or there is none.
///
/// # Safety
/// `destination` has `length` bytes, which nobody else touches.
pub(super) unsafe fn copy_mapped(
    file: &OpenFile,
    offset: u64,
    destination: *mut u8,
    length: u32,
) -> Option<u32> {
    let mapping = mapping_of(file)?;
    // SAFETY: as the caller promises.
    unsafe { mapping.copy_out(offset, destination, length) }.ok()
}

/// How many of `copied` bytes from `offset` belong to the file. `is_end_resident`: the last page is probably resident, so
/// look there for a truncation before asking the kernel.
///
/// # Errors
/// errno of statx.
pub(super) fn kept_of_copy(
    file: &OpenFile,
    offset: u64,
    copied: u32,
    is_end_resident: bool,
) -> Result<u32, i32> {
    // The pages behind a new end of a device stay mapped.
    let vouches = is_end_resident && !file.is_block_device();
    if vouches
        && mapping_of(file).is_some_and(|mapping| mapping.is_untruncated_before(offset + u64::from(copied)))
    {
        return Ok(copied);
    }
    bytes_before(file.known_length(), offset, copied)
}

/// Whether every page of these bytes is in memory and up to date, unlike one whose read has only begun; false if unknown, or
/// without a mapping.
pub(super) fn is_up_to_date(file: &OpenFile, offset: u64, length: u32) -> bool {
    mapping_of(file).is_some_and(|mapping| mapping.is_up_to_date(offset, length))
}

/// The file's mapping; `None` if it has none, and `pread` reads it.
fn mapping_of(file: &OpenFile) -> Option<&Mapping> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    Mapping::of(file)
        .inspect_err(|&errno| {
            // Once per process: a dataset of many such objects would fill the log.
            if !WARNED.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    error = %std::io::Error::from_raw_os_error(errno),
                    "a file cannot be mapped and is read with pread; others may follow without a warning \
                     (ENOMEM: raise vm.max_map_count; ENODEV: its file system cannot map)"
                );
            }
        })
        .ok()
}

#[cfg(test)]
mod tests {
    use super::super::trait_suite::{Read, Sample, make_all};
    use super::*;

    #[test]
    fn a_batch_is_announced_by_few_calls() {
        // Scenario: two batches of 64 scattered reads; then one with announcing turned off. Expectation: the
        // second batch takes one call (or one per read, on a kernel without process_madvise); turned off,
        // none.
        let page = rustix::param::page_size();
        let sample = Sample::new(256 * page);
        let mut backend = MmapBackend::new(true);
        let batch = || {
            (0..64)
                .map(|number| Read::new((4 * number * page) as u64, 100))
                .collect::<Vec<Read>>()
        };
        make_all(&mut backend, &sample.file, &mut batch());
        assert!([1, 64].contains(&make_all(&mut backend, &sample.file, &mut batch())));
        assert_eq!(
            make_all(&mut MmapBackend::new(false), &sample.file, &mut batch()),
            0
        );
    }

    #[test]
    fn a_file_without_a_mapping_is_read_all_the_same() {
        // Scenario: another backend has taken the file's slot, so the file cannot be mapped. Expectation: its
        // bytes.
        let sample = Sample::new(10_000);
        sample
            .file
            .attached
            .set(Box::new("taken"))
            .expect("an empty slot");
        let mut reads = [Read::new(100, 1000), Read::new(9_500, 1000)];
        make_all(&mut MmapBackend::new(true), &sample.file, &mut reads);
        assert_eq!(reads[0].result, Some(Ok(1000)));
        assert!(reads[0].memory == sample.bytes[100..1100]);
        assert_eq!(reads[1].result, Some(Ok(500)));
    }
}
