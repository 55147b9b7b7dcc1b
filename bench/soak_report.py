"""The result of a soak: invariants, faults, explained errors, and a plot of memory and load. Runs nothing."""

import collections
import itertools

from plots import FAINT, INK, MISSED, OURS, svg, text
from soak_daemon import memory_bound

COLUMNS = ["at_s", "phase", "faults", "anonymous_bytes", "resident_bytes", "descriptors", "threads", "daemon_waits", "clients_wait",
           "calls", "items", "bytes"]
# The cause of a violation may be this much earlier.
STARVED_S = 8
# Most violations listed per kind.
LISTED = 10
INVARIANTS = [
    ("wrong bytes", "answers with wrong bytes"), ("malformed answer", "answers that break the contract"),
    ("unexplained error", "errors, late answers and hung calls that no fault explains"),
    ("left behind", "phases that left descriptors, threads or mappings behind"),
    ("memory", "samples of resident memory above the documented bound"), ("metrics", "counters that are inconsistent"),
    ("mistake accepted", "configurations, certificates or principals with a mistake that were accepted"),
    ("credential", "tokens and certificates let in that are not in force, or refused that are"),
    ("condition", "conditional requests answered against their condition, and ETags of two versions"),
    ("certificate", "certificates shown that are not those in force"), ("exit code", "ends with another code than 0"),
    ("shard failed", "shards that failed"), ("log", "panics and errors in the log"), ("the daemon is gone", "unexpected ends"),
    ("defect of the soak", "failures of the instrument itself"),
]


class Report:
    """Reports a `soak.Soak` that has ended, with or without a `failure` of the run itself."""

    def __init__(self, soak, phases, facts, missing, failure):
        self.soak, self.planned, self.facts, self.missing, self.failure = soak, phases, facts, missing, failure

    def held(self):
        return self.failure is None and not self.soak.judge.violations and self.soak.judge.counts["items"] > 0

    def markdown(self):
        soak, facts = self.soak, self.facts
        counts, probes = soak.judge.counts, sorted(took for _, took in soak.probes)
        lines = ["# Soak", "", f"`{facts['command']}`, {facts['date']}, commit {facts['commit']}, {facts['cpus']} CPUs, kernel {facts['kernel']}, "
                 f"{facts['file_system']}. {'Every invariant holds.' if self.held() else '**Not every invariant holds.**'}", ""]
        if self.failure:
            lines += [f"**The run was broken off**: {self.failure}", ""]
        if self.missing:
            lines += [f"Left out what needs {', '.join(self.missing.values())}.", ""]
        highest = max((sample["anonymous_bytes"] for sample in soak.samples), default=0)
        lines += [
            f"{len(soak.phases)} of {len(self.planned)} phases in {soak.at() / 60:.1f} minutes, {soak.daemon.lives} starts; {counts['calls']:,} calls answered, "
            f"{counts['calls by certificate']:,} of them to clients with certificates, {counts['items']:,} items of {counts['bytes'] / 2**30:.2f} GiB compared with the formula.", "",
            f"Resident memory without files at most {highest / 2**20:.0f} MiB; the documented bound is {memory_bound(256, False) / 2**20:.0f} MiB "
            f"({memory_bound(256, True) / 2**20:.0f} with TLS).", ""]
        if probes:
            lines += [f"{len(probes):,} probes answered: p50 {probes[len(probes) // 2] * 1e3:.1f} ms, p99 "
                      f"{probes[int(0.99 * len(probes))] * 1e3:.1f} ms, longest {probes[-1] * 1e3:.0f} ms.", ""]
        lines += ["| invariant | violations | |", "|---|--:|---|"]
        for kind, what in INVARIANTS:
            count = counts[kind]
            lines.append(f"| no {what} | {count} | {'holds' if not count else '**does not hold**'} |")
        lines += ["", "| fault | phases | what it did, times | errors that it explains |", "|---|--:|--:|---|"]
        times = collections.Counter(name for phase, _ in soak.phases for name in phase.faults)
        for name in sorted(times):
            explained = sorted((code, count) for (fault, code), count in soak.judge.explained.items() if fault == name)
            lines.append(f"| {name} | {times[name]} | {soak.effects[name]:,} | {', '.join(f'{code} {count:,}' for code, count in explained) or 'none'} |")
        seen = collections.Counter()
        for at, kind, what in soak.judge.violations:
            seen[kind] += 1
            if seen[kind] == 1:
                lines += ["", f"## {kind}", ""]
            if seen[kind] <= LISTED:
                lines.append(f"- {at - soak.begun:.1f} s, phase {self._phase_at(at - soak.begun)}: {what}{self._starved(at - soak.begun)}")
        return "\n".join([*lines, "", "![memory and load over time](soak.svg)"]) + "\n"

    def _phase_at(self, at):
        """The phase and its faults at that time, from the samples."""
        before = [sample for sample in self.soak.samples if sample["at_s"] <= at]
        return f"{before[-1]['phase'] + 1} ({before[-1]['faults'] or 'pause'})" if before else "0"

    def _starved(self, at):
        """Whether the daemon and the clients lacked CPU time in the seconds before."""
        near = [sample for sample in self.soak.samples if at - STARVED_S <= sample["at_s"] <= at + 1]
        if not near:
            return ""
        daemon, clients = (sum(sample[who] for sample in near) / len(near) for who in ("daemon_waits", "clients_wait"))
        return f" (in the {STARVED_S} s before, some thread of the daemon waited for a CPU {daemon:.0%} of the time, some client {clients:.0%})"

    def plot(self):
        """Items per second and memory over time, with the violations."""
        samples = self.soak.samples
        left, right = 90, 860
        if len(samples) < 2:
            return svg(right, 60, "soak", [text(12, 24, "no samples")])
        end = samples[-1]["at_s"] or 1
        rates = [(after["at_s"], max(0.0, (after["items"] - before["items"]) / max(after["at_s"] - before["at_s"], 0.1)))
                 for before, after in itertools.pairwise(samples)]

        def x(at):
            return left + (right - left) * at / end

        def line(points, top, height, most, colour):
            path = " ".join(f"{x(at):.1f},{top + height * (1 - value / most):.1f}" for at, value in points)
            return f'<polyline points="{path}" fill="none" stroke="{colour}"/>'

        parts = [text(12, 24, f"Soak: {self.facts['command']}", font_weight="bold")]
        curves = [("items/s", rates, OURS), ("MiB, no files", [(s["at_s"], s["anonymous_bytes"] / 2**20) for s in samples], INK),
                  ("descriptors", [(s["at_s"], s["descriptors"]) for s in samples], OURS), ("threads", [(s["at_s"], s["threads"]) for s in samples], INK)]
        for place, (name, points, colour) in enumerate(curves):
            top, most = 44 + 110 * place, max(max(value for _, value in points), 1)
            parts += [f'<rect x="{left}" y="{top}" width="{right - left}" height="90" fill="none" stroke="{FAINT}"/>',
                      text(12, top + 50, name, font_size=11), text(left - 6, top + 10, f"{most:,.0f}", text_anchor="end", font_size=11),
                      text(left - 6, top + 92, "0", text_anchor="end", font_size=11), line(points, top, 90, most, colour)]
        for at, _, _ in self.soak.judge.violations:
            parts.append(f'<line x1="{x(at - self.soak.begun):.1f}" y1="44" x2="{x(at - self.soak.begun):.1f}" y2="464" stroke="{MISSED}"/>')
        parts.append(text(right, 482, f"{end:.0f} s", text_anchor="end", font_size=11))
        return svg(right + 20, 494, "memory and load over time", parts)
