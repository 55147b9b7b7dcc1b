//! Refuses measurements that would mislead, unless forced; a forced report says so.

use crate::args::Common;
use crate::error::LabError;
use crate::facts::{Memory, memory};
use crate::job::DIRECT;
use crate::material::Material;
use crate::refuse;
use crate::study::Needs;
use ringfetch_baselines::Buffer;
use ringfetch_command::quantity::{approximate, size};
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

pub(crate) const REPETITIONS_MIN: u32 = 5;
/// Data with a larger share of holes are not read from a device.
const HOLES_SHARE_MAX: f64 = 0.05;
/// The device must deliver at least this share of what is read past the page cache.
const DEVICE_SHARE_MIN: f64 = 0.9;
/// Warm data may use at most this share of memory, since the rest is used too.
const WARM_SHARE_OF_MEMORY: f64 = 0.5;
const PROBED_READS: u64 = 64;
const PROBED_BYTES: usize = 4096;

/// Reasons why figures of this build and these options would mislead, whatever is read: known before data are
/// made.
pub(crate) fn objections_to_run(repetitions: u32) -> Vec<String> {
    let mut found = Vec::new();
    if cfg!(debug_assertions) {
        found.push("this is a debug build, which measures itself: build with --release".to_owned());
    }
    if repetitions < REPETITIONS_MIN {
        found.push(format!(
            "--repetitions: {repetitions} are too few to tell chance from cause: at least {REPETITIONS_MIN}"
        ));
    }
    found
}

/// The objection to data in memory.
pub(crate) const IN_MEMORY: &str = "--path: the file system is memory (tmpfs): it has no cold reads";

/// Refuses a study whose figures would mislead, unless it is forced, before it makes data of this length below
/// `--path`: `option` sets the length.
pub(crate) fn check_before_making(
    common: &Common,
    option: &str,
    length_bytes: u64,
    needs: Needs,
) -> Result<(), LabError> {
    if !common.path.is_dir() {
        return Ok(());
    }
    refuse(
        &objections_to_length(option, length_bytes, needs, &memory()),
        common.force,
    )
}

/// Reasons why figures of data of this length would mislead.
fn objections_to_length(option: &str, length: u64, needs: Needs, memory: &Memory) -> Vec<String> {
    let mut found = Vec::new();
    let (memory_shown, bound) = (size(memory.bytes), &memory.bound);
    if needs.larger_than_memory && length <= memory.bytes {
        found.push(format!(
            "{option}: a working set of {} fits the page cache, which may grow to {memory_shown} ({bound}): make it \
             larger, or run in a cgroup with less memory",
            size(length)
        ));
    }
    if approximate(needs.warm_bytes) > WARM_SHARE_OF_MEMORY * approximate(memory.bytes) {
        let (option, warm) = (needs.warm_option, size(needs.warm_bytes));
        let too_much = format!("{warm} do not stay warm in {memory_shown} of memory ({bound})");
        found.push(format!("{option}: {too_much}: at most half of it"));
    }
    found
}

/// Reasons why figures of these data would mislead: a sentence each, with the option to change.
pub(crate) fn objections(materials: &[&Material], needs: Needs, memory: &Memory) -> Vec<String> {
    let Some(material) = materials.first() else {
        return Vec::new();
    };
    let length = materials.iter().map(|material| material.length_bytes()).sum();
    let option = material.questions.as_ref().map_or("--size", |_| "--vectors");
    let mut found = objections_to_length(option, length, needs, memory);
    if material.place.in_memory {
        found.push(IN_MEMORY.to_owned());
        return found;
    }
    let holes = materials.iter().map(|material| material.holes_share());
    let holes = holes.fold(0.0, f64::max);
    if holes > HOLES_SHARE_MAX {
        let percent = holes * 100.0;
        found.push(format!(
            "--path: {percent:.0} % of the data are holes, which are read from nowhere"
        ));
    }
    let mut shares = materials.iter().filter_map(|material| device_share(material));
    if let Some(share) = shares.find(|share| *share < DEVICE_SHARE_MIN) {
        let share = share * 100.0;
        found.push(format!(
            "--path: of what was read past the page cache {share:.0} % came from the device: the data were never stored, or \
             are stored elsewhere"
        ));
    }
    found
}

/// Reads some evicted blocks, directly if possible, and returns the share that the device read. `None`: it
/// cannot be counted.
fn device_share(material: &Material) -> Option<f64> {
    material.place.device.as_ref()?;
    if material.is_looked_at() {
        return None;
    }
    let file = material.files.first()?;
    let mut direct = OpenOptions::new();
    let direct = direct.read(true).custom_flags(DIRECT).open(&file.path);
    let opened = direct.or_else(|_| std::fs::File::open(&file.path)).ok()?;
    let _evicted = material.make_cold(1);
    let before = material.place.counted()?;
    let mut buffer = Buffer::zeroed(PROBED_BYTES).ok()?;
    let blocks = file.length_bytes / PROBED_BYTES as u64;
    let mut asked = 0u64;
    for number in 0..PROBED_READS.min(blocks) {
        // Far apart, so that read-ahead does not count twice.
        let offset = blocks * number / PROBED_READS.min(blocks) * PROBED_BYTES as u64;
        asked += opened.read_at(&mut buffer, offset).ok()? as u64;
    }
    let after = material.place.counted()?;
    (asked > 0).then(|| approximate(after.since(&before)) / approximate(asked))
}

/// How [`came_from`] ends where only the page cache was asked, before the reads.
pub(crate) const NOT_COUNTED: &str = " (not counted)";

/// Where the bytes of a row came from, according to the device and the page cache.
pub(crate) fn came_from(device_share: Option<f64>, resident_before: Option<f64>) -> &'static str {
    match (device_share, resident_before) {
        (Some(share), _) if share >= DEVICE_SHARE_MIN => "device",
        (Some(share), _) if share <= 1.0 - DEVICE_SHARE_MIN => "memory",
        (Some(_), _) => "both",
        (None, Some(share)) if share >= crate::page_cache::WARM_SHARE_MIN => "memory (not counted)",
        (None, Some(share)) if share <= crate::page_cache::COLD_SHARE_MAX => "evicted (not counted)",
        (None, Some(_)) => "both (not counted)",
        (None, None) => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::tests::{scratch, small};
    use std::fs;
    use std::time::{Duration, Instant};

    fn gibibyte() -> Memory {
        Memory {
            bytes: 1 << 30,
            bound: "MemTotal".to_owned(),
            available_bytes: 1 << 30,
        }
    }

    #[test]
    fn what_misleads_is_named_with_its_option() {
        // Scenario: five repetitions, four; a working set below memory, warm data above half of it. (Tests
        // may be a debug build.) Expected: no objection; then one each, which begins with the option.
        let directory = scratch();
        let material = small(directory.path());
        let ask = |needs, repetitions| {
            let mut found = objections_to_run(repetitions);
            found.retain(|problem| !problem.contains("debug build"));
            found.extend(objections(&[&material], needs, &gibibyte()));
            // The build directory may be in memory.
            found.retain(|problem| !problem.starts_with("--path"));
            found
        };
        assert_eq!(ask(Needs::default(), 5), Vec::<String>::new());
        let few = ask(Needs::default(), 4);
        assert!(
            few.len() == 1 && few[0].starts_with("--repetitions: 4"),
            "{few:?}"
        );
        let needs = Needs {
            larger_than_memory: true,
            warm_bytes: 600 << 20,
            warm_option: "--warm-bytes",
        };
        let both = ask(needs, 5);
        assert!(both.len() == 2 && both[0].starts_with("--size"), "{both:?}");
        assert!(both[1].starts_with("--warm-bytes"), "{both:?}");
    }

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        common: Common,
    }

    #[test]
    fn data_of_a_length_that_misleads_are_refused_before_they_are_made() {
        // Scenario: 1 MiB, in a directory and as an existing file; the same forced. Expected: the directory is
        // refused, with the option; a file is checked when it is open.
        use clap::Parser as _;
        let directory = scratch();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let check = |path: &std::path::Path, more: &[&str]| {
            let words = ["lab", "--path", path.to_str().unwrap()];
            let line = Line::parse_from(words.iter().chain(more));
            check_before_making(&line.common, "--size", 1 << 20, Needs::COLD)
        };
        let refused = check(directory.path(), &[]).unwrap_err().to_string();
        assert!(
            refused.starts_with("--size: a working set of 1.0 MiB"),
            "{refused}"
        );
        check(directory.path(), &["--force"]).unwrap();
        check(&file, &[]).unwrap();
    }

    fn objected(path: &std::path::Path, words: &str) {
        let material = Material::one(path, 4 << 20, &mut |_| true).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        // What other tests of this process read from the device meanwhile counts, too, and can only hide the objection.
        loop {
            let found = objections(&[&material], Needs::default(), &gibibyte());
            if found.iter().any(|problem| problem.contains(words)) {
                return;
            }
            assert!(Instant::now() < deadline, "{found:?}");
        }
    }

    #[test]
    #[ignore = "needs a disk"]
    fn what_was_never_written_is_refused() {
        // Scenario: a file that was written; a sparse one; one that was allocated and never written.
        // Expected: no objection; holes; reads that do not reach the device.
        let directory = scratch();
        let written = small(directory.path());
        let none = objections(&[&written], Needs::default(), &gibibyte());
        assert!(none.is_empty(), "{none:?}");
        let sparse = directory.path().join("sparse");
        fs::File::create(&sparse).unwrap().set_len(8 << 20).unwrap();
        objected(&sparse, "100 % of the data are holes");
        let reserved = directory.path().join("reserved");
        let file = fs::File::create(&reserved).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 8 << 20).unwrap();
        objected(&reserved, "% came from the device: the data were never stored");
    }

    #[test]
    #[ignore = "needs /dev/shm"]
    fn memory_is_no_device() {
        // Scenario: data on tmpfs. Expected: refused as such.
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        objected(memory.path(), "tmpfs");
    }

    #[test]
    fn where_bytes_came_from_is_what_was_counted() {
        // Scenario: shares read by the device, and residency where there is no device. Expected: the place
        // that they imply.
        assert_eq!(came_from(Some(1.02), Some(0.5)), "device");
        assert_eq!(came_from(Some(0.0), None), "memory");
        assert_eq!(came_from(Some(0.5), Some(0.0)), "both");
        assert_eq!(came_from(None, Some(0.0)), "evicted (not counted)");
        assert_eq!(came_from(None, None), "unknown");
    }
}
