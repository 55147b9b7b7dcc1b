//! The threads that open objects: of the whole process, so that their number does not grow with its cores.

use super::objects::OPENS_MAX;
use crate::blocking::BlockingPool;

/// Most threads: three directories whose file system hangs leave none to others. Each takes 160 KiB (measured), until
/// it has been idle for 10 s.
pub(super) const OPENERS_MAX: usize = 3 * OPENS_MAX;

pub(super) static OPENERS: BlockingPool = BlockingPool::new("rf-open", OPENERS_MAX);
