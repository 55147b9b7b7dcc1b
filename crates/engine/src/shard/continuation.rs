//! What follows an attempt: its read continues, has ended, or has failed.
//!
//! The file's length decides whether a short read reached the end of the file. The attempt's own bytes
//! cannot: on a file system that returns less than requested (FUSE), an attempt that starts again at the
//! alignment can end before the previous one did.

use super::in_flight::Slot;
use crate::planned_batch::PlannedBatch;

/// How often an interrupted attempt (EINTR, EAGAIN, or ECANCELED, see TRAPS 36) is repeated before it fails.
const INTERRUPTED_RETRIES_MAX: u8 = 16;

/// How often a read continues after attempts without progress before it fails.
const BARREN_RETRIES_MAX: u8 = 16;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Another attempt, from `Slot::from`.
    Attempt,
    /// The read has ended: complete, at the end of the file, or failed with this errno.
    Over(Option<i32>),
}

/// What follows an attempt at the read in `slot`.
pub(super) fn after(result: Result<u32, i32>, slot: &mut Slot, batch: &PlannedBatch) -> Next {
    match result {
        Ok(bytes) => after_bytes(bytes, slot, batch).unwrap_or_else(|errno| failed(errno, slot)),
        Err(libc::EINTR | libc::EAGAIN | libc::ECANCELED) if slot.interrupted < INTERRUPTED_RETRIES_MAX => {
            slot.interrupted += 1;
            Next::Attempt
        }
        Err(errno) => failed(errno, slot),
    }
}

/// An attempt that fails leaves garbage in its memory, also over bytes that an earlier one had read.
fn failed(errno: i32, slot: &mut Slot) -> Next {
    slot.tracked.reached = slot.tracked.reached.min(slot.from);
    Next::Over(Some(errno))
}

fn after_bytes(bytes: u32, slot: &mut Slot, batch: &PlannedBatch) -> Result<Next, i32> {
    let read = slot.tracked.read;
    let reached = slot.from.saturating_add(bytes).min(read.length);
    let is_barren = reached <= slot.tracked.reached;
    slot.tracked.reached = slot.tracked.reached.max(reached);
    if slot.tracked.reached >= read.needed {
        return Ok(Next::Over(None));
    }
    if is_barren {
        // What this host knows is enough to continue. Before the read fails, the file's server is queried,
        // which might take as long as a read.
        let is_last = slot.barren == BARREN_RETRIES_MAX;
        if batch.file_ends_by(&read, reached, is_last)? {
            // Bytes that an earlier attempt read behind it are gone, also from memory: a direct read overwrites
            // the rest of its last sector.
            slot.tracked.reached = reached;
            return Ok(Next::Over(None));
        }
        if is_last {
            return Err(libc::EIO);
        }
        slot.barren += 1;
    }
    // The next attempt starts at the alignment, of the file and of the memory, so it repeats some bytes.
    // Worked, alignment 512: 700 of 4096 arrive; the next attempt, from 512, returns 188, which is 700 again
    // and no progress: the file ends there unless it is longer.
    slot.from = slot.tracked.reached - slot.tracked.reached % batch.restart_alignment(&read);
    Ok(Next::Attempt)
}
