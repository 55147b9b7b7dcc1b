//! What a Linux host reports about itself in /proc and /sys: CPUs, memory, control groups, mounts and block
//! devices; and about a socket and the CPU time of a process.
//!
//! Everything but these is read through a [`View`], so that tests can substitute another host's files. Only those files
//! are opened, and nothing is changed.

pub mod block;
pub mod cgroup;
pub mod cpus;
pub mod mounts;
pub mod process;
pub mod socket;
#[cfg(feature = "tree")]
pub mod tree;
mod view;

pub use procfs::Meminfo;
pub use view::{View, chosen};
