"""Runs, starts and ends other processes, and measures their CPU use. Independent of what they are."""

import contextlib
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import time


class RunFailed(Exception):
    """A run that gave no figures. The row states the reason, and the others continue."""


def say(text):
    """Prints progress to stderr, since stdout is for the table."""
    print(text, file=sys.stderr, flush=True)


def exit_on_sigterm():
    """From now on SIGTERM ends the program as Ctrl-C does: what it has started and made is ended and removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


@contextlib.contextmanager
def starting(program):
    """Names a program that cannot be started: one that was not built, for example."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"{program} cannot be run: {error.strerror}") from None


def run(command, **options):
    """Runs a command to its end and returns its stdout."""
    command = [str(part) for part in command]
    with starting(command[0]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise RunFailed(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stdout}{done.stderr}".strip())
    return done.stdout


def run_counting_cpu(command):
    """As `run`, plus the CPU seconds (user + system) of the command. No other child may be awaited meanwhile."""

    def children():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = children()
    output = run(command)
    return output, children() - before


def free_port():
    """A port that is free now, for servers that cannot choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, what, seconds=60):
    """The first true result of `condition`, which is asked until then."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise RunFailed(f"not within {seconds} s: {what}")
        time.sleep(0.05)
    return answer


def metrics(text):
    """The series of a page of metrics: {'name{labels}': value}."""
    series = re.findall(r"^([a-z_]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in series}


def total(series, name, *labels):
    """The sum of a metric's series that have all these labels."""
    mine = (key for key in series if key.partition("{")[0] == name)
    return sum(series[key] for key in mine if all(label in key for label in labels))


class Server:
    """A server process for one run. Subclasses define how it is started (`start`), and when it is ready (`is_ready`) unless
    that is when something accepts connections on its `port`."""

    process = None
    start_seconds = 60

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def launch(self, command, log_path, **options):
        self.log_path = pathlib.Path(log_path)
        with open(log_path, "w") as log, starting(command[0]):
            self.process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, **options)
        deadline = time.monotonic() + self.start_seconds
        try:
            while not self.is_ready():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RunFailed(f"{command[0]} did not start:\n{self.log_path.read_text()}")
                time.sleep(0.02)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def is_ready(self):
        """Whether something accepts connections on its loopback port."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def figures(self):
        """Its own figures of a run, in addition to the driver's."""
        return {}

    def stop(self, how=signal.SIGTERM):
        """Sends a signal, waits until it has ended, and returns its exit code."""
        self.process.send_signal(how)
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RunFailed(f"process {self.process.pid} did not end on {how.name}") from None

    def pids(self):
        """The process and its children: nginx and others work in children."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def cpu_seconds(self):
        """User + system time so far, over all its processes; in ticks of 10 ms."""
        return sum(cpu_ticks(pid) for pid in self.pids()) / os.sysconf("SC_CLK_TCK")


def cpu_ticks(pid):
    """utime + stime, fields 14 and 15 of proc_pid_stat(5); the name before them may contain anything."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def on_cpu_seconds(pid):
    """Time on a CPU so far, over all live threads; in nanoseconds, for when ticks are too coarse (idle)."""
    threads = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
