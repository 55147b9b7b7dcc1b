"""Compares this build with an older one: the same rows, generator and file, with the older daemon as the peer."""

import dataclasses
import math
import pathlib
import re
import signal
import statistics
import subprocess
import tempfile
import time

from peers import Served
from processes import RunFailed, say
from ringfetch import Daemon
from table import number, observations

# This many pairs make 2 % visible on a machine that varies by as much.
PAIRS = 9
# Accepted ratio of CPU per read to before.
CPU_RATIO_MAX = 1.02
# Accepted probability that chance alone makes a row look worse.
CHANCE_MAX = 0.025
TRACED_SECONDS = 2


def rows_of(every, binary):
    """The rows that start our daemon, compared with the older binary. Their peers and targets do not matter here; of rows
    that differ only in those, the first is taken."""
    chosen, seen = {}, []
    for name, row in every.items():
        if not starts_daemon(row.subject):
            continue
        server, driver = row.subject.server, row.subject.driver
        same = (type(row.subject), server.path, server.describe(), row.temperature.name, id(driver))
        if same not in seen:
            seen.append(same)
            chosen[name] = dataclasses.replace(row, peer=with_daemon(row.subject, binary), against="before", targets=[])
    return chosen


def starts_daemon(side):
    return isinstance(side, Served) and isinstance(side.server, Daemon)


def with_daemon(side, binary):
    """The same side with another ringfetchd."""
    return type(side)(side.server.with_binary(binary), side.driver)


def pairs_below_needed(pairs):
    """How many of the pairs must be below 1 to rule out chance (sign test): 8 of 9. More than there are if there are too few
    to tell."""
    for below in range(pairs + 1):
        if sum(math.comb(pairs, k) for k in range(below, pairs + 1)) / 2**pairs <= CHANCE_MAX:
            return below
    return pairs + 1


@dataclasses.dataclass(frozen=True)
class Change:
    """Now / before of one figure, over all pairs."""

    ratios: list

    @property
    def median(self):
        return statistics.median(self.ratios)

    def lies_below(self, bound):
        """Whether the change is below this beyond its spread."""
        return sum(ratio < bound for ratio in self.ratios) >= pairs_below_needed(len(self.ratios))

    def __str__(self):
        return f"{self.median:.3f}x ({min(self.ratios):.2f}-{max(self.ratios):.2f})"

    def data(self):
        return {"median": self.median, "lowest": min(self.ratios), "highest": max(self.ratios), "pairs": self.ratios}


def change(result, figure):
    """The change of a figure, or None if the runs do not have it or it may be zero."""
    runs = [*result.subject, *result.peer]
    if not runs or not all(run.get(figure) for run in runs):
        return None
    return Change(result.ratios(figure))


def problem(result):
    """Why there is no verdict, if there is none."""
    if result.problem or not result.subject:
        return result.problem or "no runs"
    pairs = len(result.subject)
    return "too few pairs to tell" if pairs_below_needed(pairs) > pairs else None


def is_fine(results):
    """Whether every row was judged, and none is worse."""
    return not any(problem(result) or verdict(result)[0] for result in results)


def verdict(result):
    """(what is worse, what may be worse) in words. Empty: nothing."""
    if problem(result):
        return [], []
    worse, unclear = [], []
    if change(result, "reads_per_second").lies_below(1):
        worse.append("fewer reads/s beyond the spread")
    cpu = change(result, "cpu_us")
    if cpu is not None and cpu.median > CPU_RATIO_MAX:
        # Inverted: before / now.
        beyond = Change([1 / ratio for ratio in cpu.ratios]).lies_below(1)
        (worse if beyond else unclear).append(
            f"CPU above {CPU_RATIO_MAX:g}x" + ("" if beyond else ", within the spread: take more pairs"))
    return worse, unclear


def in_words(result):
    if problem(result):
        return "**no figures**" if not result.subject else f"**not judged**: {problem(result)}"
    worse, unclear = verdict(result)
    return "; ".join([*(f"**{what}**" for what in worse), *unclear]) or "not worse"


class Strace:
    """Counts the system calls of all threads of a process while the `with` block runs."""

    def __init__(self, pid, directory):
        self.pid, self.summary, self.log = pid, directory / "strace", directory / "strace-log"

    def _is_attached(self):
        tasks = pathlib.Path(f"/proc/{self.pid}/task").iterdir()
        return all("\nTracerPid:\t0\n" not in (task / "status").read_text() for task in tasks)

    def __enter__(self):
        with open(self.log, "w") as log:
            self.tracer = subprocess.Popen(["strace", "-f", "-c", "-o", self.summary, "-p", str(self.pid)], stdout=log,
                                           stderr=log)
        deadline = time.monotonic() + 10
        while not self._is_attached():
            if self.tracer.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise RunFailed(f"strace cannot attach: {self.log.read_text()}")
            time.sleep(0.02)
        return self

    def _end(self):
        self.tracer.send_signal(signal.SIGINT)
        try:
            self.tracer.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.tracer.kill()
            self.tracer.wait()

    def __exit__(self, *_):
        self._end()

    def calls(self):
        return calls_of(self.summary.read_text())


def calls_of(summary):
    """Calls by name from the summary of `strace -c`."""
    found = re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", summary, re.MULTILINE)
    return {name: int(calls) for calls, name in found if name != "total"}


def system_calls(row, side):
    """System calls per read, by name, in a separate short run, since tracing changes the cost of a read."""
    row.temperature.prepare(row.path)
    with tempfile.TemporaryDirectory(prefix="ringfetch-bench-") as directory:
        side.server.start(pathlib.Path(directory))
        try:
            with Strace(side.server.process.pid, pathlib.Path(directory)) as strace:
                side.driver.measure(side.server, TRACED_SECONDS)
            reads = side.server.reads()
        finally:
            side.server.stop()
        return {name: calls / max(reads, 1) for name, calls in strace.calls().items()}


def count_calls(name, row):
    """System calls per read of both daemons; what cannot be counted is left out and reported."""
    counted = {}
    for when, side in (("now", row.subject), ("before", row.peer)):
        try:
            counted[when] = system_calls(row, side)
        except RunFailed as failure:
            say(f"{name}: its system calls are not counted: {failure}")
            return {}
    return counted


def calls_in_words(calls):
    """`0.52 / 0.61`: before / now."""
    if not calls:
        return "-"
    return " / ".join(f"{sum(calls[when].values()):.3f}" for when in ("before", "now"))


def rule(pairs):
    """How a row is judged."""
    needed = pairs_below_needed(pairs)
    if needed > pairs:
        return f"So few pairs ({pairs}) tell nothing."
    return (f"Fewer reads/s count as worse when at least {needed} of the {pairs} pairs agree, CPU a read when its median is "
            f"above {CPU_RATIO_MAX:g}x and as many agree that it rose.")


def markdown(facts, results, calls, binaries, options, command):
    device = facts["block_device"]
    lines = [
        f"# This build beside an older one, {facts['date']}, commit {facts['commit']}", "",
        f"`{command}`", "",
        f"{facts['cpus']} CPUs ({facts['cpu']}), {facts['memory_gib']} GiB; kernel {facts['kernel']}; {facts['file_system']} on "
        f"{device.get('name', 'an unknown device')}; a file of {facts['file_gib']} GiB. "
        f"Load average at the start: {facts['load_at_start']:.2f}.", "",
        *(f"- {when}: {binary}" for when, binary in binaries.items()), "",
        f"{options['pairs']} pairs of {options['seconds']} s a row, the order swapped in every other one; the same generator drives "
        f"both. Medians, before / now; a ratio is the median of now / before over the pairs, with the lowest and the highest. "
        f"{rule(options['pairs'])}", "",
        "| row | reads/s | ratio | CPU us/read | ratio | p99 ratio | peak MiB | system calls a read | verdict |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for result in results:
        def both(figure, digits=0, result=result):
            return " / ".join(number(result.median(side, figure), digits) for side in ("peer", "subject"))
        ratio = {figure: str(change(result, figure) or "-") for figure in ("reads_per_second", "cpu_us", "p99_us")}
        lines.append(
            f"| **{result.name}** ({result.row.temperature.name}) | {both('reads_per_second')} | {ratio['reads_per_second']} "
            f"| {both('cpu_us', 2)} | {ratio['cpu_us']} | {ratio['p99_us']} | {both('resident_mib')} "
            f"| {calls_in_words(calls.get(result.name))} | {in_words(result)} |")
    notes = [(result, [*observations(result), *([result.problem] if result.problem else [])]) for result in results]
    lines += [""] + [f"- **{result.name}**: {note}" for result, told in notes for note in told]
    return "\n".join(lines).rstrip() + "\n"


def data(facts, results, calls, binaries, options, command):
    """All results, run by run."""

    def row(result):
        worse, unclear = verdict(result)
        changes = {figure: change(result, figure) for figure in ("reads_per_second", "cpu_us", "p50_us", "p99_us")}
        return {"title": result.row.title, "problem": problem(result), "worse": worse, "unclear": unclear,
                "changes": {figure: found.data() for figure, found in changes.items() if found},
                "system_calls_a_read": calls.get(result.name, {}), "now": result.subject, "before": result.peer}

    return {"command": command, "machine": facts, "binaries": binaries, "options": options,
            "rows": {result.name: row(result) for result in results}}
