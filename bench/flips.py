#!/usr/bin/env python3
"""Flips the engine again and again under full verified load, and looks for what it costs and what it leaves behind.

    bench/flips.py                                200 flips in about a minute, on a file made in target/
    bench/flips.py --flips 20 --seconds 10        to see that it works
    bench/flips.py --debug                        the debug build that is there

A daemon serves pattern data, `ringfetch load --verify` reads it over several connections as fast as it can, and
`ringfetch backend set` goes round all pairs of uring, mmap and auto, both ways. Ends with 1 unless every flip was made, no
read failed, no byte was wrong, and memory, descriptors and threads are what they were. Writes flips.md, flips.json and
flips.svg to --out.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import flips_report
import machine
import ringfetch
from processes import RunFailed, exit_on_sigterm, run, say

# Each ordered pair of the three once: uring to mmap, mmap to uring, uring to auto, ...
ROUND = ["mmap", "uring", "auto", "mmap", "auto", "uring"]
# One round before anything is measured: every group of shards is started, every page of response memory touched.
WARM_UP_SECONDS = 3
# The load continues for this long after the last flip.
TAIL_SECONDS = 1
# Sampling interval of the process.
SAMPLE_SECONDS = 0.05
SETTLE_SECONDS = 20


class Flipped(ringfetch.Daemon):
    """The daemon, and what an operator would look at."""

    def start(self, directory):
        super().start(directory)
        self.admin = "http://" + json.loads(self.file.read_text())["admin"]

    def tool(self, *arguments):
        return json.loads(run([ringfetch.RINGFETCH, "--admin", self.admin, "--json", *arguments]))

    def flip(self, backend):
        """Seconds that the command took."""
        begun = time.monotonic()
        answer = self.tool("backend", "set", backend)
        took = time.monotonic() - begun
        if answer["backend"] != backend:
            raise RunFailed(f"asked for {backend}, got {json.dumps(answer)}")
        return took

    def show(self):
        """Seconds that the read-only command takes: the part of a flip that is the command's own."""
        begun = time.monotonic()
        self.tool("backend")
        return time.monotonic() - begun

    def sample(self):
        process = pathlib.Path(f"/proc/{self.process.pid}")
        return {
            "anonymous_mib": self.status_mib("RssAnon"),
            "resident_mib": self.status_mib("VmRSS"),
            "descriptors": len(list((process / "fd").iterdir())),
            "threads": len(list((process / "task").iterdir())),
        }

    def reads(self):
        """Items answered, by (backend, result)."""
        found = {}
        for line in self._get("/metrics").decode().splitlines():
            if line.startswith("ringfetch_reads_total{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                key = labels["backend"], labels["result"]
                found[key] = found.get(key, 0) + int(float(line.split()[-1]))
        return found


def load_command(daemon, options, seconds):
    return [str(part) for part in [
        ringfetch.RINGFETCH, "--grpc", daemon.grpc, "--json", "load", "--dataset", "data", "--verify", "--warmup-seconds", 0,
        "--connections", options.connections, "--outstanding", options.outstanding, "--batch", options.batch,
        "--seconds", seconds]]


def settled(daemon, is_settled):
    """A sample that satisfies the condition, or the last one when the patience ends. Closed connections take a moment to go,
    and an idle thread of the pool that makes the switches ten seconds."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        sample = daemon.sample()
        if is_settled(sample) or time.monotonic() > deadline:
            return sample
        time.sleep(SAMPLE_SECONDS)


def calm():
    """Whether the number of descriptors has not changed for a second."""
    seen = []

    def is_calm(sample):
        seen.append(sample["descriptors"])
        return len(seen) > 1 / SAMPLE_SECONDS and len(set(seen[-int(1 / SAMPLE_SECONDS):])) == 1

    return is_calm


def look(daemon, begun):
    return {"at": time.monotonic() - begun, "reads": sum(daemon.reads().values()), **daemon.sample()}


@contextlib.contextmanager
def running_load(daemon, options, seconds):
    """A load that has ended, or is ended, when the block is left."""
    with subprocess.Popen(load_command(daemon, options, seconds), stdout=subprocess.PIPE, text=True) as load:
        try:
            yield load
        finally:
            load.kill()


def drive(daemon, options):
    """The whole run: what was requested, made, read, and observed."""
    say("once round, to start every engine")
    with running_load(daemon, options, WARM_UP_SECONDS) as warm_up:
        for backend in ROUND:
            daemon.flip(backend)
            time.sleep(WARM_UP_SECONDS / len(ROUND))
        warm_up.communicate()
    if warm_up.returncode != 0:
        raise RunFailed("the load failed before anything was flipped")
    # Engines that were started stay: their threads and rings belong to the baseline.
    before = settled(daemon, calm())
    before_reads = daemon.reads()

    say(f"{options.flips} flips in {options.seconds} s")
    begun = time.monotonic()
    interval = options.seconds / options.flips
    with running_load(daemon, options, options.seconds + TAIL_SECONDS) as load:
        flips, samples, looking = [], [], []
        for number, backend in enumerate(itertools.islice(itertools.cycle(ROUND), options.flips)):
            due = begun + (number + 0.5) * interval
            while True:
                samples.append(look(daemon, begun))
                if time.monotonic() >= due:
                    break
                time.sleep(max(0.0, min(SAMPLE_SECONDS, due - time.monotonic())))
            if load.poll() is not None:
                raise RunFailed(f"the load ended before flip {number + 1}: {load.communicate()[0]}")
            looking.append(daemon.show())
            at = time.monotonic() - begun
            flips.append({"at": at, "backend": backend, "seconds": daemon.flip(backend)})
        samples.append(look(daemon, begun))
        report, _ = load.communicate()
    if not report:
        raise RunFailed(f"the load ended with {load.returncode} and without a report")
    after = settled(daemon, lambda now: all(now[what] <= before[what] for what in ("descriptors", "threads")))
    after_reads = daemon.reads()
    by = {key: after_reads[key] - before_reads.get(key, 0) for key in after_reads}
    return {
        "asked": options.flips,
        "flips": flips,
        "samples": samples,
        "before": before,
        "after": after,
        "looking_seconds": sorted(looking)[len(looking) // 2],
        "load": json.loads(report),
        "reads_by_backend": {backend: by[backend, "ok"] for backend, result in sorted(by) if result == "ok"},
        "daemon_errors": sum(count for (_, result), count in by.items() if result != "ok"),
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=60, help="that they are spread over (default: 60)")
    parser.add_argument("--size", default="256MiB", help="of the file that is read (default: 256MiB)")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--outstanding", type=int, default=16, help="requests in flight (default: 16)")
    parser.add_argument("--batch", default="64", help="reads a request (default: 64)")
    parser.add_argument("--debug", action="store_true", help="the debug build that is there: shows that it works, not what it costs")
    parser.add_argument("--no-build", action="store_true", help="the release build that is there")
    parser.add_argument("--out", type=pathlib.Path, help="default: bench/results; with --debug: target/flips")
    options = parser.parse_args()
    if options.flips < len(ROUND) or options.seconds < 1:
        parser.error(f"--flips: at least {len(ROUND)}, once round; --seconds: at least 1")
    return options


def main():
    options = parse()
    target = ringfetch.TARGET.parent
    if options.debug:
        ringfetch.RINGFETCHD, ringfetch.RINGFETCH = target / "debug" / "ringfetchd", target / "debug" / "ringfetch"
    elif not options.no_build:
        ringfetch.build()
    exit_on_sigterm()
    out = options.out or (target / "flips" if options.debug else ringfetch.ROOT / "bench" / "results")
    try:
        with tempfile.TemporaryDirectory(dir=target, prefix="flips-") as directory:
            path = pathlib.Path(directory) / "data.bin"
            run([ringfetch.RINGFETCH, "dataset", "make", "blocks", path, "--size", options.size])
            daemon = Flipped(path, {"backend": "uring", "on_unavailable": "fail"})
            daemon.start(pathlib.Path(directory))
            try:
                result = drive(daemon, options)
            finally:
                daemon.stop()
            facts = machine.facts(path)
    except RunFailed as failure:
        sys.exit(f"flips: {failure}")
    except KeyboardInterrupt:
        sys.exit("flips: interrupted")
    command = f"bench/flips.py --flips {options.flips} --seconds {options.seconds}" + " --debug" * options.debug
    report = flips_report.Report(result, {**facts, "command": command, "build": "debug" if options.debug else "release"})
    out.mkdir(parents=True, exist_ok=True)
    (out / "flips.md").write_text(report.markdown())
    (out / "flips.json").write_text(json.dumps(report.data(), indent=1) + "\n")
    (out / "flips.svg").write_text(report.plot())
    print(report.markdown())
    return 0 if report.held() else 1


if __name__ == "__main__":
    sys.exit(main())
