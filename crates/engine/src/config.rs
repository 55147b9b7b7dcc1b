//! The validated settings of the engine. The server (from YAML), or a test that builds them, upholds the
//! bounds in the comments.

use ringfetch_host::block::Tags;
use std::time::Duration;

/// Which backend reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackendKind {
    /// io_uring through tokio-uring, one ring per core.
    Uring,
    /// Resident data copied from a mapping, the rest read through the ring.
    Auto,
    /// Copies from a mapping, each batch announced to the kernel first.
    Mmap,
    /// Blocking `pread` on a pool of threads: the baseline.
    Pread,
    /// Simulated, seeded faults; only in tests (feature `sim`).
    Sim,
}

impl BackendKind {
    /// The name in YAML, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Auto => "auto",
            Self::Mmap => "mmap",
            Self::Pread => "pread",
            Self::Sim => "sim",
        }
    }

    /// Whether it uses a ring.
    pub fn uses_ring(self) -> bool {
        matches!(self, Self::Uring | Self::Auto)
    }
}

impl std::fmt::Display for BackendKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What to do if io_uring is unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnavailable {
    /// Refuse to start.
    Fail,
    /// Run on mmap, with a warning, a metric and a status line.
    Mmap,
}

/// Whether reads bypass the page cache (uring and pread; a mapping never does).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectIo {
    /// O_DIRECT, or the dataset does not open.
    Required,
    /// O_DIRECT where the file takes it.
    Preferred,
    /// Through the page cache.
    Off,
}

/// Where the shard of a core runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// On the core's thread, with its connections: a read never crosses threads.
    SameThread,
    /// On a thread of its own.
    OwnThread,
}

/// Settings of the uring backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UringConfig {
    /// Most reads in flight per ring; lowered so that rings stay below the device's tags. 1 to 4096.
    pub queue_depth: u32,
    /// See [`Placement`].
    pub placement: Placement,
    /// Submit to the kernel after this many reads while few are in flight; 0: once per turn. Flushing every 4
    /// gave 90k instead of 79k reads/s at depth 64 (MEASURED).
    pub eager_flush_reads: u32,
    /// Register the response memory with the ring if RLIMIT_MEMLOCK allows it.
    pub registered_buffers: bool,
}

/// Settings of the mmap backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MmapConfig {
    /// Threads that copy. 1 to 256.
    pub threads: u32,
    /// Announce each batch to the kernel (MADV_WILLNEED) before it is copied: 17k to 75k reads/s on one thread,
    /// cold (MEASURED).
    pub announce: bool,
}

/// Settings of the pread backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreadConfig {
    /// Threads that read. 1 to 1024.
    pub threads: u32,
}

/// Settings of the planner, the same for every backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanConfig {
    /// Neighbouring extents of a batch with at most this gap are read in one. 0: only touching ones.
    pub merge_gap_bytes: u32,
    /// Longest single device read; longer extents are split. A multiple of 4096.
    pub max_read_bytes: u32,
}

/// All settings of the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// The requested backend.
    pub backend: BackendKind,
    /// What to do if it is unavailable.
    pub on_unavailable: OnUnavailable,
    /// Pinned network threads; each has a runtime and, with uring, a ring. At least 1.
    pub cores: u32,
    /// Pin core N to the Nth CPU this process may use, unless a quota gives it fewer CPUs than its affinity
    /// mask holds (see [`ringfetch_host::cpus::cpus_to_pin`]).
    pub pin: bool,
    /// Response memory of the whole daemon. A multiple of 4096.
    pub memory_budget_bytes: u64,
    /// Most reads accepted and not submitted, per shard; beyond it a batch is refused at once.
    pub queued_reads: u32,
    /// Most bytes of response memory one connection may hold.
    pub connection_bytes: u64,
    /// The tags of the datasets' devices; empty if they are unknown, so the depth is not lowered.
    pub device_tags: Vec<Tags>,
    /// Settings of uring.
    pub uring: UringConfig,
    /// Settings of mmap.
    pub mmap: MmapConfig,
    /// Settings of pread.
    pub pread: PreadConfig,
    /// Settings of the planner.
    pub plan: PlanConfig,
}

impl EngineConfig {
    /// The depth of one ring: the configured one, lowered so that the rings stay below each device's tags,
    /// since io_uring_enter blocks when they run out (TRAPS 15).
    pub fn ring_depth(&self) -> u32 {
        let pinned = self.pin && self.uring.placement == Placement::SameThread;
        let of_device = |tags: &Tags| tags.for_each_ring(self.cores, pinned);
        let most = self.device_tags.iter().map(of_device).min();
        self.uring.queue_depth.min(most.unwrap_or(u32::MAX)).max(1)
    }
}

impl Default for EngineConfig {
    /// The defaults that `config/ringfetchd.yaml` documents, for one core.
    fn default() -> Self {
        Self {
            backend: BackendKind::Uring,
            on_unavailable: OnUnavailable::Mmap,
            cores: 1,
            pin: true,
            memory_budget_bytes: 256 << 20,
            queued_reads: 65_536,
            connection_bytes: 64 << 20,
            device_tags: Vec::new(),
            uring: UringConfig {
                queue_depth: 128,
                placement: Placement::SameThread,
                eager_flush_reads: 4,
                registered_buffers: true,
            },
            mmap: MmapConfig {
                threads: 2,
                announce: true,
            },
            pread: PreadConfig { threads: 32 },
            plan: PlanConfig {
                merge_gap_bytes: 0,
                max_read_bytes: 1 << 20,
            },
        }
    }
}

/// How long an object's cached descriptor is trusted before its name is looked up again.
pub const OBJECT_REVALIDATE_DEFAULT: Duration = Duration::from_secs(1);
