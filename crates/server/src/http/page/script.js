// Polls v1/status once a second and draws it. Rates and percentiles are of the time between two answers: counters and
// cumulative histograms come in, differences go out. Nothing is kept but the points of two minutes. While nobody looks
// (hidden or paused) nothing is asked; while the daemon is gone it is asked ever less often.
"use strict";
(() => {
  const INTERVAL_MS = 1000;
  const TIMEOUT_MS = 5000;
  const WINDOW_MS = 120_000;
  // Between two points further apart than this nothing is known: the line breaks there.
  const GAP_MS = 3500;
  const RETRY_MS = [1000, 2000, 4000, 8000, 15_000];
  // Screen readers hear the figures this often, and changes of state at once.
  const ANNOUNCE_MS = 30_000;
  const US_MAX = 1e7;
  // For those who asked for less motion the charts move on only every so many answers; the numbers go on.
  const CALM_STEPS = 5;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");

  const byId = (id) => document.getElementById(id);

  // --- Numbers as text ---

  const decimals = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);
  const scaled = (value, base, units) => {
    let unit = 0;
    // 999.6 would be written as 1000 of the smaller unit.
    while (unit < units.length - 1 && value >= base - base / 2000) {
      value /= base;
      unit += 1;
    }
    const digits = unit === 0 && Number.isInteger(value) ? 0 : decimals(value);
    return `${value.toFixed(digits)}${units[unit]}`;
  };
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const SPACE = "\u00a0";
  const amount = (value) =>
    value < 10_000 ? (value > 0 && value < 10 && !Number.isInteger(value) ? value.toFixed(1) : whole.format(value))
      : scaled(value, 1000, ["", `${SPACE}k`, `${SPACE}M`, `${SPACE}G`]);
  const bytes = (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"].map((unit) => unit.replace(" ", SPACE)));
  const duration = (us) =>
    us > US_MAX ? `over${SPACE}10${SPACE}s` : scaled(us, 1000, [`${SPACE}µs`, `${SPACE}ms`, `${SPACE}s`]);
  // Ticks are round: 10 ms, not 10.0 ms.
  const round = (text) => (value) => text(value).replace(/\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)/, "$1");
  const aSecond = (value) => `${amount(value)}/s`;
  const bytesASecond = (value) => `${bytes(value)}/s`;
  // For ears: units in words, no symbols.
  const spokenDuration = (us) =>
    duration(us).replace("µs", "microseconds").replace("ms", "milliseconds").replace(/\bs$/, "seconds");
  const span = (ms) => {
    const seconds = Math.floor(ms / 1000);
    const parts = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]]
      .map(([size, unit], i, all) => [Math.floor((i ? seconds % all[i - 1][0] : seconds) / size), unit]);
    const first = parts.findIndex(([value]) => value > 0);
    return (first < 0 ? [[0, "s"]] : parts.slice(first, first + 2)).map((part) => part.join(SPACE)).join(" ");
  };
  const clock = (date) => date.toLocaleTimeString("en-GB");
  const orDash = (text, value) => (value === null || value === undefined ? "\u2013" : text(value));

  // --- From two answers to a point ---

  // The same interpolation as Prometheus' histogram_quantile, so that dashboards agree. null: nothing was read.
  const quantile = (before, after, q) => {
    const counts = after.map((bucket, i) => bucket.count - (before[i]?.count ?? 0));
    const total = counts.at(-1) ?? 0;
    if (total <= 0) return null;
    const rank = q * total;
    const index = counts.findIndex((count) => count >= rank);
    const upper = after[index].le_us;
    if (upper === undefined) return Infinity;
    const lower = index ? after[index - 1].le_us : 0;
    const below = index ? counts[index - 1] : 0;
    const within = counts[index] - below;
    return within > 0 ? lower + (upper - lower) * ((rank - below) / within) : upper;
  };

  const mean = (before, after) => {
    const count = after.count - before.count;
    return count > 0 ? (after.sum - before.sum) / count : null;
  };

  const keyed = (list, key) => new Map(list.map((one) => [one[key], one]));
  const total = (list, of) => list.reduce((sum, one) => sum + of(one), 0);

  const isRestart = (before, after) =>
    before.started_unix_ms !== after.started_unix_ms || after.uptime_ms < before.uptime_ms;

  // null: too close together, or not of one process.
  const between = (before, after, time) => {
    const seconds = (after.uptime_ms - before.uptime_ms) / 1000;
    if (isRestart(before, after) || seconds <= 0) return null;
    const rate = (of) => (now, then) => Math.max(0, of(now) - of(then ?? now)) / seconds;
    const totals = (name) => rate((status) => status.totals[name])(after, before);
    const oldShards = keyed(before.shards, "shard");
    const oldDatasets = keyed(before.datasets, "name");
    const seen = (status) => ({
      sum: total(status.shards, (shard) => shard.depth_seen.sum),
      count: total(status.shards, (shard) => shard.depth_seen.count),
    });
    const percentile = (q) => quantile(before.read_duration.buckets, after.read_duration.buckets, q);
    return {
      time,
      reads: totals("reads_total"),
      bytes: totals("read_bytes_total"),
      errors: totals("read_errors_total"),
      rejected: totals("rejected_total"),
      depth: mean(seen(before), seen(after)),
      inFlight: total(after.shards, (shard) => shard.in_flight),
      queued: total(after.shards, (shard) => shard.queued),
      memory: after.memory.in_use_bytes,
      p50: percentile(0.5),
      p99: percentile(0.99),
      p999: percentile(0.999),
      shards: new Map(after.shards.map((shard) => {
        const old = oldShards.get(shard.shard);
        return [shard.shard, {
          depth: old ? mean(old.depth_seen, shard.depth_seen) : null,
          deviceReads: rate((one) => one.device_reads_total)(shard, old),
          submissions: rate((one) => one.submissions_total)(shard, old),
        }];
      })),
      datasets: new Map(after.datasets.map((dataset) => {
        const old = oldDatasets.get(dataset.name);
        return [dataset.name, {
          reads: rate((one) => one.reads_total)(dataset, old),
          bytes: rate((one) => one.read_bytes_total)(dataset, old),
        }];
      })),
    };
  };

  // --- Writing to the document, only where something changed ---

  const write = (node, text) => {
    if (node.textContent !== text) node.textContent = text;
  };
  const attribute = (node, name, value) => {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  };
  const element = (name, attributes = {}, children = []) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const svg = (name, attributes = {}) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };

  // Where a line breaks: values that are not there, and gaps in time.
  const segments = (points, of) => {
    const found = [];
    let open = null;
    let last = null;
    for (const point of points) {
      const value = of(point);
      if (value === null || value === undefined) {
        open = null;
        continue;
      }
      if (!open || point.time - last > GAP_MS) found.push((open = []));
      open.push([point.time, value]);
      last = point.time;
    }
    return found;
  };
  const path = (parts, x, y) =>
    parts.map((part) => {
      const places = part.map(([time, value]) => `${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
      // A lone point is drawn as a dot: a line of no length with round ends.
      return `M${(places.length > 1 ? places : [places[0], places[0]]).join("L")}`;
    }).join("");

  // --- Charts ---

  const roundUp = (value) => {
    const decade = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 2.5, 5, 10].map((step) => step * decade).find((step) => step >= value * 0.999);
  };

  // Scales answer {low, high, ticks, place}: `place` is 0 at the bottom and 1 at the top.
  const fromZero = (text) => (values) => {
    const high = roundUp(Math.max(1, ...values));
    return { key: high, ticks: [0, 0.25, 0.5, 0.75, 1].map((part) => [part * high, round(text)(part * high)]), place: (value) => value / high };
  };
  const logarithmic = (low, high, ticks) => {
    const range = Math.log(high) - Math.log(low);
    const place = (value) => Math.min(1, Math.max(0, (Math.log(Math.max(value, low)) - Math.log(low)) / range));
    return { key: `${low} ${high} ${ticks.length}`, ticks, place };
  };
  const decades = (values) => {
    const finite = values.map((value) => Math.min(Math.max(value, 1), US_MAX));
    let low = finite.length ? Math.floor(Math.log10(Math.min(...finite))) : 1;
    let high = finite.length ? Math.ceil(Math.log10(Math.max(...finite))) : 4;
    // At least two decades, so that noise looks like noise.
    while (high - low < 2) if (high < 7) high += 1; else low -= 1;
    const ticks = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i)).map((us) => [us, round(duration)(us)]);
    return logarithmic(10 ** low, 10 ** high, ticks);
  };
  const powers = (values, limit) => {
    const high = Math.max(2, limit ?? 2, ...values);
    const most = Math.floor(Math.log2(high));
    const step = Math.max(1, Math.ceil(most / 4));
    const ticks = [];
    for (let power = 0; power <= most; power += step) ticks.push([2 ** power, amount(2 ** power)]);
    // The limit has its own label; a power too close to it would be written over.
    const free = ticks.filter(([value]) => value * 1.6 < high);
    return logarithmic(1, high, [...free, [high, amount(high)]]);
  };

  const MARGIN = { left: 52, right: 10, top: 8, bottom: 20 };

  class Chart {
    constructor(id, { lines, scale, area }) {
      this.svg = document.querySelector(`#${id} svg`);
      this.lines = lines;
      this.scale = scale;
      this.grid = this.svg.appendChild(svg("g"));
      this.area = area ? this.svg.appendChild(svg("path", { class: "area" })) : null;
      this.limit = this.svg.appendChild(svg("path", { class: "curve curve-limit" }));
      this.curves = lines.map(({ style }) => this.svg.appendChild(svg("path", { class: `curve curve-${style}` })));
      this.drawn = "";
      this.latest = [];
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    show(points, limit) {
      this.latest = points;
      this.limitValue = limit;
      this.draw();
    }

    draw() {
      const width = this.svg.clientWidth;
      const height = this.svg.clientHeight;
      if (!width || !height) return;
      const points = this.latest;
      const now = points.at(-1)?.time ?? 0;
      const values = points.flatMap((point) => this.lines.map(({ of }) => of(point))).filter((value) => value !== null);
      const scale = this.scale(values, this.limitValue);
      const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
      const x = (time) => MARGIN.left + inner.width * (1 - (now - time) / WINDOW_MS);
      const y = (value) => MARGIN.top + inner.height * (1 - scale.place(value));
      this.frame(width, height, scale, x, y, now);
      const parts = this.lines.map(({ of }) => segments(points, of));
      this.curves.forEach((curve, i) => attribute(curve, "d", path(parts[i], x, y)));
      const bottom = MARGIN.top + inner.height;
      if (this.area) {
        const closed = parts[0].map((part) =>
          `${path([part], x, y)}L${x(part.at(-1)[0]).toFixed(1)} ${bottom}L${x(part[0][0]).toFixed(1)} ${bottom}Z`);
        attribute(this.area, "d", closed.join(""));
      }
      const at = this.limitValue ? y(this.limitValue).toFixed(1) : null;
      attribute(this.limit, "d", at ? `M${MARGIN.left} ${at}H${width - MARGIN.right}` : "");
    }

    // Grid and labels, made anew only when the scale or the size changes.
    frame(width, height, scale, x, y, now) {
      const key = `${width} ${height} ${scale.key}`;
      if (key === this.drawn) return;
      this.drawn = key;
      attribute(this.svg, "viewBox", `0 0 ${width} ${height}`);
      const label = (text, at) => {
        const node = svg("text", at);
        node.textContent = text;
        return node;
      };
      const across = scale.ticks.flatMap(([value, text]) => [
        svg("path", { class: "grid", d: `M${MARGIN.left} ${y(value).toFixed(1)}H${width - MARGIN.right}` }),
        label(text, { x: MARGIN.left - 6, y: (y(value) + 3.5).toFixed(1), "text-anchor": "end" }),
      ]);
      const down = [["2 min ago", WINDOW_MS, "start"], ["1 min", WINDOW_MS / 2, "middle"], ["now", 0, "end"]]
        .map(([text, ago, anchor]) => label(text, { x: x(now - ago).toFixed(1), y: height - 5, "text-anchor": anchor }));
      this.grid.replaceChildren(...across, ...down);
    }
  }

  const charts = {
    reads: new Chart("chart-reads", { scale: fromZero(amount), area: true, lines: [{ style: "a", of: (point) => point.reads }] }),
    depth: new Chart("chart-depth", { scale: powers, lines: [{ style: "a", of: (point) => point.depth }] }),
    latency: new Chart("chart-latency", {
      scale: decades,
      lines: [
        { style: "a", of: (point) => point.p50 },
        { style: "b", of: (point) => point.p99 },
        { style: "c", of: (point) => point.p999 },
      ],
    }),
  };

  // --- Tables ---

  const FIGURES = [
    ["IOPS", (point) => point.reads, aSecond],
    ["Throughput", (point) => point.bytes, bytesASecond],
    ["Latency p50", (point) => point.p50, duration],
    ["Latency p99", (point) => point.p99, duration],
    ["Latency p99.9", (point) => point.p999, duration],
    ["Mean depth a shard", (point) => point.depth, amount],
    ["Reads in flight", (point) => point.inFlight, amount],
    ["Reads queued", (point) => point.queued, amount],
    ["Reads that failed", (point) => point.errors, aSecond],
    ["Requests refused", (point) => point.rejected, aSecond],
    ["Answer memory in use", (point) => point.memory, bytes],
  ];

  // A table whose rows are made once for a set of keys and then only rewritten. A column is [class, make, fill].
  class Table {
    constructor(id, columns) {
      this.body = document.querySelector(`#${id} tbody`);
      this.names = [...document.querySelectorAll(`#${id} thead th`)].map((head) => head.textContent);
      this.columns = columns;
      this.key = null;
      this.rows = [];
    }

    // `entries`: [key, value]s; `values` is what the columns are filled from.
    fill(entries) {
      const key = JSON.stringify(entries.map(([name]) => name));
      if (key !== this.key) {
        this.key = key;
        this.rows = entries.map(([name]) => this.make(String(name)));
        this.body.replaceChildren(...this.rows.map((row) => row.node));
      }
      entries.forEach(([, value], i) => this.columns.forEach(({ fill }, c) => fill(this.rows[i].cells[c], value)));
    }

    make(name) {
      const head = element("th", { scope: "row", role: "rowheader" }, [name]);
      const cells = this.columns.map(({ style = "", parts = () => [] }, c) =>
        element("td", { role: "cell", class: style, "data-column": this.names[c + 1] }, parts()));
      return { cells, node: element("tr", { role: "row" }, [head, ...cells]) };
    }
  }

  const number = (text) => ({ style: "number", fill: (cell, value) => write(cell, text(value)) });

  const figures = new Table("figures", [
    number(({ text, now }) => orDash(text, now)),
    number(({ text, low }) => orDash(text, low)),
    number(({ text, high }) => orDash(text, high)),
  ]);

  const bar = () => {
    const drawing = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    drawing.append(svg("rect", { class: "track", width: 100, height: 10, rx: 2 }), svg("rect", { class: "level", width: 0, height: 10, rx: 2 }));
    return [element("div", { class: "bar" }, [drawing, element("span")])];
  };
  const SPARK = { width: 120, height: 22 };
  const spark = () => {
    const drawing = svg("svg", { viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    drawing.append(svg("path", { class: "grid", d: `M0 ${SPARK.height - 1}H${SPARK.width}M0 1H${SPARK.width}`, "vector-effect": "non-scaling-stroke" }));
    drawing.append(svg("path", { class: "curve curve-a", "vector-effect": "non-scaling-stroke" }));
    return [element("div", { class: "bar spark" }, [drawing, element("span")])];
  };

  const shards = new Table("shards", [
    {
      parts: bar,
      fill: (cell, { shard }) => {
        const share = shard.queue_depth ? Math.min(1, shard.in_flight / shard.queue_depth) : 0;
        attribute(cell.querySelector(".level"), "width", (share * 100).toFixed(1));
        write(cell.querySelector("span"), `${whole.format(shard.in_flight)} of ${whole.format(shard.queue_depth)}`);
      },
    },
    {
      parts: spark,
      fill: (cell, { shard, rates, history, now }) => {
        const scale = powers([], shard.queue_depth);
        const x = (time) => SPARK.width * (1 - (now - time) / WINDOW_MS);
        const y = (value) => 2 + (SPARK.height - 4) * (1 - scale.place(value));
        attribute(cell.querySelector(".curve"), "d", path(segments(history, (point) => point.shards.get(shard.shard)?.depth), x, y));
        write(cell.querySelector("span"), orDash(amount, rates?.depth));
      },
    },
    number(({ shard }) => amount(shard.queued)),
    number(({ rates }) => orDash(aSecond, rates?.deviceReads)),
    number(({ rates }) => orDash(aSecond, rates?.submissions)),
  ]);

  const sized = (dataset) => {
    if (dataset.kind === "objects") return "objects";
    return `${amount(dataset.count)} ${dataset.kind}, ${bytes(dataset.length_bytes)}`;
  };
  const datasets = new Table("datasets", [
    { fill: (cell, { dataset }) => write(cell, sized(dataset)) },
    {
      style: "wide",
      parts: () => [element("div", {}, [element("span"), element("span", { class: "small" }), element("span", { class: "small" })])],
      fill: (cell, { dataset }) => {
        const [backend, reason, direct] = cell.querySelectorAll("span");
        write(backend, dataset.fallback ? `${dataset.backend} instead of ${dataset.requested}` : dataset.backend);
        attribute(backend, "class", dataset.fallback ? "warning" : "");
        write(reason, dataset.reason);
        write(direct, `${dataset.direct_io ? "direct I/O" : "page cache"}: ${dataset.direct_io_reason}`);
      },
    },
    number(({ rates }) => orDash(aSecond, rates?.reads)),
    number(({ rates }) => orDash(bytesASecond, rates?.bytes)),
    number(({ dataset }) => amount(dataset.reads_total)),
    number(({ dataset }) => amount(dataset.read_errors_total)),
  ]);

  // --- The whole page ---

  let points = [];
  let latest = null;
  let pageVersion = null;
  let announced = -Infinity;
  let steps = 0;

  const setState = (name, text) => {
    attribute(byId("state"), "data-state", name);
    write(byId("state"), text);
  };

  // Said in full, for charts and for the announcements.
  const spoken = (point, limit) => ({
    reads: `${whole.format(point.reads)} reads a second`,
    depth: point.depth === null ? `no reads were submitted; the limit is ${limit}`
      : `mean ${amount(point.depth)} a shard, of at most ${limit}`,
    latency: point.p50 === null ? "no reads"
      : `median ${spokenDuration(point.p50)}, 99th percentile ${spokenDuration(point.p99)}, 99.9th percentile ${spokenDuration(point.p999)}`,
  });

  const announce = (text) => write(byId("announcement"), text);

  const showPoint = (point, limit) => {
    steps += 1;
    if (!calm.matches || steps % CALM_STEPS === 1) {
      charts.reads.show(points);
      charts.depth.show(points, limit);
      charts.latency.show(points);
    }
    write(byId("now-reads"), aSecond(point.reads));
    write(byId("now-depth"), `${orDash(amount, point.depth)} of ${amount(limit)}`);
    for (const name of ["p50", "p99", "p999"]) write(byId(`now-${name}`), orDash(duration, point[name]));
    const said = spoken(point, limit);
    attribute(charts.reads.svg, "aria-label", `IOPS, the last two minutes. Now ${said.reads}.`);
    attribute(charts.depth.svg, "aria-label", `Queue depth, the last two minutes. Now ${said.depth}.`);
    attribute(charts.latency.svg, "aria-label", `Latency, the last two minutes. Now ${said.latency}.`);
    document.title = `${aSecond(point.reads)} \u00b7 Ringfetch`;
    if (performance.now() - announced >= ANNOUNCE_MS) {
      announced = performance.now();
      announce(`${said.reads}. Latency: ${said.latency}. Queue depth: ${said.depth}.`);
    }
  };

  const showFigures = (point) => figures.fill(FIGURES.map(([name, of, text]) => {
    const values = points.map(of).filter((value) => value !== null);
    const low = values.length ? Math.min(...values) : null;
    const high = values.length ? Math.max(...values) : null;
    return [name, { text, now: point && of(point), low, high }];
  }));

  const show = (status) => {
    const point = points.at(-1) ?? null;
    const now = point?.time ?? 0;
    const limit = Math.max(0, ...status.shards.map((shard) => shard.queue_depth));
    const { backend, requested, fallback, reason } = status.backend;
    const state = status.state[0].toUpperCase() + status.state.slice(1);
    setState(status.state, state);
    pageVersion ??= status.version;
    const version = status.version === pageVersion ? status.version : `${status.version} (reload this page, it is of ${pageVersion})`;
    write(byId("about"), `Version ${version} \u00b7 up ${span(status.uptime_ms)} \u00b7 ${status.cores} ${status.cores === 1 ? "core" : "cores"}`
      + ` \u00b7 ${bytes(status.memory.budget_bytes)} for answers`);
    write(byId("backend"), backend);
    byId("fallback").hidden = !fallback;
    write(byId("fallback"), fallback ? `instead of ${requested}, which was asked for` : "");
    write(byId("reason"), reason);
    if (point) showPoint(point, limit);
    showFigures(point);
    shards.fill(status.shards.map((shard) => [shard.shard, { shard, rates: point?.shards.get(shard.shard), history: points, now }]));
    datasets.fill(status.datasets.map((dataset) => [dataset.name, { dataset, rates: point?.datasets.get(dataset.name) }]));
    attribute(byId("main"), "aria-busy", "false");
  };

  const receive = (status) => {
    const time = performance.now();
    const before = latest;
    if (before && isRestart(before.status, status)) announce("The daemon was restarted; counters begin at zero.");
    else if (before && before.status.backend.backend !== status.backend.backend) announce(`The backend is ${status.backend.backend} now.`);
    else if (before && before.status.state !== status.state) announce(`The daemon is ${status.state}.`);
    // After a pause the difference would be the mean of all that time: begin anew from this answer.
    const point = before && time - before.time < GAP_MS ? between(before.status, status, time) : null;
    if (point) points = [...points.filter((old) => time - old.time <= WINDOW_MS), point];
    latest = { status, time, at: new Date() };
    show(status);
  };

  // --- Polling ---

  let timer = null;
  let request = null;
  let failures = 0;
  let gone = null;
  let paused = false;

  // Fails with what the daemon does, as it continues the sentence "The daemon ...".
  const ask = async (signal) => {
    const says = (text) => (error) => { throw signal.aborted ? error : new Error(text); };
    const response = await fetch("v1/status", { cache: "no-store", signal }).catch(says("has not been reachable"));
    if (!response.ok) throw new Error(`has answered with HTTP status ${response.status}`);
    const status = await response.json().catch(says("has not answered with JSON"));
    if (!Array.isArray(status?.shards) || !Array.isArray(status?.datasets)) throw new Error("has answered with something else than its status");
    return status;
  };

  const lost = (problem) => {
    failures += 1;
    const wait = RETRY_MS[Math.min(failures, RETRY_MS.length) - 1];
    if (!gone) {
      gone = new Date();
      document.title = "Not answering \u00b7 Ringfetch";
      write(byId("alarm"), "The daemon does not answer. The figures are the last ones known.");
    }
    setState("gone", "Not answering");
    document.documentElement.classList.add("stale");
    const known = latest ? ` Figures are of ${clock(latest.at)}.` : "";
    write(byId("about"), `The daemon ${problem} since ${clock(gone)}. Next try in ${wait / 1000} s.${known}`);
    return wait;
  };

  const found = () => {
    failures = 0;
    if (!gone) return;
    gone = null;
    document.documentElement.classList.remove("stale");
    write(byId("alarm"), "");
    announce("The daemon answers again.");
  };

  const poll = async () => {
    timer = null;
    const began = performance.now();
    const own = new AbortController();
    request = own;
    let tooLong = false;
    const limit = setTimeout(() => { tooLong = true; own.abort(); }, TIMEOUT_MS);
    const answer = await ask(own.signal).then((status) => ({ status }), (error) => ({ error }));
    clearTimeout(limit);
    // Stopped meanwhile, perhaps started anew: this answer is nobody's.
    if (request !== own) return;
    request = null;
    if (answer.error) {
      timer = setTimeout(poll, lost(tooLong ? "has not answered" : answer.error.message));
      return;
    }
    timer = setTimeout(poll, Math.max(INTERVAL_MS / 4, INTERVAL_MS - (performance.now() - began)));
    found();
    receive(answer.status);
  };

  const stop = () => {
    clearTimeout(timer);
    timer = null;
    const own = request;
    request = null;
    own?.abort();
  };
  const start = () => {
    if (paused || document.hidden || timer !== null || request) return;
    poll();
  };

  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  window.addEventListener("online", () => { stop(); start(); });
  byId("pause").addEventListener("click", () => {
    paused = !paused;
    write(byId("pause"), paused ? "Resume" : "Pause");
    if (paused) {
      stop();
      setState("paused", "Paused");
    } else {
      start();
    }
  });
  // The rows are there before their figures, so that nothing below moves when these come.
  showFigures(null);
  start();
})();
