#!/usr/bin/env python3
"""The page at `/` in headless Chromium, against a real daemon under load with every byte checked, on uring and on mmap.

    run.py --daemon target/release/ringfetchd --ringfetch target/release/ringfetch [--screenshots DIRECTORY]

Needs chromium and chromedriver (Debian: chromium, chromium-driver) and nothing else. Fails where something is missing;
skips nothing.
"""

import argparse
import itertools
import json
import re
import signal
import tempfile
import time
from pathlib import Path

from browser import Browser
from served import Daemon, Load, forbid_io_uring, total, until

INSPECT = (Path(__file__).parent / "inspect.js").read_text(encoding="utf-8")
BACKENDS = ["uring", "mmap"]
WIDTHS = [320, 375, 480, 600, 720, 768, 900, 1024, 1120, 1200, 1232, 1280, 1440, 1920]
# WCAG 2.2 AA: text, and lines that carry meaning.
TEXT_CONTRAST_MIN, LINE_CONTRAST_MIN = 4.5, 3.0
REQUESTS_PER_SECOND = 150
UNITS = {"": 1, "k": 1e3, "M": 1e6, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "µs": 1, "ms": 1e3, "s": 1e6}


def inspect(browser, what, *arguments):
    return browser.run(INSPECT, what, *arguments)


def value(text):
    """`19.9 k/s` as 19900.0; durations in microseconds."""
    found = re.fullmatch(r"([\d.,]+)(?:\s(\S+?))?(?:/s)?", text)
    assert found, f"not a number with its unit: {text!r}"
    return float(found.group(1).replace(",", "")) * UNITS[found.group(2) or ""]


def figure(browser, name):
    """The `Now` of a row of the table of figures."""
    return next(row[1] for row in inspect(browser, "rows", "figures") if row[0] == name)


def close(what, shown, counted, tolerance):
    assert counted > 0 and abs(shown - counted) <= tolerance * counted, (
        f"{what}: the page says {shown}, /metrics {counted}"
    )


def shows_what_is_served(browser, daemon, backend):
    """Backend and reason, every dataset with both, a row a shard."""
    reason = re.search(r'^ringfetch_backend_info\{.*?reason="(.*?)"', daemon.get("metrics"), re.MULTILINE).group(1)
    assert browser.text("#backend") == backend and browser.text("#reason") == reason, browser.text("#reason")
    rows = inspect(browser, "rows", "datasets")
    assert [row[0] for row in rows] == ["blocks", "objects", "vectors"], rows
    assert all(backend in row[2] and reason in row[2] for row in rows), rows
    shards = inspect(browser, "rows", "shards")
    limits = [
        series for series in daemon.metrics()[1].items() if series[0].startswith("ringfetch_queue_depth_limit{")
    ]
    assert len(shards) == len(limits) >= 1, (shards, limits)
    for row, (_, limit) in zip(shards, limits, strict=True):
        assert row[1] == backend and re.fullmatch(rf"\d+ of {limit:.0f}", row[2]), (row, limit)
    assert browser.text("#state") == "Serving"


def quantile(before, after, q):
    """The bounds of the bucket that a quantile of all reads' time fell into, microseconds."""
    counts = {}
    for key, count in after.items():
        if key.startswith("ringfetch_read_duration_seconds_bucket{") and 'stage="total"' in key:
            bound = float(re.search(r'le="(.*?)"', key).group(1))
            counts[bound] = counts.get(bound, 0) + count - before.get(key, 0)
    bounds = sorted(counts)
    index = next(i for i, bound in enumerate(bounds) if counts[bound] >= q * counts[bounds[-1]])
    return (bounds[index - 1] if index else 0) * 1e6, bounds[index] * 1e6


def agrees_with_the_metrics(browser, daemon):
    """What the page says over some seconds, against the counters of the same time; and its lines move."""
    before_paths = inspect(browser, "paths")
    began, before = daemon.metrics()
    shown = {}

    def observe():
        up = browser.text("#about")
        shown.setdefault(
            up, [figure(browser, name) for name in ("IOPS", "Throughput", "Latency p50", "Mean depth")]
        )
        return len(shown) >= 9

    until(observe, "the page shows eight more seconds")
    ended, after = daemon.metrics()
    # The first was there before.
    seconds = [[value(text) for text in texts] for texts in list(shown.values())[1:]]
    mean = [sum(column) / len(column) for column in zip(*seconds, strict=True)]

    def delta(*what):
        return total(after, *what) - total(before, *what)

    def per_second(*what):
        return delta(*what) / (ended - began)

    close("IOPS", mean[0], per_second("ringfetch_reads_total"), 0.15)
    close("throughput", mean[1], per_second("ringfetch_read_bytes_total"), 0.15)
    low, high = quantile(before, after, 0.5)
    assert low / 2 <= mean[2] <= high * 2, f"p50: the page says {mean[2]} us, /metrics {low} to {high}"
    depth = delta("ringfetch_queue_depth_sum") / delta("ringfetch_queue_depth_count")
    close("depth", mean[3], depth, 0.4)
    rates = {row[0]: row for row in inspect(browser, "rows", "datasets")}
    for name in ("blocks", "vectors"):
        close(
            f"reads of {name}",
            value(rates[name][5]),
            total(daemon.metrics()[1], "ringfetch_reads_total", f'dataset="{name}"'),
            0.1,
        )
    paths = inspect(browser, "paths")
    for name, lines in paths.items():
        assert len(lines) == (3 if name == "latency" else 1), paths
        for line, old in zip(lines, before_paths[name], strict=True):
            assert line.count("L") >= 5 and line != old, f"the lines of {name} do not move: {line!r}"
    return f"{mean[0]:.0f} reads/s, p50 {mean[2]:.0f} us, depth {mean[3]:.1f}"


def fits_every_width(browser):
    """No width scrolls sideways; a page that does is noticed."""
    for width in WIDTHS:
        browser.size(width, 800)
        found = inspect(browser, "sideways")
        assert found["scroll"] <= width and not found["out"], f"{width} px: {found}"
    browser.run("const wide = document.createElement('div'); wide.id = 'wide'; wide.style.width = '3000px'; "
                "wide.textContent = 'x'; document.body.append(wide)")  # fmt: skip
    assert inspect(browser, "sideways")["out"], "self-check: the check does not see a page that is too wide"
    browser.run("document.getElementById('wide').remove()")


def is_legible(browser, theme, drawn=True):
    """Every text and line has its contrast; too little is noticed."""
    browser.prefer(prefers_color_scheme=theme)
    texts, lines = inspect(browser, "contrasts"), inspect(browser, "lines")
    assert len(texts) > 60 and (len(lines) >= 6 or not drawn), (len(texts), len(lines))
    assert texts[0][0] >= TEXT_CONTRAST_MIN, f"{theme}: {texts[:5]}"
    assert all(one[0] >= LINE_CONTRAST_MIN for one in lines), f"{theme}: {min(lines)}"
    browser.run("document.getElementById('about').style.color = 'rgb(120, 120, 120)'")
    assert inspect(browser, "contrasts")[0][0] < TEXT_CONTRAST_MIN, (
        "self-check: the check does not see grey on the ground"
    )
    browser.run("document.getElementById('about').style.color = ''")
    return texts[0][0]


def is_accessible(browser):
    """The tree that screen readers get: names, tables with heads, pictures that say their figures."""
    nodes = browser.cdp("Accessibility.getFullAXTree")["nodes"]

    def role(node):
        return node.get("role", {}).get("value")

    named = [(role(node), node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")]
    must = {"image", "img", "button", "link", "table", "columnheader", "rowheader", "heading", "navigation"}
    nameless = [one for one in named if one[0] in must and not one[1].strip()]
    assert not nameless, nameless

    def of(*roles):
        return [name for kind, name in named if kind in roles]

    pictures = of("image", "img")
    assert len(pictures) == 3, pictures
    for picture, said in zip(pictures, [r"IOPS.* Now [\d,]+ reads a second\.", r"Queue depth.* Now mean .* of at most \d+\.",
                                        r"Latency.* Now median .*seconds, 99th percentile .*, 99\.9th percentile .*\."], strict=True):  # fmt: skip
        assert re.fullmatch(said, picture), (picture, said)
    assert of("table") == ["Figures", "Shards", "Datasets"], of("table")
    assert {"IOPS", "Latency p99.9", "blocks", "vectors", "objects", "0"} <= set(of("rowheader")), of("rowheader")
    # Also as cards, on a phone: a table stays a table.
    assert {"Now", "Backend and why", "In flight now"} <= set(of("columnheader")), of("columnheader")
    assert set(of("heading")) >= {"Ringfetch", "IOPS", "Queue depth", "Latency", "Figures", "Shards", "Datasets"}
    assert "main" in {kind for kind, _ in named}
    spoken = browser.text("#announcement")
    assert re.search(r"reads a second\. Latency: .*Queue depth: ", spoken), spoken
    # Throttled: over several seconds of new figures it says nothing new.
    seen = {browser.text("#about"): spoken}
    until(
        lambda: seen.setdefault(browser.text("#about"), browser.text("#announcement")) and len(seen) >= 5,
        "figures of four more seconds",
    )
    assert len(set(seen.values())) <= 2, seen


def is_usable_by_keyboard(browser, daemon):
    """Tab reaches everything; the focus is seen; Pause stops asking and Resume goes on."""
    browser.run("document.activeElement.blur()")
    reached = []
    for _ in range(7):
        browser.key("Tab")
        reached.append(
            browser.run(
                "const at = document.activeElement; return [at.textContent.trim(), getComputedStyle(at).outlineStyle]"
            )
        )
    assert [name for name, _ in reached[:3]] == ["Skip to the figures", "Pause", "Status (JSON)"], reached
    assert all(outline != "none" for _, outline in reached[:6]), reached
    browser.run("document.getElementById('pause').focus()")
    browser.key("Enter")
    assert browser.text("#pause") == "Resume" and browser.text("#state") == "Paused"
    asks_nothing(daemon, "paused")
    # The first answer has none to be compared with: a figure from before the pause is not of now.
    browser.run("const now = document.getElementById('now-reads'); window.nows = []; "
                "new MutationObserver(() => window.nows.push(now.textContent)).observe(now, { childList: true })")  # fmt: skip
    browser.key("Enter")
    before = daemon.polls()
    until(lambda: daemon.polls() > before and browser.text("#state") == "Serving", "it goes on")
    nows = until(lambda: browser.run("return window.nows.length > 1 && window.nows"), "figures after the pause")
    assert nows[0] == "\u2013" and value(nows[1]) > 0, nows


def asks_nothing(daemon, when):
    """For three times the interval no poll arrives but one that was under way. Only time can show that."""
    before, until = daemon.polls(), time.monotonic() + 3
    while time.monotonic() < until:
        time.sleep(0.2)
    assert daemon.polls() <= before + 1, f"{when}, it goes on asking"


def rests_while_hidden(browser, daemon):
    """Behind another tab it asks nothing, and goes on when it is seen again."""
    own = browser.command("GET", "/window")
    other = browser.command("POST", "/window/new", {"type": "tab"})["handle"]
    browser.command("POST", "/window", {"handle": other})
    asks_nothing(daemon, "hidden")
    browser.command("DELETE", "/window")
    browser.command("POST", "/window", {"handle": own})
    before = daemon.polls()
    until(lambda: daemon.polls() > before, "it goes on")


def moves_less_when_asked(browser):
    """With prefers-reduced-motion the charts stand still for seconds while the figures go on."""
    browser.prefer(prefers_reduced_motion="reduce")

    def still():
        first = (browser.text("#about"), inspect(browser, "paths"))
        until(lambda: browser.text("#about") != first[0], "another second")
        return inspect(browser, "paths") == first[1]

    steps = [still() for _ in range(6)]
    browser.prefer(prefers_reduced_motion="no-preference")
    assert steps.count(True) >= 3 and steps.count(False) >= 1, steps


def says_that_the_daemon_is_gone(browser, daemon, again):
    """A daemon that stops is told, once to ears; when it is back, so are the figures, from 0."""
    daemon.stop()
    until(lambda: browser.text("#state") == "Not answering", "it says so")
    about = browser.text("#about")
    assert re.search(r"since \d\d:\d\d:\d\d\. Next try in \d+ s\. Figures are of \d\d:", about), about
    assert "does not answer" in browser.text("#alarm") and "Not answering" in browser.run("return document.title")
    # Paused there are no further tries; resumed, nothing is known until the next one has ended.
    pressed = ("document.getElementById('pause').click(); return [document.title, "
               "...['state', 'pause', 'about'].map((id) => document.getElementById(id).textContent)]")  # fmt: skip
    title, state, button, about = browser.run(pressed)
    assert (title, state, button) == ("Paused \u00b7 Ringfetch", "Paused", "Resume"), (title, state, button)
    assert re.search(r"since \d\d:\d\d:\d\d\. Figures are of \d\d:", about), about
    title, state, button, about = browser.run(pressed)
    assert (title, state, button) == ("Connecting \u00b7 Ringfetch", "Connecting", "Pause"), (title, state, button)
    until(lambda: "Not answering" in browser.run("return document.title"), "it says so again")
    until(lambda: "Next try in 4 s" in browser.text("#about"), "it asks less often")
    lowest = inspect(browser, "contrasts")[0]
    assert lowest[0] >= TEXT_CONTRAST_MIN, lowest
    with again() as new:
        until(lambda: browser.text("#state") == "Serving", "it is back")
        until(
            lambda: all(row[5] == "0" for row in inspect(browser, "rows", "datasets")),
            "counters are those of the new process",
        )
        assert browser.text("#alarm") == ""
        assert figure(browser, "IOPS") in ("0/s", "\u2013") or until(
            lambda: figure(browser, "IOPS") == "0/s", "a rate of 0"
        )
        # One that hangs is gone too, after five seconds.
        new.process.send_signal(signal.SIGSTOP)
        until(lambda: "has not answered since" in browser.text("#about"), "it says that there is no answer")
        assert browser.text("#state") == "Not answering"
        new.process.send_signal(signal.SIGCONT)
        until(lambda: browser.text("#state") == "Serving", "it goes on")
        new.stop()


def tells_of_a_fallback(arguments, directory):
    """Where io_uring is forbidden: what runs in its place, what was asked for, and the cause, everywhere."""
    with (
        Daemon(arguments.daemon, directory, "uring", on_unavailable="mmap", before=forbid_io_uring) as daemon,
        Browser(arguments.chromedriver, arguments.chromium) as browser,
    ):
        browser.open(daemon.url)
        until(lambda: browser.text("#state") == "Serving", "it shows its state")
        assert browser.text("#backend") == "mmap"
        assert browser.run("return document.querySelector('#fallback').checkVisibility()")
        assert browser.text("#fallback") == "instead of uring, which was asked for"
        assert "seccomp" in browser.text("#reason"), browser.text("#reason")
        rows = inspect(browser, "rows", "datasets")
        assert rows and all(row[2].startswith("mmap instead of uring") for row in rows), rows
        for theme in ("light", "dark"):
            is_legible(browser, theme, drawn=False)
        computes_right(browser)
        bears_slow_answers(browser)
        daemon.stop()


# Run in the page: [what is computed, what it must be]. Two answers two seconds apart: 2000 reads, all between 10 and
# 20 us but for the last percent, which is beyond every bucket.
COMPUTED = """
return Promise.all(["points", "numbers", "draw"].map((name) => import(`/page/${name}.js`))).then(([points, text, draw]) => {
  const answer = (uptime_ms, reads, changed = {}) => ({
    uptime_ms, started_unix_ms: 1, memory: { in_use_bytes: 0 }, datasets: [],
    totals: { reads_total: reads, read_bytes_total: reads * 4096, read_errors_total: 0, rejected_total: 0 },
    read_duration: { buckets: [{ le_us: 10, count: 0 }, { le_us: 20, count: reads * 0.99 }, { count: reads }] },
    shards: [{ shard: 0, in_flight: 3, stalled: 2, queued: 0, device_reads_total: reads, submissions_total: reads / 4,
               depth_seen: { sum: reads * 7, count: reads } }],
    ...changed,
  });
  const old = answer(1000, 500);
  const point = points.between(old, answer(3000, 2500), 0);
  const idle = points.between(old, answer(3000, 500), 0);
  const line = (spans) => draw.segments(spans.map(([since, time]) => ({ since, time })), (one) => one.time).length;
  return [
    [point.reads, 1000], [point.bytes, 4096000], [point.depth, 7], [point.inFlight, 3], [point.stalled, 2],
    [point.shards.get(0).submissions, 250], [Math.round(point.p50 * 100), 1505], [point.p99, 20],
    [String(point.p999), "Infinity"], [text.duration(point.p999), "over\u00a010\u00a0s"],
    [idle.reads, 0], [idle.p50, null], [idle.depth, null],
    [points.between(old, old, 0), null], [points.between(old, answer(900, 9), 0), null],
    [points.between(old, answer(3000, 2500, { started_unix_ms: 2 }), 0), null],
    [text.amount(9999), "9,999"], [text.amount(19_940), "19.9\u00a0k"], [text.amount(999_600), "1.00\u00a0M"],
    [text.amount(0.26), "0.3"], [text.bytes(0), "0\u00a0B"], [text.bytes(1536), "1.50\u00a0KiB"],
    [text.duration(999.7), "1.00\u00a0ms"], [text.spokenDuration(2500), "2.50\u00a0milliseconds"],
    [text.span(93_784_000), "1\u00a0d 2\u00a0h"], [text.span(0), "0\u00a0s"],
    [line([[0, 1000], [1000, 2000], [2000, 7000]]), 1], [line([[0, 1000], [1000, 2000], [2500, 3500], [3500, 4500]]), 2],
  ];
})"""


def bears_slow_answers(browser):
    """Where an answer takes 4 s, the figures are those of that time, and the line goes on."""
    shown = "return [document.getElementById('about').textContent, document.querySelector('#chart-reads .curve-a').getAttribute('d')]"
    until(lambda: browser.run(shown)[1].count("L") > 1, "a line")
    slow = {"offline": False, "latency": 4000, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.cdp("Network.emulateNetworkConditions", **slow)
    seen = [browser.run(shown)]

    def answered():
        now = browser.run(shown)
        if now[0] != seen[-1][0]:
            seen.append(now)
        ups = [int(re.search(r" up (\d+)\s", about)[1]) for about, _ in seen[-2:]]
        return ups[-1] - ups[0] >= 3

    until(answered, "a slow answer")
    browser.cdp("Network.emulateNetworkConditions", **{**slow, "latency": 0})
    (_, before), (_, after) = seen[-2:]
    assert after != before and after.count("M") == 1, f"the line does not go on: {before!r}, {after!r}"


def computes_right(browser):
    """The page's own arithmetic, on answers made up for it."""
    wrong = [(found, expected) for found, expected in browser.run(COMPUTED) if found != expected]
    assert not wrong, wrong


def loads_nothing_from_elsewhere(browser, daemon, events):
    """Every request went to the daemon, and the policy keeps it so: a script that asks elsewhere is stopped."""
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    # Of this page: the other tab, behind which it was hidden, has requests of its own.
    urls = {one["request"]["url"] for one in sent if one["documentURL"].startswith(daemon.url)}
    elsewhere = [url for url in urls if not url.startswith(daemon.url)]
    assert not elsewhere, elsewhere
    assert {
        daemon.url,
        f"{daemon.url}page/script.js",
        f"{daemon.url}page/style.css",
        f"{daemon.url}v1/status",
    } <= urls, urls
    blocked = browser.run(
        "const seen = new Promise((done) => document.addEventListener('securitypolicyviolation', (e) => done(e.effectiveDirective)));"
        "fetch('http://127.0.0.2:9/').catch(() => {}); return seen"
    )
    assert blocked == "connect-src", blocked


def console(browser):
    return [entry for entry in browser.log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def network(browser):
    return [json.loads(entry["message"])["message"] for entry in browser.log("performance")]


def screenshots(browser, directory, backend):
    for (form, size), theme in itertools.product(
        {"phone": (375, 812), "desktop": (1280, 860)}.items(), ("light", "dark")
    ):
        browser.size(*size)
        browser.prefer(prefers_color_scheme=theme)
        before = inspect(browser, "paths")
        until(lambda before=before: inspect(browser, "paths") != before, "it is drawn in this size")
        browser.screenshot(directory / f"{backend}-{form}-{theme}.png")
        browser.screenshot(directory / f"{backend}-{form}-{theme}-top.png", whole=False)


def shows(backend, arguments, directory, whole):
    """What is served by one backend; or the whole page, whose looks and keys are the same on each."""

    def say(text):
        print(f"{backend}: {text}", flush=True)

    def daemon_of(http=0):
        return Daemon(arguments.daemon, directory, backend, http)

    with daemon_of() as daemon, Browser(arguments.chromedriver, arguments.chromium) as browser:
        with Load(arguments.ringfetch, daemon, directory, REQUESTS_PER_SECOND) as load:
            browser.size(1280, 860)
            browser.open(daemon.url)
            browser.run("window.shifts = []; new PerformanceObserver((list) => window.shifts.push(...list.getEntries()"
                        ".map((e) => e.value))).observe({ type: 'layout-shift', buffered: true })")  # fmt: skip
            until(lambda: figure_is_positive(browser), "figures under load")
            early = browser.run("return window.shifts.length")
            shows_what_is_served(browser, daemon, backend)
            say(f"datasets, backend, reason and shards are there; Chromium {browser.version}")
            say(f"agrees with /metrics: {agrees_with_the_metrics(browser, daemon)}")
            # From its figures' first second on nothing has moved; sizes were not changed yet.
            shifts = browser.run("return window.shifts")
            assert sum(shifts) < 0.1 and sum(shifts[early:]) == 0, (
                f"the layout shifts: {shifts}, {early} of them at first"
            )
            if whole:
                for theme in ("light", "dark"):
                    say(f"{theme}: the lowest contrast of text is {is_legible(browser, theme):.2f}")
                is_accessible(browser)
                fits_every_width(browser)
                browser.size(375, 812)
                is_accessible(browser)
                say(f"names and tables for screen readers, no sideways scrolling at {WIDTHS}")
                moves_less_when_asked(browser)
                is_usable_by_keyboard(browser, daemon)
                rests_while_hidden(browser, daemon)
                say("keyboard, pause, hidden, reduced motion")
            if arguments.screenshots:
                time.sleep(arguments.screenshot_after)
                screenshots(browser, arguments.screenshots, backend)
            load.stop()
        problems, events = console(browser), network(browser)
        assert not problems, problems
        say("no message on the console; load: every byte was right")
        served = (
            total(daemon.metrics()[1], "ringfetch_rpc_duration_seconds_sum", 'method="GetStatus"') / daemon.polls()
        )
        say(f"an answer took {served * 1e6:.0f} us in the daemon")
        if whole:
            says_that_the_daemon_is_gone(browser, daemon, lambda: daemon_of(daemon.port))
            say("the daemon's end and return")
            console(browser)
        loads_nothing_from_elsewhere(browser, daemon, events + network(browser))
        say("nothing from elsewhere")


def figure_is_positive(browser):
    rows = inspect(browser, "rows", "figures")
    return bool(rows) and rows[0][1] not in ("\u2013", "0/s") and rows[2][1] != "\u2013"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--daemon", required=True, help="ringfetchd")
    parser.add_argument("--ringfetch", required=True, help="the command line")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--chromedriver", default="chromedriver")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this one; repeatable")
    parser.add_argument("--screenshots", type=Path, help="write pictures to this directory")
    parser.add_argument("--screenshot-after", type=float, default=0, help="seconds to wait for fuller charts")
    arguments = parser.parse_args()
    if arguments.screenshots:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ringfetch-page-") as scratch:
        for number, backend in enumerate(arguments.backend or BACKENDS):
            shows(backend, arguments, Path(scratch), whole=number == 0)
        tells_of_a_fallback(arguments, Path(scratch))
        print("fallback: what runs, what was asked for and why; the page's arithmetic", flush=True)


if __name__ == "__main__":
    main()
