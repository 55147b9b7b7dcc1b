//! What is said of the machine in every report: kernel, file system, device, memory; and the device's own counters.

use crate::quantity::size;
use ringfetch_host::block::Device;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of linux/magic.h.
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];
const SECTOR_BYTES: u64 = 512;

/// Where a file lies.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// `None`: no single block device beneath it.
    pub(crate) device: Option<Device>,
    /// Type, mount point and options, as the kernel lists them.
    pub(crate) file_system: String,
    /// Whether it is memory under another name.
    pub(crate) in_memory: bool,
}

impl Place {
    /// Of an open file or block device.
    pub(crate) fn of(file: &File) -> Self {
        let stat = rustix::fs::fstat(file).ok();
        let is_device = stat.as_ref().is_some_and(|stat| {
            rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice
        });
        let kind = rustix::fs::fstatfs(file).ok().map(|system| system.f_type);
        let in_memory = kind
            .and_then(|kind| u64::try_from(kind).ok())
            .is_some_and(|kind| MEMORY_FILE_SYSTEMS.contains(&kind));
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let file_system = stat.map_or_else(String::new, |stat| {
            let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
            mounted(&mounts, &format!("{major}:{minor}")).unwrap_or_else(|| "unknown".to_owned())
        });
        Self {
            device: Device::of_file(file.as_fd()),
            file_system: if is_device {
                "none (block device)".to_owned()
            } else {
                file_system
            },
            // A device node lies on devtmpfs; what is read does not.
            in_memory: in_memory && !is_device,
        }
    }

    /// Lines for a report.
    pub(crate) fn lines(&self) -> Vec<(String, String)> {
        let mut lines = vec![("file system".to_owned(), self.file_system.clone())];
        let Some(device) = &self.device else {
            let why = "no single block device: what reaches it cannot be counted";
            lines.push(("device".to_owned(), why.to_owned()));
            return lines;
        };
        let queue = PathBuf::from("/sys/class/block").join(&device.name).join("queue");
        let text = |name: &str| {
            let text = fs::read_to_string(queue.join(name));
            text.map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
        };
        let kind = if device.rotational {
            "rotational"
        } else {
            "not rotational"
        };
        let tags = device
            .queue_tags()
            .map_or("unknown".to_owned(), |tags| tags.to_string());
        let polls = if device.poll_queues { 1 } else { 0 };
        lines.extend([
            (
                "device".to_owned(),
                format!(
                    "{}, {kind}, {tags} tags on {} hardware queues, blocks of {} bytes",
                    device.name, device.hardware_queues, device.logical_block_bytes
                ),
            ),
            ("scheduler".to_owned(), chosen(&text("scheduler"))),
            ("queue/io_poll".to_owned(), polls.to_string()),
            ("read-ahead".to_owned(), format!("{} KiB", text("read_ahead_kb"))),
        ]);
        lines
    }

    /// What has been read from the device. `None`: not counted.
    pub(crate) fn counted(&self) -> Option<Counted> {
        let name = &self.device.as_ref()?.name;
        let own = fs::read_to_string("/proc/self/io").ok();
        Some(Counted {
            device_bytes: bytes_read(&fs::read_to_string("/proc/diskstats").ok()?, name)?,
            own_bytes: own.and_then(|own| own_bytes(&own)),
        })
    }
}

/// Bytes read, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    /// By the device, for everybody.
    device_bytes: u64,
    /// From any device, for this process. `None`: a kernel that does not count that.
    own_bytes: Option<u64>,
}

impl Counted {
    /// What the device has read since then, for whomever.
    pub(crate) fn by_anybody(&self, before: &Self) -> u64 {
        self.device_bytes.saturating_sub(before.device_bytes)
    }

    /// What the device has read since then for this process: at most what either counter says, for others use the device
    /// too.
    pub(crate) fn since(&self, before: &Self) -> u64 {
        let device = self.device_bytes.saturating_sub(before.device_bytes);
        let own = self.own_bytes.zip(before.own_bytes);
        own.map_or(device, |(now, then)| device.min(now.saturating_sub(then)))
    }
}

/// `read_bytes` of proc_pid_io(5).
fn own_bytes(io: &str) -> Option<u64> {
    io.lines()
        .find_map(|line| line.strip_prefix("read_bytes: "))?
        .trim()
        .parse()
        .ok()
}

/// `[none] mq-deadline` as `none`.
fn chosen(scheduler: &str) -> String {
    let inside = scheduler
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or(scheduler, |(name, _)| name).to_owned()
}

/// The mount of a device number in proc_pid_mountinfo(5): `ext4 at /data (rw,relatime)`.
fn mounted(mountinfo: &str, device: &str) -> Option<String> {
    let line = mountinfo
        .lines()
        .find(|line| line.split(' ').nth(2) == Some(device))?;
    let (before, after) = line.split_once(" - ")?;
    let before: Vec<&str> = before.split(' ').collect();
    let mut words = after.split(' ');
    let kind = words.next()?;
    // A disk of a process says there what it is: slowdisk, how slow it is.
    let source = words.next().filter(|_| kind.starts_with("fuse"));
    let source = source.map_or_else(String::new, |source| format!(" of {source}"));
    Some(format!(
        "{kind}{source} at {} ({})",
        before.get(4)?,
        before.get(5)?
    ))
}

/// Sectors read of a device in /proc/diskstats (Documentation/admin-guide/iostats.rst), in bytes.
fn bytes_read(diskstats: &str, name: &str) -> Option<u64> {
    let fields: Vec<&str> = diskstats
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|fields| fields.get(2) == Some(&name))?;
    let sectors: u64 = fields.get(5)?.parse().ok()?;
    sectors.checked_mul(SECTOR_BYTES)
}

/// Memory that this process's page cache can grow to, and what bounds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) bytes: u64,
    pub(crate) bound: &'static str,
}

/// MemTotal, cut by the limits of this process's cgroup and those above it, v1 and v2.
pub(crate) fn memory() -> Memory {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let total = Memory {
        bytes: kibibytes(&meminfo, "MemTotal:").unwrap_or(u64::MAX),
        bound: "MemTotal",
    };
    limits(&cgroups)
        .filter_map(|(file, bound)| {
            let bytes = fs::read_to_string(file).ok()?.trim().parse().ok()?;
            Some(Memory { bytes, bound })
        })
        .fold(
            total,
            |least, limit| {
                if limit.bytes < least.bytes { limit } else { least }
            },
        )
}

/// The files that may hold a limit of memory, from `/proc/self/cgroup`.
fn limits(cgroups: &str) -> impl Iterator<Item = (PathBuf, &'static str)> {
    let root = Path::new("/sys/fs/cgroup");
    cgroups.lines().flat_map(move |line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or("/"));
        let (base, file, bound) = match controllers {
            "" => (root.to_owned(), "memory.max", "cgroup v2 memory.max"),
            "memory" => (
                root.join("memory"),
                "memory.limit_in_bytes",
                "cgroup v1 memory.limit_in_bytes",
            ),
            _ => return Vec::new(),
        };
        let inside = path.trim_start_matches('/');
        let levels = Path::new(inside).ancestors();
        levels
            .map(|level| (base.join(level).join(file), bound))
            .collect::<Vec<_>>()
    })
}

/// A line of the kernel's tables that is in kB, in bytes.
fn kibibytes(table: &str, name: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// RssAnon of this process, in proc_pid_status(5); 0 where the kernel does not say.
pub(crate) fn own_memory_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    kibibytes(&status, "RssAnon:").unwrap_or(0)
}

/// Lines about the host for a report.
pub(crate) fn host() -> Vec<(String, String)> {
    let names = rustix::system::uname();
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown", |rest| rest.trim_start_matches([' ', '\t', ':']));
    let memory = memory();
    let ring = match ringfetch_engine::probe::probe() {
        Ok(facts) => {
            let registered = facts.registered_buffers;
            registered.map_or_else(
                |why| format!("works; registered buffers do not: {why}"),
                |()| "works".to_owned(),
            )
        }
        Err(refusal) => format!("unavailable: {refusal}"),
    };
    let cpus = ringfetch_host::cpus::usable_cpus().len();
    [
        ("kernel", kernel()),
        ("machine", names.machine().to_string_lossy().into_owned()),
        ("CPU", format!("{cpus} usable, {model}")),
        ("memory", format!("{} ({})", size(memory.bytes), memory.bound)),
        ("io_uring", ring),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// `uname -r`.
pub(crate) fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_tables_are_read() {
        // Scenario: lines as the kernel writes them, and names that are not there. Expected: the figures; nothing.
        let stats = " 254 0 vda 100 5 4000 7 1 2 3 4 0 5 6\n 254 1 vda1 9 0 16 7 1 2 3 4 0 5 6\n";
        assert_eq!(bytes_read(stats, "vda"), Some(4000 * 512));
        assert_eq!(bytes_read(stats, "vda1"), Some(16 * 512));
        assert_eq!(bytes_read(stats, "vd"), None);
        assert_eq!(own_bytes("rchar: 1\nread_bytes: 4096\n"), Some(4096));
        let at = |device_bytes, own_bytes| Counted {
            device_bytes,
            own_bytes,
        };
        assert_eq!(
            at(900, Some(150)).since(&at(100, Some(50))),
            100,
            "others read too"
        );
        assert_eq!(at(900, None).since(&at(100, None)), 800);
        let mounts = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n";
        assert_eq!(
            mounted(mounts, "254:0").as_deref(),
            Some("ext4 at / (rw,relatime)")
        );
        let slow = "99 1 0:52 / /mnt ro - fuse.slowdisk slowdisk:2ms:64-concurrent ro\n";
        let shown = "fuse.slowdisk of slowdisk:2ms:64-concurrent at /mnt (ro)";
        assert_eq!(mounted(slow, "0:52").as_deref(), Some(shown));
        assert_eq!(mounted(mounts, "0:1"), None);
        let table = "MemFree: 1 kB\nMemTotal:   2048 kB\n";
        assert_eq!(kibibytes(table, "MemTotal:"), Some(2 << 20));
        assert_eq!(kibibytes(table, "MemAvailable:"), None);
        assert_eq!(chosen("none [mq-deadline] bfq"), "mq-deadline");
        assert_eq!(chosen("none"), "none");
    }

    #[test]
    fn limits_of_both_kinds_of_cgroups_are_found() {
        // Scenario: v1 with a nested group, beside v2. Expected: the file of every level of each, and of no other
        // controller.
        let found: Vec<String> = limits("5:memory:/a/b\n4:cpu:/a\n0::/x\n")
            .map(|(path, _)| path.display().to_string())
            .collect();
        assert_eq!(
            found,
            [
                "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "/sys/fs/cgroup/x/memory.max",
                "/sys/fs/cgroup/memory.max"
            ]
        );
        assert!(memory().bytes > 0);
    }
}
