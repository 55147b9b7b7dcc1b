"""Tests of the judges of bench/adversary.py, on made-up runs."""

import dataclasses
import pathlib
import tempfile
import time
import unittest

import adversary
import adversary_cases as cases
from adversary_daemon import Heart, check_backend
from processes import RunFailed


def part(ok=100, p99_ms=1.0, max_ms=2.0, **bad):
    return {"ok": ok, "p50_ms": 0.5, "p99_ms": p99_ms, "max_ms": max_ms, "refused": bad, "failed": {}}


def seen(found=None, counts=None, **more):
    alone = {"reader": part(), "resident_max_mib": 300.0}
    found = {"reader": part(), "newcomer": part(), "livez": part(), "resident_max_mib": 310.0, "before": None, "after": None,
             **(found or {})}
    return cases.Seen(alone, alone, found, counts or {}, more.pop("alive", True), **more)


class Judges(unittest.TestCase):
    def met(self, judge, run):
        return judge(run)[2]

    def test_a_reader_without_an_answer_was_turned_away(self):
        # Scenario: all answered, one refused, neither answered nor refused. Expectation: only the first is met.
        self.assertTrue(self.met(cases.nobody_refused, seen()))
        self.assertFalse(self.met(cases.nobody_refused, seen({"reader": part(RESOURCE_EXHAUSTED=1)})))
        self.assertFalse(self.met(cases.nobody_refused, seen({"reader": part(ok=0)})))
        self.assertFalse(self.met(cases.p99_within(2), seen({"reader": part(ok=0, p99_ms=0.0)})))

    def test_latency_is_compared_with_the_larger_baseline(self):
        # Scenario: 1 ms alone, 3 ms in the control, 5 ms under attack. Expectation: within 2x.
        run = seen({"reader": part(p99_ms=5.0)})
        self.assertFalse(self.met(cases.p99_within(2), run))
        run.control = {"reader": part(p99_ms=3.0)}
        self.assertTrue(self.met(cases.p99_within(2), run))

    def test_bounds_are_inclusive(self):
        # Scenario: figures at their bounds and just beyond. Expectation: met, and not met.
        self.assertTrue(self.met(cases.memory, seen({"resident_max_mib": 512.0})))
        self.assertFalse(self.met(cases.memory, seen({"resident_max_mib": 512.1})))
        self.assertTrue(self.met(cases.within_100_ms("livez"), seen({"livez": part(max_ms=100.0)})))
        self.assertFalse(self.met(cases.within_100_ms("livez"), seen({"livez": part(max_ms=100.1)})))
        self.assertTrue(self.met(cases.idle_cost, seen({"resident_max_mib": 316.0}, {"connections": 1024})))
        self.assertFalse(self.met(cases.idle_cost, seen({"resident_max_mib": 317.0}, {"connections": 1024})))

    def test_a_herd_that_was_not_read_at_all_is_not_met(self):
        # Scenario: one device read, none, a thousand. Expectation: only the first is met.
        for reads, expected in ((1, True), (0, False), (1000, False)):
            self.assertEqual(self.met(cases.one_read_a_shard, seen(counts={"device_reads": [reads]})), expected)

    def test_a_greedy_principal_is_judged_by_each_run_next_to_it(self):
        # Scenario: p99 of 1 ms alone, 4 beside fio, 5 beside the principal, in three runs; then no run beside fio; then a refusal.
        # Expectation: 5x of alone is too much, 1.25x of beside fio is not; nothing to judge; the refusal is seen.
        runs = [{"alone": part(p99_ms=1.0), "beside": part(p99_ms=5.0), "device": part(p99_ms=4.0)} for _ in range(3)]
        run = seen(counts={"runs": runs})
        of_alone, of_device = (cases.paired_p99_within(1.5, of, "") for of in ("alone", "device"))
        self.assertEqual(of_alone(run)[1:], ("5.00x (5.00 to 5.00)", False))
        self.assertEqual(of_device(run)[1:], ("1.25x (1.25 to 1.25)", True))
        self.assertTrue(self.met(cases.nobody_of_runs_refused, run))
        runs[1]["device"] = part(RESOURCE_EXHAUSTED=1)
        self.assertFalse(self.met(cases.nobody_of_runs_refused, run))
        for other in runs:
            del other["device"]
        self.assertIsNone(self.met(of_device, run))

    def test_an_attack_that_did_nothing_is_not_met(self):
        # Scenario: the victim as well as alone; the attacker's counts at each case's minimum, and with one of them below; where
        # there are several attacks, in the last one. Expectation: only the first is met, and that is judged in every case.
        def took_place(case, counts):
            # As the attacker prints them: refusals by code.
            counts = {name: {"SOME": count} if name == "refused" else count for name, count in counts.items()}
            several = {"herd": {"herds": [enough, counts]}, "principals": {"greedy": [enough, counts]}}
            (wanted, _, is_met), *_ = dataclasses.replace(case, judges=[]).judge(seen(counts=several.get(case.runner, counts)))
            self.assertIn("the attack took place", wanted)
            return is_met

        for case in cases.CASES:
            enough = {name: {"SOME": 10**9} if name == "refused" else 10**9 for name in case.least}
            self.assertTrue(took_place(case, case.least), case.name)
            self.assertTrue(case.least and all(case.least.values()), case.name)
            for name, count in case.least.items():
                self.assertFalse(took_place(case, {**case.least, name: count - 1}), (case.name, name))

    def test_a_daemon_that_says_nothing_in_the_shortest_run_is_not_met(self):
        # Scenario: silence in a run of --seconds 1; a beat each second. Expectation: only the second is met.
        shortest = 1 + 2 * adversary.TAIL_SECONDS
        self.assertFalse(self.met(cases.heard_in_time, seen(heart={"beats": 0, "longest_s": shortest})))
        self.assertTrue(self.met(cases.heard_in_time, seen(heart={"beats": 3, "longest_s": 1.01})))

    def test_silence_begins_with_the_last_beat_or_when_the_daemon_is_ready(self):
        # Scenario: a supervisor that has listened for 100 s hears that the daemon is ready, and a beat; another one the beat
        # only; and one nothing. Expectation: silent for less than 50 s; for 100 s; for 100 s.
        def silence(*messages):
            with tempfile.TemporaryDirectory() as directory:
                heart = Heart(pathlib.Path(directory, "notify"))
                heart.close()
            now = time.monotonic()
            heart.last = now - 100
            for message in messages:
                heart.hear(message, now)
            return heart.seen()["longest_s"]

        self.assertLess(silence(b"READY=1\nSTATUS=serving\n", b"WATCHDOG=1"), 50)
        self.assertGreaterEqual(silence(b"WATCHDOG=1"), 100)
        self.assertGreaterEqual(silence(), 100)

    def test_another_backend_is_refused(self):
        # Scenario: status of a daemon on the requested backend, of one with a dataset on another, of one without datasets.
        # Expectation: only the first is measured.
        data, slow = {"name": "data", "backend": "uring"}, {"name": "slow", "backend": "mmap"}
        check_backend([data], "uring")
        for datasets in ([data, slow], []):
            with self.assertRaises(RunFailed):
                check_backend(datasets, "uring")

    def test_every_case_has_judges_and_a_name_of_its_own(self):
        # Scenario: the table. Expectation: names differ, each case is judged.
        names = [case.name for case in cases.CASES]
        self.assertEqual(len(names), len(set(names)))
        self.assertTrue(all(case.judges for case in cases.CASES))


if __name__ == "__main__":
    unittest.main()
