//! The report as a document: the same parts as text for a terminal, and as a self-contained page (no scripts,
//! no fonts, no network).

use super::{FORCED, Report, ReportRow, measure_named};
use crate::study::Key;
use ringfetch_command::table::Table;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}\
table{border-collapse:collapse;margin:.5rem 0 1.5rem;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}\
th,td{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}\
th{background:#f3f3f3}.mark{background:#a40000;color:#fff;padding:.5rem 1rem;font-weight:600}\
.confirmed{color:#0a6b1f}.refuted{color:#a40000}svg{max-width:100%;height:auto}pre{overflow-x:auto}";

enum Part<'a> {
    Claims(String),
    /// The head, which may be empty, is the first row.
    Table(&'a str, Vec<Vec<String>>),
    List(&'a str, &'a [String]),
}

/// The parts of both forms, in the order of the page: the most important first.
fn parts(report: &Report) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    if !report.claims.is_empty() {
        parts.push(Part::Claims(format!("Claims of {}", report.source)));
    }
    let beside = report.beside.iter();
    parts.extend(beside.map(|beside| Part::Table(&beside.title, beside.rows.clone())));
    parts.push(Part::Table("Results", results(report)));
    for (title, sentences) in [("Left out", &report.left_out), ("Notes", &report.notes)] {
        if !sentences.is_empty() {
            parts.push(Part::List(title, sentences));
        }
    }
    parts.push(Part::Table("Machine and run", lines(&report.facts)));
    parts
}

/// The report for a terminal, where the last lines are read first.
pub(super) fn text(report: &Report) -> String {
    let mut out = format!("{}: {}\n", report.study, report.title);
    for mark in &report.marks {
        out.push_str(&format!("{FORCED}: {mark}\n"));
    }
    for part in parts(report).into_iter().rev() {
        out.push('\n');
        match part {
            Part::Claims(title) => {
                out.push_str(&format!("{title}\n"));
                for claim in &report.claims {
                    out.push_str(&format!(
                        "- {}: {}: {}\n",
                        claim.claim, claim.verdict, claim.words
                    ));
                }
            }
            Part::Table(title, rows) => {
                let mut table = Table::new(&[]);
                let rows = rows.into_iter().filter(|row| !row.is_empty());
                rows.for_each(|row| table.row(row));
                out.push_str(&format!("{title}\n{table}"));
            }
            Part::List(title, items) => {
                out.push_str(&format!("{title}\n"));
                items.iter().for_each(|item| out.push_str(&format!("- {item}\n")));
            }
        }
    }
    out
}

/// The page, with its plots.
pub(super) fn html(report: &Report, plots: &[String]) -> String {
    let title = escaped(&format!("{}: {}", report.study, report.title));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
    );
    for mark in &report.marks {
        let mark = escaped(mark);
        out.push_str(&format!("<p class=\"mark\">Forced, no evidence: {mark}</p>\n"));
    }
    if !report.yaml.is_empty() {
        let yaml = escaped(&report.yaml);
        out.push_str(&format!("<h2>Recommended settings</h2>\n<pre>{yaml}</pre>\n"));
    }
    let mut parts = parts(report);
    for (title, pairs) in [("Strategies", &report.strategies), ("Settings", &report.settings)] {
        if !pairs.is_empty() {
            parts.push(Part::Table(title, lines(pairs)));
        }
    }
    for part in parts {
        match part {
            Part::Claims(title) => {
                let item = |claim: &super::Claim| {
                    let [what, verdict, words] =
                        [&claim.claim, &claim.verdict, &claim.words].map(|t| escaped(t));
                    let class = verdict.replace(' ', "-");
                    format!("{what}: <b class=\"{class}\">{verdict}</b>: {words}")
                };
                list(&mut out, &title, report.claims.iter().map(item));
            }
            Part::Table(title, rows) => {
                if title == "Results" {
                    let figures = plots.iter().map(|plot| format!("<figure>{plot}</figure>\n"));
                    out.push_str(&figures.collect::<String>());
                }
                out.push_str(&format!("<h2>{}</h2>\n", escaped(title)));
                if title == "Results" {
                    out.push_str("<p>Medians of the repetitions; the interval is that of the first measure's median.</p>\n");
                }
                table(&mut out, &rows);
            }
            Part::List(title, items) => list(&mut out, title, items.iter().map(|item| escaped(item))),
        }
    }
    out.push_str("</body></html>\n");
    out
}

fn list(out: &mut String, title: &str, items: impl Iterator<Item = String>) {
    let items: String = items.map(|item| format!("<li>{item}</li>\n")).collect();
    out.push_str(&format!("<h2>{}</h2>\n<ul>{items}</ul>\n", escaped(title)));
}

fn table(out: &mut String, rows: &[Vec<String>]) {
    out.push_str("<table>");
    for (number, row) in rows.iter().enumerate().filter(|(_, row)| !row.is_empty()) {
        let tag = if number == 0 { "th" } else { "td" };
        let cells = row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
        out.push_str(&format!("<tr>{}</tr>\n", cells.collect::<String>()));
    }
    out.push_str("</table>\n");
}

/// Pairs as a table without a head.
fn lines(pairs: &Key) -> Vec<Vec<String>> {
    let lines = pairs.iter().cloned().map(|(name, value)| vec![name, value]);
    [Vec::new()].into_iter().chain(lines).collect()
}

/// The results: axes, medians, the interval of the first measure, the source of the bytes.
fn results(report: &Report) -> Vec<Vec<String>> {
    let titles = |name: &String| measure_named(name).map_or(name.clone(), |measure| measure.title.to_owned());
    let titles: Vec<String> = report.columns.iter().map(titles).collect();
    let axes = report.rows.iter().take(1).flat_map(|row| &row.key);
    let mut head: Vec<String> = axes.map(|(name, _)| name.clone()).chain(titles.clone()).collect();
    head.extend(titles.first().map(|first| format!("{first} from .. to")));
    head.extend(["from", "note"].map(str::to_owned));
    let line = |row: &ReportRow| {
        let found = |name: &String| row.measure(name).zip(measure_named(name));
        let median = |name| {
            found(name).map_or("-".to_owned(), |(summary, measure)| {
                (measure.show)(summary.median)
            })
        };
        let mut cells: Vec<String> = row.key.iter().map(|(_, value)| value.clone()).collect();
        cells.extend(report.columns.iter().map(median));
        let interval = |name| {
            found(name).map_or(String::new(), |(summary, measure)| {
                format!(
                    "{} .. {}",
                    (measure.show)(summary.low),
                    (measure.show)(summary.high)
                )
            })
        };
        cells.extend(report.columns.first().map(interval));
        cells.extend([row.came_from.clone(), row.note.clone().unwrap_or_default()]);
        cells
    };
    [head].into_iter().chain(report.rows.iter().map(line)).collect()
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::plot;
    use crate::report::tests::report;

    #[test]
    fn the_text_says_everything_that_a_reader_needs() {
        // Scenario: a forced report. Expected: its mark, facts, medians with intervals, what was left out,
        // the claim.
        let text = text(&report());
        for part in [
            "FORCED, no evidence: --size: too small",
            "kernel",
            "reads/s from .. to",
            "320",
            "300 .. 340",
            "device",
            "- tokio-fs: not <here>",
            "- 5x: refuted: does not hold here: 3.20x",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn the_page_is_whole_and_nothing_in_it_is_markup_by_accident() {
        // Scenario: names with every special character, a plot, a mark. Expected: escaped, the plot inline,
        // no external link.
        let report = report();
        let svg = plot::svg(&report.plots[0]).unwrap();
        let page = html(&report, &[svg]);
        assert!(page.contains("What &lt;is&gt; &amp; is &quot;not&quot;") && !page.contains("<is>"));
        assert!(page.contains("Forced, no evidence: --size: too small"));
        assert!(page.contains("<svg") && page.contains("class=\"refuted\""));
        let linked = ["<script", "<link", "<img", "src=", "href="];
        assert!(linked.iter().all(|tag| !page.contains(tag)));
        assert!(page.ends_with("</body></html>\n"));
    }
}
