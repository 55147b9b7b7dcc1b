//! Facts about the machine for every report: kernel, file system, device, memory; and the device's own
//! counters.

use crate::study::{Key, pair};
use procfs::process::Process;
use ringfetch_command::quantity::size;
use ringfetch_host::block::Device;
use ringfetch_host::cgroup::Cgroup;
use ringfetch_host::mounts::{mount_of, mounts};
use ringfetch_host::{View, chosen};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _};

/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of linux/magic.h.
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// `OVERLAYFS_SUPER_MAGIC` of linux/magic.h.
const OVERLAY: u64 = 0x794c_7630;
/// Of a device's `stat` in /sys (Documentation/block/stat.rst).
const SECTOR_BYTES: u64 = 512;

/// The name of the line that says why a device's reads are not counted.
pub(crate) const UNCOUNTED: &str = "its reads";

/// Where a file is stored.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// `None`: there is no single block device beneath it.
    pub(crate) device: Option<Device>,
    /// Type and mount point.
    pub(crate) file_system: String,
    /// Whether it is stored in memory.
    pub(crate) in_memory: bool,
    /// Whether its pages belong to a layer's file: its own has none, as cachestat(2) says (Linux 6.18).
    pub(crate) is_overlay: bool,
}

impl Place {
    /// The place of an open file or block device.
    pub(crate) fn of(file: &File) -> Self {
        let is_device = rustix::fs::fstat(file).is_ok_and(|stat| {
            rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice
        });
        let kind = rustix::fs::fstatfs(file).map(|system| u64::try_from(system.f_type).unwrap_or(0));
        let file_system = || {
            let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
            let mounts = mounts(&View::real());
            let mount = mount_of(&mounts, &path)?;
            // A FUSE file system describes itself there: slowdisk says how slow it is.
            let source = match mount.kind.starts_with("fuse") {
                true => format!(" of {}", mount.source),
                false => String::new(),
            };
            Some(format!("{}{source} at {}", mount.kind, mount.point.display()))
        };
        Self {
            device: Device::of_file(file.as_fd()),
            file_system: if is_device {
                "none (block device)".to_owned()
            } else {
                file_system().unwrap_or_else(|| "unknown".to_owned())
            },
            // A device node is on a file system, but the device itself is not.
            is_overlay: kind == Ok(OVERLAY) && !is_device,
            in_memory: kind.is_ok_and(|kind| MEMORY_FILE_SYSTEMS.contains(&kind)) && !is_device,
        }
    }

    /// Lines for a report.
    pub(crate) fn lines(&self) -> Key {
        let file_system = pair("file system", &self.file_system);
        let Some(device) = &self.device else {
            let why = "no single block device: what reaches it cannot be counted";
            return vec![file_system, pair("device", why)];
        };
        let number = |number: Option<u64>| number.map_or("unknown".to_owned(), |number| number.to_string());
        let kind = if device.rotational {
            "rotational"
        } else {
            "not rotational"
        };
        let tags = number(device.queue_tags().map(|tags| u64::from(tags.of_queue)));
        let (name, queues, block) = (&device.name, device.hardware_queues, device.logical_block_bytes);
        let shown =
            format!("{name}, {kind}, {tags} tags on {queues} hardware queues, blocks of {block} bytes");
        let mut lines = vec![
            file_system,
            pair("device", shown),
            pair(
                "scheduler",
                device.scheduler.as_deref().and_then(chosen).unwrap_or("unknown"),
            ),
            pair("queue/io_poll", u8::from(device.poll_queues)),
            pair("read-ahead", format!("{} KiB", number(device.read_ahead_kib))),
        ];
        let uncounted = bytes_read(&View::real(), device).err();
        lines.extend(uncounted.map(|why| pair(UNCOUNTED, why)));
        lines
    }

    /// Counters of reads from the device. `None`: not counted.
    pub(crate) fn counted(&self) -> Option<Counted> {
        let own = Process::myself().and_then(|process| process.io());
        Some(Counted {
            device_bytes: bytes_read(&View::real(), self.device.as_ref()?).ok()?,
            own_bytes: own.ok().map(|io| io.read_bytes),
        })
    }
}

/// Bytes that a device has read since it exists, or why the kernel does not count them.
fn bytes_read(view: &View, device: &Device) -> Result<u64, String> {
    let (name, directory) = (&device.name, format!("sys/dev/block/{}", device.number));
    if view.number(format!("{directory}/queue/iostats")) == Some(0_u8) {
        return Err(format!(
            "not counted, since queue/iostats is 0: `echo 1 >/sys/block/{name}/queue/iostats`"
        ));
    }
    let counters = view.text(format!("{directory}/stat")).unwrap_or_default();
    let sectors: Option<u64> = counters
        .split_whitespace()
        .nth(2)
        .and_then(|read| read.parse().ok());
    match sectors {
        // A file system has read its own blocks, and a partition table is looked for.
        Some(0) => Err(
            "not counted, since its counter stays at 0, as with NVMe multipath on older kernels, \
             which newer ones count"
                .to_owned(),
        ),
        Some(sectors) => Ok(sectors.saturating_mul(SECTOR_BYTES)),
        None => Err("not counted by the kernel".to_owned()),
    }
}

/// Bytes read, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    /// Bytes read by the device, for all processes.
    device_bytes: u64,
    /// Bytes read from any device, for this process. `None`: the kernel does not count that.
    own_bytes: Option<u64>,
}

impl Counted {
    /// What the device has read since `before`, for all processes.
    pub(crate) fn by_anybody(&self, before: &Self) -> u64 {
        self.device_bytes.saturating_sub(before.device_bytes)
    }

    /// What the device has read since `before` for this process: the smaller of both counters, since others
    /// use the device too.
    pub(crate) fn since(&self, before: &Self) -> u64 {
        let device = self.device_bytes.saturating_sub(before.device_bytes);
        let own = self.own_bytes.zip(before.own_bytes);
        own.map_or(device, |(now, then)| device.min(now.saturating_sub(then)))
    }
}

/// Memory that this process's page cache can grow to, and what limits it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) bytes: u64,
    pub(crate) bound: String,
    /// The part of it that others do not use.
    pub(crate) available_bytes: u64,
}

/// MemTotal, or less if this process's cgroup or those above it limit it, v1 and v2.
pub(crate) fn memory() -> Memory {
    let view = View::real();
    let groups = Cgroup::of_this_process(&view);
    let total = view.meminfo().map_or(u64::MAX, |info| info.mem_total);
    let limit = groups.memory.as_ref().filter(|memory| memory.limit_bytes < total);
    Memory {
        bytes: limit.map_or(total, |memory| memory.limit_bytes),
        bound: limit.map_or("MemTotal".to_owned(), |memory| memory.file.clone()),
        available_bytes: groups.available_bytes(&view).unwrap_or(0),
    }
}

/// RssAnon of this process, from proc_pid_status(5); 0 if the kernel does not report it.
pub(crate) fn own_memory_bytes() -> u64 {
    let status = Process::myself().and_then(|process| process.status());
    let kib = status.ok().and_then(|status| status.rssanon);
    kib.unwrap_or(0).saturating_mul(1024)
}

/// Lines about the host for a report.
pub(crate) fn host() -> Key {
    let names = rustix::system::uname();
    let model = View::real().line("proc/cpuinfo", "model name");
    let model = model.map_or("unknown".to_owned(), |rest| {
        rest.trim_start_matches([' ', '\t', ':']).to_owned()
    });
    let memory = memory();
    let ring = match ringfetch_engine::probe::probe().map(|facts| facts.registered_buffers) {
        Ok(Ok(())) => "works".to_owned(),
        Ok(Err(why)) => format!("works; registered buffers do not: {why}"),
        Err(refusal) => format!("unavailable: {refusal}"),
    };
    let cpus = ringfetch_host::cpus::usable_cpus().len();
    vec![
        pair("kernel", kernel()),
        pair("machine", names.machine().to_string_lossy()),
        pair("CPU", format!("{cpus} usable, {model}")),
        pair("memory", format!("{} ({})", size(memory.bytes), memory.bound)),
        pair("io_uring", ring),
    ]
}

/// `uname -r`.
pub(crate) fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_host::tree::storage;

    #[test]
    fn a_device_whose_reads_are_not_counted_says_why() {
        // Scenario: a disk that has read 8 sectors; NVMe multipath, whose counter stays at 0; no counter; counting is
        // off, with a counter of earlier reads. Expected: the bytes; then why not, with the remedy.
        let tree = storage();
        let (device, _) = Device::numbered(&tree.view(), rustix::fs::makedev(259, 0)).unwrap();
        let stat = |text| tree.write("sys/dev/block/259:0/stat", text);
        let read = || bytes_read(&tree.view(), &device);
        assert_eq!(read(), Err("not counted by the kernel".to_owned()));
        stat(
            "       1        0        8        3        0        0        0        0        0        3        3\n",
        );
        assert_eq!(read(), Ok(4096));
        stat("0 0 0 0 0 0 0 0 0 0 0\n");
        let why = read().unwrap_err();
        assert!(
            why.starts_with("not counted") && why.contains("multipath"),
            "{why}"
        );
        stat("1 0 8 3 0 0 0 0 0 3 3\n");
        tree.write("sys/dev/block/259:0/queue/iostats", "0\n");
        let why = read().unwrap_err();
        assert!(why.contains("echo 1 >/sys/block/nvme0n1/queue/iostats"), "{why}");
        tree.write("sys/dev/block/259:0/queue/iostats", "1\n");
        assert_eq!(read(), Ok(4096));
    }

    #[test]
    fn the_devices_counters_are_read_and_cut_by_our_own() {
        // Scenario: a device that others use, too; this process. Expected: our part; more than 0.
        let at = |device_bytes, own_bytes| Counted {
            device_bytes,
            own_bytes,
        };
        let shared = at(900, Some(150)).since(&at(100, Some(50)));
        assert_eq!(shared, 100, "others read too");
        assert_eq!(at(900, None).since(&at(100, None)), 800);
        assert!(memory().bytes > 0 && own_memory_bytes() > 0);
    }
}
