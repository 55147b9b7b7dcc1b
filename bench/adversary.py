#!/usr/bin/env python3
"""Careless and hostile clients against a release daemon that gives answers of up to 16 MiB, and what a friendly one gets.

    bench/adversary.py                                 every case, 10 s each: half an hour
    bench/adversary.py --seconds 10 --out bench/results/adversary.md
    bench/adversary.py --cases partial-bodies,herd     some of them (--list names all)
    bench/adversary.py --daemon old/ringfetchd         another build, for the column "before"

Each case runs with attacker and victim on different loopback addresses, and on the same one. Before that the victim is
measured alone, and beside as many well-behaved connections (the control). Cases on a slow disk need root and /dev/fuse,
those of principals fio.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import adversary_cases
import machine
import ringfetch
from adversary_daemon import SlowDisk, Victimised
from processes import RunFailed, exit_on_sigterm, run, say

ADVERSARY, SLOWDISK = ringfetch.TARGET / "adversary", ringfetch.TARGET / "slowdisk"
ATTACKERS = {"other": "127.0.0.2", "same": "127.0.0.1"}
VICTIM = "127.0.0.1"
# The attack continues for this long after the victim has ended.
TAIL_SECONDS = 1.0
# CPU time that an attacker burns on these CPUs is not an attack: at the same priority a flood that never sleeps takes most of
# one CPU from the daemon by scheduling alone (header flood: p99 20 to 40 ms, at 19: 6 to 10 ms).
ATTACKERS_NICE = "19"
BLOCK_BYTES = 4096
# Of the data, by which clients check what they get.
SEED = 1
# Reads of the device by another process: what they do to the reader is not the daemon's doing.
DEVICE_READS = ["fio", "--name=device", "--readonly", "--rw=randread", "--bs=4k", "--ioengine=io_uring", "--direct=1",
                "--iodepth=64", "--norandommap=1", "--time_based=1"]
HERDS = 5
# Pairs of runs alone and beside a greedy principal.
PAIRS = 5
# Runs of each control.
CONTROL_RUNS = 3


def halves_of_cpus():
    """Command prefixes for the daemon and its clients: half of the CPUs each, or the only CPU for both."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    halves = (cpus[:half], cpus[half:]) if half else (cpus, cpus)
    return [["taskset", "--cpu-list", ",".join(map(str, cpus))] for cpus in halves]


def undisturbed(command):
    """The command of a client that others on its CPUs do not delay, as on a machine of its own. Needs root. At the same priority
    the reader waits up to 4 ms, a tick of the scheduler, for a CPU that the daemon uses (header flood: p99 4.0 ms; undisturbed 0.6)."""
    return ["chrt", "--rr", "1", *command] if os.geteuid() == 0 else command


class Bench:
    """State shared by all cases: the binaries, the data, the time, and control runs that are made only once."""

    def __init__(self, options, directory):
        self.options, self.directory = options, directory
        self.data = directory / "data.bin"
        self.controls = {}

    def daemon(self, engine=None, slow=None):
        return Victimised(self.options.daemon, self.directory, self.data, engine or {}, slow)

    def command(self, daemon, seconds, source, *arguments, dataset="data"):
        addresses = [word for name, value in daemon.addresses.items() for word in (f"--{name}", value)]
        # Not queried from a daemon that is under attack.
        blocks = (self.options.size << 20) // BLOCK_BYTES
        return [str(part) for part in (
            ADVERSARY, *addresses, "--dataset", dataset, "--blocks", blocks, "--block-bytes", BLOCK_BYTES, "--seed", SEED,
            "--from", source, "--seconds", seconds, *arguments)]

    def victim(self, daemon, seconds):
        return json.loads(run(undisturbed(self.command(daemon, seconds, VICTIM, "victim", "--pid", daemon.process.pid))))

    def beside(self, daemon, attack, source, ramp_seconds=1.0):
        """The victim's figures while something else runs, and what that counted."""
        seconds = self.options.seconds
        command = self.command(daemon, ramp_seconds + seconds + TAIL_SECONDS, source, *attack)
        found, output = self.during(command, lambda: self.victim(daemon, seconds), ramp_seconds)
        return found, json.loads(output)

    def during(self, disturber, measure, ramp_seconds=TAIL_SECONDS):
        """What `measure` returns while another command runs, and what that prints."""
        command = ["nice", "-n", ATTACKERS_NICE, *disturber]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True)
            try:
                time.sleep(ramp_seconds)
                found = measure()
                _, problem = process.communicate(timeout=60)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
            if process.returncode != 0:
                raise RunFailed(f"{' '.join(command)}\n{problem}")
            output.seek(0)
            return found, output.read()

    def control(self, connections):
        """The victim beside this many well-behaved connections; `None`: alone. The run with the median p99 of several, since one
        of 4 s had 3.2 ms where others had 0.4 to 1.0, and would have passed nearly everything."""
        if connections not in self.controls:
            runs = []
            for turn in range(1, CONTROL_RUNS + 1):
                beside = f"{connections} well-behaved connections" if connections else "alone"
                say(f"  control {turn} of {CONTROL_RUNS}: {beside}")
                runs.append(self.control_run(connections))
            self.controls[connections] = sorted(runs, key=lambda run: run["reader"]["p99_ms"])[CONTROL_RUNS // 2]
        return self.controls[connections]

    def control_run(self, connections):
        with self.daemon() as daemon:
            if not connections:
                return self.victim(daemon, self.options.seconds)
            # At most about 1,000 requests a second in all.
            attack = ["well-behaved", "--connections", connections, "--every-ms", max(1000, connections)]
            return self.beside(daemon, attack, "127.0.0.2")[0]

    def attack(self, case, source):
        alone, control = self.control(None), self.control(case.connections)
        with self.daemon() as daemon:
            found, counts = self.beside(daemon, case.attack, source, case.ramp_seconds)
            alive = daemon.process.poll() is None
        return adversary_cases.Seen(alone, control, found, counts, alive)

    def overload(self, case, source):
        """More reads than a 2 ms disk can serve, with a supervisor that expects keep-alives from the daemon."""
        with SlowDisk(SLOWDISK, self.data, self.directory / "slow", "--latency", "2ms", "--concurrency", "64") as disk:
            with self.daemon(slow=disk.path) as daemon:
                # One more client of the same kind next to the crowd, with one call at a time: it only waits for the daemon,
                # while each call of the crowd waits for all the others.
                single = self.command(daemon, self.options.seconds, source, *case.attack[:1], "--callers", 1, "--scattered",
                                      dataset="slow")
                crowd = self.command(daemon, self.options.seconds + 2 * TAIL_SECONDS, source, *case.attack, dataset="slow")
                with tempfile.TemporaryFile("w+") as output:
                    process = subprocess.Popen(["nice", "-n", ATTACKERS_NICE, *crowd], stdout=output, text=True)
                    time.sleep(TAIL_SECONDS)
                    alone = json.loads(run(single))
                    process.wait(timeout=60)
                    output.seek(0)
                    counts = json.loads(output.read()) | {"single": alone}
                alive = daemon.process.poll() is None
                heart = daemon.heart.seen()
            report = disk.ask("report")
        return adversary_cases.Seen(None, None, None, counts, alive, heart=heart, disk=report)

    def herd(self, case, source):
        """1,000 callers on one cold block of a 200 ms disk, while the victim reads another dataset."""
        with SlowDisk(SLOWDISK, self.data, self.directory / "slow", "--latency", "200ms") as disk:
            with self.daemon(engine=case.engine, slow=disk.path) as daemon:
                # Long enough for all herds, at least a second each.
                victim = subprocess.Popen(
                    undisturbed(self.command(daemon, 2 * HERDS + 2, VICTIM, "victim", "--pid", daemon.process.pid)),
                    stdout=subprocess.PIPE, text=True)
                herds, reads = [], []
                for number in range(HERDS):
                    # Far apart, so that no block is in another's readahead.
                    block = 1000 + 5000 * number
                    disk.ask("reset")
                    command = self.command(daemon, 20, source, "herd", "--block", block, dataset="slow")
                    herds.append(json.loads(run(command)))
                    reads.append(disk.reads_of(block * BLOCK_BYTES, BLOCK_BYTES))
                found = json.loads(victim.communicate()[0])
                alive = daemon.process.poll() is None
            report = disk.ask("report")
        counts = {"herds": herds, "device_reads": reads}
        return adversary_cases.Seen(None, None, found, counts, alive, disk=report)

    def principals(self, case, source):
        """A principal at a fraction of what its connection can take: alone and beside a greedy one, in turn, and then beside
        another process that makes as many reads of the device as the greedy one got, without the daemon."""
        principals = {"modest": ("modest", f"* weight={case.weight}"), "greedy": ("greedy", f"* {case.limits}".strip())}
        seconds = max(1.0, self.options.seconds / PAIRS)
        own_connections = case.attack[0] == "big-answers"
        of_daemon, of_clients = halves_of_cpus()
        with Victimised(self.options.daemon, self.directory, self.data, case.engine or {}, principals=principals,
                        prefix=of_daemon) as daemon:
            peak = of_clients + self.command(daemon, 2, VICTIM, "big-answers", "--token", "modest", "--callers", 1, "--calls", 64,
                                "--answer-blocks", 1)
            rate = json.loads(run(peak))["answers"] / 2 * case.load
            paced = undisturbed([*of_clients, *self.command(daemon, seconds, VICTIM, "paced", "--token", "modest"), "--rate",
                                 f"{rate:.0f}"])

            def reader():
                return json.loads(run(paced))["reader"]

            runs, attacks = [], []
            for number in range(PAIRS):
                found = {}
                for with_it in (False, True) if number % 2 == 0 else (True, False):
                    if not with_it:
                        found["alone"] = reader()
                    elif own_connections:
                        command = self.command(daemon, seconds + 2 * TAIL_SECONDS, source, *case.attack, "--token", case.token)
                        found["beside"], output = self.during([*of_clients, *command], reader)
                        counts = json.loads(output)
                    else:
                        seen = json.loads(run([*paced, "--beside-token", "greedy", *map(str, case.attack)]))
                        found["beside"], counts = seen["reader"], seen["beside"]
                lasted = seconds + 2 * TAIL_SECONDS if own_connections else seconds
                reads = counts["answers"] * case.attack[case.attack.index(case.blocks) + 1] / lasted
                if reads >= 1 and not case.engine:
                    command = [*of_clients, *DEVICE_READS, f"--filename={self.data}", f"--rate_iops={reads:.0f}",
                               f"--runtime={seconds + 2 * TAIL_SECONDS:g}"]
                    found["device"], _ = self.during(command, reader)
                runs.append(found)
                attacks.append(counts)
            alive = daemon.process.poll() is None
        counts = {"runs": runs, "rate": rate, "seconds": seconds, "greedy": attacks}
        return adversary_cases.Seen(None, None, None, counts, alive)

    def measure(self, case, where):
        runner = {"attack": self.attack, "overload": self.overload, "herd": self.herd,
                  "principals": self.principals}[case.runner]
        try:
            seen = runner(case, ATTACKERS[where])
        except (RunFailed, json.JSONDecodeError, subprocess.TimeoutExpired, OSError) as failure:
            say(f"  failed: {failure}")
            return Row(case, where, [("a run", str(failure).split("\n")[-1], None)], None)
        return Row(case, where, case.judge(seen), seen)


@dataclasses.dataclass
class Row:
    case: object
    where: str
    # (wanted, found, whether it is met; None: not judged)
    judgements: list
    seen: object

    def line(self):
        met = {True: "met", False: "**NOT met**", None: "not measured"}
        parts = ["<br>".join(column) for column in zip(*(
            (wanted, found, met[is_met]) for wanted, found, is_met in self.judgements), strict=True)]
        return f"| {self.case.name} | {self.where} | {' | '.join(parts)} |"


def text_table(rows):
    """The same for a terminal, aligned."""
    lines = [("case", "attacker", "wanted", "found", "")]
    for row in rows:
        for index, (wanted, found, is_met) in enumerate(row.judgements):
            name, where = (row.case.name, row.where) if index == 0 else ("", "")
            lines.append((name, where, wanted, found, {True: "met", False: "NOT met", None: "-"}[is_met]))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
                     for line in lines)


def markdown(rows, bench, facts):
    options = bench.options
    judged = [is_met for row in rows for _, _, is_met in row.judgements]
    alone = bench.controls.get(None)
    lines = [
        f"# Careless and hostile clients: {facts['date']}, {options.label or 'commit ' + facts['commit']}", "",
        f"`{command_line(options)}`", "",
        f"{facts['cpus']} CPUs ({facts['cpu']}), {facts['memory_gib']} GiB; kernel {facts['kernel']}; a file of "
        f"{facts['file_gib']} GiB on {facts['file_system']}; load average at the start {facts['load_at_start']:.2f}. "
        f"Daemon: {run([options.daemon, '--version']).strip()}, release build, default configuration with answers of up to 16 MiB.", "",
        f"Attacker, victim and daemon share these CPUs; the attacker runs at nice {ATTACKERS_NICE} and the victim before all "
        "others (SCHED_RR, if root runs this), since real ones have machines of their own. Beside a greedy principal the daemon "
        "has half of the CPUs and its clients the others; after each pair the reader runs beside fio, which makes as many reads "
        "of the device as the greedy principal got, on the clients' CPUs and without the daemon. "
        f"Each case {options.seconds:g} s, once with the attacker on another "
        "loopback address than the victim (other) and once on the same one. The victim is a reader of single blocks with "
        "one gRPC connection and without retries, a newcomer that connects for each read, and a probe of `/livez`. The reader "
        "waits for each answer: a late one counts for the reads that it kept from being made, too. Its "
        f"p99 is compared with the larger of two: alone, and beside as many well-behaved connections (each the median of {CONTROL_RUNS} runs).", "",
    ]
    if alone:
        lines += [f"Alone: p50 {alone['reader']['p50_ms']:.2f} ms, p99 {alone['reader']['p99_ms']:.2f} ms.", ""]
    lines += [
        f"Met: {judged.count(True)}. Not met: {judged.count(False)}. Not measured: {judged.count(None)}.", "",
        "| case | attacker | wanted | found | |", "|---|---|---|---|---|", *(row.line() for row in rows), "",
        "## What ran", "",
    ]
    for case in dict.fromkeys(row.case for row in rows):
        lines.append(f"- **{case.name}**: {case.title}. `adversary {' '.join(map(str, case.attack))}`")
        for row in rows:
            if row.case is case and row.seen:
                lines.append(f"  - {row.where}: {row.seen.summary()}")
    return "\n".join(lines) + "\n"


def command_line(options):
    words = ["bench/adversary.py", f"--seconds {options.seconds:g}"]
    words += [f"--cases {options.cases}"] if options.cases != "all" else []
    return " ".join(words)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="a run (default: 10)")
    parser.add_argument("--cases", default="all", help="names with commas between them (default: all)")
    parser.add_argument("--where", choices=[*ATTACKERS, "both"], default="both", help="the attacker's address (default: both)")
    parser.add_argument("--daemon", type=pathlib.Path, default=ringfetch.RINGFETCHD, help="default: the release build")
    parser.add_argument("--label", help="what the report calls the daemon (default: this checkout's commit)")
    parser.add_argument("--directory", type=pathlib.Path, help="for the data; on a disk (default: target/)")
    parser.add_argument("--size", type=int, default=512, metavar="MIB", help="of the data (default: 512)")
    parser.add_argument("--out", type=pathlib.Path, help="a Markdown file (default: target/adversary.md)")
    parser.add_argument("--no-build", action="store_true", help="the release builds that are there")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    options = parser.parse_args()
    if options.seconds < 1 or options.size < 128:
        parser.error("--seconds: at least 1; --size: at least 128")
    options.out = options.out or ringfetch.TARGET.parent / "adversary.md"
    options.daemon = options.daemon.absolute()
    return options


def chosen(names):
    if names == "all":
        return adversary_cases.CASES
    every = {case.name: case for case in adversary_cases.CASES}
    unknown = [name for name in names.split(",") if name not in every]
    if unknown:
        sys.exit(f"--cases: {', '.join(unknown)}: no such case. There are: {', '.join(every)}")
    return [every[name] for name in names.split(",")]


def main():
    options = parse()
    if options.list:
        for case in adversary_cases.CASES:
            print(f"{case.name:22} {case.title}")
        return 0
    cases = chosen(options.cases)
    if not options.no_build:
        say("building the release binaries")
        run(["cargo", "build", "--release", "-p", "ringfetch-server", "-p", "ringfetch-cli", "-p", "ringfetch-adversary",
             "-p", "ringfetch-slowdisk", "--bins"], cwd=ringfetch.ROOT)
    # 10,000 connections, in the daemon too.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A failure is reported by its last line, which a backtrace would hide.
    os.environ["RUST_BACKTRACE"] = "0"
    exit_on_sigterm()
    places = list(ATTACKERS) if options.where == "both" else [options.where]
    rows, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.directory or ringfetch.TARGET.parent, prefix="adversary-") as directory:
        bench = Bench(options, pathlib.Path(directory))
        run([ringfetch.RINGFETCH, "dataset", "make", "blocks", bench.data, "--size", f"{options.size}MiB", "--seed", SEED])
        facts = machine.facts(bench.data)
        if facts["load_at_start"] > 0.5:
            say(f"note: load average {facts['load_at_start']:.1f}: others use this machine, and the figures will show it")
        for case in cases:
            for where in places:
                say(f"{time.monotonic() - begun:5.0f} s {case.name}, attacker on the {where} address")
                rows.append(bench.measure(case, where))
                # An aborted run keeps what was measured.
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(markdown(rows, bench, facts))
    print(text_table(rows))
    say(f"the report is in {os.path.relpath(options.out)}")
    return 0 if all(is_met is True for row in rows for _, _, is_met in row.judgements) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit("interrupted: what was measured so far is in --out")
