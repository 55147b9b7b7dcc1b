#!/usr/bin/env python3
"""Where the daemon's CPU time goes: flame graphs (SVG) of rows of bench/compare.py, and a table of their parts.

    bench/flamegraph.py --file /data/10g.bin                    all profiles, into docs/profiles
    bench/flamegraph.py --file /data/10g.bin --rows http-block --out target/profiles

The daemon is the release build, driven as its row drives it and sampled by `perf record` on the CPU clock, with stacks
unwound by DWARF. Needs root and perf (Debian: linux-perf), and what the rows need. docs/profiles/README.md says how to
read it.
"""

import argparse
import collections
import html
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import cache
import machine
import plots
import ringfetch
import rows
from processes import RunFailed, exit_on_sigterm, say

ROWS = ("grpc-64", "http-block", "single-cold", "mmap-warm")
OUT = ringfetch.ROOT / "docs" / "profiles"
HERTZ = 1499
# Stack bytes per sample; the runtime's frames are large.
STACK_BYTES = 24 << 10
WARMUP_SECONDS = 1.5
# Narrower frames are left out: they would be too small to see or click.
SHARE_MIN = 0.002
WIDTH, FRAME_HEIGHT = 1200, 17

# Every thread begins with these frames; the frames after them are shown.
BEGINNINGS = re.compile(r"tokio_uring::runtime::Runtime::block_on|__rust_begin_short_backtrace|on_plain|LocalSet::tick")

# The category of a sample: the first of these that matches one of its kernel frames ...
KERNEL = [
    ("interrupts", r"asm_common_interrupt|asm_sysvec|common_interrupt"),
    ("socket: write", r"sys_(sendto|sendmsg|writev|write)$|do_writev|sock_write_iter"),
    ("socket: read", r"sys_(recvfrom|recvmsg|readv|read)$|sock_read_iter"),
    ("page faults", r"asm_exc_page_fault|exc_page_fault"),
    ("announcing (madvise)", r"madvise"),
    ("reads: block layer, driver", r"^(blk_|__blk|submit_bio|__submit_bio|virtio|virtqueue|vp_notify|dd_|blkdev)"),
    ("reads: ext4, iomap", r"^(ext4_|iomap_|__iomap|filemap_)"),
    ("reads: io_uring", r"io_uring|io_submit|io_req|tctx_task_work|task_work_run"),
    ("waiting, being woken", r"epoll|schedule|futex|poll$"),
    ("kernel, other", r""),
]
# ... or the part of the program that its innermost known frame belongs to.
PROGRAM = [
    ("copies", r"^__mem(move|cpy|set)|^memcpy|map::guard"),
    ("allocator", r"^_?mi_|^(malloc|free|realloc)$|rust_alloc|rust_dealloc"),
    ("HTTP/2", r"^<?h2::|hpack|hyper::proto::h2"),
    ("HTTP/1", r"hyper::|httparse|hyper_util"),
    ("router (axum, tower)", r"axum|tower|matchit"),
    ("headers, URIs (http, bytes)", r"^<?(http|bytes|http_body)::"),
    ("engine", r"ringfetch_engine|offset_allocator|tokio_uring|^<?io_uring"),
    ("server: requests", r"ringfetch_server"),
    ("runtime (tokio)", r"tokio|futures"),
    ("program, other", r""),
]


def sampled(row, seconds):
    """Runs a row's daemon under its load and returns its samples: (thread, frames from the outermost in)."""
    server, driver = row.subject.server, row.subject.driver
    row.temperature.prepare(row.path)
    with tempfile.TemporaryDirectory(prefix="ringfetch-profile-") as directory:
        directory = pathlib.Path(directory)
        server.start(directory)
        try:
            measured = {}
            load = threading.Thread(target=lambda: measured.update(driver.measure(server, seconds + 3)))
            load.start()
            time.sleep(WARMUP_SECONDS)
            done = subprocess.run(
                ["perf", "record", "--quiet", "--event", "cpu-clock", f"--freq={HERTZ}",
                 f"--call-graph=dwarf,{STACK_BYTES}", f"--pid={server.process.pid}", f"--output={directory}/perf.data",
                 "--", "sleep", str(seconds)], capture_output=True, text=True, check=False)
            load.join()
        finally:
            server.stop()
        if done.returncode != 0:
            raise RunFailed(f"perf record failed:\n{done.stderr}")
        if not measured:
            raise RunFailed("the load failed: see above")
        text = subprocess.run(["perf", "script", "--no-inline", "--input", f"{directory}/perf.data", "--fields",
                               "comm,ip,sym"], capture_output=True, text=True, check=True).stdout
    return [sample(entry) for entry in text.split("\n\n") if entry.strip()], measured


def sample(entry):
    """One sample of perf script: the thread's name, then one frame per line, innermost first."""
    thread, *lines = entry.strip("\n").split("\n")
    frames = []
    for line in lines:
        address, _, name = line.strip().partition(" ")
        if name and name != "[unknown]":
            frames.append((name, is_kernel(address)))
    return thread.strip(), frames[::-1]


def is_kernel(address):
    return len(address) == 16 and address.startswith("ffff")


def part_of(frames):
    kernel = [name for name, in_kernel in frames if in_kernel]
    for part, pattern in KERNEL if kernel else ():
        if any(re.search(pattern, name) for name in kernel):
            return part
    for name, _ in reversed(frames):
        for part, pattern in PROGRAM[:-1]:
            if re.search(pattern, name):
                return part
    return PROGRAM[-1][0]


def shown(thread, frames):
    """The informative frames, below their thread's name."""
    begin = max((index for index, (name, _) in enumerate(frames) if BEGINNINGS.search(name)), default=-1)
    return [(thread, False), *frames[begin + 1:]]


class Node:
    """A frame and its callees, with their numbers of samples."""

    def __init__(self):
        self.count, self.calls = 0, {}

    def add(self, frames):
        node = self
        node.count += 1
        for frame in frames:
            node = node.calls.setdefault(frame, Node())
            node.count += 1

    def depth(self, least):
        return 1 + max((node.depth(least) for node in self.calls.values() if node.count >= least), default=0)


def colour(name, in_kernel):
    if in_kernel:
        return "#fdba74"
    for pattern, chosen in ((r"ringfetch", "#93c5fd"), (r"h2::|hyper|httparse|axum|tower|http", "#86efac"),
                            (r"tokio|futures|io_uring", "#ddd6fe")):
        if re.search(pattern, name):
            return chosen
    return "#e5e7eb"


def drawn(root, title, subtitle):
    """The flame graph: callers below, callees above, with widths by their share of the samples."""
    least = root.count * SHARE_MIN
    height = 60 + FRAME_HEIGHT * root.depth(least)
    parts = [plots.text(8, 20, title, font_weight="bold"), plots.text(8, 38, subtitle, font_size=11, fill="#6b7280")]

    def draw(node, x, level):
        for (name, in_kernel), call in sorted(node.calls.items(), key=lambda entry: entry[0][0]):
            width = call.count / root.count * WIDTH
            if call.count >= least:
                y = height - FRAME_HEIGHT * (level + 1)
                told = html.escape(name if len(name) <= 140 else name[:139] + "…")
                label = short(name, int(width / 6.2)) if width > 25 else ""
                parts.append(
                    f'<g><title>{told}: {call.count / root.count:.1%}</title>'
                    f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.4, 0.4):.1f}" height="{FRAME_HEIGHT - 1}" '
                    f'fill="{colour(name, in_kernel)}"/>'
                    + (f'<text x="{x + 3:.1f}" y="{y + 12}" font-size="11">{html.escape(label)}</text>' if label else "")
                    + "</g>")
                draw(call, x, level + 1)
            x += width

    draw(root, 0, 0)
    return plots.svg(WIDTH, height, title, parts)


def short(name, room):
    """`<A as B>::poll` to `A::poll`, without generics and with as much of the path as fits."""
    name = re.sub(r"^<(.+?) as .+>::", r"\1::", name)
    while re.search(r"<[^<>]*>", name):
        name = re.sub(r"<[^<>]*>", "", name)
    parts = [part for part in name.split("::") if part and part != "{{closure}}"] or [name]
    while len(parts) > 1 and len("::".join(parts)) > room:
        parts.pop(0)
    return "::".join(parts)[:room]


def table(profiles, facts):
    """The parts of all profiles, side by side, in percent of their samples and in microseconds per read."""
    names = list(profiles)
    lines = [f"# Parts of the profiles of {facts['date']}, commit {facts['commit']}", "",
             f"Written by `bench/flamegraph.py`. {machine_line(facts)} Percent of the daemon's samples, and what that is "
             "of its CPU microseconds a read.", "",
             "| part | " + " | ".join(f"[{name}]({name}.svg)" for name in names) + " |",
             "|---|" + "--:|" * len(names)]
    for part in [part for part, _ in KERNEL + PROGRAM]:
        shares = [profiles[name].parts[part] / profiles[name].samples for name in names]
        if max(shares) >= 0.005:
            cells = (f"{share:.1%}, {share * profiles[name].cpu_us:.2f} us" for name, share in zip(names, shares, strict=True))
            lines.append(f"| {part} | " + " | ".join(cells) + " |")
    lines.append("| **CPU a read** | " + " | ".join(f"**{profiles[name].cpu_us:.2f} us**" for name in names) + " |")
    lines.append("| samples | " + " | ".join(f"{profiles[name].samples:,}" for name in names) + " |")
    return "\n".join(lines) + "\n"


def machine_line(facts):
    return (f"{facts['cpus']} CPUs ({facts['cpu']}); kernel {facts['kernel']}; {facts['file_system']} on "
            f"{facts['block_device'].get('name', 'an unknown device')}; load average at the start {facts['load_at_start']:.2f}.")


Profile = collections.namedtuple("Profile", "parts samples cpu_us")


def profile(name, row, seconds, out, facts):
    """Samples a row and writes its graph."""
    samples, measured = sampled(row, seconds)
    root, parts = Node(), collections.Counter()
    for thread, frames in samples:
        root.add(shown(thread, frames))
        parts[part_of(frames)] += 1
    subtitle = (f"{facts['date']}, commit {facts['commit']}; {row.temperature.name}; {len(samples):,} samples at {HERTZ} Hz; "
                f"{measured['reads_per_second']:,.0f} reads/s, {measured['cpu_us']:.2f} us of the daemon's CPU a read")
    graph = drawn(root, f"{name}: {row.title}", subtitle)
    (out / f"{name}.svg").write_text(graph)
    say(f"{name}: {subtitle}")
    return Profile(parts, len(samples), measured["cpu_us"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=pathlib.Path, required=True, help="what is read, as for bench/compare.py")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"names with commas between them (default: {','.join(ROWS)})")
    parser.add_argument("--seconds", type=int, default=6, help="of sampling (default: 6)")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="default: docs/profiles")
    parser.add_argument("--no-build", action="store_true", help="profile the release build that is there")
    options = parser.parse_args()
    exit_on_sigterm()
    path = options.file.resolve()
    machine.check_file(path)
    if not options.no_build:
        say("building the release binaries, with their debug information inside")
        # perf does not look for inlined functions in a .dwp file.
        os.environ["CARGO_PROFILE_RELEASE_SPLIT_DEBUGINFO"] = "off"
        ringfetch.build()
    warm = cache.WarmFile(path, 1 << 30)
    every = rows.every(path, warm.path, 0, path.stat().st_size, warm.size)
    chosen = {name: every[name] for name in options.rows.split(",") if name in every}
    unknown = [name for name in options.rows.split(",") if name not in every]
    if unknown:
        sys.exit(f"--rows: {', '.join(unknown)}: no such row (bench/compare.py --list has them)")
    machine.check_tools([*rows.needs(chosen.values()), ("perf", "linux-perf")], with_nbd=False)
    facts = machine.facts(path)
    options.out.mkdir(parents=True, exist_ok=True)
    profiles = {}
    try:
        if any(row.path == warm.path for row in chosen.values()):
            warm.make()
        for name, row in chosen.items():
            profiles[name] = profile(name, row, options.seconds, options.out, facts)
    finally:
        warm.remove()
    text = table(profiles, facts)
    (options.out / "parts.md").write_text(text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except RunFailed as failure:
        sys.exit(str(failure))
