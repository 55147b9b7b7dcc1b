//! Prometheus' text format, as far as the tests need it: series with their labels, summed.

#[derive(Debug)]
pub(crate) struct Scrape {
    pub(crate) text: String,
}

impl Scrape {
    /// The sum over a metric's series with all of these labels; 0 if there are none.
    pub(crate) fn sum(&self, metric: &str, labels: &[(&str, &str)]) -> u64 {
        self.series(metric, labels)
            .map(|(_, value)| value.parse::<u64>().expect("a whole number"))
            .sum()
    }

    /// A metric's series with all of these labels: (text of the labels, value).
    pub(crate) fn series<'a>(
        &'a self,
        metric: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = (&'a str, &'a str)> + 'a {
        self.text.lines().filter_map(move |line| {
            let rest = line.strip_prefix(metric)?;
            let (series, value) = rest.rsplit_once(' ')?;
            if !series.is_empty() && !series.starts_with('{') {
                return None;
            }
            let has = |(name, value): &(&str, &str)| series.contains(&format!("{name}=\"{value}\""));
            labels.iter().all(has).then_some(())?;
            Some((series, value))
        })
    }
}

#[test]
fn series_are_summed_by_their_labels() {
    // Scenario: a metric with labels, one whose name begins with its name, one without labels. Expectation:
    // only the requested series.
    let text = "# HELP a x\na{k=\"1\",r=\"ok\"} 3\na{k=\"2\",r=\"ok\"} 4\na{k=\"2\",r=\"bad\"} 1\na_total 9\nb 2.5\nd 2\n";
    let scrape = Scrape {
        text: text.to_owned(),
    };
    assert_eq!(scrape.sum("a", &[]), 8);
    assert_eq!(scrape.sum("a", &[("r", "ok")]), 7);
    assert_eq!(scrape.sum("a", &[("r", "ok"), ("k", "2")]), 4);
    assert!(scrape.series("b", &[]).eq([("", "2.5")]));
    assert_eq!(scrape.sum("c", &[]), 0);
    assert_eq!(scrape.sum("d", &[]), 2);
}
