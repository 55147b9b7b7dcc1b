"""Ringfetch's peers: fio, nginx, qemu-nbd and a stock tonic server, each tuned for speed as its users would.

A *side* of a row has `describe()` and `measure(seconds)`; figures are reads/s and CPU microseconds per read. A served side is
a server and a driver (`Served`): the CPU is the server's, over all its processes.
"""

import copy
import getpass
import json
import os
import pathlib
import tempfile
import urllib.parse

import link
from processes import RunFailed, Server, free_port, run_counting_cpu

# Latency from before the submission, like ours; fio's default percentiles leave the submission out.
FIO_REPORT = ["--lat_percentiles=1", "--clat_percentiles=0", "--percentile_list=50:99", "--output-format=json"]
BENCH = pathlib.Path(__file__).resolve().parent


class Fio:
    """fio on the same file. Its CPU is the whole cost of its reads, since it has no client. Unpinned, one job.

    fio counts its own thread. If the kernel's workers make the reads, `count_workers` counts the whole process instead,
    including its start (about 0.15 s).
    """

    def __init__(self, path, count_workers=False, **options):
        self.path, self.count_workers = path, count_workers
        self.options = {"rw": "randread", "bs": "4k", "ioengine": "io_uring", "direct": 1, "norandommap": 1,
                        "randrepeat": 0, "time_based": 1, **options}

    def _arguments(self):
        return [f"--{name}={value}" for name, value in self.options.items()]

    def describe(self):
        return "fio " + " ".join(self._arguments())

    def measure(self, seconds):
        command = ["fio", "--name=r", f"--filename={self.path}", f"--runtime={seconds}", *FIO_REPORT,
                   *self._arguments()]
        output, used = run_counting_cpu(command)
        figures = fio_figures(output)
        return {**figures, "cpu_us": used * 1e6 / figures["reads"]} if self.count_workers else figures


def fio_figures(output):
    """Figures of one job (or of a group) from fio's JSON; lines before it are remarks."""
    job = json.loads(output[output.index("{"):])["jobs"][0]
    if job["error"]:
        raise RunFailed(f"fio ended with error {job['error']}")
    read = job["read"]
    if not read["total_ios"]:
        raise RunFailed("fio read nothing")
    percentiles = read["lat_ns"]["percentile"]
    return {
        "reads_per_second": read["iops"],
        # Percent of one CPU: 10 % at 1000 reads/s is 100 us a read.
        "cpu_us": (job["usr_cpu"] + job["sys_cpu"]) * 1e4 / read["iops"],
        "p50_us": percentiles["50.000000"] / 1e3,
        "p99_us": percentiles["99.000000"] / 1e3,
        "reads": read["total_ios"],
    }


class Served:
    """A server for one run, and its driver."""

    def __init__(self, server, driver):
        self.server, self.driver = server, driver

    def describe(self):
        return f"{self.server.describe()}; driven by {self.driver.describe()}"

    def measure(self, seconds):
        with tempfile.TemporaryDirectory(prefix="ringfetch-bench-") as directory:
            self.server.start(pathlib.Path(directory))
            try:
                figures = self.driver.measure(self.server, seconds)
                return {**figures, **self.server.figures()}
            finally:
                self.server.stop()


class OverLink(Served):
    """The same over a 1 Gbit/s link instead of loopback."""

    def describe(self):
        return f"{super().describe()}; over veth, tbf {link.RATE} each way"

    def measure(self, seconds):
        with link.made() as (device, inside):
            server, driver = copy.copy(self.server), copy.copy(self.driver)
            server.host, driver.device, driver.inside = link.OURS, device, inside
            return Served(server, driver).measure(seconds)


class BetterOf:
    """Several sides, one after the other on the same cache; the figures are those of the fastest."""

    def __init__(self, path, temperature, sides):
        self.path, self.temperature, self.sides = path, temperature, sides

    def describe(self):
        return "; ".join(f"{name}: {side.describe()}" for name, side in self.sides.items())

    def measure(self, seconds):
        measured = {}
        for name, side in self.sides.items():
            self.temperature.prepare(self.path)
            measured[name] = side.measure(seconds)
        best = max(measured, key=lambda name: measured[name]["reads_per_second"])
        return {**measured[best], "best": best,
                "of": {name: figures["reads_per_second"] for name, figures in measured.items()}}


NGINX_SETTINGS = {
    "direct": "aio threads; directio 512; output_buffers 2 4k; sendfile off;",
    "sendfile": "sendfile on; tcp_nopush on;",
}


class Nginx(Server):
    """nginx on the file's directory: two workers, no access log, and either threads with direct I/O, or sendfile."""

    def __init__(self, path, how):
        self.path, self.how = path, how
        self.resource = "/" + urllib.parse.quote(path.name)

    def describe(self):
        return f"nginx, 2 workers, 64 threads, {{ {NGINX_SETTINGS[self.how]} }}"

    def start(self, directory):
        self.port = free_port()
        user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
        temporary = " ".join(f"{name}_temp_path {directory}/{name};"
                             for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        (directory / "nginx.conf").write_text(
            f"{user} daemon off; worker_processes 2; pid {directory}/pid; error_log stderr error;\n"
            "thread_pool default threads=64 max_queue=65536;\n"
            "events { worker_connections 1024; }\n"
            f"http {{ access_log off; {temporary} keepalive_requests 1000000000; {NGINX_SETTINGS[self.how]}\n"
            f"  server {{ listen 127.0.0.1:{self.port}; root {json.dumps(str(self.path.parent))}; }} }}\n"
        )
        self.http = f"http://127.0.0.1:{self.port}"
        self.launch(["nginx", "-p", directory, "-c", directory / "nginx.conf", "-e", "stderr"], directory / "log")


class QemuNbd(Server):
    """qemu-nbd with io_uring past the page cache, for several connections."""

    def __init__(self, path):
        self.path = path

    def describe(self):
        return "qemu-nbd --aio=io_uring --cache=none --read-only --shared=8"

    def start(self, directory):
        self.port = free_port()
        # The URI contains the export name; an empty one leaves its path empty.
        self.launch(["qemu-nbd", "--format=raw", "--aio=io_uring", "--cache=none", "--read-only", "--shared=8", "--persistent",
                     "--bind=127.0.0.1", f"--port={self.port}", self.path], directory / "log")
        self.nbd = f"nbd://127.0.0.1:{self.port}/"


class StockTonic(Server):
    """The stock tonic server of crates/cli/examples, with the file's bytes in its memory."""

    def __init__(self, path, binary):
        self.path, self.binary = path, binary

    def describe(self):
        return "stock_server (tonic's generated service, default codec and settings, 2 workers, data in memory)"

    def start(self, directory):
        self.launch([self.binary, self.path], directory / "log")
        self.grpc = f"http://{self.log_path.read_text().split()[0]}"

    def is_ready(self):
        return self.log_path.read_text().endswith("\n")


class FioNbd:
    """fio's nbd engine: several connections with this depth each; with `rate_iops`, this many evenly spaced reads a second
    each."""

    def __init__(self, connections, depth, rate_iops=None):
        self.connections, self.depth = connections, depth
        self.rate = [f"--rate_iops={rate_iops}"] if rate_iops else []

    def describe(self):
        return " ".join([f"fio --ioengine=nbd, {self.connections} connections, depth {self.depth} each", *self.rate])

    def measure(self, server, seconds):
        before = server.cpu_seconds()
        output, client = run_counting_cpu([
            "fio", "--name=r", "--ioengine=nbd", f"--uri={server.nbd}", "--rw=randread", "--bs=4k", "--norandommap=1",
            "--randrepeat=0", "--time_based=1", f"--runtime={seconds}", f"--iodepth={self.depth}",
            f"--numjobs={self.connections}", "--group_reporting", *self.rate, *FIO_REPORT,
        ])
        used = server.cpu_seconds() - before
        figures = fio_figures(output)
        reads = figures["reads"]
        return {**figures, "cpu_us": used * 1e6 / reads, "client_cpu_us": client * 1e6 / reads}


class Wrk:
    """wrk with bench/wrk.lua: 64 connections on 2 threads, the same requests for every server."""

    def __init__(self, arguments, request_bytes, reads_per_request=1, connections=64):
        self.arguments, self.connections = arguments, connections
        self.request_bytes, self.reads_per_request = request_bytes, reads_per_request

    def describe(self):
        return f"wrk -t2 -c{self.connections} -s bench/wrk.lua -- {' '.join(map(str, self.arguments))}"

    def measure(self, server, seconds):
        before = server.cpu_seconds()
        output, client = run_counting_cpu([
            "wrk", "-t2", f"-c{self.connections}", f"-d{seconds}s", "-s", BENCH / "wrk.lua", server.http, "--",
            *self.arguments,
        ])
        used = server.cpu_seconds() - before
        result = json.loads(output.splitlines()[-1])
        if result["errors"]:
            raise RunFailed(f"wrk met {result['errors']} errors:\n{output}")
        reads = result["requests"] * self.reads_per_request
        if not reads:
            raise RunFailed(f"wrk had no answer:\n{output}")
        if result["bytes"] < result["requests"] * self.request_bytes:
            raise RunFailed(f"answers of {result['bytes'] / result['requests']:.0f} bytes where {self.request_bytes} "
                            "were requested")
        return {
            "reads_per_second": reads / result["seconds"],
            "megabytes_per_second": result["requests"] * self.request_bytes / result["seconds"] / 1e6,
            "cpu_us": used * 1e6 / reads,
            "client_cpu_us": client * 1e6 / reads,
            "p50_us": result["p50_us"],
            "p99_us": result["p99_us"],
        }
