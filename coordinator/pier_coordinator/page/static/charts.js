// Curves, drawn by uPlot: the run in all (with the span from least to greatest), and the sites that were chosen.
import { $, colour, make, order, say } from "./dom.js";
import { Axis, smoothed } from "./axis.js";
import { saveCsv, savePng } from "./export.js";
import { fixed, speed } from "./format.js";
import { ask } from "./feed.js";
import { Earlier } from "./earlier.js";
import { byName, inOrder, joined, nameOf } from "./store.js";

const HEIGHT = 220;

class Chart {
  constructor(kind) {
    Object.assign(this, { ...kind, built: "", plot: null });
    const box = $(kind.box);
    this.canvas = make("div", { className: "plot-box" });
    this.keys = make("ul", { className: "keys" });
    this.nothing = make("p", { className: "empty", textContent: "Nothing measured yet." });
    box.append(this.nothing, this.canvas, this.keys);
    box.previousElementSibling.append(make("span", { className: "grow" }), this.button("CSV", () => saveCsv(this.title, this.axis, this.raw, this.names())),
      this.button("PNG", () => savePng(this.title, this.plot.ctx.canvas, this.lines)));
    this.canvas.setAttribute("role", "img");
    new ResizeObserver(() => this.plot?.setSize({ width: this.canvas.clientWidth, height: HEIGHT })).observe(this.canvas);
  }

  button(kind, save) {
    const made = make("button", { type: "button", className: "quiet small", textContent: kind });
    made.setAttribute("aria-label", `Save ${this.title} as ${kind}`);
    made.addEventListener("click", () => this.plot && save());
    return made;
  }

  names() {
    return this.lines.map((line) => line.name);
  }

  // lines: [{ name, colour, points: [[x, [mean, min, max]]], now }], the first one that of all sites.
  // now: the newest value, as the table and the tiles show it; the last point is a mean.
  show(lines, axis, keep, again) {
    Object.assign(this, { lines, axis, raw: table(lines) });
    const data = keep ? table(lines.map((line) => ({ ...line, points: smoothed(line.points, keep) }))) : this.raw;
    this.nothing.hidden = data[0].length > 0;
    this.canvas.hidden = this.keys.hidden = !this.nothing.hidden;
    const built = [axis.key, ...this.names()].join("\n");
    if (again || built !== this.built || !this.plot) this.build(lines, data);
    else this.plot.setData(data);
    this.built = built;
    this.tell(lines, null);
  }

  build(lines, data) {
    this.plot?.destroy();
    order(this.keys, lines.map((line, at) => make("li", {}, make("i", { className: at ? `s${line.slot}` : "s-all" }), line.name, make("b"))));
    const quiet = { show: true, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
    const line = ({ colour: stroke, dash }, width) => ({ stroke, width, dash, spanGaps: true, points: { show: false } });
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const [all, ...others] = lines;
    this.plot = new uPlot({
      width: this.canvas.clientWidth || 300,
      height: HEIGHT,
      padding: [10, 30, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 5 } },
      scales: { x: { time: this.axis.key === "time" }, y: this.fromZero ? { range: (_, __, most) => [0, 1.1 * (most || 1)] } : {} },
      axes: [{ ...axis, grid: { show: false }, size: 30, space: 64, values: (_, values, _axis, _space, step) => values.map((it) => this.axis.label(it, step)) },
        { ...axis, size: 54, values: (_, values) => values.map(this.tick) }],
      series: [{}, line(all, 2), quiet, quiet, ...others.map((it) => line(it, 1.25))],
      bands: [{ series: [3, 2], fill: `${all.colour}1c` }],
      hooks: { setCursor: [(plot) => this.tell(this.lines, plot.cursor.idx)] },
    }, data, this.canvas);
  }

  // Values at the cursor, or the newest ones.
  tell(lines, at) {
    const values = lines.map(({ now }, line) => {
      if (now !== undefined && (at === null || at === undefined)) return now;
      const column = this.plot.data[line ? line + 3 : 1];
      return at === null || at === undefined ? column.findLast((it) => it !== null && it !== undefined) : near(column, at);
    });
    values.forEach((value, line) => say(this.keys.children[line].lastElementChild, this.format(value)));
    this.canvas.setAttribute("aria-label", `${this.title}: ${lines.map((line, at) => `${line.name} ${this.format(values[at])}`).join(", ")}`);
  }
}

function near(column, at) {
  for (let back = at; back >= 0; back -= 1) if (column[back] !== null && column[back] !== undefined) return column[back];
  return null;
}

const columns = (points, picks) => [points.map(([x]) => x), ...picks.map((pick) => points.map(([, values]) => values[pick]))];

function table([all, ...others]) {
  if (![all, ...others].some((line) => line.points.length)) return [[], [], [], [], ...others.map(() => [])];
  return uPlot.join([columns(all.points, [0, 1, 2]), ...others.map((line) => columns(line.points, [0]))]);
}

const [loss, tick] = [(it) => fixed(it, 3), (it) => fixed(it, 2)];
const small = (it) => (it || it === 0 ? String(Number(it.toPrecision(3))) : "-");
const KINDS = [
  { box: "c-loss", curve: "loss", title: "Training loss", all: "mean", format: loss, tick },
  { box: "c-validation", curve: "validation_loss", title: "Validation loss", all: "mean", format: loss, tick, byRound: true },
  { box: "c-speed", curve: "tokens_per_second", title: "Throughput", all: "sum", format: speed, tick: speed, fromZero: true },
  { box: "c-rate", curve: "learning_rate", title: "Learning rate", all: "all sites", format: small, tick: small, fromZero: true, alone: true },
  { box: "c-norm", curve: "gradient_norm", title: "Gradient norm", all: "mean", format: small, tick: small, fromZero: true },
];

export class Charts {
  constructor(chosen) {
    this.chosen = chosen;
    this.earlier = new Earlier(() => this.draw(true));
    this.charts = KINDS.map((kind) => new Chart(kind));
    this.sites = new Map();
    this.seen = 0;
    this.boot = "";
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
    for (const control of ["axis", "smoothing"]) $(control).addEventListener("input", () => this.draw(false));
  }

  // Curves of the chosen sites are asked for: they are not sent to everybody.
  async show(state) {
    this.state = this.earlier.state = state;
    await this.refresh();
    this.draw(false);
  }

  async refresh() {
    const nodes = this.chosen.nodes();
    const anew = this.boot !== this.state.boot || nodes.some((node) => !this.sites.has(node));
    if (anew) this.sites.clear();
    if (!nodes.length) return;
    const told = await ask(`/api/curves?nodes=${nodes.map(encodeURIComponent).join(",")}&since=${anew ? 0 : this.seen}`);
    for (const [node, curves] of Object.entries(told.curves)) {
      const before = this.sites.get(node) ?? {};
      this.sites.set(node, Object.fromEntries(Object.entries(curves).map(([name, points]) => [name, joined(before[name], points)])));
    }
    Object.assign(this, { seen: told.stamp, boot: told.boot });
  }

  draw(again) {
    if (!this.state) return;
    const [keep, axis] = [Number($("smoothing").value), new Axis(this.state.curves, $("axis").value)];
    say($("smoothing-said"), keep ? fixed(keep, 2) : "none");
    $("h-rate").closest("section").hidden = this.state.totals.learning_rate === null;
    $("h-norm").closest("section").hidden = !this.state.curves.gradient_norm?.size;
    for (const chart of this.charts) {
      const nodes = chart.alone ? [] : byName(this.state, this.chosen.nodes());
      const all = { name: chart.all, colour: colour("text"), points: this.points(chart, axis, this.state.curves), now: this.state.totals[chart.curve] };
      chart.show([all, ...nodes.map((node) => this.line(chart, axis, node)), ...this.before(chart, axis)], axis, keep, again);
    }
  }

  // The earlier run that this one is compared with, if there is one.
  before(chart, axis) {
    if (!this.earlier.curves) return [];
    const curves = this.earlier.shifted(this.state.curves);
    const points = this.points(chart, new Axis(curves, axis.key), curves);
    return points.length ? [{ name: this.earlier.name, slot: "-earlier", colour: colour("muted"), dash: [5, 4], points }] : [];
  }

  line(chart, axis, node) {
    const slot = this.chosen.slot(node);
    return { name: nameOf(this.state, node), slot, colour: colour(`s${slot}`), points: this.points(chart, axis, this.sites.get(node)), now: this.state.sites.get(node)?.[chart.curve] };
  }

  points({ curve, byRound }, axis, curves) {
    const points = inOrder(curves?.[curve] ?? new Map());
    return inOrder(new Map(points.map(([x, values]) => [byRound ? axis.ofRound(x) : axis.ofTime(x), values])));
  }
}
