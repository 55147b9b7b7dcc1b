"""A private Docker daemon with Compose: in a directory, on a socket, removed at the end.

It adds no firewall rules and no default bridge: compose's network works without them (the daemon's proxy publishes ports),
and other programs of this machine are not affected. It never uses a Docker daemon that already runs here.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

START_DEADLINE_S = 60
STOP_DEADLINE_S = 60


class Failed(Exception):
    """An unmet expectation, for a person to read."""


def check(holds, otherwise):
    """Fails with the text unless the condition holds."""
    if not holds:
        raise Failed(otherwise)


def within(seconds, what, condition):
    """Waits until the condition holds, and returns its result."""
    end = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        check(time.monotonic() < end, f"waited {seconds} s for: {what}")
        time.sleep(0.1)


class Done:
    """A finished command: its exit code, its standard output, and its whole output."""

    def __init__(self, command, completed):
        self.command = " ".join(map(str, command))
        self.code, self.out = completed.returncode, completed.stdout
        self.said = completed.stdout + completed.stderr

    def expect(self, code, *parts):
        """Fails unless it exited with this code (None: any but 0) and printed all of these."""
        right = self.code != 0 if code is None else self.code == code
        missing = [part for part in parts if part not in self.said]
        wanted = "another exit code than 0" if code is None else f"exit code {code}"
        check(
            right and not missing,
            f"{self.command}\nended with {self.code}, where {wanted} and {list(parts)} are expected; it said:\n{self.said[-6000:]}",
        )
        return self


def interfaces():
    """The names of this machine's network interfaces."""
    return set(os.listdir("/sys/class/net"))


def firewall():
    """The kernel's filter rules, as text."""
    return subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout


class OwnDocker:
    """Starts the daemon; `stop` ends it and removes everything that it made."""

    def __init__(self, keep=None):
        self.kept = keep is not None
        self.directory = Path(keep or tempfile.mkdtemp(prefix="ringfetch-deploy-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.before = (interfaces(), firewall())
        self.environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{self.directory}/docker.sock",
            # No credentials, plug-ins or contexts of the invoking user.
            "DOCKER_CONFIG": str(self.directory / "client"),
            # BuildKit would need another program and image.
            "DOCKER_BUILDKIT": "0",
        }
        self.log = self.directory / "dockerd.log"
        self.process = None

    def start(self):
        """Starts it, and waits until it answers."""
        command = ["dockerd", "--host", self.environment["DOCKER_HOST"], "--data-root", self.directory / "data"]
        command += ["--exec-root", self.directory / "exec", "--pidfile", self.directory / "docker.pid"]
        command += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
        with open(self.log, "w", encoding="utf-8") as log:
            # A separate session: Ctrl-C goes to the test, which then stops this in order.
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

        def answers():
            check(self.process.poll() is None, f"dockerd ended at once:\n{self.log.read_text()[-6000:]}")
            return self.run("docker", "info").code == 0

        try:
            within(START_DEADLINE_S, "dockerd to answer", answers)
        except Failed as failed:
            raise Failed(f"{failed}\nthis machine cannot run a Docker daemon as it is:\n{self.log.read_text()[-6000:]}") from None

    def restart(self):
        """Ends the daemon in order and starts it again, as a reboot of the host does."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_DEADLINE_S)
        self.start()

    def run(self, *command, environment=None, timeout=600, cwd=None):
        """Runs a command against this daemon. A None in the environment removes a variable."""
        merged = {**self.environment, **(environment or {})}
        merged = {name: value for name, value in merged.items() if value is not None}
        words = [str(word) for word in command]
        completed = subprocess.run(
            words, env=merged, cwd=cwd, timeout=timeout, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        return Done(words, completed)

    def inspect(self, name):
        """What the daemon reports about a container or image."""
        return json.loads(self.run("docker", "inspect", name).expect(0).out)[0]

    def leftovers(self):
        """Existing containers, networks and volumes."""
        containers = self.run("docker", "ps", "--all", "--format", "container {{.Names}}").expect(0).out
        networks = self.run("docker", "network", "ls", "--filter", "type=custom", "--format", "network {{.Name}}").expect(0).out
        volumes = self.run("docker", "volume", "ls", "--format", "volume {{.Name}}").expect(0).out
        return (containers + networks + volumes).split("\n")[:-1]

    def stop(self):
        """Ends all containers and the daemon, and returns what is left on this machine: nothing, if all is well."""
        if self.process is not None and self.process.poll() is None:
            containers = self.run("docker", "ps", "--all", "--quiet").out.split()
            if containers:
                self.run("docker", "rm", "--force", "--volumes", *containers)
            self.run("docker", "network", "prune", "--force")
            self.run("docker", "volume", "prune", "--force")
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for line in reversed(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()):
            place = line.split()[1]
            if place.startswith(f"{self.directory}/"):
                subprocess.run(["umount", "--lazy", place], check=False)
        if not self.kept:
            shutil.rmtree(self.directory)
        new_interfaces = interfaces() - self.before[0]
        check(not new_interfaces, f"network interfaces were left behind: {sorted(new_interfaces)}")
        check(firewall() == self.before[1], "firewall rules were left behind: nft list ruleset")
