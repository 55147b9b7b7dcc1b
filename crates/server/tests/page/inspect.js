// What the page looks like to the browser, for run.py. Runs in the page as one function body; answers what was asked for.
"use strict";
const what = arguments[0];

const visible = (node) => {
  const style = getComputedStyle(node);
  const box = node.getBoundingClientRect();
  return style.visibility !== "hidden" && style.display !== "none" && box.width > 1 && box.height > 1;
};

const channels = (text) => {
  const found = text.match(/^rgba?\(([^)]+)\)$/);
  if (!found) throw new Error(`not a colour this understands: ${text}`);
  const [r, g, b, a = 1] = found[1].split(/[\s,/]+/).map(Number);
  return { r, g, b, a };
};
const over = (front, back) => ({
  r: front.r * front.a + back.r * (1 - front.a),
  g: front.g * front.a + back.g * (1 - front.a),
  b: front.b * front.a + back.b * (1 - front.a),
  a: 1,
});
// WCAG 2.2, "relative luminance" and "contrast ratio".
const luminance = ({ r, g, b }) => {
  const linear = [r, g, b].map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const ratio = (one, other) => {
  const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
};
const ground = (node) => {
  const layers = [];
  for (let at = node; at; at = at.parentElement) {
    if (getComputedStyle(at).opacity !== "1") throw new Error(`${at.tagName} is not opaque: compute that too`);
    layers.push(channels(getComputedStyle(at).backgroundColor));
  }
  return layers.reverse().reduce((back, front) => over(front, back), { r: 255, g: 255, b: 255, a: 1 });
};

// [contrast, text] of every piece of text that can be seen, the worst first.
const contrasts = () => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const parent = text.parentElement;
    if (!text.data.trim() || !visible(parent) || parent.closest(".unseen, noscript, .skip:not(:focus)")) continue;
    const style = getComputedStyle(parent);
    const colour = parent instanceof SVGElement ? style.fill : style.color;
    const back = ground(parent);
    found.push([ratio(over(channels(colour), back), back), text.data.trim()]);
  }
  return found.sort((a, b) => a[0] - b[0]);
};

// Lines of charts against what they stand on (WCAG 1.4.11 asks for 3).
const lines = () =>
  [...document.querySelectorAll(".curve")]
    .filter((line) => line.getAttribute("d"))
    .map((line) => {
      const back = ground(line.closest("figure, section"));
      return [ratio(over(channels(getComputedStyle(line).stroke), back), back), line.getAttribute("class")];
    });

// Elements that stick out of the window to the right, and whether the page scrolls sideways.
const sideways = () => {
  const root = document.documentElement;
  const out = [...document.body.querySelectorAll("*")].filter(
    (node) =>
      visible(node) &&
      !node.closest(".unseen, .skip, .cards thead") &&
      node.getBoundingClientRect().right > innerWidth + 0.5,
  );
  return {
    scroll: Math.max(root.scrollWidth, document.body.scrollWidth),
    width: innerWidth,
    out: out.map((node) => `${node.tagName} ${node.className}`).slice(0, 5),
  };
};

const rows = (id) =>
  [...document.querySelectorAll(`#${id} tbody tr`)].map((row) => [...row.children].map((cell) => cell.textContent));

const paths = () =>
  Object.fromEntries(
    ["reads", "depth", "latency"].map((name) => [
      name,
      [...document.querySelectorAll(`#chart-${name} .curve:not(.curve-limit)`)].map(
        (path) => path.getAttribute("d") ?? "",
      ),
    ]),
  );

return { contrasts, lines, sideways, rows, paths }[what](...[...arguments].slice(1));
