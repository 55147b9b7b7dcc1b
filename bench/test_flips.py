"""Conclusions of the flips report, without running anything: python3 -m unittest discover bench"""

import copy
import pathlib
import sys
import unittest
import xml.dom.minidom

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import flips
import flips_report

FACTS = {"date": "2000-01-01", "commit": "0", "cpus": 2, "kernel": "k", "file_system": "f", "command": "c", "build": "release"}
SEEN = {"anonymous_mib": 100.0, "resident_mib": 300.0, "descriptors": 20, "threads": 9}
RESULT = {
    "asked": 6,
    "flips": [{"at": 0.5 + number, "backend": backend, "seconds": 0.01} for number, backend in enumerate(flips.ROUND)],
    "samples": [{"at": 0.1 * number, "reads": 100 * number, **SEEN} for number in range(60)],
    "before": SEEN, "after": SEEN, "looking_seconds": 0.008,
    "load": {"errors": 0, "reads": 5900, "wrong_bytes": 0, "reads_per_second": 1000.0, "latency_us": {"p99": 5000.0}},
    "reads_by_backend": {"uring": 2000, "mmap": 2000, "auto": 1900}, "daemon_errors": 0,
}


class Conclusions(unittest.TestCase):
    def test_a_good_run_holds_and_is_told(self):
        # Every condition met: held; the words, the numbers and a plot that is valid XML.
        report = flips_report.Report(RESULT, FACTS)
        self.assertTrue(report.held())
        self.assertIn("Every condition holds.", report.markdown())
        self.assertEqual(report.data()["flip_ms"]["max"], 10.0)
        xml.dom.minidom.parseString(report.plot())

    def test_each_condition_can_fail(self):
        # One thing wrong at a time: not held, and exactly that condition is named.
        def leak(result):
            for sample in result["samples"][30:]:
                sample["anonymous_mib"] += 10

        breaks = {
            "flips made": lambda result: result["flips"].pop(),
            "failed reads, as clients saw": lambda result: result["load"].update(errors=1),
            "failed reads, as the daemon counted": lambda result: result.update(daemon_errors=1),
            "wrong bytes (every byte checked)": lambda result: result["load"].update(wrong_bytes=1),
            "engines that served": lambda result: result["reads_by_backend"].update(auto=0),
            "descriptors before and after": lambda result: result["after"].update(descriptors=21),
            "threads before and after": lambda result: result["after"].update(threads=10),
            "anonymous memory, first and last quarter": leak,
        }
        for what, spoil in breaks.items():
            result = copy.deepcopy(RESULT)
            result["after"] = dict(SEEN)
            spoil(result)
            report = flips_report.Report(result, FACTS)
            failed = [name for name, _, holds in report.conditions() if not holds]
            self.assertEqual(failed, [what])
            self.assertIn("does not hold", report.markdown())

    def test_a_round_has_every_pair_once(self):
        # A round contains each ordered pair of the three engines once.
        pairs = set(zip(flips.ROUND, [*flips.ROUND[1:], flips.ROUND[0]], strict=True))
        self.assertEqual(len(pairs), 6)
        self.assertTrue(all(before != after for before, after in pairs))


if __name__ == "__main__":
    unittest.main()
