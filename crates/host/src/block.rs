//! The block device below a file, through partitions, device-mapper, md and loop devices, and the settings of
//! its queue. Source: Documentation/ABI/stable/sysfs-block of the kernel.
//!
//! The most important figure is how many requests a device takes at once: a ring with more in flight sleeps
//! inside `io_uring_enter` (TRAPS 15). Files without a single block device below them (tmpfs, overlayfs,
//! network and multi-device file systems) get no answer, rather than a guess.

use crate::View;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Most levels of device-mapper or md followed downwards.
const LEVELS_MAX: u32 = 8;

/// A whole block device, and the devices below it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// Kernel name of the whole device, without `/dev/`: `nvme0n1`, `vda`, `dm-0`. Two files with the same name here
    /// share its queue.
    pub name: String,
    /// `8:0`.
    pub number: String,
    /// What kind of device it is.
    pub layer: Layer,
    /// Whether it seeks: a hard disk.
    pub rotational: bool,
    /// The schedulers, with the chosen one in brackets.
    pub scheduler: Option<String>,
    /// The tags of its own hardware queues; `None` if the kernel does not report them. See
    /// [`Device::queue_tags`].
    pub own_tags: Option<Tags>,
    /// Hardware queues; 1 if the kernel does not report it.
    pub hardware_queues: u32,
    /// Bytes of a logical block: the smallest direct read, unless statx says otherwise.
    pub logical_block_bytes: u32,
    /// Most that a buffered read fetches ahead.
    pub read_ahead_kib: Option<u64>,
    /// Longest read that is not split, as configured.
    pub max_sectors_kib: Option<u64>,
    /// The same, as supported by the hardware.
    pub max_hw_sectors_kib: Option<u64>,
    /// Whether it has queues for polled completions (`io_poll`).
    pub poll_queues: bool,
    /// The devices that it is made of.
    pub beneath: Vec<Device>,
}

/// The tags of a device's hardware queues: requests that it takes before a submitter sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tags {
    /// Of one queue (`nr_requests`).
    pub of_queue: u32,
    /// Most CPUs that submit to one queue; `None`: all, as where the queues of a SCSI host share its tags.
    pub cpus_of_queue: Option<u32>,
}

impl Tags {
    /// Reads in flight that each of `rings` may have, so that those that share a queue stay below its tags
    /// together. With `pinned` each is on a CPU of its own; otherwise all may submit to one queue. Worked: 256
    /// tags, 2 rings, one queue: (256 - 16) / 2 = 120 each. 1,023 tags, 64 rings, 64 queues of one CPU each:
    /// 1,023 - 63 = 960 each if pinned, else 15.
    pub fn for_each_ring(self, rings: u32, pinned: bool) -> u32 {
        let sharing = rings.min(self.cpus_of_queue.filter(|_| pinned).unwrap_or(rings));
        ((self.of_queue - self.of_queue / 16) / sharing.max(1)).max(1)
    }
}

/// A kind of block device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Layer {
    /// A disk, or anything else without a device below it.
    #[default]
    Disk,
    /// dm-crypt.
    Crypt,
    /// Another target of device-mapper: `LVM`, `mpath`, ...
    Mapper(String),
    /// An md array: `raid1`, ...
    Array(String),
    /// A loop device.
    Loop {
        /// The file below.
        file: String,
        /// Whether it is read past the page cache.
        direct: bool,
    },
}

impl Device {
    /// The device below an open file, or an open block device itself, as this host shows it.
    pub fn of_file(file: impl AsFd) -> Option<Self> {
        let stat = rustix::fs::fstat(file).ok()?;
        let is_device =
            rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice;
        let number = if is_device { stat.st_rdev } else { stat.st_dev };
        Some(Self::numbered(&View::real(), number)?.0)
    }

    /// The device with a number (`st_dev`, `st_rdev`), and the partition's name if the number is a
    /// partition's.
    pub fn numbered(view: &View, number: u64) -> Option<(Self, Option<String>)> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let mut directory = view.resolved(format!("sys/dev/block/{major}:{minor}"))?;
        let partition = whole(view, &mut directory);
        Some((read(view, &directory, 0)?, partition))
    }

    /// This device and all below it.
    pub fn all(&self) -> Vec<&Self> {
        let mut found = vec![self];
        found.extend(self.beneath.iter().flat_map(Self::all));
        found
    }

    /// The devices at the bottom.
    pub fn disks(&self) -> Vec<&Self> {
        let all = self.all().into_iter();
        all.filter(|device| device.beneath.is_empty()).collect()
    }

    /// As [`Self::queue_tags`], for `rings` that are pinned if this process can pin each to a CPU of its own.
    pub fn tags_for(&self, rings: u32) -> Option<Tags> {
        let tags = self.queue_tags()?;
        let cpus_of_queue = tags.cpus_of_queue.filter(|_| crate::cpus::can_pin(rings));
        Some(Tags {
            cpus_of_queue,
            ..tags
        })
    }

    /// The limit of requests in flight: the tags of [`Self::limiting`].
    pub fn queue_tags(&self) -> Option<Tags> {
        self.limiting()?.own_tags
    }

    /// The device whose tags limit the requests in flight: this one, or, if it has no queue of its own (device-mapper, md), that
    /// with the fewest of those below.
    pub fn limiting(&self) -> Option<&Self> {
        let beneath = || self.beneath.iter().filter_map(Self::limiting);
        let fewest = || beneath().min_by_key(|device| device.own_tags.map(|tags| tags.of_queue));
        self.own_tags.map(|_| self).or_else(fewest)
    }
}

/// The number of the disk below a device (`st_dev`, `st_rdev`), through partitions, device-mapper and md; of several, the first.
/// The number itself where there is no block device.
pub fn disk_number(view: &View, number: u64) -> u64 {
    let disk = || {
        let (device, _partition) = Device::numbered(view, number)?;
        let (major, minor) = device.disks().first()?.number.split_once(':')?;
        Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
    };
    disk().unwrap_or(number)
}

/// From a partition's directory up to its disk's: `.../vda/vda1` -> `.../vda`.
fn whole(view: &View, directory: &mut PathBuf) -> Option<String> {
    if !view.exists(directory.join("partition")) {
        return None;
    }
    let name = directory.file_name()?.to_str()?.to_owned();
    directory.pop();
    Some(name)
}

fn read(view: &View, directory: &Path, level: u32) -> Option<Device> {
    if level == LEVELS_MAX {
        return None;
    }
    let queue = directory.join("queue");
    let uuid = view.text(directory.join("dm/uuid"));
    let array = view.text(directory.join("md/level"));
    let file = view.text(directory.join("loop/backing_file"));
    let layer = match (uuid, array, file) {
        (Some(uuid), _, _) => match uuid.split('-').next() {
            Some("CRYPT") => Layer::Crypt,
            Some("") | None => Layer::Mapper("device-mapper".to_owned()),
            Some(target) => Layer::Mapper(target.to_owned()),
        },
        (None, Some(level), _) => Layer::Array(level),
        (None, None, Some(file)) => Layer::Loop {
            file,
            direct: view.number(directory.join("loop/dio")) == Some(1_u8),
        },
        (None, None, None) => Layer::Disk,
    };
    let beneath = view.names(directory.join("slaves")).into_iter();
    let beneath = beneath.filter_map(|name| {
        let mut slave = view.resolved(directory.join("slaves").join(name))?;
        whole(view, &mut slave);
        read(view, &slave, level + 1)
    });
    let queues = view.names(directory.join("mq"));
    // Such as "0, 1".
    let cpus_of = |queue: &String| {
        let cpus = view.text(directory.join("mq").join(queue).join("cpu_list"))?;
        u32::try_from(cpus.split(',').count()).ok()
    };
    // The kernel does not report whether queues share tags; those of SCSI hosts may.
    let shared = view.exists(directory.join("device/scsi_level"));
    let cpus_of_queue = if shared {
        None
    } else {
        queues.iter().map(cpus_of).collect::<Option<Vec<_>>>()
    };
    let tags = |of_queue| Tags {
        of_queue,
        cpus_of_queue: cpus_of_queue.and_then(|cpus| cpus.into_iter().max()),
    };
    Some(Device {
        name: directory.file_name()?.to_str()?.to_owned(),
        number: view.text(directory.join("dev")).unwrap_or_default(),
        layer,
        rotational: view.number(queue.join("rotational")) == Some(1_u8),
        scheduler: view.text(queue.join("scheduler")),
        // Before Linux 6.5 devices without a hardware queue (device-mapper, md, NVMe multipath) show 128 all the same.
        own_tags: view
            .number(queue.join("nr_requests"))
            .filter(|tags| *tags > 0 && !queues.is_empty())
            .map(tags),
        hardware_queues: u32::try_from(queues.len()).unwrap_or(u32::MAX).max(1),
        logical_block_bytes: view.number(queue.join("logical_block_size")).unwrap_or(512),
        read_ahead_kib: view.number(queue.join("read_ahead_kb")),
        max_sectors_kib: view.number(queue.join("max_sectors_kb")),
        max_hw_sectors_kib: view.number(queue.join("max_hw_sectors_kb")),
        poll_queues: view.number(queue.join("io_poll")) == Some(1_u8),
        beneath: beneath.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Tree, storage};

    fn tags(of_queue: u32, cpus_of_queue: impl Into<Option<u32>>) -> Option<Tags> {
        let cpus_of_queue = cpus_of_queue.into();
        Some(Tags {
            of_queue,
            cpus_of_queue,
        })
    }

    fn at(tree: &Tree, major: u32, minor: u32) -> Device {
        let number = rustix::fs::makedev(major, minor);
        Device::numbered(&tree.view(), number).expect("device").0
    }

    #[test]
    fn a_partition_has_its_disks_queue() {
        // Scenario: a partition of an nvme disk. Expectation: the disk's facts, and the partition's name.
        let tree = storage();
        let (device, partition) =
            Device::numbered(&tree.view(), rustix::fs::makedev(259, 1)).expect("device");
        assert_eq!(partition.as_deref(), Some("nvme0n1p1"));
        assert_eq!(
            (device.name.as_str(), device.queue_tags()),
            ("nvme0n1", tags(1023, 1))
        );
        assert_eq!((device.hardware_queues, device.logical_block_bytes), (2, 4096));
        assert!(!device.rotational && !device.poll_queues, "{device:?}");
    }

    #[test]
    fn a_stacked_device_has_the_tags_beneath() {
        // Scenario: LVM on dm-crypt on a partition; a mirror of two disks; all but the disks show the 128 requests of kernels
        // before 6.5; NVMe multipath, whose paths it does not show; no block device. Expectation: the disk's tags, the fewest
        // of the two; their own names and queues; none known; the disk's number.
        let tree = storage();
        let upper = at(&tree, 252, 1);
        assert_eq!(
            (upper.name.as_str(), upper.queue_tags(), upper.hardware_queues),
            ("dm-1", tags(1023, 1), 1)
        );
        assert_eq!(
            (upper.own_tags, upper.all().len(), upper.disks().len()),
            (None, 3, 1)
        );
        assert_eq!(at(&tree, 9, 0).queue_tags(), tags(64, None));
        tree.write(
            "sys/devices/virtual/nvme-subsystem/nvme1n1/queue/nr_requests",
            "128\n",
        );
        tree.link(
            "sys/devices/virtual/nvme-subsystem/nvme1n1",
            "sys/dev/block/259:9",
        );
        assert_eq!(at(&tree, 259, 9).queue_tags(), None);
        let disk = |major, minor| disk_number(&tree.view(), rustix::fs::makedev(major, minor));
        let nvme = rustix::fs::makedev(259, 0);
        assert_eq!(
            [disk(252, 1), disk(259, 1), disk(259, 0), disk(0, 42)],
            [nvme, nvme, nvme, rustix::fs::makedev(0, 42)]
        );
    }

    #[test]
    fn rings_share_the_tags_of_the_queue_that_they_submit_to() {
        // Scenario: a disk whose two queues serve four CPUs and two, of nvme and of a SCSI host. Expectation:
        // rings that are pinned share with those of the larger queue, on SCSI with all; unpinned ones with all.
        let tree = Tree::new(&[]);
        for (number, name) in [("259:0", "nvme0n1"), ("8:0", "sda")] {
            let directory = format!("sys/devices/{name}");
            tree.write(&format!("{directory}/queue/nr_requests"), "256\n");
            tree.write(&format!("{directory}/mq/0/cpu_list"), "0, 1, 2, 3\n");
            tree.write(&format!("{directory}/mq/1/cpu_list"), "4, 5\n");
            tree.link(&directory, &format!("sys/dev/block/{number}"));
        }
        tree.write("sys/devices/sda/device/scsi_level", "7\n");
        let nvme = at(&tree, 259, 0).queue_tags().expect("tags");
        assert_eq!(Some(nvme), tags(256, 4));
        let of_rings = |tags: Tags, pinned| [1, 2, 4, 6].map(|rings| tags.for_each_ring(rings, pinned));
        assert_eq!(of_rings(nvme, true), [240, 120, 60, 60]);
        assert_eq!(of_rings(nvme, false), [240, 120, 60, 40]);
        let scsi = at(&tree, 8, 0).queue_tags().expect("tags");
        assert_eq!(of_rings(scsi, true), [240, 120, 60, 40]);
        // Worked in the documentation; and never none.
        let large = tags(1023, 1).expect("tags");
        assert_eq!(
            (large.for_each_ring(64, true), large.for_each_ring(64, false)),
            (960, 15)
        );
        assert_eq!(tags(8, None).expect("tags").for_each_ring(64, true), 1);
    }

    #[test]
    fn a_loop_in_the_stack_ends() {
        // Scenario: a /sys in which a device is its own and only slave. Expectation: no tags, no endless
        // loop.
        let tree = Tree::new(&[("sys/devices/virtual/block/dm-0/dm/uuid", "LVM-x\n")]);
        let directory = "sys/devices/virtual/block/dm-0";
        tree.link(directory, "sys/dev/block/252:0");
        tree.link(directory, &format!("{directory}/slaves/dm-0"));
        let device = at(&tree, 252, 0);
        assert_eq!(device.queue_tags(), None);
        assert_eq!(device.all().len(), 8);
    }

    #[test]
    fn no_device_is_no_answer() {
        // Scenario: a device number that /sys does not have, and a file in memory. Expectation: None.
        assert_eq!(Device::numbered(&storage().view(), 42), None);
        let memory =
            rustix::fs::memfd_create("ringfetch-test", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
        assert_eq!(Device::of_file(&memory), None);
    }

    #[test]
    fn a_real_file_is_never_a_contradiction() {
        // Scenario: a file in the temporary directory, wherever that is. Expectation: no answer, or a
        // plausible one.
        let file = tempfile::tempfile().expect("temporary file");
        if let Some(device) = Device::of_file(&file) {
            assert!(!device.name.is_empty(), "{device:?}");
            assert!(
                device.queue_tags().is_none_or(|tags| tags.of_queue > 0),
                "{device:?}"
            );
            assert!(device.logical_block_bytes.is_power_of_two(), "{device:?}");
            assert!(device.hardware_queues >= 1, "{device:?}");
        }
    }
}
