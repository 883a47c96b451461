// Who talks to whom: a map for few sites, a table for any number of them.
import { $, cells, make, order } from "./dom.js";
import { bytes, rate, seconds, several } from "./format.js";
import { ask } from "./feed.js";
import { nameOf } from "./store.js";

const FEW = 24;
const ROOMY = 6; // up to so many sites lines do not hide each other
const [WIDTH, HEIGHT] = [560, 380];

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

export class Links {
  constructor() {
    this.nodes = "";
    this.select = $("links-of").querySelector("select");
    this.select.addEventListener("change", () => this.ofOne());
  }

  show(state) {
    this.state = state;
    const few = state.sites.size <= FEW;
    $("links-of").hidden = few;
    $("links-legend").hidden = !few;
    $("map").hidden = !few;
    if (!few) return this.offer();
    const links = [...state.links.values()];
    const drawn = JSON.stringify([[...state.sites.values()].map((site) => [site.name, site.state]), links.map((link) => link.stamp)]);
    if (drawn === this.drawn) return undefined;
    this.drawn = drawn;
    this.draw([...state.sites.values()].sort((one, other) => one.name.localeCompare(other.name)), links);
    return this.table(links);
  }

  // Many sites: one of them at a time.
  offer() {
    $("links-all").open = true;
    const sites = [...this.state.sites.values()];
    const nodes = sites.map((site) => site.node).join();
    if (nodes === this.nodes) return;
    this.nodes = nodes;
    const chosen = this.select.value;
    sites.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
    this.select.replaceChildren(...sites.map((site) => make("option", { value: site.node, textContent: site.name, selected: site.node === chosen })));
    this.ofOne();
  }

  async ofOne() {
    try {
      this.table((await ask(`/api/links?node=${encodeURIComponent(this.select.value)}`)).links);
    } catch {
      this.nodes = ""; // the line is down: ask again when it is up
    }
  }

  table(links) {
    const named = links.map((link) => [nameOf(this.state, link.node), nameOf(this.state, link.peer), bandwidth(link), seconds(link.round_trip), bytes(link.bytes_sent)]);
    named.sort((one, other) => `${one[0]} ${one[1]}`.localeCompare(`${other[0]} ${other[1]}`, "en", { numeric: true }));
    $("links").tBodies[0].replaceChildren(...named.map((texts) => cells(null, texts)));
    $("no-links").hidden = named.length > 0;
    $("links-all").hidden = !named.length;
  }

  draw(sites, links) {
    if (!sites.length) return order($("map"), []);
    const places = new Map(sites.map((site, at) => [site.node, place(at, sites.length)]));
    const drawn = links.filter((link) => places.has(link.node) && places.has(link.peer)).map((link) => arc(this.state, link, places, sites.length));
    const circles = sites.flatMap((site) => circle(site, places.get(site.node)));
    const picture = svg("svg", { viewBox: frame([...places.values()]), role: "img", "aria-label": `Map of ${several(sites.length, "site")} and ${several(links.length, "link")}; the table has the same in numbers` });
    picture.append(...drawn.flat(), ...circles);
    if (sites.length > ROOMY) lightUp(picture);
    return order($("map"), [picture]);
  }
}

function place(at, count) {
  const angle = (2 * Math.PI * at) / count - Math.PI / 2;
  const [wide, high] = count === 1 ? [0, 0] : [190, 135];
  return [WIDTH / 2 + wide * Math.cos(angle), HEIGHT / 2 + 8 + high * Math.sin(angle)];
}

// Only as high as what is in it.
function frame(points) {
  const heights = points.map(([, y]) => y);
  const [top, bottom] = [Math.min(...heights) - 48, Math.max(...heights) + 48];
  return `0 ${top} ${WIDTH} ${bottom - top}`;
}

const distance = (trip) => (trip === null ? "unknown" : trip < 0.04 ? "near" : trip < 0.15 ? "middle" : "far");
const bandwidth = (link) => (link.bandwidth === null ? "not measured" : rate(link.bandwidth));
const thickness = (bandwidth) => Math.max(1.2, Math.min(8, 1.2 + 2 * Math.log10(1 + (8 * (bandwidth ?? 0)) / 1e6)));

// Both ways of a pair are bent to their own side; few sites have room for figures.
function arc(state, link, places, count) {
  const [[x1, y1], [x2, y2]] = [places.get(link.node), places.get(link.peer)];
  const length = Math.hypot(x2 - x1, y2 - y1) || 1;
  const [across, down] = [(y1 - y2) / length, (x2 - x1) / length];
  const bend = Math.min(34, length / 6);
  const [x, y] = [(x1 + x2) / 2 + across * bend, (y1 + y2) / 2 + down * bend];
  const title = `${nameOf(state, link.node)} to ${nameOf(state, link.peer)}: ${bandwidth(link)}, ${seconds(link.round_trip)}, ${bytes(link.bytes_sent)} sent`;
  const crowd = Math.min(1, ROOMY / count);
  const path = svg("path", { d: `M${x1},${y1} Q${x},${y} ${x2},${y2}`, class: distance(link.round_trip), "stroke-width": (thickness(link.bandwidth) * crowd).toFixed(1), opacity: (0.85 * crowd * crowd).toFixed(2) });
  Object.assign(path.dataset, { from: link.node, to: link.peer });
  path.append(svg("title", {}, title));
  if (count > 4 || link.bandwidth === null) return [path];
  const off = bend / 2 + 12 + 30 * Math.abs(across);
  const [tx, ty] = [(x1 + x2) / 2 + across * off, (y1 + y2) / 2 + down * off];
  return [path, svg("text", { x: tx, y: ty, "text-anchor": "middle", "dominant-baseline": "middle", class: "fine" }, rate(link.bandwidth))];
}

// Among many lines those of the site under the pointer stand out.
function lightUp(picture) {
  picture.addEventListener("pointerover", (event) => {
    const { node } = event.target.dataset;
    for (const path of picture.querySelectorAll("path")) {
      path.classList.toggle("lit", Boolean(node) && [path.dataset.from, path.dataset.to].includes(node));
    }
  });
}

function circle(site, [x, y]) {
  const dot = svg("circle", { cx: x, cy: y, r: 10, "data-state": site.state, "data-node": site.node });
  dot.append(svg("title", {}, `${site.name}: ${site.state}`));
  const side = Math.abs(x - WIDTH / 2) < 40 ? 0 : Math.sign(x - WIDTH / 2);
  const away = y > HEIGHT / 2 + 8 ? 28 : -20;
  const place = { x: x + 17 * side, y: side ? y + 4 + away / 4 : y + away, "text-anchor": ["end", "middle", "start"][side + 1] };
  return [dot, svg("text", place, site.name.length > 18 ? `${site.name.slice(0, 17)}…` : site.name)];
}
