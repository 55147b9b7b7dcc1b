#!/usr/bin/env python3
"""Writes the figures that the documents quote from the committed runs, so that they cannot go stale.

    bench/figures.py            rewrites the marked parts of README.md and docs/*.md
    bench/figures.py --check    changes nothing; ends with 1 when a part differs (so does test_figures.py)

A part is what stands between `<!-- figures: NAME -->` and `<!-- /figures -->`; NAME is a key of `PARTS`.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys

from table import number
from verdict import UNITS

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/results.json"
PART = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)

# The rows that README.md shows when their targets are met. A missed row is always shown.
HIGHLIGHTS = ["grpc-64", "grpc-1", "stream", "http-block", "mmap-cold", "mmap-warm", "auto-75", "ranges-64k"]


def median(row, side, figure):
    """The median of a side's runs, or None where they have no such figure."""
    values = [run[figure] for run in row[side]["runs"] if run.get(figure) is not None]
    return statistics.median(values) if values else None


def sides(row, figure, digits=0):
    """Both medians, `ours / theirs`."""
    both = [median(row, side, figure) for side in ("subject", "peer")]
    return " / ".join(number(value, digits) for value in both if value is not None) or "-"


def mark(row):
    """What is to be read with the figures of a row without a judgement: ` (**not judged**)`."""
    return f" (**{row['verdict']}**)" if row["problem"] else ""


def title(row):
    return f"{row['title']} ({row['temperature']}){mark(row)}"


def reason(row):
    """Why there is no judgement, on one line of a table."""
    return " ".join(row["problem"].replace("|", "\\|").split())


def result(row):
    """A row's judgements, or why there are none."""
    if row["problem"]:
        return f"**{row['verdict']}**: {reason(row)}"
    return "<br>".join(judged(target) for target in row["targets"])


def goal(target, sign):
    """`>= 1.8x`; what was measured is the worst pair's if the goal is for every pair, else the median."""
    return f"{target['relation']} {target['bound']:g}{sign}{' in every pair' if target.get('in_every_pair') else ''}"


def judged(target):
    """`reads/s 1.29x (goal >= 1.8x): **missed**`."""
    sign = "x" if target["is"] == "ratio" else ""
    return (f"{UNITS[target['figure']]} {target['measured']:.{2 if target['bound'] >= 0.1 else 4}f}{sign} (goal {goal(target, sign)}): "
            f"{'met' if target['met'] else '**missed**'}")


def missed(rows):
    """The rows that missed a target, in order."""
    return [name for name, row in rows.items() if not all(target["met"] for target in row["targets"])]


def unjudged(rows):
    """The rows of which a run says nothing, each with the reason: `x`, not judged: others used 50% of the CPUs."""
    return [f"`{name}`, {row['verdict']}: {reason(row)}" for name, row in rows.items() if row["problem"]]


def comparison(results):
    """README: the comparison with our peers, hits and misses."""
    rows, facts = results["rows"], results["machine"]
    misses, without = missed(rows), unjudged(rows)
    met = sum(bool(row["targets"]) for row in rows.values()) - len(misses)
    yield "| measured | against | reads/s, ours / theirs | CPU us/read | result |"
    yield "|---|---|--:|--:|---|"
    for name, row in rows.items():
        if name in HIGHLIGHTS or name in misses:
            yield (f"| {title(row)} | {row['peer']['name']} | {sides(row, 'reads_per_second')} "
                   f"| {sides(row, 'cpu_us', 1)} | {result(row)} |")
    yield ""
    yield (f"{facts['date']}, commit {facts['commit']}: {facts['cpus']} CPUs ({facts['cpu']}), kernel {facts['kernel']}, "
           f"{facts['file_system']} on {facts['block_device'].get('name', 'one disk')}, a file of {facts['file_gib']:g} GiB, 4 KiB "
           f"a read unless the row says otherwise; medians of pairs, or the worst where the goal is for every pair. {met} rows met their targets, {len(misses)} missed one; "
           f"every missed row is shown." + "".join(f" Without a result: {row}." for row in without))


def cpu(results):
    """CPU cost of a read, and the cores that it implies."""
    yield "| reads of 4 KiB | server CPU us/read | cores for 100,000 reads/s |"
    yield "|---|--:|--:|"
    for name in ("http-batch", "grpc-64", "stream", "mmap-cold", "grpc-1", "http-block"):
        row = results["rows"][name]
        each = median(row, "subject", "cpu_us")
        cores = None if each is None else each / 10
        yield f"| {title(row)} | {number(each, 1)} | {number(cores, 1)} |"


def depth(results):
    """The engine alone at three depths."""
    yield "| queue depth | reads/s | p50 us | p99 us |"
    yield "|--:|--:|--:|--:|"
    for at in (1, 64, 256):
        row = results["rows"][f"engine-{at}"]
        cells = (number(median(row, "subject", figure)) for figure in ("reads_per_second", "p50_us", "p99_us"))
        yield f"| {at}{mark(row)} | " + " | ".join(cells) + " |"


def memory(results):
    """The daemon's memory after load, and its idle CPU use."""
    yield "| after load, `engine.memory_budget: 256MiB` | MiB | idle CPU, % of a core |"
    yield "|---|--:|--:|"
    for name, figure, what in (("memory", "resident_mib", "`uring`: peak resident memory"),
                               ("memory-mmap", "anonymous_mib", "`mmap`: memory that is not page cache")):
        row = results["rows"][name]
        idle = median(row, "subject", "idle_cpu_percent")
        yield f"| {what}{mark(row)} | {number(median(row, 'subject', figure))} | {number(idle, 2)} |"


def misses(results):
    """The targets that the committed run missed."""
    rows = results["rows"]
    yield f"Run of {results['machine']['date']}, commit {results['machine']['commit']}:"
    yield ""
    yield "| row | figure | median of the pairs, or the worst | lowest to highest | target |"
    yield "|---|---|--:|--:|--:|"
    for name in missed(rows):
        for target in rows[name]["targets"]:
            if not target["met"]:
                ratio = target["is"] == "ratio"
                sign = "x" if ratio else ""
                spread = f"{target['lowest']:.2f} to {target['highest']:.2f}" if ratio else "-"
                yield (f"| `{name}` | {UNITS[target['figure']]} | {target['measured']:.2f}{sign} | {spread} "
                       f"| {goal(target, sign)} |")
    for row in unjudged(rows):
        yield ""
        yield f"Without a result: {row}."


def scores(results):
    """What ScoreVectors gains and costs."""
    yield "| scored | against | vectors/s, ours / theirs | result |"
    yield "|---|---|--:|---|"
    for name, row in results["rows"].items():
        if not name.startswith("scores-"):
            continue
        yield f"| `{name}`: {title(row)} | {row['peer']['name']} | {sides(row, 'reads_per_second')} | {result(row)} |"


def beside(results, names):
    """What a feature costs: a daemon with it, and one without."""
    yield "| with / without | reads/s | CPU us/read |"
    yield "|---|--:|--:|"
    for name in names:
        row = results["rows"][name]
        yield f"| {title(row)} | {sides(row, 'reads_per_second')} | {sides(row, 'cpu_us', 1)} |"


def access(results):
    """The cost of a token in each request, and of an access log."""
    yield from beside(results, ("token-1", "token-64", "log-64"))


def tls(results):
    """The cost of TLS."""
    yield from beside(results, ("tls-1", "tls-64", "tls-64k"))


PARTS = {part.__name__: part for part in (comparison, cpu, depth, memory, misses, scores, access, tls)}


def filled(text, results):
    """The document with its marked parts regenerated. KeyError: an unknown part."""

    def written(match):
        lines = PARTS[match.group(2)](results)
        return match.group(1) + "".join(line + "\n" for line in lines) + match.group(3)

    return PART.sub(written, text)


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; end with 1 when a part differs")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    stale = []
    for path in documents():
        text = path.read_text()
        new = filled(text, results)
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(new)
    for row in unjudged(results["rows"]):
        print(f"figures: without a result: {row}")
    if stale and options.check:
        sys.exit(f"figures: not those of the committed run: {', '.join(stale)}. Run bench/figures.py")
    print(f"figures: {'rewrote ' + ', '.join(stale) if stale else 'up to date'}")


if __name__ == "__main__":
    main()
