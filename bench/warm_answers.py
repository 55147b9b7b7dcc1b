#!/usr/bin/env python3
"""What a warm answer costs by the way its bytes take to the socket, and which ways send what the file no longer has.

    bench/warm_answers.py --file /data/warm.bin

One process answers requests of `--bytes` at random places of a resident file over loopback, on one CPU; another asks, on
another CPU, over 16 connections:

copy      preadv2(RWF_NOWAIT) into a buffer, statx for the length, send: what ringfetchd does
mapping   cachestat for the residency, send from a mapping, statx: one copy less
sendfile  sendfile: no copy on this side, as nginx does it

CPU is the answering process's; ways alternate. Then each way sends a piece which the other side does not receive before the
file has been cut off in the middle of a page. docs/adr/0017-warm-answers-are-copied.md has what came of it.
"""

import argparse
import ctypes
import mmap
import os
import pathlib
import random
import resource
import select
import socket
import statistics
import tempfile
import time

CONNECTIONS = 16
SYS_CACHESTAT = 451
SEND_BUFFER_BYTES = 8 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


class Copy:
    def __init__(self, file, size, piece):
        self.file, self.buffer = file, bytearray(piece)

    def send(self, sock, offset, piece):
        if os.preadv(self.file, [self.buffer], offset, os.RWF_NOWAIT) != piece:
            raise SystemExit("the file does not stay in the page cache")
        os.fstat(self.file)
        sock.sendall(self.buffer)


class Mapping:
    def __init__(self, file, size, piece):
        self.file = file
        self.view = memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))
        self.range, self.found = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()

    def send(self, sock, offset, piece):
        self.range[:] = offset, piece
        LIBC.syscall(SYS_CACHESTAT, self.file, self.range, self.found, 0)
        if self.found[0] * mmap.PAGESIZE < piece:
            raise SystemExit("the file does not stay in the page cache, or this kernel has no cachestat (Linux 6.5)")
        sock.sendall(self.view[offset:offset + piece])
        os.fstat(self.file)


class Sendfile:
    def __init__(self, file, size, piece):
        self.file = file

    def send(self, sock, offset, piece):
        sent = 0
        while sent < piece:
            sent += os.sendfile(sock.fileno(), self.file, offset + sent, piece - sent)


WAYS = {"copy": Copy, "mapping": Mapping, "sendfile": Sendfile}


def pairs_of_sockets(count):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(count):
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            yield client, server


def ask(clients, piece, cpu):
    """The other process: on each connection sends the next request once it has its answer, until they are closed."""
    os.sched_setaffinity(0, {cpu})
    buffer, missing, poll = bytearray(1 << 20), {}, select.poll()
    by_number = {client.fileno(): client for client in clients}
    for number, client in by_number.items():
        poll.register(number, select.POLLIN)
        client.sendall(b"?")
        missing[number] = piece
    while True:
        for number, _ in poll.poll():
            got = by_number[number].recv_into(buffer, missing[number])
            if not got:
                return
            missing[number] -= got
            if not missing[number]:
                missing[number] = piece
                by_number[number].sendall(b"?")


def measure(way, path, piece, seconds, cpus):
    """Answers per second, and CPU microseconds per answer."""
    pairs = list(pairs_of_sockets(CONNECTIONS))
    child = os.fork()
    if not child:
        for _, server in pairs:
            server.close()
        try:
            ask([client for client, _ in pairs], piece, cpus[1])
        except OSError:
            pass
        os._exit(0)
    os.sched_setaffinity(0, {cpus[0]})
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        sender = WAYS[way](file.fileno(), size, piece)
        servers = {server.fileno(): server for _, server in pairs}
        poll = select.poll()
        for client, server in pairs:
            client.close()
            poll.register(server, select.POLLIN)
        answered, start, until = -1, None, time.monotonic() + seconds + 0.2
        while (now := time.monotonic()) < until:
            # The first 0.2 s warm up.
            if start is None and now > until - seconds:
                answered, start, used = 0, now, resource.getrusage(resource.RUSAGE_SELF)
            for number, _ in poll.poll(100):
                servers[number].recv(1)
                sender.send(servers[number], random.randrange(size // piece) * piece, piece)
                answered += 1
        end = resource.getrusage(resource.RUSAGE_SELF)
    for server in servers.values():
        server.close()
    os.waitpid(child, 0)
    cpu = end.ru_utime - used.ru_utime + end.ru_stime - used.ru_stime
    return answered / (now - start), cpu * 1e6 / answered


def sent_after_truncation(way, directory, piece):
    """Whether data sent before the truncation arrives unchanged."""
    path = pathlib.Path(directory) / way
    path.write_bytes(b"x" * 2 * piece)
    [(client, server)] = pairs_of_sockets(1)
    with open(path, "rb") as file, client, server:
        WAYS[way](file.fileno(), 2 * piece, piece).send(server, 0, piece)
        os.truncate(path, piece // 2 + 100)
        received = bytearray()
        while len(received) < piece:
            received += client.recv(piece - len(received))
    return received == b"x" * piece


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, type=pathlib.Path, help="what is read; it must fit into memory")
    parser.add_argument("--bytes", type=int, default=65536, help="of an answer (default: 65536)")
    parser.add_argument("--seconds", type=float, default=1.0, help="a run (default: 1)")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        parser.error("needs two CPUs")
    if os.path.getsize(arguments.file) < arguments.bytes:
        parser.error(f"--file: has fewer than {arguments.bytes} bytes")
    with open(arguments.file, "rb", buffering=0) as file:
        while file.read(4 << 20):
            pass
    results = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            results[way].append(measure(way, arguments.file, arguments.bytes, arguments.seconds, cpus))
    print(f"{'way':9}{'answers/s':>11}{'CPU us':>9}  lowest to highest   cut off while under way")
    with tempfile.TemporaryDirectory(dir=arguments.file.parent) as directory:
        for way, runs in results.items():
            rates, costs = zip(*runs, strict=True)
            kept = sent_after_truncation(way, directory, arguments.bytes)
            print(f"{way:9}{statistics.median(rates):11,.0f}{statistics.median(costs):9.1f}  "
                  f"{min(costs):7.1f} to {max(costs):<7.1f}  {'as it was' if kept else 'ARRIVES WITH ZEROS'}")


if __name__ == "__main__":
    main()
