//! The block device below a path: its layers, and the settings of its queue.

use super::Needs;
use super::finding::{Check, Finding, checks};
use ringfetch_host::block::{Device, Layer};
use ringfetch_host::cgroup::Cgroup;
use ringfetch_host::chosen;

checks! {
    STACK = "device.stack", "each layer costs CPU a read, and the slowest sets the pace";
    ROTATIONAL = "device.rotational",
        "a disk that seeks does a few hundred random reads a second, whatever the engine";
    SCHEDULER = "device.scheduler",
        "a scheduler costs CPU a read, and helps devices that seek, or many users of one device";
    TAGS = "device.tags",
        "beyond its tags (nr_requests) a device makes io_uring_enter sleep, so rings that share tags stay below them together";
    READ_AHEAD = "device.read_ahead",
        "buffered random reads also fetch up to this much more; direct reads and mappings do not";
    MAX_SECTORS = "device.max_sectors", "longer reads are split by the kernel, and each part takes a tag";
    IO_LIMIT = "device.io_limit", "a limit of the control group throttles reads before the device sees them";
}

/// Defaults of engine.uring.queue_depth and engine.plan.max_read.
const QUEUE_DEPTH: u32 = 128;
const TAGS_TOO_FEW: u32 = QUEUE_DEPTH / 4;
const TAGS_FEW: u32 = QUEUE_DEPTH / 2;
const MAX_READ_KIB: u64 = 1024;
/// VM_READAHEAD_PAGES: the kernel's default.
const READ_AHEAD_KIB: u64 = 128;

/// The layers by name, from the top.
fn shown(device: &Device) -> String {
    let name = &device.name;
    let what = match &device.layer {
        Layer::Disk => name.clone(),
        Layer::Crypt => format!("{name} (dm-crypt)"),
        Layer::Mapper(kind) | Layer::Array(kind) => format!("{name} ({kind})"),
        Layer::Loop { file, .. } => format!("{name} (loop over {file})"),
    };
    match &device.beneath[..] {
        [] => what,
        [one] => format!("{what} on {}", shown(one)),
        several => {
            let names: Vec<_> = several.iter().map(shown).collect();
            format!("{what} on [{}]", names.join(", "))
        }
    }
}

/// `direct`: whether the engine reads this path past the page cache.
pub(super) fn checks(
    group: &Cgroup,
    device: &Device,
    partition: Option<&str>,
    direct: bool,
    needs: Needs,
) -> Vec<Finding> {
    let mut checks = vec![
        stack(device, partition),
        rotational(device),
        scheduler(device),
        tags(device, needs, ringfetch_host::cpus::can_pin(needs.cores)),
    ];
    checks.extend(read_ahead(device, direct));
    checks.extend(max_sectors(device));
    checks.push(io_limit(group, device));
    checks
}

/// The finding where a device was expected.
pub(super) fn not_found() -> Finding {
    STACK.note("no single block device found (is /sys mounted?)")
}

fn stack(device: &Device, partition: Option<&str>) -> Finding {
    let found = match partition {
        Some(name) => format!("{name}, a partition of {}", shown(device)),
        None => shown(device),
    };
    let cached = |layer: &&Device| matches!(layer.layer, Layer::Loop { direct: false, .. });
    if let Some(Device { name, .. }) = device.all().into_iter().find(cached) {
        return STACK.warning(
            format!("{found}: through the page cache of the file beneath"),
            format!("`losetup --direct-io=on /dev/{name}`, or serve the file itself"),
        );
    }
    if device.all().iter().any(|layer| layer.layer == Layer::Crypt) {
        return STACK.note_with(
            format!("{found}: every read is decrypted, by kernel threads"),
            "on fast devices, open it with `cryptsetup --perf-no_read_workqueue` (kernel 5.9), and measure both",
        );
    }
    STACK.ok(found)
}

fn rotational(device: &Device) -> Finding {
    let disks = device.disks();
    let Some(disk) = disks.iter().find(|disk| disk.rotational) else {
        return ROTATIONAL.ok("does not seek");
    };
    let found = format!("{} seeks", disk.name);
    let correct = format!("`echo 0 >/sys/block/{}/queue/rotational`", disk.name);
    // Virtual disks claim it whatever is below, unless their hypervisor is configured otherwise.
    if ["vd", "xvd"].iter().any(|prefix| disk.name.starts_with(prefix)) {
        let found = format!("{found}, and is a virtual disk: what is beneath it is unknown");
        return ROTATIONAL.note_with(found, format!("if it is flash: {correct}"));
    }
    let remedy = format!("keep the data on flash; if this is flash behind a controller: {correct}");
    ROTATIONAL.warning(found, remedy)
}

fn scheduler(device: &Device) -> Finding {
    let mut found = Vec::new();
    for disk in device.disks() {
        let Some(scheduler) = disk.scheduler.as_deref().and_then(chosen) else {
            continue;
        };
        let (name, used) = (&disk.name, format!("{scheduler} on {}", disk.name));
        let remedy = format!(
            "`echo none >/sys/block/{name}/queue/scheduler`, and measure both: tags may change with it"
        );
        match scheduler {
            "none" => {}
            "bfq" => return SCHEDULER.warning(used, remedy),
            _ if !disk.rotational => return SCHEDULER.note_with(used, remedy),
            _ => {}
        }
        found.push(used);
    }
    if found.is_empty() {
        return SCHEDULER.ok("none: its driver has no queue to schedule");
    }
    SCHEDULER.ok(found.join(", "))
}

/// `pinned`: whether each ring has a CPU of its own.
fn tags(device: &Device, needs: Needs, pinned: bool) -> Finding {
    let limiting = device.limiting();
    let Some((disk, tags)) = limiting.and_then(|device| Some((&device.name, device.own_tags?))) else {
        let found = "unknown: the engine keeps engine.uring.queue_depth in flight on each ring";
        return TAGS.note(found);
    };
    let rings = needs.cores;
    let each = tags.for_each_ring(rings, pinned).min(QUEUE_DEPTH);
    let of_queue = tags.of_queue;
    let queues = match tags.cpus_of_queue {
        Some(1) if pinned => " for each CPU".to_owned(),
        Some(cpus) if cpus < rings && pinned => format!(" for every {cpus} CPUs"),
        Some(_) | None => String::new(),
    };
    let found = format!("{of_queue}{queues}: at most {each} reads in flight on each of {rings} rings");
    let remedy = format!(
        "raise /sys/block/{disk}/queue/nr_requests where the driver allows, or run fewer rings (engine.cores)"
    );
    match each {
        ..TAGS_TOO_FEW => TAGS.warning(found, remedy),
        TAGS_TOO_FEW..TAGS_FEW => TAGS.note_with(found, remedy),
        TAGS_FEW.. => TAGS.ok(found),
    }
}

fn read_ahead(device: &Device, direct: bool) -> Option<Finding> {
    let kib = device.read_ahead_kib?;
    let (name, sectors) = (&device.name, READ_AHEAD_KIB * 2);
    Some(match direct {
        true => READ_AHEAD.ok(format!("{kib} KiB, which direct reads do not use")),
        false if kib > READ_AHEAD_KIB => READ_AHEAD.note_with(
            format!("{kib} KiB, and reads of this path are buffered"),
            format!("`blockdev --setra {sectors} /dev/{name}`, or less"),
        ),
        false => READ_AHEAD.ok(format!("{kib} KiB")),
    })
}

fn max_sectors(device: &Device) -> Option<Finding> {
    let kib = device.max_sectors_kib?;
    let (name, found) = (&device.name, format!("reads of up to {kib} KiB go as one"));
    let better = device.max_hw_sectors_kib.unwrap_or(0).min(MAX_READ_KIB);
    if kib >= better {
        return Some(MAX_SECTORS.ok(found));
    }
    let command = format!("echo {better} >/sys/block/{name}/queue/max_sectors_kb");
    let remedy = format!("for long reads: `{command}`; blocks and vectors are shorter");
    Some(MAX_SECTORS.note_with(found, remedy))
}

fn io_limit(group: &Cgroup, device: &Device) -> Finding {
    let limits = |number: &str| device.all().iter().any(|layer| layer.number == number);
    let Some(found) = group.reads.iter().find(|limit| limits(&limit.device)) else {
        return IO_LIMIT.ok("none found");
    };
    IO_LIMIT.warning(
        format!("{} ({}, device {})", found.limit, found.file, found.device),
        "lift it for the daemon (io.max, IOReadIOPSMax in systemd, --device-read-iops in Docker), or expect no more",
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;
    use ringfetch_host::cgroup::ReadLimit;
    use ringfetch_host::tree::{Tree, storage};

    fn needs(cores: u32) -> Needs {
        Needs::new(1 << 20, cores, 1)
    }

    fn at(tree: &Tree, major: u32, minor: u32) -> (Device, Option<String>) {
        Device::numbered(&tree.view(), rustix::fs::makedev(major, minor)).expect("device")
    }

    fn limited(device: &str) -> Cgroup {
        let (device, limit, file) = (device.to_owned(), "10 reads/s".to_owned(), "io.max".to_owned());
        let reads = vec![ReadLimit { device, limit, file }];
        Cgroup {
            reads,
            ..Cgroup::default()
        }
    }

    #[test]
    fn stacks_are_walked_down_to_the_disks() {
        let tree = storage();
        for (major, minor, verdict, found) in [
            (259, 1, Verdict::Ok, "nvme0n1p1, a partition of nvme0n1"),
            (
                252,
                1,
                Verdict::Note,
                "dm-1 (LVM) on dm-0 (dm-crypt) on nvme0n1: every read is decrypted",
            ),
            (9, 0, Verdict::Ok, "md0 (raid1) on [sda, sdb]"),
            (7, 0, Verdict::Ok, "loop0 (loop over /images/a)"),
            (7, 1, Verdict::Warning, "loop1 (loop over "),
        ] {
            let (device, partition) = at(&tree, major, minor);
            let finding = stack(&device, partition.as_deref());
            assert!(
                finding.verdict == verdict && finding.found.starts_with(found),
                "{finding:?}"
            );
        }
    }

    #[test]
    fn a_good_nvme_has_nothing_to_fix() {
        // Scheduler none, 1023 tags, in a group with a limit on another device.
        let tree = storage();
        let (device, partition) = at(&tree, 259, 1);
        let (group, partition) = (limited("8:0"), partition.as_deref());
        let checks = checks(&group, &device, partition, true, needs(4));
        let not_ok: Vec<_> = checks
            .iter()
            .filter(|finding| finding.verdict != Verdict::Ok)
            .collect();
        assert!(not_ok.is_empty(), "{not_ok:?}");
        // 1023 tags: 1023 - 63 = 960, of which each of 4 rings may use all of its 128, and each of 16 rings 60; all
        // of it where each ring is on a CPU with a queue of its own.
        assert!(tags(&device, needs(4), false).found.contains("at most 128"));
        assert_eq!(tags(&device, needs(16), false).verdict, Verdict::Note);
        assert_eq!(tags(&device, needs(64), false).verdict, Verdict::Warning);
        let pinned = tags(&device, needs(64), true);
        assert!(
            pinned.found.contains("1023 for each CPU: at most 128"),
            "{pinned:?}"
        );
        assert_eq!(pinned.verdict, Verdict::Ok);
    }

    #[test]
    fn the_device_with_the_fewest_tags_is_to_get_more() {
        // Scenario: a mirror of disks with 256 and with 32 tags. Expected: the limit of the second one, and its file.
        let tree = storage();
        for (name, of_queue) in [("sda", "256\n"), ("sdb", "32\n")] {
            let file = format!("sys/devices/pci0000:00/ata1/block/{name}/queue/nr_requests");
            tree.write(&file, of_queue);
        }
        let finding = tags(&at(&tree, 9, 0).0, needs(1), false);
        assert!(finding.found.starts_with("32: "), "{finding:?}");
        let remedy = finding.remedy.expect("few");
        assert!(remedy.contains("/sys/block/sdb/queue/nr_requests"), "{remedy}");
    }

    #[test]
    fn what_slows_a_disk_is_named_with_its_remedy() {
        // A mirror of a hard disk on bfq and one on mq-deadline, 8192 KiB of read-ahead, short max_sectors.
        let tree = storage();
        let (device, _) = at(&tree, 9, 0);
        for (finding, verdict, text) in [
            (rotational(&device), Verdict::Warning, "/sys/block/sda/"),
            (
                scheduler(&device),
                Verdict::Warning,
                "/sys/block/sda/queue/scheduler",
            ),
            (io_limit(&limited("8:16"), &device), Verdict::Warning, "io.max"),
            (
                read_ahead(&device, false).expect("known"),
                Verdict::Note,
                "--setra 256 /dev/md0",
            ),
            (
                max_sectors(&device).expect("known"),
                Verdict::Note,
                "echo 1024 >/sys/block/md0/",
            ),
        ] {
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            assert!(
                finding
                    .remedy
                    .as_ref()
                    .is_some_and(|remedy| remedy.contains(text)),
                "{finding:?}"
            );
        }
        assert_eq!(read_ahead(&device, true).expect("known").verdict, Verdict::Ok);
    }
}
