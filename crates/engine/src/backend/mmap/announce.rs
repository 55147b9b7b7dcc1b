//! Announces the pages that a batch is about to read: MADV_WILLNEED, in one system call for all ranges if the
//! kernel supports that, else one per range.
//!
//! Only a hint: errors are ignored. The first batch finds out which call works.

use rustix::mm::Advice;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::os::fd::{AsRawFd, OwnedFd};

/// Most ranges in one call (IOV_MAX of the kernel).
const RANGES_MAX: usize = 1024;
/// "This process" in place of a pidfd (linux/fcntl.h); kernels before 6.15 answer EBADF.
const PIDFD_SELF: i32 = -10_000;

#[derive(Debug)]
pub(super) struct Announcer {
    call: AdviseCall,
    ranges: Vec<Range>,
    calls: u32,
}

#[derive(Debug)]
enum AdviseCall {
    /// `process_madvise` on PIDFD_SELF.
    VectoredSelf,
    /// `process_madvise` on a pidfd of our own.
    Vectored(OwnedFd),
    /// `madvise`, one call per range: an old kernel, or a seccomp filter (Docker's wants CAP_SYS_PTRACE).
    Each,
}

/// Whole pages, laid out as `struct iovec`; the address is never dereferenced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Range {
    start: usize,
    length: usize,
}

const _: () = assert!(size_of::<Range>() == size_of::<libc::iovec>());
const _: () = assert!(align_of::<Range>() == align_of::<libc::iovec>());

impl Announcer {
    pub(super) fn new() -> Self {
        Self {
            call: AdviseCall::VectoredSelf,
            ranges: Vec::new(),
            calls: 0,
        }
    }

    /// Announces ranges of pages, each (first address, one past the last), of live mappings. Ranges that touch or
    /// overlap their predecessor are announced as one.
    pub(super) fn announce(&mut self, pages: impl Iterator<Item = (usize, usize)>) {
        self.ranges.clear();
        coalesce(pages, &mut self.ranges);
        for start in (0..self.ranges.len()).step_by(RANGES_MAX) {
            let end = self.ranges.len().min(start + RANGES_MAX);
            self.advise(start, end);
        }
    }

    /// System calls made since `take_calls` was last called.
    pub(super) fn take_calls(&mut self) -> u32 {
        std::mem::take(&mut self.calls)
    }

    fn advise(&mut self, start: usize, end: usize) {
        let ranges = &self.ranges[start..end];
        // A single range needs no vector: madvise is cheaper.
        while ranges.len() > 1 {
            let pidfd = match &self.call {
                AdviseCall::VectoredSelf => PIDFD_SELF,
                AdviseCall::Vectored(pidfd) => pidfd.as_raw_fd(),
                AdviseCall::Each => break,
            };
            self.calls += 1;
            match (process_madvise(pidfd, ranges), &self.call) {
                (Ok(()), _) => return,
                (Err(libc::EBADF), AdviseCall::VectoredSelf) => {
                    self.call = pidfd_open(getpid(), PidfdFlags::empty())
                        .map_or(AdviseCall::Each, AdviseCall::Vectored);
                }
                // These errors mean that it never works here.
                (Err(libc::ENOSYS | libc::EPERM | libc::EINVAL | libc::EBADF), _) => {
                    self.call = AdviseCall::Each;
                }
                // Any other error concerns these pages, and the copy reports it.
                (Err(_), _) => return,
            }
        }
        for range in ranges {
            let start = std::ptr::without_provenance_mut(range.start);
            // SAFETY: WILLNEED changes no contents, and the attempts hold the mapping that these pages belong to.
            let _ = unsafe { rustix::mm::madvise(start, range.length, Advice::WillNeed) };
            self.calls += 1;
        }
    }
}

fn process_madvise(pidfd: i32, ranges: &[Range]) -> Result<(), i32> {
    // SAFETY: `ranges` is laid out as an array of iovec, of the length given; WILLNEED changes no contents.
    let advised = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd,
            ranges.as_ptr(),
            ranges.len(),
            libc::MADV_WILLNEED,
            0_u32,
        )
    };
    if advised >= 0 {
        return Ok(());
    }
    Err(std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EINVAL))
}

/// The planner sorts a batch, so comparing with the predecessor finds nearly all neighbours: 0..4096, 4096..12288
/// becomes 0..12288.
fn coalesce(pages: impl Iterator<Item = (usize, usize)>, ranges: &mut Vec<Range>) {
    for (start, end) in pages {
        match ranges.last_mut() {
            Some(last) if last.start <= start && start <= last.start + last.length => {
                last.length = last.length.max(end - last.start);
            }
            _ => ranges.push(Range {
                start,
                length: end - start,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn ranges_of(pages: &[(usize, usize)]) -> Vec<(usize, usize)> {
        let mut ranges = Vec::new();
        coalesce(pages.iter().copied(), &mut ranges);
        ranges.iter().map(|range| (range.start, range.length)).collect()
    }

    #[test]
    fn neighbours_are_announced_as_one() {
        // Scenario: ranges that touch, overlap, repeat, lie inside, lie apart, or go backwards. Expectation:
        // one range for each run of the first four.
        assert_eq!(ranges_of(&[]), []);
        assert_eq!(ranges_of(&[(0, 4096), (4096, 12_288)]), [(0, 12_288)]);
        assert_eq!(
            ranges_of(&[(0, 8192), (4096, 12_288), (4096, 12_288)]),
            [(0, 12_288)]
        );
        assert_eq!(
            ranges_of(&[(0, 12_288), (4096, 8192), (12_288, 16_384)]),
            [(0, 16_384)]
        );
        assert_eq!(ranges_of(&[(0, 4096), (8192, 12_288)]), [(0, 4096), (8192, 4096)]);
        assert_eq!(ranges_of(&[(8192, 12_288), (0, 4096)]), [(8192, 4096), (0, 4096)]);
    }

    /// A mapping with `count` pages that do not touch.
    fn scattered(count: usize) -> (super::super::Mapping, Vec<(usize, usize)>) {
        let page = rustix::param::page_size();
        let file = tempfile::tempfile().expect("temporary file");
        let length = 2 * (count * page) as u64;
        file.set_len(length).expect("a sparse file");
        let mapping = super::super::Mapping::new(file.as_fd(), length).expect("mapped");
        let pages = (0..count)
            .map(|number| mapping.pages(2 * (number * page) as u64, 1).expect("inside"))
            .collect();
        (mapping, pages)
    }

    #[test]
    fn a_batch_takes_one_call() {
        // Scenario: 1, 2, 1024 and 1025 ranges. Expectation: one call for each 1024 of them, where the kernel
        // has the vectored call (once the first batch has found out which one works); else one per range.
        let (_mapping, pages) = scattered(1025);
        let mut announcer = Announcer::new();
        announcer.announce(pages[..2].iter().copied());
        assert!(announcer.take_calls() >= 1);
        let vectored = !matches!(announcer.call, AdviseCall::Each);
        for (count, calls) in [(0, 0), (1, 1), (2, 1), (1024, 1), (1025, 2)] {
            announcer.announce(pages[..count].iter().copied());
            let expected = if vectored {
                calls
            } else {
                u32::try_from(count).expect("small")
            };
            assert_eq!(announcer.take_calls(), expected, "{count} ranges");
            assert_eq!(announcer.take_calls(), 0);
        }
    }

    #[test]
    fn each_way_of_telling_works() {
        // Scenario: an invalid pidfd, a kernel that wants a real one, and one that has only madvise.
        // Expectation: every batch is announced, by falling back where needed, without an error.
        let (_mapping, pages) = scattered(3);
        let not_a_pidfd = tempfile::tempfile().expect("temporary file").into();
        let own = pidfd_open(getpid(), PidfdFlags::empty()).map_or(AdviseCall::Each, AdviseCall::Vectored);
        for call in [AdviseCall::Vectored(not_a_pidfd), own, AdviseCall::Each] {
            let case = format!("{call:?}");
            let mut announcer = Announcer {
                call,
                ranges: Vec::new(),
                calls: 0,
            };
            announcer.announce(pages.iter().copied());
            assert!(announcer.take_calls() >= 1, "{case}");
        }
    }
}
