//! What is told: tables for people, one JSON document for programs.

use super::advice::{Advice, verdict};
use super::findings::{Curve, Findings, Phase, Ranking};
use super::target::Target;
use crate::quantity::{exact_size, latency, rate, size};
use crate::table::Table;
use serde_json::{Value, json};
use std::io::{self, Write};
use std::time::Duration;

/// When and where it was measured.
#[derive(Debug, Clone)]
pub(super) struct Circumstances {
    /// UTC.
    pub(super) date: String,
    pub(super) kernel: String,
    pub(super) cpus: usize,
    pub(super) budget: Duration,
    pub(super) took: Duration,
}

/// Everything that is told.
pub(super) struct Report<'a> {
    pub(super) target: &'a Target,
    pub(super) findings: &'a Findings,
    pub(super) advice: &'a [Advice],
    pub(super) circumstances: Circumstances,
}

impl Report<'_> {
    /// The device's name, or what it is instead.
    pub(super) fn device_name(&self) -> String {
        let device = self.target.device.as_ref();
        device.map_or_else(
            || "a device that /sys does not tell of".to_owned(),
            |device| device.name.clone(),
        )
    }

    fn device_text(&self) -> String {
        let Some(device) = &self.target.device else {
            return "not known: no single block device beneath (overlay, network or several)".to_owned();
        };
        let tags = device
            .queue_tags()
            .map_or_else(|| "tags not known".to_owned(), |tags| format!("{tags} tags"));
        let queues = match device.hardware_queues {
            1 => "one hardware queue".to_owned(),
            queues => format!("{queues} hardware queues"),
        };
        let seeks = if device.rotational {
            ", says it rotates"
        } else {
            ""
        };
        format!("{}: {queues} of {tags}{seeks}", device.name)
    }

    /// What the device offers for polled completions. The engine has no polled mode.
    fn polling(&self) -> &'static str {
        match self.target.device.as_ref().map(|device| device.poll_queues) {
            Some(false) => "poll queues: none on this device; not tried",
            Some(true) => {
                "poll queues: the device has some; not tried, for the engine has no polled mode (docs/design/TRAPS.md, 5)"
            }
            None => "poll queues: not known; not tried",
        }
    }

    fn memory_text(&self) -> String {
        match self.target.memory_bytes {
            Some(memory) if self.target.fits_memory() => format!(
                "the file FITS in the {} that the page cache may have: in service it turns warm",
                size(memory)
            ),
            Some(memory) => format!(
                "the file is larger than the {} that the page cache may have",
                size(memory)
            ),
            None => "how much the page cache may have is not known: taken for less than the file".to_owned(),
        }
    }

    /// The first lines of the YAML: where its figures are from.
    pub(super) fn head(&self) -> Vec<String> {
        let at = &self.circumstances;
        let mut head = vec![
            format!(
                "ringfetch calibrate {}: {}, {} on {}, kernel {}",
                at.date,
                self.target.path.display(),
                size(self.target.length_bytes),
                self.device_name(),
                at.kernel
            ),
            format!(
                "{} random reads, {} steps in {:.0} s; the engine alone, without a network",
                exact_size(self.target.block_bytes.into()),
                self.findings.steps.len(),
                at.took.as_secs_f64()
            ),
        ];
        head.extend(self.findings.notes.iter().map(|note| format!("note: {note}")));
        head
    }

    /// The tables.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let (target, findings, at) = (self.target, self.findings, &self.circumstances);
        let mut facts = Table::default();
        let what = if target.is_device { "block device" } else { "file" };
        facts.row([
            what.to_owned(),
            format!("{}, {}", target.path.display(), size(target.length_bytes)),
        ]);
        facts.row(["device".to_owned(), self.device_text()]);
        facts.row(["direct I/O".to_owned(), target.direct_reason.clone()]);
        facts.row(["memory".to_owned(), self.memory_text()]);
        facts.row(["polling".to_owned(), self.polling().to_owned()]);
        let host = format!("kernel {}, {} CPUs, {}", at.kernel, at.cpus, at.date);
        facts.row(["host".to_owned(), host]);
        facts.row([
            "measured".to_owned(),
            format!(
                "{} random reads, {} steps in {:.1} s",
                exact_size(target.block_bytes.into()),
                findings.steps.len(),
                at.took.as_secs_f64()
            ),
        ]);
        if let Some(refusal) = &findings.ring_refusal {
            facts.row([
                "io_uring".to_owned(),
                format!("NOT AVAILABLE, only mmap and pread are measured: {refusal}"),
            ]);
        }
        facts.write(out)?;
        if let Some(curve) = &findings.depth {
            let heat = if target.direct { "direct" } else { "buffered, cold" };
            let head = if findings.ring_refusal.is_none() {
                "DEPTH"
            } else {
                "THREADS OF PREAD"
            };
            let who = if findings.ring_refusal.is_none() {
                "One ring"
            } else {
                "pread"
            };
            writeln!(
                out,
                "\n{who}, {heat}; single reads, as many asked for as the depth"
            )?;
            curve_table(head, curve).write(out)?;
        }
        if !findings.contests.is_empty() {
            writeln!(out, "\nB against A, in alternating pairs")?;
            self.contest_table().write(out)?;
        }
        if let Some(curve) = &findings.mmap_threads {
            writeln!(out, "\nmmap, cold, in batches of {}", findings.chosen.batch)?;
            curve_table("THREADS", curve).write(out)?;
        }
        if let Some(ranking) = &findings.cold {
            writeln!(out, "\nBackends, cold")?;
            ranking_table(ranking).write(out)?;
        }
        if let (Some(ranking), Some(window)) = (&findings.warm, findings.warm_window_bytes) {
            writeln!(out, "\nBackends, warm: the first {}", size(window))?;
            ranking_table(ranking).write(out)?;
        }
        if !findings.notes.is_empty() {
            writeln!(out)?;
        }
        for note in &findings.notes {
            writeln!(out, "note: {note}")?;
        }
        Ok(())
    }

    fn contest_table(&self) -> Table {
        let mut table = Table::new(&[3, 4, 5, 7, 8]);
        table.row([
            "",
            "A",
            "B",
            "A READS/S",
            "B READS/S",
            "RATIO",
            "(LOW TO HIGH)",
            "A CPU us",
            "B CPU us",
            "B",
        ]);
        for contest in &self.findings.contests {
            let name = match contest.phase {
                Phase::RegisteredBuffers => "registered buffers",
                Phase::EagerFlush => "eager flush",
                Phase::DirectIo => "direct I/O, cold",
                Phase::Rings => "rings",
                Phase::MmapAnnounce => "mmap announces, cold",
                Phase::Depth | Phase::MmapThreads | Phase::BackendsCold | Phase::BackendsWarm => continue,
            };
            table.row([
                name.to_owned(),
                contest.first.clone(),
                contest.second.clone(),
                rate(contest.first_reads_per_second),
                rate(contest.second_reads_per_second),
                format!("x{:.2}", contest.reads.median),
                format!("({:.2} to {:.2})", contest.reads.low, contest.reads.high),
                format!("{:.2}", contest.first_cpu_us_per_read),
                format!("{:.2}", contest.second_cpu_us_per_read),
                verdict(contest).to_owned(),
            ]);
        }
        table
    }

    /// One document with every step's figures.
    pub(super) fn json(&self, yaml: &str) -> Result<Value, serde_json::Error> {
        let (target, at) = (self.target, &self.circumstances);
        let device = target.device.as_ref().map(|device| {
            json!({
                "name": device.name,
                "queue_tags": device.queue_tags(),
                "hardware_queues": device.hardware_queues,
                "rotational": device.rotational,
                "logical_block_bytes": device.logical_block_bytes,
                "poll_queues": device.poll_queues,
            })
        });
        Ok(json!({
            "calibration": 1,
            "version": env!("CARGO_PKG_VERSION"),
            "date": at.date,
            "kernel": at.kernel,
            "cpus": at.cpus,
            "budget_seconds": at.budget.as_secs_f64(),
            "took_seconds": at.took.as_secs_f64(),
            "target": {
                "path": target.path.to_string_lossy(),
                "block_device": target.is_device,
                "length_bytes": target.length_bytes,
                "block_bytes": target.block_bytes,
                "holes_share": target.holes_share,
                "direct_io": target.direct,
                "direct_io_reason": target.direct_reason,
                "memory_bytes": target.memory_bytes,
                "fits_memory": target.fits_memory(),
            },
            "device": device,
            "polling": self.polling(),
            "findings": serde_json::to_value(self.findings)?,
            "advice": serde_json::to_value(self.advice)?,
            "yaml": yaml,
        }))
    }
}

fn curve_table(setting: &str, curve: &Curve) -> Table {
    let mut table = Table::new(&[0, 1, 2, 4, 5, 6, 7]);
    table.row([
        setting,
        "READS/S",
        "OF THE MOST",
        "PASSES",
        "P50",
        "P99",
        "CPU us",
        "IN FLIGHT",
        "",
    ]);
    let most = curve.best().map_or(1.0, |best| best.reads_per_second);
    for (index, point) in curve.points.iter().enumerate() {
        let low = point.passes.iter().copied().fold(f64::INFINITY, f64::min);
        let high = point.passes.iter().copied().fold(0.0, f64::max);
        let mark = match (index == curve.knee, index == curve.best) {
            (true, true) => "knee, most",
            (true, false) => "knee",
            (false, true) => "most",
            (false, false) if index >= curve.usable => "beyond the tags",
            (false, false) => "",
        };
        table.row([
            point.setting.to_string(),
            rate(point.reads_per_second),
            format!("{:.0} %", 100.0 * point.reads_per_second / most),
            if point.passes.len() > 1 {
                format!("{} to {}", rate(low), rate(high))
            } else {
                "one".to_owned()
            },
            latency(point.p50_us * 1e3),
            latency(point.p99_us * 1e3),
            format!("{:.2}", point.cpu_us_per_read),
            point
                .in_flight
                .map_or_else(|| "-".to_owned(), |depth| format!("{depth:.1}")),
            mark.to_owned(),
        ]);
    }
    table
}

fn ranking_table(ranking: &Ranking) -> Table {
    let mut table = Table::new(&[2, 3, 4, 5, 6]);
    table.row([
        "BACKEND",
        "READS",
        "READS/S",
        "CPU us",
        "BATCH P50",
        "BATCH P99",
        "OF THE FIRST",
        "",
    ]);
    for (index, row) in ranking.rows.iter().enumerate() {
        let against = row.against_winner.map_or_else(
            || "-".to_owned(),
            |reads| format!("x{:.2} ({:.2} to {:.2})", reads.median, reads.low, reads.high),
        );
        table.row([
            row.backend.as_str().to_owned(),
            if row.direct { "direct" } else { "buffered" }.to_owned(),
            rate(row.reads_per_second),
            format!("{:.2}", row.cpu_us_per_read),
            latency(row.p50_us * 1e3),
            latency(row.p99_us * 1e3),
            against,
            if index == ranking.winner { "take this" } else { "" }.to_owned(),
        ]);
    }
    table
}
