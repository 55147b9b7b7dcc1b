"""The daemon of a soak and its surroundings: configuration, cgroup, /proc and /metrics."""

import collections
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import ssl
import subprocess
import threading
import time

from processes import RunFailed
from soak_access import Credential, Principals
from soak_wire import MESSAGES, Broken, Connection, Late

ADMIN, ADMIN_WAIT_S = "/ringfetch.v1.AdminService/", 20.0
BACKENDS = ("auto", "mmap", "pread", "uring")
MIB = 1 << 20
BUDGET_BYTES, REQUEST_MEMORY_BYTES, CONNECTIONS = 32 * MIB, 16 * MIB, 256
# docs/OPERATIONS.md: 64 MiB + engine.memory_budget + 3 x limits.request_memory + 24 KiB x connections (with TLS: 32 KiB).
FIXED_BYTES, CONNECTION_BYTES, TLS_CONNECTION_BYTES = 64 * MIB, 24 << 10, 32 << 10
DEADLINE_MS = 3000
# Below the kernel's ephemeral ports, so that no client ever gets a port of a killed daemon.
PORTS = range(20_000, 30_000)
CGROUPS = pathlib.Path("/sys/fs/cgroup/memory")
FAKETIME = pathlib.Path(f"/usr/lib/{os.uname().machine}-linux-gnu/faketime/libfaketime.so.1")


def memory_bound(connections, with_tls):
    """The daemon's documented bound of resident memory without file pages."""
    each = TLS_CONNECTION_BYTES if with_tls else CONNECTION_BYTES
    return FIXED_BYTES + BUDGET_BYTES + 3 * REQUEST_MEMORY_BYTES + each * connections


def waited_ns(pid):
    """{thread: how long it was runnable without a CPU}; empty once the process has ended."""
    found = {}
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            _, waited, _ = map(int, (task / "schedstat").read_text().split())
            found[task.name] = waited
    return found


class Starved:
    """The fraction of the time since the last call for which the worst-off thread of a process waited for a CPU."""

    def __init__(self):
        self.at, self.before = time.monotonic(), {}

    def share(self, waited):
        at, before = self.at, self.before
        self.at, self.before = time.monotonic(), waited
        longest = max((now - before[thread] for thread, now in waited.items() if thread in before), default=0)
        return round(longest / 1e9 / max(self.at - at, 0.001), 2)


def free_ports(count):
    chance, found = random.Random(os.getpid() ^ time.time_ns()), []
    while len(found) < count:
        port = chance.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class Cgroup:
    """A memory cgroup (v1) for the daemon; None if unavailable."""

    def __init__(self):
        self.path = CGROUPS / f"ringfetch-soak-{os.getpid()}"

    @staticmethod
    def available():
        return os.geteuid() == 0 and (CGROUPS / "memory.limit_in_bytes").exists()

    def __enter__(self):
        self.path.mkdir()
        return self

    def limit(self, limit_bytes):
        """Sets the limit. False: the kernel cannot get below it."""
        try:
            (self.path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        except OSError:
            return False
        return True

    def failures(self):
        return int((self.path / "memory.failcnt").read_text())

    def __exit__(self, *_):
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


class Daemon:
    """A ringfetchd that is started, killed and started again on the same ports."""

    def __init__(self, binary, directory, datasets, certificates=None, cgroup=None):
        self.binary, self.directory, self.cgroup = binary, pathlib.Path(directory), cgroup
        self.certificates, self.with_tls = certificates, False
        self.ports = dict(zip(("grpc", "http", "admin"), free_ports(3), strict=True))
        self.addresses = {name: ("127.0.0.1", port) for name, port in self.ports.items()}
        self.config_path, self.log_path = self.directory / "ringfetchd.yaml", self.directory / "log"
        self.process, self.lives, self.config_lock = None, 0, threading.Lock()
        self.principals = Principals(self.directory / "principals", certificates)
        self.config = {
            **{name: {"listen": f"127.0.0.1:{port}"} for name, port in self.ports.items()},
            "engine": {"backend": "uring", "on_unavailable": "fail", "cores": 2, "memory_budget": BUDGET_BYTES,
                       "pread": {"threads": 8}},
            "datasets": [dataset.describe() for dataset in datasets.values()],
            "limits": {"request_bytes": MIB, "request_memory": REQUEST_MEMORY_BYTES, "connections": CONNECTIONS, "deadline_ms": DEADLINE_MS,
                       "connection_bytes": 8 * MIB},
            "timeouts": {"handshake_ms": 2000, "head_ms": 2000, "body_ms": 3000, "send_ms": 3000},
            "access": {"principals": str(self.principals.path), "anonymous": "nobody"},
            "log": {"filter": "info"},
            "shutdown": {"lame_duck_ms": 200, "drain_timeout_ms": 8000},
        }

    def credential(self, by_certificate):
        """The current credential of clients; without TLS all use a token."""
        return self.principals.credential("certificate" if by_certificate and self.with_tls else "token")

    def client_context(self, *protocols, credential=None):
        if credential and credential.kind == "certificate":
            # Even if the daemon no longer has TLS: never send a request without a credential.
            return self.certificates.context(*protocols, client=credential.value)
        return self.certificates.context(*protocols) if self.with_tls else None

    def write_config(self, config=None):
        config = dict(config or self.config)
        if self.with_tls:
            config["tls"] = {"certificate": str(self.certificates.path("server.pem")), "key": str(self.certificates.path("server.key")),
                             "client_ca": str(self.certificates.path("authorities.pem"))}
        # JSON is valid YAML.
        new = self.config_path.with_suffix(".new")
        new.write_text(json.dumps(config, indent=1))
        os.rename(new, self.config_path)

    def start(self, environment=None, stderr=None, timeout_s=30):
        """Starts it and waits until it answers. `stderr`: an open file instead of the log."""
        self.write_config()
        self.principals.with_certificates = self.with_tls
        self.principals.write()
        command = [str(self.binary), "--config", str(self.config_path)]
        if self.cgroup:
            command = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.cgroup.path / "cgroup.procs"), *command]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr or log, stderr=stderr or log,
                                            env={**os.environ, **(environment or {})})
        self.lives += 1
        deadline = time.monotonic() + timeout_s
        while not self.answers("/readyz"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"ringfetchd did not start ({self.process.poll()}):\n{self.log_path.read_text()[-3000:]}")
            time.sleep(0.02)

    def get(self, path, timeout_s=5.0, credential=None):
        """(status, body) of a GET over a new connection; without a `credential`, with the operator's token."""
        credential = credential or Credential("token", self.principals.operator)
        with contextlib.closing(self.http_connection(credential, timeout_s)) as connection:
            connection.request("GET", path, headers=credential.headers())
            response = connection.getresponse()
            return response.status, response.read()

    def http_connection(self, credential, timeout_s):
        """A connection to the HTTP port, over TLS if the credential or the daemon has it; not opened yet."""
        context, (host, port) = self.client_context(credential=credential), self.addresses["http"]
        if context:
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def answers(self, path):
        try:
            return self.get(path, 1.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s=30):
        """Sends SIGTERM; returns its exit code, or None if it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def admin(self, method, **fields):
        """(status, text) of a call to the admin service; (None, reason) if it does not answer."""
        try:
            connection = Connection(self.addresses["admin"], self.client_context("h2"), token=lambda: self.principals.operator)
        except (OSError, ssl.SSLError) as error:
            return None, f"{type(error).__name__}: {error}"
        try:
            status, text, _ = connection.call(ADMIN + method, MESSAGES[method + "Request"](**fields), None, ADMIN_WAIT_S)
            return status, text
        except Broken as error:
            return None, str(error)
        except Late:
            return None, f"no answer within {ADMIN_WAIT_S} s"
        finally:
            connection.close()

    def set_backend(self, backend):
        return self.admin("SetBackend", backend=f"BACKEND_{backend.upper()}")

    def reload(self, config=None):
        """Writes the configuration (a new one, if given) and makes the daemon read it."""
        self.write_config(config)
        return self.admin("Reload")

    def sample(self):
        """A sample of /proc; None once it has ended."""
        process = pathlib.Path(f"/proc/{self.process.pid}")
        try:
            status = (process / "status").read_text()
            kib = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB", status, re.MULTILINE)}
            return {"anonymous_bytes": (kib["RssAnon"] + kib["RssShmem"]) << 10, "resident_bytes": kib["VmRSS"] << 10,
                    "descriptors": len(os.listdir(process / "fd")), "threads": len(os.listdir(process / "task"))}
        except (OSError, KeyError):
            return None

    def open_files(self):
        """Descriptors by kind, except objects, which are a cache."""
        found = collections.Counter()
        for entry in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            found["an object" if "/object-" in target else re.sub(r"\d+", "N", target)] += 1
        return found

    def mappings(self):
        """Mappings of served files, except objects, and all other mappings."""
        lines = pathlib.Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        files = [line for line in lines if str(self.directory) in line]
        return {"files": sum("object-" not in line for line in files), "objects": sum("object-" in line for line in files),
                "deleted": sum("(deleted)" in line and "object-" not in line for line in files), "all": len(lines)}

    def presented_certificate(self):
        """The certificate that a new connection is presented."""
        with socket.create_connection(self.addresses["http"], 5) as raw, \
                self.client_context().wrap_socket(raw, server_hostname="127.0.0.1") as secured:
            return secured.getpeercert(binary_form=True)

    def metrics(self):
        """{(name, labels): value} of /metrics."""
        status, page = self.get("/metrics")
        if status != 200:
            raise RunFailed(f"/metrics answers {status}")
        found = {}
        for line in page.decode().splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.partition("{")
                found[name, labels.rstrip("}")] = float(value)
        return found


def total(metrics, name, *labels):
    """The sum of a metric's series that have all these labels; LookupError for a metric that the daemon does not have."""
    if all(found != name for found, _ in metrics):
        raise LookupError(f"/metrics has no {name}")
    return sum(value for (found, text), value in metrics.items() if found == name and all(label in text for label in labels))
