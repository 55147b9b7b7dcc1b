//! From a batch's segments to device reads: split, align, sort, merge neighbours, drop duplicates, and give
//! every read its place. Pure; property-tested against a byte-array model.
//!
//! A read lands in the response itself if alignment allows (`Place::Data`), else in scratch memory. Its
//! *pieces* say which of its bytes belong where; a piece that is already in its place costs nothing, any
//! other one memcpy. Invariant: no two in-place reads overlap in memory, and none reaches beyond
//! `data_bytes`.

pub(crate) mod model;

use crate::batch::{Batch, Segment};
use crate::dataset::ALIGNMENT_MAX;
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

/// How a file is read.
#[derive(Debug, Clone, Copy)]
struct FileRules {
    file: u32,
    direct: bool,
    alignment: u32,
    memory_alignment: u32,
}

/// The read under construction.
struct OpenRead {
    rules: FileRules,
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
    let mut plan = Plan {
        data_bytes: u32::try_from(batch.data_bytes()).unwrap_or(u32::MAX),
        ..Plan::default()
    };
    let segments = batch.segments.as_slice();
    if let [segment] = segments {
        plan_segment(&mut plan, batch, *segment, rules);
    } else if segments.iter().all(|segment| segment.length <= uncut_max(rules)) {
        plan_parts(&mut plan, batch, segments, rules);
    } else {
        let mut parts = Vec::with_capacity(segments.len());
        for segment in segments {
            let file = FileRules::of(batch, segment.file, rules);
            split(*segment, file, rules, |part| parts.push(part));
        }
        plan_parts(&mut plan, batch, &parts, rules);
    }
    plan
}

/// A segment of this length is one part, whatever its alignment.
fn uncut_max(rules: PlanRules) -> u32 {
    rules.max_read_bytes.saturating_sub(ALIGNMENT_MAX - 1)
}

/// Builds the reads of the only segment, which may have a lead.
fn plan_segment(plan: &mut Plan, batch: &Batch, segment: Segment, rules: PlanRules) {
    let file = FileRules::of(batch, segment.file, rules);
    // A single range from offset 700, alignment 512: read from 512 into place 0, so that byte 700 is at 188.
    #[expect(clippy::cast_possible_truncation, reason = "below the alignment, a u32")]
    let misalignment = (segment.offset & u64::from(file.alignment - 1)) as u32;
    plan.lead_bytes = misalignment;
    plan.data_bytes = plan.data_bytes.saturating_add(misalignment);
    let segment = Segment {
        target: segment.target.saturating_add(misalignment),
        ..segment
    };
    let mut parts: SmallVec<[Segment; 1]> = SmallVec::new();
    split(segment, file, rules, |part| parts.push(part));
    if let [part] = parts.as_slice() {
        let open = OpenRead::new(part, file, plan.lead_bytes, plan.data_bytes, 0);
        plan.pieces.push(piece_of(part, open.start));
        let read = open.close(plan, 1);
        return plan.reads.push(read);
    }
    plan_in_order(plan, batch, parts.iter(), rules);
}

/// Builds reads from parts.
fn plan_parts(plan: &mut Plan, batch: &Batch, parts: &[Segment], rules: PlanRules) {
    if !rules.merge || parts.is_sorted_by_key(|part| (part.file, part.offset)) {
        return plan_in_order(plan, batch, parts.iter(), rules);
    }
    let (order, index_mask) = order_of(parts);
    #[expect(clippy::cast_possible_truncation, reason = "the index of a part")]
    let sorted = order
        .iter()
        .filter_map(|key| parts.get((key & index_mask) as usize));
    plan_in_order(plan, batch, sorted, rules);
}

/// Numbers that have the index of a part in the bits of the mask: by file and offset, and parts of the same bytes by their
/// places in the response, which ascend with the index.
fn order_of(parts: &[Segment]) -> (SmallVec<[u64; 64]>, u64) {
    let bits = |number: u64| u64::BITS - number.leading_zeros();
    let (files, offsets) = parts.iter().fold((0, 0), |(files, offsets), part| {
        (files | part.file, offsets | part.offset)
    });
    let (offset_bits, index_bits) = (bits(offsets), bits(parts.len() as u64));
    let mut order: SmallVec<[u64; 64]>;
    // One number is cheaper to move and to compare than a part. 4096 items of 1000 files of 1 TiB take 13 + 10 + 40 bits.
    if bits(files.into()) + offset_bits + index_bits <= u64::BITS {
        let key = |(index, part): (u64, &Segment)| {
            (u64::from(part.file) << offset_bits | part.offset) << index_bits | index
        };
        order = (0..).zip(parts).map(key).collect();
        order.sort_unstable();
    } else {
        let key = |(_, part): &(u64, &Segment)| (part.file, part.offset);
        let mut indexed: Vec<_> = (0..).zip(parts).collect();
        indexed.sort_by_key(key);
        order = indexed.into_iter().map(|(index, _)| index).collect();
    }
    (order, (1 << index_bits) - 1)
}

/// Builds reads from several parts, in this order.
fn plan_in_order<'a>(
    plan: &mut Plan,
    batch: &Batch,
    mut parts: impl Iterator<Item = &'a Segment>,
    rules: PlanRules,
) {
    let (lead, data_end, count) = (plan.lead_bytes, plan.data_bytes, parts.size_hint().1.unwrap_or(0));
    let Some(first) = parts.next() else { return };
    // A `SmallVec` takes more instructions to grow than a `Vec`.
    let (mut reads, mut pieces) = (Vec::with_capacity(count), Vec::with_capacity(count));
    let mut file = FileRules::of(batch, first.file, rules);
    let mut open = OpenRead::new(first, file, lead, data_end, 0);
    pieces.push(piece_of(first, open.start));
    for part in parts {
        if !(rules.merge && open.absorb(part, rules)) {
            reads.push(open.close(plan, pieces.len()));
            if part.file != file.file {
                file = FileRules::of(batch, part.file, rules);
            }
            open = OpenRead::new(part, file, lead, data_end, pieces.len());
        }
        pieces.push(piece_of(part, open.start));
    }
    reads.push(open.close(plan, pieces.len()));
    (plan.reads, plan.pieces) = (reads.into(), pieces.into());
}

/// The piece that a part is of a read from `start`.
fn piece_of(part: &Segment, start: u64) -> Piece {
    Piece {
        item: part.item,
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a read has at most max_read_bytes, a u32"
        )]
        source: (part.offset - start) as u32,
        target: part.target,
        length: part.length,
    }
}

/// Splits a segment into parts that one read of at most `max_read_bytes` covers, at aligned file offsets.
fn split(segment: Segment, file: FileRules, rules: PlanRules, mut push: impl FnMut(Segment)) {
    let mut rest = segment;
    loop {
        let cut = align_down(rest.offset, file.alignment) + u64::from(rules.max_read_bytes);
        let available = cut - rest.offset;
        if u64::from(rest.length) <= available {
            return push(rest);
        }
        #[expect(clippy::cast_possible_truncation, reason = "available < rest.length, a u32")]
        let length = available as u32;
        push(Segment { length, ..rest });
        rest.offset = cut;
        rest.length -= length;
        rest.target = rest.target.saturating_add(length);
    }
}

impl FileRules {
    fn of(batch: &Batch, file: u32, rules: PlanRules) -> Self {
        let direct = batch
            .file(file)
            .filter(|file| rules.direct && file.direct_fd().is_some());
        Self {
            file,
            direct: direct.is_some(),
            alignment: direct.map_or(1, |file| file.offset_alignment().max(1)),
            memory_alignment: direct.map_or(1, |file| file.memory_alignment().max(1)),
        }
    }
}

fn end_of(part: &Segment) -> u64 {
    part.offset + u64::from(part.length)
}

impl OpenRead {
    fn new(part: &Segment, rules: FileRules, lead: u32, data_end: u32, first_piece: usize) -> Self {
        let needed_end = end_of(part);
        let start = align_down(part.offset, rules.alignment);
        let end = align_up(needed_end, rules.alignment);
        // A read may overwrite bytes before its segment only in the lead, at the very front.
        let place = match part.offset - start {
            0 => Some(part.target),
            shift if shift == u64::from(lead) && part.target == lead => Some(0),
            _ => None,
        };
        // It may overwrite bytes after its segment only at the end of the response, where the buffer is
        // padded.
        let last = part.target.saturating_add(part.length) == data_end;
        let in_place =
            place.filter(|place| is_aligned(*place, rules.memory_alignment) && (end == needed_end || last));
        Self {
            rules,
            start,
            end,
            needed_end,
            in_place,
            first_piece,
        }
    }

    /// Merges a part into this read, if it is a neighbour and the read stays short enough.
    fn absorb(&mut self, next: &Segment, rules: PlanRules) -> bool {
        let (start, needed_end) = (align_down(next.offset, self.rules.alignment), end_of(next));
        let end = align_up(needed_end, self.rules.alignment);
        if next.file != self.rules.file
            || start > self.end + u64::from(rules.merge_gap_bytes)
            || end.max(self.end) - self.start > u64::from(rules.max_read_bytes)
        {
            return false;
        }
        if needed_end <= self.needed_end {
            // Contained: a duplicate, or part of what is read anyway.
            return true;
        }
        let follows = self.in_place.is_some_and(|place| {
            next.offset == self.needed_end
                && u64::from(next.target) == u64::from(place) + (next.offset - self.start)
        });
        // The last item may be padded at its end; in the middle of a merged read an item must end on the
        // alignment.
        if !(follows && self.end == self.needed_end && end == needed_end) {
            self.in_place = None;
        }
        self.end = self.end.max(end);
        self.needed_end = needed_end;
        true
    }

    /// The finished read. `pieces`: the number of pieces so far.
    fn close(&self, plan: &mut Plan, pieces: usize) -> PlannedRead {
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
                let step = self.rules.alignment.max(self.rules.memory_alignment);
                // Saturates like `scratch_bytes`; the engine then rejects the plan.
                let place = u32::try_from(align_up(plan.scratch_bytes.into(), step)).unwrap_or(u32::MAX);
                plan.scratch_bytes = place.saturating_add(length);
                Place::Scratch(place)
            }
        };
        PlannedRead {
            file: self.rules.file,
            direct: self.rules.direct,
            alignment: self.rules.alignment,
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
