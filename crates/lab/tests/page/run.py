#!/usr/bin/env python3
"""A report's page in headless Chromium: of a small forced study, opened from its file.

    run.py --ringfetch target/release/ringfetch

Needs chromium and chromedriver (Debian: chromium, chromium-driver) and nothing else.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "server/tests/page"))
from browser import Browser

STUDY = "strategies --repetitions 2 --force --size 4MiB --step 10ms --warm-bytes 2MiB --profiles buffered --depths 1,4,16"


def measured(ringfetch, directory):
    """A finished study; its directory."""
    out = directory / "out"
    words = [ringfetch, "lab", *STUDY.split(), "--path", directory, "--out", out, "--only", "pread,threaded-pread,mmap"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return out


def is_whole(browser, out):
    """Every row, claim and plot is there and seen; nothing runs off the page's side."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    rows = list(csv.DictReader((out / "report.csv").open(encoding="utf-8", newline="")))
    assert len(rows) == len(report["rows"]) == 7, rows
    heads = browser.run("return [...document.querySelectorAll('h1, h2')].map(e => e.textContent)")
    assert heads[0].startswith("strategies: ") and "Results" in heads and "Machine and run" in heads, heads
    lines = browser.run(
        "const h = [...document.querySelectorAll('h2')].find(e => e.textContent == 'Results');"
        "let t = h; while (t.tagName != 'TABLE') t = t.nextElementSibling;"
        "return [...t.rows].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert [line[:3] for line in lines[1:]] == [[row["profile"], row["strategy"], row["depth"]] for row in rows], lines
    assert browser.run("return document.querySelectorAll('.mark').length") == len(report["marks"]) > 0
    assert browser.run("return document.querySelectorAll('li b').length") == len(report["claims"]) > 0
    boxes = browser.run("return [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().toJSON())")
    assert len(boxes) == len(report["plots"]) > 0, boxes
    assert all(box["width"] > 200 and box["height"] > 100 for box in boxes), boxes
    names = browser.run("return [...document.querySelectorAll('svg text')].map(e => e.textContent.trim())")
    assert {"pread", "threaded-pread", "mmap", "reads/s"} <= set(names), names
    for width in (360, 800, 1280):
        browser.size(width, 900)
        assert browser.run("return document.documentElement.scrollWidth") <= width, width


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
    arguments = parser.parse_args()
    ringfetch = arguments.ringfetch.resolve()
    # Beside the program: temporary directories may be memory.
    with tempfile.TemporaryDirectory(dir=ringfetch.parent) as scratch:
        out = measured(ringfetch, Path(scratch))
        with Browser() as browser:
            browser.open((out / "report.html").as_uri())
            is_whole(browser, out)
            needs_nothing(browser)
            print(f"the report's page is whole in Chromium {browser.version}")


if __name__ == "__main__":
    main()
