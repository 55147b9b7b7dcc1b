#!/usr/bin/env python3
"""Ringfetch beside its peers: alternating runs on the same file, ratios and CPU a read.

    bench/compare.py --file /data/10g.bin                 every row, 5 pairs of 5 s: about half an hour
    bench/compare.py --file /data/10g.bin --quick         every row once, 2 s a run: 3 minutes, to see that it works
    bench/compare.py --file /data/10g.bin --rows grpc-64,stream
    bench/compare.py --make /data/10g.bin --size 10GiB    makes the file first (vectors of 768 f32, verifiable)
    bench/compare.py --file /data/10g.bin --before OLD    this build beside an older ringfetchd, 9 pairs: an hour and a half
    bench/compare.py --list                               the rows

Writes results.md, results.json and their plots to --out; the table goes to stdout, progress to stderr.
docs/BENCHMARKING.md says what a run needs, and how to read it.
"""

import argparse
import hashlib
import os
import pathlib
import re
import sys
import time

import before
import cache
import machine
import plots
import ringfetch
import rows
import table
from processes import RunFailed, exit_on_sigterm, run, say
from verdict import OTHERS_CPU_MAX, Result

QUICK_PAIRS, QUICK_SECONDS, QUICK_IDLE_SECONDS = 1, 2, 1
# How long other processes' use of the CPUs is observed before each run.
QUIET_SECONDS = 0.2


def measure_side(row, side, seconds):
    """One run of one side: prepares the cache, measures, and checks the cache and the CPUs afterwards."""
    cached_at_start = row.temperature.prepare(row.path)
    idle = machine.Cpus()
    time.sleep(QUIET_SECONDS)
    others, _ = idle.shares()
    during = machine.Cpus()
    figures = side.measure(seconds)
    busy, stolen = during.shares()
    return {
        **figures,
        # CPU use by others, measured while this script did nothing.
        "others_cpu": others,
        "cached_at_start": cached_at_start,
        "cached_at_end": cache.resident_fraction(row.path),
        "busy_cpu": busy,
        "stolen_cpu": stolen,
    }


def measure_row(name, row, pairs, seconds, progress, quick=False):
    """Alternates A B, B A, ... so that the machine's drift affects both alike. A failure ends the row, not the others."""
    result = Result(name, row, [], [])
    seconds = min(seconds, row.seconds_max, row.quick_seconds if quick else row.seconds_max)
    try:
        for pair in range(pairs):
            order = ["subject", "peer"] if pair % 2 == 0 else ["peer", "subject"]
            runs = {side: measure_side(row, getattr(row, side), seconds)
                    for side in order if getattr(row, side) is not None}
            for side, figures in runs.items():
                getattr(result, side).append(figures)
                problem = row.temperature.judge(figures["cached_at_end"])
                if problem:
                    result.failure = problem
            ours, theirs = runs["subject"], runs.get("peer", {})
            others = max(figures["others_cpu"] for figures in runs.values())
            disturbed = f", others {others:.0%} of the CPUs" if others > OTHERS_CPU_MAX else ""
            say(f"{progress} {name:15} pair {pair + 1}/{pairs}: {table.number(ours['reads_per_second']):>9} / "
                f"{table.number(theirs.get('reads_per_second')):>9} reads/s, {table.number(ours['cpu_us'], 2):>6} / "
                f"{table.number(theirs.get('cpu_us'), 2):>6} us, p99 {table.number(ours['p99_us']):>7} / "
                f"{table.number(theirs.get('p99_us')):>7} us{disturbed}")
    except RunFailed as failure:
        result.failure = without_directories(failure)
        result.subject, result.peer = [], []
        say(f"{progress} {name:15} failed: {failure}")
    return result


def without_directories(failure):
    """The published text of a failure: files without their directories."""
    return re.sub(r"/(?:[^\s/]+/)+([^\s/]+)", r"\1", str(failure))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=pathlib.Path, help="what is read: on the device in question, 10 GiB or more")
    parser.add_argument("--make", type=pathlib.Path, help="make this file first if it is not there, and read it")
    parser.add_argument("--size", default="10GiB", help="of --make (default: 10GiB)")
    parser.add_argument("--rows", default="all", help="names with commas between them (default: all)")
    parser.add_argument("--pairs", type=int, help=f"default: 5; with --before: {before.PAIRS}")
    parser.add_argument("--before", type=pathlib.Path, metavar="BINARY",
                        help="an older ringfetchd in the peers' place, on the rows that start ours; ends with 1 if any is worse or cannot be judged")
    parser.add_argument("--seconds", type=int, default=5, help="a run (default: 5; buffered cold rows: at most 3)")
    parser.add_argument("--warm-size", type=int, default=1024, metavar="MIB",
                        help="of the file that warm rows read, made beside --file, and of the device in memory; both are removed (default: 1024)")
    parser.add_argument("--quick", action="store_true", help="1 pair of 2 s: shows that the rows work, not what they cost")
    parser.add_argument("--out", type=pathlib.Path, help="default: bench/results; with --quick, --rows, --plain or --before: target/bench")
    parser.add_argument("--plain", action="store_true",
                        help="measure what cargo build --release makes, not release/compile, whose first run takes ten minutes")
    parser.add_argument("--no-build", action="store_true", help="measure the build that is there")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    options = parser.parse_args()
    if not (options.file or options.make or options.list):
        parser.error("--file or --make: name the file to read")
    if options.before is not None:
        options.before = options.before.absolute()
        if not os.access(options.before, os.X_OK):
            parser.error(f"--before: {options.before} is not there, or cannot be run")
    if options.pairs is None:
        options.pairs = 5 if options.before is None else before.PAIRS
    if options.pairs < 1 or options.seconds < 1 or options.warm_size < 64:
        parser.error("--pairs, --seconds: at least 1; --warm-size: at least 64")
    if options.quick:
        options.pairs, options.seconds = QUICK_PAIRS, QUICK_SECONDS
    # Only a complete table of what is released replaces the published one.
    whole = options.rows == "all" and not (options.quick or options.plain) and options.before is None
    options.out = options.out or (ringfetch.ROOT / "bench" / "results" if whole else ringfetch.TARGET.parent / "bench")
    return options


def chosen(names, every):
    """The rows that --rows asks for, in the table's order."""
    if names == "all":
        return every
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in every]
    if unknown:
        sys.exit(f"--rows: {', '.join(unknown)}: no such row. There are: {', '.join(every)}")
    return {name: row for name, row in every.items() if name in wanted}


def command_line(path, options):
    """The command that reproduces these results, without the machine's directories."""
    words = ["bench/compare.py", f"--file {path.name}"]
    words += [f"--before {options.before.name}"] if options.before else []
    words += [f"--rows {options.rows}"] if options.rows != "all" else []
    words += ["--plain"] if options.plain else []
    words += ["--quick"] if options.quick else [f"--pairs {options.pairs}", f"--seconds {options.seconds}"]
    words += [f"--warm-size {options.warm_size}"] if options.warm_size != 1024 else []
    return " ".join(words)


def write(path, options, results, facts):
    """All results so far: an aborted run keeps what it has measured."""
    options.out.mkdir(parents=True, exist_ok=True)
    asked = {"pairs": options.pairs, "seconds": options.seconds, "warm_mib": options.warm_size}
    command = command_line(path, options)
    text = table.markdown(facts, results, asked, command)
    (options.out / "results.md").write_text(text)
    (options.out / "results.json").write_text(table.json_text(table.data(facts, results, asked, command)))
    (options.out / "overview.svg").write_text(plots.overview(results))
    for result in results:
        if result.subject:
            (options.out / f"{result.name}.svg").write_text(plots.row_plot(result))
    return text


def identity(binary):
    """What distinguishes one build from another."""
    return f"{run([binary, '--version']).strip()}, sha256 {hashlib.sha256(binary.read_bytes()).hexdigest()[:16]}"


def write_before(path, options, results, calls, facts):
    """All results so far of this build and the older one."""
    options.out.mkdir(parents=True, exist_ok=True)
    asked = {"pairs": options.pairs, "seconds": options.seconds, "warm_mib": options.warm_size}
    told = (facts, results, calls, {"before": identity(options.before), "now": identity(ringfetch.RINGFETCHD)}, asked,
            command_line(path, options))
    text = before.markdown(*told)
    (options.out / "before.md").write_text(text)
    (options.out / "before.json").write_text(table.json_text(before.data(*told)))
    return text


def print_rows(options):
    file = pathlib.Path("FILE")
    for name, row in available(options, rows.every(file, file, 10)).items():
        print(f"{name:15} {row.title} ({row.temperature.name}), against {row.against}")


def available(options, every):
    """The rows available in this mode."""
    return before.rows_of(every, options.before) if options.before else every


def main():
    options = parse()
    if options.list:
        return print_rows(options)
    exit_on_sigterm()
    path = (options.make or options.file).absolute()
    if not options.no_build:
        say("building the release binaries")
        ringfetch.build(with_examples=options.before is None, as_released=not options.plain)
    if not options.plain:
        ringfetch.use_released()
    if options.make and not path.exists():
        count = ringfetch.size_bytes(options.size) // (ringfetch.DIM * 4)
        run([ringfetch.RINGFETCH, "dataset", "make", "vectors", path, "--layout", "raw", "--dim", ringfetch.DIM, "--count", count])
    if not path.is_file():
        sys.exit(f"--file: {path} is not there, or no regular file")
    path = path.resolve()
    machine.check_file(path)
    warm = cache.WarmFile(path, options.warm_size << 20)
    memory = cache.MemoryDevice(path, options.warm_size << 20)
    idle_seconds = QUICK_IDLE_SECONDS if options.quick else 10
    try:
        every = rows.every(path, warm.path, idle_seconds, path.stat().st_size, warm.size, memory)
        selected = chosen(options.rows, available(options, every))
        needs = [*rows.needs(selected.values()), *([("strace", "strace")] if options.before else [])]
        machine.check_tools(needs, with_nbd=any(rows.drives_nbd(row) for row in selected.values()))
        facts = machine.facts(path)
        if facts["load_at_start"] > 0.5:
            say(f"note: load average {facts['load_at_start']:.1f}: others use this machine, and the figures will show it")
        if not options.quick:
            say("reading the file once, so that the disk has all of it")
            cache.read_once(path)
        if any(row.temperature is cache.WARM for row in selected.values()):
            say(f"copying {options.warm_size} MiB beside the file for the warm rows")
            warm.make()
            warm.lock()
        if any(row.temperature is cache.IN_MEMORY for row in selected.values()):
            memory.make()
        results, calls, started = [], {}, time.monotonic()
        for index, (name, row) in enumerate(selected.items()):
            progress = f"{time.monotonic() - started:5.0f} s {index + 1:2}/{len(selected)}"
            results.append(measure_row(name, row, options.pairs, options.seconds, progress, options.quick))
            if options.before is None:
                text = write(path, options, results, facts)
                continue
            if results[-1].subject:
                calls[name] = before.count_calls(name, row)
            text = write_before(path, options, results, calls, facts)
    finally:
        warm.remove()
        memory.remove()
    say(f"results are in {os.path.relpath(options.out)}")
    if options.out.resolve() == (ringfetch.ROOT / "bench" / "results").resolve():
        say("bench/figures.py writes these figures into the documents")
    print(text)
    if options.before is None:
        failed = any(result.problem for result in results)
    else:
        failed = not before.is_fine(results)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except RunFailed as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit("interrupted: what was measured so far is in --out")
