"""Makes files cold or warm, and checks it: what of a file is in the page cache, as the kernel reports it (fincore).

A temperature prepares a file before a run and judges its state afterwards. Only the kernel's cache is within reach: a cache
in the device or in the hypervisor beneath it is not, and is the same for both sides of a pair.
"""

import concurrent.futures
import ctypes
import dataclasses
import mmap
import os
import pathlib
import random
import re
import shutil

from processes import RunFailed, run

# A cold file may keep this much: the kernel keeps pages that are mapped or being read.
COLD_FRACTION_MAX = 0.005
WARM_FRACTION_MIN = 0.999
# Most that a buffered cold run may have cached by its end: the mean over the run is about half of it.
COLD_END_FRACTION_MAX = 0.15
READ_ONCE_BYTES = 8 << 20
# Partly warm files are resident in pieces of this size.
PIECE_BYTES = 2 << 20
PART_ERROR_MAX = 0.01
# Linux 6.18 does not keep up to 1.3 % of what eight readers have read, in runs of 16 pages; a second pass caches it.
PART_PASSES_MAX = 3
# The last (path, fraction) made partly warm: if nothing has changed since, nothing is done.
_last_part = None


def resident_fraction(path):
    """Of a regular file; None for a device, whose pages fincore does not count."""
    if not path.is_file():
        return None
    # fincore counts whole pages, and the last one may reach beyond the end.
    return min(int(run(["fincore", "--bytes", "--noheadings", "--output", "RES", path])) / os.path.getsize(path), 1.0)


def evict(path):
    """Drops the file from the page cache: only this file, and if that is not enough, all clean pages."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    fraction = resident_fraction(path)
    if fraction > COLD_FRACTION_MAX:
        # Dirty pages are not dropped.
        os.sync()
        try:
            pathlib.Path("/proc/sys/vm/drop_caches").write_text("1\n")
        except OSError as error:
            raise RunFailed(f"{fraction:.1%} of {path} stay cached and the caches cannot be dropped ({error}): "
                            "run as root") from None
        fraction = resident_fraction(path)
    if fraction > COLD_FRACTION_MAX:
        raise RunFailed(f"{fraction:.1%} of {path} stay cached although caches were dropped: does somebody map it?")
    return fraction


def fill(path):
    """Reads the whole file into the page cache."""
    buffer = memoryview(bytearray(4 << 20))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    fraction = resident_fraction(path)
    if fraction < WARM_FRACTION_MIN:
        raise RunFailed(f"only {fraction:.1%} of {path} are cached after it was read: too little free memory for a "
                        "warm row (--warm-size)")
    return fraction


def read_once(path):
    """Reads the whole file past the page cache, and returns the number of bytes: a virtual disk may fetch a block remotely
    when it is first read after it was attached, which would slow down the side that comes first."""
    total, size = 0, os.path.getsize(path)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        # Page-aligned, as O_DIRECT requires.
        with mmap.mmap(-1, READ_ONCE_BYTES) as buffer:
            while total < size and (read := os.readv(file, [buffer])):
                total += read
    finally:
        os.close(file)
    return total


def fill_part(path, fraction):
    """Makes this fraction of the file resident, in pieces spread over it: the same pieces in every run, and a larger fraction
    includes all pieces of a smaller one, so that going from warm to cold needs no reading."""
    global _last_part
    found = resident_fraction(path)
    if _last_part == (path, fraction) and abs(found - fraction) < PART_ERROR_MAX / 20:
        return found
    size = os.path.getsize(path)
    pieces = list(range(-(-size // PIECE_BYTES)))
    random.Random(1).shuffle(pieces)
    warm = round(len(pieces) * fraction)
    available = int(re.search(r"MemAvailable:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1)) * 1024
    if (fraction - found) * size > available * 0.9:
        raise RunFailed(f"{fraction:.0%} of {path} do not fit into free memory ({available >> 20} MiB): take a smaller file")
    with open(path, "rb", buffering=0) as file:
        # No readahead into the cold pieces.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for piece in pieces[warm:]:
            os.posix_fadvise(file.fileno(), piece * PIECE_BYTES, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
        for _ in range(PART_PASSES_MAX):
            found = resident_fraction(path)
            if abs(found - fraction) <= PART_ERROR_MAX / 20:
                break
            with concurrent.futures.ThreadPoolExecutor(8) as readers:
                for _ in readers.map(lambda piece: os.pread(file.fileno(), PIECE_BYTES, piece * PIECE_BYTES), pieces[:warm]):
                    pass
    found = resident_fraction(path)
    if abs(found - fraction) > PART_ERROR_MAX:
        raise RunFailed(f"{found:.1%} of {path} are cached where {fraction:.0%} were to be")
    _last_part = (path, fraction)
    return found


@dataclasses.dataclass(frozen=True)
class Temperature:
    """How a file is prepared before each run, and what fraction of it may be cached when the run ends."""

    name: str
    prepare: object
    end_fraction_min: float
    end_fraction_max: float

    def judge(self, fraction):
        """What is wrong with a run that ended with this fraction cached; None: nothing."""
        if fraction is None:
            return None
        if fraction > self.end_fraction_max:
            return f"{fraction:.1%} of the file were cached at the end of a run, more than {self.end_fraction_max:.0%}"
        if fraction < self.end_fraction_min:
            return f"only {fraction:.1%} of the file were cached at the end of a run"
        return None


def partly(fraction):
    """This fraction warm. A mapping warms more of it during the run, as on a cold file."""
    return Temperature(f"{fraction:.0%} warm", lambda path: fill_part(path, fraction), fraction - 0.02,
                       min(fraction + COLD_END_FRACTION_MAX, 1.0))


# O_DIRECT leaves the cache unchanged.
COLD_DIRECT = Temperature("cold, direct", evict, 0.0, 0.01)
COLD_BUFFERED = Temperature("cold, buffered", evict, 0.0, COLD_END_FRACTION_MAX)
WARM = Temperature("warm", fill, WARM_FRACTION_MIN, 1.0)
# A device in memory is neither cold nor warm; direct reads do not cache it a second time.
IN_MEMORY = Temperature("in memory, direct", lambda path: None, 0.0, 1.0)


class WarmFile:
    """The first bytes of the file under test as a separate file next to it, small enough to be cached whole, and locked in
    memory from its creation: if it were not locked, the kernel would occasionally evict a folio of 2 MiB."""

    def __init__(self, source, size):
        self.path = source.parent / f".{source.name}.warm"
        self.source, self.size = source, min(size, source.stat().st_size)
        self._locked = None

    def lock(self):
        """Keeps the file in the page cache as long as this process lives or until `remove`."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        libc.munmap.argtypes = libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        with open(self.path, "rb") as file:
            # Through libc: Python's mmap does not give the address of a read-only mapping, and mlock on a writable private
            # one would copy every page.
            address = libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == ctypes.c_void_p(-1).value or libc.mlock(address, self.size):
            raise RunFailed(f"{self.path} cannot be locked in memory: {os.strerror(ctypes.get_errno())}; run as root, or "
                            "raise ulimit -l to --warm-size")
        self._locked = libc, address

    def make(self):
        if self.path.exists() and self.path.stat().st_size == self.size:
            return
        if shutil.disk_usage(self.source.parent).free < self.size + (1 << 30):
            raise RunFailed(f"{self.source.parent} has no room for {self.path.name} ({self.size >> 20} MiB)")
        with open(self.source, "rb") as source, open(self.path, "wb") as copy:
            left = self.size
            while left:
                left -= os.copy_file_range(source.fileno(), copy.fileno(), left)
            os.fsync(copy.fileno())

    def remove(self):
        if self._locked:
            libc, address = self._locked
            libc.munmap(address, self.size)
            self._locked = None
        self.path.unlink(missing_ok=True)


class MemoryDevice(os.PathLike):
    """The first bytes of the file under test on a block device in memory (zram), created by `make` and removed by `remove`.
    It is a path once it is made, since the kernel chooses the number."""

    CONTROL = pathlib.Path("/sys/class/zram-control")

    def __init__(self, source, size):
        self.source, self.size, self.path = source, size, None

    def __fspath__(self):
        return str(self.path)

    __str__ = __fspath__

    def is_file(self):
        return False

    def make(self):
        if os.geteuid() != 0 or not self.CONTROL.exists():
            raise RunFailed("a block device in memory needs root and a kernel with zram: run as root, or leave out row "
                            "fast-device (--rows)")
        number = (self.CONTROL / "hot_add").read_text().strip()
        self.path = pathlib.Path(f"/dev/zram{number}")
        pathlib.Path(f"/sys/block/zram{number}/disksize").write_text(str(self.size))
        with open(self.source, "rb", buffering=0) as source, open(self.path, "wb", buffering=0) as device:
            buffer = memoryview(bytearray(4 << 20))
            for offset in range(0, self.size, len(buffer)):
                if source.readinto(buffer) != len(buffer):
                    raise RunFailed(f"{self.source} ends before {offset + len(buffer)} bytes")
                device.write(buffer)
            os.fsync(device.fileno())
        evict_device(self.path)

    def remove(self):
        if self.path is None:
            return
        number = self.path.name.removeprefix("zram")
        pathlib.Path(f"/sys/block/zram{number}/reset").write_text("1")
        (self.CONTROL / "hot_remove").write_text(number)
        self.path = None


def evict_device(path):
    """Drops the cached pages that writing to a device has left."""
    with open(path, "rb") as device:
        os.posix_fadvise(device.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
