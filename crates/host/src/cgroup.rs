//! The control groups of this process, v1 and v2: their limits, over every level up to the root as far as
//! visible. Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the kernel.

use crate::View;
use crate::mounts::{Mount, mounts};
use procfs::{FromBufRead as _, ProcessCGroups};
use std::path::{Path, PathBuf};

/// Most levels examined.
const LEVELS_MAX: usize = 64;
/// A v1 group without a limit reports a number just below 2^63.
const V1_UNLIMITED: u64 = 1 << 62;

/// The tightest limit of each kind over all levels; `None`: no limit.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cgroup {
    /// Whether any hierarchy was visible at all.
    pub seen: bool,
    /// Limit on memory.
    pub memory: Option<Memory>,
    /// What the limits leave to the page cache of a group: without what its processes have allocated.
    pub cache_bytes: Option<u64>,
    /// Limit on CPU time, in CPUs.
    pub cpus: Option<f64>,
    /// Limit on threads and processes.
    pub pids: Option<Pids>,
    /// Every limit on reads from a device.
    pub reads: Vec<ReadLimit>,
}

/// A limit on memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// The limit.
    pub limit_bytes: u64,
    /// Used now.
    pub used_bytes: u64,
    /// The file that sets it.
    pub file: String,
}

/// A limit on threads and processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pids {
    /// The limit.
    pub limit: u64,
    /// Used now.
    pub used: u64,
    /// The file that sets it.
    pub file: String,
}

/// A limit on reads from one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadLimit {
    /// `8:0`.
    pub device: String,
    /// `1000 reads/s`, `1048576 bytes/s`.
    pub limit: String,
    /// The file that sets it.
    pub file: String,
}

impl Cgroup {
    /// The groups of this process.
    pub fn of_this_process(view: &View) -> Self {
        let mounts = mounts(view);
        let text = view.text("proc/self/cgroup").unwrap_or_default();
        let groups = ProcessCGroups::from_buf_read(text.as_bytes());
        let mut found = Self::default();
        // `0::/user.slice` (v2), `4:memory:/docker/0123` (v1), `9:name=systemd:/` (no controller).
        for group in groups.into_iter().flat_map(|groups| groups.0) {
            let unified = group.controllers.is_empty();
            let hierarchy = mounts.iter().find(|mount| {
                if unified {
                    mount.kind == "cgroup2"
                } else {
                    mount.kind == "cgroup" && group.controllers.iter().any(|name| mount.has(name))
                }
            });
            let Some(hierarchy) = hierarchy else { continue };
            found.seen = true;
            for level in levels(hierarchy, Path::new(&group.pathname)) {
                if unified {
                    found.level_v2(view, &level);
                } else {
                    for controller in &group.controllers {
                        found.level_v1(view, &level, controller);
                    }
                }
            }
        }
        found
    }

    /// Memory that the page cache of this process may grow to: what is available, within the limits. `None`:
    /// unknown.
    pub fn available_bytes(&self, view: &View) -> Option<u64> {
        let limits = [
            self.memory.as_ref().map(|memory| memory.limit_bytes),
            self.cache_bytes,
        ];
        let available = view.meminfo()?.mem_available?;
        limits.into_iter().flatten().chain([available]).min()
    }

    fn level_v2(&mut self, view: &View, level: &Path) {
        for name in ["memory.max", "memory.high"] {
            self.limit_memory(view, level, [name, "memory.current", "anon "]);
        }
        self.limit_pids(view, level);
        // `200000 100000`: 200 ms in each 100 ms, 2 CPUs; `max 100000`: no limit.
        if let Some(text) = view.text(level.join("cpu.max")) {
            let mut fields = text.split_whitespace().map(|field| field.parse().ok());
            self.limit_cpus(fields.next().flatten(), fields.next().flatten());
        }
        // `8:16 rbps=2097152 wbps=max riops=max wiops=120`.
        let file = level.join("io.max");
        for line in view.text(&file).unwrap_or_default().lines() {
            let mut fields = line.split_whitespace();
            let Some(device) = fields.next() else { continue };
            for field in fields {
                match field.split_once('=') {
                    Some(("rbps", value)) if value != "max" => {
                        self.limit_reads(device, format!("{value} bytes/s"), &file);
                    }
                    Some(("riops", value)) if value != "max" => {
                        self.limit_reads(device, format!("{value} reads/s"), &file);
                    }
                    Some(_) | None => {}
                }
            }
        }
    }

    fn level_v1(&mut self, view: &View, level: &Path, controller: &str) {
        match controller {
            "memory" => {
                let names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_rss "];
                self.limit_memory(view, level, names);
            }
            "pids" => self.limit_pids(view, level),
            // A quota of -1 means no limit.
            "cpu" => self.limit_cpus(
                view.number(level.join("cpu.cfs_quota_us")),
                view.number(level.join("cpu.cfs_period_us")),
            ),
            "blkio" => {
                for (name, unit) in [("read_bps_device", "bytes/s"), ("read_iops_device", "reads/s")] {
                    let file = level.join(format!("blkio.throttle.{name}"));
                    // `8:0 1048576`.
                    for line in view.text(&file).unwrap_or_default().lines() {
                        if let Some((device, value)) = line.split_once(' ') {
                            self.limit_reads(device, format!("{value} {unit}"), &file);
                        }
                    }
                }
            }
            _ => {}
        }
    }

    /// `allocated`: the line of `memory.stat` that says what processes have allocated.
    fn limit_memory(&mut self, view: &View, level: &Path, [limit, used, allocated]: [&str; 3]) {
        let (limit, used) = (level.join(limit), level.join(used));
        // `max` does not parse as a number, and means no limit.
        let Some(limit_bytes) = view.number::<u64>(&limit).filter(|bytes| *bytes < V1_UNLIMITED) else {
            return;
        };
        let allocated = view.line(level.join("memory.stat"), allocated);
        let allocated: u64 = allocated.and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
        let left = limit_bytes.saturating_sub(allocated);
        self.cache_bytes = Some(self.cache_bytes.map_or(left, |known| known.min(left)));
        if self
            .memory
            .as_ref()
            .is_none_or(|known| limit_bytes < known.limit_bytes)
        {
            self.memory = Some(Memory {
                limit_bytes,
                used_bytes: view.number(&used).unwrap_or(0),
                file: shown(&limit),
            });
        }
    }

    fn limit_pids(&mut self, view: &View, level: &Path) {
        let file = level.join("pids.max");
        let used = view.number(level.join("pids.current")).unwrap_or(0);
        let Some(limit) = view.number::<u64>(&file) else {
            return;
        };
        let room = |limit: u64, used: u64| limit.saturating_sub(used);
        if self
            .pids
            .as_ref()
            .is_none_or(|known| room(limit, used) < room(known.limit, known.used))
        {
            self.pids = Some(Pids {
                limit,
                used,
                file: shown(&file),
            });
        }
    }

    fn limit_cpus(&mut self, quota_us: Option<f64>, period_us: Option<f64>) {
        let (Some(quota), Some(period)) = (quota_us, period_us) else {
            return;
        };
        if quota > 0.0 && period > 0.0 {
            let cpus = quota / period;
            self.cpus = Some(self.cpus.map_or(cpus, |known| known.min(cpus)));
        }
    }

    fn limit_reads(&mut self, device: &str, limit: String, file: &Path) {
        self.reads.push(ReadLimit {
            device: device.to_owned(),
            limit,
            file: shown(file),
        });
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// The directories of a group and of those above it, up to where the hierarchy is mounted.
fn levels(hierarchy: &Mount, path: &Path) -> Vec<PathBuf> {
    // In a container without a cgroup namespace the mount shows only a part, `root`, and `path` begins with
    // it. With a namespace, `path` may lead above the mount (`/../..`), where nothing is visible.
    let below = path
        .strip_prefix(&hierarchy.root)
        .or_else(|_| path.strip_prefix("/"))
        .unwrap_or(Path::new(""));
    let parts: Vec<_> = below
        .components()
        .take_while(|part| matches!(part, std::path::Component::Normal(_)))
        .take(LEVELS_MAX)
        .collect();
    (0..=parts.len())
        .rev()
        .filter_map(|count| parts.get(..count))
        .map(|parts| hierarchy.point.join(parts.iter().collect::<PathBuf>()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    #[test]
    fn the_tightest_level_of_version_2_counts() {
        // Scenario: a service in a slice; the slice limits memory more tightly, the service CPU, threads and
        // reads. Expectation: the tightest limit of each kind, with the file that sets it; write limits are
        // ignored.
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/data.slice/ringfetchd.service\n"),
            (
                "proc/self/mountinfo",
                "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/data.slice/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/data.slice/memory.current", "4096\n"),
            ("sys/fs/cgroup/data.slice/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/data.slice/pids.max", "max\n"),
            ("sys/fs/cgroup/data.slice/ringfetchd.service/memory.max", "max\n"),
            (
                "sys/fs/cgroup/data.slice/ringfetchd.service/memory.high",
                "2147483648\n",
            ),
            (
                "sys/fs/cgroup/data.slice/ringfetchd.service/cpu.max",
                "250000 100000\n",
            ),
            ("sys/fs/cgroup/data.slice/ringfetchd.service/pids.max", "100\n"),
            ("sys/fs/cgroup/data.slice/ringfetchd.service/pids.current", "90\n"),
            (
                "sys/fs/cgroup/data.slice/ringfetchd.service/io.max",
                "259:0 rbps=2097152 wbps=1 riops=max wiops=max\n259:1 rbps=max wbps=1 riops=max wiops=1\n",
            ),
        ]);
        // Of 16 GiB that are available, all but what others in the slice have allocated.
        tree.write_meminfo(&[("MemTotal", 32 << 20), ("MemAvailable", 16 << 20)]);
        tree.write(
            "sys/fs/cgroup/data.slice/memory.stat",
            "anon 268435456\nanon_thp 1\nfile 9\n",
        );
        let found = Cgroup::of_this_process(&tree.view());
        assert_eq!(found.available_bytes(&tree.view()), Some(768 << 20));
        let memory = found.memory.expect("memory");
        assert_eq!((memory.limit_bytes, memory.used_bytes), (1 << 30, 4096));
        assert!(memory.file.ends_with("data.slice/memory.max"), "{memory:?}");
        assert_eq!(found.cpus, Some(2.5));
        assert_eq!(found.pids.map(|pids| (pids.limit, pids.used)), Some((100, 90)));
        let [read] = &found.reads[..] else {
            panic!("{:?}", found.reads)
        };
        assert_eq!(
            (read.device.as_str(), read.limit.as_str()),
            ("259:0", "2097152 bytes/s")
        );
    }

    #[test]
    fn version_1_in_a_container_without_a_namespace() {
        // Scenario: Docker on cgroup v1: each hierarchy mounted from the container's own directory, which
        // /proc/self/cgroup names from the host's root. Expectation: the limits there.
        let group = "/docker/0123";
        let tree = Tree::new(&[
            (
                "proc/self/cgroup",
                "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n3:blkio:/docker/0123\n2:pids:/docker/0123\n\
                 1:name=systemd:/docker/0123\n",
            ),
            (
                "proc/self/mountinfo",
                &format!(
                    "30 20 0:30 {group} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
                     31 20 0:31 {group} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n\
                     32 20 0:32 {group} /sys/fs/cgroup/blkio ro - cgroup cgroup rw,blkio\n\
                     33 20 0:33 {group} /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n"
                ),
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "536870912\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            (
                "sys/fs/cgroup/blkio/blkio.throttle.read_iops_device",
                "8:0 1000\n",
            ),
            ("sys/fs/cgroup/pids/pids.max", "max\n"),
        ]);
        tree.write("sys/fs/cgroup/memory/memory.stat", "rss 9\ntotal_rss 1048576\n");
        let found = Cgroup::of_this_process(&tree.view());
        assert_eq!(found.memory.map(|memory| memory.limit_bytes), Some(512 << 20));
        assert_eq!(found.cache_bytes, Some(511 << 20));
        assert_eq!(found.cpus, Some(0.5));
        assert_eq!(found.pids, None);
        assert_eq!(
            found.reads.first().map(|read| read.limit.as_str()),
            Some("1000 reads/s")
        );
    }

    #[test]
    fn no_limit_is_no_limit() {
        // Scenario: v1 groups at the root with the number that means no limit; a v2 path that leads above the
        // namespace; no cgroups. Expectation: no limit, and whether a hierarchy was visible.
        let tree = Tree::new(&[
            ("proc/self/cgroup", "4:memory:/\n1:cpu:/\n0::/../../other\n"),
            (
                "proc/self/mountinfo",
                "30 20 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 31 20 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                 32 20 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ]);
        let found = Cgroup::of_this_process(&tree.view());
        let none = Cgroup {
            seen: true,
            ..Cgroup::default()
        };
        assert_eq!(found, none);
        assert_eq!(Cgroup::of_this_process(&Tree::new(&[]).view()), Cgroup::default());
    }
}
