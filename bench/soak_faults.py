"""The faults injected while the daemon serves, on a schedule that is a pure function of the seed.

A fault is a function of the soak, its own random generator, and its end time; while it breaks something it opens a window
that states which errors it explains. Clients must not notice faults that explain nothing."""

import collections
import contextlib
import fcntl
import http.client
import json
import os
import random
import resource
import signal
import socket
import ssl
import struct
import time

from soak_daemon import BACKENDS, FAKETIME, memory_bound
from soak_load import DEADLINE_S, FETCH, MARGIN_S
from soak_wire import MESSAGES, Broken, Connection, Late

# Error codes of a daemon that has ended, is ending or is starting.
GONE = {"CONNECT", "BROKEN", "UNAVAILABLE", "HANG-NEW", "HANG"}
# Misbehaving clients use their own address, since shares are by address.
ATTACKER = "127.0.0.2"
# In addition to the bound of resident memory: room for file pages, which count against the limit.
CGROUP_CACHE_BYTES = 12 << 20
PHASE_SECONDS = (6, 12)
# How long a reload that must succeed is repeated.
RELOAD_SECONDS = 10

# `restarts`: it ends and starts the daemon, or stops it; at most one such fault at a time. `needs`: requirements on the machine.
Fault = collections.namedtuple("Fault", "name act restarts needs")
FAULTS = {}
Phase = collections.namedtuple("Phase", "number faults seconds")


def fault(name, restarts=False, needs=()):
    def register(act):
        FAULTS[name] = Fault(name, act, restarts, frozenset(needs))
        return act
    return register


def schedule(seed, seconds, names, pause_seconds=5.0, phase_seconds=PHASE_SECONDS, together=3):
    """Phases of one to three faults at a time, at most one of which restarts the daemon. Every fault occurs once before any
    occurs again."""
    chance, phases, spent = random.Random(f"{seed}/schedule"), [], 0.0
    bags = {True: [], False: []}
    kinds = {restarts: sorted(name for name in names if FAULTS[name].restarts is restarts) for restarts in bags}

    def draw(restarts):
        if not bags[restarts]:
            bags[restarts] = chance.sample(kinds[restarts], len(kinds[restarts]))
        return bags[restarts].pop()

    while spent < seconds or not phases:
        length = chance.uniform(*phase_seconds)
        chosen = [draw(False) for _ in range(min(chance.randint(1, together), len(kinds[False])))]
        if kinds[True] and (chance.random() < 0.5 or not chosen):
            # Do not start with a truncated file or a wrong configuration.
            chosen = [*[name for name in chosen if name != "truncate"][:together - 1], draw(True)]
        phases.append(Phase(len(phases), tuple(dict.fromkeys(chosen)), round(length, 1)))
        spent += length + pause_seconds
    return phases


def sleep(until, seconds):
    """Sleeps, but not beyond `until`. False: the time is over."""
    time.sleep(max(0.0, min(seconds, until - time.monotonic())))
    return time.monotonic() < until


@fault("flip")
def flip(soak, chance, until):
    """Switches the engine's backend or a dataset's, repeatedly."""
    while sleep(until, chance.uniform(0.05, 0.8)):
        backend = f"BACKEND_{chance.choice(BACKENDS).upper()}"
        dataset = chance.choice([None, None, "npy", "swap", "objects", *(["slow"] if soak.disk else [])])
        soak.effects["flip"] += soak.admin_call("SetBackend", backend=backend, dataset=dataset)


@fault("cold")
def cold(soak, chance, until):
    """Drops the files from the page cache."""
    while sleep(until, chance.uniform(0.2, 1.0)):
        for folder, _, files in os.walk(soak.data):
            for name in files:
                with contextlib.suppress(OSError):
                    file = os.open(os.path.join(folder, name), os.O_RDONLY)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(file)
                    soak.effects["cold"] += 1


@fault("reload")
def reload(soak, chance, until):
    """Reloads with other limits, another backend, a dataset more or less; through the admin port or SIGHUP."""
    goes_on = True
    while goes_on:
        goes_on = sleep(until, chance.uniform(0.1, 1.0))
        with soak.daemon.config_lock:
            config = soak.daemon.config
            config["engine"]["backend"] = chance.choice(BACKENDS)
            config["limits"]["http_ranges"] = chance.randint(8, 64)
            config["timeouts"]["idle_ms"] = chance.randint(100_000, 300_000)
            # Removed at the end, with its descriptors.
            extra = [{**soak.datasets["blocks"].describe(), "name": "extra"}] if goes_on and chance.random() < 0.5 else []
            config["datasets"] = [dataset for dataset in config["datasets"] if dataset["name"] != "extra"] + extra
            if goes_on and chance.random() < 0.3:
                soak.daemon.write_config()
                soak.effects["reload"] += soak.hang_up()
            else:
                soak.effects["reload"] += soak.reload()


def mistakes(config):
    """Configurations that must be refused."""
    def with_dataset(**changes):
        return {**config, "datasets": [*config["datasets"], {"name": "bad", "kind": "blocks", "path": "/dev/null", "block_bytes": 4096,
                                                             **changes}]}
    return [
        {**config, "limits": {**config["limits"], "no_such_key": 1}},
        {**config, "limits": {**config["limits"], "response_bytes": 1 << 40}},
        {**config, "engine": {**config["engine"], "backend": "floppy"}},
        with_dataset(path="/nonexistent/file"), with_dataset(block_bytes=0), with_dataset(kind="vectors", layout="npy"),
        with_dataset(name="blocks"), with_dataset(path="/proc/self/mem"), with_dataset(path=[[]]),
        {**config, "datasets": "none"},
    ]


@fault("bad-reload")
def bad_reload(soak, chance, until):
    """Checks that configurations with a mistake are refused and change nothing."""
    soak.effects["bad-reload"] += refuse_mistakes(soak, chance, until)


def refuse_mistakes(soak, chance, until):
    """How many configurations with a mistake were refused."""
    daemon, refused = soak.daemon, 0
    while sleep(until, chance.uniform(0.1, 1.0)):
        with daemon.config_lock:
            bad = chance.choice(mistakes(daemon.config))
            refused += soak.reload_mistake(json.dumps(bad)[-300:], bad)
            soak.reload()
    return refused


@fault("replace")
def replace(soak, chance, until):
    """Replaces a file by rename and reloads; replaces, removes and restores objects."""
    daemon, swap, objects = soak.daemon, soak.datasets["swap"], soak.datasets["objects"]
    while sleep(until, chance.uniform(0.02, 0.2)):
        if chance.random() < 0.1:
            with daemon.config_lock, swap.history.change(swap.history.newest + 1):
                swap.write(swap.history.now)
                soak.effects["replace"] += 1
                # Until a reload succeeds, the old version may be answered.
                soak.reload_until(until + RELOAD_SECONDS)
            continue
        name = chance.choice(list(objects.objects))
        history = objects.objects[name]
        soak.effects["replace"] += 1
        if history.now is not None and chance.random() < 0.4:
            with history.change(None):
                os.remove(os.path.join(objects.directory, name))
        else:
            with history.change(history.newest + 1):
                objects.write(name, history.newest)


@fault("truncate")
def truncate(soak, chance, until):
    """Truncates a served file at any byte; then replaces it whole and reloads."""
    daemon, cut = soak.daemon, soak.datasets["cut"]
    # A reload now would find the short file.
    with daemon.config_lock:
        cut.cut_at = chance.randrange(cut.length) if chance.random() < 0.7 else chance.randrange(cut.count) * cut.item_bytes
        cut.cut_until = float("inf")
        os.truncate(cut.paths[0], cut.cut_at)
        soak.effects["truncate"] += 1
        sleep(until, until - time.monotonic())
        with cut.history.change(cut.history.newest + 1):
            cut.write(cut.history.now)
            soak.reload_until(time.monotonic() + RELOAD_SECONDS)
        cut.cut_until = time.monotonic()


@fault("eio", needs=("fuse",))
def eio(soak, chance, until):
    """Fails reads of the slow disk."""
    before = soak.disk.ask("report")["reads"]["failed"]
    with soak.faults.window("eio", {"DATA_LOSS", "BROKEN"}, {"slow", "slow-objects"}, after_s=1.0), \
            soak.faults.window("eio", {"INVALID_ARGUMENT", "FAILED_PRECONDITION"}, {"admin"}, after_s=1.0):
        while True:
            probability = chance.choice([0.01, 0.1, 0.5, 1.0])
            soak.disk.ask(f"set error-probability {probability}")
            begin = chance.randrange(1 << 22)
            soak.disk.ask(f"set error-ranges {begin}+{chance.randint(1, 1 << 20)}")
            if not sleep(until, chance.uniform(0.3, 2.0)):
                break
        soak.disk.ask("set error-probability 0")
        soak.disk.ask("set error-ranges 0+0")
    soak.effects["eio"] += soak.disk.ask("report")["reads"]["failed"] - before


@fault("short", needs=("fuse",))
def short(soak, chance, until):
    """Makes direct reads of the slow disk return half of the requested bytes."""
    before = soak.disk.ask("report")["reads"]["short"]
    soak.disk.ask(f"set short-probability {chance.choice([0.1, 0.25, 0.4])}")
    sleep(until, until - time.monotonic())
    soak.disk.ask("set short-probability 0")
    soak.effects["short"] += soak.disk.ask("report")["reads"]["short"] - before


@fault("delay", needs=("fuse",))
def delay(soak, chance, until):
    """The slow disk takes up to two seconds per read, or answers nothing for a while."""
    # Threads that wait for this disk (mmap, pread, auto) are not available to others; only rings are isolated, and a
    # restarted daemon has the backends of its configuration.
    apart = not any(name in {"flip", "reload", "bad-reload"} or FAULTS[name].restarts for name in soak.phase.faults)
    if apart:
        # Set in the configuration, since a reload by another fault would revert a switch.
        _slow_disk_backend(soak, "uring")
    with soak.faults.window("delay", {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "BROKEN", "UNAVAILABLE"},
                            {"slow", "slow-objects"} if apart else None, after_s=DEADLINE_S + MARGIN_S):
        while True:
            soak.effects["delay"] += 1
            if chance.random() < 0.4:
                soak.disk.ask("hold")
                more = sleep(until, chance.uniform(0.5, 4.5))
                soak.disk.ask("release")
            else:
                soak.disk.ask(f"set latency {chance.choice([1, 20, 200, 1000])}ms")
                soak.disk.ask(f"set jitter {chance.choice([1, 5, 50])}ms")
                more = sleep(until, chance.uniform(0.5, 3.0))
            if not more:
                break
        soak.disk.ask("set latency 0")
        soak.disk.ask("set jitter 0")
    if apart:
        _slow_disk_backend(soak, "inherit")


def _slow_disk_backend(soak, backend):
    with soak.daemon.config_lock:
        for dataset in soak.daemon.config["datasets"]:
            if dataset["name"] in ("slow", "slow-objects"):
                dataset["backend"] = backend
        soak.reload()


def _attack(soak, window_bytes=65535, port="grpc"):
    return Connection(soak.daemon.addresses[port], soak.daemon.client_context("h2"), window_bytes=window_bytes, source=ATTACKER,
                      token=lambda: soak.daemon.principals.attacker)


def _big_request(soak):
    return MESSAGES["FetchBlocksRequest"](dataset="blocks", indices=range(min(700, soak.datasets["blocks"].count)))


def _reset(connection):
    """Closes it so that the kernel sends RST."""
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@fault("vanish")
def vanish(soak, chance, until):
    """Disconnects clients at any moment: reset, half-closed, in the middle of a frame or a handshake, with calls in
    flight."""
    kept = []
    while sleep(until, chance.uniform(0.005, 0.1)):
        way = chance.choice(["reset", "half-close", "half-frame", "silent", "half-request", "cancel", "http"])
        try:
            if way == "http":
                raw = socket.create_connection(soak.daemon.addresses["http"], 5, (ATTACKER, 0))
                head = f"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {soak.daemon.principals.attacker}\r\n"
                raw.sendall(head.encode() + chance.choice([b"", b"\r\n"]))
                kept.append(raw)
                soak.effects["vanish"] += 1
            elif way == "silent":
                kept.append(socket.create_connection(soak.daemon.addresses[chance.choice(["grpc", "http"])], 5, (ATTACKER, 0)))
            else:
                connection = _attack(soak)
                stream = connection.start(FETCH + "FetchBlocks", _big_request(soak) if way != "half-request" else None, more=True)
                if way == "half-frame":
                    connection.socket.sendall(b"\0\0\xff\0\0\0\0\0\1" + b"x" * 20)
                elif way == "half-close":
                    with contextlib.suppress(OSError):
                        connection.socket.shutdown(socket.SHUT_WR)
                elif way == "cancel":
                    connection.cancel(stream)
                soak.effects["vanish"] += 1
                if way == "reset" or chance.random() < 0.3:
                    time.sleep(chance.choice([0, 0.001, 0.01]))
                    _reset(connection)
                else:
                    kept.append(connection)
        except (OSError, ssl.SSLError, Broken):
            pass  # The daemon may be gone, or have closed it.
        while len(kept) > 40:
            kept.pop(chance.randrange(len(kept))).close()
    for connection in kept:
        connection.close()


@fault("slow-readers")
def slow_readers(soak, chance, until):
    """Clients request much and read nothing of it, or a little at a time."""
    readers = []
    while sleep(until, chance.uniform(0.01, 0.2)):
        try:
            if len(readers) < 24:
                reader = _attack(soak, window_bytes=chance.choice([0, 1, 1 << 14, 1 << 22]))
                for _ in range(chance.randint(1, 8)):
                    reader.start(FETCH + "FetchBlocks", _big_request(soak), DEADLINE_S)
                    soak.effects["slow-readers"] += 1
                readers.append(reader)
            else:
                reader = chance.choice(readers)
                reader.socket.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    if not reader.socket.recv(2048):
                        raise OSError("ended")
        except (OSError, ssl.SSLError, Broken):
            if readers:
                readers.pop(chance.randrange(len(readers))).close()
    for reader in readers:
        reader.close()


@fault("emfile")
def emfile(soak, chance, until):
    """Limits the running daemon to no or few more descriptors."""
    daemon = soak.daemon
    # Connections are refused or wait; objects, and datasets on a reload, cannot be opened.
    with soak.faults.window("emfile", {"CONNECT", "BROKEN", "UNAVAILABLE", "HANG-NEW"}, after_s=2.0), \
            soak.faults.window("emfile", {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "INTERNAL"}, {"admin"}, after_s=2.0):
        while time.monotonic() < until:
            with soak.restarting:
                sample = daemon.sample()
                _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
                limit = sample["descriptors"] + chance.choice([0, 0, 1, 3])
                resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (limit, hard))
                soak.effects["emfile"] += 1
                sleep(until, chance.uniform(0.5, 3.0))
                resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
            sleep(until, chance.uniform(0.2, 1.0))


@fault("memory", needs=("cgroup",))
def memory(soak, chance, until):
    """Limits the cgroup to the documented memory, with little room for file pages."""
    bound = memory_bound(256, soak.daemon.with_tls) + CGROUP_CACHE_BYTES
    before = soak.cgroup.failures()
    if not soak.cgroup.limit(bound):
        soak.judge.violation("memory", f"the cgroup does not get below {bound >> 20} MiB")
    at, count = 0, soak.datasets["ballast"].count
    while sleep(until, 0.002):
        with contextlib.suppress(OSError, Broken, Late):
            connection = _attack(soak, window_bytes=1 << 22)
            with contextlib.closing(connection):
                for _ in range(20):
                    request = MESSAGES["FetchBlocksRequest"](dataset="ballast", indices=range(at, at + 512))
                    _, _, messages = connection.call(FETCH + "FetchBlocks", request, DEADLINE_S, DEADLINE_S + MARGIN_S)
                    at = (at + 512) % count
                    for message in messages:
                        if not message.data or message.data.strip(b"\0"):
                            soak.judge.violation("wrong bytes", "ballast that is not zero")
    soak.cgroup.limit(-1)
    soak.effects["memory"] += soak.cgroup.failures() - before


@fault("kill", restarts=True)
def kill(soak, chance, until):
    """SIGKILL under load, and a start."""
    sleep(until, chance.uniform(0.5, 3))
    soak.restart("kill")
    soak.effects["kill"] += 1
    sleep(until, until - time.monotonic())


@fault("term", restarts=True)
def term(soak, chance, until):
    """SIGTERM: it drains, exits with 0, and is started again."""
    sleep(until, chance.uniform(0.5, 3))
    soak.restart("term")
    soak.effects["term"] += 1
    sleep(until, until - time.monotonic())


@fault("stopped", restarts=True)
def stopped(soak, chance, until):
    """SIGSTOP for longer than each timeout of connections, then SIGCONT. Calls may pass their own deadline meanwhile."""
    while sleep(until, chance.uniform(0.5, 3)):
        with soak.faults.window("stopped", {"DEADLINE_EXCEEDED"}):
            soak.daemon.process.send_signal(signal.SIGSTOP)
            try:
                time.sleep(chance.uniform(3.2, 4))
            finally:
                soak.daemon.process.send_signal(signal.SIGCONT)
            soak.effects["stopped"] += 1


@fault("clock", restarts=True, needs=("faketime",))
def clock(soak, chance, until):
    """The wall clock jumps by hours and years, forward and back."""
    offset = soak.directory / "clock"
    offset.write_text("+0")
    soak.restart("clock", environment={
        "LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1"})
    # Outside a certificate's validity handshakes are rightly refused.
    jumps = ["+0", "+3600", "+86400"] if soak.daemon.with_tls else ["+3600", "-7200", "+86400", "+315360000", "-315360000"]
    while sleep(until, chance.uniform(0.5, 2.0)):
        offset.write_text(chance.choice(jumps))
        soak.effects["clock"] += 1
    offset.write_text("+0")
    soak.restart("clock")


@fault("log-full", restarts=True)
def log_full(soak, chance, until):
    """The log's disk is full."""
    with open("/dev/full", "wb") as full:
        soak.restart("log-full", stderr=full)
        # Each is logged.
        soak.effects["log-full"] += refuse_mistakes(soak, chance, until)
        soak.restart("log-full")


@fault("log-stall", restarts=True)
def log_stall(soak, chance, until):
    """The log is a pipe that is not read."""
    read, write = os.pipe()
    try:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        with os.fdopen(write, "wb") as pipe:
            soak.restart("log-stall", stderr=pipe)
        soak.effects["log-stall"] += refuse_mistakes(soak, chance, until)
        soak.restart("log-stall")
    finally:
        os.close(read)


@contextlib.contextmanager
def over_tls(soak, chance, fault):
    """Runs the fault with TLS on; half of the time TLS is turned off afterwards."""
    if not soak.daemon.with_tls:
        soak.restart(fault, how="term", with_tls=True)
    yield
    if chance.random() < 0.5:
        soak.restart(fault, how="term", with_tls=False)


@fault("certificates", restarts=True, needs=("openssl",))
def certificates(soak, chance, until):
    """TLS on every port, with certificates that are replaced, some of them invalid."""
    made = soak.daemon.certificates
    with over_tls(soak, chance, "certificates"):
        while sleep(until, chance.uniform(0.3, 1.5)):
            with soak.daemon.config_lock:
                good = made.path("server.pem").read_text(), made.path("server.key").read_text()
                if chance.random() < 0.5:
                    made.make("server")
                    # If the reload fails (a failing disk), the old certificate may stay for now.
                    reloaded = soak.reload()
                    soak.effects["certificates"] += reloaded
                    with contextlib.suppress(OSError, ssl.SSLError):
                        if reloaded and soak.daemon.presented_certificate() != made.server_certificate():
                            soak.judge.violation("certificate", "the new one is not shown after a reload")
                    continue
                bad = chance.choice(["", "no PEM", good[0][:len(good[0]) // 2], made.path("ca.pem").read_text()])
                shown = None
                with contextlib.suppress(OSError, ssl.SSLError):
                    shown = soak.daemon.presented_certificate()
                made.path("server.pem").write_text(bad)
                soak.effects["certificates"] += soak.reload_mistake(f"a certificate file of {bad[:40]!r}")
                with contextlib.suppress(OSError, ssl.SSLError):
                    if shown and soak.daemon.presented_certificate() != shown:
                        soak.judge.violation("certificate", "another one is shown after a refused reload")
                made.path("server.pem").write_text(good[0])
                soak.reload()


def refused_and_let_in(soak, refused, let_in):
    """Checks that one credential is no longer accepted and the other one is."""
    for credential, expected in ((refused, 401), (let_in, 200)):
        with contextlib.suppress(OSError, ssl.SSLError, http.client.HTTPException):
            status, _ = soak.daemon.get("/v1/datasets", credential=credential)
            # 503: it is draining.
            if status not in (expected, 503):
                soak.judge.violation("credential", f"HTTP {status} to {credential}, {expected} expected")
    if let_in.kind == "certificate":
        with contextlib.suppress(OSError, ssl.SSLError, http.client.HTTPException):
            forged = soak.daemon.certificates.forged(let_in.value)
            status, _ = soak.daemon.get("/v1/datasets", credential=let_in._replace(value=forged))
            soak.judge.violation("credential", f"HTTP {status} to a certificate of {let_in.value} by another authority")


def rotate(soak, chance, until, kind):
    """Rotates credentials of this kind, or revokes them while clients use them; checks that invalid principals files are
    refused."""
    daemon, principals, cut_off = soak.daemon, soak.daemon.principals, {"UNAUTHENTICATED", "UNAVAILABLE", "BROKEN"}
    fault = {"token": "tokens", "certificate": "client-certificates"}[kind]
    while sleep(until, chance.uniform(0.1, 1.0)):
        with daemon.config_lock:
            if chance.random() < 0.3:
                principals.write(chance.choice(principals.mistakes()))
                soak.effects[fault] += soak.reload_mistake("a file of principals")
                principals.write()
                soak.reload_until(until + RELOAD_SECONDS)
                continue
            old, new = principals.credential(kind), principals.make(kind)
            if chance.random() < 0.5:
                # Rotation: for a while both are accepted.
                principals.accept(old, new)
                if not soak.reload_until(until + RELOAD_SECONDS):
                    continue  # Which credentials are in force is unknown for now.
                principals.use(new)
                sleep(until, chance.uniform(0, 0.5))
            # Requests in flight with the old one are cut off.
            with soak.faults.window(fault, cut_off, set(soak.datasets), after_s=1.0), contextlib.ExitStack() as longer:
                principals.accept(new)
                known = soak.reload_until(until + RELOAD_SECONDS)
                principals.use(new)
                soak.tell(f"{fault}: {old.value} is out, {new.value} in")
                soak.effects[fault] += known
                if known:
                    refused_and_let_in(soak, old, new)
                else:
                    # The file is read again every five seconds.
                    longer.enter_context(soak.faults.window(fault, cut_off, set(soak.datasets), after_s=8.0))


@fault("tokens")
def tokens(soak, chance, until):
    """Rotates tokens, or revokes them while clients use them; checks that invalid principals files are refused."""
    rotate(soak, chance, until, "token")


@fault("client-certificates", restarts=True, needs=("openssl",))
def client_certificates(soak, chance, until):
    """With TLS, rotates or revokes clients' certificates while clients use them; another authority's are refused."""
    with over_tls(soak, chance, "client-certificates"):
        rotate(soak, chance, until, "certificate")


def smoke(seed, names, phase_seconds):
    """Every fault once: one phase for each that restarts, the others spread over them."""
    chance = random.Random(f"{seed}/smoke")
    restarting = chance.sample([name for name in names if FAULTS[name].restarts], sum(FAULTS[name].restarts for name in names))
    others = chance.sample([name for name in names if not FAULTS[name].restarts], len(names) - len(restarting))
    groups = [[name] for name in restarting] or [[]]
    # Alone: while a file is truncated, nothing else may change the configuration.
    alone = [["truncate"]] if "truncate" in others else []
    for place, name in enumerate(name for name in others if name != "truncate"):
        groups[place % len(groups)].append(name)
    groups += alone
    return [Phase(number, tuple(group), phase_seconds) for number, group in enumerate(groups) if group]
