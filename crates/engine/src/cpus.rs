//! Which CPUs this process may use: its affinity mask, cut by its cgroup's quota. Never the machine's count (TRAPS
//! 19): a container with 2 CPUs of 64 that starts 64 pinned cores throttles itself.

/// The CPUs of the affinity mask, in ascending order, at most as many as the cgroup's quota pays for; at least one.
///
/// A quota of 2.5 CPUs counts as 2, as in [`std::thread::available_parallelism`], which reads it from cgroup v2
/// (`cpu.max`, every level up to the root) or v1 (`cpu.cfs_quota_us`). Where the mask cannot be read, CPUs are
/// numbered from 0.
pub fn usable_cpus() -> Vec<usize> {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let mut cpus: Vec<usize> = match rustix::thread::sched_getaffinity(None) {
        Ok(mask) => (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|&cpu| mask.is_set(cpu))
            .collect(),
        Err(_) => (0..count).collect(),
    };
    cpus.truncate(count);
    if cpus.is_empty() {
        cpus.push(0);
    }
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    #[test]
    fn one_cpu_of_the_mask_is_the_answer() {
        // Scenario: a thread allowed on one CPU only, the last of its mask. Expectation: that one, alone; and before
        // it a non-empty, ascending part of the mask.
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
        })
        .join()
        .expect("no panic");
    }
}
