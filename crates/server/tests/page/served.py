"""What the page is shown from: a demo daemon, load on it with every byte checked, and its counters.

Each is a process of its own, ended by its own process id.
"""

import ctypes
import json
import re
import signal
import struct
import subprocess
import time
import urllib.request

PATIENCE_S = 60


def eventually(what, condition, within_s=PATIENCE_S):
    """Waits for a condition, and says what did not happen."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"within {within_s} s: {what}")
        time.sleep(0.05)


class Process:
    """A child that does not outlive its block."""

    def __init__(self, command, log_path, before=None):
        self.log_path = log_path
        with open(log_path, "wb") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, preexec_fn=before
            )

    def log(self):
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def end(self, how):
        """Sends a signal and answers the exit code."""
        self.child.send_signal(how)
        return self.child.wait(timeout=PATIENCE_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()


def forbid_io_uring():
    """Answers io_uring_setup (425 on every architecture) with EPERM from now on, as container runtimes' profiles do."""
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


class Daemon(Process):
    """A demo daemon on a port of its own: `http` 0 is any free one."""

    def __init__(self, binary, directory, backend, http=0, on_unavailable="fail", before=None):
        addresses = directory / "addresses.json"
        addresses.unlink(missing_ok=True)
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
            str(addresses),
        ]
        command += [word for setting in settings for word in ("--set", setting)]
        super().__init__(command, directory / "ringfetchd.log", before)
        try:
            eventually(
                "the daemon is ready or ends", lambda: addresses.exists() or self.child.poll() is not None, 600
            )
            if self.child.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.child.returncode}:\n{self.log()}")
            self.addresses = json.loads(addresses.read_text(encoding="utf-8"))
        except BaseException:
            self.__exit__()
            raise
        self.url = f"http://{self.addresses['http']}/"
        self.port = int(self.addresses["http"].rpartition(":")[2])

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    def metrics(self):
        """When, and every series: {'name{labels}': value}."""
        text = self.get("metrics")
        series = re.findall(r"^([a-z_]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        return time.monotonic(), {name: float(value) for name, value in series}

    def polls(self):
        """Requests for the page's figures so far."""
        return total(self.metrics()[1], "ringfetch_rpc_requests_total", 'method="GetStatus"')

    def stop(self):
        code = self.end(signal.SIGTERM)
        assert code == 0, f"the daemon ended with {code}:\n{self.log()}"


def total(series, name, *labels):
    """The sum of a metric's series that have all these labels."""
    mine = (key for key in series if key.partition("{")[0] == name)
    return sum(series[key] for key in mine if all(label in key for label in labels))


class Load(Process):
    """Reads of blocks and vectors at a fixed rate, every byte checked, until it is stopped."""

    def __init__(self, binary, daemon, directory, requests_per_second):
        command = [binary, "--grpc", f"http://{daemon.addresses['grpc']}", "load", "--mix", "blocks=0.7,vectors=0.3", "--verify",
                   "--rate", str(requests_per_second), "--arrivals", "poisson", "--batch", "16", "--connections", "4",
                   "--seconds", "600"]  # fmt: skip
        super().__init__(command, directory / "load.log")

    def stop(self):
        """Ends it; whatever went wrong with any read fails here."""
        code = self.end(signal.SIGINT)
        said = self.log()
        assert code == 0, f"the load ended with {code}:\n{said}"
        assert re.search(r"^wrong bytes +0\b", said, re.MULTILINE), said
        assert re.search(r"^errors +none", said, re.MULTILINE), said
