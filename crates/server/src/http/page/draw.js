// Writing to the document, only where something changed, and charts: lines over the last two minutes as SVG.
import { US_MAX, amount, duration, round } from "./numbers.js";

export const WINDOW_MS = 120_000;

export const byId = (id) => document.getElementById(id);
export const write = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};
export const attribute = (node, name, value) => {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
};
export const element = (name, attributes = {}, children = []) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
export const svg = (name, attributes = {}) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};

// Where a line breaks: values that are not there, and points that do not begin where the one before ended.
export const segments = (points, of) => {
  const found = [];
  let open = null;
  let last = null;
  for (const point of points) {
    const value = of(point);
    if (value === null || value === undefined) {
      open = null;
      continue;
    }
    if (!open || point.since !== last) found.push((open = []));
    open.push([point.time, value]);
    last = point.time;
  }
  return found;
};
export const path = (parts, x, y) =>
  parts
    .map((part) => {
      const places = part.map(([time, value]) => `${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
      // A lone point is drawn as a dot: a line of no length with round ends.
      return `M${(places.length > 1 ? places : [places[0], places[0]]).join("L")}`;
    })
    .join("");

// --- Charts ---

const roundUp = (value) => {
  const decade = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * decade).find((step) => step >= value * 0.999);
};

// Scales answer {low, high, ticks, place}: `place` is 0 at the bottom and 1 at the top.
export const fromZero = (text) => (values) => {
  const high = roundUp(Math.max(1, ...values));
  return {
    key: high,
    ticks: [0, 0.25, 0.5, 0.75, 1].map((part) => [part * high, round(text)(part * high)]),
    place: (value) => value / high,
  };
};
const logarithmic = (low, high, ticks) => {
  const range = Math.log(high) - Math.log(low);
  const place = (value) => Math.min(1, Math.max(0, (Math.log(Math.max(value, low)) - Math.log(low)) / range));
  return { key: `${low} ${high} ${ticks.length}`, ticks, place };
};
export const decades = (values) => {
  const finite = values.map((value) => Math.min(Math.max(value, 1), US_MAX));
  let low = finite.length ? Math.floor(Math.log10(Math.min(...finite))) : 1;
  let high = finite.length ? Math.ceil(Math.log10(Math.max(...finite))) : 4;
  // At least two decades, so that noise looks like noise.
  while (high - low < 2)
    if (high < 7) high += 1;
    else low -= 1;
  const ticks = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i)).map((us) => [
    us,
    round(duration)(us),
  ]);
  return logarithmic(10 ** low, 10 ** high, ticks);
};
export const powers = (values, limit) => {
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

export class Chart {
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
      const closed = parts[0].map(
        (part) =>
          `${path([part], x, y)}L${x(part.at(-1)[0]).toFixed(1)} ${bottom}L${x(part[0][0]).toFixed(1)} ${bottom}Z`,
      );
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
    const down = [
      ["2 min ago", WINDOW_MS, "start"],
      ["1 min", WINDOW_MS / 2, "middle"],
      ["now", 0, "end"],
    ].map(([text, ago, anchor]) => label(text, { x: x(now - ago).toFixed(1), y: height - 5, "text-anchor": anchor }));
    this.grid.replaceChildren(...across, ...down);
  }
}
