#!/usr/bin/env python3
"""Ringfetch beside its peers: alternating runs on the same file, ratios and CPU a read.

    bench/compare.py --file /data/10g.bin                 every row of the suite
    bench/compare.py --file /data/10g.bin --rows first    the first figures only
    bench/compare.py --make /data/10g.bin --size 10GiB    makes the file first (pattern data, verifiable)

Needs root (drops the page cache), fio, and the release build; docs/BENCHMARKING.md says what each row means. Writes
results.md, results.json and one SVG a row to --out. Cold rows refuse tmpfs and a file that fits the page cache.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
RINGFETCHD, RINGFETCH = TARGET / "ringfetchd", TARGET / "ringfetch"
ENGINE_LOAD = TARGET / "examples" / "engine_load"


def say(text):
    """Progress goes to stderr: stdout is the table's."""
    print(text, file=sys.stderr, flush=True)


def run(command, **options):
    """Runs a command to its end and returns its stdout; its stderr is shown when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nfailed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def drop_caches():
    """Cold means cold: every clean page is dropped, or the run says that it could not be."""
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n")


class Fio:
    """fio on the same file: the ceiling. Result: reads/s and its own CPU (user + system) a read, in microseconds."""

    def __init__(self, path, **options):
        self.path = path
        self.options = {
            "rw": "randread", "bs": "4k", "ioengine": "io_uring", "direct": 1, "norandommap": 1, "randrepeat": 0,
            "time_based": 1, **options,
        }

    def describe(self):
        return "fio " + " ".join(f"--{name}={value}" for name, value in self.options.items())

    def measure(self, seconds):
        options = [f"--{name}={value}" for name, value in self.options.items()]
        command = ["fio", "--name=r", f"--filename={self.path}", f"--runtime={seconds}", "--output-format=json",
                   "--group_reporting", *options]
        job = json.loads(run(command))["jobs"][0]
        iops = job["read"]["iops"]
        # usr_cpu and sys_cpu are percent of one CPU: 10 % at 1000 reads/s is 100 us a read.
        return {
            "reads_per_second": iops,
            "cpu_us": (job["usr_cpu"] + job["sys_cpu"]) * 1e4 / iops,
            "p50_us": job["read"]["clat_ns"]["percentile"]["50.000000"] / 1e3,
            "p99_us": job["read"]["clat_ns"]["percentile"]["99.000000"] / 1e3,
        }


class Daemon:
    """A ringfetchd of its own for one run, on ports of the kernel's choice."""

    def __init__(self, path, engine, kind="kind: blocks, block_bytes: 4096, partial_tail: ignore"):
        self.path, self.engine, self.kind = path, engine, kind

    def __enter__(self):
        self.directory = tempfile.TemporaryDirectory()
        base = pathlib.Path(self.directory.name)
        # JSON is YAML.
        (base / "ringfetchd.yaml").write_text(
            f"grpc: {{listen: '127.0.0.1:0'}}\nhttp: {{listen: '127.0.0.1:0'}}\nadmin: {{listen: '127.0.0.1:0'}}\n"
            f"log: {{filter: warn}}\nengine: {json.dumps(self.engine)}\n"
            f"datasets: [{{name: data, path: '{self.path}', {self.kind}}}]\n"
        )
        addresses = base / "addresses.json"
        self.log = open(base / "log", "w+")
        self.process = subprocess.Popen(
            [RINGFETCHD, "--config", base / "ringfetchd.yaml", "--addresses-file", addresses],
            stdout=self.log, stderr=self.log,
        )
        deadline = time.monotonic() + 30
        while not addresses.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                sys.exit(f"ringfetchd did not start:\n{self.log.read()}")
            time.sleep(0.02)
        self.addresses = json.loads(addresses.read_text())
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(timeout=30) != 0:
            self.log.seek(0)
            sys.exit(f"ringfetchd ended with {self.process.returncode}:\n{self.log.read()}")
        self.directory.cleanup()

    def resident_bytes(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024

    def metric(self, name):
        page = urllib.request.urlopen(f"http://{self.addresses['http']}/metrics").read().decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"{name}[ {{]", line))


class Ringfetch:
    """The daemon under `ringfetch load`. Result: reads/s and the *server's* CPU a read, in microseconds."""

    def __init__(self, path, engine, load, kind=None, cold=True, verify=False):
        self.path, self.engine, self.load, self.cold = path, engine, load, cold
        self.options = {} if kind is None else {"kind": kind}
        self.verify = verify

    def describe(self):
        return f"engine {json.dumps(self.engine)}, ringfetch load {' '.join(self.load)}"

    def measure(self, seconds):
        if self.cold:
            drop_caches()
        with Daemon(self.path, self.engine, **self.options) as daemon:
            command = [RINGFETCH, "--grpc", f"http://{daemon.addresses['grpc']}", "--json", "load", "--dataset", "data",
                       "--seconds", seconds, "--warmup-seconds", "0.5", "--server-pid", daemon.process.pid, *self.load]
            report = json.loads(run(command))
            device, asked = daemon.metric("ringfetch_device_reads_total"), daemon.metric("ringfetch_reads_total")
            return {
                "reads_per_second": report["reads_per_second"],
                "cpu_us": report["server_cpu_us_per_read"],
                "client_cpu_us": report["cpu_us_per_read"],
                "p50_us": report["latency_us"]["p50"],
                "p99_us": report["latency_us"]["p99"],
                "device_reads_per_read": device / max(asked, 1),
                "resident_mib": daemon.resident_bytes() / 2**20,
            }


class EngineAlone:
    """The engine without a network, on one core."""

    def __init__(self, path, backend, batch, outstanding):
        self.arguments = [path, backend, batch, outstanding]

    def describe(self):
        return "engine_load " + " ".join(map(str, self.arguments[1:]))

    def measure(self, seconds):
        line = run([ENGINE_LOAD, *self.arguments, seconds])
        figures = re.search(r": (\d+) reads/s, ([\d.]+) us CPU a read", line)
        return {"reads_per_second": float(figures.group(1)), "cpu_us": float(figures.group(2))}


def rows(path):
    """Every row: what is measured, what it is held against, and the targets as (figure, relation, ratio)."""
    uring, mmap = {"backend": "uring"}, {"backend": "mmap", "mmap": {"threads": 2}}
    one_thread = {"backend": "mmap", "mmap": {"threads": 1}}
    plain = {"backend": "mmap", "mmap": {"threads": 1, "announce": False}}
    # 16 requests of 64 reads: 1024 reads in flight.
    batches = ["--batch", "64", "--outstanding", "16", "--connections", "4"]
    fio64 = Fio(path, iodepth=64)
    return {
        "grpc-64": {
            "title": "gRPC FetchBlocks, 64 x 4 KiB a call, uring, cold, direct",
            "set": "first",
            "subject": Ringfetch(path, uring, batches),
            "peer": fio64,
            "targets": [("reads_per_second", ">=", 0.85)],
        },
        "mmap-announced": {
            "title": "mmap, one thread, cold: announced batches against plain faults (gRPC, 64 a call)",
            "set": "first",
            "subject": Ringfetch(path, one_thread, batches),
            "peer": Ringfetch(path, plain, batches),
            "targets": [("reads_per_second", ">=", 3.0)],
        },
        "engine-64": {
            "title": "engine alone, depth 64, against fio at the same depth",
            "subject": EngineAlone(path, "uring", 1, 64),
            "peer": fio64,
            "targets": [("reads_per_second", ">=", 0.98), ("cpu_us", "<=", 0.75)],
        },
        "engine-256": {
            "title": "engine alone, 256 outstanding, against fio at depth 256",
            "subject": EngineAlone(path, "uring", 1, 256),
            "peer": Fio(path, iodepth=256),
            "targets": [("reads_per_second", ">=", 0.98), ("cpu_us", "<=", 0.75)],
        },
        "grpc-64-cpu": {
            "title": "gRPC FetchBlocks, 64 a call: the server's CPU a read",
            "subject": Ringfetch(path, uring, batches),
            "peer": fio64,
            "targets": [("reads_per_second", ">=", 0.97), ("cpu_us", "<=", 0.75)],
        },
        "stream": {
            "title": "gRPC FetchStream, single reads pipelined (256 outstanding)",
            "subject": Ringfetch(path, uring, ["--batch", "1", "--outstanding", "256", "--connections", "4",
                                               "--transport", "stream"]),
            "peer": fio64,
            "targets": [("reads_per_second", ">=", 0.85), ("cpu_us", "<=", 1.6)],
        },
        "mmap-cold": {
            "title": "mmap, 2 threads, cold, gRPC 64 a call",
            "subject": Ringfetch(path, mmap, batches),
            "peer": fio64,
            "targets": [("reads_per_second", ">=", 0.90)],
        },
        "vectors-3k": {
            "title": "vectors of 3072 bytes, 64 a call, uring, cold, direct",
            "subject": Ringfetch(path, uring, batches, kind="kind: vectors, layout: raw, dim: 768, dtype: f32"),
            "peer": Fio(path, iodepth=64, bs="3k"),
            "targets": [("reads_per_second", ">=", 0.95)],
        },
    }


def measure_row(name, row, pairs, seconds):
    """Alternates A B, B A, ... so that drift of the machine falls on both alike."""
    results = {"subject": [], "peer": []}
    for pair in range(pairs):
        order = ["subject", "peer"] if pair % 2 == 0 else ["peer", "subject"]
        for side in order:
            drop_caches()
            results[side].append(row[side].measure(seconds))
        subject, peer = results["subject"][-1], results["peer"][-1]
        say(f"{name:16} pair {pair + 1}/{pairs}: {subject['reads_per_second']:9.0f} / "
            f"{peer['reads_per_second']:9.0f} reads/s, {subject['cpu_us']:6.2f} / {peer['cpu_us']:6.2f} us")
    return results


def ratios(results, figure):
    """Ratio of each pair: the two runs of a pair stand next to each other in time."""
    return [a[figure] / b[figure] for a, b in zip(results["subject"], results["peer"], strict=True)]


def verdict(results, targets):
    cells = []
    for figure, relation, bound in targets:
        ratio = statistics.median(ratios(results, figure))
        met = ratio >= bound if relation == ">=" else ratio <= bound
        what = "reads/s" if figure == "reads_per_second" else figure.replace("_us", "")
        cells.append(f"{what} {ratio:.2f}x ({'met' if met else 'NOT met'}: {relation} {bound}x)")
    return "; ".join(cells)


def machine(path):
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    fs = run(["stat", "-f", "-c", "%T", path]).strip()
    commit = run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip()
    return {
        "date": time.strftime("%Y-%m-%d"), "commit": commit, "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)), "cpu": cpu.group(1) if cpu else platform.machine(), "file_system": fs,
        "file_gib": round(os.path.getsize(path) / 2**30, 2), "fio": run(["fio", "--version"]).strip(),
    }


def check_cold(path):
    fs = run(["stat", "-f", "-c", "%T", path]).strip()
    if fs in ("tmpfs", "ramfs"):
        sys.exit(f"--file: {path} is on {fs}: a cold read there measures memory. Put it on a disk.")
    available = int(re.search(r"MemAvailable:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1)) * 1024
    if os.path.getsize(path) < 2 << 30:
        sys.exit(f"--file: {path} is below 2 GiB: too small for cold figures. Make one with --make.")
    if os.path.getsize(path) < available:
        say("note: the file would fit the page cache in time; caches are dropped before every run, and runs are short")


def bar_chart(row, results, out):
    """Median reads/s and CPU a read of both sides, as an SVG anyone can open."""
    groups = [("reads/s", "reads_per_second"), ("CPU us/read", "cpu_us")]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {90 * len(groups) + 50}" '
             'font-family="sans-serif" font-size="13" role="img">',
             f'<title>{row["title"]}</title><rect width="100%" height="100%" fill="#fff"/>',
             f'<text x="10" y="22" font-weight="bold">{row["title"]}</text>']
    top = 40
    for label, figure in groups:
        values = {side: statistics.median(one[figure] for one in results[side]) for side in ("subject", "peer")}
        most = max(values.values())
        parts.append(f'<text x="10" y="{top + 12}">{label}</text>')
        for index, (side, colour) in enumerate((("subject", "#2563eb"), ("peer", "#9ca3af"))):
            y = top + 20 + index * 26
            width = 380 * values[side] / most
            parts.append(f'<rect x="110" y="{y}" width="{width:.0f}" height="20" fill="{colour}"/>')
            parts.append(f'<text x="10" y="{y + 15}">{"ringfetch" if side == "subject" else "peer"}</text>')
            parts.append(f'<text x="{115 + width:.0f}" y="{y + 15}">{values[side]:,.1f}</text>')
        top += 90
    parts.append("</svg>")
    out.write_text("\n".join(parts) + "\n")


def table(facts, measured, pairs, seconds, command):
    lines = [
        f"Measured {facts['date']} at commit {facts['commit']}: {facts['cpus']} CPUs ({facts['cpu']}), kernel {facts['kernel']}, "
        f"{facts['file_system']}, {facts['file_gib']} GiB, {facts['fio']}. {pairs} alternating pairs of {seconds} s, medians; "
        "the ratio is the median of the pairs' ratios.",
        "", f"Command: `{command}`", "",
        "| row | reads/s | peer reads/s | CPU us/read | peer CPU | p99 us | targets |", "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row, results in measured:
        def median(side, figure):
            values = [one[figure] for one in results[side] if figure in one]
            return statistics.median(values) if values else float("nan")
        lines.append(
            f"| {row['title']} | {median('subject', 'reads_per_second'):,.0f} | {median('peer', 'reads_per_second'):,.0f} "
            f"| {median('subject', 'cpu_us'):.2f} | {median('peer', 'cpu_us'):.2f} | {median('subject', 'p99_us'):,.0f} "
            f"| {verdict(results, row['targets'])} |"
        )
    lines += ["", "What ran:", ""]
    for row, _ in measured:
        lines.append(f"- {row['title']}: {row['subject'].describe()}; peer: {row['peer'].describe()}")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=pathlib.Path, help="what is read: at least 2 GiB on the device in question")
    parser.add_argument("--make", type=pathlib.Path, help="make this file first, and read it")
    parser.add_argument("--size", default="10GiB")
    parser.add_argument("--rows", default="all", help="all, first, or names with commas between them")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("the page cache cannot be dropped without root: run as root, or every cold figure would be a guess")
    if shutil.which("fio") is None:
        sys.exit("fio is missing: install it (Debian: apt-get install fio)")
    run(["cargo", "build", "--release", "--workspace"], cwd=ROOT)
    run(["cargo", "build", "--release", "-p", "ringfetch-engine", "--example", "engine_load"], cwd=ROOT)
    path = options.make or options.file or sys.exit("--file or --make: name the file to read")
    if options.make and not path.exists():
        run([RINGFETCH, "dataset", "make", "blocks", path, "--size", options.size])
    path = path.resolve()
    check_cold(path)
    every = rows(path)
    chosen = [name for name, row in every.items()
              if options.rows == "all" or row.get("set") == options.rows or name in options.rows.split(",")]
    if not chosen:
        sys.exit(f"--rows: none of {', '.join(every)} is called {options.rows!r}")
    measured = [(every[name], measure_row(name, every[name], options.pairs, options.seconds)) for name in chosen]
    facts = machine(path)
    options.out.mkdir(parents=True, exist_ok=True)
    command = f"bench/compare.py --file {path.name} --rows {options.rows} --pairs {options.pairs} --seconds {options.seconds}"
    text = table(facts, measured, options.pairs, options.seconds, command)
    (options.out / "results.md").write_text(text)
    (options.out / "results.json").write_text(json.dumps(
        {"machine": facts, "command": command, "rows": dict(zip(chosen, (results for _, results in measured), strict=True))},
        indent=1) + "\n")
    for name, (row, results) in zip(chosen, measured, strict=True):
        bar_chart(row, results, options.out / f"{name}.svg")
    print(text)


if __name__ == "__main__":
    main()
