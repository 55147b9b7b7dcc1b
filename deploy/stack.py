"""The system under test: the compose stack, single containers of the image, and their readers.

Each uses a daemon from `own_docker`; none starts or stops one. Expectations are the test's, except where every use expects
the same.
"""

import contextlib
import http.client
import json
import re
import shutil
import socket
import threading
from pathlib import Path

from own_docker import Failed, check, within

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "ringfetch:local"
PROJECT = "ringfetch-test"
RESTARTS_SEEN = 3
LOAD_SECONDS_MAX = 300
# As docker-compose.yml runs it.
HARDENED = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]


def free_ports(count):
    """Different loopback ports that were free a moment ago."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


class Stack:
    """The compose project, with a copy of its configuration that tests may break, on free ports."""

    def __init__(self, docker, scratch):
        self.docker, self.scratch = docker, scratch
        # The path of Compose, once it is unpacked.
        self.program = None
        self.config_directory = scratch / "config"
        shutil.copytree(ROOT / "deploy/config", self.config_directory)
        self.config = self.config_directory / "ringfetchd.yaml"
        self.original = self.config.read_text(encoding="utf-8")
        # The image's own health check, more often: this test waits for it a dozen times.
        self.files = ["--file", "docker-compose.yml", "--file", str(scratch / "health.yml")]
        (scratch / "health.yml").write_text("services: {ringfetchd: {healthcheck: {interval: 1s}}}\n", encoding="utf-8")
        grpc, self.http, self.prometheus = free_ports(3)
        self.environment = {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "RINGFETCH_CONFIG_DIR": str(self.config_directory),
            "RINGFETCH_GRPC_PORT": str(grpc),
            "RINGFETCH_HTTP_PORT": str(self.http),
            "PROMETHEUS_PORT": str(self.prometheus),
            "RINGFETCH__ENGINE__BACKEND": None,
            "RINGFETCH_DATA": None,
            "RINGFETCH_MEMORY": None,
        }

    def compose(self, *arguments, overlay=None, cwd=None, timeout=600, **environment):
        """Runs one compose command, with an additional file of `deploy`, or on another directory's files alone."""
        files = [] if cwd else self.files + (["--file", f"deploy/{overlay}"] if overlay else [])
        merged = {**self.environment, **environment}
        return self.docker.run(self.program, *files, *arguments, environment=merged, cwd=cwd or ROOT, timeout=timeout)

    def set_config(self, old, new):
        """Edits the configuration as an editor does: a new file under the old name."""
        text = self.config.read_text(encoding="utf-8")
        check(old in text, f"{old!r} is not in the configuration, so this test changes nothing")
        self.write_config(text.replace(old, new, 1))

    def write_config(self, text):
        """Replaces the configuration."""
        new = self.config.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(self.config)

    def container(self, service="ringfetchd"):
        """The id of a service's container, including stopped ones."""
        found = self.docker.run("docker", "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.service={service}")
        return found.expect(0).out.strip()

    def state(self, service="ringfetchd"):
        """What the daemon reports about a service's container."""
        return self.docker.inspect(self.container(service))

    def healthy(self):
        """Waits until the daemon's container is healthy, by its own check."""
        within(90, "ringfetchd to be healthy", lambda: self.state()["State"]["Health"]["Status"] == "healthy")

    def last_health_check(self):
        """Start, exit code and output of the latest check."""
        return self.state()["State"]["Health"]["Log"][-1]

    def log(self):
        """The daemon's log."""
        return self.docker.run("docker", "logs", self.container()).said

    def status(self):
        """The daemon's status."""
        return json.loads(self.docker.run("docker", "exec", self.container(), "ringfetch", "--json", "status").expect(0).out)

    def get(self, path, port=None):
        """The body of a GET on a published port."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            check(answer.status == 200, f"GET {path} answered {answer.status}: {body[:500]}")
            return body

    def metric(self, pattern):
        """The value of the one series that matches."""
        lines = re.findall(f"^{pattern} (.*)$", self.get("/metrics").decode(), re.MULTILINE)
        check(len(lines) == 1, f"{len(lines)} series are like {pattern}")
        return float(lines[0])

    def reads_on(self, backend):
        """Reads of the demo's blocks answered by a backend."""
        lines = re.findall(r"^ringfetch_reads_total\{(.*)\} (.*)$", self.get("/metrics").decode(), re.MULTILINE)
        wanted = [f'backend="{backend}"', 'dataset="blocks"', 'result="ok"']
        return sum(float(value) for labels, value in lines if all(label in labels for label in wanted))

    def keeps_ending(self, code):
        """Waits until the container has been restarted several times and ended again, and checks its code."""

        def ended():
            facts = self.state()
            waits = facts["RestartCount"] >= RESTARTS_SEEN and facts["State"]["Status"] == "restarting"
            return waits and facts["State"]

        found = within(60, f"{RESTARTS_SEEN} restarts", ended)["ExitCode"]
        check(found == code, f"the container ends with {found}, where {code} is expected:\n{self.log()[-3000:]}")


class Load:
    """Verified load by the compose file's own load service, in the background, until it is told to end."""

    def __init__(self, stack):
        self.docker = stack.docker
        arguments = ["--profile", "load", "run", "--rm", "-T", "--no-deps", "load", "--json", "load", "--verify"]
        arguments += ["--dataset", "blocks", "--seconds", str(LOAD_SECONDS_MAX), "--warmup-seconds", "0"]
        self.done = None
        self.thread = threading.Thread(target=lambda: setattr(self, "done", stack.compose(*arguments)))
        before = sum(stack.reads_on(backend) for backend in ("uring", "mmap"))
        self.thread.start()
        within(60, "the load to be under way", lambda: sum(map(stack.reads_on, ("uring", "mmap"))) > before + 1000)

    def result(self):
        """Ends it; returns its report."""
        check(self.thread.is_alive(), "the load ended by itself")
        running = self.docker.run("docker", "ps", "--quiet", "--filter", "label=com.docker.compose.service=load")
        for container in running.expect(0).out.split():
            self.docker.run("docker", "kill", "--signal", "INT", container)
        self.thread.join()
        check(self.done is not None, "the load could not be started")
        # The classic builder writes to standard output, too: so the service is built before it is run.
        report = self.done.out[self.done.out.rfind("\n{\n") + 1 :]
        try:
            return json.loads(report)
        except json.JSONDecodeError:
            raise Failed(f"the load gave no report:\n{self.done.said[-3000:]}") from None

    def expect_clean(self):
        """Fails unless every requested read was answered correctly."""
        report = self.result()
        check(report["wrong_bytes"] == 0 and report["errors"] == 0, f"not all was right: {self.done.said[-3000:]}")
        check(report["reads"] > 0, "nothing was read")
        return report


class Readers:
    """Clients that read over HTTP, each time on a new connection, until the server is gone: each answer must be complete and
    right, or a refusal. They connect to the container itself; the proxy that publishes ports accepts even for a daemon that
    is gone."""

    def __init__(self, address, count):
        self.address, self.answered, self.refused, self.reset, self.broken = address, 0, 0, 0, []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.read) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def read(self):
        expected = None
        while True:
            connection = http.client.HTTPConnection(self.address, 7411, timeout=15)
            try:
                connection.connect()
            except OSError:
                return
            try:
                connection.request("GET", "/v1/datasets/blocks/bytes", headers={"Range": "bytes=0-999999", "Connection": "close"})
                answer = connection.getresponse()
            except (ConnectionResetError, BrokenPipeError):
                with self.lock:
                    self.reset += 1
                return
            except (OSError, http.client.HTTPException) as error:
                with self.lock:
                    self.broken.append(f"not answered: {error!r}")
                return
            try:
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                with self.lock:
                    self.broken.append(f"broken off: {error!r}")
                return
            finally:
                connection.close()
            with self.lock:
                if answer.status == 503:
                    self.refused += 1
                elif answer.status == 206 and len(body) == 1_000_000 and body == (expected or body):
                    self.answered += 1
                    expected = body
                else:
                    self.broken.append(f"{answer.status} with {len(body)} bytes, or other bytes than before")

    def join(self):
        for thread in self.threads:
            thread.join()


class One:
    """One container of the image, without compose, over a directory of one dataset; queried from inside."""

    def __init__(self, stack, options, arguments):
        self.docker = stack.docker
        # Queried from inside, unless it shares another network.
        network = [] if "--network" in options else ["--network", "none"]
        created = self.docker.run(
            *["docker", "create", *network, *HARDENED, "--volume", f"{stack.scratch}/one:/data:ro"],
            *["--env", "RINGFETCH_CONFIG=/data/config.yaml", *options, IMAGE, *arguments],
            cwd=ROOT,
        )
        self.name = created.expect(0).out.strip()
        self.docker.run("docker", "start", self.name)

    def log(self):
        return self.docker.run("docker", "logs", self.name).said

    def run(self, *command):
        return self.docker.run("docker", "exec", self.name, *command)

    def ready_or_ended(self):
        """Waits; returns None if it serves, else its exit code once it is not restarted."""

        def outcome():
            state = self.docker.inspect(self.name)["State"]
            if state["Status"] == "exited":
                return (state["ExitCode"],)
            return (None,) if self.run("ringfetchd", "healthcheck").code == 0 else ()

        return within(60, "the daemon to be ready or to end", outcome)[0]

    def status(self):
        return json.loads(self.run("ringfetch", "--json", "status").expect(0).out)

    def metrics(self):
        """The metrics page: the image has no client for it, so one of this machine enters the container's network."""
        pid = self.docker.inspect(self.name)["State"]["Pid"]
        inside = ["nsenter", "--net", "--target", pid]
        return self.docker.run(*inside, "curl", "--fail", "--silent", "http://127.0.0.1:7411/metrics").expect(0).out

    def reads_on(self, backend):
        """Fails unless it answers with the right bytes, on this backend."""
        self.run("ringfetch", "dataset", "verify", "blocks").expect(0)
        check(self.status()["backend"] == backend, f"status: {self.status()}")


@contextlib.contextmanager
def started(stack, *options, arguments=()):
    """A container in any state; removed at the end."""
    one = One(stack, options, arguments)
    try:
        yield one
    finally:
        stack.docker.run("docker", "rm", "--force", "--volumes", one.name)


@contextlib.contextmanager
def running(stack, *options):
    """A container that serves."""
    with started(stack, *options) as one:
        code = one.ready_or_ended()
        check(code is None, f"the daemon ended with {code}:\n{one.log()}")
        yield one


def refused(stack, code, *parts, options=(), arguments=()):
    """A container that exits with this code and prints all of these, and that a restart policy does not restart forever."""
    policy = ["--restart", f"on-failure:{RESTARTS_SEEN}"]
    with started(stack, *policy, *options, arguments=arguments) as one:

        def ended():
            facts = stack.docker.inspect(one.name)
            return facts["RestartCount"] == RESTARTS_SEEN and facts["State"]["Status"] == "exited" and facts["State"]

        found = within(60, "the restarts to end", ended)["ExitCode"]
        check(found == code, f"ended with {found}, where {code} is expected:\n{one.log()}")
        missing = [part for part in parts if part not in one.log()]
        check(not missing, f"the log does not say {missing}:\n{one.log()}")
        print(one.log().strip().splitlines()[-1])
