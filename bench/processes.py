"""Other processes: run to their end, started and ended, and what CPU they used. Nothing here knows what they are."""

import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time


class RunFailed(Exception):
    """A run that gave no figures. The row says why and the others go on."""


def say(text):
    """Progress goes to stderr: stdout is the table's."""
    print(text, file=sys.stderr, flush=True)


def run(command, **options):
    """Runs a command to its end and returns its stdout."""
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise RunFailed(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stdout}{done.stderr}".strip())
    return done.stdout


def run_counting_cpu(command):
    """As `run`, and the CPU seconds (user + system) the command used. Nothing else may be waited for meanwhile."""

    def children():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = children()
    output = run(command)
    return output, children() - before


def free_port():
    """A port that nobody has now, for servers that cannot choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process for one run. Subclasses say how it is started (`start`) and when it is ready (`is_ready`)."""

    process = None

    def launch(self, command, log_path, **options):
        self.log_path = pathlib.Path(log_path)
        with open(log_path, "w") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, **options)
        deadline = time.monotonic() + 60
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                self.process.wait()
                raise RunFailed(f"{command[0]} did not start:\n{self.log_path.read_text()}")
            time.sleep(0.02)

    def is_ready(self):
        raise NotImplementedError

    def stop(self):
        """Ends it politely, and waits until it has gone."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RunFailed(f"process {self.process.pid} did not end on SIGTERM") from None

    def pids(self):
        """The process and its children: nginx and the like work in them."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def cpu_seconds(self):
        """User + system time so far, of all its processes; ticks of 10 ms."""
        return sum(cpu_ticks(pid) for pid in self.pids()) / os.sysconf("SC_CLK_TCK")


def cpu_ticks(pid):
    """utime + stime, fields 14 and 15 of proc_pid_stat(5); the name before them may hold anything."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def on_cpu_seconds(pid):
    """Time on a CPU so far, all threads that live now; nanoseconds, where ticks are too coarse (idle)."""
    threads = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def accepts(port):
    """Whether somebody accepts connections on this port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
