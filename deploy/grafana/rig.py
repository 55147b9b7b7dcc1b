"""A real daemon per backend, a real Prometheus with the files of deploy/prometheus, and load, for `test`.
Everything listens on loopback, on free ports, and uses one scratch directory."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from processes import Server, free_port, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PROFILE = os.environ.get("RINGFETCH_PROFILE", "release")
DAEMON, CLI = (TARGET / PROFILE / name for name in ("ringfetchd", "ringfetch"))


def get(url, body=None):
    """Status and body, whatever the status. With a body, which becomes JSON: POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"} if data else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


TOKEN = "reader's"


class Daemon(Server):
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
        self.addresses = scratch / f"{name}.addresses"
        self.launch([DAEMON, "--config", self.config, "--addresses-file", self.addresses], scratch / f"{name}.log")
        self.ports = json.loads(self.addresses.read_text())

    def is_ready(self):
        return self.addresses.exists()

    def url(self, transport):
        return f"http://{self.ports[transport]}"

    def flip(self, backend):
        """Changes the backend in the configuration, and reloads."""
        config = json.loads(self.config.read_text())
        config["engine"]["backend"] = backend
        self.config.write_text(json.dumps(config))
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self._runs(backend), f"{self.name} runs on {backend}")
        self.backend = backend

    def _runs(self, backend):
        return f'ringfetch_backend_info{{backend="{backend}"' in get(f"{self.url('http')}/metrics")[1].decode()

    def load(self, dataset, *options):
        """Starts `ringfetch load` with every byte checked."""
        load = Load()
        load.launch([CLI, "--grpc", self.url("grpc"), "load", "--dataset", dataset, "--http", self.url("http"), "--verify", *options],
                    self.log_path.with_name(f"{self.name}-load-{time.monotonic_ns()}.log"))
        return load


class Load(Server):
    """`ringfetch load`."""

    def is_ready(self):
        return True


class Prometheus(Server):
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
        address = f"127.0.0.1:{free_port()}"
        # Itself too, as installations do: another program with `up` and `process_*`.
        text += f'  - job_name: prometheus\n    static_configs: [{{targets: ["{address}"]}}]\n'
        config = scratch / "prometheus.yml"
        config.write_text(text)
        self.url = f"http://{address}"
        self.launch(["prometheus", f"--config.file={config}", f"--storage.tsdb.path={scratch}/tsdb",
                     f"--web.listen-address={address}"], scratch / "prometheus.log")

    def is_ready(self):
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
