"""The attacked daemon, with answers of up to 16 MiB and a listening supervisor, and the slow disk."""

import contextlib
import hashlib
import json
import os
import pathlib
import select
import socket
import subprocess
import threading
import time
import urllib.request

from adversary_cases import WATCHDOG_SECONDS
from processes import RunFailed, Server


class Heart:
    """A service manager's socket: counts WATCHDOG=1 and the longest silence between two of them, or after READY=1."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.beats, self.longest, self.last = 0, 0.0, time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self):
        while not self.ended.is_set():
            if select.select([self.socket], [], [], 0.2)[0]:
                self.hear(self.socket.recv(4096), time.monotonic())

    def hear(self, message, now):
        if b"WATCHDOG=1" in message:
            self.longest = max(self.longest, now - self.last)
            self.beats, self.last = self.beats + 1, now
        elif b"READY=1" in message:
            # A start may take longer than the supervisor waits for a beat.
            self.last = now

    def seen(self):
        """The number of beats, and the longest silence, including the current one."""
        return {"beats": self.beats, "longest_s": max(self.longest, time.monotonic() - self.last)}

    def close(self):
        self.ended.set()
        self.thread.join()
        self.socket.close()


def check_backend(datasets, wanted):
    """Refuses to measure another backend than the requested one: `datasets` as in /v1/status."""
    others = {dataset["name"]: dataset["backend"] for dataset in datasets if dataset["backend"] != wanted}
    if others or not datasets:
        raise RunFailed(f"asked for {wanted}, got {json.dumps(others)}")


class Victimised(Server):
    """A daemon for one run: dataset `data`, and `slow` if there is a slow disk. Refuses to run on another backend than requested."""

    def __init__(self, binary, directory, data, engine, slow=None, principals=None, prefix=()):
        self.binary, self.directory = binary, pathlib.Path(directory)
        self.engine = {"backend": "uring", "on_unavailable": "fail", **engine}
        # Command prefix: the CPUs to run on.
        self.prefix = list(prefix)
        # Name and rest of the line after the credential, by token.
        self.principals = principals or {}
        self.datasets = {"data": data} | ({"slow": slow} if slow else {})

    def __enter__(self):
        loopback = {"listen": "127.0.0.1:0"}
        datasets = [{"name": name, "path": str(path), "kind": "blocks", "block_bytes": 4096}
                    for name, path in self.datasets.items()]
        config = {"grpc": loopback, "http": loopback, "admin": loopback, "datasets": datasets,
                  "engine": self.engine, "limits": {"response_bytes": "16MiB"}}
        if self.principals:
            lines = [f"{name} sha256:{hashlib.sha256(token.encode()).hexdigest()} {rights}"
                     for token, (name, rights) in self.principals.items()]
            (self.directory / "principals").write_text("\n".join(lines) + "\n")
            config["access"] = {"principals": str(self.directory / "principals")}
        file = self.directory / "ringfetchd.yaml"
        # JSON is valid YAML.
        file.write_text(json.dumps(config))
        self.file = self.directory / "addresses.json"
        self.file.unlink(missing_ok=True)
        notify = self.directory / "notify"
        notify.unlink(missing_ok=True)
        self.heart = Heart(notify)
        environment = {**os.environ, "NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": str(WATCHDOG_SECONDS * 1_000_000)}
        try:
            self.launch([*self.prefix, self.binary, "--config", file, "--addresses-file", self.file], self.directory / "log",
                        env=environment)
        except RunFailed:
            self.heart.close()
            raise
        addresses = json.loads(self.file.read_text())
        self.addresses = {name: addresses[name] for name in ("grpc", "http", "admin")}
        try:
            check_backend(self.served(), self.engine["backend"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def served(self):
        """The datasets, as /v1/status shows them to the first principal."""
        token = next(iter(self.principals), None)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"http://{self.addresses['http']}/v1/status", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())["datasets"]

    def is_ready(self):
        return self.file.exists() and self.file.stat().st_size > 0

    def __exit__(self, *_):
        self.heart.close()
        if self.process.poll() is None:
            # It may drain as long as configured; how it ends is not measured.
            with contextlib.suppress(RunFailed):
                self.stop()


class SlowDisk:
    """`slowdisk` with a file, controlled through its stdin."""

    def __init__(self, binary, source, mountpoint, *arguments):
        self.command = [str(part) for part in (binary, source, mountpoint, "--until-eof", *arguments)]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        first = self.process.stdout.readline()
        if not first:
            raise RunFailed(f"no slow disk: {self.process.communicate()[1].strip()}")
        self.path = json.loads(first)["mounted"]
        return self

    def ask(self, words):
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def reads_of(self, offset, length):
        """How often the disk read any of these bytes."""
        return sum(1 for read in self.ask("records")
                   if read["offset"] < offset + length and offset < read["offset"] + read["length_bytes"])

    def __exit__(self, *_):
        self.process.communicate("quit\n", timeout=30)
