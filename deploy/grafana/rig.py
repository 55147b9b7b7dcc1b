"""A real daemon per backend, a real Prometheus with the files of deploy/prometheus, and load, for `test`.
Everything listens on loopback, on free ports, and uses one scratch directory."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PROFILE = os.environ.get("RINGFETCH_PROFILE", "release")
DAEMON, CLI = (TARGET / PROFILE / name for name in ("ringfetchd", "ringfetch"))
START_TIMEOUT_S = 60


def until(condition, what, timeout_s=START_TIMEOUT_S):
    """The first true result of `condition`, which is polled until the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.1)
    return answer


def get(url, body=None):
    """Status and body, whatever the status. With a body, which becomes JSON: POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"} if data else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Process:
    """A program with its log in a file, ended by SIGTERM."""

    def __init__(self, log, *command):
        self.log = log
        with open(log, "wb") as out:
            self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out,
                                            stderr=subprocess.STDOUT)

    def text(self):
        return self.log.read_text(errors="replace")

    def alive(self):
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.log.stem} ended with {self.process.returncode}:\n{self.text()[-4000:]}")
        return True

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


TOKEN = "reader's"


class Daemon(Process):
    """ringfetchd with one backend. It must not fall back: the test would measure another backend than it says."""

    def __init__(self, scratch, name, backend):
        self.config, data = scratch / f"{name}.json", scratch / "data"
        listen = {"listen": "127.0.0.1:0"}
        # JSON is valid YAML.
        self.config.write_text(json.dumps({
            "grpc": listen, "http": listen, "admin": listen, "log": {"format": "json"},
            "engine": {"backend": backend, "on_unavailable": "fail"},
            # One load has a token; Prometheus and the other load have none.
            "access": {"principals": str(scratch / "principals"), "anonymous": "everybody"},
            "datasets": [
                {"name": "blocks", "kind": "blocks", "path": str(data / "blocks.bin"), "block_bytes": "4KiB"},
                {"name": "vectors", "kind": "vectors", "path": str(data / "vectors.npy")}]}))
        self.name, self.backend = name, backend
        super().__init__(scratch / f"{name}.log", DAEMON, "--config", self.config)
        self.ports = until(self._ports, f"{name} listens")

    def _ports(self):
        self.alive()
        events = [json.loads(line) for line in self.text().splitlines() if line.startswith("{") and line.endswith("}")]
        ports = {event["transport"]: event["address"] for event in events if event.get("message") == "listening"}
        return ports if {"grpc", "http", "admin"} <= ports.keys() else None

    def url(self, transport):
        return f"http://{self.ports[transport]}"

    def flip(self, backend):
        """Changes the backend in the configuration, and reloads."""
        config = json.loads(self.config.read_text())
        config["engine"]["backend"] = backend
        self.config.write_text(json.dumps(config))
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.alive() and self._runs(backend), f"{self.name} runs on {backend}")
        self.backend = backend

    def _runs(self, backend):
        return f'ringfetch_backend_info{{backend="{backend}"' in get(f"{self.url('http')}/metrics")[1].decode()

    def load(self, dataset, *options):
        """Starts `ringfetch load` with every byte checked."""
        log = self.log.with_name(f"{self.name}-load-{time.monotonic_ns()}.log")
        return Process(log, CLI, "--grpc", self.url("grpc"), "load", "--dataset", dataset, "--http", self.url("http"),
                       "--verify", *options)


class Prometheus(Process):
    """Prometheus as configured by deploy/prometheus/prometheus.yml, except for targets, paths and intervals."""

    def __init__(self, scratch, daemons, interval="1s"):
        text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
        targets = "\n".join(f'      - targets: ["{daemon.ports["http"]}"]\n        labels: {{instance: {daemon.name}}}'
                            for daemon in daemons)
        text, replaced = re.subn(r'      - targets: \["ringfetchd:7411"\]', targets, text)
        if replaced != 1:
            raise RuntimeError("deploy/prometheus/prometheus.yml has no target ringfetchd:7411: fix rig.py")
        text = text.replace("/etc/prometheus/", f"{ROOT}/deploy/prometheus/")
        text = re.sub(r"_interval: \S+", f"_interval: {interval}", text)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        # Itself too, as installations do: another program with `up` and `process_*`.
        text += f'  - job_name: prometheus\n    static_configs: [{{targets: ["{address}"]}}]\n'
        config = scratch / "prometheus.yml"
        config.write_text(text)
        self.url = f"http://{address}"
        super().__init__(scratch / "prometheus.log", "prometheus", f"--config.file={config}",
                         f"--storage.tsdb.path={scratch}/tsdb", f"--web.listen-address={address}")
        until(self._ready, "Prometheus is ready")

    def _ready(self):
        self.alive()
        with contextlib.suppress(OSError):
            return get(f"{self.url}/-/ready")[0] == 200
        return False

    def api(self, path, **parameters):
        """The `data` of a response of the HTTP API. An error is the query's."""
        _, body = get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}")
        answer = json.loads(body)
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return answer["data"]

    def instant(self, query, at):
        """(labels, value) of each series."""
        result = self.api("query", query=query, time=at)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def range(self, query, start, end, step):
        """(labels, [(time, value)]) of each series."""
        result = self.api("query_range", query=query, start=start, end=end, step=step)["result"]
        return [(series["metric"], [(float(at), float(value)) for at, value in series["values"]]) for series in result]


@contextlib.contextmanager
def scratch():
    """A directory for data on a disk that supports O_DIRECT, removed afterwards."""
    if not (DAEMON.exists() and CLI.exists()):
        raise SystemExit(f"rig: {DAEMON} or {CLI} is missing: cargo build --release --workspace")
    with tempfile.TemporaryDirectory(dir=TARGET, prefix="grafana-") as name:
        path = pathlib.Path(name)
        data = path / "data"
        data.mkdir()
        for command in (["blocks", "--size", "64MiB", data / "blocks.bin"],
                        ["vectors", "--count", "65536", "--dim", "128", data / "vectors.npy"]):
            subprocess.run([CLI, "dataset", "make", *command], check=True, stdout=subprocess.DEVNULL)
        (path / "token").write_text(TOKEN)
        (path / "principals").write_text(f"reader sha256:{hashlib.sha256(TOKEN.encode()).hexdigest()} * weight=2\n")
        yield path
