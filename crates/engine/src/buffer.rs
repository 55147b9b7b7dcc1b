//! Response memory: one page-aligned arena with one byte budget.
//!
//! The arena is a single anonymous mapping, divided into 4 KiB pages by `offset-allocator` (constant time,
//! best fit by bins). The budget *is* the arena, so nothing else has to count, and a ring has only one region
//! to register. A [`PooledBuffer`] returns its pages when it is dropped; as `Bytes` it moves into a response
//! body without a copy.
//!
//! The allocator's state is about ten cache lines behind a mutex. So that single reads do not move them from core to core,
//! each core keeps a few small pieces that were returned to it (ADR 0008). What cores keep is free: if the allocator has no
//! room, all of it goes back first.
//!
//! Memory is not zeroed: a buffer's bytes become visible only up to what a read reported.

use crate::cores;
use crate::error::{ReadError, Resource};
use crate::series::{Catalog, float};
use crate::share::{Budget, Charge, Refused, Share};
use crate::sync::lock;
use bytes::Bytes;
use offset_allocator::{Allocation, Allocator};
use prometheus::Registry;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

/// Granularity of the arena, and the strictest memory alignment a direct read may ask for here.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Pieces that a core keeps: their pages, and how many. Of single reads more than complete in one turn of a core; then ranges of
/// 64 KiB, and batches of 64 blocks.
const KEPT: [(u32, usize); 6] = [(1, 32), (2, 32), (3, 32), (4, 32), (16, 8), (64, 2)];

/// The whole response memory of a daemon. Clones share it.
#[derive(Clone)]
pub struct Arena {
    pages: Arc<Pages>,
    /// One for each core, and the last for all other threads.
    pools: Arc<[Arc<PiecePool>]>,
}

/// The mapping.
struct Pages {
    base: NonNull<u8>,
    length: usize,
    allocator: Mutex<Allocator<u32>>,
    budget: Arc<Budget>,
}

// SAFETY: `base` points to a mapping that lives as long as the value and is handed out only in disjoint
// pieces, each owned by one `PooledBuffer`.
unsafe impl Send for Pages {}
// SAFETY: as above; the allocator is behind a mutex.
unsafe impl Sync for Pages {}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena")
            .field("length", &self.pages.length)
            .field("budget", &self.pages.budget)
            .finish_non_exhaustive()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are exactly what mmap returned in `Arena::new`, and every piece holds
        // an `Arc` of a pool, which holds one of this value, so no piece is left.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
        if let Err(errno) = unmapped {
            tracing::error!(%errno, "the response memory cannot be unmapped");
        }
    }
}

impl Pages {
    fn allocator(&self) -> MutexGuard<'_, Allocator<u32>> {
        lock(&self.allocator)
    }

    /// Returns a piece of so many pages.
    fn free(&self, piece: Allocation<u32>, pages: u32) {
        self.allocator().free(piece);
        self.give_back_rounding(pages);
    }

    fn give_back_rounding(&self, pages: u32) {
        match rounding_bytes(pages) {
            0 => {}
            bytes => self.budget.give_back(bytes),
        }
    }
}

/// Hands out the pieces of one core. Its lock and its count of references are on lines that no other core writes, as long as
/// pieces are dropped where they were made.
#[repr(align(128))]
struct PiecePool {
    pages: Arc<Pages>,
    /// Free pieces of each size in [`KEPT`].
    kept: Mutex<[Vec<Allocation<u32>>; KEPT.len()]>,
}

impl PiecePool {
    fn kept(&self) -> MutexGuard<'_, [Vec<Allocation<u32>>; KEPT.len()]> {
        lock(&self.kept)
    }

    /// A piece of so many pages that was kept.
    fn take(&self, pages: u32) -> Option<Allocation<u32>> {
        let (size, _) = kept_size(pages)?;
        self.kept().get_mut(size)?.pop()
    }

    /// Keeps a piece, or returns it to the allocator.
    fn give_back(&self, piece: Allocation<u32>, pages: u32) {
        if let Some((size, most)) = kept_size(pages)
            && let Some(kept) = self.kept().get_mut(size)
            && kept.len() < most
        {
            return kept.push(piece);
        }
        self.pages.free(piece, pages);
    }

    /// Returns everything kept to the allocator.
    fn empty_into(&self, allocator: &mut Allocator<u32>) {
        let kept = std::mem::take(&mut *self.kept());
        kept.into_iter().flatten().for_each(|piece| allocator.free(piece));
    }
}

impl Arena {
    /// Reserves `budget_bytes` (rounded up to pages) of address space. Pages become resident on first use, as
    /// huge pages where the host has them. Each of `cores` keeps some pieces.
    ///
    /// # Errors
    /// errno of mmap, or `InvalidInput` for a budget of 0 or of more than 2^32 pages (16 TiB).
    pub fn new(budget_bytes: u64, cores: u32) -> std::io::Result<Self> {
        let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        let pages = u32::try_from(budget_bytes.div_ceil(PAGE_BYTES)).map_err(|_| invalid())?;
        let length = usize::try_from(u64::from(pages) * PAGE_BYTES).map_err(|_| invalid())?;
        if length == 0 {
            return Err(invalid());
        }
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::NORESERVE,
            )
        }?;
        // Fewer TLB misses: one instead of sixteen in a copy of 64 KiB. A kernel without huge pages refuses,
        // which is harmless.
        // SAFETY: the mapping was just made, and the advice changes no contents.
        let _without_huge_pages =
            unsafe { rustix::mm::madvise(base, length, rustix::mm::Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(invalid)?;
        // Every live allocation has at least one page and at most one free neighbour on either side, so twice the
        // pages bounds the nodes; 128 Ki is the allocator's own default and enough for most budgets.
        let nodes = pages.saturating_mul(2).clamp(1024, 1 << 20);
        let allocator = Mutex::new(Allocator::with_max_allocs(pages, nodes));
        let pages = Arc::new(Pages {
            base,
            length,
            allocator,
            budget: Budget::new(length as u64),
        });
        let pool = |_| {
            Arc::new(PiecePool {
                pages: Arc::clone(&pages),
                kept: Mutex::default(),
            })
        };
        let pools = (0..=cores).map(pool).collect();
        Ok(Self { pages, pools })
    }

    /// Takes `bytes` (rounded up to pages), charged to `share`.
    ///
    /// # Errors
    /// `Overloaded`: the arena has no free piece of this size, or the share is used up.
    pub fn reserve(&self, bytes: u64, share: Option<&Arc<Share>>) -> Result<PooledBuffer, ReadError> {
        let charge = self.charge(in_pages(bytes), share)?;
        self.cut(bytes, charge)
    }

    /// Takes one piece for a response and one for its scratch memory, either of which may be empty: both or
    /// none.
    ///
    /// # Errors
    /// As [`Arena::reserve`].
    pub(crate) fn reserve_both(
        &self,
        bytes: [u32; 2],
        share: Option<&Arc<Share>>,
    ) -> Result<[Option<PooledBuffer>; 2], ReadError> {
        let [data, scratch] = bytes.map(u64::from);
        let pages = |bytes: u64| if bytes == 0 { 0 } else { in_pages(bytes) };
        // As one charge: the second alone might be refused because of the first.
        let charge = self.charge(pages(data) + pages(scratch), share)?;
        let cut = |bytes, charge| self.cut(bytes, charge).map(Some);
        Ok(match (data, scratch) {
            (0, 0) => [None, None],
            (data, 0) => [cut(data, charge)?, None],
            (0, scratch) => [None, cut(scratch, charge)?],
            (data, scratch) => {
                let (for_data, for_scratch) = charge.split(pages(data));
                [cut(data, for_data)?, cut(scratch, for_scratch)?]
            }
        })
    }

    /// Whether a response of this many bytes would get its memory now.
    ///
    /// # Errors
    /// `Overloaded`.
    pub(crate) fn grants(&self, bytes: u64, share: Option<&Arc<Share>>) -> Result<(), ReadError> {
        let pages = if bytes == 0 { 0 } else { in_pages(bytes) };
        share.map_or(Ok(()), |share| share.grants(pages).map_err(overloaded))
    }

    #[inline]
    fn charge(&self, bytes: u64, share: Option<&Arc<Share>>) -> Result<Charge, ReadError> {
        let charged = match share {
            Some(share) => share.charge(bytes),
            None => self.pages.budget.charge(bytes),
        };
        charged.map_err(overloaded)
    }

    #[inline]
    fn cut(&self, bytes: u64, charge: Charge) -> Result<PooledBuffer, ReadError> {
        let pages = in_pages(bytes) / PAGE_BYTES;
        let no_room = overloaded(Refused::Budget);
        let Ok(pages_u32) = u32::try_from(pages) else {
            return Err(no_room);
        };
        let core = cores::current().and_then(|core| self.pools.get(core));
        let Some(pool) = core.or(self.pools.last()) else {
            return Err(no_room);
        };
        let Some(allocation) = pool.take(pages_u32).or_else(|| self.allocate(pages_u32)) else {
            return Err(no_room);
        };
        let capacity = pages * PAGE_BYTES;
        // Worked: allocation.offset 3 -> bytes 12288..; below `length`, which is a usize.
        let offset = u64::from(allocation.offset) * PAGE_BYTES;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "both are below `length`, which is a usize"
        )]
        let (offset, capacity) = (offset as usize, capacity as usize);
        // SAFETY: `offset + capacity <= length`: the allocator only hands out pages below its size.
        let base = unsafe { self.pages.base.add(offset) };
        Ok(PooledBuffer {
            pool: Arc::clone(pool),
            allocation,
            base,
            capacity,
            visible: 0..0,
            _charge: charge,
        })
    }

    /// A piece that no core has kept. What it has beyond these pages is the budget's, and no caller's.
    fn allocate(&self, pages: u32) -> Option<Allocation<u32>> {
        let rounding = rounding_bytes(pages);
        if rounding > 0 {
            self.pages.budget.take(rounding).ok()?;
        }
        let run = run_for(pages);
        let found = self.pages.allocator().allocate(run);
        let found = found.or_else(|| {
            // Under one lock, or another core might find a piece neither kept nor free.
            let mut allocator = self.pages.allocator();
            self.pools.iter().for_each(|pool| pool.empty_into(&mut allocator));
            allocator.allocate(run)
        });
        if found.is_none() {
            self.pages.give_back_rounding(pages);
        }
        found
    }

    /// The budget that pieces are charged to.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.pages.budget
    }

    /// Bytes in use now.
    pub fn in_use_bytes(&self) -> u64 {
        self.pages.budget.used()
    }

    /// The budget.
    pub fn budget_bytes(&self) -> u64 {
        self.pages.length as u64
    }

    /// Makes every page present, so that pinning them does not wait for that. Pages that cannot be made
    /// present now (memory is short, kernel before 5.14) become present on first use.
    pub(crate) fn populate(&self) {
        let base = self.pages.base.as_ptr().cast::<std::ffi::c_void>();
        // SAFETY: exactly the region that this arena mapped; populating leaves its contents as they are.
        let populated =
            unsafe { rustix::mm::madvise(base, self.pages.length, rustix::mm::Advice::LinuxPopulateWrite) };
        if let Err(errno) = populated {
            tracing::debug!(%errno, "the response memory is not populated ahead of its registration");
        }
    }

    /// The region, for registration with a ring: (address, bytes).
    pub(crate) fn region(&self) -> (*mut u8, usize) {
        (self.pages.base.as_ptr(), self.pages.length)
    }
}

/// The index in [`KEPT`] of pieces of so many pages, and how many of them are kept.
fn kept_size(pages: u32) -> Option<(usize, usize)> {
    let mut sizes = KEPT.iter().enumerate();
    sizes.find_map(|(size, (of, most))| (*of == pages).then_some((size, *most)))
}

/// The pages that the allocator gives to a piece of so many: rounded up to one of its bins, which have sizes of four significant
/// bits. It looks for a piece among free runs of that bin and larger ones, so a run of 17 pages, which is of the bin of 16, would
/// never be found for 17 again. What cores keep has the size of a bin.
fn run_for(pages: u32) -> u32 {
    let unit = 1 << (u32::BITS - pages.leading_zeros()).saturating_sub(4);
    // Beyond 2^32 pages there is none anyway.
    pages.checked_next_multiple_of(unit).unwrap_or(pages)
}

fn rounding_bytes(pages: u32) -> u64 {
    u64::from(run_for(pages) - pages) * PAGE_BYTES
}

/// Rounded up to pages; at least one.
fn in_pages(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES).max(1).saturating_mul(PAGE_BYTES)
}

impl Arena {
    /// Registers `ringfetch_memory_in_use_bytes` and `ringfetch_memory_budget_bytes`.
    ///
    /// # Errors
    /// A name is taken.
    pub(crate) fn register_metrics(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(ArenaCollector {
            arena: self.clone(),
            catalog: Catalog::new(&[
                (IN_USE, "Response memory in use."),
                (BUDGET, "Response memory in all: engine.memory_budget."),
            ])?,
        }))
    }
}

const IN_USE: &str = "ringfetch_memory_in_use_bytes";
const BUDGET: &str = "ringfetch_memory_budget_bytes";

/// Reads the arena when it is scraped.
struct ArenaCollector {
    arena: Arena,
    catalog: Catalog,
}

impl Collector for ArenaCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.catalog.descriptions()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut scrape = self.catalog.scrape();
        scrape.gauge(IN_USE, &[], float(self.arena.in_use_bytes()));
        scrape.gauge(BUDGET, &[], float(self.arena.budget_bytes()));
        scrape.finish()
    }
}

/// A piece of the arena with one owner. Its visible range is set once, when its reads have finished.
pub struct PooledBuffer {
    pool: Arc<PiecePool>,
    allocation: Allocation<u32>,
    base: NonNull<u8>,
    capacity: usize,
    visible: std::ops::Range<usize>,
    _charge: Charge,
}

impl std::fmt::Debug for PooledBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PooledBuffer")
            .field("capacity", &self.capacity)
            .field("visible", &self.visible)
            .finish()
    }
}

// SAFETY: the piece has one owner, and its memory is not tied to a thread.
unsafe impl Send for PooledBuffer {}

impl PooledBuffer {
    /// Address of `length` bytes from `offset`. Who writes through it must keep the buffer alive meanwhile.
    ///
    /// # Panics
    /// If they reach past the piece: a defect of the planner must end a shard, never write to others' memory.
    pub(crate) fn place(&self, offset: usize, length: usize) -> *mut u8 {
        let end = offset.checked_add(length);
        assert!(
            end.is_some_and(|end| end <= self.capacity),
            "{length} bytes at {offset} of {}",
            self.capacity
        );
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Copies `length` bytes from offset `source` to offset `target` of another piece, or of this one (they
    /// may overlap).
    ///
    /// # Panics
    /// As [`PooledBuffer::place`].
    pub(crate) fn copy_to(&self, source: usize, destination: &Self, target: usize, length: usize) {
        let (from, to) = (self.place(source, length), destination.place(target, length));
        // SAFETY: `place` has checked both ranges against their pieces, which are alive; no reference to the bytes
        // exists (they are not visible yet), and the shard copies only when no read of them is in flight.
        unsafe { std::ptr::copy(from, to, length) };
    }

    /// Sets which bytes have arrived and are visible.
    ///
    /// # Panics
    /// Never for a range within the capacity; debug builds assert it.
    pub(crate) fn set_visible(&mut self, range: std::ops::Range<usize>) {
        debug_assert!(range.start <= range.end && range.end <= self.capacity);
        self.visible = range;
    }

    /// The visible bytes as `Bytes`; the pages return to the arena when the last clone or slice is dropped.
    pub(crate) fn into_bytes(self) -> Bytes {
        if self.visible.is_empty() {
            Bytes::new()
        } else {
            Bytes::from_owner(self)
        }
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        let start = self.base.as_ptr().wrapping_add(self.visible.start);
        // SAFETY: `visible` lies within the piece, its bytes have been written by finished reads (the shard sets it
        // only then), and nobody writes to them any more.
        unsafe { std::slice::from_raw_parts(start, self.visible.len()) }
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "at most 2^32 pages have been asked for"
        )]
        let pages = (self.capacity as u64 / PAGE_BYTES) as u32;
        self.pool.give_back(self.allocation, pages);
    }
}

fn overloaded(refused: Refused) -> ReadError {
    ReadError::Overloaded {
        resource: match refused {
            Refused::Budget => Resource::Memory,
            Refused::Caller => Resource::CallerMemory,
            Refused::CallerLimit => Resource::PrincipalMemory,
            Refused::Connection => Resource::ConnectionMemory,
        },
    }
}

#[cfg(test)]
mod tests;
