// The last quarter of an hour as small line charts, whose newest value stands above them.

import { element, put } from "./tiles.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_POINTS = 450;
const LEAST_POINTS = 60; // an axis shows at least two minutes
const WIDTH = 1000;
const HEIGHT = 100;

const number = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
const duration = (seconds) =>
  seconds < 0.9995 ? `${number(1000 * seconds)} ms` : `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
const whole = (value) => value.toLocaleString("en");

const CHARTS = [
  { title: "Tokens per second", lines: [{ field: "tokens_per_s", name: "" }], format: (value) => whole(Math.round(value)), least: 10 },
  {
    title: "Requests",
    lines: [
      { field: "num_running", name: "in batch" },
      { field: "num_waiting", name: "waiting" },
    ],
    format: whole,
    least: 4,
  },
  {
    title: "Time to first token",
    lines: [
      { field: "ttft_p50_s", name: "median" },
      { field: "ttft_p99_s", name: "P99" },
    ],
    format: duration,
    least: 0.05,
  },
  {
    title: "Between two tokens",
    lines: [
      { field: "itl_p50_s", name: "median" },
      { field: "itl_p99_s", name: "P99" },
    ],
    format: duration,
    least: 0.01,
  },
];

export class Charts {
  #charts;
  #points = []; // objects, by field

  constructor(root) {
    this.#charts = CHARTS.map((each) => new Chart(each));
    root.append(...this.#charts.map((chart) => chart.element));
  }

  /** Add points, which come as columns. Points of another server, as after its restart, begin the charts anew. */
  add(columns) {
    const numbers = columns.number;
    if (this.#points.length > 0 && numbers[0] !== this.#points[this.#points.length - 1].number + 1) this.#points = [];
    numbers.forEach((_, row) => {
      this.#points.push(Object.fromEntries(Object.keys(columns).map((name) => [name, columns[name][row]])));
    });
    this.#points = this.#points.slice(-MAX_POINTS);
    for (const chart of this.#charts) chart.show(this.#points, columns.every_s);
  }
}

class Chart {
  #spec;
  #now = element("p", "now");
  #top = element("span", "top");
  #since = element("span", "since");
  #svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  #area = svg("path", { class: "area" });
  #lines;
  #values = [];
  #points = [];
  #everyS = 1;
  #at = null; // the place that the pointer is at, from 0 to 1
  #cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT });

  constructor(spec) {
    this.#spec = spec;
    this.element = element("figure", "chart");
    this.element.setAttribute("role", "img");
    this.#lines = spec.lines.map((_, index) => svg("path", { class: `line line-${index}` }));
    for (const line of spec.lines) {
      const value = element("span", "value", "–");
      this.#values.push(value);
      const part = element("span", "part");
      part.append(value);
      if (line.name) part.append(element("span", "name", line.name));
      this.#now.append(part);
    }
    this.#svg.append(this.#area, ...this.#lines, this.#cursor);
    const plot = element("div", "plot");
    plot.append(this.#svg, this.#top, this.#since);
    this.element.append(element("figcaption", "", spec.title), this.#now, plot);
    plot.addEventListener("pointermove", (event) => this.#point(event.offsetX / plot.clientWidth));
    plot.addEventListener("pointerleave", () => this.#point(null));
  }

  show(points, everyS) {
    this.#points = points;
    this.#everyS = everyS;
    const span = Math.max(LEAST_POINTS, points.length) - 1;
    const values = points.flatMap((point) => this.#spec.lines.map((line) => point[line.field] ?? 0));
    const top = roundUp(Math.max(this.#spec.least, ...values));
    const x = (index) => (WIDTH * (span - (points.length - 1 - index))) / span;
    const y = (value) => HEIGHT - (HEIGHT * value) / top;
    this.#spec.lines.forEach((line, which) => {
      const { path, area } = drawn(points, line.field, x, y);
      this.#lines[which].setAttribute("d", path);
      if (which === 0) this.#area.setAttribute("d", area);
    });
    put(this.#top, this.#spec.format(top));
    put(this.#since, `${Math.round(((span + 1) * everyS) / 60)} min`);
    this.#tell();
  }

  #point(place) {
    this.#at = place;
    this.#tell();
  }

  /** The values at the pointer, or else the newest ones. */
  #tell() {
    const span = Math.max(LEAST_POINTS, this.#points.length) - 1;
    const last = this.#points.length - 1;
    const index = this.#at === null ? last : Math.round(last - (1 - this.#at) * span);
    const point = this.#points[index];
    this.#cursor.style.visibility = this.#at === null || point === undefined ? "hidden" : "visible";
    const x = (WIDTH * (span - (last - index))) / span;
    this.#cursor.setAttribute("x1", x);
    this.#cursor.setAttribute("x2", x);
    const ago = point === undefined || this.#at === null ? "" : ` ${agoText((last - index) * this.#everyS)}`;
    const words = this.#spec.lines.map((line, which) => {
      const value = point?.[line.field] ?? null;
      const text = value === null ? "–" : this.#spec.format(value);
      put(this.#values[which], text);
      return `${line.name} ${value === null ? "unknown" : text}`.trim();
    });
    put(this.element.firstChild, this.#spec.title + ago);
    this.element.setAttribute("aria-label", `${this.#spec.title}: ${words.join(", ")}`);
  }
}

/** A line through the known values of a field, with gaps where there is none, and the area under it. */
function drawn(points, field, x, y) {
  let path = "";
  let area = "";
  let begin = null;
  const close = (index) => {
    if (begin !== null) area += `L ${x(index).toFixed(1)} ${HEIGHT} L ${x(begin).toFixed(1)} ${HEIGHT} Z `;
    begin = null;
  };
  points.forEach((point, index) => {
    const value = point[field];
    if (value === null) {
      close(index - 1);
      return;
    }
    const place = `${x(index).toFixed(1)} ${y(value).toFixed(2)} `;
    path += (begin === null ? "M " : "L ") + place;
    area += (begin === null ? "M " : "L ") + place;
    if (begin === null) begin = index;
  });
  close(points.length - 1);
  return { path, area };
}

/** The next number of the form 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return (([1, 1.5, 2, 3, 4, 5, 6, 8].find((step) => step * power >= value * 0.9999) ?? 10) * power);
}

function agoText(seconds) {
  if (seconds < 1) return "now";
  return seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
