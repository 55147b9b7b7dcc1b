"""A dashboard as one SVG: its panels in their places, with the results of their queries. Grafana's layout, but not its
drawing. Written by hand to avoid dependencies, like bench/plots.py."""

import html
import itertools
import math
import re

INK, FAINT, LINE, PAGE, CARD = "#1f2937", "#6b7280", "#e5e7eb", "#f3f4f6", "#ffffff"
SWITCH = "#9333ea"
COLUMN, ROW, GAP = 50, 31, 4
BACKENDS = {"uring": "#2563eb", "mmap": "#ea7317", "auto": "#16a34a", "pread": "#7c3aed"}
PALETTE = ("#2563eb", "#ea7317", "#16a34a", "#7c3aed", "#db2777", "#0891b2", "#a16207", "#64748b", "#dc2626", "#4d7c0f")
HEAT = ("#fee9d0", "#fdd0a2", "#fdae6b", "#fd8d3c", "#f16913", "#d94801", "#a63603", "#7f2704")


def text(x, y, words, size=11, colour=INK, **attributes):
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}"{extra}>{html.escape(str(words))}</text>'


def rectangle(x, y, width, height, colour, radius=0):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" fill="{colour}"/>'


def _scaled(value, steps, suffixes):
    place = 0
    while abs(value) >= steps and place < len(suffixes) - 1:
        value, place = value / steps, place + 1
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}", suffixes[place]


def told(value, unit):
    """A value with its unit, in three digits."""
    if value == 0:
        return "0"
    if unit == "s":
        for bound, factor, name in ((1e-3, 1e6, "µs"), (1, 1e3, "ms")):
            if abs(value) < bound * 0.9995:
                return f"{value * factor:.3g} {name}"
        return f"{value:.3g} s"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit in ("bytes", "binBps"):
        number, prefix = _scaled(value, 1024, ("", "Ki", "Mi", "Gi", "Ti"))
        return f"{number} {prefix}B" + ("/s" if unit == "binBps" else "")
    number, prefix = _scaled(value, 1000, ("", "k", "M", "G"))
    return f"{number}{prefix}" + {"iops": " io/s", "reqps": " req/s", "ops": "/s"}.get(unit, "")


def _ceiling(value, unit):
    """The smallest round number that is not less: 1, 2, 2.5, 5 times a power of ten; for bytes a power of two."""
    if value <= 0:
        return 1.0
    if unit in ("bytes", "binBps"):
        return 2.0 ** math.ceil(math.log2(value))
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.999)


def _colour(name, place, by_backend):
    for backend, colour in BACKENDS.items():
        if by_backend and re.search(rf"\b{backend}\b", name):
            return colour
    return PALETTE[place % len(PALETTE)]


class Frame:
    """A panel's plot: time to the right, values up."""

    def __init__(self, place, start, end, legend_lines):
        self.left, self.right = place["x"] + 66, place["x"] + place["w"] - 12
        self.top, self.bottom = place["y"] + 30, place["y"] + place["h"] - 22 - 15 * legend_lines
        self.start, self.end = start, end

    def x(self, at):
        return self.left + (self.right - self.left) * (at - self.start) / (self.end - self.start)

    def y(self, share):
        return self.bottom - (self.bottom - self.top) * share

    def axes(self, marks):
        """Grid lines and labels at (fraction, label), and the time since the beginning."""
        parts = []
        for share, words in marks:
            parts.append(f'<path d="M{self.left} {self.y(share):.1f}H{self.right}" stroke="{LINE}"/>')
            parts.append(text(self.left - 6, self.y(share) + 4, words, 10, FAINT, text_anchor="end"))
        span = self.end - self.start
        step = next(step for step in (5, 10, 20, 30, 60, 120, 300, 600, 3600) if span / step <= 5 or step == 3600)
        for second in range(0, int(span) + 1, step):
            parts.append(text(self.x(self.start + second), self.bottom + 14, f"{second // 60}:{second % 60:02d}", 10, FAINT,
                              text_anchor="middle"))
        return parts


def _legend_lines(names, width):
    """Names distributed over as few lines as possible."""
    lines, used = [[]], 0
    for place, name in enumerate(names):
        wide = 6.6 * len(name) + 30
        if used + wide > width and lines[-1]:
            lines.append([])
            used = 0
        lines[-1].append((place, used, name))
        used += wide
    return lines


def _series(panel, place, answers, start, end, switches):
    unit, by_backend = panel["fieldConfig"]["defaults"]["unit"], bool(panel["fieldConfig"]["overrides"])
    custom = panel["fieldConfig"]["defaults"]["custom"]
    stacked, logarithmic = "stacking" in custom, "scaleDistribution" in custom
    lines = [(name, points) for _, named in answers for name, points in named]
    legend = _legend_lines([name for name, _ in lines], place["w"] - 24)
    shown = legend[:4]
    frame = Frame(place, start, end, len(shown))
    if stacked:
        floor = {}
        for place_, (name, points) in enumerate(lines):
            raised = [(at, value + floor.get(at, 0.0)) for at, value in points]
            lines[place_] = (name, raised)
            floor.update(raised)
    values = [value for _, points in lines for _, value in points]
    if logarithmic and any(value > 0 for value in values):
        low, high = math.floor(math.log10(min(value for value in values if value > 0))), math.ceil(math.log10(max(values)))
        high = max(high, low + 1)
        marks = [((power - low) / (high - low), told(10.0 ** power, unit)) for power in range(low, high + 1)]

        def share_of(value):
            return max((math.log10(value) - low) / (high - low), 0) if value > 0 else 0
    else:
        most = min(_ceiling(max(values, default=0.0), unit), panel["fieldConfig"]["defaults"].get("max", math.inf))
        marks = [(share, told(most * share, unit)) for share in (0, 0.25, 0.5, 0.75, 1)]

        def share_of(value):
            return min(value / most, 1)
    parts = frame.axes(marks)
    for at in switches:
        parts.append(f'<path d="M{frame.x(at):.1f} {frame.top}V{frame.bottom}" stroke="{SWITCH}" stroke-dasharray="4 3"/>')
    for index, (name, points) in reversed(list(enumerate(lines))):
        colour = _colour(name, index, by_backend)
        path, before = "", None
        step = min((after - at for (at, _), (after, _) in itertools.pairwise(points)), default=1)
        runs = []
        for at, value in points:
            # A gap in time is a gap in the line.
            if before is None or at - before > 1.5 * step:
                runs.append([])
            runs[-1].append((frame.x(at), frame.y(share_of(value))))
            before = at
        for run in runs:
            if len(run) == 1:
                parts.append(f'<circle cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="1.5" fill="{colour}"/>')
            path += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
            if stacked and len(run) > 1:
                area = "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
                parts.append(f'<path d="M{run[0][0]:.1f} {frame.bottom}L{area}L{run[-1][0]:.1f} {frame.bottom}Z" '
                             f'fill="{colour}" fill-opacity="0.35"/>')
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.4" stroke-linejoin="round"/>')
    for number, line in enumerate(shown):
        y = place["y"] + place["h"] - 8 - 15 * (len(shown) - 1 - number)
        for index, offset, name in line:
            x = place["x"] + 12 + offset
            parts.append(rectangle(x, y - 6, 12, 3, _colour(name, index, by_backend), 1))
            parts.append(text(x + 16, y, name, 10.5))
    hidden = sum(len(line) for line in legend[4:])
    if hidden:
        parts.append(text(place["x"] + place["w"] - 12, place["y"] + 18, f"and {hidden} more lines", 10, FAINT, text_anchor="end"))
    return parts


def _heatmap(panel, place, answers, start, end):
    unit = panel["options"]["yAxis"]["unit"]
    columns = {float(labels["le"]): dict(points) for labels, points in answers[0][0]}
    bounds = sorted(columns)
    finite = [bound for bound in bounds if math.isfinite(bound)]
    # Buckets are cumulative: the count of one is the difference to the one below.
    cells = {}
    for below, bound in zip([None, *bounds], bounds, strict=False):
        for at, value in columns[bound].items():
            count = value - (columns[below].get(at, 0.0) if below is not None else 0.0)
            if count > 0.5 and math.isfinite(bound):
                cells[at, bound] = count
    if not cells:
        return [text(place["x"] + 12, place["y"] + 60, "no reads", 11, FAINT)]
    rows = finite[max(finite.index(min(b for _, b in cells)) - 1, 0):finite.index(max(b for _, b in cells)) + 1]
    frame = Frame(place, start, end, 0)
    height = 1 / len(rows)
    marks = [(height * (index + 1), told(bound, unit)) for index, bound in enumerate(rows) if len(rows) < 12 or index % 2]
    parts = frame.axes([(0, ""), *marks])
    times = sorted({at for at, _ in cells})
    step = min((after - at for at, after in itertools.pairwise(times)), default=1)
    width = frame.x(start + step) - frame.x(start)
    most = max(cells.values())
    shades = {}
    for (at, bound), count in sorted(cells.items()):
        shade = min(int((count / most) ** 0.5 * len(HEAT)), len(HEAT) - 1)
        top = frame.y(height * (rows.index(bound) + 1))
        tall = frame.y(height * rows.index(bound)) - top
        left = max(frame.x(at) - width, frame.left)
        shades.setdefault(shade, []).append(f"M{left:.1f} {top:.1f}h{width - 0.5:.1f}v{tall - 0.5:.1f}h{0.5 - width:.1f}z")
    parts += [f'<path d="{"".join(paths)}" fill="{HEAT[shade]}"/>' for shade, paths in sorted(shades.items())]
    return parts


def _stat(panel, place, answers):
    _, named = answers[0]
    value = named[0][1][-1][1] if named else math.nan
    defaults = panel["fieldConfig"]["defaults"]
    steps = defaults["thresholds"]["steps"]
    reached = [step for step in steps if step["value"] is None or value >= step["value"]]
    colour = {"green": "#15803d", "red": "#dc2626"}.get(reached[-1]["color"], INK)
    words = told(value, defaults["unit"]) if math.isfinite(value) else "No data"
    middle = place["x"] + place["w"] / 2
    return [text(middle, place["y"] + place["h"] * 0.68, words, 22, colour, text_anchor="middle", font_weight="600")]


def _table(panel, place, answers):
    organize = panel["transformations"][-1]["options"]
    columns = [name for name in organize["renameByName"]]
    rows = {}
    for number, (answer, _) in enumerate(answers):
        for labels, points in answer:
            key = (labels.get("instance"), labels.get("dataset"), labels.get("backend"))
            row = rows.setdefault(key, {})
            row.update(labels)
            row[f"Value #{chr(ord('A') + number)}"] = points[-1][1]
    units = {override["matcher"]["options"]: override["properties"][0]["value"]
             for override in panel["fieldConfig"]["overrides"]}
    weights = [3 if name == "reason" else 1 for name in columns]
    parts, x, top = [], place["x"] + 12, place["y"] + 46
    for name, weight in zip(columns, weights, strict=True):
        title = organize["renameByName"][name]
        parts.append(text(x, top, title, 11, FAINT, font_weight="600"))
        for index, (_, row) in enumerate(sorted(rows.items())):
            value = row.get(name, "")
            words = told(value, units.get(title, "none")) if isinstance(value, float) else value
            parts.append(text(x, top + 22 * (index + 1), words, 11))
        x += (place["w"] - 24) * weight / sum(weights)
    for index in range(len(rows)):
        y = top + 7 + 22 * index
        parts.append(f'<path d="M{place["x"] + 12} {y}H{place["x"] + place["w"] - 12}" stroke="{LINE}"/>')
    return parts


def draw(dashboard, answers, start, end, values, switches, note):
    """`answers`: for each panel id a list with (series, named lines) per target. `switches`: the annotations' times."""
    head = 58
    height = head + max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) * ROW + 2 * GAP
    width = 24 * COLUMN + 2 * GAP
    parts = [text(12, 26, dashboard["title"], 18, font_weight="600"), text(12, 46, note, 12, FAINT)]
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        place = {"x": grid["x"] * COLUMN + GAP * 2, "y": head + grid["y"] * ROW + GAP,
                 "w": grid["w"] * COLUMN - GAP * 2, "h": grid["h"] * ROW - GAP * 2}
        parts.append(rectangle(place["x"], place["y"], place["w"], place["h"], CARD, 4))
        title = re.sub(r"\$(\w+)", lambda match: values[match.group(1)], panel["title"])
        size = 11 if panel["type"] == "stat" else 12.5
        parts.append(text(place["x"] + 12, place["y"] + 19, title, size, font_weight="600"))
        mine = answers[panel["id"]]
        if panel["type"] == "timeseries":
            parts += _series(panel, place, mine, start, end, switches)
        elif panel["type"] == "heatmap":
            parts += _heatmap(panel, place, mine, start, end)
        elif panel["type"] == "stat":
            parts += _stat(panel, place, mine)
        else:
            parts += _table(panel, place, mine)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" role="img">',
        f"<title>{html.escape(dashboard['title'])}</title>", f'<rect width="100%" height="100%" fill="{PAGE}"/>', *parts,
        "</svg>"]) + "\n"
