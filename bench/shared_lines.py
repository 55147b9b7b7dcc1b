#!/usr/bin/env python3
"""What do cores write to each other's cache lines for a read? Two CPUs do not show what that costs; sixteen do.

    pip install capstone
    bench/shared_lines.py                          single gRPC reads of one block, uring
    bench/shared_lines.py --backend mmap --transport http

Two cores of a daemon serve a connection each, one read at a time. One core is executed in single steps, then the other, and each
instruction's operands give the addresses that it read and wrote. A line counts if one core wrote it and the other read or wrote
it. Instructions that were not executed equally often for each read (heartbeats, timeouts) are left out, and so is what the kernel
writes. Every line is printed with its writes a read, and the functions that wrote it. Needs Linux on x86-64, ptrace, and a
daemon with symbols; takes a minute."""

import argparse
import bisect
import collections
import ctypes
import http.client
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import ringfetch
from processes import exit_on_sigterm
from soak_wire import Connection, field, packed

try:
    import capstone
    from capstone import x86
except ImportError:
    sys.exit("capstone decodes the instructions: pip install capstone")

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
LIBC.ptrace.restype = ctypes.c_long
# ptrace(2) and <linux/ptrace.h>.
SINGLESTEP, GETREGS, SETREGS, DETACH, SEIZE, INTERRUPT = 9, 12, 13, 17, 0x4206, 0x4207
WALL = 0x40000000
TRAP_FLAG = 0x100
READ, WRITE = 1, 2
LINE = 64
BLOCKS = 16384
# Of each core.
READS = 7


class Registers(ctypes.Structure):
    """struct user_regs_struct."""
    _fields_ = [(name, ctypes.c_ulonglong) for name in (
        "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs").split()]


def ptrace(request, thread, data=None):
    if LIBC.ptrace(request, thread, None, data) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"ptrace {request}")


class Decoder:
    """The operands in memory of each instruction."""

    def __init__(self, pid):
        self.memory = open(f"/proc/{pid}/mem", "rb", buffering=0)
        self.engine = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        self.engine.detail = True
        self.known = {}

    def operands(self, address):
        """[(base, index, scale, displacement, is thread-local, access)], and the instruction's length."""
        if address not in self.known:
            code = os.pread(self.memory.fileno(), 16, address)
            found = next(self.engine.disasm(code, address, 1))
            touches = not found.mnemonic.startswith(("lea", "nop", "prefetch"))
            self.known[address] = [
                (found.reg_name(operand.mem.base), found.reg_name(operand.mem.index), operand.mem.scale, operand.mem.disp,
                 operand.mem.segment == x86.X86_REG_FS, operand.access)
                for operand in found.operands if touches and operand.type == x86.X86_OP_MEM and operand.access], found.size
        return self.known[address]

    def touched(self, registers):
        """(line, access) of the next instruction's operands."""
        operands, length = self.operands(registers.rip)
        for base, index, scale, address, is_local, access in operands:
            if base:
                address += registers.rip + length if base == "rip" else getattr(registers, base, 0)
            if index:
                address += getattr(registers, index, 0) * scale
            if is_local:
                address += registers.fs_base
            yield (address & (1 << 64) - 1) // LINE, access


def stepped(pid, thread, work):
    """[(address of the instruction, line, access)] of a thread while `work` runs."""
    done = threading.Event()
    worker = threading.Thread(target=lambda: (work(), done.set()), daemon=True)
    decoder, registers, found = Decoder(pid), Registers(), []
    ptrace(SEIZE, thread)
    ptrace(INTERRUPT, thread)
    os.waitpid(thread, WALL)
    worker.start()
    while True:
        ptrace(GETREGS, thread, ctypes.byref(registers))
        found.extend((registers.rip, line, access) for line, access in decoder.touched(registers))
        ptrace(SINGLESTEP, thread)
        asleep_since = time.monotonic()
        while not os.waitpid(thread, WALL | os.WNOHANG)[0]:
            if done.is_set() and time.monotonic() - asleep_since > 0.3:
                release(thread, registers)
                return found


def release(thread, registers):
    """Lets a thread go that sleeps in a system call: only outside of it are steps really off."""
    ptrace(INTERRUPT, thread)
    os.waitpid(thread, WALL)
    for _ in range(3):
        ptrace(SINGLESTEP, thread)
        os.waitpid(thread, WALL)
    ptrace(GETREGS, thread, ctypes.byref(registers))
    registers.eflags &= ~TRAP_FLAG
    ptrace(SETREGS, thread, ctypes.byref(registers))
    ptrace(DETACH, thread)


class Symbols:
    """The functions of a running program."""

    def __init__(self, pid, binary):
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
        self.base = min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(binary)))
        text = subprocess.run(["nm", "-C", "--defined-only", binary], capture_output=True, text=True, check=True).stdout
        split = (line.split(" ", 2) for line in text.splitlines())
        self.functions = sorted((int(address, 16), name) for address, kind, name in split if kind in "tTwW")

    def of(self, address):
        at = bisect.bisect(self.functions, (address - self.base, "\uffff")) - 1
        return self.functions[at][1] if at >= 0 else hex(address)


class Client:
    """A connection that reads single blocks, each once."""

    def __init__(self, daemon, transport, first):
        address = urllib.parse.urlsplit(daemon.grpc if transport == "grpc" else daemon.http)
        self.next, self.transport = first, transport
        if transport == "grpc":
            self.connection = Connection((address.hostname, address.port), timeout_s=60)
        else:
            self.connection = http.client.HTTPConnection(address.hostname, address.port)

    def read(self, count):
        for _ in range(count):
            # Apart from each other, so that nothing is merged.
            self.next = (self.next + 37) % BLOCKS
            if self.transport == "grpc":
                message = field(1, "data") + packed(2, [self.next])
                status, text, _ = self.connection.call("/ringfetch.v1.FetchService/FetchBlocks", message, 60, 60)
                assert status == 0, text
            else:
                self.connection.request("GET", f"/v1/datasets/data/blocks/{self.next}")
                response = self.connection.getresponse()
                assert len(response.read()) == 4096 and response.status == 200, response.status


def cores(pid):
    names = {int(task.name): (task / "comm").read_text().strip() for task in pathlib.Path(f"/proc/{pid}/task").iterdir()}
    return sorted(thread for thread, name in names.items() if name.startswith("rf-core"))


def measured(daemon, transport):
    """What each of two cores touched for `READS` reads of its own connection."""
    pid, clients = daemon.process.pid, [Client(daemon, transport, first) for first in (0, BLOCKS // 2)]
    for client in clients:
        client.read(300)
    found = []
    for client in clients:
        # The connection's core is the one that executes more.
        touched = [stepped(pid, thread, lambda client=client: client.read(READS)) for thread in cores(pid)]
        found.append(max(touched, key=len))
    return [each_read(touched) for touched in found]


def each_read(touched):
    times = collections.Counter(address for address, _, _ in touched)
    return [one for one in touched if times[one[0]] % READS == 0]


def shared(ours, theirs):
    """{line: Counter of the instructions that wrote it}, of lines that the other core touches."""
    others = {line for _, line, _ in theirs}
    found = collections.defaultdict(collections.Counter)
    for address, line, access in ours:
        if access & WRITE and line in others:
            found[line][address] += 1
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--daemon", type=pathlib.Path, default=ringfetch.RINGFETCHD, help="default: the release build")
    parser.add_argument("--backend", choices=["uring", "mmap", "auto"], default="uring")
    parser.add_argument("--transport", choices=["grpc", "http"], default="grpc")
    arguments = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(dir=ringfetch.ROOT / "target") as temporary:
        directory = pathlib.Path(temporary)
        with open(directory / "data", "wb") as file:
            for _ in range(BLOCKS // 256):
                file.write(os.urandom(1 << 20))
        daemon = ringfetch.Daemon(directory / "data", {"backend": arguments.backend, "cores": 2})
        daemon = daemon.with_binary(arguments.daemon.absolute())
        daemon.start(directory)
        try:
            ours, theirs = measured(daemon, arguments.transport)
            symbols = Symbols(daemon.process.pid, daemon.binary)
        finally:
            daemon.stop()
    lines = shared(ours, theirs)
    total = sum(sum(by.values()) for by in lines.values()) / READS
    print(f"{total:.0f} writes a read to {len(lines)} lines that the other core uses, too "
          f"({arguments.transport}, {arguments.backend}, {READS} reads)")
    for by in sorted(lines.values(), key=lambda by: -sum(by.values())):
        functions = collections.Counter()
        for address, count in by.items():
            functions[symbols.of(address)] += count / READS
        print(f"{sum(functions.values()):6.0f}  " + "\n        ".join(f"{count:.0f} {name[:110]}" for name, count in functions.most_common()))


if __name__ == "__main__":
    main()
