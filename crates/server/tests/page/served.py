"""What the page is shown from: a demo daemon, load on it with every byte checked, and its counters.

Each is a process of its own, ended by its own process id.
"""

import ctypes
import json
import re
import signal
import struct
import sys
import time
import urllib.request
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[4] / "bench"))
from processes import Server, metrics, total, until  # noqa: F401

PATIENCE_S = 60


def forbid_io_uring():
    """Answers io_uring_setup (425 on every architecture) with EPERM from now on, as container runtimes' profiles do."""
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


class Daemon(Server):
    """A demo daemon on a port of its own: `http` 0 is any free one."""

    # The first makes the data.
    start_seconds = 600

    def __init__(self, binary, directory, backend, http=0, on_unavailable="fail", before=None):
        self.addresses_file = directory / "addresses.json"
        self.addresses_file.unlink(missing_ok=True)
        settings = [
            f"http.listen=127.0.0.1:{http}",
            "grpc.listen=127.0.0.1:0",
            "admin.listen=off",
            "engine.cores=2",
            f"engine.on_unavailable={on_unavailable}",
        ]
        command = [
            binary,
            "--demo-dir",
            str(directory / "demo"),
            "--backend",
            backend,
            "--addresses-file",
            str(self.addresses_file),
        ]
        command += [word for setting in settings for word in ("--set", setting)]
        self.launch(command, directory / "ringfetchd.log", preexec_fn=before)
        self.addresses = json.loads(self.addresses_file.read_text(encoding="utf-8"))
        self.url = f"http://{self.addresses['http']}/"
        self.port = int(self.addresses["http"].rpartition(":")[2])

    def is_ready(self):
        return self.addresses_file.exists()

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    def metrics(self):
        """When, and every series: {'name{labels}': value}."""
        text = self.get("metrics")
        return time.monotonic(), metrics(text)

    def polls(self):
        """Requests for the page's figures so far."""
        return total(self.metrics()[1], "ringfetch_rpc_requests_total", 'method="GetStatus"')

    def stop(self):
        code = super().stop()
        assert code == 0, f"the daemon ended with {code}:\n{self.log_path.read_text()}"


class Load(Server):
    """Reads of blocks and vectors at a fixed rate, every byte checked, until it is stopped."""

    def __init__(self, binary, daemon, directory, requests_per_second):
        command = [binary, "--grpc", f"http://{daemon.addresses['grpc']}", "load", "--mix", "blocks=0.7,vectors=0.3", "--verify",
                   "--rate", str(requests_per_second), "--arrivals", "poisson", "--batch", "16", "--connections", "4",
                   "--seconds", "600"]  # fmt: skip
        self.launch(command, directory / "load.log")

    def is_ready(self):
        return True

    def stop(self):
        """Ends it; whatever went wrong with any read fails here."""
        code = super().stop(signal.SIGINT)
        said = self.log_path.read_text()
        assert code == 0, f"the load ended with {code}:\n{said}"
        assert re.search(r"^wrong bytes +0\b", said, re.MULTILINE), said
        assert re.search(r"^errors +none", said, re.MULTILINE), said
