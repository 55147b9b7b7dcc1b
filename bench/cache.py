"""Cold and warm, made and checked: what of a file is in the page cache, by the kernel's own account (fincore).

A temperature prepares a file before a run and judges what it finds after it. Only the kernel's cache is in reach: a
cache in the device or in the hypervisor beneath it is not, and is the same for both sides of a pair.
"""

import dataclasses
import os
import pathlib
import shutil

from processes import RunFailed, run

# A cold file may keep this much: the kernel keeps pages that somebody has mapped or is reading.
COLD_FRACTION_MAX = 0.005
WARM_FRACTION_MIN = 0.999
# What a buffered cold run may have filled by its end: the mean over the run is about half of it.
COLD_END_FRACTION_MAX = 0.15


def resident_fraction(path):
    return int(run(["fincore", "--bytes", "--noheadings", "--output", "RES", path])) / os.path.getsize(path)


def evict(path):
    """Drops the file from the page cache: this file only, and if that does not do, all clean pages."""
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


@dataclasses.dataclass(frozen=True)
class Temperature:
    """How a file is prepared before each run, and what fraction of it may be cached when the run ends."""

    name: str
    prepare: object
    end_fraction_min: float
    end_fraction_max: float

    def judge(self, fraction):
        """What is wrong with a run that ended with this much cached; None: nothing."""
        if fraction > self.end_fraction_max:
            return f"{fraction:.1%} of the file were cached at the end of a run, more than {self.end_fraction_max:.0%}"
        if fraction < self.end_fraction_min:
            return f"only {fraction:.1%} of the file were cached at the end of a run"
        return None


# O_DIRECT leaves the cache as it was.
COLD_DIRECT = Temperature("cold, direct", evict, 0.0, 0.01)
COLD_BUFFERED = Temperature("cold, buffered", evict, 0.0, COLD_END_FRACTION_MAX)
WARM = Temperature("warm", fill, WARM_FRACTION_MIN, 1.0)


class WarmFile:
    """The first bytes of the file under test as a file of their own beside it, small enough to be cached whole."""

    def __init__(self, source, size):
        self.path = source.parent / f".{source.name}.warm"
        self.source, self.size = source, min(size, source.stat().st_size)

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
        self.path.unlink(missing_ok=True)
