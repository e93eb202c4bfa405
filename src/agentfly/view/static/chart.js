// A line chart as SVG: several curves, a crosshair with the values at a step, no dependencies.

import { el, elWith, number } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 520;
const HEIGHT = 210;
const LEFT = 52;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Round numbers between the bounds, about `count` of them and at least two, each with its text.
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.7);
  const out = [];
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step)
    out.push([value, digits > 4 || step >= 1000 ? number(value) : value.toFixed(digits).replace(/^-0(\.0*)?$/, "0$1")]);
  return out;
}

// series: [{metric, run, points: [[step, value]], dash (class d0 … d3), color (class c0 … c7)}]; smooth: weight of the
// past, 0 to 1.
export function chart(series, smooth = 0) {
  const drawn = series
    .map((each) => ({ ...each, points: each.points.filter(([, y]) => y !== null && Number.isFinite(y)) }))
    .filter((each) => each.points.length);
  if (!drawn.length) return el("p.faint", "No values yet.");
  const steps = drawn.flatMap((each) => each.points.map(([x]) => x));
  const values = drawn.flatMap((each) => each.points.map(([, y]) => y));
  let [low, high] = bounds(values);
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  const [first, last] = bounds(steps);
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart" });
  for (const [value, text] of ticks(low, high, 4)) {
    root.append(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "grid" }));
    root.append(svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  for (const [step] of ticks(first, Math.max(last, first + 1), 6).filter(([s]) => Number.isInteger(s) && s <= last)) {
    root.append(svg("text", { x: x(step), y: HEIGHT - 6, "text-anchor": "middle" }, number(step)));
  }
  for (const each of drawn) {
    const line = (points, kind) =>
      root.append(
        svg("polyline", {
          points: points.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" "),
          class: `line ${each.color} ${each.dash} ${kind}`,
        }),
      );
    if (smooth > 0) line(each.points, "raw");
    line(smooth > 0 ? average(each.points, smooth) : each.points, "");
    if (each.points.length < 16)
      for (const [s, v] of each.points)
        root.append(svg("circle", { cx: x(s), cy: y(v), r: 2.5, class: `dot ${each.color}` }));
  }
  const cursor = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" });
  root.append(cursor);
  const legend = el("div.legend");
  const show = (step) => {
    const metrics = [...new Set(drawn.map((each) => each.metric))];
    const valueOf = (each) => {
      const point = step === null ? each.points.at(-1) : nearest(each.points, step);
      const swatch = el(`i.swatch.${each.color}.${each.dash}`);
      return elWith("span", { title: each.run }, swatch, el("b", number(point[1])), " ");
    };
    legend.replaceChildren(
      ...metrics.map((metric) => el("span", drawn.filter((each) => each.metric === metric).map(valueOf), metric)),
      el("span.faint", step === null ? "" : `at step ${step}`),
    );
  };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const wanted = first + ((at - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first);
    const [step] = nearest(drawn.flatMap((each) => each.points), wanted);
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    show(step);
  });
  root.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    show(null);
  });
  show(null);
  return el("div", root, legend);
}

function bounds(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function nearest(points, step) {
  return points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
}

// Exponential moving average without the bias of its first values.
function average(points, weight) {
  let sum = 0;
  let total = 0;
  return points.map(([step, value]) => {
    sum = sum * weight + value;
    total = total * weight + 1;
    return [step, sum / total];
  });
}
