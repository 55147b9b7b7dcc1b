//! What a Linux host tells about itself in /proc and /sys: CPUs, memory, control groups, mounts and block devices.
//!
//! Everything is read through a [`View`], so that tests can put another host's files in its place. Nothing is opened but
//! those files, and nothing is changed.
#![forbid(unsafe_code)]

pub mod block;
pub mod cgroup;
pub mod cpus;
pub mod mounts;
#[cfg(feature = "tree")]
pub mod tree;
mod view;

pub use procfs::Meminfo;
pub use view::View;
