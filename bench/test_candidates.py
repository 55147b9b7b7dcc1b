"""Wrong input of candidates.py, which needs neither numpy nor faiss: python3 -m unittest discover bench"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent / "candidates.py"


class Candidates(unittest.TestCase):
    def test_wrong_input_is_one_line_that_says_what_is_wrong(self):
        # Scenario: no file, a directory, other names, a file that was cut short; options that are no numbers, too small or too
        # large for the file. Expectation: exit code 1 or 2, the problem in the last line, no traceback, nothing written.
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory)
            whole, cut, is_directory = (path / f"vectors-{name}.f32" for name in ("500x8", "500x16", "9x9"))
            whole.write_bytes(bytes(500 * 8 * 4))
            cut.write_bytes(bytes(500 * 8 * 4))
            is_directory.mkdir()
            (path / "other.f32").write_bytes(b"")
            before = sorted(path.iterdir())
            for words, problem in (
                ([path / "vectors-7x7.f32"], "no such file; `ringfetch lab rescore --vectors 7` makes it"),
                ([is_directory], "no such file"),
                ([path / "other.f32"], "the file's name is not vectors-COUNTxDIM.f32"),
                ([path / "vectors-0x8.f32"], "the file's name is not vectors-COUNTxDIM.f32"),
                ([cut], "has 16000 bytes, not the 32000 of 500 vectors of 16 f32"),
                ([whole, "--oversampling", "1,8"], "800 for each query are more than 500 vectors"),
                ([whole, "--queries", "501"], "--queries 501: more than 500 vectors"),
                ([whole, "--queries", "0"], "argument --queries: '0' is no whole number from 1 on"),
                ([whole, "--limit", "-3"], "argument --limit: '-3' is no whole number from 1 on"),
                ([whole, "--oversampling", "1,,4"], "argument --oversampling: '' is no whole number from 1 on"),
                ([whole, "--seed", "-1"], "argument --seed: '-1' is no whole number from 0 on"),
            ):
                run = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False)
                self.assertIn(run.returncode, (1, 2), words)
                self.assertNotIn("Traceback", run.stderr)
                self.assertIn(problem, run.stderr.splitlines()[-1], run.stderr)
            self.assertEqual(sorted(path.iterdir()), before)


if __name__ == "__main__":
    unittest.main()
