//! The report as one page that needs nothing else: no scripts, no fonts, no network.

use super::{Report, text};
use crate::study::Key;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}\
table{border-collapse:collapse;margin:.5rem 0 1.5rem;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}\
th,td{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}\
th{background:#f3f3f3}.mark{background:#a40000;color:#fff;padding:.5rem 1rem;font-weight:600}\
.confirmed{color:#0a6b1f}.refuted{color:#a40000}svg{max-width:100%;height:auto}pre{overflow-x:auto}";

pub(super) fn write(report: &Report, plots: &[String]) -> String {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    out.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">");
    let title = escaped(&format!("{}: {}", report.study, report.title));
    out.push_str(&format!(
        "<title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
    ));
    for mark in &report.marks {
        let mark = escaped(mark);
        out.push_str(&format!("<p class=\"mark\">Forced, no evidence: {mark}</p>\n"));
    }
    if !report.yaml.is_empty() {
        let yaml = escaped(&report.yaml);
        out.push_str(&format!("<h2>Recommended settings</h2>\n<pre>{yaml}</pre>\n"));
    }
    if !report.claims.is_empty() {
        out.push_str(&format!("<h2>Claims of {}</h2>\n<ul>", escaped(&report.source)));
        for claim in &report.claims {
            out.push_str(&format!(
                "<li>{}: <b class=\"{}\">{}</b>: {}</li>\n",
                escaped(&claim.claim),
                escaped(&claim.verdict.replace(' ', "-")),
                escaped(&claim.verdict),
                escaped(&claim.words)
            ));
        }
        out.push_str("</ul>\n");
    }
    for beside in &report.beside {
        out.push_str(&format!("<h2>{}</h2>\n", escaped(&beside.title)));
        let (head, rows) = beside
            .rows
            .split_first()
            .map_or((&[][..], &[][..]), |(h, r)| (h.as_slice(), r));
        table(&mut out, head, rows);
    }
    for plot in plots {
        out.push_str(&format!("<figure>{plot}</figure>\n"));
    }
    out.push_str("<h2>Results</h2>\n<p>Medians of the repetitions; the interval is that of the first measure's median.</p>\n");
    table(&mut out, &text::head(report), &text::cells(report));
    for (title, sentences) in [("Left out", &report.left_out), ("Notes", &report.notes)] {
        if !sentences.is_empty() {
            let items: String = sentences
                .iter()
                .map(|one| format!("<li>{}</li>\n", escaped(one)))
                .collect();
            out.push_str(&format!("<h2>{title}</h2>\n<ul>{items}</ul>\n"));
        }
    }
    for (title, pairs) in [
        ("Strategies", &report.strategies),
        ("Machine and run", &report.facts),
        ("Settings", &report.settings),
    ] {
        if !pairs.is_empty() {
            out.push_str(&format!("<h2>{title}</h2>\n"));
            table(&mut out, &[], &lines(pairs));
        }
    }
    out.push_str("</body></html>\n");
    out
}

fn lines(pairs: &Key) -> Vec<Vec<String>> {
    pairs
        .iter()
        .map(|(name, value)| vec![name.clone(), value.clone()])
        .collect()
}

fn table(out: &mut String, head: &[String], rows: &[Vec<String>]) {
    out.push_str("<table>");
    let mut line = |cells: &[String], tag: &str| {
        out.push_str("<tr>");
        for cell in cells {
            out.push_str(&format!("<{tag}>{}</{tag}>", escaped(cell)));
        }
        out.push_str("</tr>\n");
    };
    if !head.is_empty() {
        line(head, "th");
    }
    for row in rows {
        line(row, "td");
    }
    out.push_str("</table>\n");
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::plot;

    #[test]
    fn the_page_is_whole_and_nothing_in_it_is_markup_by_accident() {
        // Scenario: names with every special character, a plot, a mark. Expected: escaped, the plot inside, no link to
        // anything else.
        let report = crate::report::tests::report();
        let svg = plot::svg(&[&report.plots[0]]).unwrap();
        let page = write(&report, &[svg]);
        assert!(page.contains("What &lt;is&gt; &amp; is &quot;not&quot;") && !page.contains("<is>"));
        assert!(page.contains("Forced, no evidence: --size: too small"));
        assert!(page.contains("<svg") && page.contains("class=\"refuted\""));
        let linked = ["<script", "<link", "<img", "src=", "href="];
        assert!(linked.iter().all(|tag| !page.contains(tag)));
        assert!(page.ends_with("</body></html>\n"));
    }
}
