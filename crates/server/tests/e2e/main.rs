//! The daemon as its clients see it: the real binary on real files, over sockets. Each test has its own
//! daemon, ports and directory, so that they run concurrently. Some need root (loop devices, another user)
//! and are otherwise ignored.
//!
//! What needs no process is in unit tests next to the code; README's sessions with grpcurl and Python are in
//! `.ci/readme-session`.

#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod daemon;
mod data;
mod exposition;
mod loop_device;
mod readers;
mod wire;

mod access;
mod access_log;
mod adversary;
mod agreement;
mod backlog;
mod bare_host;
mod byte_ranges;
mod commands;
mod counting;
mod deadlines;
mod descriptions;
mod devices;
mod drains;
mod flip;
mod garbage;
mod handbook;
mod hanging_disks;
mod kept_memory;
mod lab;
mod last_bytes;
mod listing;
mod long_objects;
mod long_texts;
mod misconfigured;
mod no_ring;
mod no_threads;
mod object_streams;
mod overload;
mod page;
mod patience;
mod pipelining;
mod refusals;
mod reload;
mod reload_refused;
mod restarts;
mod scores;
mod seccomp;
mod shortcuts;
mod slow_readers;
mod stopped;
mod supervised;
mod surfaces;
mod system_calls;
mod tls;
mod traces;
mod vanishing;
mod versions;
