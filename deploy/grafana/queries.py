"""Grafana's processing of a dashboard's queries before it sends them: replaces variables and intervals with values."""

import re

LABEL_VALUES = re.compile(r"label_values\((?P<selector>.*), *(?P<label>\w+)\)$", re.DOTALL)


def resolved(text, values):
    """`text` with its variables replaced; an unknown one is an error."""
    def value(match):
        name = match.group(1) or match.group(2)
        if name not in values:
            raise KeyError(f"${name} is no variable of this dashboard: {text}")
        return values[name]
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def intervals(scrape_s, range_s, step_s):
    """The built-in variables, as Grafana computes them for a data source whose scrape interval it knows."""
    rate_s = max(step_s + scrape_s, 4 * scrape_s)
    return {"__interval": f"{step_s}s", "__range": f"{range_s}s", "__rate_interval": f"{rate_s}s"}


def variable_values(prometheus, variable, values):
    """The values of a query variable, from the endpoint that Grafana uses."""
    match = LABEL_VALUES.match(resolved(variable["query"]["query"], values))
    return prometheus.api(f"label/{match['label']}/values", **{"match[]": match["selector"]})


def targets(dashboard):
    """(panel, target) of every query of every panel."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel, target
