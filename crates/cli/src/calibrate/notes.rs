//! What the steps together tell about how far their figures can be trusted. Pure.

use super::findings::{Curve, Heat, Step};
use super::target::{COLD_SHARE_MAX, WARM_SHARE_MIN};

/// Passes that lie further apart than this share of their median were not made on a quiet machine.
const UNREST_MAX: f64 = 0.25;

/// Notes at the end of a calibration, a line each.
pub(super) fn closing(steps: &[Step], holes_share: f64, depth: Option<&Curve>, stopped: bool) -> Vec<String> {
    let mut notes = Vec::new();
    if holes_share > 0.01 {
        notes.push(format!(
            "{:.0} % of the file are holes, which are read from nowhere: figures are too good",
            holes_share * 100.0
        ));
    }
    let heated = |heat: Heat| steps.iter().filter(move |step| step.heat == heat);
    let left = heated(Heat::Cold)
        .filter_map(|step| step.resident_before)
        .fold(0.0, f64::max);
    if left > COLD_SHARE_MAX {
        notes.push(format!(
            "NOT COLD: up to {:.0} % of the file stayed in memory when it was evicted (another process has it mapped, \
             locked or writes it): figures of reads through the page cache are too good",
            left * 100.0
        ));
    }
    if heated(Heat::Cold).any(|step| step.resident_before.is_none()) {
        notes
            .push("whether the file was cold could not be checked: its file system does not tell".to_owned());
    }
    let kept = heated(Heat::Warm)
        .filter_map(|step| step.resident_before)
        .fold(1.0, f64::min);
    if kept < WARM_SHARE_MIN {
        notes.push(format!(
            "NOT WARM: memory is short, only {:.0} % of what was to be warm was still there: figures of warm reads are too \
             low",
            kept * 100.0
        ));
    }
    let used_up = steps.iter().filter(|step| step.sample.file_used_up).count();
    if used_up > 0 {
        notes.push(format!(
            "{used_up} steps had read the whole file before their time was over: short steps tell less; a larger file \
             tells more"
        ));
    }
    if let Some(unrest) = depth
        .and_then(Curve::unrest)
        .filter(|unrest| *unrest > UNREST_MAX)
    {
        notes.push(format!(
            "passes over the same depth differ by {:.0} %: the machine or the device is busy; calibrate when it is quiet",
            unrest * 100.0
        ));
    }
    if stopped {
        notes.push("STOPPED by hand: what was not measured by then stays at its default".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::super::findings::Phase;
    use super::super::findings::tests::{sample, setup};
    use super::*;
    use ringfetch_engine::config::BackendKind;

    #[test]
    fn what_spoils_figures_is_said() {
        // Scenario: steps as they should be; then one that was not cold, one that could not tell, one that had cooled,
        // one that used the file up, holes, a restless curve, a stop.
        // Expected: no note; then one for each, by its word.
        let step = |heat, resident_before| Step {
            phase: Phase::MmapThreads,
            heat,
            resident_before,
            setup: setup(BackendKind::Mmap),
            sample: sample(100.0, 2.0),
        };
        let mut steps = vec![
            step(Heat::Direct, None),
            step(Heat::Cold, Some(0.0)),
            step(Heat::Warm, Some(1.0)),
        ];
        let curve = |passes: [f64; 3]| Curve::through(&passes.map(|reads| (1, sample(reads, 2.0))), None);
        let calm = curve([100.0, 101.0, 99.0]);
        assert_eq!(closing(&steps, 0.0, calm.as_ref(), false), Vec::<String>::new());

        steps.push(step(Heat::Cold, Some(0.4)));
        steps.push(step(Heat::Cold, None));
        steps.push(step(Heat::Warm, Some(0.5)));
        if let Some(last) = steps.last_mut() {
            last.sample.file_used_up = true;
        }
        let notes = closing(&steps, 0.2, curve([100.0, 150.0, 99.0]).as_ref(), true);
        let words = [
            "20 %",
            "NOT COLD: up to 40 %",
            "could not be checked",
            "NOT WARM",
            "1 steps",
            "51 %",
            "STOPPED",
        ];
        assert_eq!(notes.len(), words.len(), "{notes:?}");
        for (note, word) in notes.iter().zip(words) {
            assert!(note.contains(word), "{word}: {note}");
        }
    }
}
