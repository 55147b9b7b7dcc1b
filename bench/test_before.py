"""Conclusions about this build and an older one, without running either: python3 -m unittest discover bench"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import before
import cache
import instructions
import rows
from ringfetch import RINGFETCHD
from verdict import Result

FACTS = {"date": "2000-01-01", "commit": "0", "cpus": 2, "cpu": "c", "memory_gib": 1, "kernel": "k", "file_system": "f",
         "file_gib": 1, "block_device": {}, "load_at_start": 0, "tools": {}}
SUMMARY = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.12    0.120000           3     40000           io_uring_enter
 39.88    0.079600           7     10000      2500 recvfrom
------ ----------- ----------- --------- --------- ----------------
100.00    0.199600           4     50000      2500 total
"""


def runs(*reads_and_cpu):
    """Runs of one side, each with these reads/s and CPU us per read."""
    fixed = {"p50_us": 1.0, "p99_us": 2.0, "resident_mib": 100.0, "cached_at_end": 0.0, "others_cpu": 0.0, "stolen_cpu": 0.0}
    return [{"reads_per_second": reads, "cpu_us": cpu, **fixed} for reads, cpu in reads_and_cpu]


def result(now, problem=None):
    """Pairs whose older side read 100/s at 10 us a read each time."""
    temperature = cache.Temperature("cold, for a test", lambda path: 0.0, 0.0, 0.15)
    row = rows.Row("a row", "file", temperature, None, None, "before", [])
    return Result("r", row, runs(*now), runs(*[(100.0, 10.0)] * len(now)), problem)


class Rows(unittest.TestCase):
    def test_every_row_that_starts_our_daemon_is_there_with_the_older_one_as_peer(self):
        # Scenario: all rows. Expected: rows without a daemon of ours are left out; in each, the older binary gets what the
        # subject gets, and the row itself is unchanged.
        every = rows.every(pathlib.Path("f"), pathlib.Path("w"), 1, 1 << 30, 1 << 30)
        older = before.rows_of(every, "older")
        without = {"engine-64", "engine-256", "engine-1"}
        self.assertEqual(set(older), set(every) - without)
        for name, row in older.items():
            ours, theirs = row.subject, row.peer
            self.assertEqual((ours.server.binary, theirs.server.binary), (RINGFETCHD, "older"), name)
            self.assertEqual((ours.server.engine, ours.server.path), (theirs.server.engine, theirs.server.path))
            self.assertIs(ours.driver, theirs.driver)
            self.assertEqual(row.targets, [])
            self.assertIs(every[name].subject.server.binary, RINGFETCHD)
        self.assertNotIn(("nginx", "nginx-light"), rows.needs(older.values()))


class Verdicts(unittest.TestCase):
    def test_chance_is_ruled_out_by_the_number_of_pairs_that_agree(self):
        # Scenario: numbers of pairs. Expected: 8 of 9, 9 of 11, all of 6; of 5 not even all are enough.
        self.assertEqual([before.pairs_below_needed(pairs) for pairs in (9, 11, 6, 5)], [8, 10, 6, 6])

    def test_fewer_reads_are_worse_only_beyond_the_spread(self):
        # Scenario: 1 to 2 % fewer reads in eight pairs of nine; in seven of nine; 1 % more in all. Expected: worse; not
        # worse; not worse. The median and the spread are reported.
        eight = result([(98.0, 10.0)] * 4 + [(99.0, 10.0)] * 4 + [(104.0, 10.0)])
        self.assertEqual(before.verdict(eight), (["fewer reads/s beyond the spread"], []))
        self.assertEqual(str(before.change(eight, "reads_per_second")), "0.990x (0.98-1.04)")
        self.assertEqual(before.in_words(result([(98.0, 10.0)] * 7 + [(104.0, 10.0)] * 2)), "not worse")
        self.assertEqual(before.in_words(result([(101.0, 10.0)] * 9)), "not worse")

    def test_more_cpu_is_worse_above_two_percent(self):
        # Scenario: 1.9 % more CPU in all pairs; 3 % more in all; a median of 3 % more with three of nine pairs below.
        # Expected: not worse; worse; above the bound, and said to be within the spread.
        self.assertEqual(before.in_words(result([(100.0, 10.19)] * 9)), "not worse")
        self.assertEqual(before.verdict(result([(100.0, 10.3)] * 9)), (["CPU above 1.02x"], []))
        worse, unclear = before.verdict(result([(100.0, 10.3)] * 6 + [(100.0, 9.0)] * 3))
        self.assertEqual((worse, unclear), ([], ["CPU above 1.02x, within the spread: take more pairs"]))

    def test_too_few_pairs_tell_nothing(self):
        # Scenario: half the reads in five pairs of five, which chance alone gives once in 32 times. Expected: not judged.
        self.assertEqual(before.in_words(result([(50.0, 20.0)] * 5)), "**not judged**: too few pairs to tell")
        self.assertEqual(before.rule(5), "So few pairs (5) tell nothing.")

    def test_a_busy_machine_is_not_judged(self):
        # Scenario: half the reads in every pair; others used 5 % of the CPUs before the runs, and 50 % before most of them; the
        # hypervisor took 4 % during the runs, and 9 % during most. Expected: worse; then no verdict, with the reason.
        for key, part, words in (("others_cpu", 0.05, "**fewer reads/s beyond the spread**"),
                                 ("others_cpu", 0.5, "**not judged**: others used 50% of the CPUs"),
                                 ("stolen_cpu", 0.04, "**fewer reads/s beyond the spread**"),
                                 ("stolen_cpu", 0.09, "**not judged**: the hypervisor took 9% of the CPUs")):
            row = result([(50.0, 10.0)] * 9)
            for run in [*row.subject, *row.peer][3:]:
                run[key] = part
            self.assertEqual(before.in_words(row), words)

    def test_a_row_without_figures_is_not_judged(self):
        # Scenario: a row that failed, and one whose file became warm. Expected: both are reported, neither is called worse.
        failed = result([], "it broke")
        warm = result([(50.0, 20.0)] * 9, "20 % cached")
        self.assertEqual([before.in_words(row) for row in (failed, warm)],
                         ["**no figures**", "**not judged**: 20 % cached"])
        self.assertEqual([before.verdict(row) for row in (failed, warm)], [([], [])] * 2)

    def test_only_rows_that_were_judged_and_are_not_worse_are_fine(self):
        # Scenario: beside a row of nine equal pairs nothing; a worse row; one with few pairs; one of a busy machine; one without
        # runs; one with more CPU within the spread. Expected: the first and the last are fine.
        equal, worse = [(100.0, 10.0)] * 9, [(50.0, 10.0)] * 9
        self.assertTrue(before.is_fine([result(equal)]))
        for other in (result(worse), result(equal[:5]), result(equal[:1]), result(equal, "busy"), result([])):
            self.assertFalse(before.is_fine([result(equal), other]), before.in_words(other))
        self.assertTrue(before.is_fine([result(equal), result([(100.0, 10.3)] * 6 + [(100.0, 9.0)] * 3)]))


class Told(unittest.TestCase):
    def test_table_and_data_have_every_row_and_its_calls(self):
        # Scenario: a row that is worse, with counted system calls, and one without figures. Expected: before / now,
        # ratios of now / before, the verdicts; the data can be written and has every run.
        bad = result([(90.0, 10.0)] * 9)
        calls = {"r": {"before": {"io_uring_enter": 0.25, "recvfrom": 0.25}, "now": {"io_uring_enter": 0.75}}}
        told = (FACTS, [bad, result([], "it broke")], calls, {"before": "an old one", "now": "a new one"},
                {"pairs": 9, "seconds": 5}, "command")
        text = before.markdown(*told)
        self.assertIn("| 100 / 90 | 0.900x (0.90-0.90) | 10.00 / 10.00 | 1.000x (1.00-1.00) |", text)
        self.assertIn("| 0.500 / 0.750 | **fewer reads/s beyond the spread** |", text)
        self.assertIn("at least 8 of the 9 pairs", text)
        self.assertIn("- **r**: it broke", text)
        row = json.loads(json.dumps(before.data(*told)))["rows"]["r"]
        self.assertEqual(row["problem"], "it broke")

    def test_calls_are_read_from_straces_summary(self):
        # Scenario: a summary with and without errors in a line. Expected: the calls by name, without the total.
        self.assertEqual(before.calls_of(SUMMARY), {"io_uring_enter": 40000, "recvfrom": 10000})


class Instructions(unittest.TestCase):
    def test_pieces_are_held_against_those_of_the_same_name(self):
        # Scenario: a piece that grew, a new one, a removed one. Expected: percent for the first only.
        self.assertEqual(instructions.line("a", 1000.0, 1030.0), "| a | 1,030 | 1,000 | +3.0 % |")
        self.assertEqual(instructions.line("b", None, 10.0), "| b | 10 | - | - |")
        self.assertEqual(instructions.line("c", 10.0, None), "| c | - | 10 | - |")

    def test_other_inlining_of_a_small_piece_is_not_above_the_limit(self):
        # Scenario: the growth of envelope-64 between two builds of the same source; growth above that; growth of a large
        # piece within and above the limit. Expected: only the second and the fourth fail.
        self.assertFalse(instructions.is_above(448.6, 512.8, 3))
        self.assertTrue(instructions.is_above(448.6, 519.0, 3))
        self.assertFalse(instructions.is_above(10_000.0, 10_299.0, 3))
        self.assertTrue(instructions.is_above(10_000.0, 10_301.0, 3))

    def test_a_limit_fails_for_what_grew_and_for_what_is_compared_with_nothing(self):
        # Scenario: the same pieces, one of them smaller; one that grew; a new one; a removed one; none at all. Expected: the
        # first alone passes; each other one names its piece.
        before = {"a": 1000.0, "b": 1000.0}
        self.assertEqual(instructions.failures(before, {"a": 1000.0, "b": 10.0}, 3), [])
        self.assertEqual(instructions.failures(before, {"a": 1000.0, "b": 1200.0}, 3), ["b: +20.0 %"])
        self.assertEqual(instructions.failures(before, before | {"c": 1.0}, 3), ["c: no count before"])
        self.assertEqual(instructions.failures(before, {"a": 1000.0}, 3), ["b: no longer counted"])
        self.assertEqual(instructions.failures({}, {}, 3), ["no piece was counted"])


if __name__ == "__main__":
    unittest.main()
