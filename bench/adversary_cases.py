"""The cases: what each attacker does, what is wanted, and whether it was found. This module starts no process."""

import dataclasses
import os
import statistics
import typing

RESIDENT_MIB_MAX = 512
# The supervisor's patience, of which the daemon uses half. Below the shortest run, in which a daemon that says nothing is silent
# for 3 s.
WATCHDOG_SECONDS = 2
HALF_OPEN_IDLE = 4000


@dataclasses.dataclass
class Seen:
    """One run: the victim alone, beside well-behaved connections and under attack, and the attacker's counts."""

    alone: dict | None
    control: dict | None
    found: dict | None
    counts: dict
    alive: bool
    heart: dict | None = None
    disk: dict | None = None

    def baseline_p99_ms(self):
        return max(run["reader"]["p99_ms"] for run in (self.alone, self.control))

    def turned_away(self, who="reader"):
        return sum(self.found[who]["refused"].values()) + sum(self.found[who]["failed"].values())

    def attacks(self):
        """The attacker's counts: of each herd, of each pair with a greedy principal, or of the only attack."""
        return self.counts.get("herds") or self.counts.get("greedy") or [self.counts]

    def summary(self):
        """The facts needed to judge the figures."""
        parts = []
        if "runs" in self.counts:
            beside_what = {"alone": "alone", "beside": "beside it", "device": "beside fio"}
            for run in self.counts["runs"]:
                for name, read in run.items():
                    bad = read["refused"] | read["failed"]
                    parts.append(f"{read['p50_ms']:.2f} and {read['p99_ms']:.2f} ms {beside_what[name]}"
                                 f"{' (' + brief(bad) + ')' if bad else ''}")
            greedy = self.counts["greedy"][-1]
            return (f"{self.counts['rate']:,.0f} reads/s, p50 and p99 of runs of {self.counts['seconds']:g} s: {', '.join(parts)}; "
                    f"the greedy one in the last: {greedy['answers']:,} answers, {greedy['bytes_received'] >> 20:,} MiB, "
                    f"{sum(greedy['refused'].values()):,} refused")
        if "herds" in self.counts:
            parts.append(f"device reads of the block in each herd {self.counts['device_reads']}, time to the answers p99 "
                         f"{', '.join(format(herd['answer_p99_ms'], '.0f') for herd in self.counts['herds'])} ms")
        else:
            of_interest = ("connections", "connections_failed", "calls", "answers", "refused", "closed", "bytes_sent",
                           "bytes_received", "frames_sent")
            parts += [f"{name.replace('_', ' ')} {brief(self.counts[name])}" for name in of_interest if self.counts[name]]
        if "single" in self.counts:
            parts.append(f"the crowd's own refusals p99 {self.counts['refusal_p99_ms']:.0f} ms")
        if self.found:
            for who in ("reader", "newcomer", "livez"):
                part = self.found[who]
                bad = part["refused"] | part["failed"]
                parts.append(f"{who}: {part['ok']} ok, p50 {part['p50_ms']:.2f}, p99 {part['p99_ms']:.2f}, max "
                             f"{part['max_ms']:.0f} ms{', ' + brief(bad) if bad else ''}")
            if self.found["before"] and self.found["after"]:
                cpu = self.found["after"]["cpu_seconds"] - self.found["before"]["cpu_seconds"]
                parts.append(f"daemon: {self.found['resident_max_mib']:.0f} MiB at most, {cpu:.1f} s of CPU")
        if self.control:
            parts.append(f"control p99 {self.control['reader']['p99_ms']:.2f} ms")
        if self.heart:
            parts.append(f"heartbeats {self.heart['beats']}")
        if self.disk:
            disk, reads = self.disk["parameters"], self.disk["reads"]
            parts.append(f"disk: latency {disk['latency']}, {disk['concurrency']} at a time, {reads['answered']} reads, "
                         f"at most {reads['in_service_peak']} in service and {reads['waiting_peak']} waiting")
        return "; ".join(parts)


def brief(value):
    if isinstance(value, dict):
        return ", ".join(f"{count} x {name}" for name, count in value.items())
    return f"{value:,}"


def took_place(least):
    """Whether the attacker did what the case is about: the victim's figures beside one that did nothing say nothing."""
    def total(count):
        return sum(count.values()) if isinstance(count, dict) else count

    def said(counts):
        return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())

    def judge(seen):
        fewest = {name: min(total(counts[name]) for counts in seen.attacks()) for name in least}
        is_met = all(fewest[name] >= count for name, count in least.items())
        return f"the attack took place: at least {said(least)}", said(fewest), is_met

    return judge


def memory(seen):
    most = seen.found["resident_max_mib"]
    return f"resident at most {RESIDENT_MIB_MAX} MiB", f"{most:,.0f} MiB", most <= RESIDENT_MIB_MAX


def survives(seen):
    return "the daemon goes on", "it does" if seen.alive else "it has ended", seen.alive


def nobody_refused(seen):
    away, ok = seen.turned_away(), seen.found["reader"]["ok"]
    return "reader: 0 refused", f"{away} refused, {ok} answered", away == 0 < ok


def p99_within(factor):
    def judge(seen):
        p99, baseline = seen.found["reader"]["p99_ms"], seen.baseline_p99_ms()
        ok = seen.found["reader"]["ok"] > 0 and p99 <= factor * baseline
        ratio = f"{p99:.2f} ms, {p99 / baseline:.1f}x" if seen.found["reader"]["ok"] else "no answer"
        return f"reader: p99 at most {factor}x of {baseline:.2f} ms", ratio, ok

    return judge


def within_100_ms(who):
    def judge(seen):
        part, away = seen.found[who], seen.turned_away(who)
        found = f"{part['max_ms']:.0f} ms at most, {away} of {away + part['ok']} without an answer"
        return f"{who}: each answered within 100 ms", found, away == 0 and part["ok"] > 0 and part["max_ms"] <= 100

    return judge


def idle_cost(seen):
    # The control without connections is the same daemon before they are opened.
    held = seen.counts["connections"]
    grown = seen.found["resident_max_mib"] - seen.alone["resident_max_mib"]
    each = grown * 1024 / max(held, 1)
    return "at most 16 KiB a connection", f"{each:.1f} KiB, {held:,} connections", each <= 16


def connections_closed(seen):
    closed = sum(seen.counts["closed"].values())
    return "the connection closed", f"{closed} of {seen.counts['connections']} closed", closed > 0


def single_refused_soon(seen):
    """For a client with one call at a time. A call of the crowd would wait for the 511 others of its loop."""
    single = seen.counts["single"]
    refused, p99 = sum(single["refused"].values()), single["refusal_p99_ms"]
    found = f"{refused} refused, p99 {p99:.1f}, max {single['refusal_max_ms']:.1f} ms"
    return "one call at a time: refused within 10 ms (p99)", found, refused > 0 and p99 <= 10


def heard_in_time(seen):
    longest = seen.heart["longest_s"]
    return f"heartbeats, silent for at most {WATCHDOG_SECONDS} s", f"{longest:.1f} s", longest <= WATCHDOG_SECONDS


def one_read_a_shard(seen):
    most, shards = max(seen.counts["device_reads"]), len(os.sched_getaffinity(0))
    return f"at most {shards} device reads (1 a shard)", f"{most} at most", 0 < most <= shards


def all_right(seen):
    herds = seen.counts["herds"]
    right = sum(herd["answers"] - herd["answers_wrong"] for herd in herds)
    asked = sum(herd["calls"] for herd in herds)
    return "all answered right", f"{right:,} of {asked:,}", right == asked > 0


def no_core_blocked(seen):
    longest = seen.found["reader"]["max_ms"]
    found = f"{longest:.0f} ms at most, {seen.turned_away()} without an answer"
    return "no core blocked: others' reads within 100 ms", found, longest <= 100 and seen.turned_away() == 0


def paired_p99_within(factor, of, said):
    """The reader's p99 beside the greedy principal, against its p99 in the run `of` next to it."""
    def judge(seen):
        ratios = [run["beside"]["p99_ms"] / run[of]["p99_ms"] for run in seen.counts["runs"] if of in run]
        if not ratios:
            return f"p99 at most {factor}x {said}", "the principal got no reads", None
        found = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        return f"p99 at most {factor}x {said}, median of {len(ratios)}", found, statistics.median(ratios) <= factor

    return judge


def nobody_of_runs_refused(seen):
    reads = [read for run in seen.counts["runs"] for read in run.values()]
    away = sum(sum(read["refused"].values()) + sum(read["failed"].values()) for read in reads)
    answered = sum(read["ok"] for read in reads)
    return "reader: 0 refused", f"{away} refused, {answered:,} answered", away == 0 < answered


@dataclasses.dataclass(eq=False)
class Case:
    name: str
    title: str
    attack: list
    # The attacker's counts without which the run says nothing. Far below what a machine with two CPUs does in 3 s, so that
    # a slow one reaches them, too.
    least: dict[str, int]
    judges: list[typing.Callable]
    # Of the control run.
    connections: int = 8
    # Age of the attack when the victim begins: the time its connections take to open.
    ramp_seconds: float = 1.0
    runner: str = "attack"
    engine: dict | None = None
    # Limits of the greedy principal, and the token that it sends.
    limits: str = ""
    # Of the reader.
    weight: int = 1
    # Fraction of the rate that the reader reaches alone.
    load: float = 0.5
    token: str = "greedy"
    # The option of `attack` with the number of blocks in an answer.
    blocks: str = "--answer-blocks"

    def judge(self, seen):
        return [judge(seen) for judge in (took_place(self.least), *self.judges)]


def stalled(name, title, manner, **more):
    """Readers that ask for five answers each; in some manners they also read or send something afterwards."""
    return Case(name, title, ["stalled-readers", "--connections", 256, "--manner", manner],
                {"connections": 256, "calls": 256 * 5, **more}, [nobody_refused, p99_within(2), memory], 256)


def greedy(name, title, *attack, token="greedy", **settings):
    """A greedy principal next to one that uses half (or another fraction) of what its connection can take."""
    # Limited to 16 MiB a second it gets 64 answers a second.
    least = {"answers": 16} if token == "greedy" else {"refused": 1000}
    judges = [paired_p99_within(1.5, "alone", "of alone")]
    # Of what the page cache has, and of refused requests, nothing is read from the device.
    if token == "greedy" and "engine" not in settings:
        judges.append(paired_p99_within(1.5, "device", "of beside fio"))
    judges += [nobody_of_runs_refused, survives]
    return Case(name, title, list(attack), least, judges, runner="principals", token=token, **settings)


def flood(kind, title, *more, **least):
    # Of 80,000 frames a second at most.
    least = {"connections": 8, "frames_sent": 5_000} | least
    return Case(kind, title, ["flood", kind], least, [memory, nobody_refused, *more, survives], 8)


def pinned(name, title, streams, frame_bytes, frames_sent):
    """Frames of some size that each keep a buffer until they are read, on streams that are not read."""
    attack = ["pinned-buffers", "--connections", 64, "--streams", streams, "--frame-bytes", frame_bytes]
    return Case(name, title, attack, {"connections": 64, "frames_sent": frames_sent},
                [nobody_refused, p99_within(2), connections_closed, memory, survives], 64)


CASES = [
    Case("partial-bodies", "64 gRPC connections, 200 calls each, 4 MiB of a request sent a call and never ended",
         ["partial-bodies", "--connections", 64, "--calls", 200],
         {"connections": 64, "calls": 6400, "bytes_sent": 32 << 20}, [memory, nobody_refused, survives], 64),
    stalled("reads-nothing", "256 readers ask for five answers of 16 MiB each and read nothing", "nothing"),
    stalled("reads-slowly", "the same, reading 1 KB/s", "slowly", bytes_received=1000),
    stalled("zero-window", "the same with windows of zero", "zero-window", bytes_received=1000),
    # The requests themselves are 10.6 MB.
    stalled("creeping-window", "the same with windows that grow by 1 every 10 ms", "creeping-window", bytes_sent=11_000_000),
    Case("half-open", "10,000 half-open HTTP and gRPC connections, slow heads, slow bodies, idle ones, that come back",
         ["half-open", "--connections", 10_000],
         {"connections": 10_000, "answers": 500, "bytes_sent": 400_000},
         [within_100_ms("livez"), within_100_ms("newcomer"), nobody_refused, memory], 1000, 5.0),
    Case("idle-http2", f"{HALF_OPEN_IDLE} idle HTTP/2 connections",
         ["half-open", "--connections", HALF_OPEN_IDLE, "--kinds", "idle-http2", "--once"],
         {"connections": HALF_OPEN_IDLE, "bytes_received": 9 * HALF_OPEN_IDLE}, [idle_cost], 1000, 5.0),
    Case("kept-requests", "3,000 HTTP/2 connections that make 256 calls of an unknown method each, at once, are idle, and come back",
         ["half-open", "--connections", 3000, "--kinds", "idle-http2", "--calls", 256],
         {"connections": 256, "bytes_sent": 8 << 20}, [nobody_refused, memory, survives], 1000, 0.0),
    pinned("pinned-buffers", "64 connections send bytes in frames of their own, with 8 KiB that are read between them, to a stream "
           "that is not read", 1, 1, 6400),
    pinned("pinned-buffers-300", "the same, to 16 streams each, with frames of 300 bytes", 16, 300, 6400),
    pinned("pinned-buffers-2k", "the same with frames of 2 KiB", 16, 2048, 6400),
    # Each fills its table: 107 entries.
    Case("pinned-buffers-entries", "1,000 connections make 107 calls each whose path is an entry of HPACK's table, with 8 KiB of body, "
         "and are idle", ["pinned-buffers", "--connections", 1000, "--kind", "entries"],
         {"connections": 1000, "frames_sent": 50_000}, [nobody_refused, memory, survives], 1000, 5.0),
    Case("big-answers", "8 callers fetch answers of 16 MiB without pause", ["big-answers", "--callers", 8],
         {"connections": 8, "answers": 24}, [nobody_refused, p99_within(3)], 8),
    Case("big-answers-scattered", "the same, each answer of 4096 reads at random places",
         ["big-answers", "--callers", 8, "--scattered"], {"connections": 8, "answers": 16}, [nobody_refused, p99_within(3)], 8),
    Case("herd", "1,000 callers ask for one cold block at the same moment", ["herd"], {"calls": 1000},
         [one_read_a_shard, all_right, no_core_blocked], runner="herd", engine={"backend": "uring"}),
    Case("herd-auto", "the same with backend auto", ["herd"], {"calls": 1000},
         [one_read_a_shard, all_right, no_core_blocked], runner="herd", engine={"backend": "auto"}),
    flood("rapid-reset", "requests cancelled at once (CVE-2023-44487)", connections_closed),
    flood("reset-after-headers", "heads of requests with a part of the body, cancelled", connections_closed),
    flood("settings", "SETTINGS without end, acknowledgements not read", p99_within(2)),
    flood("ping", "PING without end, acknowledgements not read", p99_within(2)),
    flood("continuation", "a head that goes on in CONTINUATION frames (CVE-2024-27316)", connections_closed),
    flood("headers", "requests with thousands of header fields", p99_within(2)),
    flood("indexed-headers", "requests with as many header fields as are allowed, each a byte that refers to an entry of HPACK's table",
          p99_within(2), answers=500),
    # Few of its frames fit into a connection.
    flood("indexed-headers-over", "requests whose 8 KiB of such bytes are 30 MB decoded", p99_within(2), connections_closed,
          connections=100, frames_sent=400),
    flood("http2-long-head", "a head whose last field does not end, in CONTINUATION frames of 16 KiB", p99_within(2),
          connections_closed, connections=100, frames_sent=400),
    # Until the first of them are closed, after timeouts.head_ms.
    Case("http2-long-head-slow", "1,000 connections with an open stream and a head of 16 KiB that goes on with a byte a second",
         ["half-open", "--connections", 1000, "--kinds", "slow-http2-head"],
         {"connections": 1000, "bytes_sent": 16_000_000}, [nobody_refused, p99_within(2), connections_closed, memory, survives],
         1000, 17.0),
    flood("settings-windows", "SETTINGS that close and open the windows of 250 requests all the time", p99_within(2), calls=8 * 250,
          bytes_received=9 * 5000),
    flood("empty-data", "a body of empty DATA frames", connections_closed),
    flood("http-headers", "an HTTP/1.1 head without end", connections_closed),
    greedy("greedy-principal", "a principal with 64 connections, 64 scattered reads a call, without limits",
           "big-answers", "--callers", 64, "--answer-blocks", 64, "--scattered"),
    greedy("greedy-principal-third", "the same, the reader at a third of the load that its connection can take",
           "big-answers", "--callers", 64, "--answer-blocks", 64, "--scattered", load=1 / 3),
    greedy("greedy-principal-weight", "the same as the first, the reader of weight 4",
           "big-answers", "--callers", 64, "--answer-blocks", 64, "--scattered", weight=4),
    greedy("greedy-principal-warm", "the same as the second, backend auto, all data in the page cache",
           "big-answers", "--callers", 64, "--answer-blocks", 64, "--scattered", load=1 / 3, engine={"backend": "auto"}),
    greedy("greedy-principal-limited", "the same as the first, limited to 16 MiB a second",
           "big-answers", "--callers", 64, "--answer-blocks", 64, "--scattered", limits="bytes/s=16MiB"),
    greedy("greedy-principal-one-connection", "a principal with 64 calls of 64 scattered reads on the other's connection",
           "--beside-calls", 64, "--beside-blocks", 64, blocks="--beside-blocks"),
    greedy("greedy-principal-one-connection-limited", "the same, limited to 16 MiB a second",
           "--beside-calls", 64, "--beside-blocks", 64, blocks="--beside-blocks", limits="bytes/s=16MiB"),
    greedy("refused-credentials", "64 connections with 8 calls each and a token of nobody's",
           "big-answers", "--callers", 64, "--calls", 8, "--answer-blocks", 1, token="nobody"),
    Case("overload", "8 callers with 64 calls of 4096 scattered reads each on a disk of 2 ms a read, 64 at a time",
         ["big-answers", "--callers", 8, "--calls", 64, "--scattered"],
         {"connections": 8, "calls": 8 * 64, "refused": 8 * 64}, [single_refused_soon, heard_in_time, survives],
         runner="overload"),
]
