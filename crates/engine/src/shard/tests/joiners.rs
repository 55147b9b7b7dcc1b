//! What reads that joined one in flight cost the thread.

use super::*;
use crate::cores;

#[test]
fn a_joined_reads_copy_is_charged_to_who_joined() {
    // Scenario: on a core that two callers share, one reads the same 1 MiB twice, of which the second read joins the first, and
    // the other reads 4 KiB; all of them arrive in one turn, in which the 1 MiB are copied. Expectation: the first caller is
    // charged for most of it.
    let mut world = World::new(8, 3 << 20);
    world.control.hold();
    let large = (0, 1 << 20);
    let sent = [(large, (1, 1)), (large, (1, 1)), ((2 << 20, 4096), (2, 2))];
    let _answers = sent.map(|(range, origin)| world.send(&[range], |batch| batch.origin = Some(origin)));
    let charges = cores::run_as(0, || {
        assert!(world.poll().is_pending());
        world.control.release_all();
        cores::take_charges(|_, _| ());
        assert!(world.poll().is_pending());
        let mut charges = [Duration::ZERO; 3];
        cores::take_charges(|caller, time| charges[usize::try_from(caller).expect("small")] += time);
        charges
    });
    assert!(charges[1] > charges[2], "{charges:?}");
}
