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


if __name__ == "__main__":
    unittest.main()
