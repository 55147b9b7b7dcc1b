//! Decides whether to announce. On warm data announcing costs a quarter of the reads (681k against 887k
//! reads/s through gRPC, 64 per call, 1 GiB, two threads; `engine.mmap.announce: false` for the second).
//!
//! Learned from major faults, which the kernel counts per thread. While announcing, one read in 16 groups is
//! not announced; after four such probes in a row without a fault, announcing stops. The first group that
//! faults resumes it. So cold data costs one fault in 16 groups, warm data one check of a counter per group.

/// Groups between two probes.
const GROUPS_PER_PROBE: u32 = 16;

/// Probes in a row that must find their page resident before announcing stops.
const WARM_PROBES: u32 = 4;

/// What to announce for the next group of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupDecision {
    /// All reads.
    Announced,
    /// All but the one with this slot.
    Probed(u32),
    /// None.
    Unannounced,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct AnnouncePolicy {
    groups: u32,
    warm_probes: u32,
    probe: Option<u32>,
}

impl AnnouncePolicy {
    pub(super) fn is_announcing(&self) -> bool {
        self.warm_probes < WARM_PROBES
    }

    /// Decides for a group whose first read has this slot.
    pub(super) fn next_group(&mut self, first: u32) -> GroupDecision {
        if !self.is_announcing() {
            return GroupDecision::Unannounced;
        }
        self.groups += 1;
        if self.groups < GROUPS_PER_PROBE {
            return GroupDecision::Announced;
        }
        self.groups = 0;
        self.probe = Some(first);
        GroupDecision::Probed(first)
    }

    pub(super) fn is_probe(&self, slot: u32) -> bool {
        self.probe == Some(slot)
    }

    /// Records whether the probe had a major fault.
    pub(super) fn probed(&mut self, faulted: bool) {
        self.probe = None;
        self.warm_probes = if faulted { 0 } else { self.warm_probes + 1 };
    }

    /// Records a fault in a group that was not announced.
    pub(super) fn faulted(&mut self) {
        self.warm_probes = 0;
    }
}

/// Major faults of this thread so far: faults that waited for the device (getrusage(2), `ru_majflt`).
pub(in crate::backend) fn major_faults() -> i64 {
    usage().ru_majflt
}

/// How often this thread has waited for something so far (getrusage(2), `ru_nvcsw`).
pub(in crate::backend) fn waits() -> i64 {
    usage().ru_nvcsw
}

/// What this thread has used so far.
fn usage() -> libc::rusage {
    // SAFETY: `rusage` has only plain numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the value it is given, which lives until the call returns.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs groups in which every read faults or none does; returns how many were announced.
    fn run(announce_policy: &mut AnnouncePolicy, groups: u32, cold: bool) -> u32 {
        let mut announced = 0;
        for _ in 0..groups {
            match announce_policy.next_group(7) {
                GroupDecision::Announced => announced += 1,
                GroupDecision::Probed(slot) => {
                    announced += 1;
                    assert!(announce_policy.is_probe(slot) && !announce_policy.is_probe(slot + 1));
                    announce_policy.probed(cold);
                }
                GroupDecision::Unannounced if cold => announce_policy.faulted(),
                GroupDecision::Unannounced => {}
            }
        }
        announced
    }

    /// Cold data is always announced. Warm data no longer is after 64 groups; the first cold group resumes
    /// it.
    #[test]
    fn announcing_follows_the_temperature() {
        let mut announce_policy = AnnouncePolicy::default();
        assert_eq!(run(&mut announce_policy, 1600, true), 1600);
        assert_eq!(run(&mut announce_policy, 1000, false), 64);
        assert_eq!(run(&mut announce_policy, 1000, true), 999);
    }
}
