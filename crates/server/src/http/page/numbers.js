// Numbers as text: three digits that count, and a unit. Spaces before units do not break.

/** Where the daemon's histogram ends, microseconds. */
export const US_MAX = 1e7;

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
export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const SPACE = "\u00a0";
export const amount = (value) =>
  value < 10_000
    ? value > 0 && value < 10 && !Number.isInteger(value)
      ? value.toFixed(1)
      : whole.format(value)
    : scaled(value, 1000, ["", `${SPACE}k`, `${SPACE}M`, `${SPACE}G`]);
export const bytes = (value) =>
  scaled(
    value,
    1024,
    [" B", " KiB", " MiB", " GiB", " TiB"].map((unit) => unit.replace(" ", SPACE)),
  );
export const duration = (us) =>
  us > US_MAX ? `over${SPACE}10${SPACE}s` : scaled(us, 1000, [`${SPACE}µs`, `${SPACE}ms`, `${SPACE}s`]);
// Ticks are round: 10 ms, not 10.0 ms.
export const round = (text) => (value) => text(value).replace(/\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)/, "$1");
export const aSecond = (value) => `${amount(value)}/s`;
export const bytesASecond = (value) => `${bytes(value)}/s`;
// For ears: units in words, no symbols.
export const spokenDuration = (us) =>
  duration(us).replace("µs", "microseconds").replace("ms", "milliseconds").replace(/\bs$/, "seconds");
export const span = (ms) => {
  const seconds = Math.floor(ms / 1000);
  const parts = [
    [86_400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ].map(([size, unit], i, all) => [Math.floor((i ? seconds % all[i - 1][0] : seconds) / size), unit]);
  const first = parts.findIndex(([value]) => value > 0);
  return (first < 0 ? [[0, "s"]] : parts.slice(first, first + 2)).map((part) => part.join(SPACE)).join(" ");
};
export const clock = (date) => date.toLocaleTimeString("en-GB");
export const orDash = (text, value) => (value === null || value === undefined ? "\u2013" : text(value));
