//! What `calibrate` measures, and what that and this host support.

use crate::args::Calibrate;
use crate::drive::engine::Choice;
use crate::facts;
use crate::material::Material;
use ringfetch_engine::config::BackendKind;
use ringfetch_host::block::Tags;

/// Most bytes to warm: larger than the CPU's caches, and read within a second.
const WARM_BYTES_MAX: u64 = 256 << 20;
/// Reads per batch, except for the curve of depths: there each read is submitted alone, to get its own
/// latency. Fewer if they would exceed `BATCH_BYTES_MAX`.
const BATCH: u64 = 16;
const BATCH_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of reads submitted at once.
pub(super) const ASKED_BYTES_MAX: u64 = 128 << 20;

/// What is calibrated, and what it and this host support.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub(super) block_bytes: u32,
    pub(super) length_bytes: u64,
    /// Whether it supports O_DIRECT.
    pub(super) direct: bool,
    /// Why there is no ring, if there is none.
    pub(super) refusal: Option<String>,
    /// Whether a trial read into registered memory works.
    pub(super) registered: bool,
    pub(super) cpus: u32,
    pub(super) tags: Option<Tags>,
    /// Bytes that can be warm; 0 if the file is larger than memory.
    pub(super) warm_bytes: u64,
}

impl Subject {
    pub(super) fn of(args: &Calibrate, material: &Material, direct: bool) -> Self {
        let ring = ringfetch_engine::probe::probe();
        let cpus = u32::try_from(ringfetch_host::cpus::usable_cpus().len()).unwrap_or(u32::MAX);
        let length_bytes = material.length_bytes();
        let fits = length_bytes <= facts::memory().available_bytes;
        let device = material.place.device.as_ref();
        Self {
            block_bytes: args.block_bytes,
            length_bytes,
            direct,
            registered: ring.as_ref().is_ok_and(|facts| facts.registered_buffers.is_ok()),
            refusal: ring.err().map(|refusal| refusal.to_string()),
            cpus,
            tags: device.and_then(|device| device.tags_for(cpus)),
            warm_bytes: if fits { length_bytes.min(WARM_BYTES_MAX) } else { 0 },
        }
    }

    pub(super) fn has_ring(&self) -> bool {
        self.refusal.is_none()
    }

    /// Most reads that may be submitted at once.
    pub(super) fn fitting(&self) -> u32 {
        let read = u64::from(self.block_bytes).next_multiple_of(4096);
        u32::try_from(ASKED_BYTES_MAX / read).unwrap_or(u32::MAX)
    }

    /// The initial settings: batches on one ring.
    pub(super) fn base(&self, backend: BackendKind) -> Choice {
        let fitting = BATCH_BYTES_MAX / u64::from(self.block_bytes.max(1));
        Choice {
            batch: usize::try_from(fitting.clamp(1, BATCH)).unwrap_or(1),
            registered_buffers: self.registered,
            device_tags: self.tags,
            ..Choice::of(backend)
        }
    }

    /// In order of preference: cold the ring, warm the mapping.
    pub(super) fn candidates(&self, warm: bool) -> Vec<BackendKind> {
        use BackendKind::{Auto, Mmap, Pread, Uring};
        let mut order = match warm {
            true => vec![Mmap, Auto, Uring, Pread],
            false => vec![Uring, Auto, Mmap, Pread],
        };
        order.retain(|backend| self.has_ring() || !backend.uses_ring());
        order
    }
}
