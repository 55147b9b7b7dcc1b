#!/usr/bin/env python3
"""Hours of abuse: verified load from many clients, while a random schedule breaks what can break around the daemon.

    bench/soak.py --minutes 20                        the release build, a seed of its own choice
    bench/soak.py --seed 7 --minutes 20               the same schedule again
    bench/soak.py --only kill,truncate --minutes 2    only these (--list names all)
    bench/soak.py --smoke                             every fault once, about a minute
    bench/soak.py --smoke --need fuse,openssl         and end with 1 if a fault that needs these is left out

Each answer must be right, byte for byte, or an error that a fault of the moment explains. Faults come one to three at a time;
after each phase the clients stop, and memory, descriptors, threads and mappings must be what they were. Ends with 1 where an
invariant was broken. Writes soak.md, soak.csv and soak.svg to --out. What the machine lacks (root, /dev/fuse, cgroups v1,
libfaketime, openssl) is left out and named.
"""

import argparse
import collections
import contextlib
import csv
import http.client
import os
import pathlib
import random
import resource
import shutil
import signal
import ssl
import sys
import tempfile
import threading
import time
import types

import machine
import ringfetch
import soak_data
import soak_faults
import soak_load
import soak_report
from adversary_daemon import SlowDisk
from processes import RunFailed, exit_on_sigterm, say
from soak_access import Certificates
from soak_daemon import FAKETIME, Cgroup, Daemon, Starved, memory_bound, total, waited_ns

SAMPLE_SECONDS, PROBE_SECONDS = 0.5, 0.1
# How long a SIGHUP may take to be followed.
HANG_UP_SECONDS = 5
# How much longer than its phase a fault may take to do something.
EFFECT_SECONDS = 60
# Longest time for a phase's resources to be released: idle threads of a pool take ten seconds, closed connections a moment.
SETTLE_SECONDS = 20
WARM_UP_SECONDS, SMOKE_WARM_UP_SECONDS = 1.0, 0.3
# A probe that takes longer has failed.
PROBE_TIMEOUT_S = 5.0
# Accepted growth of mappings other than files: the allocator's come and go.
MAPPINGS_SLACK = 64
# Descriptors of objects: two datasets with a cache of 16, each object may have two.
OBJECT_DESCRIPTORS = 64
# ERROR log messages about configurations, certificates and principals that are invalid on purpose.
EXPECTED_ERRORS = ("the configuration is not reloaded", "the TLS files cannot be used; the old ones stay in force",
                   "the principals file cannot be used; the old one stays in force")
# Clients that authenticate by a certificate while TLS is on; the others have tokens.
BY_CERTIFICATE = {"stream", "http", "new-grpc", "changing", "slow-http"}
SMOKE = types.SimpleNamespace(seed=1, seconds=3.0)


class SharedDisk(SlowDisk):
    """The slow disk, used by several faults at a time."""

    def __enter__(self):
        self.lock = threading.Lock()
        return super().__enter__()

    def ask(self, words):
        with self.lock:
            return super().ask(words)


class Soak:
    """One run: daemon, clients, and their observations."""

    def __init__(self, options, directory, stack, lacking):
        self.options, self.directory = options, pathlib.Path(directory)
        self.data = self.directory / "data"
        slow_source = self.directory / "slow-source"
        self.data.mkdir()
        slow_source.mkdir()
        self.datasets = soak_data.datasets(options.seed, str(self.data), str(slow_source), small=options.smoke)
        for dataset in self.datasets.values():
            dataset.write_all() if dataset.kind == "objects" else dataset.write(0)
        self.disk = None
        if "fuse" not in lacking:
            self.disk = stack.enter_context(SharedDisk(options.slowdisk, slow_source, self.directory / "slow"))
            self.datasets["slow"].served = [f"{self.disk.path}/slow.bin"]
            self.datasets["slow-objects"].served = f"{self.disk.path}/slow-objects"
        self.cgroup = None if "cgroup" in lacking else stack.enter_context(Cgroup())
        certificates = None if "openssl" in lacking else Certificates(self.directory / "tls")
        self.daemon = Daemon(options.daemon, self.directory, self.datasets, certificates, self.cgroup)
        stack.callback(self._end_daemon)
        self.faults = soak_data.Faults()
        self.judge = soak_load.Judge(self.faults, self.note)
        self.ended, self.paused, self.restarting = threading.Event(), threading.Event(), threading.Lock()
        self.begun, self.phase, self.phases, self.samples, self.probes, self.events = time.monotonic(), None, [], [], [], []
        self.baseline, self.counters = None, {}
        # What each fault did: without that it proves nothing.
        self.effects = collections.Counter()
        plain = ["blocks", "odd", "split", "on-mmap", "on-pread", "on-auto", "npy", "fvecs", "u8bin", "ballast"]
        clients = [("grpc", "grpc", plain, 0.004, None), ("stream", "stream", plain, 0.02, None), ("http", "http", plain, 0.006, None),
                   ("new-grpc", "grpc", plain, 0.05, 1), ("new-http", "http", plain, 0.05, 1),
                   ("changing", "grpc", ["swap", "cut", "swap", "cut", "objects"], 0.008, 200),
                   ("changing-http", "http", ["swap", "cut", "objects"], 0.01, 200),
                   ("slow", "grpc", ["slow", "slow-objects"], 0.01, None), ("slow-http", "http", ["slow", "slow-objects"], 0.02, None)]
        self.workers = [soak_load.Worker(self, *client, by_certificate=client[0] in BY_CERTIFICATE) for client in clients]

    def _end_daemon(self):
        if self.daemon.process and self.daemon.process.poll() is None:
            self.daemon.kill()

    def at(self):
        return time.monotonic() - self.begun

    def note(self, kind, what):
        """Prints the first violations of each kind at once."""
        say(f"{self.at():7.1f} s  VIOLATION: {kind}: {what[:400]}")

    def tell(self, text):
        self.events.append((self.at(), text))
        if self.options.verbose:
            say(f"{self.at():7.1f} s  {text}")

    # Operations for the faults.

    def _admin_failed(self, what, status, text, begun):
        codes = {"CONNECT", "BROKEN"} if status is None else {soak_load.GRPC_CODES.get(status, str(status))}
        self.judge.error(what, types.SimpleNamespace(name="admin"), codes, begun, time.monotonic(), text)

    def admin_call(self, method, **fields):
        begun = time.monotonic()
        status, text = self.daemon.admin(method, **fields)
        if status != 0:
            self._admin_failed(method, status, text, begun)
        return status == 0

    def reload(self):
        self.daemon.write_config()
        return self.admin_call("Reload")

    def reload_until(self, until):
        """Reloads until it succeeds: a failing disk may prevent it for now. False: it did not by then."""
        while not self.reload():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def reload_mistake(self, what, config=None):
        """Checks that a configuration, or a file that it names, is refused."""
        begun = time.monotonic()
        status, text = self.daemon.reload(config)
        if status == 0:
            self.judge.violation("mistake accepted", what)
        elif status not in (3, 9):
            self._admin_failed("Reload of a mistake", status, text, begun)
        return status in (3, 9)

    def _reloads(self):
        """Reloads that have succeeded; None: the daemon does not say."""
        with contextlib.suppress(OSError, http.client.HTTPException, RunFailed):
            return total(self.daemon.metrics(), "ringfetch_config_reloads_total", 'result="ok"')
        return None

    def hang_up(self):
        """Sends SIGHUP, after which the daemon must reload its configuration, which is valid. False: it did not."""
        begun, before = time.monotonic(), self._reloads()
        self.daemon.process.send_signal(signal.SIGHUP)
        while before is None or (self._reloads() or 0) <= before:
            if time.monotonic() > begun + HANG_UP_SECONDS:
                codes = {"CONNECT", "BROKEN", "HANG", "HANG-NEW", "UNAVAILABLE", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "INTERNAL",
                         "DEADLINE_EXCEEDED"}
                self.judge.error("SIGHUP", types.SimpleNamespace(name="admin"), codes, begun, time.monotonic(),
                                 f"not reloaded after {HANG_UP_SECONDS} s")
                return False
            time.sleep(0.02)
        return True

    def restart(self, fault, how=None, with_tls=None, **options):
        """Ends the daemon by SIGKILL, or by SIGTERM if `how` says so, and starts it again."""
        how = how or fault
        with self.restarting, self.faults.window(fault, soak_faults.GONE, after_s=0.5), self.daemon.config_lock:
            self.tell(f"{fault}: ends by SIG{'TERM' if how == 'term' else 'KILL'}")
            if how == "term":
                code = self.daemon.stop()
                # Responses that slow clients have not read when the drain ends are cut off, which changes the exit code.
                if code != 0 and not (code == 1 and {"slow-readers", "vanish", "delay"} & set(self.phase.faults)):
                    self.judge.violation("exit code", f"{code} after SIGTERM (None: it did not end)")
            else:
                self.daemon.kill()
            self.judge.new_life()
            self.counters, self.baseline = {}, None
            if with_tls is not None:
                self.daemon.with_tls = with_tls
            until = time.monotonic() + 60
            while True:
                try:
                    self.daemon.start(**options)
                    break
                except RunFailed as failure:
                    # A failing disk rightly keeps it from starting.
                    if not (self.disk and {"eio", "delay"} & set(self.phase.faults)) or time.monotonic() > until:
                        raise
                    self.tell(str(failure).splitlines()[-1][:200])
                    time.sleep(0.3)
                    if self.daemon.process.poll() is None:
                        self.daemon.kill()
            self.tell(f"{fault}: serves again, pid {self.daemon.process.pid}")

    # Background tasks.

    def watch(self):
        """Samples /proc, and checks the memory bound."""
        daemon, clients = Starved(), Starved()
        while not self.ended.wait(SAMPLE_SECONDS):
            starved = {"daemon_waits": daemon.share(waited_ns(self.daemon.process.pid)), "clients_wait": clients.share(waited_ns(os.getpid()))}
            sample = self.daemon.sample()
            if sample is None:
                continue
            bound = memory_bound(256, self.daemon.with_tls)
            if sample["anonymous_bytes"] > bound:
                self.judge.violation("memory", f"{sample['anonymous_bytes'] >> 20} MiB resident, bound {bound >> 20} MiB")
            counts = self.judge.counts
            self.samples.append({"at_s": round(self.at(), 1), "phase": self.phase.number if self.phase else -1,
                                 "faults": "+".join(self.phase.faults) if self.phase and not self.paused.is_set() else "",
                                 **sample, **starved, "calls": counts["calls"], "items": counts["items"], "bytes": counts["bytes"]})

    def probe(self):
        """Requests /livez and /readyz, each over a new connection."""
        while not self.ended.wait(PROBE_SECONDS):
            begun = time.monotonic()
            path = "/livez" if int(begun * 10) % 2 else "/readyz"
            codes, detail = None, ""
            try:
                status, body = self.daemon.get(path, PROBE_TIMEOUT_S)
                if status != 200:
                    codes, detail = {"UNAVAILABLE"}, f"{status} {body[:100]!r}"
            except (OSError, ssl.SSLError, http.client.HTTPException) as error:
                codes = {"HANG", "HANG-NEW"} if isinstance(error, TimeoutError) else {"CONNECT", "BROKEN"}
                detail = f"{type(error).__name__}: {error}"
            if codes:
                self.judge.error(f"probe {path}", types.SimpleNamespace(name="probe"), codes, begun, time.monotonic(), detail)
            else:
                self.probes.append((self.at(), time.monotonic() - begun))

    # Phases.

    def run_phase(self, phase):
        self.phase = phase
        until = time.monotonic() + phase.seconds
        before = dict(self.judge.counts)
        threads = []
        for name in phase.faults:
            chance = random.Random(f"{self.options.seed}/{phase.number}/{name}")
            thread = threading.Thread(target=self._act, args=(name, chance, until), daemon=True)
            thread.start()
            threads.append(thread)
        while time.monotonic() < until or any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            if time.monotonic() > until + 180:
                raise RunFailed(f"phase {phase.number} does not end: {', '.join(phase.faults)}")
        self.settle()
        counts = self.judge.counts
        self.phases.append((phase, {key: counts[key] - before.get(key, 0) for key in ("calls", "items", "bytes")}))

    def _act(self, name, chance, until):
        seconds = until - time.monotonic()
        try:
            soak_faults.FAULTS[name].act(self, chance, until)
            # On a busy machine the time may be over before it has done anything.
            while not self.effects[name] and time.monotonic() < until + EFFECT_SECONDS:
                soak_faults.FAULTS[name].act(self, chance, time.monotonic() + seconds)
        except Exception as error:  # It is reported, and the run goes on to its end.
            self.judge.violation("defect of the soak", f"fault {name}: {type(error).__name__}: {error}")

    def pause(self):
        self.paused.set()
        for worker in self.workers:
            if not worker.idle.wait(soak_load.DEADLINE_S + soak_load.MARGIN_S + 10):
                self.judge.violation("defect of the soak", f"{worker.name} does not pause")

    def resume(self):
        for worker in self.workers:
            worker.idle.clear()
        self.paused.clear()

    def settle(self):
        """Checks that without clients everything is as before; after a start, records the baseline first."""
        if self.baseline is None:
            self.warm_up()
        self.pause()
        try:
            if self.baseline is None:
                self.baseline = self._calm()
            else:
                self._compare()
            self._metrics()
        except (OSError, http.client.HTTPException, RunFailed, KeyError) as error:
            self.judge.violation("the daemon is gone", f"{type(error).__name__}: {error}")
            if self.daemon.process.poll() is not None:
                raise RunFailed(f"the daemon ended with {self.daemon.process.returncode}:\n{self.daemon.log_path.read_text()[-2000:]}") from None
        finally:
            self.resume()

    def warm_up(self):
        """Starts every engine and fills every cache, so that later work adds nothing."""
        for backend in ("uring", "mmap", "pread", "auto", "uring"):
            self.daemon.set_backend(backend)
            time.sleep(SMOKE_WARM_UP_SECONDS if self.options.smoke else WARM_UP_SECONDS)

    def _held(self):
        files = self.daemon.open_files()
        objects = files.pop("an object", 0)
        # The connection of this request, and probes.
        sockets = sum(count for name, count in files.items() if name.startswith("socket:"))
        return {"descriptors": sum(files.values()) - sockets, "sockets": sockets, "objects": objects,
                "threads": self.daemon.sample()["threads"], "mapped": self.daemon.mappings(), "files": files}

    def _calm(self):
        """Its resources once they have not changed for two seconds (half a second in the smoke test)."""
        seen, until = [], time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            held = self._held()
            same = seen and all(seen[-1][what] == held[what] for what in ("descriptors", "threads"))
            seen = [*seen, held] if same else [held]
            if len(seen) >= (5 if self.options.smoke else 20):
                break
            time.sleep(0.1)
        return seen[-1]

    def _left(self, held):
        """The resources that exceed the baseline."""
        base, found = self.baseline, []
        for what in ("descriptors", "threads"):
            if held[what] > base[what]:
                found.append(f"{held[what]} {what}, {base[what]} before")
        if held["sockets"] > base["sockets"] + 2:
            found.append(f"{held['sockets']} sockets, {base['sockets']} before")
        if held["objects"] > OBJECT_DESCRIPTORS:
            found.append(f"{held['objects']} descriptors of objects")
        # A file is mapped when mmap first reads it; `extra` serves one twice.
        most = sum(len(dataset.paths) for dataset in self.datasets.values() if dataset.kind != "objects") + 1
        if held["mapped"]["files"] > most or held["mapped"]["deleted"]:
            found.append(f"{held['mapped']['files']} mappings of {most} files, {held['mapped']['deleted']} of them deleted")
        if held["mapped"]["all"] - held["mapped"]["objects"] > base["mapped"]["all"] - base["mapped"]["objects"] + MAPPINGS_SLACK:
            found.append(f"{held['mapped']['all']} mappings, {base['mapped']['all']} before")
        return found

    def _compare(self):
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            held = self._held()
            left = self._left(held)
            if not left or time.monotonic() > until:
                break
            time.sleep(0.1)
        if left:
            more = held["files"] - self.baseline["files"]
            self.judge.violation("left behind", f"{'; '.join(left)} ({dict(more)})")
        # From now on these resources are part of the baseline and are not reported again.
        self.baseline = {**held, "threads": max(held["threads"], self.baseline["threads"])} if left else self.baseline

    def _metrics(self):
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            metrics = self.daemon.metrics()
            busy = {name: total(metrics, name) for name in ("ringfetch_in_flight_reads", "ringfetch_queued_reads", "ringfetch_memory_in_use_bytes")}
            busy["grpc connections"] = total(metrics, "ringfetch_connections", 'transport="grpc"')
            if not any(busy.values()) or time.monotonic() > until:
                break
            time.sleep(0.1)
        if any(busy.values()):
            self.judge.violation("metrics", f"idle, and yet {busy}")
        for series, value in metrics.items():
            name, labels = series
            if name.endswith(("_total", "_count", "_bucket")) and value < self.counters.get(series, 0) and 'dataset="extra"' not in labels:
                self.judge.violation("metrics", f"{name}{{{labels}}} fell from {self.counters[series]} to {value}")
        self.counters = metrics
        if total(metrics, "ringfetch_shard_failures_total"):
            self.judge.violation("shard failed", "ringfetch_shard_failures_total")
        for dataset, items in self.judge.items.items():
            counted = total(metrics, "ringfetch_reads_total", f'dataset="{dataset}"', 'result="ok"')
            if counted < items:
                self.judge.violation("metrics", f"{dataset}: clients got {items} items, ringfetch_reads_total has {counted:.0f}")

    def idle_faults(self):
        """Faults of the phases so far that did nothing."""
        return sorted({name for phase, _ in self.phases for name in phase.faults if not self.effects[name]})

    def log_lines(self):
        """Log lines that must not occur."""
        found = []
        for line in self.daemon.log_path.read_text(errors="replace").splitlines():
            if "panicked" in line or ('"level":"ERROR"' in line and not any(text in line for text in EXPECTED_ERRORS)):
                found.append(line[:300])
        return found

    def run(self, phases):
        self.daemon.start()
        self.phase = soak_faults.Phase(-1, (), 0)
        for target in (self.watch, self.probe):
            threading.Thread(target=target, daemon=True).start()
        for worker in self.workers:
            worker.start()
        self.settle()
        for phase in phases:
            counts = self.judge.counts
            broken = len(self.judge.violations)
            say(f"{self.at():7.1f} s  phase {phase.number + 1} of {len(phases)}: {', '.join(phase.faults)} "
                f"({counts['items']:,} items right{f', {broken} VIOLATIONS' if broken else ''})")
            self.run_phase(phase)
        self.phase = soak_faults.Phase(-1, (), 0)
        for name in self.idle_faults():
            self.judge.violation("defect of the soak", f"the fault {name} did nothing")
        self.pause()
        self.ended.set()
        time.sleep(2 * SAMPLE_SECONDS)
        code = self.daemon.stop()
        if code != 0:
            self.judge.violation("exit code", f"{code} at the end")
        for line in self.log_lines():
            self.judge.violation("log", line)


def lacking(options):
    """What this machine lacks: {need: how to get it}."""
    found = {}
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        found["fuse"] = "root and /dev/fuse"
    elif not options.slowdisk.exists():
        found["fuse"] = f"{options.slowdisk} (cargo build --release -p ringfetch-slowdisk)"
    if not Cgroup.available():
        found["cgroup"] = "root and a memory cgroup, version 1"
    if not FAKETIME.exists():
        found["faketime"] = "libfaketime (package libfaketime)"
    if not shutil.which("openssl"):
        found["openssl"] = "openssl"
    return found


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="of the schedule, the load and the data (default: of the clock)")
    parser.add_argument("--minutes", type=float, default=20, help="about so long (default: 20)")
    parser.add_argument("--only", help="names of faults with commas between them (default: all)")
    parser.add_argument("--smoke", action="store_true", help="every fault once, in about a minute, with a fixed seed")
    parser.add_argument("--need", default="", help="what this machine must have, with commas between: fuse, cgroup, faketime, openssl")
    parser.add_argument("--daemon", type=pathlib.Path, default=ringfetch.RINGFETCHD, help="default: the release build")
    parser.add_argument("--directory", type=pathlib.Path, help="for the data; on a disk (default: target/)")
    parser.add_argument("--out", type=pathlib.Path, help="for the report (default: target/soak)")
    parser.add_argument("--verbose", action="store_true", help="also restarts, as they happen")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes: more than 0")
    needs = {need for fault in soak_faults.FAULTS.values() for need in fault.needs}
    if options.need and not set(options.need.split(",")) <= needs:
        parser.error(f"--need: there are {', '.join(sorted(needs))}")
    options.names = options.only.split(",") if options.only else sorted(soak_faults.FAULTS)
    unknown = [name for name in options.names if name not in soak_faults.FAULTS]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}: no such fault. There are: {', '.join(sorted(soak_faults.FAULTS))}")
    if options.seed is None:
        options.seed = SMOKE.seed if options.smoke else time.time_ns() // 1_000_000 % 1_000_000
    options.daemon = options.daemon.absolute()
    options.slowdisk = options.daemon.with_name("slowdisk")
    options.out = options.out or ringfetch.TARGET.parent / "soak"
    return options


def command_line(options):
    words = ["bench/soak.py", "--smoke"] if options.smoke else ["bench/soak.py", f"--minutes {options.minutes:g}"]
    return " ".join([*words, f"--seed {options.seed}", *([f"--only {options.only}"] if options.only else [])])


def plan(options, missing):
    names = [name for name in options.names if not soak_faults.FAULTS[name].needs & set(missing)]
    if not names:
        sys.exit(f"nothing is left: this machine lacks {', '.join(missing.values())}")
    if options.smoke:
        return soak_faults.smoke(options.seed, names, SMOKE.seconds)
    return soak_faults.schedule(options.seed, options.minutes * 60, names)


def main():
    options = parse()
    if options.list:
        for name, fault in sorted(soak_faults.FAULTS.items()):
            print(f"{name:14} {fault.act.__doc__}")
        return 0
    if not options.daemon.exists():
        sys.exit(f"there is no {options.daemon}: cargo build --release, or --daemon PATH")
    missing = lacking(options)
    needed = [what for need, what in missing.items() if need in options.need.split(",")]
    if needed:
        sys.exit(f"this machine lacks {', '.join(needed)}")
    for need, what in missing.items():
        left_out = [name for name in options.names if need in soak_faults.FAULTS[name].needs]
        if left_out:
            say(f"left out: {', '.join(left_out)}: this machine lacks {what}")
    phases = plan(options, missing)
    say(f"{command_line(options)}: {len(phases)} phases")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    exit_on_sigterm()
    # The daemon takes relative paths as relative to its configuration.
    directory = (options.directory or ringfetch.TARGET.parent).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    soak, failure = None, None
    # However it ends, mounts, cgroups, the daemon and the directory are removed.
    with tempfile.TemporaryDirectory(dir=directory, prefix="soak-") as scratch, contextlib.ExitStack() as stack:
        try:
            soak = Soak(options, scratch, stack, missing)
            soak.run(phases)
        except RunFailed as error:
            failure = str(error)
        except KeyboardInterrupt:
            failure = "interrupted"
        if soak is None:
            sys.exit(failure)
        soak.ended.set()
        facts = {**machine.facts(soak.data), "command": command_line(options), "daemon": str(options.daemon)}
        log = soak.daemon.log_path.read_text(errors="replace") if soak.daemon.log_path.exists() else ""
    report = soak_report.Report(soak, phases, facts, missing, failure)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.md").write_text(report.markdown())
    (options.out / "soak.svg").write_text(report.plot())
    (options.out / "daemon.log").write_text(log)
    with open(options.out / "soak.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, soak_report.COLUMNS)
        writer.writeheader()
        writer.writerows(soak.samples)
    print(report.markdown())
    say(f"the report is in {os.path.relpath(options.out)}")
    return 0 if report.held() else 1


if __name__ == "__main__":
    sys.exit(main())
