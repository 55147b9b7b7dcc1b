"""The rows: what is measured, what it is compared with, and the targets. docs/BENCHMARKING.md says how to read them."""

import dataclasses

from cache import COLD_BUFFERED, COLD_DIRECT, IN_MEMORY, WARM, Temperature, partly
from peers import BetterOf, Fio, FioNbd, Nginx, OverLink, QemuNbd, Served, StockTonic, Wrk
from ringfetch import DIM, STOCK_SERVER, Daemon, EngineAlone, Load, ScoreMapping, ThenIdle
from verdict import Target

READS, CPU, MEGABYTES = "reads_per_second", "cpu_us", "megabytes_per_second"
WIRE = "wire_bytes"
MEMORY_BUDGET_MIB = 256
# Single reads per second of the open loop, far below what the device of a small server can do.
PACED_RATE = 15_000


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: `subject` against `peer` (none for rows with only absolute targets), on `path` at a temperature."""

    title: str
    path: object
    temperature: Temperature
    subject: object
    peer: object
    # The peer in a word or two, for the table.
    against: str
    targets: list
    # Buffered cold rows are short, so that the cache stays nearly empty.
    seconds_max: int = 3600
    # Seconds of a quick run: less if three sides run.
    quick_seconds: int = 2
    note: str = ""


def every(path, warm_path, idle_seconds, size=0, warm_size=0, memory_device=None):
    """All rows by name, in the table's order. Sizes in bytes; without them the rows can be listed, but not run."""
    # One core: the load generator has the other CPU of a two-CPU machine (docs/BENCHMARKING.md, "cores").
    uring = {"backend": "uring", "cores": 1}
    # wrk has two threads, nginx two workers: with one core the CPU of that core was the bound, 58,900 requests/s of `http-block`
    # against 71,500 (four alternating runs of 2 s).
    uring_wide, auto_wide = {"backend": "uring"}, {"backend": "auto"}
    mmap = {"backend": "mmap", "cores": 1, "mmap": {"threads": 2}}
    # If the device is not the bottleneck, a second core pays off for mmap too: 797k to 827k against 552k to 748k reads/s, all
    # warm (three alternating runs of `ringfetch load --batch 64 --outstanding 16 --connections 4 --seconds 2`).
    mmap_wide = {"backend": "mmap", "mmap": {"threads": 2}}
    one_thread = {"backend": "mmap", "cores": 1, "mmap": {"threads": 1}}
    unannounced = {"backend": "mmap", "cores": 1, "mmap": {"threads": 1, "announce": False}}
    # The remainder of the file becomes a header; direct reads stay aligned if it is a multiple of sectors.
    vectors = {"kind": "vectors", "layout": "raw", "dim": DIM, "dtype": "f32", "header_bytes": size % (DIM * 4)}
    blocks, pieces = size // 4096, warm_size // 65536

    # 16 requests of 64 reads: 1024 reads in flight, so that the device never idles for lack of requests.
    batches = Load("--batch", 64, "--outstanding", 16, "--connections", 4)
    singles = Load("--batch", 1, "--outstanding", 256, "--connections", 4)
    stream = Load("--batch", 1, "--outstanding", 256, "--connections", 4, "--transport", "stream")
    fio64 = Fio(path, iodepth=64)

    warm_vectors = {**vectors, "header_bytes": warm_size % (DIM * 4)}
    one_query = ("--score", "dot", "--batch", 1000, "--outstanding", 1)
    scored, scored_here = Load(*one_query), Load(*one_query, "--score-at", "client")
    scored_batches = Load("--score", "dot", "--batch", 64, "--outstanding", 16, "--connections", 4)
    many_queries = Load("--score", "dot", "--batch", 1000, "--outstanding", 8, "--connections", 4)

    one_by_one = Load("--batch", 1, "--outstanding", 1, "--connections", 1)
    # Enough in flight for all arrivals while the peer is late: an open loop does not wait.
    paced = Load("--batch", 1, "--outstanding", 1024, "--connections", 1, "--rate", PACED_RATE, "--arrivals", "constant")

    def engine(depth):
        return EngineAlone(path, queue_depth=depth, batch=16, outstanding=depth // 8)

    def row(title, temperature, subject, peer, against, *targets, path=path, **more):
        return Row(title, path, temperature, subject, peer, against, list(targets), **more)

    def auto(fraction):
        # At the ends one backend is right and another a few percent slower is as good; in between both are wrong.
        warm = partly(fraction)
        pure = {"uring": Served(Daemon(path, uring), batches), "mmap": Served(Daemon(path, mmap_wide), batches)}
        return row(f"backend auto, {fraction:.0%} of the file resident", warm,
                   Served(Daemon(path, auto_wide), batches), BetterOf(path, warm, pure),
                   "the better of uring and mmap", at_least(READS, 0.95 if fraction in (0, 1) else 1.0), seconds_max=3, quick_seconds=1)

    def at_least(figure, ratio):
        return Target(figure, ">=", ratio=ratio)

    def at_most(figure, ratio=None, value=None):
        return Target(figure, "<=", ratio=ratio, value=value)

    def single_warm(engine):
        return row("one warm read at a time, " + engine["backend"], WARM, Served(Daemon(warm_path, engine), one_by_one),
                   Served(StockTonic(warm_path, STOCK_SERVER), one_by_one), "stock tonic, data in memory",
                   at_most("p50_us", 1.0), path=warm_path)

    def beside_itself(title, driver, without, **variant):
        sides = [Served(Daemon(warm_path, {"backend": "auto", "cores": 1}, **more), driver) for more in (variant, {})]
        return row(title, WARM, *sides, "the same " + without, path=warm_path)

    def over_tls(title, driver):
        return beside_itself(title + ", over TLS", driver, "in plain text", tls=True)

    def with_token(title, driver):
        return beside_itself(title + ", with a token", driver, "without principals", principals=True)

    return {
        "engine-64": row(
            "engine alone, depth 64", COLD_DIRECT, engine(64), fio64, "fio, depth 64",
            at_least(READS, 0.98), at_most(CPU, 0.75)),
        "engine-256": row(
            "engine alone, depth 256", COLD_DIRECT, engine(256), Fio(path, iodepth=256), "fio, depth 256",
            at_least(READS, 0.98), at_most(CPU, 0.75)),
        "engine-1": row(
            "engine alone, depth 1: latency", COLD_DIRECT,
            EngineAlone(path, queue_depth=1, batch=1, outstanding=1), Fio(path, iodepth=1), "fio, depth 1",
            at_most("p50_us", 1.10)),
        "grpc-64": row(
            "gRPC FetchBlocks, 64 a call", COLD_DIRECT, Served(Daemon(path, uring), batches), fio64, "fio, depth 64",
            at_least(READS, 0.97), at_most(CPU, 0.85)),
        "grpc-1": row(
            "gRPC FetchBlocks, 1 a call, 256 outstanding", COLD_DIRECT, Served(Daemon(path, uring), singles),
            Served(QemuNbd(path), FioNbd(connections=4, depth=64)), "qemu-nbd, io_uring, 4 x 64",
            at_least(READS, 1.4), at_most(CPU, 0.75)),
        "stream": row(
            "gRPC FetchStream, single reads pipelined", COLD_DIRECT, Served(Daemon(path, uring), stream), fio64,
            "fio, depth 64", at_least(READS, 0.85), at_most(CPU, 1.4)),
        "single-cold": row(
            "gRPC FetchBlocks, one read at a time", COLD_DIRECT, Served(Daemon(path, uring), one_by_one),
            Served(QemuNbd(path), FioNbd(connections=1, depth=1)), "qemu-nbd, io_uring, depth 1",
            at_most("p50_us", 1.2), at_most(CPU, 1.0)),
        "single-warm-mmap": single_warm(mmap),
        "single-warm-auto": single_warm({"backend": "auto", "cores": 1}),
        "paced-1": row(
            f"{PACED_RATE:,} single reads a second, evenly spaced", COLD_DIRECT, Served(Daemon(path, uring), paced),
            Served(QemuNbd(path), FioNbd(connections=1, depth=1024, rate_iops=PACED_RATE)),
            "qemu-nbd, io_uring, the same rate",
            dataclasses.replace(at_most("p99_us", 0.1), in_every_pair=True),
            dataclasses.replace(at_most("p99_of_p50", value=5.0), in_every_pair=True)),
        "fast-device": row(
            "gRPC FetchBlocks, 64 a call, from a block device in memory", IN_MEMORY,
            Served(Daemon(memory_device, uring), batches), Fio(memory_device, count_workers=True, iodepth=64),
            "fio, one job, depth 64",
            at_least(READS, 0.8), at_most(CPU, 1.4), path=memory_device,
            note="zram: the device is not the bound, so that the row shows what the software costs. It cannot start a read without "
                 "sleeping, so that the kernel's worker threads make the reads of both sides; their CPU is counted"),
        "http-block": row(
            "HTTP GET of one block, keep-alive, 64 connections", COLD_DIRECT,
            Served(Daemon(path, uring_wide), Wrk(["block", "/v1/datasets/data/blocks/", blocks], 4096)),
            Served(Nginx(path, "direct"), Wrk(["range", Nginx(path, "direct").resource, 4096, blocks], 4096)),
            "nginx, aio threads + directio", at_least(READS, 1.6), at_most(CPU, 0.5)),
        "http-batch": row(
            "HTTP blocks:batchFetch, 64 a request", COLD_DIRECT,
            Served(Daemon(path, uring), Wrk(["batch", "/v1/datasets/data/blocks:batchFetch", 64, blocks], 64 * 4096,
                                            reads_per_request=64, connections=16)),
            fio64, "fio, depth 64", at_least(READS, 0.97)),
        "mmap-cold": row(
            "mmap, 2 threads, gRPC 64 a call", COLD_BUFFERED, Served(Daemon(path, mmap), batches), fio64,
            "fio, depth 64", at_least(READS, 0.90), seconds_max=3),
        "mmap-announced": row(
            "mmap, 1 thread, batches announced", COLD_BUFFERED, Served(Daemon(path, one_thread), batches),
            Served(Daemon(path, unannounced), batches), "the same, unannounced", at_least(READS, 4.0), seconds_max=3),
        "mmap-warm": row(
            "mmap, warm, gRPC 64 a call", WARM, Served(Daemon(warm_path, mmap_wide), batches),
            Served(StockTonic(warm_path, STOCK_SERVER), batches), "stock tonic, data in memory",
            at_least(READS, 1.7), path=warm_path),
        **{f"auto-{fraction:.0%}".rstrip("%"): auto(fraction) for fraction in (1, 0.75, 0.5, 0.25, 0)},
        "vectors-3k": row(
            "vectors of 3072 bytes, 64 a call", COLD_DIRECT, Served(Daemon(path, uring, vectors), batches),
            Fio(path, iodepth=64, bs="3k"), "fio, bs=3k, depth 64", at_least(READS, 0.97)),
        "scores-1": row(
            "1,000 vectors of 768 f32 scored, one query at a time", COLD_DIRECT,
            Served(Daemon(path, uring, vectors), scored), Served(Daemon(path, uring, vectors), scored_here),
            "FetchVectors and scoring in the client", at_most("p50_us", 0.9), at_most(WIRE, 0.01)),
        "scores-link": row(
            "the same over a link of 1 Gbit/s", COLD_DIRECT,
            OverLink(Daemon(path, uring, vectors), scored), OverLink(Daemon(path, uring, vectors), scored_here),
            "FetchVectors and scoring in the client", at_most("p50_us", 0.5), at_most(WIRE, 0.01)),
        "scores-load": row(
            "vectors scored, 64 a call, full load", COLD_DIRECT, Served(Daemon(path, uring, vectors), scored_batches),
            Served(Daemon(path, uring, vectors), batches), "FetchVectors", at_least(READS, 0.95)),
        "scores-warm": row(
            "vectors scored, warm, mmap, 1,000 a call", WARM,
            Served(Daemon(warm_path, one_thread, warm_vectors), many_queries),
            ScoreMapping(warm_path, warm_size % (DIM * 4), DIM, 1000), "the same loop over a mapping, in process",
            at_least(READS, 0.7), path=warm_path),
        "ranges-64k": row(
            "HTTP ranges of 64 KiB, warm, backend auto", WARM,
            Served(Daemon(warm_path, auto_wide), Wrk(["range", "/v1/datasets/data/bytes", 65536, pieces], 65536)),
            Served(Nginx(warm_path, "sendfile"),
                   Wrk(["range", Nginx(warm_path, "sendfile").resource, 65536, pieces], 65536)),
            "nginx, sendfile", at_least(MEGABYTES, 1.05), at_most(CPU, 0.9), path=warm_path),
        "tls-1": over_tls("gRPC FetchBlocks, 1 a call, 256 outstanding", singles),
        "tls-64": over_tls("gRPC FetchBlocks, 64 a call", batches),
        "tls-64k": over_tls("HTTP ranges of 64 KiB", Wrk(["range", "/v1/datasets/data/bytes", 65536, pieces], 65536)),
        "token-1": with_token("gRPC FetchBlocks, 1 a call, 256 outstanding", singles),
        "token-64": with_token("gRPC FetchBlocks, 64 a call", batches),
        "log-64": beside_itself("gRPC FetchBlocks, 64 a call, with an access log", batches, "without", access_log=True),
        "memory": row(
            "memory and idle CPU after load", COLD_DIRECT,
            Served(Daemon(path, {**uring, "memory_budget": f"{MEMORY_BUDGET_MIB}MiB"}),
                   ThenIdle(batches, idle_seconds)),
            None, "-", at_most("resident_mib", value=64 + MEMORY_BUDGET_MIB),
            at_most("idle_cpu_percent", value=0.5),
            note=f"resident_mib is the peak (VmHWM) with a byte budget of {MEMORY_BUDGET_MIB} MiB"),
        "memory-mmap": row(
            "the same on mmap: memory that is not page cache", COLD_BUFFERED,
            Served(Daemon(path, {**mmap, "memory_budget": f"{MEMORY_BUDGET_MIB}MiB"}),
                   ThenIdle(batches, idle_seconds)),
            None, "-", at_most("anonymous_mib", value=64 + MEMORY_BUDGET_MIB),
            at_most("idle_cpu_percent", value=0.5), seconds_max=3,
            note="anonymous_mib is RssAnon after the load: mapped pages belong to the page cache"),
    }


def drives_nbd(row):
    """Whether fio's nbd engine reads the row's peer."""
    return isinstance(row.peer, Served) and isinstance(row.peer.driver, FioNbd)


def needs(rows):
    """(command, Debian package) of everything that these rows run."""
    tools = {("fio", "fio"), ("fincore", "util-linux"), ("findmnt", "util-linux")}
    for row in rows:
        for side in (row.subject, row.peer):
            if isinstance(side, OverLink):
                tools |= {("ip", "iproute2"), ("tc", "iproute2")}
            if isinstance(side, Served):
                if isinstance(side.server, Daemon) and side.server.tls:
                    tools.add(("openssl", "openssl"))
                if isinstance(side.server, Nginx):
                    tools.add(("nginx", "nginx-light"))
                if isinstance(side.server, QemuNbd):
                    tools.add(("qemu-nbd", "qemu-utils"))
                if isinstance(side.driver, Wrk):
                    tools.add(("wrk", "wrk"))
    return sorted(tools)
