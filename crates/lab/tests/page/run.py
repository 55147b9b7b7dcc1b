#!/usr/bin/env python3
"""The report's page of every study in headless Chromium, opened from its file; the studies are small and forced.

    run.py --ringfetch target/release/ringfetch --daemon target/release/ringfetchd

Needs chromium and chromedriver (Debian: chromium, chromium-driver) and nothing else.
"""

import argparse
import csv
import json
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.extend([str(Path(__file__).parents[3] / "server/tests/page"), str(Path(__file__).parents[4] / "bench")])
from browser import Browser
from processes import Server

ELEMENTS, VECTORS, LIMIT = 768, 1000, 5
# What needs no io_uring and no direct I/O.
STUDIES = {
    "strategies": "strategies --size 4MiB --step 10ms --warm-bytes 2MiB --profiles buffered --depths 1,4,16"
    " --only pread,threaded-pread,mmap",
    "block-size": "block-size --size 4MiB --step 10ms --depths 1 --largest 16KiB --only pread,threaded-pread",
    "objects": "objects --files 5,20 --file-bytes 16KiB,64KiB --only threaded-pread",
    "act": "act --size 4MiB --hold 200ms --step 200ms --most 2 --only engine-pread,mmap",
    "rescore": f"rescore --vectors {VECTORS} --buffered --parallel 1,2 --oversampling 1 --only mmap,engine-pread",
    "flip": "flip --dataset data --step 200ms --batch 4 --in-flight 4 --only mmap,pread",
}


def candidates(directory):
    """What bench/candidates.py makes of the study's vectors, of one query and without faiss."""
    path = directory / f"ringfetch-lab-data/vectors-{VECTORS}x{ELEMENTS}.f32"
    vectors = list(struct.iter_unpack(f"<{ELEMENTS}f", path.read_bytes()))
    head = {"format": "ringfetch-lab-candidates/1", "dim": ELEMENTS, "count": VECTORS, "queries": 1, "limit": LIMIT}
    head |= {"oversampling": [1], "made_by": "a test"}
    ids = random.Random(7).sample(range(VECTORS), LIMIT)
    scores = sorted((sum(a * b for a, b in zip(vectors[0], vectors[i], strict=True)) for i in ids), reverse=True)
    body = struct.pack(f"<{ELEMENTS}f{LIMIT}I{LIMIT}f", *vectors[0], *ids, *scores)
    path.with_suffix(".candidates").write_bytes(json.dumps(head).encode() + b"\n" + body)


class Daemon(Server):
    """Serves a small file; it writes its addresses when it is ready."""

    def __init__(self, binary, directory):
        data, config, self.addresses = (directory / name for name in ("data", "ringfetchd.yaml", "addresses.json"))
        data.write_bytes(bytes(4 << 20))
        dataset = {"name": "data", "kind": "blocks", "path": str(data), "block_bytes": "4KiB"}
        listen = {"listen": "127.0.0.1:0"}
        settings = {"grpc": listen, "http": listen, "admin": listen, "engine": {"backend": "pread"}, "datasets": [dataset]}
        # JSON is YAML.
        config.write_text(json.dumps(settings), encoding="utf-8")
        self.launch([binary, "--config", config, "--addresses-file", self.addresses], directory / "ringfetchd.log")

    def is_ready(self):
        return self.addresses.exists()


def run(ringfetch, *words):
    """What the command printed and its exit code."""
    done = subprocess.run([ringfetch, *words], check=False, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def measured(ringfetch, directory, study, words=()):
    """The directory of a finished study's report."""
    out = directory / f"out-{study}"
    common = ["--path", directory, "--out", out, "--repetitions", "2", "--force"]
    code, text = run(ringfetch, "lab", *STUDIES[study].split(), *common, *words)
    assert code == 0, f"{study}: {text}"
    return out


def reports(arguments, directory):
    """Every study with its report's directory."""
    ringfetch = arguments.ringfetch.resolve()
    code, text = run(ringfetch, "lab", *STUDIES["rescore"].split(), "--path", directory, "--force")
    assert code != 0 and "candidates.py" in text, text
    candidates(directory)
    for study in ("strategies", "block-size", "objects", "act", "rescore"):
        yield study, measured(ringfetch, directory, study)
    with Daemon(arguments.daemon.resolve(), directory) as daemon:
        at = {name: f"http://{address}" for name, address in json.loads(daemon.addresses.read_text()).items()}
        yield "flip", measured(ringfetch, directory, "flip", ["--server", at["grpc"], "--admin", at["admin"]])
    file, out = directory / "calibrated", directory / "out-calibrate"
    file.write_bytes(random.Random(7).randbytes(16 << 20))
    code, text = run(ringfetch, "calibrate", file, "--seconds", "3", "--report", out, "--force")
    assert code == 0, text
    yield "calibrate", out


def is_whole(browser, out):
    """Every row, claim, table and plot is there and seen; nothing runs off the page's side."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    rows = list(csv.DictReader((out / "report.csv").open(encoding="utf-8", newline="")))
    assert len(rows) == len(report["rows"]) > 0, rows
    heads = browser.run("return [...document.querySelectorAll('h1, h2')].map(e => e.textContent)")
    assert heads[0] == f"{report['study']}: {report['title']}", heads
    assert {"Results", "Machine and run", "Settings", *(beside["title"] for beside in report["beside"])} <= set(heads)
    lines = browser.run(
        "const h = [...document.querySelectorAll('h2')].find(e => e.textContent == 'Results');"
        "let t = h; while (t.tagName != 'TABLE') t = t.nextElementSibling;"
        "return [...t.rows].map(r => [...r.cells].map(c => c.textContent))"
    )
    axes = [[value for _, value in row["key"]] for row in report["rows"]]
    assert [line[: len(axes[0])] for line in lines[1:]] == axes, lines
    assert browser.run("return document.querySelectorAll('.mark').length") == len(report["marks"])
    assert browser.run("return document.querySelectorAll('li b').length") == len(report["claims"])
    yaml = browser.run("return [...document.querySelectorAll('pre')].map(e => e.textContent)")
    assert yaml == ([report["yaml"]] if "yaml" in report else [])
    boxes = browser.run("return [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().toJSON())")
    assert len(boxes) == len(report["plots"]), boxes
    assert all(box["width"] > 200 and box["height"] > 100 for box in boxes), boxes
    names = browser.run("return [...document.querySelectorAll('svg text')].map(e => e.textContent.trim())")
    wanted = {name for plot in report["plots"] for name in (plot["x"], plot["y"], *(line[0] for line in plot["series"]))}
    assert wanted <= set(names), wanted - set(names)
    drawn = browser.run("return document.querySelectorAll('svg polyline, svg circle, svg path').length")
    assert drawn > 0 or not report["plots"], "nothing is drawn"
    for width in (360, 800, 1280):
        browser.size(width, 900)
        assert browser.run("return document.documentElement.scrollWidth") <= width, width
    return len(rows), len(boxes)


def needs_nothing(browser):
    """No request but for the page itself, and no error."""
    messages = [json.loads(line["message"])["message"] for line in browser.log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "data:", "chrome:")) for url in asked), asked
    errors = [line for line in browser.log("browser") if line["level"] == "SEVERE"]
    assert not errors, errors


def main():
    """Runs every check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ringfetch", required=True, type=Path)
    parser.add_argument("--daemon", required=True, type=Path)
    arguments = parser.parse_args()
    # Next to the program: temporary directories may be in memory.
    with tempfile.TemporaryDirectory(dir=arguments.ringfetch.resolve().parent) as scratch, Browser() as browser:
        seen = {}
        for study, out in reports(arguments, Path(scratch)):
            browser.open((out / "report.html").as_uri())
            seen[study] = is_whole(browser, out)
            needs_nothing(browser)
            print(f"{study}: {seen[study][0]} rows and {seen[study][1]} plots")
        assert seen.keys() == {*STUDIES, "calibrate"}
        assert sum(plots > 0 for _, plots in seen.values()) >= 5, seen
        print(f"every report's page is whole in Chromium {browser.version}")


if __name__ == "__main__":
    main()
