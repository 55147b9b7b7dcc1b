"""The figures in the documents against the committed runs: python3 -m unittest discover bench"""

import copy
import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import figures

RESULTS = json.loads(figures.RESULTS.read_text())


def part(name, text="old\n"):
    return f"<!-- figures: {name} -->\n{text}<!-- /figures -->"


class Figures(unittest.TestCase):
    def test_every_document_quotes_the_committed_run(self):
        # Scenario: README.md and docs/*.md. Expectation: regenerating them changes nothing, and README has the comparison.
        for path in figures.documents():
            text = path.read_text()
            self.assertEqual(figures.filled(text, RESULTS), text, f"{path.name} is stale: run bench/figures.py")
        self.assertIn("<!-- figures: comparison -->", (figures.ROOT / "README.md").read_text())

    def test_every_marker_is_one_that_is_found(self):
        # Scenario: the markers, where a typing error would go unnoticed above. Expectation: each begins a part.
        for path in figures.documents():
            text = path.read_text()
            self.assertEqual(text.count("<!-- figures:"), len(figures.PART.findall(text)), path.name)

    def test_a_changed_run_makes_a_document_stale(self):
        # Scenario: every part, and a run in which each figure is twice as large. Expectation: the part's text changes.
        for name in figures.PARTS:
            later = copy.deepcopy(RESULTS)
            for row in later["rows"].values():
                for run in (*row["subject"]["runs"], *row["peer"]["runs"]):
                    run.update({key: value * 2 for key, value in run.items() if isinstance(value, (int, float))})
                for target in row["targets"]:
                    target["measured"] *= 2
            now = figures.filled(part(name), RESULTS)
            self.assertNotEqual(now, part(name))
            self.assertNotEqual(figures.filled(now, later), now, name)

    def test_an_unknown_part_is_an_error(self):
        with self.assertRaises(KeyError):
            figures.filled(part("no-such-part"), RESULTS)

    def test_the_comparison_shows_every_miss(self):
        # Scenario: a run in which a row that is not a highlight misses. Expectation: the row is shown, as missed.
        later = copy.deepcopy(RESULTS)
        before = figures.filled(part("comparison"), RESULTS)
        row = next(row for row in later["rows"].values() if row["targets"] and row["title"] not in before)
        row["targets"][0]["met"], title = False, row["title"]
        shown = figures.filled(part("comparison"), later)
        self.assertTrue(any(title in line and "**missed**" in line for line in shown.splitlines()), shown)

    def test_the_worst_pair_is_not_called_a_median(self):
        # Scenario: a goal for every pair, for which the worst is measured, missed. Expectation: the parts that show it say so.
        later = copy.deepcopy(RESULTS)
        target = next(target for row in later["rows"].values() for target in row["targets"] if target["in_every_pair"])
        target["met"] = False
        for name in ("comparison", "misses"):
            shown = figures.filled(part(name), later)
            self.assertIn(f"{target['relation']} {target['bound']:g}x in every pair", shown, name)

    def test_every_miss_is_explained_and_nothing_else(self):
        # Scenario: docs/BENCHMARKING.md, Misses. Expectation: an item `- **ROW**` for each missed row, and for no other.
        text = (figures.ROOT / "docs/BENCHMARKING.md").read_text()
        section = text.split("\n## Misses\n")[1].split("\n## ")[0]
        explained = re.findall(r"^- \*\*([a-z0-9-]+)\*\*", section, re.MULTILINE)
        self.assertEqual(explained, figures.missed(RESULTS["rows"]))


if __name__ == "__main__":
    unittest.main()
