//! What the kernel's block layer says about the device beneath a file: how many requests it takes at once, above
//! all, since a ring that has more in flight sleeps inside `io_uring_enter` (TRAPS 15).
//!
//! Read from `/sys/dev/block`, once, when a dataset opens. Deliberately absent: any answer for files without one
//! block device beneath them (tmpfs, overlayfs, network and multi-device file systems): `None`, not a guess.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Most levels of device-mapper or md that are followed downwards.
const STACK_LEVELS_MAX: u32 = 8;

/// A block device's queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Kernel name of the whole device, without `/dev/`: `nvme0n1`, `vda`, `dm-0`. Two files with the same name here
    /// share its queue.
    pub name: String,
    /// Requests that one hardware queue takes before a submitter sleeps (`nr_requests`); for a stacked device
    /// without a queue of its own, the smallest beneath it. `None` where the kernel does not say.
    pub queue_tags: Option<u32>,
    /// Hardware queues, each with `queue_tags`; 1 where the kernel does not say.
    pub hardware_queues: u32,
    /// Whether it seeks: a hard disk.
    pub rotational: bool,
    /// Bytes of a logical block: the smallest direct read, where statx does not say otherwise.
    pub logical_block_bytes: u32,
    /// Whether it has queues for polled completions (`io_poll`).
    pub poll_queues: bool,
}

/// Facts of the device beneath an open file, or of an open block device itself. `None`: there is no single one, or
/// `/sys` is not mounted.
pub fn device_facts(file: impl AsFd) -> Option<DeviceFacts> {
    let stat = rustix::fs::fstat(file).ok()?;
    let is_device = rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice;
    let device = if is_device { stat.st_rdev } else { stat.st_dev };
    facts_in(
        Path::new("/sys"),
        rustix::fs::major(device),
        rustix::fs::minor(device),
    )
}

/// `queue_tags` of [`device_facts`].
pub fn queue_tags(file: impl AsFd) -> Option<u32> {
    device_facts(file)?.queue_tags
}

fn facts_in(sys: &Path, major: u32, minor: u32) -> Option<DeviceFacts> {
    let link = sys.join("dev/block").join(format!("{major}:{minor}"));
    let mut directory = std::fs::canonicalize(link).ok()?;
    // A partition's queue is its parent's: .../block/vda/vda1 -> .../block/vda.
    if directory.join("partition").exists() {
        directory.pop();
    }
    let queue = directory.join("queue");
    Some(DeviceFacts {
        name: directory.file_name()?.to_str()?.to_owned(),
        queue_tags: tags_of(&directory, 0),
        hardware_queues: hardware_queues_of(&directory),
        rotational: number(queue.join("rotational")) == Some(1),
        logical_block_bytes: number(queue.join("logical_block_size")).unwrap_or(512),
        poll_queues: number(queue.join("io_poll")) == Some(1),
    })
}

/// Device-mapper and md devices that only pass requests on have no `nr_requests`; what limits them is beneath.
fn tags_of(directory: &Path, level: u32) -> Option<u32> {
    if let Some(tags) = number(directory.join("queue/nr_requests")) {
        return (tags > 0).then_some(tags);
    }
    if level == STACK_LEVELS_MAX {
        return None;
    }
    let beneath = std::fs::read_dir(directory.join("slaves")).ok()?;
    beneath
        .filter_map(|entry| {
            let mut slave = std::fs::canonicalize(entry.ok()?.path()).ok()?;
            if slave.join("partition").exists() {
                slave.pop();
            }
            tags_of(&slave, level + 1)
        })
        .min()
}

fn hardware_queues_of(directory: &Path) -> u32 {
    let count = std::fs::read_dir(directory.join("mq")).map_or(0, Iterator::count);
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

fn number(path: PathBuf) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A little /sys: a disk with a partition, and two levels of device-mapper on the partition.
    fn fake_sys() -> tempfile::TempDir {
        let sys = tempfile::tempdir().expect("temporary directory");
        let at = |path: &str| sys.path().join(path);
        let write = |path: &str, text: &str| {
            fs::create_dir_all(at(path).parent().expect("parent")).expect("directory");
            fs::write(at(path), text).expect("write");
        };
        write("devices/pci/block/sda/queue/nr_requests", "256\n");
        write("devices/pci/block/sda/queue/rotational", "1\n");
        write("devices/pci/block/sda/queue/logical_block_size", "4096\n");
        write("devices/pci/block/sda/queue/io_poll", "0\n");
        write("devices/pci/block/sda/mq/0/cpu_list", "0");
        write("devices/pci/block/sda/mq/1/cpu_list", "1");
        write("devices/pci/block/sda/sda1/partition", "1\n");
        write("devices/virtual/block/dm-0/queue/rotational", "0\n");
        write("devices/virtual/block/dm-0/queue/io_poll", "1\n");
        fs::create_dir_all(at("devices/virtual/block/dm-0/slaves")).expect("directory");
        fs::create_dir_all(at("devices/virtual/block/dm-1/slaves")).expect("directory");
        fs::create_dir_all(at("dev/block")).expect("directory");
        let link = |target: &str, path: &str| {
            std::os::unix::fs::symlink(at(target), at(path)).expect("link");
        };
        link(
            "devices/pci/block/sda/sda1",
            "devices/virtual/block/dm-0/slaves/sda1",
        );
        link(
            "devices/virtual/block/dm-0",
            "devices/virtual/block/dm-1/slaves/dm-0",
        );
        link("devices/pci/block/sda", "dev/block/8:0");
        link("devices/pci/block/sda/sda1", "dev/block/8:1");
        link("devices/virtual/block/dm-0", "dev/block/252:0");
        link("devices/virtual/block/dm-1", "dev/block/252:1");
        sys
    }

    #[test]
    fn a_partition_has_its_disks_queue() {
        // Scenario: a disk, and a partition on it. Expectation: the same facts for both.
        let sys = fake_sys();
        let expected = DeviceFacts {
            name: "sda".to_owned(),
            queue_tags: Some(256),
            hardware_queues: 2,
            rotational: true,
            logical_block_bytes: 4096,
            poll_queues: false,
        };
        assert_eq!(facts_in(sys.path(), 8, 0).as_ref(), Some(&expected));
        assert_eq!(facts_in(sys.path(), 8, 1).as_ref(), Some(&expected));
    }

    #[test]
    fn a_stacked_device_has_the_tags_beneath() {
        // Scenario: device-mapper on a partition, and on that another. Expectation: the disk's tags, their own names.
        let sys = fake_sys();
        let lower = facts_in(sys.path(), 252, 0).expect("dm-0");
        assert_eq!(
            (lower.name.as_str(), lower.queue_tags, lower.poll_queues),
            ("dm-0", Some(256), true)
        );
        let upper = facts_in(sys.path(), 252, 1).expect("dm-1");
        assert_eq!(
            (upper.name.as_str(), upper.queue_tags, upper.hardware_queues),
            ("dm-1", Some(256), 1)
        );
    }

    #[test]
    fn a_loop_in_the_stack_ends() {
        // Scenario: a /sys in which a device is its own slave. Expectation: no tags, no endless walk.
        let sys = fake_sys();
        let slaves = sys.path().join("devices/virtual/block/dm-0/slaves");
        fs::remove_file(slaves.join("sda1")).expect("remove");
        std::os::unix::fs::symlink(sys.path().join("devices/virtual/block/dm-0"), slaves.join("dm-0"))
            .expect("link");
        assert_eq!(facts_in(sys.path(), 252, 0).expect("dm-0").queue_tags, None);
    }

    #[test]
    fn no_device_is_no_answer() {
        // Scenario: a device number that /sys does not have, and a file in memory. Expectation: None.
        assert_eq!(facts_in(fake_sys().path(), 0, 42), None);
        let memory =
            rustix::fs::memfd_create("ringfetch-test", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
        assert_eq!(device_facts(&memory), None);
        assert_eq!(queue_tags(&memory), None);
    }

    #[test]
    fn a_real_file_is_never_a_contradiction() {
        // Scenario: a file in the temporary directory, wherever that is. Expectation: no answer, or one that makes
        // sense.
        let file = tempfile::tempfile().expect("temporary file");
        if let Some(facts) = device_facts(&file) {
            assert!(!facts.name.is_empty(), "{facts:?}");
            assert!(facts.queue_tags != Some(0), "{facts:?}");
            assert!(facts.logical_block_bytes.is_power_of_two(), "{facts:?}");
            assert!(facts.hardware_queues >= 1, "{facts:?}");
        }
    }
}
