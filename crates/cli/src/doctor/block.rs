//! The block device below a path: its layers, and how its queue is set up.

use super::Needs;
use super::finding::{Check, Finding, checks};
use super::host::chosen;
use ringfetch_host::View;
use ringfetch_host::block::{Device, Layer};
use ringfetch_host::cgroup::Cgroup;

checks! {
    STACK = "device.stack", "each layer costs CPU a read, and the slowest sets the pace";
    ROTATIONAL = "device.rotational",
        "a disk that seeks does a few hundred random reads a second, whatever the engine";
    SCHEDULER = "device.scheduler",
        "a scheduler costs CPU a read, and helps devices that seek, or many users of one device";
    TAGS = "device.tags",
        "beyond its tags (nr_requests) a device makes io_uring_enter sleep, so all rings together stay below them";
    READ_AHEAD = "device.read_ahead",
        "buffered random reads pull in up to this much beside what was asked; direct reads and mappings do not";
    MAX_SECTORS = "device.max_sectors", "longer reads are split by the kernel, and each part takes a tag";
    POLL = "device.poll_queues",
        "polled completions (IORING_SETUP_IOPOLL) need queues of their own; the engine does not need polling";
    IO_LIMIT = "device.io_limit", "a limit of the control group throttles reads before the device sees them";
}

/// engine.uring.queue_depth's default, and engine.plan.max_read's.
const QUEUE_DEPTH: u32 = 128;
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
    view: &View,
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
        tags(device, needs),
    ];
    checks.extend(read_ahead(device, direct));
    checks.extend(max_sectors(device));
    checks.push(poll(view, device));
    checks.push(io_limit(group, device));
    checks
}

/// Where there should be a device.
pub(super) fn unseen() -> Finding {
    STACK.note("no single block device found (is /sys mounted?)")
}

fn stack(device: &Device, partition: Option<&str>) -> Finding {
    let found = match partition {
        Some(name) => format!("{name}, a partition of {}", shown(device)),
        None => shown(device),
    };
    for layer in device.all() {
        if let Layer::Loop { direct: false, .. } = layer.layer {
            return STACK.warning(
                format!("{found}: through the page cache of the file beneath"),
                format!(
                    "`losetup --direct-io=on /dev/{}`, or serve the file itself",
                    layer.name
                ),
            );
        }
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
    let told_wrong = format!("`echo 0 >/sys/block/{}/queue/rotational`", disk.name);
    // Virtual disks say so whatever is beneath, unless their hypervisor is told otherwise.
    if ["vd", "xvd"].iter().any(|prefix| disk.name.starts_with(prefix)) {
        return ROTATIONAL.note_with(
            format!("{found}, and is a virtual disk: what is beneath it is unknown"),
            format!("if it is flash: {told_wrong}"),
        );
    }
    ROTATIONAL.warning(
        found,
        format!("keep the data on flash; if this is flash behind a controller: {told_wrong}"),
    )
}

fn scheduler(device: &Device) -> Finding {
    let mut told = Vec::new();
    for disk in device.disks() {
        let Some(name) = disk.scheduler.as_deref().and_then(chosen) else {
            continue;
        };
        let remedy = format!(
            "`echo none >/sys/block/{}/queue/scheduler`, and measure both: tags may change with it",
            disk.name
        );
        match name {
            "none" => {}
            "bfq" => return SCHEDULER.warning(format!("bfq on {}", disk.name), remedy),
            other if !disk.rotational => {
                return SCHEDULER.note_with(format!("{other} on {}", disk.name), remedy);
            }
            _ => {}
        }
        told.push(format!("{name} on {}", disk.name));
    }
    if told.is_empty() {
        SCHEDULER.ok("none: its driver has no queue to schedule")
    } else {
        SCHEDULER.ok(told.join(", "))
    }
}

fn tags(device: &Device, needs: Needs) -> Finding {
    let Some(tags) = device.queue_tags() else {
        return TAGS.note(
            "the kernel does not say: the engine keeps engine.uring.queue_depth in flight on each ring",
        );
    };
    // As the engine cuts it: 256 tags and 2 rings leave (256 - 16) / 2 = 120 to each.
    let each = ((tags - tags / 16) / needs.cores.max(1)).clamp(1, QUEUE_DEPTH);
    let found = format!(
        "{tags}: at most {each} reads in flight on each of {} rings",
        needs.cores
    );
    let disk = device
        .disks()
        .first()
        .map_or_else(String::new, |disk| disk.name.clone());
    let remedy = format!(
        "raise /sys/block/{disk}/queue/nr_requests where the driver allows, or run fewer rings (engine.cores)"
    );
    if each < QUEUE_DEPTH / 4 {
        TAGS.warning(found, remedy)
    } else if each < QUEUE_DEPTH / 2 {
        TAGS.note_with(found, remedy)
    } else {
        TAGS.ok(found)
    }
}

fn read_ahead(device: &Device, direct: bool) -> Option<Finding> {
    let kib = device.read_ahead_kib?;
    Some(if direct {
        READ_AHEAD.ok(format!("{kib} KiB, which direct reads do not use"))
    } else if kib > READ_AHEAD_KIB {
        READ_AHEAD.note_with(
            format!("{kib} KiB, and reads of this path are buffered"),
            format!(
                "`blockdev --setra {} /dev/{}`, or less",
                READ_AHEAD_KIB * 2,
                device.name
            ),
        )
    } else {
        READ_AHEAD.ok(format!("{kib} KiB"))
    })
}

fn max_sectors(device: &Device) -> Option<Finding> {
    let kib = device.max_sectors_kib?;
    let found = format!("reads of up to {kib} KiB go as one");
    Some(match device.max_hw_sectors_kib {
        Some(most) if kib < MAX_READ_KIB && kib < most => MAX_SECTORS.note_with(
            found,
            format!(
                "for long reads: `echo {} >/sys/block/{}/queue/max_sectors_kb`; blocks and vectors are shorter",
                most.min(MAX_READ_KIB),
                device.name
            ),
        ),
        Some(_) | None => MAX_SECTORS.ok(found),
    })
}

fn poll(view: &View, device: &Device) -> Finding {
    if device.disks().iter().all(|disk| disk.poll_queues) {
        return POLL.ok("there are some");
    }
    let driver = |name: &str| {
        let known = [("nvme", "nvme"), ("vd", "virtio_blk")];
        known
            .iter()
            .find(|(prefix, _)| name.starts_with(prefix))
            .map(|(_, module)| *module)
    };
    let module = device.disks().iter().find_map(|disk| driver(&disk.name));
    match module {
        Some(module) => {
            let set: Option<u32> = view.number(format!("sys/module/{module}/parameters/poll_queues"));
            POLL.note_with(
                format!(
                    "none ({module}.poll_queues is {})",
                    set.map_or_else(|| "unknown".to_owned(), |count| count.to_string())
                ),
                format!("only for polling: boot with {module}.poll_queues=N"),
            )
        }
        None => POLL.ok("none: its driver has no such queues"),
    }
}

fn io_limit(group: &Cgroup, device: &Device) -> Finding {
    let all = device.all();
    let limit = group
        .reads
        .iter()
        .find(|limit| all.iter().any(|device| device.number == limit.device));
    match limit {
        None => IO_LIMIT.ok("none found"),
        Some(limit) => IO_LIMIT.warning(
            format!("{} ({}, device {})", limit.limit, limit.file, limit.device),
            "lift it for the daemon (io.max, IOReadIOPSMax in systemd, --device-read-iops in Docker), or expect no more",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;
    use ringfetch_host::cgroup::ReadLimit;
    use ringfetch_host::tree::{Tree, storage};

    fn needs(cores: u32) -> Needs {
        Needs {
            memory_budget_bytes: 1 << 20,
            cores,
            paths: 1,
        }
    }

    fn at(tree: &Tree, major: u32, minor: u32) -> (Device, Option<String>) {
        Device::numbered(&tree.view(), rustix::fs::makedev(major, minor)).expect("device")
    }

    #[test]
    fn stacks_are_walked_down_to_the_disks() {
        // Scenario: an nvme partition, dm-crypt on it, LVM on that, a mirror of two disks, loop devices with and without
        // direct I/O. Expectation: the layers by name, a warning for the loop device that caches twice, a note for
        // encryption.
        let tree = storage();
        let told = |major, minor| {
            let (device, partition) = at(&tree, major, minor);
            let finding = stack(&device, partition.as_deref());
            (finding.verdict, finding.found)
        };
        assert_eq!(
            told(259, 1),
            (Verdict::Ok, "nvme0n1p1, a partition of nvme0n1".to_owned())
        );
        let (verdict, found) = told(252, 1);
        assert_eq!(verdict, Verdict::Note);
        assert!(
            found.starts_with("dm-1 (LVM) on dm-0 (dm-crypt) on nvme0n1:"),
            "{found}"
        );
        assert_eq!(told(9, 0), (Verdict::Ok, "md0 (raid1) on [sda, sdb]".to_owned()));
        assert_eq!(
            told(7, 0),
            (Verdict::Ok, "loop0 (loop over /images/a)".to_owned())
        );
        assert_eq!(told(7, 1).0, Verdict::Warning);
    }

    #[test]
    fn a_good_nvme_has_nothing_to_mend() {
        // Scenario: an nvme disk with scheduler none, 1023 tags, no poll queues, in a group with a limit on another
        // device. Expectation: ok, but for a note on poll queues with the module's parameter.
        let tree = storage();
        let (device, partition) = at(&tree, 259, 1);
        let group = Cgroup {
            reads: vec![ReadLimit {
                device: "8:0".to_owned(),
                limit: "10 reads/s".to_owned(),
                file: "io.max".to_owned(),
            }],
            ..Cgroup::default()
        };
        let checks = checks(
            &tree.view(),
            &group,
            &device,
            partition.as_deref(),
            true,
            needs(4),
        );
        let not_ok: Vec<_> = checks
            .iter()
            .filter(|finding| finding.verdict != Verdict::Ok)
            .map(Finding::name)
            .collect();
        assert_eq!(not_ok, ["device.poll_queues"]);
        let poll = checks
            .iter()
            .find(|finding| finding.check.id == "device.poll_queues")
            .expect("poll");
        let remedy = poll.remedy.as_deref().expect("remedy");
        assert!(
            remedy.contains("nvme.poll_queues=") && poll.found.contains("is 0"),
            "{poll:?}"
        );
        // 1023 tags: 1023 - 63 = 960, of which each of 4 rings may use all of its 128, and each of 16 rings 60.
        assert!(tags(&device, needs(4)).found.contains("at most 128"));
        assert_eq!(tags(&device, needs(16)).verdict, Verdict::Note);
        assert_eq!(tags(&device, needs(64)).verdict, Verdict::Warning);
    }

    #[test]
    fn what_slows_a_disk_is_named_with_its_remedy() {
        // Scenario: a mirror of a hard disk on bfq and one on mq-deadline, 8192 KiB of read-ahead, short max_sectors, a
        // limit on one of its disks. Expectation: warnings for seeking, scheduler and limit; notes for read-ahead (when
        // buffered) and max_sectors; each remedy names the device.
        let tree = storage();
        let (device, _) = at(&tree, 9, 0);
        let remedy = |finding: Finding, verdict, text: &str| {
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            let remedy = finding.remedy.unwrap_or_default();
            assert!(remedy.contains(text), "{remedy}");
        };
        remedy(rotational(&device), Verdict::Warning, "/sys/block/sda/");
        remedy(
            scheduler(&device),
            Verdict::Warning,
            "/sys/block/sda/queue/scheduler",
        );
        let group = Cgroup {
            reads: vec![ReadLimit {
                device: "8:16".to_owned(),
                limit: "10 reads/s".to_owned(),
                file: "io.max".to_owned(),
            }],
            ..Cgroup::default()
        };
        remedy(io_limit(&group, &device), Verdict::Warning, "io.max");
        remedy(
            read_ahead(&device, false).expect("told"),
            Verdict::Note,
            "--setra 256 /dev/md0",
        );
        assert_eq!(read_ahead(&device, true).expect("told").verdict, Verdict::Ok);
        remedy(
            max_sectors(&device).expect("told"),
            Verdict::Note,
            "echo 1024 >/sys/block/md0/",
        );
    }
}
