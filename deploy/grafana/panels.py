"""The building blocks of the dashboards: panels, variables and links as Grafana's JSON, written once. What equals Grafana's
default is left out: it merges its defaults into each panel's options.

Only `pick` writes selectors, so that every series is selected by job and instance. Each backend has its own colour, so that
it looks the same on every panel.
"""

SCHEMA_VERSION = 41  # Grafana 12.0 and 12.1
HERE = 'job=~"$job", instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLOURS = {"uring": "blue", "mmap": "orange", "auto": "green", "pread": "purple"}


def pick(metric, *conditions):
    """A selector: the variables of every dashboard, plus conditions."""
    return f'{metric}{{{", ".join([HERE, *conditions])}}}'


def rate(metric, *conditions):
    return f"rate({pick(metric, *conditions)}[$__rate_interval])"


# Without events a quantile is NaN, and a quotient NaN or infinite. Both are dropped: the line then ends, no legend says NaN, and
# no mean over time is infinite.

def quantile(share, by, metric, *conditions):
    grouped = ", ".join(filter(None, (by, "le")))
    return f"histogram_quantile({share}, sum by ({grouped}) ({rate(metric + '_bucket', *conditions)})) >= 0"


def quotient(above, below, by=""):
    grouped = f" by ({by})" if by else ""
    return divided(f"sum{grouped} ({above})", f"sum{grouped} ({below})")


def divided(above, below):
    return f"{above} / ({below} > 0)"


def mean(by, metric, *conditions):
    """The mean of a histogram."""
    return quotient(rate(metric + "_sum", *conditions), rate(metric + "_count", *conditions), by)


def or_none(expression, label):
    """`expression`, or, if it has no series, a series with 0 and the label "none": a panel that is empty when all is well
    would show "No data", as it also does when nothing is measured."""
    return f'{expression} or on () label_replace(vector(0), "{label}", "none", "", "")'


def target(expression, legend="", **others):
    return {"expr": expression, "legendFormat": legend, **others}


def _panel(kind, title, description, unit, size, targets, options, **defaults):
    width, height = size
    queries = [{"refId": chr(ord("A") + place), "datasource": DATASOURCE, **query}
               for place, query in enumerate(targets)]
    return {
        "type": kind, "title": title, "description": description, "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": []},
        "targets": queries, "options": options,
    }


def series(title, description, unit, size, *targets, stacked=False, by_backend=False, logarithmic=False, **defaults):
    """Values over time, from 0 on or logarithmic."""
    custom = {"fillOpacity": 40 if stacked else 8, "showPoints": "never",
              **({"scaleDistribution": {"type": "log", "log": 10}} if logarithmic else {}),
              **({"stacking": {"mode": "normal"}} if stacked else {})}
    options = {"tooltip": {"mode": "multi", "sort": "desc"}}
    ranged = [{**query, "range": True} for query in targets]
    panel = _panel("timeseries", title, description, unit, size, ranged, options, custom=custom,
                   **({} if logarithmic else {"min": 0}), **defaults)
    if by_backend:
        panel["fieldConfig"]["overrides"] = [
            {"matcher": {"id": "byRegexp", "options": f"/\\b{backend}\\b/"},
             "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}]}
            for backend, colour in COLOURS.items()]
    return panel


def stat(title, description, unit, size, expression, legend="", bad_from=None, **defaults):
    """One number. Green, and red from `bad_from` on."""
    steps = [{"color": "green" if bad_from is not None else "text", "value": None}]
    if bad_from is not None:
        steps.append({"color": "red", "value": bad_from})
    query = {**target(expression, legend), "instant": True}
    return _panel("stat", title, description, unit, size, [query], {"graphMode": "none", "textMode": "value"},
                  color={"mode": "thresholds"},
                  thresholds={"mode": "absolute", "steps": steps}, **defaults)


def table(title, description, size, *targets, columns, hidden=(), units=()):
    """Rows of the series' labels. `columns`: their names and order."""
    queries = [{**query, "instant": True, "format": "table"} for query in targets]
    panel = _panel("table", title, description, "none", size, queries, {})
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {
            "excludeByName": {name: True for name in ("Time", "__name__", *hidden)},
            "indexByName": {name: place for place, name in enumerate(columns)},
            "renameByName": dict(columns), "includeByName": {}}},
    ]
    panel["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": column}, "properties": [{"id": "unit", "value": unit}]}
        for column, unit in dict(units).items()]
    return panel


def heatmap(title, description, unit, size, expression):
    """The distribution of values over time: a histogram's buckets."""
    query = {**target(expression, "{{le}}"), "format": "heatmap", "range": True}
    options = {"showValue": "never", "cellValues": {"unit": "short"}, "yAxis": {"unit": unit}}
    return _panel("heatmap", title, description, unit, size, [query], options)


def variable(name, label, metric, conditions="", default=None):
    """A variable with the values of a label. Without a default it selects all of them."""
    query = f"label_values({metric}{{{conditions}}}, {name if default is None else 'backend'})"
    everything = default is None
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE,
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "multi": everything, "includeAll": everything,
        # Job and instance: the known values, since every program has `up` and `process_*`.
        **({"allValue": ".+"} if everything and name not in ("job", "instance") else {}),
        "current": {"text": "All", "value": "$__all"} if everything else {"text": default, "value": default},
    }


# The second one is of the rules, and has daemons that have been down for long, too.
KNOWN = '__name__=~"ringfetch_build_info|ringfetch:daemons:seen"'
JOB = variable("job", "Job", "", KNOWN)
INSTANCE = variable("instance", "Instance", "", f'{KNOWN}, job=~"$job"')
DATASET = variable("dataset", "Dataset", "ringfetch_reads_total", HERE)
BACKEND = variable("backend", "Backend", "ringfetch_read_duration_seconds_count", HERE)

PRINCIPAL = variable("principal", "Principal", "ringfetch_principal_requests_total", HERE)


def side(name, label, default):
    """A variable for one backend of a comparison."""
    return variable(name, label, "ringfetch_read_duration_seconds_count", HERE, default)


def _placed(rows):
    """Panels with their ids and positions: rows from top to bottom, each from left to right."""
    top, panels = 0, []
    for row in rows:
        left = 0
        for panel in row:
            panel = {"id": len(panels) + 1, **panel}
            panel["gridPos"] = {"x": left, "y": top, **panel["gridPos"]}
            left += panel["gridPos"]["w"]
            panels.append(panel)
        top += max(panel["gridPos"]["h"] for panel in row)
    return panels


def dashboard(name, title, description, variables, rows, others):
    """A whole dashboard. `others`: names and titles of the dashboards it links to."""
    switched = pick("ringfetch_backend_info")
    return {
        "uid": f"ringfetch-{name}", "title": title, "description": description, "tags": ["ringfetch"],
        "schemaVersion": SCHEMA_VERSION, "version": 1, "editable": False, "graphTooltip": 1, "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"}, "timezone": "browser",
        "links": [
            {"type": "link", "title": other_title, "url": f"/d/ringfetch-{other}", "icon": "dashboard", "tooltip": "",
             "tags": [], "includeVars": True, "keepTime": True}
            for other, other_title in others],
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1,
             # The one provisioned here; elsewhere Grafana uses its default.
             "current": {"text": "Prometheus", "value": "prometheus"}},
            *variables]},
        "annotations": {"list": [{
            "name": "Backend switched, or daemon started", "datasource": DATASOURCE, "enable": True,
            "iconColor": "purple",
            # In the first minute of a backend its series exists, and did not a minute before.
            "target": {"refId": "Anno", "expr": f"{switched} unless {switched} offset 1m", "interval": ""},
            "titleFormat": "{{instance}}: {{backend}}", "textFormat": "{{reason}}", "tagKeys": "backend",
            "useValueForTime": False}]},
        "panels": _placed(rows),
    }
