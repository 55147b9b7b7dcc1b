//! A planned batch with its memory: where each read goes, and where its bytes belong.
//!
//! Only the shard uses it. Invariant: bytes are copied only after their read has finished. The shard decides
//! when reads are made and when they are finished.

use crate::backend::Attempt;
use crate::backend::residency::Residency;
use crate::batch::{Fetched, Item, Objects, file_of};
use crate::buffer::PooledBuffer;
use crate::config::BackendKind;
use crate::dataset::{Dataset, HeldFile, OpenFile};
use crate::error::{ItemError, ReadError, as_of_page_cache};
use crate::metrics::RESULT_ABANDONED;
use crate::plan::{Piece, Place, Plan, PlannedRead};
use crate::share::Charge;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Why a read is incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shortfall {
    /// The file ended.
    EndOfFile,
    /// errno of the device or the file system.
    Errno(i32),
    /// The plan does not match the batch: a defect.
    Defect,
}

#[derive(Debug)]
pub(crate) struct PlannedBatch {
    /// The backend for which it was accepted.
    pub(crate) backend: BackendKind,
    /// What is known about the residency of its bytes.
    pub(crate) residency: Residency,
    pub(crate) dataset: Arc<Dataset>,
    /// Caller and connection, for turns.
    pub(crate) origin: Option<(u64, u64)>,
    /// The caller's weight among others.
    pub(crate) weight: u32,
    /// As of the batch; `None` if it reads the files of the dataset.
    pub(crate) objects: Option<Arc<Objects>>,
    pub(crate) items: SmallVec<[Item; 1]>,
    pub(crate) errors: Vec<ItemError>,
    pub(crate) plan: Plan,
    /// `None` if there is nothing to read.
    pub(crate) buffer: Option<PooledBuffer>,
    /// `None` if every read lands in place.
    pub(crate) scratch: Option<PooledBuffer>,
    /// Held until the reply.
    pub(crate) _reads: Option<Charge>,
    pub(crate) accepted: Instant,
    /// From then until its last read was submitted.
    pub(crate) queue_ns: u64,
    pub(crate) deadline: Option<Instant>,
    pub(crate) reply: oneshot::Sender<Result<Fetched, ReadError>>,
}

/// Most boxes of batches that a thread keeps, about 440 bytes each.
const SPARES_MAX: usize = 64;

thread_local! {
    /// Boxes of replied batches. A core reuses them for the batches that it submits.
    #[expect(clippy::vec_box, reason = "it is the boxes that are kept")]
    static SPARES: RefCell<Vec<Box<MaybeUninit<PlannedBatch>>>> = const { RefCell::new(Vec::new()) };
}

impl PlannedBatch {
    /// Boxes the batch, reusing memory that the thread kept.
    pub(crate) fn boxed(self) -> Box<Self> {
        match SPARES.with_borrow_mut(Vec::pop) {
            Some(spare) => Box::write(spare, self),
            None => Box::new(self),
        }
    }

    /// Unboxes the batch; the thread keeps the box.
    #[inline]
    pub(crate) fn unboxed(boxed: Box<Self>) -> Self {
        // SAFETY: same pointer and layout, and `MaybeUninit` allows initialized contents.
        let spare: Box<MaybeUninit<Self>> = unsafe { Box::from_raw(Box::into_raw(boxed).cast()) };
        // SAFETY: the box held a batch; as `MaybeUninit` it is neither dropped nor read again.
        let batch = unsafe { spare.assume_init_read() };
        SPARES.with_borrow_mut(|spares| {
            if spares.len() < SPARES_MAX {
                spares.push(spare);
            }
        });
        batch
    }

    /// The result of its reads, if nobody waits for it any more. Whoever waits stops at the deadline, and clients
    /// with a deadline do so themselves: past it, it is the daemon that was late.
    pub(crate) fn given_up(&self, now: Instant) -> &'static str {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            ReadError::DeadlineExceeded.label()
        } else {
            RESULT_ABANDONED
        }
    }

    /// The attempt at a read, starting at its byte `from`.
    pub(crate) fn attempt(&self, slot: u32, read: &PlannedRead, from: u32) -> Option<Attempt> {
        let file = self.held_file(read)?;
        let (buffer, place) = self.memory_of(read)?;
        let length = read.length - from;
        let destination = buffer.place(place as usize + from as usize, length as usize);
        Some(Attempt {
            slot,
            file,
            direct: read.direct,
            may_copy: self.backend == BackendKind::Auto,
            residency: self.residency,
            offset: read.offset + u64::from(from),
            destination,
            length,
        })
    }

    /// What the start of an attempt must be aligned to, in the file and in memory.
    pub(crate) fn restart_alignment(&self, read: &PlannedRead) -> u32 {
        let file = self.file(read).filter(|_| read.direct);
        read.alignment.max(file.map_or(1, |file| file.memory_alignment()))
    }

    /// Whether the file of a read ends `reached` bytes after the read's start, or earlier. `waits`: see
    /// [`OpenFile::ends_by`].
    ///
    /// # Errors
    /// errno of the query.
    pub(crate) fn file_ends_by(&self, read: &PlannedRead, reached: u32, waits: bool) -> Result<bool, i32> {
        let offset = read.offset + u64::from(reached);
        // Without a file no attempt is made.
        self.file(read)
            .map_or(Ok(true), |file| file.ends_by(offset, waits))
    }

    /// `OpenFile::id` of a read's file; `None` is a defect of the planner.
    pub(crate) fn file_id(&self, read: &PlannedRead) -> Option<u64> {
        self.file(read).map(|file| file.id)
    }

    /// The disk that a read is made from: [`Dataset::disk_of`].
    pub(crate) fn disk_of(&self, read: &PlannedRead) -> Option<u64> {
        Some(self.dataset.disk_of(self.file(read)?))
    }

    fn file(&self, read: &PlannedRead) -> Option<&Arc<OpenFile>> {
        let objects = self.objects.as_deref().map_or(&[][..], Objects::as_slice);
        file_of(&self.dataset, objects, read.file)
    }

    /// As [`Self::file`], held by what this batch has for itself.
    fn held_file(&self, read: &PlannedRead) -> Option<HeldFile> {
        let index = read.file as usize;
        match &self.objects {
            Some(objects) => HeldFile::of(objects, |objects| Some(objects.get(index)?)),
            None => HeldFile::of(&self.dataset, |dataset| Some(dataset.files().get(index)?)),
        }
    }

    fn memory_of(&self, read: &PlannedRead) -> Option<(&PooledBuffer, u32)> {
        match read.place {
            Place::Data(place) => Some((self.buffer.as_ref()?, place)),
            Place::Scratch(place) => Some((self.scratch.as_ref()?, place)),
        }
    }

    /// Copies `length` bytes of `read`, starting at its byte `from`, to the start of a read of another batch
    /// (or of this one).
    pub(crate) fn share(
        &self,
        read: &PlannedRead,
        from: u32,
        with: &Self,
        joiner: &PlannedRead,
        length: u32,
    ) {
        let (Some((source, place)), Some((target, target_place))) =
            (self.memory_of(read), with.memory_of(joiner))
        else {
            return;
        };
        source.copy_to(
            place as usize + from as usize,
            target,
            target_place as usize,
            length as usize,
        );
    }

    /// Copies the bytes of a read to where they belong, and records the items whose bytes are missing.
    /// Returns the number of bytes copied.
    pub(crate) fn deliver(&mut self, read: &PlannedRead, reached: u32, shortfall: Shortfall) -> u64 {
        let pieces = read.first_piece as usize..(read.first_piece + read.pieces) as usize;
        let mut copied = 0;
        for piece in self.plan.pieces.get(pieces).unwrap_or_default() {
            if piece.source + piece.length > reached {
                let Some(item) = self.items.get(piece.item as usize) else {
                    continue;
                };
                let (offset, length) = (item.offset, u64::from(item.length));
                let error = match shortfall {
                    Shortfall::Errno(errno) => ReadError::Device {
                        errno: as_of_page_cache(errno),
                        offset,
                        length,
                    },
                    Shortfall::EndOfFile => ReadError::Truncated { offset, length },
                    Shortfall::Defect => ReadError::ShardFailed,
                };
                self.errors.push(ItemError {
                    item: piece.item,
                    error,
                });
                continue;
            }
            let Some(data) = self.buffer.as_ref() else {
                continue;
            };
            let (from, place) = match read.place {
                Place::Data(place) if place + piece.source == piece.target => continue,
                Place::Data(place) => (data, place),
                Place::Scratch(place) => match self.scratch.as_ref() {
                    Some(scratch) => (scratch, place),
                    None => continue,
                },
            };
            let source = (place + piece.source) as usize;
            from.copy_to(source, data, piece.target as usize, piece.length as usize);
            copied += u64::from(piece.length);
        }
        copied
    }

    /// Appends each piece of a merged read as a separate read, straight into its item's place, which no other
    /// read uses: a failed read leaves garbage in its memory, which must not be another item's. Returns the
    /// number of reads.
    ///
    /// A piece that is not aligned for direct reads is read through the page cache, whose errors are per
    /// page, as under a mapping. Worked, alignment 512: a piece of 400 bytes at 700 in a read at 4096 becomes
    /// a buffered read of 400 bytes from 4796.
    pub(crate) fn split_pieces(&mut self, read: &PlannedRead) -> usize {
        let memory_alignment = self.file(read).map_or(1, |file| file.memory_alignment());
        let plan = &mut self.plan;
        let pieces = read.first_piece as usize..(read.first_piece + read.pieces) as usize;
        let singles: Vec<Piece> = plan.pieces.get(pieces).unwrap_or_default().to_vec();
        for piece in &singles {
            let offset = read.offset + u64::from(piece.source);
            let direct = read.direct
                && offset.is_multiple_of(u64::from(read.alignment))
                && piece.length.is_multiple_of(read.alignment)
                && piece.target.is_multiple_of(memory_alignment);
            plan.reads.push(PlannedRead {
                direct,
                alignment: if direct { read.alignment } else { 1 },
                offset,
                length: piece.length,
                needed: piece.length,
                place: Place::Data(piece.target),
                first_piece: u32::try_from(plan.pieces.len()).unwrap_or(u32::MAX),
                pieces: 1,
                ..*read
            });
            plan.pieces.push(Piece { source: 0, ..*piece });
        }
        singles.len()
    }
}
