//! From a batch's segments to device reads: split, align, sort, merge neighbours, drop duplicates, and give
//! every read its place. Pure; property-tested against a byte-array model.
//!
//! A read lands in the response itself if alignment allows (`Place::Data`), else in scratch memory. Its
//! *pieces* say which of its bytes belong where; a piece that is already in its place costs nothing, any
//! other one memcpy. Invariant: no two in-place reads overlap in memory, and none reaches beyond
//! `data_bytes`.

pub(crate) mod model;

use crate::batch::{Batch, Segment};
use smallvec::SmallVec;

/// Constraints of the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlanRules {
    /// Whether to bypass the page cache for files that support it.
    pub(crate) direct: bool,
    /// Whether to merge neighbours and drop duplicates; a mapping does not gain from it.
    pub(crate) merge: bool,
    /// See `PlanConfig`.
    pub(crate) merge_gap_bytes: u32,
    /// See `PlanConfig`.
    pub(crate) max_read_bytes: u32,
}

/// Where a read lands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// At this offset of the response buffer.
    Data(u32),
    /// At this offset of the scratch buffer.
    Scratch(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannedRead {
    /// Which file; see `Segment::file`.
    pub(crate) file: u32,
    /// Whether to read past the page cache, and therefore aligned.
    pub(crate) direct: bool,
    /// Offset and length are multiples of this: 1 unless direct.
    pub(crate) alignment: u32,
    /// File offset.
    pub(crate) offset: u64,
    /// Bytes to request; may reach past the end of the file.
    pub(crate) length: u32,
    /// Bytes that must arrive.
    pub(crate) needed: u32,
    /// Where they go.
    pub(crate) place: Place,
    /// Its pieces: `first_piece .. first_piece + pieces`.
    pub(crate) first_piece: u32,
    /// Number of pieces.
    pub(crate) pieces: u32,
}

/// Bytes of a read that belong to an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The item's position in the batch.
    pub(crate) item: u32,
    /// Offset in the read.
    pub(crate) source: u32,
    /// Offset in the response buffer.
    pub(crate) target: u32,
    /// Bytes.
    pub(crate) length: u32,
}

/// All reads of a batch. Stores one read and one piece inline: most requests have one item.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Plan {
    pub(crate) reads: SmallVec<[PlannedRead; 1]>,
    pub(crate) pieces: SmallVec<[Piece; 1]>,
    /// Offset of item 0 in the response buffer: not 0 only if a single unaligned range is read in place.
    pub(crate) lead_bytes: u32,
    /// Required size of the response buffer.
    pub(crate) data_bytes: u32,
    /// Size of the scratch buffer. `u32::MAX`: too large, and the places are invalid.
    pub(crate) scratch_bytes: u32,
}

/// A segment, or the part of one that a single read may cover.
#[derive(Debug, Clone, Copy)]
struct SegmentPart {
    segment: Segment,
    direct: bool,
    alignment: u32,
    memory_alignment: u32,
}

/// The read under construction.
struct OpenRead {
    part: SegmentPart,
    start: u64,
    end: u64,
    needed_end: u64,
    /// Place in the response, while it can still be read there.
    in_place: Option<u32>,
    first_piece: usize,
}

// Alignments are powers of two (`dataset::direct` checks that): divisions would be a large part of the cost
// of planning.

fn align_down(value: u64, alignment: u32) -> u64 {
    value & !(u64::from(alignment) - 1)
}

fn align_up(value: u64, alignment: u32) -> u64 {
    align_down(value + u64::from(alignment - 1), alignment)
}

fn is_aligned(value: u32, alignment: u32) -> bool {
    value & (alignment - 1) == 0
}

/// The plan for a batch if its memory `fits`; otherwise one with every read in place, through the page cache
/// and unmerged, which needs only the memory of the response. Example: a million ranges of one byte, each in
/// its own sector, are a response of 1 MB; direct reads would take 512 MB of scratch memory.
pub(crate) fn plan_within(batch: &Batch, rules: PlanRules, fits: impl Fn(&Plan) -> bool) -> Plan {
    let planned = plan(batch, rules);
    if planned.scratch_bytes < u32::MAX && fits(&planned) {
        return planned;
    }
    plan(
        batch,
        PlanRules {
            direct: false,
            merge: false,
            ..rules
        },
    )
}

/// Estimates the number of reads in the plan of a batch, at a fiftieth of the cost of planning: merges an
/// item only with the one before it. Too high if a request names neighbours out of order.
pub(crate) fn expected_reads(batch: &Batch, rules: PlanRules) -> usize {
    let (mut reads, mut open) = (0, None);
    for segment in &batch.segments {
        let (start, end) = (segment.offset, segment.offset + u64::from(segment.length));
        open = match open {
            Some((file, from, to))
                if rules.merge
                    && file == segment.file
                    && (from..=to + u64::from(rules.merge_gap_bytes)).contains(&start)
                    && end - from <= u64::from(rules.max_read_bytes) =>
            {
                Some((file, from, end.max(to)))
            }
            Some(_) | None => {
                reads += segment.length.div_ceil(rules.max_read_bytes.max(1)) as usize;
                Some((segment.file, start, end))
            }
        };
    }
    reads
}

/// The batch's `data_bytes` is below 2^32 (the engine checks), file offsets are below 2^63 (the kernel's own
/// limit).
pub(crate) fn plan(batch: &Batch, rules: PlanRules) -> Plan {
    let total = u32::try_from(batch.data_bytes()).unwrap_or(u32::MAX);
    let mut plan = Plan {
        data_bytes: total,
        ..Plan::default()
    };
    let count = batch.segments.len();
    if count == 1 {
        let mut parts: SmallVec<[SegmentPart; 1]> = SmallVec::new();
        split(batch, rules, |part| parts.push(part));
        if let Some(first) = parts.first() {
            // A single range from offset 700, alignment 512: read from 512 into place 0, so that byte 700 is
            // at 188.
            #[expect(clippy::cast_possible_truncation, reason = "below the alignment, a u32")]
            let misalignment = (first.segment.offset & u64::from(first.alignment - 1)) as u32;
            plan.lead_bytes = misalignment;
            plan.data_bytes = plan.data_bytes.saturating_add(misalignment);
            for part in &mut parts {
                part.segment.target = part.segment.target.saturating_add(misalignment);
            }
        }
        plan_parts(&mut plan, &parts, rules);
    } else {
        let mut parts = Vec::with_capacity(count);
        split(batch, rules, |part| parts.push(part));
        plan_parts(&mut plan, &parts, rules);
    }
    plan
}

/// Builds reads from parts.
fn plan_parts(plan: &mut Plan, parts: &[SegmentPart], rules: PlanRules) {
    let data_end = plan.data_bytes;
    if let [part] = parts {
        let open = OpenRead::new(*part, plan.lead_bytes, data_end, 0);
        plan.pieces.push(piece_of(part, open.start));
        let read = open.close(plan, 1);
        return plan.reads.push(read);
    }
    let is_sorted = || parts.is_sorted_by_key(|part| (part.segment.file, part.segment.offset));
    if !rules.merge || is_sorted() {
        return plan_in_order(plan, parts.iter(), rules);
    }
    // By file and offset, and parts of the same bytes by their places in the response, which ascend with the index: a
    // number is cheaper to move than a part.
    let key = |(index, part): (u128, &SegmentPart)| {
        u128::from(part.segment.file) << 96 | u128::from(part.segment.offset) << 32 | index
    };
    let mut order: SmallVec<[u128; 64]> = (0..).zip(parts).map(key).collect();
    order.sort_unstable();
    #[expect(clippy::cast_possible_truncation, reason = "the index of a part")]
    let sorted = order.iter().filter_map(|key| parts.get(*key as u32 as usize));
    plan_in_order(plan, sorted, rules);
}

/// Builds reads from several parts, in this order.
fn plan_in_order<'a>(plan: &mut Plan, parts: impl Iterator<Item = &'a SegmentPart>, rules: PlanRules) {
    let (data_end, count) = (plan.data_bytes, parts.size_hint().1.unwrap_or(0));
    // A `SmallVec` takes more instructions to grow than a `Vec`.
    let (mut reads, mut pieces) = (Vec::with_capacity(count), Vec::with_capacity(count));
    let mut open: Option<OpenRead> = None;
    for part in parts {
        let merged = rules.merge && open.as_mut().is_some_and(|open| open.absorb(part, rules));
        if !merged {
            if let Some(done) = open.take() {
                reads.push(done.close(plan, pieces.len()));
            }
            open = Some(OpenRead::new(*part, plan.lead_bytes, data_end, pieces.len()));
        }
        if let Some(open) = &open {
            pieces.push(piece_of(part, open.start));
        }
    }
    if let Some(done) = open {
        reads.push(done.close(plan, pieces.len()));
    }
    (plan.reads, plan.pieces) = (reads.into(), pieces.into());
}

/// The piece that a part is of a read from `start`.
fn piece_of(part: &SegmentPart, start: u64) -> Piece {
    Piece {
        item: part.segment.item,
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a read has at most max_read_bytes, a u32"
        )]
        source: (part.segment.offset - start) as u32,
        target: part.segment.target,
        length: part.segment.length,
    }
}

/// Splits segments into parts that one read of at most `max_read_bytes` covers, at aligned file offsets.
fn split(batch: &Batch, rules: PlanRules, mut push: impl FnMut(SegmentPart)) {
    for segment in &batch.segments {
        let file = batch.file(segment.file);
        let (direct, alignment, memory_alignment) = match file {
            Some(file) if rules.direct && file.direct_fd().is_some() => (
                true,
                file.offset_alignment().max(1),
                file.memory_alignment().max(1),
            ),
            Some(_) | None => (false, 1, 1),
        };
        let mut rest = *segment;
        loop {
            let cut = align_down(rest.offset, alignment) + u64::from(rules.max_read_bytes);
            let available = cut - rest.offset;
            let segment = rest;
            if u64::from(rest.length) <= available {
                push(SegmentPart {
                    segment,
                    direct,
                    alignment,
                    memory_alignment,
                });
                break;
            }
            #[expect(clippy::cast_possible_truncation, reason = "available < rest.length, a u32")]
            let length = available as u32;
            push(SegmentPart {
                segment: Segment { length, ..segment },
                direct,
                alignment,
                memory_alignment,
            });
            rest.offset = cut;
            rest.length -= length;
            rest.target = rest.target.saturating_add(length);
        }
    }
}

impl SegmentPart {
    fn end(&self) -> u64 {
        self.segment.offset + u64::from(self.segment.length)
    }

    fn aligned_start(&self) -> u64 {
        align_down(self.segment.offset, self.alignment)
    }

    fn aligned_end(&self) -> u64 {
        align_up(self.end(), self.alignment)
    }
}

impl OpenRead {
    fn new(part: SegmentPart, lead: u32, data_end: u32, first_piece: usize) -> Self {
        let (start, end) = (part.aligned_start(), part.aligned_end());
        let segment = part.segment;
        // A read may overwrite bytes before its segment only in the lead, at the very front.
        let place = match segment.offset - start {
            0 => Some(segment.target),
            shift if shift == u64::from(lead) && segment.target == lead => Some(0),
            _ => None,
        };
        // It may overwrite bytes after its segment only at the end of the response, where the buffer is
        // padded.
        let last = segment.target.saturating_add(segment.length) == data_end;
        let in_place =
            place.filter(|place| is_aligned(*place, part.memory_alignment) && (end == part.end() || last));
        Self {
            part,
            start,
            end,
            needed_end: part.end(),
            in_place,
            first_piece,
        }
    }

    /// Merges a part into this read, if it is a neighbour and the read stays short enough.
    fn absorb(&mut self, next: &SegmentPart, rules: PlanRules) -> bool {
        let (start, end) = (next.aligned_start(), next.aligned_end());
        if next.segment.file != self.part.segment.file
            || start > self.end + u64::from(rules.merge_gap_bytes)
            || end.max(self.end) - self.start > u64::from(rules.max_read_bytes)
        {
            return false;
        }
        if next.end() <= self.needed_end {
            // Contained: a duplicate, or part of what is read anyway.
            return true;
        }
        let follows = self.in_place.is_some_and(|place| {
            next.segment.offset == self.needed_end
                && u64::from(next.segment.target) == u64::from(place) + (next.segment.offset - self.start)
        });
        // The last item may be padded at its end; in the middle of a merged read an item must end on the
        // alignment.
        if !(follows && self.end == self.needed_end && end == next.end()) {
            self.in_place = None;
        }
        self.end = self.end.max(end);
        self.needed_end = next.end();
        true
    }

    /// The finished read. `pieces`: the number of pieces so far.
    fn close(self, plan: &mut Plan, pieces: usize) -> PlannedRead {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "both are at most max_read_bytes, a u32"
        )]
        let (length, needed) = (
            (self.end - self.start) as u32,
            (self.needed_end - self.start) as u32,
        );
        let place = match self.in_place {
            Some(place) => {
                plan.data_bytes = plan.data_bytes.max(place.saturating_add(length));
                Place::Data(place)
            }
            None => {
                let step = self.part.alignment.max(self.part.memory_alignment);
                // Saturates like `scratch_bytes`; the engine then rejects the plan.
                let place = u32::try_from(align_up(plan.scratch_bytes.into(), step)).unwrap_or(u32::MAX);
                plan.scratch_bytes = place.saturating_add(length);
                Place::Scratch(place)
            }
        };
        PlannedRead {
            file: self.part.segment.file,
            direct: self.part.direct,
            alignment: self.part.alignment,
            offset: self.start,
            length,
            needed,
            place,
            first_piece: u32::try_from(self.first_piece).unwrap_or(u32::MAX),
            pieces: u32::try_from(pieces - self.first_piece).unwrap_or(u32::MAX),
        }
    }
}

#[cfg(test)]
mod tests;
