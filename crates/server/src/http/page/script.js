// The page: polls v1/status once a second and shows it. Nothing is kept but the points of two minutes. While nobody
// looks (hidden or paused) nothing is asked; while the daemon is gone it is asked ever less often.
import { aSecond, amount, bytes, clock, duration, orDash, span, spokenDuration, whole } from "./numbers.js";
import { between, isRestart } from "./points.js";
import { Chart, WINDOW_MS, attribute, byId, decades, fromZero, powers, write } from "./draw.js";
import { FIGURES, datasets, figures, shards } from "./tables.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 5000;
// Two answers are compared where at most one between them was missed; not across a pause, whose mean nobody asks for.
const GAP_MS = 2 * (INTERVAL_MS + TIMEOUT_MS);
const RETRY_MS = [1000, 2000, 4000, 8000, 15_000];
// Screen readers hear the figures this often, and changes of state at once.
const ANNOUNCE_MS = 30_000;
// For those who asked for less motion the charts move on only every so many answers; the numbers go on.
const CALM_STEPS = 5;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

const charts = {
  reads: new Chart("chart-reads", {
    scale: fromZero(amount),
    area: true,
    lines: [{ style: "a", of: (point) => point.reads }],
  }),
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

// --- What it shows ---

let points = [];
let latest = null;
// The answer that the next one is compared with.
let base = null;
let pageVersion = null;
let announced = -Infinity;
let steps = 0;

const setState = (name, text) => {
  attribute(byId("state"), "data-state", name);
  write(byId("state"), text);
};

// Said in full, for charts and for the announcements.
const spoken = (point, limit) => ({
  reads: point ? `${whole.format(point.reads)} reads a second` : "not known yet",
  depth: !point
    ? "not known yet"
    : point.depth === null
      ? `no reads were submitted; the limit is ${limit}`
      : `mean ${amount(point.depth)} a shard, of at most ${limit}`,
  latency: !point
    ? "not known yet"
    : point.p50 === null
      ? "no reads"
      : `median ${spokenDuration(point.p50)}, 99th percentile ${spokenDuration(point.p99)}, 99.9th percentile ${spokenDuration(point.p999)}`,
});

const announce = (text) => write(byId("announcement"), text);

// Without a point: an answer that there is none before to compare it with.
const showPoint = (point, limit) => {
  if (point) steps += 1;
  if (!calm.matches || steps % CALM_STEPS === 1) {
    charts.reads.show(points);
    charts.depth.show(points, limit);
    charts.latency.show(points);
  }
  write(byId("now-reads"), orDash(aSecond, point?.reads));
  write(byId("now-depth"), `${orDash(amount, point?.depth)} of ${amount(limit)}`);
  for (const name of ["p50", "p99", "p999"]) write(byId(`now-${name}`), orDash(duration, point?.[name]));
  const said = spoken(point, limit);
  attribute(charts.reads.svg, "aria-label", `IOPS, the last two minutes. Now ${said.reads}.`);
  attribute(charts.depth.svg, "aria-label", `Queue depth, the last two minutes. Now ${said.depth}.`);
  attribute(charts.latency.svg, "aria-label", `Latency, the last two minutes. Now ${said.latency}.`);
  document.title = point ? `${aSecond(point.reads)} \u00b7 Ringfetch` : "Ringfetch";
  if (point && performance.now() - announced >= ANNOUNCE_MS) {
    announced = performance.now();
    announce(`${said.reads}. Latency: ${said.latency}. Queue depth: ${said.depth}.`);
  }
};

const showFigures = (point) =>
  figures.fill(
    FIGURES.map(([name, of, text]) => {
      const values = points.map(of).filter((value) => value !== null);
      const low = values.length ? Math.min(...values) : null;
      const high = values.length ? Math.max(...values) : null;
      return [name, { text, now: point && of(point), low, high }];
    }),
  );

const show = (status, point) => {
  const now = points.at(-1)?.time ?? 0;
  const limit = Math.max(0, ...status.shards.filter((shard) => shard.routed).map((shard) => shard.queue_depth));
  const { backend, requested, fallback, reason } = status.backend;
  const state = status.state[0].toUpperCase() + status.state.slice(1);
  setState(status.state, state);
  pageVersion ??= status.version;
  const version =
    status.version === pageVersion ? status.version : `${status.version} (reload this page, it is of ${pageVersion})`;
  write(
    byId("about"),
    `Version ${version} \u00b7 up ${span(status.uptime_ms)} \u00b7 ${status.cores} ${status.cores === 1 ? "core" : "cores"}` +
      ` \u00b7 ${bytes(status.memory.budget_bytes)} for answers`,
  );
  write(byId("backend"), backend);
  byId("fallback").hidden = !fallback;
  write(byId("fallback"), fallback ? `instead of ${requested}, which was asked for` : "");
  write(byId("reason"), reason);
  showPoint(point, limit);
  showFigures(point);
  shards.fill(
    status.shards.map((shard) => [
      shard.shard,
      { shard, rates: point?.shards.get(shard.shard), history: points, now },
    ]),
  );
  datasets.fill(
    status.datasets.map((dataset) => [dataset.name, { dataset, rates: point?.datasets.get(dataset.name) }]),
  );
  attribute(byId("main"), "aria-busy", "false");
};

const receive = (status) => {
  const time = performance.now();
  const before = latest;
  if (before && isRestart(before.status, status)) announce("The daemon was restarted; counters begin at zero.");
  else if (before && before.status.backend.backend !== status.backend.backend)
    announce(`The backend is ${status.backend.backend} now.`);
  else if (before && before.status.state !== status.state) announce(`The daemon is ${status.state}.`);
  const point = base && time - base.time < GAP_MS ? between(base.status, status, base.time, time) : null;
  if (point) points = [...points.filter((old) => time - old.time <= WINDOW_MS), point];
  latest = { status, time, at: new Date() };
  base = latest;
  show(status, point);
};

// --- Polling ---

let timer = null;
let request = null;
let failures = 0;
let gone = null;
let problem = "";
let paused = false;

// Fails with what the daemon does, as it continues the sentence "The daemon ...".
const ask = async (signal) => {
  const says = (text) => (error) => {
    throw signal.aborted ? error : new Error(text);
  };
  const response = await fetch("v1/status", { cache: "no-store", signal }).catch(says("has not been reachable"));
  if (!response.ok) throw new Error(`has answered with HTTP status ${response.status}`);
  const status = await response.json().catch(says("has not answered with JSON"));
  if (!Array.isArray(status?.shards) || !Array.isArray(status?.datasets))
    throw new Error("has answered with something else than its status");
  return status;
};

const sayGone = (next) => {
  const known = latest ? ` Figures are of ${clock(latest.at)}.` : "";
  write(byId("about"), `The daemon ${problem} since ${clock(gone)}.${next}${known}`);
};

const lost = (what) => {
  failures += 1;
  problem = what;
  const wait = RETRY_MS[Math.min(failures, RETRY_MS.length) - 1];
  if (!gone) {
    gone = new Date();
    attribute(byId("main"), "aria-busy", "false");
    write(byId("alarm"), "The daemon does not answer. The figures are the last ones known.");
  }
  setState("gone", "Not answering");
  document.title = "Not answering \u00b7 Ringfetch";
  document.documentElement.classList.add("stale");
  sayGone(` Next try in ${wait / 1000} s.`);
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
  const limit = setTimeout(() => {
    tooLong = true;
    own.abort();
  }, TIMEOUT_MS);
  const answer = await ask(own.signal).then(
    (status) => ({ status }),
    (error) => ({ error }),
  );
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
  base = null;
  const own = request;
  request = null;
  own?.abort();
};
const start = () => {
  if (paused || document.hidden || timer !== null || request) return;
  poll();
};

document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
window.addEventListener("online", () => {
  stop();
  start();
});
byId("pause").addEventListener("click", () => {
  paused = !paused;
  write(byId("pause"), paused ? "Resume" : "Pause");
  if (paused) {
    stop();
    setState("paused", "Paused");
    document.title = "Paused \u00b7 Ringfetch";
    if (gone) sayGone("");
  } else {
    setState("waiting", "Connecting");
    document.title = "Connecting \u00b7 Ringfetch";
    start();
  }
});
// The rows are there before their figures, so that nothing below moves when these come.
showFigures(null);
start();
