//! Errors of reads. One closed set for every backend: the same cause gives the same value, so that clients
//! need not handle errors differently after a switch.

/// Why an item, or a whole batch, could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// A block index or vector id at or past the dataset's count.
    #[error("{what} {index} is out of range: the dataset has {count} ({what} 0 to {})", .count.saturating_sub(1))]
    IndexOutOfRange {
        /// `block` or `vector`.
        what: &'static str,
        /// The requested index.
        index: u64,
        /// How many there are.
        count: u64,
    },
    /// A byte range that ends past the end.
    #[error("{}", past_the_end(*.offset, *.length, *.end))]
    RangeOutOfRange {
        /// First requested byte.
        offset: u64,
        /// Requested bytes.
        length: u64,
        /// Length of the dataset or object.
        end: u64,
    },
    /// `offset + length` does not fit 64 bits.
    #[error("offset {offset} + length {length} overflows 64 bits")]
    RangeOverflow {
        /// First requested byte.
        offset: u64,
        /// Requested bytes.
        length: u64,
    },
    /// A range of no bytes.
    #[error("length is 0: ask for at least one byte")]
    ZeroLength,
    /// An item larger than the largest response.
    #[error(
        "the item has {length} bytes, and one response has at most {max}: fetch it in ranges, or an object by ReadObject (HTTP: GET)"
    )]
    ItemTooLarge {
        /// The item's length.
        length: u64,
        /// The largest possible length.
        max: ResponseMax,
    },
    /// A batch of more bytes than a response, or its caller's memory, can hold.
    #[error(
        "the response would have {length} bytes; the limit is {max}: split the batch, or raise that limit and the client's \
         message size"
    )]
    ResponseTooLarge {
        /// The response's length.
        length: u64,
        /// The largest possible length.
        max: ResponseMax,
    },
    /// An object name that is empty, absolute, or has an empty, `.` or `..` part.
    #[error("object name {name:?} is not valid: {reason}")]
    ObjectNameInvalid {
        /// The requested name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No such object inside the dataset's directory (or a link that leaves it, a directory, a device).
    #[error("there is no object {name:?} in this dataset")]
    ObjectNotFound {
        /// The requested name.
        name: String,
    },
    /// The object exists but cannot be opened.
    #[error("object {name:?} cannot be opened: {}", std::io::Error::from_raw_os_error(*.errno))]
    ObjectUnreadable {
        /// The requested name.
        name: String,
        /// errno of the attempt.
        errno: i32,
    },
    /// The current version is not the required one.
    #[error("the requested version is not the current one, whose etag is {etag}")]
    VersionMismatch {
        /// The current version.
        etag: String,
    },
    /// The file was truncated after it was opened: these bytes are gone.
    #[error("bytes {offset}..{} are gone: the file was truncated after it was opened", .offset.saturating_add(*.length))]
    Truncated {
        /// Offset of the item in the address space or the object.
        offset: u64,
        /// Length of the item.
        length: u64,
    },
    /// The device or the file system failed the read.
    #[error(
        "reading bytes {offset}..{} failed: {}",
        .offset.saturating_add(*.length),
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Device {
        /// errno of the attempt, as the page cache has it: EIO for those of the block layer.
        errno: i32,
        /// Offset of the item in the address space or the object.
        offset: u64,
        /// Length of the item.
        length: u64,
    },
    /// A limit is reached now; a retry after a moment makes sense.
    #[error("overloaded: {resource}; retry after a moment, or send less at once")]
    Overloaded {
        /// The resource.
        resource: Resource,
    },
    /// The deadline passed before the reads were started, or while they were waited for.
    #[error("the deadline passed before the read was done")]
    DeadlineExceeded,
    /// The engine is shutting down and takes no new work.
    #[error("the daemon is draining")]
    Draining,
    /// The shard of this batch failed; the daemon's log says why.
    #[error("the engine failed while it had this read")]
    ShardFailed,
}

/// The message for a range that ends past the end. One that begins there has no length that would do, and its length may be
/// one that nobody sent.
fn past_the_end(offset: u64, length: u64, end: u64) -> String {
    match end.saturating_sub(offset) {
        0 => format!("offset {offset} is past the end: there are {end} bytes, counted from 0"),
        most => format!(
            "offset {offset} + length {length} ends past the end: there are {end} bytes, so ask for at most {most}"
        ),
    }
}

/// The longest response that a caller may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResponseMax {
    /// Its length.
    pub bytes: u64,
    /// What limits it.
    pub bound: ResponseBound,
}

impl ResponseMax {
    /// A limit on every response.
    pub const fn of_any(bytes: u64) -> Self {
        let bound = ResponseBound::Response;
        Self { bytes, bound }
    }

    /// The smaller one.
    #[must_use]
    pub fn or_less(self, other: Self) -> Self {
        if other.bytes < self.bytes { other } else { self }
    }
}

impl std::fmt::Display for ResponseMax {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let key = match self.bound {
            ResponseBound::Response => "limits.response_bytes",
            ResponseBound::Connection => "limits.connection_bytes",
            ResponseBound::Principal => "memory= of the principal",
        };
        write!(f, "{} bytes ({key})", self.bytes)
    }
}

/// What limits the length of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResponseBound {
    /// The limit on every response (`limits.response_bytes`).
    Response,
    /// The connection's share of the response memory (`limits.connection_bytes`).
    Connection,
    /// The caller's own limit of the response memory.
    Principal,
}

/// The limited resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Resource {
    /// Reads accepted and not answered, of the whole daemon, or waiting on one shard (`limits.queued_reads`).
    QueuedReads,
    /// The response memory of the whole daemon (`engine.memory_budget`).
    Memory,
    /// One caller's share of that memory: half of what is free.
    CallerMemory,
    /// One caller's own limit of that memory ([`crate::share::CallerShare::set_most`]).
    PrincipalMemory,
    /// One connection's share of that memory (`limits.connection_bytes`).
    ConnectionMemory,
    /// One caller's share of the queue: half of what is free.
    CallerReads,
    /// The open files of an objects dataset (`max_open_files`, plus those that requests may hold beyond it).
    OpenObjects,
    /// One caller's share of the objects that requests hold open: half of what is free.
    CallerObjects,
}

impl std::fmt::Display for Resource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::QueuedReads => "the queue of reads is full (limits.queued_reads)",
            Self::Memory => "the response memory is used up (engine.memory_budget)",
            Self::CallerMemory => {
                "this answer and those that this caller has not read are more than half of the response memory that is \
                 free (engine.memory_budget)"
            }
            Self::PrincipalMemory => {
                "this answer and those that this principal has not read are more than its own limit (memory= in the file of \
                 principals)"
            }
            Self::CallerReads => {
                "these reads and those that this caller has queued are more than half of the room that is left \
                 (limits.queued_reads)"
            }
            Self::ConnectionMemory => {
                "this connection's share of the response memory is used up (limits.connection_bytes)"
            }
            Self::OpenObjects => {
                "requests hold as many of the dataset's objects open as may be (max_open_files)"
            }
            Self::CallerObjects => {
                "these objects and those that this caller's requests hold open are more than half of what may still be \
                 held open: ask for fewer at a time"
            }
        })
    }
}

impl ReadError {
    /// The value of the metrics' `result` label: a closed set of few words.
    pub fn label(&self) -> &'static str {
        match self {
            Self::IndexOutOfRange { .. } | Self::RangeOutOfRange { .. } => "out_of_range",
            Self::RangeOverflow { .. }
            | Self::ZeroLength
            | Self::ItemTooLarge { .. }
            | Self::ResponseTooLarge { .. }
            | Self::ObjectNameInvalid { .. } => "invalid",
            // The requested version does not exist.
            Self::ObjectNotFound { .. } | Self::VersionMismatch { .. } => "not_found",
            Self::ObjectUnreadable { errno, .. } if is_of_device(*errno) => "device_error",
            Self::ObjectUnreadable { .. } => "unreadable",
            Self::Device { errno, .. } if is_temporary(*errno) => "unreadable",
            Self::Truncated { .. } => "truncated",
            Self::Device { .. } => "device_error",
            Self::Overloaded { .. } => "overloaded",
            Self::DeadlineExceeded => "deadline",
            Self::Draining => "draining",
            Self::ShardFailed => "engine_failed",
        }
    }

    /// Whether the file was truncated, or replaced on the server of its file system, after it was opened: opened again, it
    /// may be readable.
    pub fn is_of_lost_file(&self) -> bool {
        matches!(
            self,
            Self::Truncated { .. }
                | Self::Device {
                    errno: libc::ESTALE,
                    ..
                }
        )
    }
}

/// Whether an open or a read that failed with this errno may succeed when it is repeated: no memory or no thread for it, or it
/// was interrupted again and again.
pub fn is_temporary(errno: i32) -> bool {
    matches!(errno, libc::EAGAIN | libc::ENOMEM | libc::EINTR | libc::ECANCELED)
}

/// Whether an open, or a list of a directory, that failed with this errno failed as a read of it would: the device, its file
/// system, or a server. As with reads, that is every errno which is not known to mean something else: no permission or key for
/// it, no descriptor, direct I/O that is required and refused (EINVAL), or that it is temporary.
pub fn is_of_device(errno: i32) -> bool {
    let is_other = matches!(
        errno,
        libc::EACCES | libc::EPERM | libc::ENOKEY | libc::EMFILE | libc::ENFILE | libc::EINVAL
    );
    !is_other && !is_temporary(errno)
}

/// The errno of a failed read as the page cache has it, so that it does not depend on the kind of read: a direct read of a block
/// device reports what the block layer does (`blk_errors` in block/blk-core.c; ENODATA for a bad sector), and the page cache
/// EIO for all of these. ETIMEDOUT stays: network file systems report it for either kind of read, and it says more.
pub(crate) fn as_of_page_cache(errno: i32) -> i32 {
    match errno {
        libc::ENODATA
        | libc::EREMOTEIO
        | libc::ENOLINK
        | libc::EILSEQ
        | libc::EBADE
        | libc::ETIME
        | libc::ENODEV => libc::EIO,
        other => other,
    }
}

/// An item of a batch that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemError {
    /// The item's position in the batch, from 0.
    pub item: u32,
    /// Why.
    pub error: ReadError,
}
