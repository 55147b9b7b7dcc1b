//! What the disk served: totals, peaks, and a bounded record of each read.

use serde::Serialize;

/// Most records kept; later reads are only counted. 16 bytes each.
const RECORDS_MAX: usize = 1 << 20;

/// The outcome of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All bytes up to the end of the file.
    Served,
    /// Fewer bytes than requested, injected.
    Short,
    /// EIO, injected.
    Failed,
    /// An error of the source itself.
    SourceFailed,
}

/// One read that the disk answered. Records are in order of their answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ReadRecord {
    /// Offset in the file.
    pub offset: u64,
    /// The length requested.
    pub length_bytes: u32,
    /// Whether the file was opened with `O_DIRECT`.
    pub direct: bool,
    /// How it ended.
    pub outcome: Outcome,
}

impl ReadRecord {
    /// Whether it touched any of these bytes.
    #[must_use]
    pub fn overlaps(&self, offset: u64, length_bytes: u64) -> bool {
        let end = self.offset.saturating_add(u64::from(self.length_bytes));
        self.offset < offset.saturating_add(length_bytes) && offset < end
    }
}

/// Totals since the disk was mounted or its counts were reset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Reads {
    /// Reads that reached the disk.
    pub arrived: u64,
    /// Reads answered, whatever the outcome.
    pub answered: u64,
    /// Bytes of the answers.
    pub bytes: u64,
    /// Answers with an injected error.
    pub failed: u64,
    /// Answers cut short.
    pub short: u64,
    /// Answers with an error of the source.
    pub source_failed: u64,
    /// Reads waiting for a slot now.
    pub waiting: usize,
    /// Reads in service now.
    pub in_service: usize,
    /// Most reads waiting at the same time.
    pub waiting_peak: usize,
    /// Most reads in service at the same time.
    pub in_service_peak: usize,
}

/// Totals and records under construction.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    reads: Reads,
    records: Vec<ReadRecord>,
}

impl Counts {
    pub(crate) fn arrive(&mut self, waiting: usize, in_service: usize) {
        self.reads.arrived = self.reads.arrived.saturating_add(1);
        self.reads.waiting_peak = self.reads.waiting_peak.max(waiting);
        self.reads.in_service_peak = self.reads.in_service_peak.max(in_service);
    }

    pub(crate) fn answer(&mut self, record: ReadRecord, bytes: usize) {
        let reads = &mut self.reads;
        reads.answered = reads.answered.saturating_add(1);
        reads.bytes = reads
            .bytes
            .saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
        let kind = match record.outcome {
            Outcome::Served => None,
            Outcome::Short => Some(&mut reads.short),
            Outcome::Failed => Some(&mut reads.failed),
            Outcome::SourceFailed => Some(&mut reads.source_failed),
        };
        if let Some(count) = kind {
            *count = count.saturating_add(1);
        }
        if self.records.len() < RECORDS_MAX {
            self.records.push(record);
        }
    }

    pub(crate) fn reads(&self, waiting: usize, in_service: usize) -> Reads {
        Reads {
            waiting,
            in_service,
            ..self.reads.clone()
        }
    }

    pub(crate) fn records(&self) -> Vec<ReadRecord> {
        self.records.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(offset: u64, outcome: Outcome) -> ReadRecord {
        ReadRecord {
            offset,
            length_bytes: 4096,
            direct: true,
            outcome,
        }
    }

    #[test]
    fn answers_are_counted_by_outcome() {
        // Scenario: one answer of each kind. Expectation: each in its own total, all in the total of answers.
        let mut counts = Counts::default();
        for outcome in [
            Outcome::Served,
            Outcome::Short,
            Outcome::Failed,
            Outcome::SourceFailed,
        ] {
            counts.arrive(3, 1);
            counts.answer(record(0, outcome), 10);
        }
        let reads = counts.reads(0, 0);
        assert_eq!((reads.arrived, reads.answered, reads.bytes), (4, 4, 40));
        assert_eq!((reads.short, reads.failed, reads.source_failed), (1, 1, 1));
        assert_eq!((reads.waiting_peak, reads.in_service_peak), (3, 1));
        assert_eq!(counts.records().len(), 4);
    }

    #[test]
    fn a_record_overlaps_what_it_touched() {
        // Scenario: a read of bytes 4096 to 8191. Expectation: its neighbours do not overlap it.
        let record = record(4096, Outcome::Served);
        assert!(record.overlaps(8191, 1) && record.overlaps(0, 4097));
        assert!(!record.overlaps(0, 4096) && !record.overlaps(8192, 4096));
    }
}
