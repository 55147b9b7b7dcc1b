"""Conclusions from runs, without running anything: python3 -m unittest discover bench"""

import hashlib
import json
import os
import pathlib
import sys
import tempfile
import unittest
import unittest.mock
import xml.dom.minidom

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import cache
import compare
import peers
import plots
import ringfetch
import rows
import table
from processes import RunFailed, until
from verdict import Result, Target, in_words

FACTS = {"date": "2000-01-01", "commit": "0", "cpus": 2, "cpu": "c", "memory_gib": 1, "kernel": "k", "congestion_control": "c",
         "file_system": "f", "file_gib": 1, "block_device": {}, "load_at_start": 0, "tools": {"fio": "fio-3"}}


class Side:
    """A side that returns the given figures in turn, or raises the given exception."""

    def __init__(self, *runs, log=None):
        self.runs, self.log = list(runs), log

    def describe(self):
        return "a side"

    def measure(self, seconds):
        if self.log is not None:
            self.log.append((self, seconds))
        run = self.runs.pop(0)
        if isinstance(run, Exception):
            raise run
        return {"cpu_us": 1.0, "p50_us": 1.0, "p99_us": 1.0, **run}


def reads(*values):
    return [{"reads_per_second": value} for value in values]


def row_of(subject, peer, *targets, **more):
    temperature = cache.Temperature("cold, for a test", lambda path: 0.0, 0.0, 0.15)
    return rows.Row("a row", "file", temperature, subject, peer, "a peer", list(targets), **more)


class Verdicts(unittest.TestCase):
    def test_the_median_of_the_pairs_ratios_decides(self):
        # Scenario: ratios 0.5, 1.0, 1.1 of pairs on a machine that drifts. Expected: 1.0, with the spread reported.
        result = Result("r", row_of(None, None, Target("reads_per_second", ">=", ratio=0.98)),
                        reads(50, 100, 330), reads(100, 100, 300))
        judgement = result.judgements()[0]
        self.assertEqual((judgement["measured"], judgement["met"]), (1.0, True))
        self.assertEqual(in_words(judgement), "reads/s 1.00x (0.50-1.10), target >= 0.98x: met")
        self.assertEqual(result.verdict(), "met")

    def test_one_missed_target_misses_the_row(self):
        # Scenario: enough reads, too much CPU. Expected: the row is not met, and its table says so plainly.
        run = {"reads_per_second": 100.0, "cpu_us": 8.0}
        peer = {"reads_per_second": 100.0, "cpu_us": 8.0}
        row = row_of(None, None, Target("reads_per_second", ">=", ratio=0.9), Target("cpu_us", "<=", ratio=0.75))
        result = Result("r", row, [run], [peer])
        self.assertEqual(result.verdict(), "NOT met")
        self.assertIn("**NOT met**", in_words(result.judgements()[1]))

    def test_of_two_bounds_either_will_do(self):
        # Scenario: at most 8 us or 1.6 times the peer's. Expected: 7 us at 2x is met, 9 us at 2x is not, 9 at 1.5x is.
        target = Target("cpu_us", "<=", ratio=1.6, value=8.0)
        for ours, theirs, met in ((7, 3.5, True), (9, 4.5, False), (9, 6, True)):
            result = Result("r", row_of(None, None, target), [{"cpu_us": ours}], [{"cpu_us": theirs}])
            self.assertEqual(result.judgements()[0]["met"], met, (ours, theirs))

    def test_where_every_pair_counts_the_worst_decides(self):
        # Scenario: two pairs meet both bounds and one misses them. Expected: missed, by the worst pair, and reported as such.
        ratio = Target("p99_us", "<=", ratio=0.1, in_every_pair=True)
        own = Target("p99_of_p50", "<=", value=5.0, in_every_pair=True)
        ours = [{"p99_us": 10, "p99_of_p50": 2.0}, {"p99_us": 20, "p99_of_p50": 6.0}, {"p99_us": 10, "p99_of_p50": 2.0}]
        result = Result("r", row_of(None, None, ratio, own), ours, [{"p99_us": 150}] * 3)
        told = [in_words(judgement) for judgement in result.judgements()]
        self.assertEqual(told, ["p99 us 0.13x (0.07-0.13), target <= 0.1x in every pair: **NOT met**",
                                "p99 / p50 6.00, target <= 5 in every pair: **NOT met**"])

    def test_a_run_that_turned_warm_is_not_judged(self):
        # Scenario: 20 % cached at the end of a buffered cold run, 1 % of a warm one. Expected: both are refused.
        self.assertIn("20.0%", cache.COLD_BUFFERED.judge(0.20))
        self.assertIsNone(cache.COLD_BUFFERED.judge(0.10))
        self.assertIn("1.0%", cache.WARM.judge(0.01))
        result = Result("r", row_of(None, None, Target("cpu_us", "<=", ratio=1)), [{"cpu_us": 1}], [{"cpu_us": 2}], "warm")
        self.assertEqual((result.verdict(), result.judgements()), ("not judged", []))


class Warm(unittest.TestCase):
    def test_a_warm_file_stays_where_it_is(self):
        # Scenario: evicting a locked copy; then removing it. Expected: it stays whole; the copy is gone.
        with tempfile.TemporaryDirectory() as directory:
            source = pathlib.Path(directory) / "source"
            source.write_bytes(bytes(8 << 20))
            warm = cache.WarmFile(source, 4 << 20)
            warm.make()
            warm.lock()
            with open(warm.path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.assertEqual(cache.resident_fraction(warm.path), 1.0)
            warm.remove()
            self.assertFalse(warm.path.exists())


    def test_a_file_is_read_once_without_being_cached(self):
        # Scenario: a file of several reads and a partial page, on a disk. Expected: all of it was read; none of it is cached.
        with tempfile.TemporaryDirectory(dir=pathlib.Path(__file__).parent) as directory:
            path = pathlib.Path(directory) / "file"
            size = 2 * cache.READ_ONCE_BYTES + 4097
            with open(path, "wb") as file:
                file.write(bytes(size))
                file.flush()
                # Not sync(): it waits for what every other program has written.
                os.fsync(file.fileno())
                # Again, since the kernel keeps what somebody uses at that moment.
                until(lambda: os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED) or cache.resident_fraction(path) == 0.0,
                      "it is evicted")
            self.assertEqual(cache.read_once(path), size)
            self.assertEqual(cache.resident_fraction(path), 0.0)


class Runs(unittest.TestCase):
    def setUp(self):
        # Verdicts depend on how busy the machine is.
        quiet = unittest.mock.patch.object(compare.machine.Cpus, "shares", lambda cpus: (0.0, 0.0))
        quiet.start()
        self.addCleanup(quiet.stop)
        real = cache.resident_fraction
        cache.resident_fraction = lambda path: 0.0
        self.addCleanup(setattr, cache, "resident_fraction", real)
        self.addCleanup(setattr, compare, "QUIET_SECONDS", compare.QUIET_SECONDS)
        compare.QUIET_SECONDS = 0

    def test_pairs_alternate_and_are_no_longer_than_the_row_allows(self):
        # Scenario: 3 pairs of 5 s of a row that may take 3 s. Expected: A B, B A, A B, 3 s each.
        log = []
        ours, theirs = Side(*reads(1, 2, 3), log=log), Side(*reads(1, 2, 3), log=log)
        result = compare.measure_row("r", row_of(ours, theirs, seconds_max=3), 3, 5, "")
        self.assertEqual(log, [(side, 3) for side in (ours, theirs, theirs, ours, ours, theirs)])
        self.assertEqual(result.ratios("reads_per_second"), [1, 1, 1])

    def test_a_failure_ends_its_row_only_and_is_told(self):
        # Scenario: the second run of a side fails. Expected: no figures, the reason without directories, plots still drawn.
        failed = compare.measure_row("bad", row_of(Side(*reads(1), RunFailed("no /some/where/x.bin")), Side(*reads(1, 1))), 2, 1, "")
        good = compare.measure_row("good", row_of(Side(*reads(90)), Side(*reads(100)),
                                                  Target("reads_per_second", ">=", ratio=0.85)), 1, 1, "")
        asked = {"pairs": 1, "seconds": 1}
        text = table.markdown(FACTS, [failed, good], asked, "command")
        self.assertIn("no figures: no x.bin", text)
        self.assertIn("0.90x (0.90-0.90), target >= 0.85x: met", text)
        data = json.loads(json.dumps(table.data(FACTS, [failed, good], asked, "command")))
        self.assertEqual([row["verdict"] for row in data["rows"].values()], ["no figures", "met"])
        for picture in (plots.overview([failed, good]), plots.row_plot(good)):
            xml.dom.minidom.parseString(picture)

    def test_a_row_without_a_peer_has_figures_of_its_own(self):
        # Scenario: memory has only a bound and no peer. Expected: judged, reported and plotted.
        side = Side({"reads_per_second": 1.0, "resident_mib": 300.0})
        result = compare.measure_row("m", row_of(side, None, Target("resident_mib", "<=", value=320)), 1, 1, "")
        self.assertEqual(result.verdict(), "met")
        self.assertIn("MiB resident 300.00, target <= 320: met", table.markdown(FACTS, [result], {"pairs": 1, "seconds": 1}, ""))
        xml.dom.minidom.parseString(plots.row_plot(result))


class Variants(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.directory = pathlib.Path(temporary.name)

    def started(self, **variant):
        """A daemon that was not launched, and its configuration."""
        daemon = ringfetch.Daemon("data", {"backend": "auto"}, **variant)
        (self.directory / "addresses.json").write_text('{"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}')
        daemon.launch, daemon._check_read_path = lambda *_: None, lambda: None
        daemon.start(self.directory)
        return daemon, json.loads((self.directory / "ringfetchd.yaml").read_text())

    def test_a_token_is_in_the_file_of_principals_and_with_the_client(self):
        # Scenario: a daemon with principals, one without. Expected: the file has the hash of the client's token; no file.
        daemon, config = self.started(principals=True)
        _, credential, rights = pathlib.Path(config["access"]["principals"]).read_text().split()
        token = daemon.token_file.read_bytes()
        self.assertEqual((credential, rights), (f"sha256:{hashlib.sha256(token).hexdigest()}", "*,@metrics"))
        self.assertEqual(daemon.client_arguments(), ["--token-file", daemon.token_file])
        daemon, config = self.started()
        self.assertEqual((daemon.client_arguments(), "access" in config, "access_log" in config), ([], False, False))

    def test_an_access_log_that_lost_lines_is_no_measurement(self):
        # Scenario: a log with lines, an empty one, one that lost some. Expected: only the first counts.
        daemon, config = self.started(access_log=True)
        self.assertEqual(config["access_log"], {"path": str(daemon.log_file)})
        for text, dropped, is_good in (("{}", 0.0, True), ("", 0.0, False), ("{}", 3.0, False)):
            daemon.log_file.write_text(text)
            daemon._metric = lambda _, dropped=dropped: dropped
            if is_good:
                daemon.check_access_log()
            else:
                with self.assertRaises(RunFailed):
                    daemon.check_access_log()

    def test_rows_of_a_variant_differ_in_it_alone(self):
        # Scenario: the rows of TLS, tokens and the access log. Expected: the peer is the same daemon without these, under the
        # same load.
        every = rows.every(pathlib.Path("f"), pathlib.Path("w"), 1, 1 << 30, 1 << 30)
        for name, variant in (("tls-64", "TLS"), ("token-1", "principals"), ("token-64", "principals"), ("log-64", "access log")):
            row = every[name]
            self.assertEqual(row.subject.server.describe(), f"{row.peer.server.describe()}, {variant}")
            self.assertIs(row.subject.driver, row.peer.driver)


class Peers(unittest.TestCase):
    def test_fio_figures_count_its_whole_cpu(self):
        # Scenario: fio's JSON after a remark; 30 % of a CPU at 100 000 reads/s. Expected: 3 us per read; an error is reported
        # as one.
        job = {"error": 0, "usr_cpu": 10.0, "sys_cpu": 20.0, "read": {
            "iops": 100000.0, "total_ios": 5, "lat_ns": {"percentile": {"50.000000": 1500, "99.000000": 9000, "99.980000": 12000}}}}
        figures = peers.fio_figures("note: something\n" + json.dumps({"jobs": [job]}))
        self.assertAlmostEqual(figures["cpu_us"], 3.0)
        self.assertEqual((figures["p50_us"], figures["p99_us"]), (1.5, 9.0))
        with self.assertRaises(RunFailed):
            peers.fio_figures(json.dumps({"jobs": [{**job, "error": 5}]}))

    def test_rows_are_complete_and_name_what_they_need(self):
        # Scenario: all rows of the suite. Expected: each row has a side; together they need all four peers' commands.
        every = rows.every(pathlib.Path("f"), pathlib.Path("w"), 1, 1 << 30, 1 << 30)
        self.assertTrue(all(row.subject for row in every.values()))
        self.assertLessEqual({"fio", "nginx", "qemu-nbd", "wrk"}, {command for command, _ in rows.needs(every.values())})


if __name__ == "__main__":
    unittest.main()
