#!/usr/bin/env python3
"""Instructions a run of each micro-benchmark piece, counted by valgrind: the same on a busy machine as on a quiet one.

    bench/instructions.py                        all pieces, as a Markdown table
    bench/instructions.py --against OLD.json     and how they changed; --limit 5: fail above 5 % more
    bench/instructions.py --json NEW.json        also writes them, to be held against later

A piece is run N and 2N times; the difference is N runs without start and end of the program. What a run costs in time
is what `cargo bench --bench pieces` tells. Needs valgrind.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CRATES = ("ringfetch-engine", "ringfetch-server")
RUNS = 2000


def built(crate):
    """Builds a crate's pieces and returns the executable."""
    done = subprocess.run(["cargo", "bench", "--no-run", "-p", crate, "--bench", "pieces", "--message-format=json"],
                          cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{crate}: its pieces do not build")
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return next(message["executable"] for message in messages
                if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "pieces")


def counted(executable, piece, runs):
    """Instructions of the whole program with so many runs of the piece."""
    done = subprocess.run(["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", executable, "--exactly", piece,
                           str(runs)], capture_output=True, text=True)
    total = re.search(r"Collected\s*:\s*(\d+)", done.stderr)
    if done.returncode != 0 or total is None:
        sys.exit(f"{piece}: valgrind failed:\n{done.stderr}")
    return int(total.group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the counts here")
    parser.add_argument("--against", type=pathlib.Path, help="counts that --json wrote before")
    parser.add_argument("--limit", type=float, help="with --against: fail when a piece grew by more than so many percent")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is missing. On Debian: apt-get install valgrind")
    before = json.loads(options.against.read_text()) if options.against else {}
    counts, grown = {}, []
    print("| piece | instructions a run |" + (" before | change |" if before else ""))
    print("|---|--:|" + ("--:|--:|" if before else ""))
    for crate in CRATES:
        executable = built(crate)
        names = subprocess.run([executable, "--list"], capture_output=True, text=True, check=True).stdout.split()
        for name in names:
            count = (counted(executable, name, 2 * RUNS) - counted(executable, name, RUNS)) / RUNS
            counts[name] = round(count, 1)
            line = f"| {name} | {count:,.0f} |"
            if name in before:
                change = (count / before[name] - 1) * 100
                line += f" {before[name]:,.0f} | {change:+.1f} % |"
                if options.limit is not None and change > options.limit:
                    grown.append(f"{name}: {change:+.1f} %")
            print(line, flush=True)
    if options.json:
        options.json.write_text(json.dumps(counts, indent=1) + "\n")
    if grown:
        sys.exit(f"above the limit of {options.limit:g} %: " + ", ".join(grown))


if __name__ == "__main__":
    main()
