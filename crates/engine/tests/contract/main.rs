//! The contract suite: one set of cases over every backend, which demands the same bytes and the same error values.
//!
//! A case is a function of a [`harness::Harness`]; `contract!` makes a test of it for each of [`harness::VARIANTS`],
//! so that the failing backend stands in the test's name. After each case the harness checks what holds always: every
//! read accounted for in the metrics, all memory returned, a clean drain. `faults` has what only the simulation can
//! show, `devices` what needs a real block device (root), `filesystems` the cases on others than the build's (root),
//! `model` the random batches.

#![expect(
    clippy::expect_used,
    reason = "a test fails by panicking, outside of its own function too"
)]

mod harness;
mod machine;

mod devices;
mod errors;
mod faults;
mod files;
mod filesystems;
mod flow;
mod model;
mod reads;
mod sharing;

/// One test for each case and variant, named `variant::case`.
macro_rules! contract {
    ($($case:ident),* $(,)?) => {
        /// Every case, for suites that have a place of their own for their files.
        #[allow(dead_code, reason = "some modules have no case that depends on where files are")]
        pub(crate) const CASES: &[crate::harness::Case] = &[$((stringify!($case), $case)),*];
        crate::contract!(@variants [$($case),*]
            uring_direct uring_buffered uring_own_thread uring_own_thread_buffered auto mmap mmap_plain
            pread pread_buffered uring_after_mmap auto_after_uring mmap_after_uring sim);
    };
    (@variants $cases:tt $($variant:ident)*) => {
        $(crate::contract!(@variant $variant $cases);)*
    };
    (@variant $variant:ident [$($case:ident),*]) => {
        mod $variant {
            $(#[test]
            fn $case() {
                // Scenario and expectation: see the function of this name above.
                crate::harness::Harness::run(stringify!($variant), super::$case);
            })*
        }
    };
}
pub(crate) use contract;
