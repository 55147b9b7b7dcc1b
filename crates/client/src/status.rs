//! The admin service's answers, as types of this crate.

use crate::dataset::Dataset;
use ringfetch_proto::v1 as wire;
use std::fmt;
use std::str::FromStr;

/// How a dataset is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Backend {
    /// io_uring.
    Uring,
    /// A mapping.
    Mmap,
    /// A mapping or io_uring for each read, depending on what is resident.
    Auto,
    /// A pool of threads.
    Pread,
    /// A backend that this client does not know.
    #[default]
    Unknown,
}

impl Backend {
    /// The backends that a daemon can be switched to.
    pub const ALL: [Self; 4] = [Self::Uring, Self::Mmap, Self::Auto, Self::Pread];

    /// The word in configuration and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Mmap => "mmap",
            Self::Auto => "auto",
            Self::Pread => "pread",
            Self::Unknown => "unknown",
        }
    }

    pub(crate) fn number(self) -> i32 {
        match self {
            Self::Uring => wire::Backend::Uring,
            Self::Mmap => wire::Backend::Mmap,
            Self::Auto => wire::Backend::Auto,
            Self::Pread => wire::Backend::Pread,
            Self::Unknown => wire::Backend::Unspecified,
        }
        .into()
    }
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|backend| backend.as_str() == word);
        found.ok_or_else(|| format!("{word:?} is not a backend: use uring, mmap, auto or pread"))
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Conversion from a wire value.
pub(crate) trait FromWire<W> {
    fn from_wire(wire: W) -> Self;
}

macro_rules! same_on_the_wire {
    ($($type:ty),*) => {
        $(impl FromWire<$type> for $type {
            fn from_wire(wire: $type) -> Self {
                wire
            }
        })*
    };
}

same_on_the_wire!(bool, u32, u64, f64, String);

impl FromWire<i32> for Backend {
    fn from_wire(number: i32) -> Self {
        let mut all = Self::ALL.into_iter();
        all.find(|backend| backend.number() == number).unwrap_or_default()
    }
}

impl FromWire<wire::Dataset> for Dataset {
    fn from_wire(dataset: wire::Dataset) -> Self {
        dataset.into()
    }
}

impl<W, T: FromWire<W>> FromWire<Vec<W>> for Vec<T> {
    fn from_wire(wire: Vec<W>) -> Self {
        wire.into_iter().map(T::from_wire).collect()
    }
}

impl<W, T: FromWire<W>> FromWire<Option<W>> for Option<T> {
    fn from_wire(wire: Option<W>) -> Self {
        wire.map(T::from_wire)
    }
}

/// Defines structs with the fields of a message.
macro_rules! messages {
    ($($(#[$about:meta])* $name:ident = $message:ident {
        $($(#[$field_about:meta])* $field:ident: $type:ty,)*
    })*) => {
        $($(#[$about])*
        #[derive(Debug, Clone, PartialEq, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$field_about])* pub $field: $type,)*
        }

        impl FromWire<wire::$message> for $name {
            fn from_wire(wire: wire::$message) -> Self {
                Self { $($field: FromWire::from_wire(wire.$field),)* }
            }
        })*
    };
}

messages! {
    /// The state of a daemon.
    Status = GetStatusResponse {
        /// Of the daemon.
        version: String,
        /// Time since it was started.
        uptime_ms: u64,
        /// starting, serving or draining.
        state: String,
        /// Backend of datasets that have none of their own.
        backend: Backend,
        /// The backend requested.
        requested: Backend,
        /// Why this backend.
        reason: String,
        /// Whether it runs on another backend than requested.
        fallback: bool,
        /// Network threads.
        cores: u32,
        /// Response memory: limit.
        memory_budget_bytes: u64,
        /// Response memory: in use now.
        memory_in_use_bytes: u64,
        /// Every shard.
        shards: Vec<ShardStatus>,
        /// Every dataset, by name.
        datasets: Vec<DatasetStatus>,
        /// Mean over the last `rates_window_ms`.
        reads_per_second: f64,
        /// Mean over the last `rates_window_ms`.
        read_bytes_per_second: f64,
        /// The window of the rates.
        rates_window_ms: u32,
        /// Items answered, errors included.
        reads_total: u64,
        /// Items answered with an error.
        read_errors_total: u64,
        /// Percentile of a read's total time since the start: upper bucket bound. 0: no read was timed. Infinite, and
        /// `null` as JSON: more than 10 s.
        latency_p50_us: f64,
        /// The same.
        latency_p99_us: f64,
        /// The same.
        latency_p999_us: f64,
        /// `None` before the first.
        last_reload: Option<LastReload>,
    }

    /// A shard: one thread that reads.
    ShardStatus = ShardStatus {
        /// Its number.
        shard: u32,
        /// Its backend; a ring's shard reports uring and serves auto too.
        backend: Backend,
        /// Whether any dataset is routed here.
        routed: bool,
        /// Reads submitted and not completed, without stalled ones.
        in_flight: u32,
        /// Reads that their disk has not completed for 3 s while others waited for room: it hangs, or is far too slow.
        stalled: u32,
        /// Reads accepted and not submitted.
        queued: u64,
        /// The limit of `in_flight`.
        queue_depth: u32,
        /// After merging and splitting.
        device_reads_total: u64,
        /// System calls that submitted them.
        submissions_total: u64,
    }

    /// A dataset as its operator sees it.
    DatasetStatus = DatasetStatus {
        /// As clients see it.
        #[cfg_attr(feature = "serde", serde(flatten))]
        dataset: Option<Dataset>,
        /// How it is read.
        read_path: Option<ReadPath>,
        /// Files or devices of the address space; 0 for objects.
        files: u32,
        /// For vectors: distance from one to the next in the file.
        stride_bytes: u64,
        /// For vectors: where the first begins.
        base_offset: u64,
        /// Items answered, errors included.
        reads_total: u64,
        /// Items answered with an error.
        read_errors_total: u64,
        /// Bytes answered.
        read_bytes_total: u64,
    }

    /// How a dataset is read.
    ReadPath = ReadPath {
        /// The backend that reads it.
        backend: Backend,
        /// The backend requested, by the configuration or by a later switch.
        requested: Backend,
        /// Why this backend.
        reason: String,
        /// Whether reads bypass the page cache.
        direct_io: bool,
        /// Why, or why not.
        direct_io_reason: String,
        /// What direct reads must be aligned to: offset and length.
        offset_alignment_bytes: u32,
        /// What their memory must be aligned to.
        memory_alignment_bytes: u32,
        /// Whether the dataset has a backend of its own.
        own_backend: bool,
    }

    /// The last reload.
    LastReload = LastReload {
        /// Whether the reload was applied.
        successful: bool,
        /// Milliseconds since 1970.
        at_unix_ms: u64,
        /// Why nothing was changed; empty if it was successful.
        problem: String,
        /// Changes that take effect only after a restart.
        needs_restart: Vec<ConfigChange>,
    }

    /// A key of the configuration whose value changed.
    ConfigChange = ConfigChange {
        /// `limits.connections`, `datasets.blocks.backend`.
        key: String,
        /// Its value before.
        before: String,
        /// Its value after.
        after: String,
    }

    /// The effects of a reload.
    Reloaded = ReloadResponse {
        /// Changes now in force.
        applied: Vec<ConfigChange>,
        /// Changes that take effect only after a restart.
        needs_restart: Vec<ConfigChange>,
        /// Served from now on.
        datasets_added: Vec<String>,
        /// No longer served.
        datasets_removed: Vec<String>,
        /// Reopened: their files or their configuration changed.
        datasets_replaced: Vec<String>,
        /// Unchanged.
        datasets_unchanged: Vec<String>,
        /// Remarks.
        notes: Vec<String>,
    }

    /// The effects of a switch of backends.
    Switched = SetBackendResponse {
        /// The backend before.
        previous: Backend,
        /// The one that reads now.
        backend: Backend,
        /// Why this one.
        reason: String,
        /// Datasets that keep a backend of their own.
        datasets_with_own: Vec<String>,
    }
}

#[cfg(feature = "serde")]
mod words {
    use crate::dataset::Kind;
    use crate::vectors::Dtype;
    use serde::{Serialize, Serializer};

    macro_rules! words {
        ($($type:ty),*) => {
            $(impl Serialize for $type {
                fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                    to.serialize_str(self.as_str())
                }
            })*
        };
    }

    words!(super::Backend, Kind, Dtype);

    /// The name, or `unknown`.
    pub(crate) fn dtype<S: Serializer>(dtype: &Option<Dtype>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.map_or("unknown", Dtype::as_str))
    }
}

#[cfg(feature = "serde")]
pub(crate) use words::dtype;
