"""The data of a soak: bytes as a function of (seed, file, version, offset), which versions may be answered when, and which
errors the current faults explain."""

import collections
import contextlib
import hashlib
import itertools
import os
import struct
import threading
import time

BLOCK_BYTES = 4096
FOREVER = float("inf")
# How long an open object is trusted (the configuration's revalidate_ms), and how long a look-up may take.
REVALIDATE_S, LOOKUP_S = 0.2, 0.3


def content(seed, name, version, offset, length):
    """Bytes of a file's payload."""
    first, last = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
    blocks = (hashlib.shake_128(f"{seed}/{name}/{version}/{block}".encode()).digest(BLOCK_BYTES) for block in range(first, last))
    start = offset - first * BLOCK_BYTES
    return b"".join(blocks)[start:start + length]


def npy_header(dim, count):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count}, {dim}), }}"
    text = text.ljust(128 - 10 - 1) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


Version = collections.namedtuple("Version", "number since until")


class History:
    """Which version existed when; number None: no file. `change` wraps the replacement."""

    def __init__(self):
        self.entries = [Version(0, -FOREVER, FOREVER)]
        self.newest = 0

    @property
    def now(self):
        return self.entries[-1].number

    @contextlib.contextmanager
    def change(self, number):
        """While this lasts, the old version may still be answered; the new one may from its beginning on."""
        self.entries.append(Version(number, time.monotonic(), FOREVER))
        self.newest = max(self.newest, number or 0)
        yield
        self.entries[-2] = self.entries[-2]._replace(until=time.monotonic())

    def between(self, begun, ended):
        """Versions of this period, newest first."""
        return [entry.number for entry in reversed(self.entries) if entry.since <= ended and begun <= entry.until]


class Dataset:
    """Items of one length in one or more files; each item may have a prefix, the first file a header."""

    kind = "blocks"

    def __init__(self, seed, name, directory, count, item_bytes=BLOCK_BYTES, header=b"", prefix=b"", suffix=".bin", files=1,
                 **configuration):
        self.seed, self.name, self.count, self.item_bytes, self.header, self.prefix = seed, name, count, item_bytes, header, prefix
        self.paths = [os.path.join(directory, f"{name}{number or ''}{suffix}") for number in range(files)]
        self.configuration, self.history = configuration, History()
        self.record_bytes = len(prefix) + item_bytes
        self.length = len(header) + count * self.record_bytes
        # Where the file is truncated, and until when.
        self.cut_at, self.cut_until = 0, -FOREVER
        self.served = list(self.paths)

    def items(self, version, first, count):
        return content(self.seed, self.name, version, first * self.item_bytes, count * self.item_bytes)

    def range(self, version, offset, length):
        """Bytes of the files as stored, header and prefixes included."""
        inside = offset - len(self.header)
        if not self.prefix and inside >= 0:
            return content(self.seed, self.name, version, inside, length)
        first = max(inside, 0) // self.record_bytes
        last = min(-(-max(inside + length, 0) // self.record_bytes), self.count)
        records = b"".join(self.prefix + self.items(version, number, 1) for number in range(first, last))
        whole, start = (self.header + records, offset) if first == 0 else (records, inside - first * self.record_bytes)
        return whole[start:start + length]

    def place(self, item):
        """Offset and length of an item in the files."""
        return len(self.header) + item * self.record_bytes + len(self.prefix), self.item_bytes

    def write(self, version):
        """Rewrites the files, each by rename."""
        part = self.length // len(self.paths) // BLOCK_BYTES * BLOCK_BYTES
        for number, path in enumerate(self.paths):
            begin = number * part
            end = self.length if number == len(self.paths) - 1 else begin + part
            with open(path + ".new", "wb") as file:
                for offset in range(begin, end, 1 << 20):
                    file.write(self.range(version, offset, min(1 << 20, end - offset)))
            os.rename(path + ".new", path)

    def describe(self):
        """Its entry in the configuration."""
        where = {"path": self.served[0]} if len(self.served) == 1 else {"paths": self.served}
        shape = {"block_bytes": self.item_bytes} if self.kind == "blocks" else {}
        return {"name": self.name, "kind": self.kind, **where, **shape, **self.configuration}


class Vectors(Dataset):
    kind = "vectors"

    def __init__(self, seed, name, directory, count, dim, layout, **configuration):
        element_bytes = 1 if layout == "u8bin" else 4
        header = {"npy": npy_header(dim, count), "u8bin": struct.pack("<II", count, dim)}.get(layout, b"")
        prefix = struct.pack("<i", dim) if layout == "fvecs" else b""
        super().__init__(seed, name, directory, count, dim * element_bytes, header, prefix, f".{layout}", **configuration)
        self.dim = dim


class Objects:
    """A directory of files of all lengths; each has its own history."""

    kind = "objects"

    def __init__(self, seed, name, directory, lengths, **configuration):
        self.seed, self.name, self.directory, self.served = seed, name, os.path.join(directory, name), None
        self.configuration = {"max_open_files": 16, "revalidate_ms": int(REVALIDATE_S * 1000), **configuration}
        self.objects = {f"part-{number % 3}/object-{number:03}": History() for number in range(len(lengths))}
        self.lengths = dict(zip(self.objects, lengths, strict=True))

    def length(self, name, version):
        # Versions differ in length, so that mixing two of them is detected.
        return self.lengths[name] + (version * 37 if self.lengths[name] > 1 else 0)

    def object(self, name, version, offset=0, length=None):
        whole = self.length(name, version)
        return content(self.seed, f"{self.name}/{name}", version, offset, whole - offset if length is None else length)

    def write(self, name, version):
        path = os.path.join(self.directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".new", "wb") as file:
            file.write(self.object(name, version))
        os.rename(path + ".new", path)

    def write_all(self):
        for name in self.objects:
            self.write(name, 0)

    def possible(self, name, begun, ended):
        return self.objects[name].between(begun - REVALIDATE_S - LOOKUP_S, ended)

    def describe(self):
        return {"name": self.name, "kind": self.kind, "path": self.served or self.directory, **self.configuration}


def datasets(seed, directory, slow_directory, small=False):
    """One dataset of every kind and layout. Those below `slow_directory` are served from the slow disk, if there is one."""
    size = 1 if small else 4
    kinds = [
        Dataset(seed, "blocks", directory, 2048 * size),
        Dataset(seed, "odd", directory, 9000, item_bytes=1000),
        Dataset(seed, "split", directory, 1024 * size, files=2),
        Dataset(seed, "on-mmap", directory, 1024 * size, backend="mmap"),
        Dataset(seed, "on-pread", directory, 1024 * size, backend="pread"),
        Dataset(seed, "on-auto", directory, 1024 * size, backend="auto"),
        Dataset(seed, "swap", directory, 512 * size),
        Dataset(seed, "cut", directory, 512 * size),
        Vectors(seed, "npy", directory, 4000 * size, 128, "npy"),
        Vectors(seed, "fvecs", directory, 1000 * size, 100, "fvecs"),
        Vectors(seed, "u8bin", directory, 8000 * size, 64, "u8bin"),
        Objects(seed, "objects", directory, object_lengths(40)),
        Ballast(directory),
        Dataset(seed, "slow", slow_directory, 512 * size),
        Objects(seed, "slow-objects", slow_directory, object_lengths(12)),
    ]
    return {dataset.name: dataset for dataset in kinds}


class Ballast(Dataset):
    """Endless zeros, mapped: fills a cgroup with file pages."""

    BLOCKS = 65_536

    def __init__(self, directory):
        super().__init__(0, "ballast", directory, self.BLOCKS, backend="mmap")

    def items(self, version, first, count):
        return bytes(count * self.item_bytes)

    def range(self, version, offset, length):
        return bytes(length)

    def write(self, version):
        with open(self.paths[0], "wb") as file:
            file.truncate(self.length)


def object_lengths(count):
    """Empty, one byte, a sector, around a page, up to 5 MiB."""
    steps = [0, 1, 511, 512, 4095, 4096, 4097, 20_000, 70_001, 300_000, 1 << 20, (1 << 20) + 1, 2_500_001, 5 << 20]
    return list(itertools.islice(itertools.cycle(steps), count))


# The errors that a fault explains while it lasts. `of`: names of datasets, None for all.
Window = collections.namedtuple("Window", "fault since until codes of")


class Faults:
    """The faults over time."""

    def __init__(self):
        self.windows, self.lock = [], threading.Lock()

    @contextlib.contextmanager
    def window(self, fault, codes, of=None, after_s=0.0):
        """While this lasts, and for `after_s` longer, calls to these datasets may end with these codes."""
        with self.lock:
            place = len(self.windows)
            self.windows.append(Window(fault, time.monotonic(), FOREVER, frozenset(codes), of and frozenset(of)))
        try:
            yield
        finally:
            with self.lock:
                self.windows[place] = self.windows[place]._replace(until=time.monotonic() + after_s)

    def explains(self, dataset, codes, begun, ended):
        """(fault, code) that explains one of these codes, or None."""
        with self.lock:
            found = [(window.fault, min(window.codes & codes)) for window in reversed(self.windows)
                     if window.since <= ended and begun <= window.until and window.codes & codes
                     and (window.of is None or dataset in window.of)]
        return found[0] if found else None
