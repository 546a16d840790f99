// A line chart in SVG: lines with faint raw values, a cursor for pointer and keyboard, and the same as a table.

import { element, put, shape } from "./nodes.js";

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.001) return value.toFixed(3);
  return value === 0 ? "0" : value.toExponential(1);
}

export const fixed = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));

export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 1) return `${+s.toPrecision(2)} s`;
  if (s < 9.95 && s % 1 > 0.05) return `${s.toFixed(1)} s`;
  if (s < 100) return `${Math.round(s)} s`;
  if (s < 6000) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${+(s / 3600).toFixed(1)} h`;
  return `${+(s / 86400).toFixed(1)} d`;
}

export const ago = (time) => duration(Math.round((Date.now() / 1000 - time) * 10) / 10) + " ago";

// The mean over `window` values around each; nulls are not counted, and stay where nothing is near.
export function smooth(values, window) {
  if (window < 2) return values;
  const sums = new Float64Array(values.length + 1);
  const counts = new Uint32Array(values.length + 1);
  values.forEach((value, i) => {
    sums[i + 1] = sums[i] + (value ?? 0);
    counts[i + 1] = counts[i] + (value === null ? 0 : 1);
  });
  const before = (window - 1) >> 1, after = window >> 1;
  return values.map((_, i) => {
    const from = Math.max(0, i - before), to = Math.min(values.length, i + after + 1);
    const n = counts[to] - counts[from];
    return n ? (sums[to] - sums[from]) / n : null;
  });
}

function steps(low, high, wanted, { units = null, whole = false } = {}) {
  const rough = Math.max((high - low) / Math.max(1, wanted), whole ? 1 : 0);
  const step = units ? (units.find((unit) => unit >= rough) ?? Math.ceil(rough / 86400) * 86400) : nice(rough, whole);
  return [multiples(low, high, step), step];
}

function multiples(low, high, step) {
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function nice(rough, whole) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((times) => times * power >= rough * 0.999) * power;
}

const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

const UNITS = [["d", 86400, 172800], ["h", 3600, 6000], ["min", 60, 300], ["s", 1, 0]]; // name, seconds, from how many

// Labels of times on one axis up to `most` seconds, in one unit and as precise as steps of `step` seconds need.
function timeTick(step, most) {
  const [unit, seconds] = UNITS.find(([, , from]) => most >= from);
  const digits = [0, 1].find((n) => Number.isInteger(+((step / seconds) * 10 ** n).toFixed(6))) ?? 2;
  return (value) => (value ? `${+(value / seconds).toFixed(digits)} ${unit}` : "0");
}

function tick(value, step) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  if (value !== 0 && (step < 1e-4)) return value.toExponential(1);
  return String(+value.toFixed(Math.max(0, Math.min(5, 1 - Math.floor(Math.log10(step))))));
}

let count = 0;

// lines: [{label, color (class name), dash, area, x: [], y: [], raw: [] or null, least, most: [] or null}]
export class Chart {
  constructor(title, { height = 200, small = false, note = "" } = {}) {
    this.height = height;
    this.small = small;
    this.lines = [];
    this.cursor = null;
    const id = `chart-${count++}`;
    const words = title.split(/(?<=[_/])/); // may be broken there
    this.title = element("span", { class: "title" }, ...words.flatMap((word, i) => (i ? [element("wbr"), word] : [word])));
    this.note = element("small", {}, note);
    this.legend = element("span", { class: "legend" });
    this.svg = shape("svg", { tabindex: "0", role: "img", "aria-describedby": `${id}-text` });
    this.text = element("span", { class: "unseen", id: `${id}-text` });
    this.readout = element("div", { class: "readout", role: "status", hidden: true });
    this.whose = element("span", { class: "unseen" });
    this.values = element("details", {}, element("summary", {}, "Values", this.whose), this.table = element("div"));
    this.plot = element("div", { class: "plot" }, this.svg, this.readout);
    this.node = element("figure", { class: small ? "chart small" : "chart", hidden: true },
      element("figcaption", {}, this.title, note ? this.note : null, this.legend), this.text, this.plot, small ? null : this.values);
    this.values.addEventListener("toggle", () => this.tabulate());
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.call(title);
  }

  // What the chart is of, in words, where its title cannot say it: the title may hold a select with all its options.
  call(name) {
    this.name = name;
    this.whose.textContent = ` of ${name}`;
    this.svg.setAttribute("aria-label", name);
  }

  show(lines, { axis = "round", zero = true, raw = true, top = null, format = number, whole = false, over = false } = {}) {
    this.over = over; // nothing is added any more
    this.lines = lines.filter((line) => line.y.some((value) => value !== null));
    this.axis = axis;
    this.zero = zero;
    this.raw = raw;
    this.top = top;
    this.format = format;
    this.whole = whole;
    this.node.hidden = !this.lines.length;
    this.draw();
    if (this.values.open) this.tabulate();
  }

  draw() {
    const width = Math.floor(this.plot.clientWidth);
    if (!width || !this.lines.length) return;
    const { height, small, lines } = this;
    const right = small ? 4 : 10, above = 8, below = small ? 18 : 24;
    let [lowX, highX, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const line of lines) {
      lowX = Math.min(lowX, line.x[0]);
      highX = Math.max(highX, line.x[line.x.length - 1]);
      for (const values of [line.y, line.base, ...(this.raw ? (line.least ? [line.least, line.most] : [line.raw]) : [])]) {
        for (const value of values ?? []) {
          if (value === null) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
    if (this.axis === "time") lowX = 0;
    if (lowX === highX) highX = lowX + 1;
    if (this.zero) low = Math.min(0, low);
    if (this.top !== null) high = Math.max(this.top, high);
    if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const { whole } = this;
    let ticksY = [], left = 4;
    if (!small) {
      const [, stepY] = steps(low, high, height / 48, { whole });
      low = Math.floor(low / stepY + 1e-9) * stepY;
      high = Math.ceil(high / stepY - 1e-9) * stepY;
      ticksY = multiples(low, high, stepY).map((y) => [y, tick(y, stepY)]);
      left = 14 + 6.5 * Math.max(5, ...ticksY.map(([, text]) => text.length));
    }
    if (small) {
      ticksY = [low, high].map((y) => [y, tick(y, (high - low) / 2)]);
      left = 8 + 6.5 * Math.max(...ticksY.map(([, text]) => text.length));
    }
    const toX = (x) => left + ((x - lowX) / (highX - lowX)) * (width - left - right);
    const toY = (y) => above + ((high - y) / (high - low)) * (height - above - below);
    this.scale = { toX, toY, left, right, above, below, width };
    const drawn = [];
    if (small) {
      drawn.push(shape("line", { class: "grid", x1: left, x2: width - right, y1: toY(high), y2: toY(high) }));
      drawn.push(shape("line", { class: "axis", x1: left, x2: width - right, y1: toY(low), y2: toY(low) }));
      for (const [y, text] of ticksY) drawn.push(shape("text", { class: "tick", x: left - 5, y: toY(y) + 4, "text-anchor": "end" }, text));
      const ends = this.axis === "time" ? duration : (x) => tick(x, 1);
      drawn.push(shape("text", { class: "tick", x: left, y: height - 4 }, ends(lowX)));
      drawn.push(shape("text", { class: "tick", x: width - right, y: height - 4, "text-anchor": "end" }, ends(highX)));
    } else {
      for (const [y, text] of ticksY) {
        drawn.push(shape("line", { class: "grid", x1: left, x2: width - right, y1: toY(y), y2: toY(y) }));
        drawn.push(shape("text", { class: "tick", x: left - 7, y: toY(y) + 4, "text-anchor": "end" }, text));
      }
      const time = this.axis === "time";
      const [ticksX, stepX] = steps(lowX, highX, width / (width > 600 ? 90 : 62), { units: time ? TIMES : null, whole: true });
      drawn.push(shape("text", { class: "tick", x: left - 9, y: height - 6, "text-anchor": "end" }, this.axis));
      const label = (step) => (time ? timeTick(step, highX) : (x) => tick(x, Number.isInteger(x) ? 1 : stepX));
      const ends = [[lowX, "start"], [highX, "end"]].map(([x, anchor]) => [x, anchor, label(stepX / 10)(x)]);
      const room = ([, , text], other, least) => Math.max(least, 6.5 * (text.length + other.length / 2) + 8); // pixels between
      const apart = ([x, , text]) => toX(x) - toX(lowX) > room(ends[0], text, 40) && toX(highX) - toX(x) > room(ends[1], text, 50);
      const labels = [...ends, ...ticksX.map((x) => [x, "middle", label(stepX)(x)]).filter(apart)];
      for (const [x, anchor, text] of labels.filter(([, , text], i) => labels.findIndex((other) => other[2] === text) === i)) {
        drawn.push(shape("text", { class: "tick", x: toX(x), y: height - 6, "text-anchor": anchor }, text));
      }
    }
    for (const line of lines) {
      if (this.raw && line.least) {
        drawn.push(shape("path", { class: `band ${line.color}`, d: area(line.x, line.most, line.least, toX, toY) }));
      } else if (this.raw && line.raw) {
        drawn.push(shape("path", { class: `raw ${line.color}`, d: path(line.x, line.raw, toX, toY) }));
      }
    }
    for (const line of lines) {
      if (line.area) {
        const base = line.base ?? line.y.map((value) => (value === null ? null : Math.max(0, low)));
        drawn.push(shape("path", { class: `area ${line.color}`, d: area(line.x, line.y, base, toX, toY) }));
      }
      drawn.push(shape("path", { class: `line ${line.color} ${line.dash ? "dash" : ""}`, d: path(line.x, line.y, toX, toY) }));
      const last = line.y.length - 1;
      if (line.dots) { // measured in few rounds, perhaps in one
        for (const [i, value] of line.y.entries()) {
          if (value !== null) drawn.push(shape("circle", { class: `dot ${line.color}`, cx: toX(line.x[i]), cy: toY(value), r: 2 }));
        }
      }
      if (line.y[last] !== null && (line.y.length === 1 || !small)) {
        drawn.push(shape("circle", { class: `dot ${line.color}`, cx: toX(line.x[last]), cy: toY(line.y[last]), r: 2.6 }));
      }
    }
    this.marks = shape("g");
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren(...drawn, this.marks);
    const legend = lines.filter((line) => line.label && !line.plain);
    put(this.legend, ...(small ? [] : legend.map((line) =>
      element("span", { class: `key ${line.color} ${line.dash ? "dash" : ""}` }, line.label))));
    this.text.textContent = lines.map((line) => {
      const known = (line.value ?? line.y).filter((value) => value !== null);
      return `${line.label || this.name}: ${this.format(known[0])} at first, ${this.format(known[known.length - 1])} ${this.over ? "at the end" : "now"}`;
    }).join("; ");
    this.mark();
  }

  point(event) {
    if (!this.scale) return;
    const box = this.svg.getBoundingClientRect();
    this.move(this.nearest((event.clientX - box.left) * (this.scale.width / box.width)));
  }

  // All places on the x axis where any line has a point.
  places() {
    return [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  }

  nearest(pixel) {
    let best = null, distance = Infinity;
    for (const line of this.lines) for (const x of line.x) {
      const d = Math.abs(this.scale.toX(x) - pixel);
      if (d < distance) [best, distance] = [x, d];
    }
    return best;
  }

  key(event) {
    const places = this.places();
    const at = this.cursor === null ? places.length - 1 : closest(places, this.cursor);
    const leap = Math.max(1, Math.round(places.length / 20));
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - leap, PageUp: at + leap, Home: 0, End: places.length - 1 }[event.key];
    if (event.key === "Escape") return this.move(null);
    if (to === undefined || !places.length) return;
    event.preventDefault();
    this.move(places[Math.max(0, Math.min(places.length - 1, to))]);
  }

  move(x) {
    this.cursor = x;
    this.mark();
  }

  mark() {
    if (this.cursor === null || !this.scale || !this.lines.length) {
      this.readout.hidden = true;
      this.marks?.replaceChildren();
      return;
    }
    const { toX, toY, above, below, width } = this.scale;
    const at = toX(this.cursor);
    const marks = [shape("line", { class: "cursor", x1: at, x2: at, y1: above, y2: this.height - below })];
    const rows = [];
    for (const line of this.lines) {
      const i = closest(line.x, this.cursor);
      if (Math.abs(toX(line.x[i]) - at) > 12 || line.y[i] === null) continue;
      marks.push(shape("circle", { class: `dot ${line.color}`, cx: toX(line.x[i]), cy: toY(line.y[i]), r: 3.5 }));
      const value = line.value ? line.value[i] : line.y[i];
      const raw = line.raw && line.raw[i] !== null && this.raw ? ` (raw ${this.format(line.raw[i])})` : "";
      rows.push(element("span", { class: `key ${line.color} ${line.dash ? "dash" : ""}` }, `${line.label ? line.label + " " : ""}${this.format(value)}${raw}`));
    }
    const where = this.axis === "time" ? `after ${duration(this.cursor)}` : `round ${Math.round(this.cursor).toLocaleString("en")}`;
    this.marks.replaceChildren(...marks);
    this.readout.replaceChildren(element("strong", {}, where), ...rows);
    this.readout.hidden = false;
    this.readout.classList.toggle("left", at > width / 2);
  }

  tabulate() {
    if (!this.values.open || !this.lines.length) return put(this.table);
    const places = this.places(), shown = 10;
    const chosen = [...new Set(Array.from({ length: shown + 1 }, (_, i) => places[Math.round((i * (places.length - 1)) / shown)]))];
    const head = element("tr", {}, element("th", { scope: "col" }, this.axis === "time" ? "after" : "round"),
      ...this.lines.map((line) => element("th", { scope: "col" }, line.label || this.name)));
    const last = places[places.length - 1], time = timeTick((last - places[0]) / shown, last);
    const rows = chosen.map((x) => element("tr", {},
      element("th", { scope: "row" }, this.axis === "time" ? time(x) : Math.round(x).toLocaleString("en")),
      ...this.lines.map((line) => {
        const i = closest(line.x, x), inside = x >= line.x[0] && x <= line.x[line.x.length - 1];
        return element("td", {}, inside ? this.format((line.value ?? line.y)[i]) : "–");
      })));
    put(this.table, element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Values of ${this.name}` },
      element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))));
  }
}

function closest(sorted, x) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[high] - x) < Math.abs(sorted[low] - x) ? high : low;
}

function path(x, y, toX, toY) {
  let d = "", pen = "M";
  for (let i = 0; i < y.length; i++) {
    if (y[i] === null) continue;
    d += `${pen}${toX(x[i]).toFixed(1)} ${toY(y[i]).toFixed(1)}`;
    pen = "L";
  }
  return d;
}

function area(x, top, base, toX, toY) {
  const known = top.map((_, i) => i).filter((i) => top[i] !== null && base[i] !== null);
  if (!known.length) return "";
  const there = known.map((i) => `${toX(x[i]).toFixed(1)} ${toY(top[i]).toFixed(1)}`);
  const back = known.reverse().map((i) => `${toX(x[i]).toFixed(1)} ${toY(base[i]).toFixed(1)}`);
  return `M${there.join("L")}L${back.join("L")}Z`;
}
