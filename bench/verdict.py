"""From runs to judgements: ratios of each pair, their median, and whether a target was met."""

import dataclasses
import math
import statistics

# Others' part of the CPUs while nothing was measured, and the hypervisor's during the runs, above which figures tell nothing.
OTHERS_CPU_MAX = 0.10
STOLEN_CPU_MAX = 0.05

UNITS = {
    "reads_per_second": "reads/s", "megabytes_per_second": "MB/s", "cpu_us": "CPU us/read", "p50_us": "p50 us",
    "p99_us": "p99 us", "p99_of_p50": "p99 / p50", "resident_mib": "MiB resident", "anonymous_mib": "MiB anonymous",
    "idle_cpu_percent": "% of a core, idle", "wire_bytes": "bytes on the wire/read",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """`figure` must be >= or <= `ratio` times the peer's, or `value` itself; with both, either is enough. The median counts,
    or the worst of the runs."""

    figure: str
    relation: str
    ratio: float | None = None
    value: float | None = None
    in_every_pair: bool = False

    def _holds(self, measured, bound):
        return measured >= bound if self.relation == ">=" else measured <= bound

    def _measured(self, values):
        worst = min(values) if self.relation == ">=" else max(values)
        measured = worst if self.in_every_pair else statistics.median(values)
        return {"measured": measured, "lowest": min(values), "highest": max(values)}

    def judge(self, result):
        """The judgement as plain data."""
        options = []
        if self.ratio is not None:
            options.append({**self._measured(result.ratios(self.figure)), "bound": self.ratio, "is": "ratio"})
        if self.value is not None:
            options.append({**self._measured(result.values("subject", self.figure)), "bound": self.value, "is": "value"})
        for option in options:
            option["relation"] = self.relation
            option["score"] = score(option, option["measured"])
            option["met"] = self._holds(option["measured"], option["bound"])
        best = max(options, key=lambda option: option["score"])
        return {"figure": self.figure, "in_every_pair": self.in_every_pair, **best}


def score(judgement, measured):
    """How far beyond its target a measured value is: 1 is exactly on it, below 1 is missed."""
    ahead = measured / judgement["bound"]
    return ahead if judgement["relation"] == ">=" else 1 / max(ahead, 1e-9)


def disturbance(runs):
    """Why most of the runs were not measured on a quiet machine. None: they were."""
    others, stolen = (statistics.median(run.get(key, 0) for run in runs) if runs else 0 for key in ("others_cpu", "stolen_cpu"))
    if others > OTHERS_CPU_MAX:
        return f"others used {others:.0%} of the CPUs"
    # A host may count what its emulation of the disk uses against a quota of the virtual machine, and then stops it.
    return f"the hypervisor took {stolen:.0%} of the CPUs" if stolen > STOLEN_CPU_MAX else None


@dataclasses.dataclass
class Result:
    """The runs of one row, in pairs."""

    name: str
    row: object
    subject: list
    peer: list
    # Why there are no figures, or why they are not those of this row.
    failure: str | None = None

    @property
    def problem(self):
        """Why there is no verdict. None: there is one."""
        return self.failure or disturbance([*self.subject, *self.peer])

    def values(self, side, figure):
        return [run[figure] for run in getattr(self, side) if run.get(figure) is not None]

    def median(self, side, figure):
        values = self.values(side, figure)
        return statistics.median(values) if values else math.nan

    def ratios(self, figure):
        """Per pair, whose two runs are adjacent in time."""
        return [ours[figure] / theirs[figure] for ours, theirs in zip(self.subject, self.peer, strict=True)]

    def judgements(self):
        if self.problem or not self.subject:
            return []
        return [target.judge(self) for target in self.row.targets]

    def verdict(self):
        """One word for the row."""
        judgements = self.judgements()
        if self.problem:
            return "no figures" if not self.subject else "not judged"
        if not judgements:
            return "no target"
        return "met" if all(judgement["met"] for judgement in judgements) else "NOT met"


def in_words(judgement):
    """`reads/s 0.98x (0.96-0.99), target >= 0.97x: met`."""
    ratio = judgement["is"] == "ratio"
    sign = "x" if ratio else ""
    digits = 2 if judgement["bound"] >= 0.1 else 4
    spread = f" ({judgement['lowest']:.{digits}f}-{judgement['highest']:.{digits}f})" if ratio else ""
    met = "met" if judgement["met"] else "**NOT met**"
    what = UNITS.get(judgement["figure"], judgement["figure"])
    every = " in every pair" if judgement.get("in_every_pair") else ""
    return (f"{what} {judgement['measured']:.{digits}f}{sign}{spread}, target {judgement['relation']} "
            f"{judgement['bound']:g}{sign}{every}: {met}")
