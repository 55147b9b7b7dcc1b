// The tables: every figure the charts show and more, a row a shard, a row a dataset.
import { amount, aSecond, bytes, bytesASecond, duration, orDash, whole } from "./numbers.js";
import { WINDOW_MS, attribute, element, path, powers, segments, svg, write } from "./draw.js";

export const FIGURES = [
  ["IOPS", (point) => point.reads, aSecond],
  ["Throughput", (point) => point.bytes, bytesASecond],
  ["Latency p50", (point) => point.p50, duration],
  ["Latency p99", (point) => point.p99, duration],
  ["Latency p99.9", (point) => point.p999, duration],
  ["Mean depth", (point) => point.depth, amount],
  ["Reads in flight", (point) => point.inFlight, amount],
  ["Reads queued", (point) => point.queued, amount],
  ["Reads stalled", (point) => point.stalled, amount],
  ["Reads that failed", (point) => point.errors, aSecond],
  ["Requests refused", (point) => point.rejected, aSecond],
  ["Answer memory", (point) => point.memory, bytes],
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
      element("td", { role: "cell", class: style, "data-column": this.names[c + 1] }, parts()),
    );
    return { cells, node: element("tr", { role: "row" }, [head, ...cells]) };
  }
}

const number = (text) => ({ style: "number", fill: (cell, value) => write(cell, text(value)) });

export const figures = new Table("figures", [
  number(({ text, now }) => orDash(text, now)),
  number(({ text, low }) => orDash(text, low)),
  number(({ text, high }) => orDash(text, high)),
]);

const bar = () => {
  const drawing = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  drawing.append(
    svg("rect", { class: "track", width: 100, height: 10, rx: 2 }),
    svg("rect", { class: "level", width: 0, height: 10, rx: 2 }),
  );
  return [element("div", { class: "bar" }, [drawing, element("span")])];
};
const SPARK = { width: 120, height: 22 };
const spark = () => {
  const drawing = svg("svg", {
    viewBox: `0 0 ${SPARK.width} ${SPARK.height}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  drawing.append(
    svg("path", {
      class: "grid",
      d: `M0 ${SPARK.height - 1}H${SPARK.width}M0 1H${SPARK.width}`,
      "vector-effect": "non-scaling-stroke",
    }),
  );
  drawing.append(svg("path", { class: "curve curve-a", "vector-effect": "non-scaling-stroke" }));
  return [element("div", { class: "bar spark" }, [drawing, element("span")])];
};

export const shards = new Table("shards", [
  { fill: (cell, { shard }) => write(cell, shard.routed ? shard.backend : `${shard.backend}, idle`) },
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
      attribute(
        cell.querySelector(".curve"),
        "d",
        path(
          segments(history, (point) => point.shards.get(shard.shard)?.depth),
          x,
          y,
        ),
      );
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
export const datasets = new Table("datasets", [
  { fill: (cell, { dataset }) => write(cell, sized(dataset)) },
  {
    style: "wide",
    parts: () => [
      element("div", {}, [element("span"), element("span", { class: "small" }), element("span", { class: "small" })]),
    ],
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
