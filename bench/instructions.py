#!/usr/bin/env python3
"""Instructions a run of each micro-benchmark piece, counted by valgrind: the same on a busy machine as on a quiet one.

    bench/instructions.py                        all pieces, as a Markdown table
    bench/instructions.py --json NEW.json        also writes them, to compare with later
    bench/instructions.py --against OLD.json     and how they changed since then; .ci/run compares them with
                                                 bench/results/instructions.json: write that anew when a change is meant

--limit 2 fails when a piece takes over 2 % and 70 instructions more than before, is new, or is gone. A piece is run N and 2N times; the
difference is N runs without start and end of the program. What a run costs in time is what the program `pieces` tells by itself. Needs
valgrind.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# With the crates of README's commands, so that what those have built is not rebuilt.
BUILD = ("cargo", "build", "--release", "-p", "ringfetch-server", "-p", "ringfetch-cli", "-p", "ringfetch-pieces", "--bin", "pieces")
RUNS = 2000
# The program's start and end take 20,000 more instructions in some runs than in others: 0.2 % of this number.
INSTRUCTIONS = 10_000_000
# The compiler distributes functions over its units anew when unrelated code changes, and inlines others: the same source of
# envelope-64 took 449, 473 and 513 in builds of different commits. The price: in a piece of a few hundred, one more allocation passes.
INLINING = 70


# Forces one memcpy implementation, which glibc otherwise chooses by processor: counts are compared across machines.
TUNABLES = "glibc.cpu.hwcaps=-ERMS,-FSRM,-AVX2,-AVX512F,-AVX512VL,-AVX_Fast_Unaligned_Load"


def built():
    """Builds all pieces and returns the executable."""
    done = subprocess.run([*BUILD, "--message-format=json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit("the pieces do not build")
    messages = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return next(message["executable"] for message in messages if message.get("executable"))


def counted(executable, piece, runs):
    """Instructions of the whole program with this many runs of the piece."""
    done = subprocess.run(["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", executable, "--exactly", piece,
                           str(runs)], capture_output=True, text=True, check=False, env={**os.environ, "GLIBC_TUNABLES": TUNABLES})
    total = re.search(r"Collected\s*:\s*(\d+)", done.stderr)
    if done.returncode != 0 or total is None:
        sys.exit(f"{piece}: valgrind failed:\n{done.stderr}")
    return int(total.group(1))


def of_one_run(executable, piece):
    """Instructions of one run of the piece, from enough runs to outweigh the rest of the program."""
    def of_runs(runs):
        return (counted(executable, piece, 2 * runs) - counted(executable, piece, runs)) / runs

    rough = of_runs(RUNS)
    return round(rough if rough * RUNS >= INSTRUCTIONS else of_runs(int(INSTRUCTIONS / rough)), 1)


def pieces():
    """(name, instructions per run) of every piece, counted by one process per CPU at a time."""
    executable = built()
    names = subprocess.run([executable, "--list"], capture_output=True, text=True, check=True).stdout.split()
    # Each run is a single-threaded process.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as at_once:
        yield from zip(names, at_once.map(lambda name: of_one_run(executable, name), names), strict=True)


def change(before, count):
    """Percent more than before. None: there is nothing to compare with."""
    return (count / before - 1) * 100 if before else None


def is_above(before, count, limit):
    """If a piece takes more than before, by more than the limit in percent and more than inlining explains."""
    return change(before, count) > limit and count - before > INLINING


def failures(before, counts, limit):
    """What a limit does not allow: a piece above it, and one that is compared with nothing."""
    found = [] if counts else ["no piece was counted"]
    for name in before | counts:
        if name not in counts:
            found.append(f"{name}: no longer counted")
        elif name not in before:
            found.append(f"{name}: no count before")
        elif is_above(before[name], counts[name], limit):
            found.append(f"{name}: {change(before[name], counts[name]):+.1f} %")
    return found


def line(name, before, count):
    """A piece as a row: now, before, change; a hyphen for a missing value."""
    percent = change(before, count) if count is not None else None
    cells = [f"{value:,.0f}" if value is not None else "-" for value in (count, before)]
    return f"| {name} | {' | '.join(cells)} | {'-' if percent is None else f'{percent:+.1f} %'} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the counts here")
    parser.add_argument("--against", type=pathlib.Path, help="counts that --json wrote before")
    parser.add_argument("--limit", type=float,
                        help="with --against: fail when a piece grew by more than so many percent and by more than "
                             f"{INLINING} instructions, is new, or is gone")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is missing. On Debian: apt-get install valgrind")
    before = json.loads(options.against.read_text()) if options.against else {}
    print("| piece | instructions a run | before | change |\n|---|--:|--:|--:|")
    counts = {}
    for name, count in pieces():
        counts[name] = count
        print(line(name, before.get(name), count), flush=True)
    for name in before:
        if name not in counts:
            print(line(name, before[name], None))
    if options.json:
        options.json.write_text(json.dumps(counts, indent=1) + "\n")
    found = failures(before, counts, options.limit) if options.limit is not None else []
    if found:
        sys.exit(f"against the limit of {options.limit:g} %: " + ", ".join(found))


if __name__ == "__main__":
    main()
