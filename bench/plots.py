"""SVG plots, written by hand to avoid dependencies: one per row, and an overview of all targets."""

import html
import math

from verdict import UNITS, score

OURS, THEIRS, MISSED, INK, FAINT = "#2563eb", "#9ca3af", "#dc2626", "#111827", "#e5e7eb"


def svg(width, height, title, parts):
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}" role="img">',
        f"<title>{html.escape(title)}</title>", '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def text(x, y, words, **attributes):
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y:.0f}"{extra}>{html.escape(str(words))}</text>'


def rectangle(x, y, width, height, colour):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height}" fill="{colour}"/>'


def short(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def row_plot(result):
    """Medians as bars, every run as a dot, both sides, for each figure that both have."""
    told = {"reads_per_second", "cpu_us", "p50_us", "p99_us", *(target.figure for target in result.row.targets)}
    figures = [figure for figure in UNITS if figure in told and not math.isnan(result.median("subject", figure))]
    sides = [("subject", "ringfetch", OURS)] + ([("peer", result.row.against, THEIRS)] if result.peer else [])
    left, span, top = 190, 430, 58
    parts = [text(12, 24, f"{result.name}: {result.row.title}", font_weight="bold"),
             text(12, 42, f"{result.row.temperature.name}; {result.verdict()}", font_size=12, fill="#6b7280")]
    for figure in figures:
        shown = [(side, [run[figure] for run in getattr(result, side) if run.get(figure) is not None], name, colour)
                 for side, name, colour in sides]
        shown = [entry for entry in shown if entry[1]]
        most = max(max(values) for _, values, _, _ in shown) or 1
        parts.append(text(12, top + 12, UNITS[figure], font_weight="bold"))
        top += 20
        for side, values, name, colour in shown:
            median = result.median(side, figure)
            parts.append(text(left - 8, top + 14, name, text_anchor="end", font_size=11))
            parts.append(rectangle(left, top, span * median / most, 18, colour))
            parts += [f'<circle cx="{left + span * value / most:.1f}" cy="{top + 9}" r="2.5" fill="none" stroke="{INK}"/>'
                      for value in values]
            parts.append(text(left + span + 12, top + 14, short(median)))
            top += 23
        top += 12
    return svg(720, top, result.row.title, parts)


def overview(results):
    """Every target on one axis: how far beyond it (right) or short of it (left) the median is, with a thin line from the
    worst pair to the best. Logarithmic."""
    lines = [(result, judgement) for result in results for judgement in result.judgements()]
    left, right, most = 430, 800, 4.0
    middle = (left + right) / 2

    def place(score):
        return middle + (right - left) / 2 * math.log(min(max(score, 1 / most), most)) / math.log(most)

    height = 70 + 24 * max(len(lines), 1)
    parts = [text(12, 24, "Every target: short of it (left) or beyond it (right)", font_weight="bold")]
    for mark in (0.25, 0.5, 0.75, 1, 1.33, 2, 4):
        x = place(mark)
        parts.append(f'<line x1="{x:.1f}" y1="44" x2="{x:.1f}" y2="{height - 12}" stroke="{INK if mark == 1 else FAINT}"/>')
        parts.append(text(x, 40, "target" if mark == 1 else f"{mark:g}x", text_anchor="middle", font_size=11))
    for index, (result, judgement) in enumerate(lines):
        y = 52 + 24 * index
        x, colour = place(judgement["score"]), OURS if judgement["met"] else MISSED
        sign = "x" if judgement["is"] == "ratio" else ""
        parts.append(text(12, y + 13, f"{result.name}: {UNITS.get(judgement['figure'], judgement['figure'])}"))
        parts.append(text(left - 10, y + 13, f"{judgement['measured']:.2f}{sign} {judgement['relation']} {judgement['bound']:g}{sign}",
                          text_anchor="end", font_size=12, fill="#6b7280"))
        parts.append(rectangle(min(x, middle), y + 2, abs(x - middle), 14, colour))
        if judgement["is"] == "ratio":
            ends = [place(score(judgement, judgement[end])) for end in ("lowest", "highest")]
            parts.append(f'<line x1="{ends[0]:.1f}" y1="{y + 9}" x2="{ends[1]:.1f}" y2="{y + 9}" stroke="{INK}"/>')
    return svg(830, height, "Ringfetch against its targets", parts)
