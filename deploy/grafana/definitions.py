"""The dashboards. `./generate` writes them as JSON below dashboards/; edit them here."""

from panels import (
    BACKEND,
    DATASET,
    INSTANCE,
    JOB,
    PRINCIPAL,
    dashboard,
    divided,
    heatmap,
    mean,
    or_none,
    pick,
    quantile,
    quotient,
    rate,
    series,
    side,
    stat,
    table,
    target,
)

READS, BYTES = "ringfetch_reads_total", "ringfetch_read_bytes_total"
DURATION, DATASET_DURATION = "ringfetch_read_duration_seconds", "ringfetch_dataset_read_duration_seconds"
DEVICE_READS, DEVICE_BYTES = "ringfetch_device_reads_total", "ringfetch_device_read_bytes_total"
SUBMISSIONS, DEPTH = "ringfetch_submissions_total", "ringfetch_queue_depth"
RESIDENT = "ringfetch_resident_reads_total"
CARRIED_OUT = f"{rate(DEVICE_READS)} + {rate(RESIDENT)}"
CPU, INFO = "process_cpu_seconds_total", "ringfetch_backend_info"

BY_DATASET = ('dataset=~"$dataset"', 'backend=~"$backend"')
BY_BACKEND = ('backend=~"$backend"',)
TOTAL, ON_DEVICE = ('stage="total"',), ('stage="device"',)
OF_DATASET, FAILED = 'dataset=~"$dataset"', 'result!="ok"'
# As in deploy/prometheus/rules.yml.
SERVICE_FAILED = 'result=~"device_error|truncated|unreadable|engine_failed|overloaded|deadline"'
FIRING = ('alertstate="firing"', 'alertname=~"Ringfetch.+"')
# RingfetchDown, if no daemon is known at all.
OF_NO_INSTANCE = f'ALERTS{{instance="", {", ".join(FIRING)}}}'
FULL, HALF, THIRD, QUARTER, EIGHTH = (24, 6), (12, 8), (8, 8), (6, 8), (3, 4)
TALL_HALF, QUARTER_LOW = (12, 9), (6, 4)
# `memory` before routing is request memory, and otherwise that of responses. Other refusals before routing are mistakes.
EARLY = rate("ringfetch_requests_refused_total", 'reason=~"memory|services|draining"')
REFUSED = f"""{rate('ringfetch_rejected_total')} or label_replace({EARLY}, "reason", "request_memory", "reason", "memory")"""
# Reasons that are a limit or a share of the caller's own, or may be. `test` compares them with the daemon's.
OWN_LIMITS = ("requests_in_flight", "principal_requests", "requests_per_second", "bytes_per_second", "principal_memory",
              "caller_memory", "connection_memory", "caller_reads", "caller_objects")

TITLES = {"overview": "Ringfetch: overview", "engine": "Ringfetch: engine", "flip": "Ringfetch: uring against mmap",
          "principals": "Ringfetch: principals"}


def others(name):
    return [(other, title) for other, title in TITLES.items() if other != name]


def quantiles(legend, by, metric, *conditions):
    return [target(quantile(share, by, metric, *conditions), f"{name} {legend}".strip())
            for share, name in ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))]


def overview():
    answered = f"sum by (job, instance) ({rate(READS, *BY_DATASET)})"
    failed = f"sum by (job, instance) ({rate(READS, *BY_DATASET, SERVICE_FAILED)})"
    numbers = [
        stat("Daemons up", "Daemons that answer a scrape, of those that Prometheus knows by this job.", "none", EIGHTH,
             f"sum({pick('up')}) or vector(0)"),
        stat("Alerts firing", "Alerts of deploy/prometheus/rules.yml for these daemons, or because no daemon is known. Each has "
             "a runbook in docs/OPERATIONS.md.", "none", EIGHTH,
             f"count({pick('ALERTS', *FIRING)} or {OF_NO_INSTANCE}) or vector(0)", bad_from=1),
        stat("IOPS", "Items answered a second, as clients see them.", "iops", EIGHTH,
             f"sum({rate(READS, *BY_DATASET)})"),
        stat("Throughput", "Bytes of items answered a second.", "binBps", EIGHTH, f"sum({rate(BYTES, *BY_DATASET)})"),
        stat("Median latency", "Half of the reads took less, from acceptance to answer.", "s", EIGHTH,
             quantile(0.5, "", DURATION, *TOTAL, *BY_BACKEND)),
        stat("p99 latency", "99 of 100 reads took less, from acceptance to answer.", "s", EIGHTH,
             quantile(0.99, "", DURATION, *TOTAL, *BY_BACKEND)),
        stat("Reads failed", "Share of reads that the service failed, on the daemon with the largest: errors of the device, lost "
             "bytes, unreadable objects, deadlines, overload. Wrong requests do not count.", "percentunit", EIGHTH,
             f"max({divided(failed, answered)}) or max({answered}) * 0", bad_from=0.001),
        stat("Refused", "Requests a second refused because of a limit, a deadline or the drain.", "reqps", EIGHTH,
             f"sum({REFUSED})", bad_from=0.001),
    ]
    in_force = f" and on (job, instance, dataset, backend) {pick('ringfetch_dataset_backend_info')}"
    served = table(
        "What is served, by which backend, and why",
        "A row for each dataset: the backend that reads it, the one that was asked for, and the reason. Where the two "
        "differ the daemon runs on its fallback.", FULL,
        target(pick("ringfetch_dataset_backend_info", *BY_DATASET)),
        target(f"sum by (job, instance, dataset, backend) ({rate(READS, *BY_DATASET)}){in_force}"),
        target(f"sum by (job, instance, dataset, backend) ({rate(BYTES, *BY_DATASET)}){in_force}"),
        columns={"instance": "Instance", "dataset": "Dataset", "backend": "Backend", "requested": "Asked for",
                 "reason": "Reason", "Value #B": "Reads a second", "Value #C": "Bytes a second"},
        hidden=("job", "Value #A"), units={"Reads a second": "iops", "Bytes a second": "binBps"})
    budget = "{expr} / on () (1 - {objective})"
    rows = [
        numbers,
        [served],
        [series("IOPS", "Items answered a second, by dataset and backend.", "iops", HALF,
                target(f"sum by (dataset, backend) ({rate(READS, *BY_DATASET)})", "{{dataset}} {{backend}}")),
         series("Throughput", "Bytes of items answered a second, by dataset and backend.", "binBps", HALF,
                target(f"sum by (dataset, backend) ({rate(BYTES, *BY_DATASET)})", "{{dataset}} {{backend}}"))],
        [series("Read latency", "From a read's acceptance to its answer, by backend. A read of a batch counts by itself.",
                "s", THIRD, *quantiles("{{backend}}", "backend", DURATION, *TOTAL, *BY_BACKEND), logarithmic=True),
         series("Read latency by dataset", "The same by dataset, whichever backends serve it: which dataset is slow.", "s",
                THIRD, *[target(quantile(share, "dataset", DATASET_DURATION, OF_DATASET), f"{name} {{{{dataset}}}}")
                         for share, name in ((0.5, "p50"), (0.99, "p99"))], logarithmic=True),
         series("Request latency (p99)", "Whole requests: from a request's head to its response's head, for streams to "
                "their end.", "s", THIRD,
                target(quantile(0.99, "transport, method", "ringfetch_rpc_duration_seconds"), "{{transport}} {{method}}"),
                logarithmic=True)],
        [series("Reads that failed", "By result and dataset, also those that were wrong (out_of_range, not_found, "
                "invalid). 0 and `none`: all were answered.", "iops", THIRD,
                target(or_none(f"sum by (result, dataset) ({rate(READS, *BY_DATASET, FAILED)}) > 0", "result"),
                       "{{result}} {{dataset}}")),
         series("Requests refused", "By the bound that was met. Over queued_reads, memory, request_memory or "
                "requests_in_flight: too much load. connection_memory: a client that reads slowly. services: a client that leaves "
                "health calls open. items, response_bytes: one request too large.", "reqps", THIRD,
                target(f"sum by (reason) ({REFUSED})", "{{reason}}")),
         series("Requests", "Requests answered a second, by transport and status code. A FetchStream is one request.",
                "reqps", THIRD,
                target(f"sum by (transport, code) ({rate('ringfetch_rpc_requests_total')})", "{{transport}} {{code}}"))],
        [series("Error budget burn", "How fast the budgets of the objectives (deploy/prometheus/rules.yml) are used up: 1 "
                "uses up exactly all of it in 30 days. Over the last hour.", "none", THIRD,
                target(budget.format(expr=f"max({pick('ringfetch:slow_reads:ratio_rate1h')})",
                                     objective="ringfetch:latency_objective:ratio"), "latency"),
                target(budget.format(expr=f"max({pick('ringfetch:failed_reads:ratio_rate1h')})",
                                     objective="ringfetch:error_objective:ratio"), "errors")),
         series("CPU", "Cores in use by each daemon.", "none", THIRD,
                target(f"sum by (instance) ({rate(CPU)})", "{{instance}}")),
         series("Response memory", "Memory that answers hold, from disk to socket, and engine.memory_budget. At the budget "
                "requests are refused.", "bytes", THIRD,
                target(f"sum by (instance) ({pick('ringfetch_memory_in_use_bytes')})", "{{instance}}"),
                target(f"max({pick('ringfetch_memory_budget_bytes')})", "budget"))],
        [series("Connections", "Open connections, by transport.", "none", QUARTER,
                target(f"sum by (transport) ({pick('ringfetch_connections')})", "{{transport}}")),
         series("File descriptors", "Open descriptors as a share of the limit.", "percentunit", QUARTER,
                target(f"sum by (instance) ({pick('process_open_fds')}) / sum by (instance) ({pick('process_max_fds')})",
                       "{{instance}}"), max=1),
         series("Process memory", "Resident memory. Pages of a mapping count while they are resident.", "bytes", QUARTER,
                target(f"sum by (instance) ({pick('process_resident_memory_bytes')})", "{{instance}}")),
         series("Reloads", "Reloads of the configuration since the daemon started, by result. A failed one changed "
                "nothing.", "none", QUARTER,
                target(f"sum by (instance, result) ({pick('ringfetch_config_reloads_total')})", "{{instance}} {{result}}"),
                decimals=0)],
    ]
    return dashboard("overview", TITLES["overview"], "What is served, by which backend and why, how fast, and what fails.",
                     [JOB, INSTANCE, DATASET, BACKEND], rows, others("overview"))


def engine():
    waits = [target(quantile(share, "stage", DURATION, *BY_BACKEND, 'stage=~"queue|device"'), f"{name} {{{{stage}}}}")
             for share, name in ((0.5, "p50"), (0.99, "p99"))]
    rows = [
        [series("Queue depth at submission, and its limit", "Reads in flight that a read found when it was submitted, "
                "itself included: the depth that was achieved. The limit is a shard's. Quantiles are guessed between powers "
                "of two, so they may lie above it.", "none", HALF,
                target(mean("", DEPTH), "mean"),
                *[target(quantile(share, "", DEPTH), name)
                  for share, name in ((0.5, "p50"), (0.99, "p99"))],
                target(f"max({pick('ringfetch_queue_depth_limit')})", "limit")),
         series("In flight, by shard", "Reads submitted and not completed, as seen at each scrape; and the limit. stalled: those "
                "of a disk that has not answered for 3 s, which count no more.", "none", HALF,
                target(f"sum by (instance, shard) ({pick('ringfetch_in_flight_reads')})", "{{instance}} shard {{shard}}"),
                target(f"sum by (instance) ({pick('ringfetch_stalled_reads')})", "{{instance}} stalled"),
                target(f"max({pick('ringfetch_queue_depth_limit')})", "limit"))],
        [series("Waiting, by shard", "Reads accepted and not submitted. Rising without end: more load than the device can "
                "take.", "none", THIRD,
                target(f"sum by (instance, shard) ({pick('ringfetch_queued_reads')})", "{{instance}} shard {{shard}}")),
         series("Queue wait against device time", "Where a read's time goes: waiting to be submitted, or on the device. A "
                "long queue before a quick device: engine.uring.queue_depth is too small.", "s", THIRD, *waits,
                logarithmic=True),
         series("Mean time of a read", "The two stages on top of each other, on average over reads of the device.", "s",
                THIRD, target(mean("stage", DURATION, *BY_BACKEND, 'stage=~"queue|device"'), "{{stage}}"), stacked=True)],
        [heatmap("Latency of reads", "How many reads took how long from acceptance to answer.", "s", TALL_HALF,
                 f"sum by (le) (increase({pick(DURATION + '_bucket', *TOTAL, *BY_BACKEND)}[$__rate_interval]))"),
         heatmap("Time on the device", "How many reads took how long from submission to completion.", "s", TALL_HALF,
                 f"sum by (le) (increase({pick(DURATION + '_bucket', *ON_DEVICE, *BY_BACKEND)}[$__rate_interval]))")],
        [series("Batch size", "How many items a request asked for.", "none", THIRD,
                target(mean("", "ringfetch_batch_items"), "mean"),
                *[target(quantile(share, "", "ringfetch_batch_items"), name)
                  for share, name in ((0.5, "p50"), (0.99, "p99"))]),
         series("Submissions a read", "System calls that submitted, for each read of the device or of the page cache. Far "
                "below 1 is good batching; with mmap, announcements.", "none", THIRD,
                target(quotient(rate(SUBMISSIONS), CARRIED_OUT, "instance"), "{{instance}}")),
         series("Read amplification", "What the device was asked for, for each byte and each item answered. More than 1: "
                "alignment, gaps that were merged, items that were split. Less: duplicates, neighbours merged, or resident "
                "reads of auto.", "none", THIRD,
                target(quotient(rate(DEVICE_BYTES), rate(BYTES)), "bytes"),
                target(quotient(rate(DEVICE_READS), rate(READS)), "reads"))],
        [series("Page faults", "Faults a second. major: waited for the device; with mmap these are reads of the device "
                "that the announcement did not foresee.", "ops", THIRD,
                target(f"sum by (kind) ({rate('ringfetch_page_faults_total')})", "{{kind}}")),
         series("Resident reads", "Share of reads copied from the page cache without waiting: by backend auto, and of "
                "single small reads with mmap.", "percentunit", THIRD,
                target(quotient(rate(RESIDENT), CARRIED_OUT, "instance"), "{{instance}}"), max=1),
         series("CPU time a read", "CPU time of the whole process for each item answered.", "s", THIRD,
                target(quotient(rate(CPU), rate(READS), "instance"), "{{instance}}"))],
        [series("Answered", "Items answered a second, by dataset and backend: what the shards' work was for.", "iops", THIRD,
                target(f"sum by (dataset, backend) ({rate(READS, *BY_DATASET)})", "{{dataset}} {{backend}}")),
         series("Device reads, by shard", "Reads sent to the device a second. One busy shard beside idle ones: its "
                "connections do the work; more connections spread it.", "iops", THIRD,
                target(f"sum by (instance, shard) ({rate(DEVICE_READS)})", "{{instance}} shard {{shard}}")),
         series("Device bytes, by shard", "Bytes asked of the device a second.", "binBps", THIRD,
                target(f"sum by (instance, shard) ({rate(DEVICE_BYTES)})", "{{instance}} shard {{shard}}"))],
    ]
    return dashboard("engine", TITLES["engine"], "How the shards work: depth, waiting, device time, batching, "
                     "amplification. Series by shard or of the process are not cut by dataset and backend.",
                     [JOB, INSTANCE, DATASET, BACKEND], rows, others("engine"))


def attributed(expression, backend):
    """Rates by shard or process, attributed to the backend that was in force at both ends of their window."""
    info = pick(INFO, f'backend=~"{backend}"')
    return (f"sum by (backend) ({expression} * on (job, instance) group_left (backend) "
            f"({info} and {info} offset $__rate_interval))")


def served(*conditions):
    return f"sum by (backend) ({rate(READS, OF_DATASET, *conditions)})"


def served_throughout(condition):
    """As `served`, of windows at both ends of which it answered."""
    answers = f"irate({pick(READS, OF_DATASET, condition)}[$__rate_interval]"
    ends = [f"sum by (backend) ({answers}{offset})) > 0" for offset in ("", " offset $__rate_interval")]
    return f"{served(condition)} and {ends[0]} and {ends[1]}"


def per_backend(backend):
    """The compared ratios: name, description, unit, expression over time."""
    def counted(metric):
        """Datasets may have backends of their own, and a process or shard does not tell them apart."""
        return attributed(f"sum by (job, instance) ({rate(metric)})", backend)

    return {
        "CPU a read": ("CPU time of the whole process for each item answered.", "s",
                       divided(attributed(rate(CPU), backend), counted(READS))),
        "Depth": ("Reads in flight that a read found when it was submitted, on average: the depth that was achieved.",
                  "none", divided(attributed(rate(DEPTH + "_sum"), backend), attributed(rate(DEPTH + "_count"), backend))),
        "Submissions a read": ("System calls that submitted, for each read of the device or of the page cache.", "none",
                               divided(attributed(rate(SUBMISSIONS), backend),
                                       attributed(f"({CARRIED_OUT})", backend))),
        "Read amplification": ("Bytes asked of the device for each byte answered.", "none",
                               divided(attributed(rate(DEVICE_BYTES), backend), counted(BYTES))),
    }


# Number panels are narrow.
SHORT = {"Submissions a read": "submits/read", "Read amplification": "amplification"}


def flip():
    def numbers(backend):
        condition = f'backend="{backend}"'
        buckets = f"sum by (le) (increase({pick(DURATION + '_bucket', condition, *TOTAL)}[$__range]))"
        # Only while it served: the mean leaves out 0 and 0/0, and windows in which it began or ended.
        reads = f"avg_over_time(({served_throughout(condition)})[$__range:$__rate_interval])"
        ratios = [stat(f"{backend}: {SHORT.get(name, name)}", f"{text} Mean over the time in which {backend} served.", unit, EIGHTH,
                       f"avg_over_time(({expression})[$__range:$__rate_interval])")
                  for name, (text, unit, expression) in per_backend(backend).items()]
        return [
            stat(f"{backend}: IOPS", f"Items answered a second, mean over the time in which {backend} served.", "iops",
                 EIGHTH, reads),
            *[stat(f"{backend}: {name}", f"Latency of {backend}'s reads in the whole time range, from acceptance to "
                   "answer.", "s", EIGHTH, f"histogram_quantile({share}, {buckets}) >= 0")
              for share, name in ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))],
            *ratios]

    both = 'backend=~"$left|$right"'
    ratios = per_backend("$left|$right")

    def over_time(name, size=THIRD):
        text, unit, expression = ratios[name]
        return series(name, f"{text} What is counted by process or shard belongs to the engine's backend at the time.",
                      unit, size, target(expression, "{{backend}}"), by_backend=True)

    def latency(share, name):
        return series(f"Latency ({name})", "From a read's acceptance to its answer.", "s", THIRD,
                      target(quantile(share, "backend", DURATION, both, *TOTAL), "{{backend}}"), by_backend=True,
                      logarithmic=True)

    def spread(backend):
        buckets = pick(DURATION + "_bucket", f'backend="{backend}"', *TOTAL)
        return heatmap(f"{backend}: latency", f"How many reads of {backend} took how long from acceptance to answer.", "s",
                       TALL_HALF, f"sum by (le) (increase({buckets}[$__rate_interval]))")

    def stages(backend):
        return series(f"{backend}: where the time goes", "Mean time of a read: waiting to be submitted, and on the device.",
                      "s", HALF,
                      target(mean("stage", DURATION, f'backend="{backend}"', 'stage=~"queue|device"'), "{{stage}}"),
                      stacked=True)

    switches = pick("ringfetch_backend_switches_total")
    rows = [
        numbers("$left"), numbers("$right"),
        [series("IOPS", "Items answered a second. At a flip one line ends and the other begins.", "iops", HALF,
                target(served(both), "{{backend}}"), by_backend=True),
         over_time("CPU a read", HALF)],
        [latency(0.5, "p50"), latency(0.99, "p99"), latency(0.999, "p99.9")],
        [spread("$left"), spread("$right")],
        [stages("$left"), stages("$right")],
        [over_time("Depth"), over_time("Submissions a read"), over_time("Read amplification")],
        [series("Reads that failed", "By backend and result. 0 and `none`: all were answered.", "iops", THIRD,
                target(or_none(f"sum by (backend, result) ({rate(READS, both, OF_DATASET, FAILED)}) > 0",
                               "result"), "{{backend}} {{result}}"), by_backend=True),
         series("Page faults", "Faults a second, minor and major together, of the backend in force at the time.", "ops",
                THIRD, target(attributed(rate("ringfetch_page_faults_total"), "$left|$right"), "{{backend}}"),
                by_backend=True),
         series("Switches", "Switches of the backend since the daemon started, by the backend asked for and the result.",
                "none", THIRD, target(or_none(f"sum by (backend, result) ({switches}) > 0", "result"),
                                      "{{backend}} {{result}}"), decimals=0)],
    ]
    return dashboard("flip", TITLES["flip"], "Two backends side by side: at the same time on two instances, or one after "
                     "the other on one that was flipped.",
                     [JOB, INSTANCE, DATASET, side("left", "Left", "uring"), side("right", "Right", "mmap")], rows,
                     others("flip"))


def principals():
    chosen, by_itself = 'principal=~"$principal"', f'reason=~"{"|".join(OWN_LIMITS)}"'
    names = "ringfetch_principal_requests_total", "ringfetch_principal_read_bytes_total", "ringfetch_principal_rejected_total"
    requests, read, refused = (rate(name, chosen) for name in names)
    in_flight, memory = (pick(name, chosen) for name in ("ringfetch_principal_requests_in_flight",
                                                         "ringfetch_principal_memory_bytes"))
    rows = [
        [stat("Requests", "Requests let in before routing, a second. A FetchStream is one.", "reqps", QUARTER_LOW,
              f"sum({requests})"),
         stat("Throughput", "Bytes read for answers, a second.", "binBps", QUARTER_LOW, f"sum({read})"),
         stat("Refused", "Requests refused because of a limit, a deadline or the drain, a second.", "reqps", QUARTER_LOW,
              f"sum({refused})", bad_from=0.001),
         stat("Response memory", "Memory that answers hold, from disk to socket.", "bytes", QUARTER_LOW, f"sum({memory})")],
        [series("Requests by principal", "Requests let in before routing, a second. A FetchStream is one. anonymous: clients "
                "without a credential, where access.anonymous lets them in.", "reqps", HALF,
                target(f"sum by (principal) ({requests})", "{{principal}}")),
         series("Throughput by principal", "Bytes read for answers, a second. Its limit is bytes/s.", "binBps", HALF,
                target(f"sum by (principal) ({read})", "{{principal}}"))],
        [series("Refused, by principal and reason", "By the bound that was met: docs/METRICS.md lists them.", "reqps",
                HALF, target(f"sum by (principal, reason) ({refused})", "{{principal}} {{reason}}")),
         series("Refused by its own limits", "Requests a second refused to each principal because of its limits or shares "
                f"({', '.join(OWN_LIMITS)}): a client that does not wait for as long as it is told.", "reqps", HALF,
                target(f"sum by (principal) ({rate(names[2], chosen, by_itself)})", "{{principal}}"))],
        [series("In flight by principal", "Requests in flight, over all connections, as seen at each scrape. Its limit is "
                "requests.", "none", HALF, target(f"sum by (principal) ({in_flight})", "{{principal}}")),
         series("Response memory by principal", "Memory that its answers hold, from disk to socket. Much and few bytes read: "
                "a client that reads slowly. Its limit is memory.", "bytes", HALF,
                target(f"sum by (principal) ({memory})", "{{principal}}"))],
    ]
    return dashboard("principals", TITLES["principals"], "What each principal of access.principals asks for, gets and is "
                     "refused. Empty without such a file.", [JOB, INSTANCE, PRINCIPAL], rows, others("principals"))


DASHBOARDS = {"overview": overview, "engine": engine, "flip": flip, "principals": principals}
