// Curves, drawn by uPlot: the run in all (with the span from least to greatest), and the sites that were chosen.
import { $, colour, make, order, say } from "./dom.js";
import { clock, count, fixed, moment, speed } from "./format.js";
import { ask } from "./feed.js";
import { inOrder, joined, nameOf } from "./store.js";

const HEIGHT = 220;

class Chart {
  constructor(box, total, format, axis, byTime) {
    Object.assign(this, { total, format, axis, byTime, fromZero: format === speed, names: "", plot: null });
    this.box = make("div", { className: "plot-box" });
    this.keys = make("ul", { className: "keys" });
    box.append(this.box, this.keys);
    this.box.setAttribute("role", "img");
    new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height: HEIGHT })).observe(this.box);
  }

  // lines: [{ name, colour, points: [[x, [mean, min, max]]], now }], the first one that of all sites.
  // now: the newest value, as the table and the tiles show it; the last point is a mean.
  show(lines, again) {
    const [all, ...others] = lines;
    const tables = [columns(all.points, [0, 1, 2]), ...others.map((line) => columns(line.points, [0]))];
    const data = lines.some((line) => line.points.length) ? uPlot.join(tables) : [[], [], [], [], ...others.map(() => [])];
    const names = lines.map((line) => line.name).join("\n");
    if (again || names !== this.names || !this.plot) this.build(lines, data);
    else this.plot.setData(data);
    Object.assign(this, { names, lines });
    this.tell(lines, null);
  }

  build(lines, data) {
    this.plot?.destroy();
    this.lines = lines;
    order(this.keys, lines.map((line, at) => make("li", {}, make("i", { className: at ? `s${line.slot}` : "s-all" }), line.name, make("b"))));
    const quiet = { show: true, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
    const line = ({ colour: stroke }, width) => ({ stroke, width, spanGaps: true, points: { show: false } });
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const [all, ...others] = lines;
    this.plot = new uPlot({
      width: this.box.clientWidth || 300,
      height: HEIGHT,
      padding: [10, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 5 } },
      scales: { x: { time: this.byTime }, y: this.fromZero ? { range: (_, __, most) => [0, 1.1 * (most || 1)] } : {} },
      axes: [{ ...axis, grid: { show: false }, size: 30, space: 64, values: (_, values, _axis, _space, step) => values.map((it) => this.place(it, step)) },
        { ...axis, size: 54, values: (_, values) => values.map(this.axis) }],
      series: [{}, line(all, 2), quiet, quiet, ...others.map((it) => line(it, 1.25))],
      bands: [{ series: [3, 2], fill: `${all.colour}1c` }],
      hooks: { setCursor: [(plot) => this.tell(this.lines, plot.cursor.idx)] },
    }, data, this.box);
  }

  place(value, step) {
    if (!this.byTime) return Number.isInteger(value) ? count(value) : "";
    return step >= 86_400 ? moment(value).slice(0, 5) : clock(value).slice(0, step < 60 ? 8 : 5);
  }

  // Values at the cursor, or the newest ones.
  tell(lines, at) {
    const values = lines.map(({ now }, line) => {
      if (now !== undefined && (at === null || at === undefined)) return now;
      const column = this.plot.data[line ? line + 3 : 1];
      return at === null || at === undefined ? column.findLast((it) => it !== null && it !== undefined) : near(column, at);
    });
    values.forEach((value, line) => say(this.keys.children[line].lastElementChild, this.format(value)));
    this.box.setAttribute("aria-label", `${this.total}: ${lines.map((line, at) => `${line.name} ${this.format(values[at])}`).join(", ")}`);
  }
}

function near(column, at) {
  for (let back = at; back >= 0; back -= 1) if (column[back] !== null && column[back] !== undefined) return column[back];
  return null;
}

const columns = (points, picks) => [points.map(([x]) => x), ...picks.map((pick) => points.map(([, values]) => values[pick]))];

const [loss, tick] = [(it) => fixed(it, 3), (it) => fixed(it, 2)];
const KINDS = [["c-loss", "loss", "Training loss", loss, tick, true], ["c-validation", "validation_loss", "Validation loss", loss, tick, false],
  ["c-speed", "tokens_per_second", "Tokens a second", speed, speed, true]];

export class Charts {
  constructor(chosen) {
    this.chosen = chosen;
    this.charts = KINDS.map(([box, curve, title, format, axis, byTime]) => [curve, new Chart($(box), title, format, axis, byTime)]);
    this.sites = new Map();
    this.seen = 0;
    this.boot = "";
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
  }

  // Curves of the chosen sites are asked for: they are not sent to everybody.
  async show(state) {
    this.state = state;
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
    for (const [curve, chart] of this.charts) {
      const all = { name: curve === "tokens_per_second" ? "sum" : "mean", colour: colour("text"), points: inOrder(this.state.curves[curve] ?? new Map()) };
      const lines = [all, ...this.chosen.nodes().map((node) => this.line(node, curve))];
      all.now = this.state.totals[curve];
      this.chosen.nodes().forEach((node, at) => (lines[at + 1].now = this.state.sites.get(node)?.[curve]));
      chart.show(lines, again);
    }
  }

  line(node, curve) {
    const slot = this.chosen.slot(node);
    return { name: nameOf(this.state, node), slot, colour: colour(`s${slot}`), points: inOrder(this.sites.get(node)?.[curve] ?? new Map()) };
  }
}
