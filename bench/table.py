"""Results as Markdown, for people, and as plain data, for programs."""

import json
import math
import re

from peers import Served
from verdict import OTHERS_CPU_MAX, STOLEN_CPU_MAX, in_words


def number(value, digits=0):
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def pair(result, figure, digits=0):
    """Medians of both sides: ours / theirs."""
    ours, theirs = (number(result.median(side, figure), digits) for side in ("subject", "peer"))
    return ours if theirs == "-" else f"{ours} / {theirs}"


def markdown(facts, results, options, command):
    met = [result.verdict() for result in results]
    device, tools = facts["block_device"], facts["tools"]
    lines = [
        f"# Results of {facts['date']}, commit {facts['commit']}", "",
        f"`{command}`, programs of {'cargo build --release' if '--plain' in command else 'release/compile'}", "",
        f"{facts['cpus']} CPUs ({facts['cpu']}), {facts['memory_gib']} GiB; kernel {facts['kernel']}, TCP {facts['congestion_control']}; {facts['file_system']} on "
        f"{device.get('name', 'an unknown device')} (nr_requests {device.get('nr_requests')}, scheduler {device.get('scheduler')}, "
        f"{device.get('logical_block_bytes')}-byte sectors); a file of {facts['file_gib']} GiB; "
        + "; ".join(tool for tool in tools.values() if tool) + ".",
        "",
        f"{options['pairs']} alternating pairs (A B, B A, ...) of {options['seconds']} s a row; client, server and peer on the same "
        f"CPUs. Medians, Ringfetch / peer; a ratio is the median of the pairs' ratios, with the lowest and the highest. "
        f"CPU is the server's (fio: all of it). Load average at the start: {facts['load_at_start']:.2f}.",
        "",
        f"Met: {met.count('met')}. Not met: {met.count('NOT met')}. Not judged: {met.count('not judged')}. "
        f"No figures: {met.count('no figures')}.",
        "",
        "![each judged figure against its target](overview.svg)",
        "",
        "| row | against | reads/s | CPU us/read | client CPU us/read | p50 us | p99 us | targets |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for result in results:
        targets = "<br>".join(in_words(judgement) for judgement in result.judgements())
        if not targets:
            targets = f"**{result.verdict()}**" if result.problem else "none"
        lines.append(
            f"| **{result.name}**: {result.row.title} ({result.row.temperature.name}) | {result.row.against} "
            f"| {pair(result, 'reads_per_second')} | {pair(result, 'cpu_us', 2)} | {pair(result, 'client_cpu_us', 2)} "
            f"| {pair(result, 'p50_us')} | {pair(result, 'p99_us')} | {targets} |"
        )
    lines += ["", "## What ran, with notes", ""]
    for result in results:
        lines.append(f"- **{result.name}**" + (f" ([pairs]({result.name}.svg))" if result.subject else ""))
        if result.subject:
            lines.append(f"  - Ringfetch: {result.row.subject.describe()}")
            if result.row.peer:
                lines.append(f"  - {result.row.against}: {result.row.peer.describe()}")
        notes = [result.row.note, *observations(result)]
        if result.problem:
            notes.append(f"{result.verdict()}: {result.problem}")
        lines += [f"  - {note}" for note in notes if note]
    return "\n".join(lines) + "\n"


def observations(result):
    """What a reader must know to judge a row, from the runs themselves."""
    for side, runs in (("Ringfetch", result.subject), (result.row.against, result.peer)):
        ends = [run["cached_at_end"] for run in runs if run["cached_at_end"] is not None]
        if ends and max(ends) > 0.001 and result.row.temperature.end_fraction_min == 0:
            yield f"{side}: {min(ends):.1%} to {max(ends):.1%} of the file were cached at the end of a run"
        others = [run["others_cpu"] for run in runs]
        if others and max(others) > OTHERS_CPU_MAX:
            yield f"{side}: others used up to {max(others):.0%} of the CPUs just before a run: take no conclusion from it"
        stolen = [run["stolen_cpu"] for run in runs]
        if stolen and max(stolen) > STOLEN_CPU_MAX:
            yield f"{side}: up to {max(stolen):.0%} of the CPUs were taken by the hypervisor"
    for run in result.peer:
        if "best" in run:
            yield "of " + ", ".join(f"{name} {number(rate)}" for name, rate in run["of"].items()) + f": {run['best']}"
    amplification = result.median("subject", "device_reads_per_read")
    if not math.isnan(amplification) and abs(amplification - 1) > 0.005:
        yield f"{amplification:.3f} device reads a read"
    if any(target.figure == "wire_bytes" for target in result.row.targets):
        ours, theirs = (result.median(side, "wire_bytes") for side in ("subject", "peer"))
        yield f"{ours:,.1f} bytes on the wire a vector, both ways; {result.row.against}: {theirs:,.1f}"
    missed = result.median("subject", "rate_missed")
    if not math.isnan(missed) and missed > 0.001:
        yield f"the load generator never sent {missed:.1%} of the arrivals: the latency is flattered"
    late = result.median("subject", "late_p99_us")
    if not math.isnan(late):
        yield f"p99 from arrival to sending, in the load generator and within the latency: {late:,.0f} us"


def data(facts, results, options, command):
    """All results, run by run."""

    def row(result):
        sides = {"subject": {"runs": result.subject}, "peer": {"name": result.row.against, "runs": result.peer}}
        if result.subject:
            for key, side in (("subject", result.row.subject), ("peer", result.row.peer)):
                if side is not None:
                    sides[key]["command"] = side.describe()
                    sides[key]["cpu_of"] = "server" if isinstance(side, Served) else "whole process"
        return {"title": result.row.title, "temperature": result.row.temperature.name, "verdict": result.verdict(),
                "problem": result.problem, "targets": result.judgements(), **sides}

    return {"command": command, "machine": facts, "options": options, "rows": {result.name: row(result) for result in results}}


def json_text(data):
    """JSON with a run on each line."""
    return re.sub(r"\{[^{}\[\]]*\}", lambda found: re.sub(r"\s*\n\s*", " ", found[0]), json.dumps(data, indent=1)) + "\n"
