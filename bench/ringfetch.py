"""Ringfetch's own sides: the daemon, the load generator that drives it, and the engine without a network."""

import copy
import hashlib
import json
import os
import pathlib
import re
import secrets
import ssl
import subprocess
import sys
import time
import urllib.request

import link
from processes import RunFailed, Server, metrics, on_cpu_seconds, run, total

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute() / "release"
RINGFETCHD, RINGFETCH = TARGET / "ringfetchd", TARGET / "ringfetch"
ENGINE_LOAD, STOCK_SERVER = TARGET / "examples" / "engine_load", TARGET / "examples" / "stock_server"
SCORE_MAPPING = TARGET / "examples" / "score_mapping"

BLOCKS = {"kind": "blocks", "block_bytes": 4096, "partial_tail": "ignore"}


# Elements per vector, if the file is read as vectors of f32.
DIM = 768


def size_bytes(text):
    """Bytes of 10GiB, 512MiB or a number."""
    units = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
    for unit, bits in units.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * 2**bits)
    return int(text)


def use_released():
    """Measures the programs of release/compile instead of cargo's."""
    global RINGFETCHD, RINGFETCH
    found = list((TARGET.parent / "optimized").glob("*/dist/ringfetchd"))
    if len(found) != 1:
        raise RunFailed("release/compile has not run here")
    RINGFETCHD, RINGFETCH = found[0], found[0].with_name("ringfetch")


def build(with_examples=True, as_released=False):
    """Builds everything that is measured; `as_released` with release/compile, which takes ten minutes."""
    if as_released:
        if subprocess.run([ROOT / "release" / "compile"], stdout=subprocess.DEVNULL, check=False).returncode != 0:
            sys.exit("release/compile failed; --plain measures what cargo build --release makes")
    else:
        run(["cargo", "build", "--release", "-p", "ringfetch-server", "-p", "ringfetch-cli", "--bins"], cwd=ROOT)
    if not with_examples:
        return
    run(["cargo", "build", "--release", "-p", "ringfetch-engine", "--example", "engine_load", "--example", "score_mapping"], cwd=ROOT)
    run(["cargo", "build", "--release", "-p", "ringfetch-cli", "--example", "stock_server"], cwd=ROOT)


class Daemon(Server):
    """A ringfetchd on ports chosen by the kernel, on loopback unless `host` is set; with `tls`, all of them use TLS with a
    certificate of its own; with `principals`, only for clients with a token; with `access_log`, it logs a line per request to
    a file. Refuses to be measured on another backend than requested."""

    host = "127.0.0.1"

    def __init__(self, path, engine, dataset=None, tls=False, principals=False, access_log=False):
        self.path, self.engine, self.tls, self.principals, self.access_log = path, engine, tls, principals, access_log
        self.dataset = dataset or BLOCKS
        self.binary = RINGFETCHD
        # The authority for clients to trust, and the token file; None without them.
        self.ca = self.token_file = None

    def with_binary(self, binary):
        """The same with another ringfetchd."""
        other = copy.copy(self)
        other.binary = binary
        return other

    def describe(self):
        dataset = "blocks of 4096 bytes" if self.dataset is BLOCKS else json.dumps(self.dataset)
        variants = {"TLS": self.tls, "principals": self.principals, "access log": self.access_log}
        return ", ".join([f"ringfetchd, engine {json.dumps(self.engine)}, {dataset}", *(name for name, is_on in variants.items() if is_on)])

    def start(self, directory):
        loopback = {"listen": "127.0.0.1:0"}
        tls = self._certificate(directory) if self.tls else {}
        access = self._principals(directory) if self.principals else {} if self.host == "127.0.0.1" else {"anonymous": "everybody"}
        self.log_file = directory / "access.log"
        access_log = {"access_log": {"path": str(self.log_file)}} if self.access_log else {}
        # JSON is valid YAML.
        (directory / "ringfetchd.yaml").write_text(json.dumps({
            "grpc": {"listen": f"{self.host}:0"}, "http": loopback, "admin": loopback, "log": {"filter": "warn"}, "engine": self.engine,
            "datasets": self._datasets(), **tls, **access_log,
            **({"access": access} if access else {}),
        }))
        self.file = directory / "addresses.json"
        self.launch([self.binary, "--config", directory / "ringfetchd.yaml", "--addresses-file", self.file],
                    directory / "log")
        addresses = json.loads(self.file.read_text())
        scheme = "https" if self.tls else "http"
        self.grpc, self.http = (f"{scheme}://{addresses[name]}" for name in ("grpc", "http"))
        # Whoever starts it stops it only if it has started.
        try:
            self._check_read_path()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _datasets(self):
        return [{"name": "data", "path": str(self.path), **self.dataset}]

    def _certificate(self, directory):
        """The section `tls` with a new self-signed certificate: ECDSA P-256, which certificate authorities issue today."""
        self.ca, key = directory / "certificate.pem", directory / "key.pem"
        run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2,
             "-subj", "/CN=ringfetch", "-addext", f"subjectAltName=IP:{self.host}", "-addext", "basicConstraints=critical,CA:FALSE",
             "-keyout", key, "-out", self.ca])
        return {"tls": {"certificate": str(self.ca), "key": str(key)}}

    def _principals(self, directory):
        """The section `access` with a file of one principal that may do everything."""
        self.token_file, token = directory / "token", secrets.token_hex(32)
        self.token_file.write_text(token)
        (directory / "principals").write_text(f"bench sha256:{hashlib.sha256(token.encode()).hexdigest()} *,@metrics\n")
        return {"principals": str(directory / "principals")}

    def is_ready(self):
        return self.file.exists()

    def client_arguments(self):
        """The arguments that give `ringfetch` access."""
        return [*(["--ca", self.ca] if self.ca else []), *(["--token-file", self.token_file] if self.token_file else [])]

    def _get(self, path):
        trusted = ssl.create_default_context(cafile=self.ca) if self.tls else None
        headers = {"Authorization": f"Bearer {self.token_file.read_text()}"} if self.token_file else {}
        request = urllib.request.Request(f"{self.http}{path}", headers=headers)
        try:
            return urllib.request.urlopen(request, context=trusted, timeout=60).read()
        except OSError as error:
            raise RunFailed(f"GET {request.full_url}: {error}") from None

    def _check_read_path(self):
        served = json.loads(self._get("/v1/status"))["datasets"][0]
        wanted = self.engine["backend"]
        # A mapping is never direct; everything else here is.
        if served["backend"] != wanted or served["direct_io"] != (wanted != "mmap"):
            raise RunFailed(f"asked for {wanted}, got {json.dumps(served)}")

    def stop(self):
        if super().stop() != 0:
            raise RunFailed(f"ringfetchd ended with {self.process.returncode}:\n{self.log_path.read_text()}")

    def status_mib(self, field):
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{field}:\s+(\d+) kB", text).group(1)) / 1024

    def _metric(self, name):
        series = metrics(self._get("/metrics").decode())
        # Another name would be 0, and what is checked by it always right.
        if not any(key.partition("{")[0] == name for key in series):
            raise RunFailed(f"/metrics has no {name}")
        return total(series, name)

    def reads(self):
        """Reads answered since its start."""
        return self._metric("ringfetch_reads_total")

    def check_access_log(self):
        """Checks that every request was logged, since that is what is measured."""
        dropped = self._metric("ringfetch_access_log_dropped_total")
        if dropped or not self.log_file.stat().st_size:
            raise RunFailed(f"the access log has {self.log_file.stat().st_size} bytes, and {dropped:.0f} lines were dropped")

    def figures(self):
        device, asked = self._metric("ringfetch_device_reads_total"), self.reads()
        return {"device_reads_per_read": device / max(asked, 1), "resident_mib": self.status_mib("VmHWM")}


class Demo(Daemon):
    """A daemon that serves the demo's data, which are below `path`."""

    def __init__(self, binary, path, backend, **variant):
        super().__init__(path, {"backend": backend}, **variant)
        self.binary = binary

    def _datasets(self):
        return [
            {"name": "blocks", "kind": "blocks", "path": str(self.path / "blocks.bin"), "block_bytes": 4096},
            {"name": "vectors", "kind": "vectors", "path": str(self.path / "vectors.npy")},
            {"name": "objects", "kind": "objects", "path": str(self.path / "objects")},
        ]


class Load:
    """`ringfetch load`."""

    WARMUP_SECONDS = 0.5

    def __init__(self, *arguments):
        self.arguments = arguments
        # The device whose bytes are counted, and the command prefix that runs the generator at its far end.
        self.device, self.inside = "lo", []

    def describe(self):
        return f"ringfetch load {' '.join(map(str, self.arguments))}"

    def measure(self, server, seconds):
        before = link.sent_and_received(self.device)
        report = json.loads(run([
            *self.inside, RINGFETCH, "--grpc", server.grpc, *(server.client_arguments() if isinstance(server, Daemon) else []), "--json", "load",
            "--dataset", "data", "--seconds", seconds, "--warmup-seconds", self.WARMUP_SECONDS, "--server-pid", server.process.pid, *self.arguments,
        ]))
        if report["errors"]:
            raise RunFailed(f"{report['errors']} errors, the first: {report['first_error']}")
        figures = {}
        if "--score" in self.arguments and not report["megabytes_per_second"]:
            raise RunFailed("no vector of the file has a score: have it made by --make")
        if isinstance(server, Daemon):
            # For the whole run, warm-up included, as the daemon counts reads.
            if server.access_log:
                server.check_access_log()
            figures["wire_bytes"] = (link.sent_and_received(self.device) - before) / max(server.reads(), 1)
        if report.get("open_loop"):
            arrivals = report["open_loop"]
            figures["rate_missed"] = arrivals["missed"] / max(arrivals["arrivals"], 1)
            # From arrival to sending: the generator's own share of the latency.
            figures["late_p99_us"] = (arrivals["lateness_us"] or {}).get("p99")
        return {
            **figures,
            "reads_per_second": report["reads_per_second"],
            "megabytes_per_second": report["megabytes_per_second"],
            "cpu_us": report["server_cpu"]["us_per_read"],
            "client_cpu_us": report["own_cpu"]["us_per_read"],
            # Per request, which is as late as its latest read.
            "p50_us": report["latency_us"]["p50"],
            "p99_us": report["latency_us"]["p99"],
            "p99_of_p50": report["latency_us"]["p99"] / report["latency_us"]["p50"],
            "outstanding": report["outstanding_achieved"],
        }


class ScoreMapping:
    """The arithmetic of scores over a mapping in one process, on one thread: no daemon, no network, no copies."""

    def __init__(self, path, header_bytes, dim, batch):
        self.arguments = [path, header_bytes, dim, batch]

    def describe(self):
        return "score_mapping " + " ".join(["FILE", *map(str, self.arguments[1:])])

    def measure(self, seconds):
        report = json.loads(run([SCORE_MAPPING, *self.arguments, seconds]))
        return {"reads_per_second": report["reads_per_second"], "cpu_us": report["cpu_us_per_read"], "p50_us": None,
                "p99_us": None}


class ThenIdle:
    """Drives the load, then nothing, and measures what the idle server uses."""

    def __init__(self, load, idle_seconds):
        self.load, self.idle_seconds = load, idle_seconds

    def describe(self):
        return f"{self.load.describe()}, then {self.idle_seconds} s of nothing"

    def measure(self, server, seconds):
        figures = self.load.measure(server, seconds)
        # Connections are closed and buffers returned before the clock starts.
        time.sleep(0.5)
        before = on_cpu_seconds(server.process.pid)
        time.sleep(self.idle_seconds)
        idle = (on_cpu_seconds(server.process.pid) - before) / self.idle_seconds
        # Without file mappings: for mmap those are the page cache.
        return {**figures, "idle_cpu_percent": idle * 100, "anonymous_mib": server.status_mib("RssAnon")}


class EngineAlone:
    """The engine without a network: one core, not pinned, like fio."""

    def __init__(self, path, **options):
        self.path, self.options = path, options

    def describe(self):
        return "engine_load --pin false " + " ".join(self._arguments())

    def _arguments(self):
        return [f"--{name.replace('_', '-')} {value}" for name, value in self.options.items()]

    def measure(self, seconds):
        flags = [word for argument in self._arguments() for word in argument.split()]
        report = json.loads(run([ENGINE_LOAD, self.path, "--pin", "false", "--seconds", seconds, *flags]))
        return {
            "reads_per_second": report["reads_per_second"],
            "cpu_us": report["cpu_us_per_read"],
            "p50_us": report["latency_us"]["p50"],
            "p99_us": report["latency_us"]["p99"],
            "device_reads_per_submission": report["device_reads"] / max(report["submissions"], 1),
        }
