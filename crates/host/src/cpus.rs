//! The CPUs that this process may use: its affinity mask, limited by its cgroup's quota. Never the machine's
//! count (TRAPS 19): a container with 2 of 64 CPUs that starts 64 pinned cores throttles itself.

/// The CPUs of the affinity mask, in ascending order, at most as many as the cgroup's quota grants; at least
/// one.
///
/// A quota of 2.5 CPUs counts as 2, as in [`std::thread::available_parallelism`], which reads it from cgroup
/// v2 (`cpu.max`, every level up to the root) or v1 (`cpu.cfs_quota_us`). If the mask cannot be read, CPUs
/// are numbered from 0.
pub fn usable_cpus() -> Vec<usize> {
    let count = granted();
    let mut cpus = mask().unwrap_or_else(|| (0..count).collect());
    cpus.truncate(count);
    if cpus.is_empty() {
        cpus.push(0);
    }
    cpus
}

/// The CPUs to pin threads to: those of the affinity mask, if it is what limits this process (a cpuset,
/// `taskset`, or nothing at all). `None` if the cgroup's quota grants fewer CPUs than the mask holds, or the
/// mask cannot be read.
///
/// A quota is time, not CPUs: every container of a host with the same quota would choose the same first CPUs,
/// and leave the others idle. Worked: 8 containers with a quota of 2 on a host of 16 CPUs would all pin to
/// CPUs 0 and 1.
pub fn cpus_to_pin() -> Option<Vec<usize>> {
    mask().and_then(|mask| pinnable(mask, granted()))
}

/// Whether each of this many threads can be pinned to a CPU of its own.
pub fn can_pin(threads: u32) -> bool {
    cpus_to_pin().is_some_and(|cpus| cpus.len() >= threads as usize)
}

/// The other CPUs of this thread's affinity mask.
pub fn others(cpu: usize) -> Vec<usize> {
    let mut cpus = mask().unwrap_or_default();
    cpus.retain(|other| *other != cpu);
    cpus
}

fn pinnable(mask: Vec<usize>, granted: usize) -> Option<Vec<usize>> {
    (!mask.is_empty() && mask.len() <= granted).then_some(mask)
}

/// Number of CPUs granted by mask and quota together.
fn granted() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The affinity mask, ascending.
fn mask() -> Option<Vec<usize>> {
    let mask = rustix::thread::sched_getaffinity(None).ok()?;
    let all = 0..rustix::thread::CpuSet::MAX_CPU;
    Some(all.filter(|&cpu| mask.is_set(cpu)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    #[test]
    fn one_cpu_of_the_mask_is_the_answer() {
        // Scenario: a thread allowed on only one CPU, the last of its mask. Expectation: exactly that one;
        // and before it a non-empty, ascending part of the mask.
        std::thread::spawn(|| {
            let before = sched_getaffinity(None).expect("mask");
            let all = usable_cpus();
            assert!(!all.is_empty() && all.is_sorted());
            assert!(all.iter().all(|&cpu| before.is_set(cpu)));

            let last = (0..CpuSet::MAX_CPU)
                .rfind(|&cpu| before.is_set(cpu))
                .expect("one at least");
            let mut mask = CpuSet::new();
            mask.set(last);
            sched_setaffinity(None, &mask).expect("a smaller mask is always allowed");
            assert_eq!(usable_cpus(), [last]);
            assert_eq!(cpus_to_pin(), Some(vec![last]));
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn the_other_cpus_are_those_of_the_mask_without_this_one() {
        // Scenario: a thread with the process's mask, and one allowed on the last CPU of it alone. Expectation: all but that one;
        // none.
        std::thread::spawn(|| {
            let mut all = mask().expect("mask");
            let last = all.pop().expect("one at least");
            assert_eq!(others(last), all);
            let mut only = CpuSet::new();
            only.set(last);
            sched_setaffinity(None, &only).expect("a smaller mask is always allowed");
            assert_eq!(others(last), [0_usize; 0]);
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn a_quota_below_the_mask_pins_nothing() {
        // Scenario: a mask of four CPUs, with a quota of fewer, of as many, and with none. Expectation: pinned only where
        // the mask is the limit.
        let mask = vec![3, 4, 8, 9];
        assert_eq!(pinnable(mask.clone(), 1), None);
        assert_eq!(pinnable(mask.clone(), 3), None);
        assert_eq!(pinnable(mask.clone(), 4), Some(mask));
        assert_eq!(pinnable(Vec::new(), 1), None);
    }
}
