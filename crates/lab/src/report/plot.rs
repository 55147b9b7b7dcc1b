//! Plots, through plotters and its SVG backend; no other module uses it.

use super::Plot;
use crate::error::LabError;
use plotters::coord::Shift;
use plotters::prelude::*;
use ringfetch_command::quantity::{exact_size, three_digits};
use std::error::Error;

const SIZE: (u32, u32) = (1040, 520);
/// The legend is to the right of it.
const CHART_WIDTH: u32 = 890;
const LEGEND_LINE: i32 = 20;
/// Labels of the horizontal axis, and steps of the vertical one.
const LABELS_MAX: f64 = 20.0;
const STEPS_MAX: f64 = 6.0;
/// Okabe and Ito's colours, which differ for colour-blind readers too, and six more.
const COLOURS: [RGBColor; 14] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(150, 140, 20),
    RGBColor(110, 60, 150),
    RGBColor(120, 120, 120),
    RGBColor(140, 80, 40),
    RGBColor(60, 130, 60),
    RGBColor(160, 0, 60),
    RGBColor(130, 160, 200),
];

/// A plot as an SVG element.
pub(crate) fn svg(plot: &Plot) -> Result<String, LabError> {
    let mut out = String::new();
    let area = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
    let drawn = draw(plot, &area).and_then(|()| Ok(area.present()?));
    drop(area);
    drawn.map_err(|error| LabError::at("plot", error)).map(|()| out)
}

fn draw(plot: &Plot, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), Box<dyn Error>> {
    let points = || plot.series.iter().flat_map(|(_, points)| points);
    let (left, right) = range(points().map(|point| point[0]));
    let (low, high) = range(points().flat_map(|point| [point[2], point[3]]));
    area.fill(&WHITE)?;
    let (chart_area, legend) = area.split_horizontally(CHART_WIDTH);
    let mut chart = ChartBuilder::on(&chart_area)
        .caption(&plot.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(84)
        .build_cartesian_2d(
            (left..right)
                .log_scale()
                .with_key_points(measured(points(), left, right)),
            (low..high).log_scale().with_key_points(round(low, high)),
        )?;
    chart
        .configure_mesh()
        .x_desc(&plot.x)
        .y_desc(&plot.y)
        .x_label_formatter(&|value| match plot.x.contains("bytes") {
            true => bytes(*value),
            false => short(*value),
        })
        .y_label_formatter(&|value| short(*value))
        .bold_line_style(RGBColor(225, 225, 225))
        .draw()?;
    let mut y = 48;
    for ((name, points), colour) in plot.series.iter().zip(COLOURS.iter().cycle()) {
        let line = points.iter().map(|point| (point[0], point[1]));
        chart.draw_series(LineSeries::new(line, colour.stroke_width(2)).point_size(3))?;
        let bar = |p: &[f64; 4]| PathElement::new([(p[0], p[2]), (p[0], p[3])], colour.stroke_width(1));
        chart.draw_series(points.iter().map(bar))?;
        let sample = PathElement::new([(0, y), (18, y)], colour.stroke_width(3));
        legend.draw(&sample)?;
        let label = Text::new(name.as_str(), (24, y - 6), ("sans-serif", 13));
        legend.draw(&label)?;
        y += LEGEND_LINE;
    }
    Ok(())
}

/// From the smallest to the largest positive value, with some room; never empty.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .filter(|value| value.is_finite() && *value > 0.0)
        .fold((f64::MAX, 0.0_f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    if high <= 0.0 {
        return (1.0, 10.0);
    }
    (low / 1.15, high * 1.15)
}

/// The positions to label on the horizontal axis: those of the points, but at most [`LABELS_MAX`] of them.
fn measured<'a>(points: impl Iterator<Item = &'a [f64; 4]>, left: f64, right: f64) -> Vec<f64> {
    let mut all: Vec<f64> = points.map(|point| point[0]).collect();
    all.sort_by(f64::total_cmp);
    let apart = (right / left).powf(1.0 / LABELS_MAX);
    let mut kept: Vec<f64> = Vec::new();
    for x in all {
        if kept.last().is_none_or(|last| x > last * apart) {
            kept.push(x);
        }
    }
    kept
}

/// Round numbers to label on the vertical axis: 1, 2 and 5 of each power of ten, or, where less than a power of ten is
/// shown, in equal steps. (Those of plotters begin at a power of ten.)
fn round(low: f64, high: f64) -> Vec<f64> {
    let power = |value: f64| 10.0_f64.powf(value.log10().floor());
    if high / low >= 10.0 {
        let powers = std::iter::successors(Some(power(low)), |power| Some(power * 10.0));
        let steps = powers.flat_map(|power| [power, 2.0 * power, 5.0 * power]);
        return steps
            .skip_while(|at| *at < low)
            .take_while(|at| *at <= high)
            .collect();
    }
    let least = (high - low) / STEPS_MAX;
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power(least));
    let step = steps.into_iter().find(|step| *step >= least).unwrap_or(least);
    let from = (low / step).ceil();
    let numbers = std::iter::successors(Some(from), |number| Some(number + 1.0));
    numbers
        .map(|number| number * step)
        .take_while(|at| *at <= high)
        .collect()
}

/// `4KiB`.
fn bytes(value: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a label of an axis of positive numbers"
    )]
    let whole = value.round() as u64;
    exact_size(whole)
}

/// Three digits: `1`, `250k`, `12.5k`, `1.5M`.
fn short(value: f64) -> String {
    let (value, unit) = match value {
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e3 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let shown = three_digits(value);
    let shown = match shown.contains('.') {
        true => shown.trim_end_matches('0').trim_end_matches('.'),
        false => shown.as_str(),
    };
    format!("{shown}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_its_names_and_survives_odd_points() {
        // Scenario: two series; then none, one point, a zero. Expected: names and labels as text; no error.
        let plot = |series| Plot {
            name: String::new(),
            title: "reads & <depth>".to_owned(),
            x: "depth".to_owned(),
            y: "reads/s".to_owned(),
            series,
        };
        let points = vec![[1.0, 1e3, 900.0, 1100.0], [64.0, 5e4, 4e4, 6e4]];
        let both = ["uring", "aio"].map(|name| (name.to_owned(), points.clone()));
        let text = svg(&plot(both.to_vec())).unwrap();
        assert!(text.contains("uring") && text.contains("aio") && text.contains("reads/s"));
        assert!(text.contains("reads &amp; &lt;depth&gt;"));
        for odd in [vec![], vec![[1.0, 0.0, 0.0, 0.0]], vec![[8.0, 5.0, 5.0, 5.0]]] {
            svg(&plot(vec![("x".to_owned(), odd)])).unwrap();
        }
        svg(&plot(Vec::new())).unwrap();
    }

    #[test]
    fn every_strategy_of_a_plot_has_its_own_colour() {
        // Scenario: all strategies in one plot. Expected: enough colours.
        assert!(COLOURS.len() >= crate::strategies::ALL.len());
    }

    #[test]
    fn axes_are_labelled_shortly() {
        // Scenario: values of every size. Expected: at most three digits.
        let shown = [0.5, 1.0, 250.0, 1500.0, 12_500.0, 250_000.0, 1.5e6, 2e9].map(short);
        assert_eq!(shown, ["0.5", "1", "250", "1.5k", "12.5k", "250k", "1.5M", "2G"]);
    }

    #[test]
    fn every_axis_has_labels_in_all_of_its_length() {
        // Scenario: figures between two powers of ten; over more than a decade, from below a power of ten; many depths.
        // Expected: round numbers in all of the range; the depths that were measured, as far as there is room.
        let labels = |points: &[[f64; 4]]| {
            let plot = Plot {
                name: String::new(),
                title: "title".to_owned(),
                x: "depth".to_owned(),
                y: "reads/s".to_owned(),
                series: vec![("uring".to_owned(), points.to_vec())],
            };
            let text = svg(&plot).unwrap();
            let words = text.lines().filter(|line| !line.starts_with('<'));
            let mut labels: Vec<String> = words.map(str::to_owned).collect();
            labels.retain(|word| word.starts_with(|first: char| first.is_ascii_digit()));
            labels.sort();
            labels
        };
        let narrow = labels(&[[4.0, 14e3, 14e3, 14e3], [8.0, 33e3, 33e3, 33e3]]);
        assert_eq!(narrow, ["15k", "20k", "25k", "30k", "35k", "4", "8"]);
        let wide = labels(&[[1.0, 2e3, 2e3, 2e3], [3.0, 42e3, 42e3, 42e3]]);
        assert_eq!(wide, ["1", "10k", "20k", "2k", "3", "5k"]);
        let many: Vec<[f64; 4]> = (1..=512).map(|depth| [f64::from(depth), 1e3, 1e3, 1e3]).collect();
        let depths = labels(&many).len();
        assert!((10..30).contains(&depths), "{depths}");
    }
}
