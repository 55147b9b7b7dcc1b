//! The contract on other file systems than the build's, each mounted for one test: ext4 on zram, XFS, and Btrfs with
//! and without compression.
//!
//! They treat O_DIRECT differently: XFS and ext4 read from the device and make a truncation wait; Btrfs still
//! reads compressed extents through the page cache, and then reads and truncation do not exclude each other.

use crate::harness::{Case, Harness, VARIANTS, Variant, ranges_of};
use crate::machine::{FileSystem, Mounted};
use crate::needs::Need;
use crate::suite::Test;
use crate::{files, reads};
use ringfetch_engine::engine::SubmitOptions;
use ringfetch_engine::error::ReadError;
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs every case that reads files, and those of this module.
fn hold_on(kind: FileSystem, variant: Variant) {
    let mounted = Mounted::new(kind).expect("a file system");
    let own: &[Case] = &[("files_cut_while_they_are_read", files_cut_while_they_are_read)];
    for (name, case) in [own, reads::CASES, files::CASES].concat() {
        let _shown = ShownInPanic(name);
        Harness::run_in(mounted.path(), variant, case);
    }
}

/// Names the case when it fails, since the test runs many.
struct ShownInPanic(&'static str);

impl Drop for ShownInPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed in {}", self.0);
        }
    }
}

fn files_cut_while_they_are_read(harness: &Harness) {
    // Scenario: one file after the other is truncated repeatedly while all of it is read over and over.
    // Expectation: every answer is the file's bytes or Truncated; never the kernel's zeros.
    const BLOCK: usize = 16 << 10;
    const BLOCKS: usize = 64;
    for round in 0..ROUNDS {
        let (path, model) = harness.file(&format!("file-{round}"), BLOCKS * BLOCK);
        let dataset = harness.blocks(4096, &[&path]);
        let ranges: Vec<_> = (0..BLOCKS).map(|block| (block * BLOCK, BLOCK)).collect();
        let end = 777;
        let cut = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for step in (0..CUTS).rev() {
                    harness.truncate(&path, (end + step * BLOCKS * BLOCK / (CUTS + 1)) as u64);
                }
                cut.store(true, Ordering::SeqCst);
            });
            let mut last = false;
            while !last {
                last = cut.load(Ordering::SeqCst);
                let answer = harness.fetch_outside(ranges_of(&dataset, &ranges), SubmitOptions::default());
                let answer = answer.unwrap_or_else(|error| panic!("{}: {error}", harness.name()));
                let mut data = answer.data.as_slice();
                for (item, &(offset, length)) in (0..).zip(&ranges) {
                    match answer.errors.iter().find(|error| error.item == item) {
                        Some(failed) => assert_eq!(
                            failed.error,
                            ReadError::Truncated {
                                offset: offset as u64,
                                length: length as u64
                            },
                            "{}",
                            harness.name()
                        ),
                        None => {
                            let (found, rest) = data.split_at(length);
                            data = rest;
                            let wanted = &model[offset..offset + length];
                            let wrong = found
                                .iter()
                                .zip(wanted)
                                .position(|(found, wanted)| found != wanted);
                            assert_eq!(wrong, None, "{}: round {round}, item {item}", harness.name());
                            assert!(
                                !last || offset + length <= end,
                                "{}: item {item} is gone",
                                harness.name()
                            );
                        }
                    }
                }
            }
        });
        std::fs::remove_file(&path).expect("remove");
    }
}

/// Files of one test, and truncations of each.
const ROUNDS: usize = 10;
const CUTS: usize = 40;

/// One test for each file system and some variants, named `file_system::variant`.
pub(crate) fn tests() -> Vec<Test> {
    let chosen = ["uring_direct", "uring_buffered", "auto", "mmap", "pread"];
    let of_kind = |kind: FileSystem| {
        let variants = VARIANTS.iter().filter(|variant| chosen.contains(&variant.name));
        variants.map(move |variant| {
            let ring = variant.has_ring().then_some(Need::IoUring);
            let needs = ring.into_iter().chain([Need::FileSystem(kind)]).collect();
            let name = format!("filesystems::{}::{}", kind.module(), variant.name);
            Test::new(name, needs, move || hold_on(kind, *variant))
        })
    };
    FileSystem::ALL.into_iter().flat_map(of_kind).collect()
}
