"""Ends of what a program has started: python3 -m unittest discover bench"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import processes
import ringfetch

HERE = pathlib.Path(__file__).resolve().parent

NEVER_READY = """
import processes, sys
class Never(processes.Server):
    def is_ready(self):
        print(self.process.pid, flush=True)
        return False
processes.exit_on_sigterm()
Never().launch(["sleep", "1000"], sys.argv[1])
"""


# Says that it listens where nothing does.
DEAF_DAEMON = """#!/usr/bin/env python3
import json, pathlib, sys, time
addresses = pathlib.Path(sys.argv[sys.argv.index("--addresses-file") + 1])
new = addresses.with_suffix(".new")
new.write_text(json.dumps({"grpc": "127.0.0.1:1", "http": "127.0.0.1:1"}))
new.rename(addresses)
time.sleep(1000)
"""


class Never(processes.Server):
    def is_ready(self):
        return False


class Starts(unittest.TestCase):
    def test_a_program_that_is_not_there_is_named(self):
        # Run and launched: one line, not a traceback.
        program = str(HERE / "nothing")
        with tempfile.NamedTemporaryFile() as log:
            for start in (processes.run, lambda command: Never().launch(command, log.name)):
                with self.assertRaisesRegex(processes.RunFailed, f"^{program} cannot be run: No such file or directory$"):
                    start([program])


class Watching(unittest.TestCase):
    def test_until_returns_the_first_true_answer_or_says_what_did_not_happen(self):
        answers = iter([None, 0, 7, 8])
        self.assertEqual(processes.until(lambda: next(answers), "an answer"), 7)
        with self.assertRaisesRegex(processes.RunFailed, "^not within 0 s: the moon$"):
            processes.until(lambda: False, "the moon", 0)

    def test_total_adds_the_series_of_one_name_with_these_labels(self):
        page = '# HELP a_total A.\na_total{x="1",y="2"} 1\na_total{x="2"} 2\na_total_more{x="1"} 4\nb 8\n'
        series = processes.metrics(page)
        self.assertEqual([processes.total(series, *of) for of in (["a_total"], ["a_total", 'x="1"'], ["b"], ["c"])], [3, 1, 8, 0])

    def test_a_metric_that_a_daemon_does_not_have_is_not_0(self):
        daemon = ringfetch.Daemon(HERE / "data", {})
        daemon._get = lambda _: b'a_total{x="1"} 1\na_total{x="2"} 2\n'
        self.assertEqual(daemon._metric("a_total"), 3)
        with self.assertRaisesRegex(processes.RunFailed, "^/metrics has no a_totals$"):
            daemon._metric("a_totals")


class Ends(unittest.TestCase):
    def test_a_signal_ends_a_server_that_is_not_ready(self):
        # SIGTERM and SIGINT while a server is awaited: both end the program, and no process is left.
        for number in (signal.SIGTERM, signal.SIGINT):
            with tempfile.NamedTemporaryFile() as log, subprocess.Popen(
                    [sys.executable, "-c", NEVER_READY, log.name], cwd=HERE, text=True, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL) as program:
                server = int(program.stdout.readline())
                program.send_signal(number)
                program.communicate()
                self.assertNotEqual(program.returncode, 0)
                try:
                    os.kill(server, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.fail(f"the server still runs after {number.name}")

    def test_a_daemon_whose_status_cannot_be_read_does_not_stay(self):
        # Scenario: a daemon that does not answer after its start. Expected: that is the run's failure; its process has ended.
        with tempfile.TemporaryDirectory() as name:
            directory = pathlib.Path(name)
            binary = directory / "ringfetchd"
            binary.write_text(DEAF_DAEMON)
            binary.chmod(0o755)
            daemon = ringfetch.Daemon(directory / "data", {"backend": "mmap"}).with_binary(binary)
            with self.assertRaisesRegex(processes.RunFailed, "^GET http://127.0.0.1:1/v1/status: "):
                daemon.start(directory)
            self.assertIsNotNone(daemon.process.poll())


if __name__ == "__main__":
    unittest.main()
