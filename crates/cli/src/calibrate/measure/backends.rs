//! The backends side by side, cold and warm, and what is read beforehand to be warm.

use super::{Bench, count};
use crate::calibrate::drive::{Sample, Setup};
use crate::calibrate::findings::{Phase, Ranking};
use crate::calibrate::target::WARM_SHARE_MIN;
use crate::outcome::Failure;
use crate::quantity::size;
use ringfetch_engine::config::BackendKind;
use std::time::Instant;

/// The warm phase may spend this part of the budget on reading the file into memory.
const WARMING_SHARE: u32 = 10;

impl Bench<'_> {
    /// The backends in order of preference. Cold: the ring first, which is made for it. Warm: the mapping first, which
    /// also warms the file by itself; there the ring and pread read through the page cache.
    pub(super) fn candidates(&self, warm: bool) -> Vec<Setup> {
        use BackendKind::{Auto, Mmap, Pread, Uring};
        let order = if warm {
            [Mmap, Auto, Uring, Pread]
        } else {
            [Uring, Auto, Mmap, Pread]
        };
        let usable = order
            .into_iter()
            .filter(|backend| self.ring.is_ok() || !backend.uses_ring());
        usable
            .map(|backend| Setup {
                backend,
                direct: self.base.direct && !(warm && matches!(backend, Uring | Pread)),
                rings: if backend.uses_ring() { self.base.rings } else { 1 },
                ..self.base
            })
            .collect()
    }

    pub(super) async fn backends(&mut self, warm_window: Option<u64>) -> Result<Option<Ranking>, Failure> {
        let phase = if warm_window.is_some() {
            Phase::BackendsWarm
        } else {
            Phase::BackendsCold
        };
        let setups = self.candidates(warm_window.is_some());
        let mut rounds = Vec::new();
        for number in 0..self.rounds.rankings {
            let mut order: Vec<usize> = (0..setups.len()).collect();
            if number % 2 == 1 {
                order.reverse();
            }
            let mut round = Vec::new();
            if let Some(window) = warm_window {
                self.keep_warm(window)?;
            }
            for index in order {
                let Some(setup) = setups.get(index).copied() else {
                    continue;
                };
                if let Some(sample) = self.step(phase, setup, warm_window).await? {
                    round.push((index, setup, sample));
                }
            }
            round.sort_by_key(|(index, ..)| *index);
            let round: Vec<(Setup, Sample)> = round
                .into_iter()
                .map(|(_, setup, sample)| (setup, sample))
                .collect();
            if round.len() == setups.len() {
                rounds.push(round);
            }
        }
        Ok(Ranking::of(&rounds))
    }

    /// Reads anew what other programs' memory has pushed out since.
    fn keep_warm(&self, window: u64) -> Result<(), Failure> {
        if !self.stopped
            && self
                .target
                .resident_share(window)
                .is_some_and(|share| share < 1.0)
        {
            let until = Instant::now() + self.budget / WARMING_SHARE / self.rounds.rankings;
            self.target.warm(until, || *self.stop.borrow())?;
        }
        Ok(())
    }

    /// Makes the beginning of the file warm. `None`: there is nothing warm to be measured.
    pub(super) fn warmed(&mut self) -> Result<Option<u64>, Failure> {
        if self.stopped || *self.stop.borrow() {
            return Ok(None);
        }
        self.bar.set_message("reading the file into memory");
        let until = Instant::now() + self.budget / WARMING_SHARE;
        let window = self.target.warm(until, || *self.stop.borrow())?;
        let resident = self.target.resident_share(window);
        let enough = window >= (16 << 20).min(self.target.length_bytes / 2);
        if enough && resident.is_some_and(|share| share >= WARM_SHARE_MIN) {
            return Ok(Some(window));
        }
        let why = match resident {
            None => "whether pages are in memory cannot be asked here".to_owned(),
            Some(_) if !enough => format!("only {} could be read in time", size(window)),
            Some(share) => format!("only {:.0} % of what was read stayed in memory", share * 100.0),
        };
        self.notes.push(format!("warm reads were not measured: {why}"));
        self.schedule
            .skip(count(self.candidates(true).len()) * self.rounds.rankings);
        Ok(None)
    }
}
