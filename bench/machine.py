"""Facts about the machine for readers, and what must be installed before anything is measured."""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time

from processes import run
from ringfetch import ROOT

# With a smaller file, a cold buffered run would cache more of it than allowed.
FILE_BYTES_MIN = 2 << 30


def check_tools(needs, with_nbd):
    """Exits with the list of what is missing and how to get it."""
    missing = [(command, package) for command, package in needs if shutil.which(command) is None]
    if missing:
        names = ", ".join(f"{command} (package {package})" for command, package in missing)
        packages = " ".join(sorted({package for _, package in missing}))
        sys.exit(f"missing: {names}. On Debian: apt-get install --no-install-recommends {packages}; or leave out "
                 "the rows that need them (--rows)")
    if with_nbd and "nbd" not in run(["fio", "--enghelp"]).split():
        sys.exit("this fio has no nbd engine (fio --enghelp): take one built with libnbd, as Debian's is, or leave out "
                 "the rows against qemu-nbd")


def file_system(path):
    return run(["findmnt", "--noheadings", "--output", "FSTYPE", "--target", path]).strip()


def check_file(path):
    """Refuses a file that cannot give cold figures."""
    if file_system(path) in ("tmpfs", "ramfs", "devtmpfs"):
        sys.exit(f"--file: {path} is on {file_system(path)}: a read there measures memory. Put it on a disk.")
    size = os.path.getsize(path)
    if size < FILE_BYTES_MIN:
        sys.exit(f"--file: {path} has {size >> 20} MiB; at least {FILE_BYTES_MIN >> 20} MiB are needed, or a short run "
                 "would cache much of it. --make makes one.")
    if os.stat(path).st_blocks * 512 < size * 0.99:
        sys.exit(f"--file: {path} has holes: they are read from nowhere. Write it in full (--make).")


def first_line(command):
    """The first line of a tool's version output, on stdout or stderr."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return (done.stdout + done.stderr).strip().split("\n")[0].strip() or None


def block_device(path):
    """Facts of the block layer beneath the file, if sysfs has them."""
    device = os.stat(path).st_dev
    entry = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    queue = next((base / "queue" for base in (entry, entry.parent) if (base / "queue").is_dir()), None)
    if queue is None:
        return {}

    def told(name):
        file = queue / name
        return file.read_text().strip() if file.exists() else None

    return {"name": queue.parent.name, "nr_requests": told("nr_requests"), "scheduler": told("scheduler"),
            "logical_block_bytes": told("logical_block_size"), "rotational": told("rotational")}


def facts(path):
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    memory = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1))
    dirty = run(["git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no"]).strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip() + ("+changes" if dirty else ""),
        "kernel": platform.release(),
        "congestion_control": pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "memory_gib": round(memory / 2**20, 1),
        "file_system": file_system(path),
        "file_gib": round(os.path.getsize(path) / 2**30, 2),
        "block_device": block_device(path),
        "load_at_start": os.getloadavg()[0],
        "tools": {name: first_line(command) for name, command in {
            "fio": ["fio", "--version"], "nginx": ["nginx", "-v"], "qemu-nbd": ["qemu-nbd", "--version"],
            "wrk": ["wrk", "-v"],
        }.items()},
    }


class Cpus:
    """CPU ticks since this was created."""

    def __init__(self):
        self.start = self._ticks()

    @staticmethod
    def _ticks():
        # user nice system idle iowait irq softirq steal, of all CPUs
        return [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]

    def shares(self):
        """(busy, taken by the hypervisor) since then, as fractions of all CPUs."""
        ticks = [now - then for now, then in zip(self._ticks(), self.start, strict=True)]
        whole, steal = max(sum(ticks), 1), ticks[7]
        return (sum(ticks) - ticks[3] - ticks[4] - steal) / whole, steal / whole
