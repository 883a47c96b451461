// Draws rounds: a row for each site by the clock; or, for long ago, a column for each group of rounds.
import { colour } from "./dom.js";
import { clock, count, seconds } from "./format.js";

export const PARTS = ["compute", "waiting", "exchange", "retry"];
const DRAWN = ["compute", "waiting", "retry", "exchange"]; // in the order in which they happen
const [ROW, GAP, FOOT, COLUMNS] = [24, 6, 20, 150];

class Canvas {
  constructor(box, height) {
    Object.assign(this, { box, height, canvas: box.querySelector("canvas") });
  }

  begin(height = this.height) {
    const [ratio, width] = [devicePixelRatio || 1, this.box.clientWidth];
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return [pen, width];
  }
}

export class Timeline extends Canvas {
  constructor(box) {
    super(box, COLUMNS);
    this.tip = box.querySelector(".tip");
    this.spots = [];
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  drawSites(sites) {
    const [pen, width] = this.begin(sites.length * (ROW + GAP) + FOOT);
    const gutter = Math.min(130, width * 0.26);
    const rows = sites.flatMap((site) => site.segments);
    const start = Math.min(...rows.map((row) => row[1] - lasted(row)));
    const scale = (width - gutter - 2) / (Math.max(...rows.map((row) => row[1])) - start || 1);
    this.spots = [];
    sites.forEach((site, at) => {
      const top = at * (ROW + GAP);
      pen.fillStyle = colour("text");
      pen.textAlign = "left";
      pen.fillText(cut(pen, site.name, gutter - 10), 0, top + ROW / 2);
      for (const row of site.segments) this.segment(pen, site.name, row, gutter + (row[1] - lasted(row) - start) * scale, top, scale);
    });
    this.times(pen, gutter, width, start, scale, sites.length * (ROW + GAP) + FOOT / 2);
  }

  segment(pen, name, row, left, top, scale) {
    const parts = Object.fromEntries(PARTS.map((part, at) => [part, row[at + 2]]));
    let x = left;
    for (const part of DRAWN) {
      pen.fillStyle = colours()[part];
      pen.fillRect(x, top, Math.max(0, parts[part] * scale - (part === "exchange" ? 1 : 0)), ROW);
      x += parts[part] * scale;
    }
    this.spots.push({ left, right: x, top, bottom: top + ROW, text: `${name}, round ${count(row[0])}, until ${clock(row[1])}\n${told(parts)}` });
  }

  times(pen, gutter, width, start, scale, y) {
    pen.fillStyle = colour("muted");
    const marks = Math.max(2, Math.floor((width - gutter) / 160));
    for (let at = 0; at <= marks; at += 1) {
      const x = gutter + ((width - gutter - 2) * at) / marks;
      pen.textAlign = at === 0 ? "left" : at === marks ? "right" : "center";
      pen.fillText(clock(start + (x - gutter) / scale), x, y);
    }
  }

  drawSums(rows, size) {
    const [pen, width] = this.begin(COLUMNS + FOOT);
    const most = Math.max(...rows.map(sum), 1e-9);
    const step = width / (rows.length || 1);
    this.spots = rows.map((row, at) => {
      column(pen, row, at * step, Math.max(1, step - (step > 4 ? 1 : 0)), COLUMNS, most);
      return { left: at * step, right: (at + 1) * step, top: 0, bottom: COLUMNS, text: `${span(row.first, row.first + size - 1)}, mean of all sites\n${told(row)}` };
    });
    pen.fillStyle = colour("muted");
    pen.textAlign = "left";
    if (rows.length) pen.fillText(`round ${count(rows[0].first)}`, 0, COLUMNS + FOOT / 2);
    pen.textAlign = "right";
    if (rows.length) pen.fillText(`round ${count(rows.at(-1).first + size - 1)}`, width, COLUMNS + FOOT / 2);
  }

  point(event) {
    const box = this.box.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const spot = this.spots.find((it) => x >= it.left && x < it.right && y >= it.top && y < it.bottom);
    this.tip.hidden = !spot;
    if (!spot) return;
    this.tip.textContent = spot.text;
    this.tip.style.left = `${Math.max(0, Math.min(x + 12, box.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${y + 16}px`;
  }
}

export class Overview extends Canvas {
  constructor(box, onRound) {
    super(box, 44);
    this.last = 1;
    const pick = (event) => onRound(Math.max(1, Math.min(this.last, Math.ceil((event.offsetX / box.clientWidth) * this.last))));
    box.addEventListener("pointerdown", (event) => { box.setPointerCapture(event.pointerId); pick(event); });
    box.addEventListener("pointermove", (event) => { if (event.buttons) pick(event); });
  }

  draw(rows, size, first, last) {
    const [pen, width] = this.begin();
    if (!rows.length) return;
    this.last = rows.at(-1).first + size - 1;
    const most = Math.max(...rows.map(sum), 1e-9);
    const x = (round) => ((round - 1) / this.last) * width;
    for (const row of rows) column(pen, row, x(Math.max(1, row.first)), Math.max(1, x(size + 1)), this.height, most);
    pen.strokeStyle = colour("text");
    pen.lineWidth = 1.5;
    pen.strokeRect(Math.min(x(first), width - 4) + 0.75, 0.75, Math.max(3, x(last + 1) - x(first) - 1.5), this.height - 1.5);
  }
}

function column(pen, row, left, width, height, most) {
  let bottom = height;
  for (const part of DRAWN) {
    const tall = (row[part] / most) * height;
    pen.fillStyle = colours()[part];
    pen.fillRect(left, bottom - tall, width, tall);
    bottom -= tall;
  }
}

// Reading a style is slow, and a drawing asks for thousands: once a frame is enough.
let palette = null;
function colours() {
  if (!palette) {
    palette = Object.fromEntries(PARTS.map((part) => [part, colour(part)]));
    requestAnimationFrame(() => { palette = null; });
  }
  return palette;
}

const span = (first, last) => (first === last ? `round ${count(first)}` : `rounds ${count(first)} to ${count(last)}`);
const lasted = (row) => row[2] + row[3] + row[4] + row[5];
const sum = (row) => PARTS.reduce((all, part) => all + row[part], 0);
const told = (parts) => PARTS.filter((part) => parts[part] > 0).map((part) => `${part} ${seconds(parts[part])}`).join("\n");

function cut(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}
