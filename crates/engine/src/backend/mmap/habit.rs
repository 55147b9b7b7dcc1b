//! Whether announcing is worth it: on warm data it costs a quarter of the reads (681k against 887k reads/s through gRPC,
//! 64 a call, 1 GiB, two threads; `engine.mmap.announce: false` for the second).
//!
//! Learned from major faults, which the kernel counts for each thread. While announcing, one read in 16 lots is left
//! out; when four such probes in a row met their page in memory, announcing stops. The first lot that faults begins it
//! again. Cold data therefore pays one fault in 16 lots, warm data one look at a counter a lot.

/// Lots between two probes.
const LOTS_A_PROBE: u32 = 16;

/// Probes in a row that must find their page resident before announcing stops.
const WARM_PROBES: u32 = 4;

/// What is done with the next lot of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lot {
    /// All are announced.
    Announced,
    /// All but the one with this slot.
    Probed(u32),
    /// None is.
    Unannounced,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Habit {
    lots: u32,
    warm_probes: u32,
    probe: Option<u32>,
}

impl Habit {
    pub(super) fn is_announcing(&self) -> bool {
        self.warm_probes < WARM_PROBES
    }

    /// Decides about a lot whose first read has this slot.
    pub(super) fn next_lot(&mut self, first: u32) -> Lot {
        if !self.is_announcing() {
            return Lot::Unannounced;
        }
        self.lots += 1;
        if self.lots < LOTS_A_PROBE {
            return Lot::Announced;
        }
        self.lots = 0;
        self.probe = Some(first);
        Lot::Probed(first)
    }

    pub(super) fn is_probe(&self, slot: u32) -> bool {
        self.probe == Some(slot)
    }

    /// The probe was read, with a major fault or without.
    pub(super) fn probed(&mut self, faulted: bool) {
        self.probe = None;
        self.warm_probes = if faulted { 0 } else { self.warm_probes + 1 };
    }

    /// A lot that was not announced faulted.
    pub(super) fn faulted(&mut self) {
        self.warm_probes = 0;
    }
}

/// Major faults of this thread so far: faults that waited for the device (getrusage(2), `ru_majflt`).
pub(in crate::backend) fn major_faults() -> i64 {
    // SAFETY: all of `rusage` is plain numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the value that it is given, which lives until the call returns.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_majflt
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs lots in which every read faults or none does; returns how many were announced.
    fn run(habit: &mut Habit, lots: u32, cold: bool) -> u32 {
        let mut announced = 0;
        for _ in 0..lots {
            match habit.next_lot(7) {
                Lot::Announced => announced += 1,
                Lot::Probed(slot) => {
                    announced += 1;
                    assert!(habit.is_probe(slot) && !habit.is_probe(slot + 1));
                    habit.probed(cold);
                }
                Lot::Unannounced if cold => habit.faulted(),
                Lot::Unannounced => {}
            }
        }
        announced
    }

    /// Cold data is always announced. Warm data is no more after 64 lots; the first cold lot then begins it again.
    #[test]
    fn announcing_follows_the_temperature() {
        let mut habit = Habit::default();
        assert_eq!(run(&mut habit, 1600, true), 1600);
        assert_eq!(run(&mut habit, 1000, false), 64);
        assert_eq!(run(&mut habit, 1000, true), 999);
    }
}
