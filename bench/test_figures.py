"""The figures in the documents against the committed runs: python3 -m unittest discover bench"""

import contextlib
import copy
import io
import json
import pathlib
import re
import sys
import tempfile
import unittest
import unittest.mock

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

    def test_a_row_without_a_result_is_named(self):
        # Scenario: each row in turn not judged, with its figures, and without figures, as compare.py writes them. Expectation:
        # every part that shows the row says so; the comparison, the misses and the output of the command name each.
        for name, original in RESULTS["rows"].items():
            for verdict, sides in (("not judged", {}), ("no figures", {"subject": {"runs": []}, "peer": {**original["peer"], "runs": []}})):
                row = {**original, **sides, "verdict": verdict, "problem": "the\nreason", "targets": []}
                later = {**RESULTS, "rows": {**RESULTS["rows"], name: row}}
                told = f"`{name}`, {verdict}: the reason"
                for part_name in figures.PARTS:
                    before, shown = (figures.filled(part(part_name), results) for results in (RESULTS, later))
                    if part_name in ("comparison", "misses"):
                        self.assertIn(f"Without a result: {told}.", shown, part_name)
                    elif shown != before:
                        self.assertIn(f"**{verdict}**", shown, part_name)
                self.assertEqual(figures.unjudged(later["rows"]), [told])
        for row, part_name in (("grpc-64", "comparison"), ("grpc-64", "cpu"), ("engine-64", "depth"), ("memory", "memory"),
                               ("scores-1", "scores"), ("token-1", "access"), ("tls-1", "tls")):
            later = copy.deepcopy(RESULTS)
            later["rows"][row].update(verdict="not judged", problem="the reason", targets=[])
            self.assertIn("**not judged**", figures.filled(part(part_name), later), part_name)

    def test_the_command_names_the_rows_without_a_result(self):
        # Scenario: the committed run, with a row that was not judged; no documents, and stale ones. Expectation: a
        # line names the row, also where the documents are stale.
        later = copy.deepcopy(RESULTS)
        later["rows"]["grpc-64"].update(verdict="not judged", problem="the reason", targets=[])
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "results.json"
            path.write_text(json.dumps(later))
            for documents, is_stale in (([], False), (figures.documents(), True)):
                output = io.StringIO()
                with (contextlib.redirect_stdout(output), unittest.mock.patch.object(figures, "RESULTS", path),
                      unittest.mock.patch.object(figures, "documents", lambda documents=documents: documents),
                      unittest.mock.patch.object(sys, "argv", ["figures.py", "--check"]),
                      self.assertRaises(SystemExit) if is_stale else contextlib.nullcontext()):
                    figures.main()
                self.assertIn("figures: without a result: `grpc-64`, not judged: the reason\n", output.getvalue())

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
