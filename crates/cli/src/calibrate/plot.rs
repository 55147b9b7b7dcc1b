//! Reads/s and latency against depth as an SVG: two panels over one log2 axis, the knee marked, the passes as dots.
//! Pure.
//!
//! Written by hand: it takes its colours from the reader's scheme (light or dark) by a media query, which no plotting
//! crate writes, and is smaller than the code to drive one. Absent: anything that runs or is fetched.

use super::findings::{Curve, Point};
use super::judge::KNEE_SHARE;
use crate::quantity::{latency, rate};
use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 700.0;
/// (top, bottom) of the panels.
const READS: (f64, f64) = (92.0, 300.0);
const LATENCY: (f64, f64) = (350.0, 500.0);

const STYLE: &str = "\
text{font:13px system-ui,sans-serif;fill:#1f2328}.t{font-size:16px;font-weight:600}.m{fill:#59636e;font-size:12px}\
.bg{fill:#fff}.g{stroke:#d1d9e0;stroke-width:1}.r{stroke:#0969da}.rf{fill:#0969da}.h{stroke:#bc4c00}.hf{fill:#bc4c00}\
.l{stroke:#8250df}.lf{fill:#8250df}.k{stroke:#1a7f37;stroke-width:1.5}.kf{fill:#1a7f37;font-weight:600}\
.d{stroke:#59636e;stroke-dasharray:4 4}.c{fill:none;stroke-width:2}.p{opacity:.4}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.m{fill:#9198a1}.bg{fill:#0d1117}.g{stroke:#30363d}\
.r{stroke:#58a6ff}.rf{fill:#58a6ff}.h{stroke:#f0883e}.hf{fill:#f0883e}.l{stroke:#bc8cff}.lf{fill:#bc8cff}\
.k{stroke:#3fb950}.kf{fill:#3fb950}.d{stroke:#9198a1}}";

/// What is drawn beside the curve.
#[derive(Debug, Clone)]
pub(super) struct Labels {
    pub(super) title: String,
    pub(super) subtitle: String,
    /// What the x axis counts: `queue depth`, `threads of pread`.
    pub(super) axis: &'static str,
    /// The device's tags.
    pub(super) tags: Option<u32>,
}

/// A horizontal axis of powers, a vertical one per panel.
struct Scale {
    first: f64,
    last: f64,
}

impl Scale {
    /// 1 to 512 over 616 pixels: 64 stands at 84 + 616 * 6 / 9.
    fn x(&self, setting: f64) -> f64 {
        let span = (self.last.log2() - self.first.log2()).max(1.0);
        LEFT + (RIGHT - LEFT) * (setting.log2() - self.first.log2()) / span
    }
}

/// Where a share (0 to 1, from the bottom) of a panel stands.
fn y(panel: (f64, f64), share: f64) -> f64 {
    panel.1 - (panel.1 - panel.0) * share.clamp(0.0, 1.0)
}

/// The picture.
pub(super) fn svg(labels: &Labels, curve: &Curve) -> String {
    let points = &curve.points;
    let setting = |point: Option<&Point>| point.map_or(1.0, |point| f64::from(point.setting.max(1)));
    let scale = Scale {
        first: setting(points.first()),
        last: setting(points.last()),
    };
    let mut out = String::new();
    let title = escape(&labels.title);
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\" aria-labelledby=\"title desc\">\n<title id=\"title\">{title}</title>\n\
         <desc id=\"desc\">{}</desc>\n<style>{STYLE}</style>\n\
         <rect class=\"bg\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n",
        escape(&description(curve, labels.axis))
    );
    text(&mut out, (16.0, 28.0), "t", "start", &labels.title);
    text(&mut out, (16.0, 48.0), "m", "start", &labels.subtitle);
    text(&mut out, (16.0, READS.0 - 16.0), "m", "start", "reads/s");
    text(
        &mut out,
        (16.0, LATENCY.0 - 16.0),
        "m",
        "start",
        "latency of a read",
    );
    reads_grid(&mut out, curve);
    let (low, high) = latency_grid(&mut out, curve);
    for point in points {
        let x = scale.x(f64::from(point.setting.max(1)));
        let _ = writeln!(out, "<path class=\"g\" d=\"M{x:.1} {:.1}v5\"/>", LATENCY.1);
        text(
            &mut out,
            (x, LATENCY.1 + 20.0),
            "m",
            "middle",
            &point.setting.to_string(),
        );
    }
    text(
        &mut out,
        (f64::midpoint(LEFT, RIGHT), LATENCY.1 + 42.0),
        "m",
        "middle",
        labels.axis,
    );
    if let Some(tags) = labels
        .tags
        .map(f64::from)
        .filter(|tags| *tags <= scale.last && *tags >= scale.first)
    {
        vertical(&mut out, scale.x(tags), "d");
        let word = format!("{tags} tags");
        text(
            &mut out,
            (scale.x(tags) + 5.0, READS.1 - 6.0),
            "m",
            "start",
            &word,
        );
    }
    if let Some(knee) = curve.knee() {
        let x = scale.x(setting(Some(knee)));
        vertical(&mut out, x, "k");
        // At the right edge the word would leave the picture.
        let anchor = if x > RIGHT - 60.0 { "end" } else { "middle" };
        text(
            &mut out,
            (x, READS.0 - 16.0),
            "kf",
            anchor,
            &format!("knee: {}", knee.setting),
        );
    }
    let top = reads_top(curve);
    for point in points {
        for pass in &point.passes {
            let at = (scale.x(setting(Some(point))), y(READS, pass / top));
            let _ = writeln!(
                out,
                "<circle class=\"rf p\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"/>",
                at.0, at.1
            );
        }
    }
    let reads = |point: &Point| y(READS, point.reads_per_second / top);
    line(&mut out, &scale, points, "r", reads);
    let place = |us: f64| y(LATENCY, (us.max(1e-3).log10() - low) / (high - low));
    line(&mut out, &scale, points, "l", |point| place(point.p50_us));
    line(&mut out, &scale, points, "h", |point| place(point.p99_us));
    if let Some(last) = points.last() {
        let (p50, p99) = (place(last.p50_us), place(last.p99_us));
        // Not on top of each other: p99 is never below p50.
        let apart = (14.0 - (p50 - p99)).max(0.0) / 2.0;
        text(&mut out, (RIGHT + 10.0, p99 + 4.0 - apart), "hf", "start", "p99");
        text(&mut out, (RIGHT + 10.0, p50 + 4.0 + apart), "lf", "start", "p50");
    }
    out.push_str("</svg>\n");
    out
}

/// The picture in words.
fn description(curve: &Curve, axis: &str) -> String {
    let points = curve.points.iter().map(|point| {
        format!(
            "{}: {} reads/s, p50 {}, p99 {}",
            point.setting,
            rate(point.reads_per_second),
            latency(point.p50_us * 1e3),
            latency(point.p99_us * 1e3)
        )
    });
    let knee = curve.knee().map_or(0, |point| point.setting);
    format!(
        "By {axis}: {}. Knee at {knee}.",
        points.collect::<Vec<_>>().join("; ")
    )
}

/// The top of the upper panel: beyond the highest pass.
fn reads_top(curve: &Curve) -> f64 {
    let passes = curve.points.iter().flat_map(|point| point.passes.iter().copied());
    let most = passes.fold(1.0, f64::max);
    let step = tick_step(most);
    (most / step).ceil() * step
}

/// A round step that divides 0 to `most` into 3 to 7: 92 000 gives 20 000.
fn tick_step(most: f64) -> f64 {
    let rough = most / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps
        .into_iter()
        .find(|step| *step >= rough * 0.8)
        .unwrap_or(power * 10.0)
}

fn reads_grid(out: &mut String, curve: &Curve) {
    let (top, mut value) = (reads_top(curve), 0.0);
    let step = tick_step(top);
    while value <= top * 1.001 {
        let at = y(READS, value / top);
        horizontal(out, at, "g");
        let word = if value == 0.0 { "0".to_owned() } else { rate(value) };
        text(out, (LEFT - 10.0, at + 4.0), "m", "end", &word);
        value += step;
    }
    if let Some(best) = curve.best() {
        let at = y(READS, best.reads_per_second * KNEE_SHARE / top);
        horizontal(out, at, "d");
        text(out, (LEFT + 6.0, at - 5.0), "m", "start", "95 % of the most");
    }
}

/// Lines at 1, 2 and 5 of each decade, or at the decades alone where there are many. Returns the logarithms (base 10, of
/// microseconds) of the bottom and the top.
fn latency_grid(out: &mut String, curve: &Curve) -> (f64, f64) {
    let all = || curve.points.iter().flat_map(|point| [point.p50_us, point.p99_us]);
    let least = all().fold(f64::INFINITY, f64::min).clamp(1e-3, 1e9).log10();
    let most = all().fold(1e-3, f64::max).log10();
    let candidates = |factors: &'static [f64]| {
        (-3..10).flat_map(move |decade| factors.iter().map(move |factor| factor * 10f64.powi(decade)))
    };
    let every: Vec<f64> = candidates(&[1.0, 2.0, 5.0]).collect();
    // The ticks around the values: from the last one below to the first one above.
    let bottom = every
        .iter()
        .copied()
        .rfind(|tick| tick.log10() <= least)
        .unwrap_or(1e-3);
    let top = every
        .iter()
        .copied()
        .find(|tick| tick.log10() >= most && *tick > bottom)
        .unwrap_or(1e9);
    let within = |tick: &f64| *tick >= bottom * 0.999 && *tick <= top * 1.001;
    let mut ticks: Vec<f64> = every.iter().copied().filter(within).collect();
    if ticks.len() > 8 {
        ticks = candidates(&[1.0]).filter(within).collect();
    }
    let (low, high) = (bottom.log10(), top.log10());
    for tick in ticks {
        let at = y(LATENCY, (tick.log10() - low) / (high - low));
        horizontal(out, at, "g");
        text(out, (LEFT - 10.0, at + 4.0), "m", "end", &round_latency(tick));
    }
    (low, high)
}

/// `200 us`, `1 ms`: a tick's value is round.
fn round_latency(us: f64) -> String {
    match us {
        us if us < 0.999 => format!("{:.0} ns", us * 1e3),
        us if us < 999.0 => format!("{us:.0} us"),
        us if us < 999e3 => format!("{:.0} ms", us / 1e3),
        us => format!("{:.0} s", us / 1e6),
    }
}

fn line(out: &mut String, scale: &Scale, points: &[Point], class: &str, y: impl Fn(&Point) -> f64) {
    let places: Vec<(f64, f64)> = points
        .iter()
        .map(|point| (scale.x(f64::from(point.setting.max(1))), y(point)))
        .collect();
    let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    let _ = writeln!(out, "<path class=\"c {class}\" d=\"M{}\"/>", path.join("L"));
    for (x, y) in places {
        let _ = writeln!(
            out,
            "<circle class=\"{class}f\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>"
        );
    }
}

fn vertical(out: &mut String, x: f64, class: &str) {
    for (top, bottom) in [READS, LATENCY] {
        let _ = writeln!(
            out,
            "<path class=\"{class}\" d=\"M{x:.1} {top:.1}V{bottom:.1}\"/>"
        );
    }
}

fn horizontal(out: &mut String, y: f64, class: &str) {
    let _ = writeln!(
        out,
        "<path class=\"{class}\" d=\"M{LEFT:.1} {y:.1}H{RIGHT:.1}\"/>"
    );
}

fn text(out: &mut String, (x, y): (f64, f64), class: &str, anchor: &str, words: &str) {
    let words = escape(words);
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"
    );
}

/// Text as XML has it. Control characters are not allowed in XML at all.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::findings::tests::sample;
    use super::*;

    fn labels() -> Labels {
        Labels {
            title: "vda <&>\u{7} 2026-01-02".to_owned(),
            subtitle: "4 KiB".to_owned(),
            axis: "queue depth",
            tags: Some(256),
        }
    }

    /// Every coordinate of the picture: (x, y).
    fn places(svg: &str) -> Vec<(f64, f64)> {
        let numbers = |text: &str| text.trim_matches('"').parse::<f64>().unwrap();
        let of = |line: &str, name: &str| {
            let (_, rest) = line.split_once(&format!(" {name}=\""))?;
            Some(numbers(rest.split('"').next()?))
        };
        let at = |line: &str| {
            let circle = of(line, "cx").zip(of(line, "cy"));
            circle.or_else(|| of(line, "x").zip(of(line, "y")))
        };
        svg.lines().filter_map(at).collect()
    }

    #[test]
    fn the_picture_holds_the_curve_inside_its_frame() {
        // Scenario: ten depths over three orders of magnitude in two passes; one depth only; latencies of nothing.
        // Expected: every place finite and inside the picture, a dot a pass, knee, tags, and text that is XML.
        let curve = |depths: &[u32], reads: f64| {
            let samples: Vec<(u32, _)> = depths
                .iter()
                .flat_map(|depth| [(*depth, sample(reads * f64::from(*depth), 2.0)); 2])
                .collect();
            Curve::through(&samples, None).unwrap()
        };
        let depths: Vec<u32> = (0..10).map(|bit| 1 << bit).collect();
        for curve in [curve(&depths, 180.0), curve(&[1], 1e6), curve(&[1, 3], 1e-9)] {
            let picture = svg(&labels(), &curve);
            let inside = |(x, y): &(f64, f64)| (0.0..=WIDTH).contains(x) && (0.0..=HEIGHT).contains(y);
            let places = places(&picture);
            assert!(places.len() > 8 && places.iter().all(inside), "{picture}");
            assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
            assert_eq!(picture.matches("class=\"rf p\"").count(), 2 * curve.points.len());
            assert!(picture.contains("<title id=\"title\">vda &lt;&amp;&gt;? 2026-01-02</title>"));
            assert!(picture.contains(&format!("knee: {}", curve.knee().unwrap().setting)));
            assert_eq!(picture.contains("256 tags"), curve.points.len() == 10);
            assert!(picture.contains("prefers-color-scheme:dark") && picture.ends_with("</svg>\n"));
        }
    }

    #[test]
    fn ticks_are_round() {
        // Scenario: rates and latencies of several magnitudes. Expected: steps of 1, 2 or 5; words without decimals.
        assert_eq!(
            [92_000.0, 7.0, 1e6, 450.0].map(tick_step),
            [20_000.0, 2.0, 200_000.0, 100.0]
        );
        assert_eq!(
            [0.002, 50.0, 200_000.0, 1e6].map(round_latency),
            ["2 ns", "50 us", "200 ms", "1 s"]
        );
    }
}
