//! Which reads fail, which are short, and what jitter each has: a pure function of the parameters and the read.

use crate::parameters::Parameters;
use std::time::Duration;

/// Short reads end on a sector, as a device's do.
const SECTOR_BYTES: u32 = 512;

/// The properties of a read that determine its fate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Read {
    /// From 1, in order of arrival.
    pub(crate) number: u64,
    pub(crate) offset: u64,
    pub(crate) length_bytes: u32,
    pub(crate) direct: bool,
}

/// What happens to a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Served,
    /// Only this many bytes are returned.
    Short(u32),
    /// EIO.
    Failed,
}

/// The read's fate, and how long it is in service.
pub(crate) fn decide(parameters: &Parameters, read: Read) -> (Fate, Duration) {
    // Seeded by the read's number, so that the draws do not depend on which faults are enabled.
    let mut random = fastrand::Rng::with_seed(read.number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let (jitter, error, short) = (random.f64(), random.f64(), random.f64());
    let service = parameters.latency.saturating_add(parameters.jitter_at(jitter));

    let end = read.offset.saturating_add(u64::from(read.length_bytes));
    let in_bad_range = parameters
        .error_ranges
        .iter()
        .any(|bad| bad.start < end && read.offset < bad.end);
    if in_bad_range || error < parameters.error_probability {
        return (Fate::Failed, service);
    }
    let half = read.length_bytes / 2 / SECTOR_BYTES * SECTOR_BYTES;
    if read.direct && short < parameters.short_probability && half > 0 {
        return (Fate::Short(half), service);
    }
    (Fate::Served, service)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(number: u64, offset: u64, length_bytes: u32) -> Read {
        Read {
            number,
            offset,
            length_bytes,
            direct: true,
        }
    }

    #[test]
    fn reads_that_touch_a_bad_range_fail() {
        // Scenario: bytes 4096 to 8191 are bad. Expectation: reads that overlap them fail, their neighbours do not.
        let bad = 4096..8192;
        let parameters = Parameters {
            error_ranges: vec![bad],
            ..Parameters::default()
        };
        let fate = |offset, length| decide(&parameters, read(1, offset, length)).0;
        assert_eq!(fate(0, 4096), Fate::Served);
        assert_eq!(fate(0, 4097), Fate::Failed);
        assert_eq!(fate(8191, 1), Fate::Failed);
        assert_eq!(fate(8192, 4096), Fate::Served);
        assert_eq!(fate(u64::MAX, 4096), Fate::Served);
    }

    #[test]
    fn short_reads_are_half_in_sectors_and_direct_only() {
        // Scenario: every read is short. Expectation: half in whole sectors; reads of one sector and buffered
        // reads are whole.
        let parameters = Parameters {
            short_probability: 1.0,
            ..Parameters::default()
        };
        assert_eq!(decide(&parameters, read(1, 0, 4096)).0, Fate::Short(2048));
        assert_eq!(decide(&parameters, read(1, 0, 3000)).0, Fate::Short(1024));
        assert_eq!(decide(&parameters, read(1, 0, 512)).0, Fate::Served);
        let buffered = Read {
            direct: false,
            ..read(1, 0, 4096)
        };
        assert_eq!(decide(&parameters, buffered).0, Fate::Served);
    }

    #[test]
    fn the_same_reads_have_the_same_faults() {
        // Scenario: one read in ten fails, with jitter. Expectation: repeatable, about as often as requested.
        let parameters = Parameters {
            error_probability: 0.1,
            jitter: Duration::from_millis(1),
            ..Parameters::default()
        };
        let fates = || -> Vec<_> {
            (1..=10_000)
                .map(|number| decide(&parameters, read(number, 0, 4096)))
                .collect()
        };
        assert_eq!(fates(), fates());
        let failed = fates().iter().filter(|(fate, _)| *fate == Fate::Failed).count();
        assert!((900..1100).contains(&failed), "{failed}");
    }
}
