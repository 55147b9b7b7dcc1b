"""The result of a flips run: the conditions it had to meet, in words, numbers and a plot. Runs nothing."""

import statistics

from plots import FAINT, INK, MISSED, OURS, THEIRS, svg, text

# Accepted growth of anonymous memory from the beginning to the end (medians of a quarter of the samples each): the
# allocator's own fluctuation. Mapped pages of the file come and go; they are reported, not judged.
GROWTH_SHARE, GROWTH_MIB = 0.02, 2.0
COLOURS = {"uring": "#dbeafe", "mmap": "#dcfce7", "auto": "#fef3c7"}


def quantile(values, share):
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Report:
    """Reports the result of `flips.drive`, on the machine of `facts`."""

    def __init__(self, result, facts):
        self.result, self.facts = result, facts

    def flip_ms(self):
        return [flip["seconds"] * 1e3 for flip in self.result["flips"]]

    def memory(self):
        """Median anonymous memory (MiB) of the first and of the last quarter of the samples."""
        values = [sample["anonymous_mib"] for sample in self.result["samples"]]
        quarter = max(len(values) // 4, 1)
        return statistics.median(values[:quarter]), statistics.median(values[-quarter:])

    def conditions(self):
        """(condition, what was observed, whether it holds)."""
        result = self.result
        load, before, after = result["load"], result["before"], result["after"]
        first, last = self.memory()
        each = result["reads_by_backend"]
        served = [backend for backend in COLOURS if each.get(backend, 0) > 0]
        return [
            ("flips made", f"{len(result['flips'])} of {result['asked']}", len(result["flips"]) == result["asked"]),
            ("failed reads, as clients saw", f"{load['errors']} of {load['reads']:,}", load["errors"] == 0 and load["reads"] > 0),
            ("failed reads, as the daemon counted", str(result["daemon_errors"]), result["daemon_errors"] == 0),
            ("wrong bytes (every byte checked)", str(load["wrong_bytes"]), load["wrong_bytes"] == 0),
            ("engines that served", ", ".join(f"{backend} {each.get(backend, 0):,}" for backend in COLOURS), len(served) == len(COLOURS)),
            ("descriptors before and after", f"{before['descriptors']} / {after['descriptors']}",
             after["descriptors"] <= before["descriptors"]),
            ("threads before and after", f"{before['threads']} / {after['threads']}", after["threads"] <= before["threads"]),
            ("anonymous memory, first and last quarter", f"{first:.1f} / {last:.1f} MiB",
             last <= first * (1 + GROWTH_SHARE) + GROWTH_MIB),
        ]

    def held(self):
        return all(holds for _, _, holds in self.conditions())

    def markdown(self):
        facts, load, times = self.facts, self.result["load"], self.flip_ms()
        looking = self.result["looking_seconds"] * 1e3
        verdict = "Every condition holds." if self.held() else "**Not every condition holds.**"
        lines = [
            "# Flips under load", "",
            f"`{facts['command']}` ({facts['build']} build), {facts['date']}, commit {facts['commit']}, {facts['cpus']} CPUs, "
            f"kernel {facts['kernel']}, {facts['file_system']}. {verdict}", "",
            "| condition | seen | |", "|---|---|---|",
            *[f"| {what} | {seen} | {'holds' if holds else '**does not hold**'} |" for what, seen, holds in self.conditions()], "",
            f"Load while flipping: {load['reads_per_second']:,.0f} reads/s, p99 {load['latency_us']['p99'] / 1e3:.1f} ms a request.",
            f"A flip, as `ringfetch backend set` takes it: p50 {quantile(times, 0.5):.1f} ms, p99 {quantile(times, 0.99):.1f} ms, "
            f"longest {max(times):.1f} ms; the same command that only looks takes {looking:.1f} ms.", "",
            "![reads a second and memory over time](flips.svg)",
        ]
        return "\n".join(lines) + "\n"

    def data(self):
        conditions = [{"what": what, "seen": seen, "holds": holds} for what, seen, holds in self.conditions()]
        times = self.flip_ms()
        return {
            "facts": self.facts, "held": self.held(), "conditions": conditions,
            "flip_ms": {"p50": quantile(times, 0.5), "p99": quantile(times, 0.99), "max": max(times)},
            # Without the samples, which are in the plot.
            **{key: value for key, value in self.result.items() if key not in ("samples", "flips")},
        }

    def plot(self):
        """Reads per second by current backend, with memory below."""
        samples, flips = self.result["samples"], self.result["flips"]
        left, right, end = 80, 800, max(samples[-1]["at"], flips[-1]["at"])

        def x(at):
            return left + (right - left) * at / end

        parts = [text(12, 24, f"{len(flips)} flips under load", font_weight="bold")]
        for flip, following in zip(flips, [*flips[1:], {"at": end}], strict=True):
            width = x(following["at"]) - x(flip["at"])
            parts.append(f'<rect x="{x(flip["at"]):.1f}" y="56" width="{width:.1f}" height="184" fill="{COLOURS[flip["backend"]]}"/>')
        for place, (backend, colour) in enumerate(COLOURS.items()):
            parts.append(f'<rect x="{left + 90 * place}" y="34" width="14" height="14" fill="{colour}" stroke="{THEIRS}"/>')
            parts.append(text(left + 90 * place + 20, 46, backend))
        parts += curve(rates(samples), x, 56, 184, OURS, "reads/s")
        parts += curve([(sample["at"], sample["resident_mib"]) for sample in samples], x, 280, 120, THEIRS, "resident, MiB")
        parts += curve([(sample["at"], sample["anonymous_mib"]) for sample in samples], x, 440, 120, OURS if self.held() else MISSED,
                       "anonymous, MiB")
        parts += [text(right, 588, f"{end:.0f} s", text_anchor="end", font_size=11), text(left, 588, "0", font_size=11)]
        return svg(830, 600, "Reads a second and memory while the engine is flipped", parts)


def rates(samples):
    """(time, reads per second since the previous point), over half a second or more each: shorter intervals are mostly
    noise."""
    points, then = [], samples[0]
    for now in samples[1:]:
        if now["at"] - then["at"] >= 0.5:
            points.append((now["at"], (now["reads"] - then["reads"]) / (now["at"] - then["at"])))
            then = now
    return points


def curve(points, x, top, height, colour, name):
    """A line with its axis from 0 to its largest value."""
    most = max((value for _, value in points), default=0) or 1
    path = " ".join(f"{x(at):.1f},{top + height * (1 - max(value, 0) / most):.1f}" for at, value in points)
    return [
        f'<line x1="{x(0):.1f}" y1="{top + height}" x2="800" y2="{top + height}" stroke="{INK}"/>',
        f'<line x1="{x(0):.1f}" y1="{top}" x2="800" y2="{top}" stroke="{FAINT}"/>',
        text(x(0) - 8, top + 10, f"{most:,.0f}", text_anchor="end", font_size=11),
        text(x(0) - 8, top + height, "0", text_anchor="end", font_size=11),
        text(x(0) + 6, top + height - 8, name, font_size=12),
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
    ]
