//! Tries direct reads before they are relied on: some drivers accept memory that they then handle wrongly.
//!
//! zram (4,096-byte sectors, kernel 6.18) announces that 512-byte aligned memory is enough. It then reads a
//! whole page into the whole page around the destination, so the result is wrong and neighbouring bytes are
//! lost. So a trial reads into pages of its own, compares with a buffered read, and checks the bytes around.

use super::direct::{Alignment, Misread, is_refusal};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Alignment that every driver supports: whole pages.
const PAGE_BYTES: usize = 4096;
const WHOLE_PAGES: u32 = 4096;

/// Bytes of a trial read: with memory off the page boundary, a partial page at each end and a whole one
/// between.
const READ_BYTES: usize = 2 * PAGE_BYTES;

/// First page of a trial read in the trial's memory, and number of pages in all. The bytes around the read
/// are checked afterwards.
const FIRST_PAGE: usize = 2;
const PAGES: usize = 8;

/// Value of the bytes around a trial read before it.
const CANARY: u8 = 0xA5;

/// How often a trial is repeated while another process writes to the compared bytes.
const CHANGING_ATTEMPTS: u32 = 4;

/// The two ways to read a file, as a trial uses them.
pub(super) trait TrialFile {
    /// Reads from offset 0 past the page cache into `place` of `memory`; returns the bytes read.
    fn direct(&mut self, memory: &mut [u8], place: Range<usize>) -> io::Result<usize>;

    /// Fills `memory` from offset 0 through the page cache; returns the bytes read, fewer only at the end of the file.
    fn buffered(&mut self, memory: &mut [u8]) -> io::Result<usize>;
}

/// An open file, by its two descriptors.
pub(super) struct Descriptors<'a> {
    pub(super) direct: &'a File,
    pub(super) buffered: &'a File,
}

impl TrialFile for Descriptors<'_> {
    fn direct(&mut self, memory: &mut [u8], place: Range<usize>) -> io::Result<usize> {
        let place = memory.get_mut(place).ok_or(io::ErrorKind::InvalidInput)?;
        uninterrupted(|| self.direct.read_at(place, 0))
    }

    fn buffered(&mut self, memory: &mut [u8]) -> io::Result<usize> {
        // The page cache may lack what another host wrote to a shared device.
        let length = std::num::NonZeroU64::new(READ_BYTES as u64);
        let _hint = rustix::fs::fadvise(self.buffered, 0, length, rustix::fs::Advice::DontNeed);
        let mut filled = 0;
        while let Some(rest) = memory.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match uninterrupted(|| self.buffered.read_at(rest, filled as u64))? {
                0 => break,
                bytes => filled += bytes,
            }
        }
        Ok(filled)
    }
}

fn uninterrupted(mut read: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match read() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// The alignment at which direct reads work: the announced one, or whole pages of memory if that one fails.
/// `Ok(Err)` says why there is none.
///
/// # Errors
/// The device fails.
pub(super) fn find(
    reads: &mut impl TrialFile,
    announced: Alignment,
) -> io::Result<Result<Alignment, String>> {
    let Some(misread) = attempt(reads, announced.memory_bytes as usize)? else {
        return Ok(Ok(announced));
    };
    let whole_pages = Alignment {
        memory_bytes: WHOLE_PAGES,
        disproved: Some((announced.memory_bytes, misread)),
        ..announced
    };
    if announced.memory_bytes >= whole_pages.memory_bytes {
        return Ok(Err(describe(announced.memory_bytes, misread)));
    }
    Ok(match attempt(reads, PAGE_BYTES)? {
        None => Ok(whole_pages),
        Some(misread) => Err(describe(whole_pages.memory_bytes, misread)),
    })
}

fn describe(memory_bytes: u32, misread: Misread) -> String {
    match misread {
        Misread::Refused => "EINVAL".to_owned(),
        Misread::WrongBytes | Misread::OverwroteNeighbours => {
            format!("tried: {memory_bytes}-byte aligned memory {misread}")
        }
    }
}

/// Reads once into memory aligned to exactly `memory_bytes`; `None` if all is well.
///
/// Worked, 512: a read of 8,192 bytes to 2 * 4096 + 512 touches pages 2 to 4 of the memory.
fn attempt(reads: &mut impl TrialFile, memory_bytes: usize) -> io::Result<Option<Misread>> {
    let mut room = vec![0_u8; (PAGES + 1) * PAGE_BYTES];
    let skip = room.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
    let memory = room.get_mut(skip..).unwrap_or_default();
    let start = FIRST_PAGE * PAGE_BYTES + memory_bytes % PAGE_BYTES;
    let place = start..start + READ_BYTES;
    let (mut before, mut after) = (vec![0; READ_BYTES], vec![0; READ_BYTES]);
    for _ in 0..CHANGING_ATTEMPTS {
        let length = reads.buffered(&mut before)?;
        memory.fill(CANARY);
        // A value that is wrong for every byte that the read leaves unchanged.
        for (byte, expected) in memory.iter_mut().skip(start).zip(&before) {
            *byte = !expected;
        }
        let read = match reads.direct(memory, place.clone()) {
            Ok(read) => read.min(READ_BYTES),
            Err(error) if is_refusal(&error) => return Ok(Some(Misread::Refused)),
            Err(error) => return Err(error),
        };
        let outside = memory
            .iter()
            .take(place.start)
            .chain(memory.iter().skip(place.end));
        if outside.copied().any(|byte| byte != CANARY) {
            return Ok(Some(Misread::OverwroteNeighbours));
        }
        let same = |expected: &[u8]| {
            let both = read.min(length);
            memory
                .iter()
                .skip(start)
                .take(both)
                .eq(expected.iter().take(both))
        };
        if same(&before) {
            return Ok(None);
        }
        let length_after = reads.buffered(&mut after)?;
        if (length, &before) == (length_after, &after) {
            return Ok(Some(Misread::WrongBytes));
        }
    }
    // The file is being written to all the time, but nothing around the destination changed.
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file whose direct reads fail in these ways.
    struct Device {
        bytes: Vec<u8>,
        /// Writes whole pages into the whole pages around the destination, as zram does.
        whole_pages: bool,
        /// Returns zeros in place of the bytes.
        zeros: bool,
        /// Refuses memory that is not aligned to this.
        demands: usize,
        /// Changes a byte at each buffered read.
        changes: bool,
    }

    fn sound() -> Device {
        Device {
            bytes: (0..10_000_u16)
                .map(|number| number.to_le_bytes()[0] ^ 0x5C)
                .collect(),
            whole_pages: false,
            zeros: false,
            demands: 1,
            changes: false,
        }
    }

    impl TrialFile for Device {
        fn direct(&mut self, memory: &mut [u8], place: Range<usize>) -> io::Result<usize> {
            if !place.start.is_multiple_of(self.demands) {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            let length = place.len().min(self.bytes.len());
            memory[place.start..place.start + length].copy_from_slice(&self.bytes[..length]);
            if self.zeros {
                memory[place.clone()].fill(0);
            }
            if self.whole_pages {
                let around = place.start / 4096 * 4096..place.end.next_multiple_of(4096);
                for (target, source) in memory[around].iter_mut().zip(self.bytes.iter().cycle()) {
                    *target = *source;
                }
            }
            Ok(length)
        }

        fn buffered(&mut self, memory: &mut [u8]) -> io::Result<usize> {
            if self.changes {
                self.bytes[0] = self.bytes[0].wrapping_add(1);
            }
            let length = memory.len().min(self.bytes.len());
            memory[..length].copy_from_slice(&self.bytes[..length]);
            if self.changes {
                self.bytes[1] = self.bytes[1].wrapping_add(1);
            }
            Ok(length)
        }
    }

    fn announced(memory_bytes: u32) -> Alignment {
        Alignment {
            offset_bytes: 512,
            memory_bytes,
            source: "said",
            disproved: None,
        }
    }

    #[test]
    fn what_is_announced_is_kept_where_it_is_true() {
        // Scenario: a sound file, one shorter than a sector, and one that is written to all the time.
        // Expectation: the announced alignment.
        let mut short = sound();
        short.bytes.truncate(100);
        let mut busy = sound();
        busy.changes = true;
        for mut device in [sound(), short, busy] {
            for memory_bytes in [4, 512, 4096] {
                assert_eq!(
                    find(&mut device, announced(memory_bytes)).unwrap(),
                    Ok(announced(memory_bytes))
                );
            }
        }
    }

    #[test]
    fn memory_that_a_driver_gets_wrong_is_given_up_for_whole_pages() {
        // Scenario: a driver that overwrites the pages around the destination, with data and with only zeros;
        // one that refuses. Expectation: whole pages, and what was wrong with less.
        let mut empty = sound();
        empty.bytes.fill(0);
        empty.whole_pages = true;
        let mut overwriting = sound();
        overwriting.whole_pages = true;
        let mut refusing = sound();
        refusing.demands = 4096;
        for (mut device, misread) in [
            (empty, Misread::OverwroteNeighbours),
            (overwriting, Misread::OverwroteNeighbours),
            (refusing, Misread::Refused),
        ] {
            let found = find(&mut device, announced(512)).unwrap().unwrap();
            assert_eq!((found.offset_bytes, found.memory_bytes), (512, 4096));
            assert_eq!(found.disproved, Some((512, misread)));
        }
    }

    #[test]
    fn a_file_that_no_memory_suits_is_refused_with_the_reason() {
        // Scenario: direct reads return zeros, are refused, or fail. Expectation: two reasons and an error.
        let mut zeros = sound();
        zeros.zeros = true;
        let reason = find(&mut zeros, announced(512)).unwrap().unwrap_err();
        assert_eq!(reason, "tried: 4096-byte aligned memory gets wrong bytes");
        let mut refusing = sound();
        refusing.demands = 1 << 20;
        assert_eq!(
            find(&mut refusing, announced(512)).unwrap(),
            Err("EINVAL".to_owned())
        );

        struct Failing;
        impl TrialFile for Failing {
            fn direct(&mut self, _: &mut [u8], _: Range<usize>) -> io::Result<usize> {
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            fn buffered(&mut self, memory: &mut [u8]) -> io::Result<usize> {
                Ok(memory.len())
            }
        }
        let error = find(&mut Failing, announced(512)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
}
