// The table of sites: searched, sorted, in pages. Rows keep their elements, so that focus stays where it is.
import { $, cell, make, mark, order, say } from "./dom.js";
import { age, bytes, count, fixed, percent, rate, several, speed } from "./format.js";
import { now } from "./store.js";

const PAGE = 15;
const COLUMNS = [
  ["name", "Site"], ["state", "State"], ["round", "Round"], ["lag", "Late"], ["tokens_per_second", "Tokens/s"], ["loss", "Loss"],
  ["utilisation", "Utilisation"], ["mfu", "MFU"], ["cpu", "CPU"], ["memory", "Memory"], ["uplink", "Uplink"], ["bytes_sent", "Sent"], ["heard", "Heard"],
];
const HINTS = { utilisation: "part of the time spent in inner steps", mfu: "part of the devices' peak FLOPs that the model takes", cpu: "part of the machine's cores that is busy", memory: "of the daemon and its workers, in the machine's main memory" };
const TEXTS = {
  round: (site) => count(site.round),
  lag: (site) => (site.lag ? several(site.lag, "round") : "-"),
  tokens_per_second: (site) => speed(site.tokens_per_second),
  loss: (site) => fixed(site.loss, 3),
  utilisation: (site) => percent(site.utilisation),
  mfu: (site) => percent(site.mfu),
  cpu: (site) => percent(site.cpu),
  memory: (site) => bytes(site.memory),
  uplink: (site) => rate(site.uplink),
  bytes_sent: (site) => bytes(site.bytes_sent),
};

export class SitesTable {
  constructor(chosen, onAct) {
    Object.assign(this, { chosen, onAct, rows: new Map(), key: "name", up: true, page: 0, state: null });
    this.table = $("sites");
    this.head();
    $("search").addEventListener("input", () => { this.page = 0; this.show(this.state); });
    $("previous").addEventListener("click", () => { this.page -= 1; this.show(this.state); });
    $("next").addEventListener("click", () => { this.page += 1; this.show(this.state); });
  }

  head() {
    const heads = COLUMNS.map(([key, title], at) => {
      const button = make("button", { type: "button", textContent: title });
      button.addEventListener("click", () => this.sortBy(key));
      const head = make("th", { scope: "col", className: at > 1 ? "n" : "", title: HINTS[key] ?? "" }, button);
      head.setAttribute("role", "columnheader");
      return head;
    });
    this.table.tHead.rows[0].append(...heads);
    this.heads = heads;
    this.sortBy("name", true);
  }

  sortBy(key, up = key === this.key ? !this.up : key === "name" || key === "state") {
    Object.assign(this, { key, up });
    COLUMNS.forEach(([it], at) => {
      if (it === key) this.heads[at].setAttribute("aria-sort", up ? "ascending" : "descending");
      else this.heads[at].removeAttribute("aria-sort");
    });
    if (this.state) this.show(this.state);
  }

  show(state) {
    this.state = state;
    const found = this.found([...state.sites.values()]);
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    this.page = Math.max(0, Math.min(this.page, pages - 1));
    const visible = found.slice(this.page * PAGE, (this.page + 1) * PAGE);
    this.showPager(pages, found.length);
    const views = visible.map((site) => this.view(site));
    visible.forEach((site, at) => this.fill(views[at], site, now(state)));
    order(this.table.tBodies[0], views.map((view) => view.row));
    $("no-sites").hidden = visible.length > 0;
    say($("no-sites"), state.sites.size ? "No site is like that." : "No site has come yet: pier-coordinator invite lets one in.");
  }

  found(sites) {
    const text = $("search").value.trim().toLowerCase();
    const fit = text ? sites.filter((site) => `${site.name} ${site.state} ${site.node}`.toLowerCase().includes(text)) : sites;
    const way = this.up ? 1 : -1;
    return fit.sort((one, other) => way * compare(one[this.key], other[this.key]) || compare(one.name, other.name));
  }

  showPager(pages, found) {
    $("pager").hidden = pages < 2;
    say($("page-of"), `${this.page + 1} of ${pages} · ${several(found, "site")}`);
    $("previous").disabled = this.page === 0;
    $("next").disabled = this.page >= pages - 1;
  }

  view(site) {
    if (!this.rows.has(site.node)) this.rows.set(site.node, this.blank(site.node));
    return this.rows.get(site.node);
  }

  blank(node) {
    const box = make("input", { type: "checkbox" });
    box.addEventListener("change", () => { if (!this.chosen.set(node, box.checked)) box.checked = false; });
    const [swatch, name, word] = [make("span", { className: "swatch" }), make("span"), make("span", { className: "state" })];
    const [label, device] = [make("label", {}, box, swatch, name), make("small", { className: "device" })];
    const act = make("button", { type: "button", className: "quiet", textContent: "⋯", hidden: true });
    act.addEventListener("click", () => this.onAct(this.state.sites.get(node)));
    const tds = COLUMNS.map(([key, title], at) => cell(title, at > 1 ? "n" : { name: "name", state: "state-cell" }[key]));
    tds[0].append(label, device);
    tds[1].append(word, " ", act);
    const row = make("tr", {}, ...tds);
    row.setAttribute("role", "row");
    return { row, tds, box, swatch, name, device, word, act };
  }

  fill(view, site, time) {
    const slot = this.chosen.slot(site.node);
    say(view.name, site.name);
    say(view.device, [site.device, site.device_memory ? `${bytes(site.device_memory)} in use` : ""].filter(Boolean).join("; "));
    view.row.title = site.address ? `${site.address} ${site.transport} ${site.version}\n${site.node}` : site.node;
    view.box.checked = slot >= 0;
    view.box.setAttribute("aria-label", `show ${site.name} in the charts`);
    view.swatch.className = slot >= 0 ? `swatch s${slot}` : "swatch";
    say(view.word, site.activity && site.activity !== "train" && !["done", "revoked"].includes(site.state) ? `${site.state} (${site.activity})` : site.state);
    mark(view.word, "state", site.state);
    view.act.hidden = !document.body.dataset.operator || site.state === "revoked";
    view.act.setAttribute("aria-label", `actions on ${site.name}`);
    COLUMNS.forEach(([key], at) => { if (TEXTS[key]) say(view.tds[at], TEXTS[key](site)); });
    say(view.tds.at(-1), site.heard ? `${age(Math.max(0, time - site.heard))} ago` : "-");
    view.tds[3].classList.toggle("late", site.lag > 1);
  }
}

function compare(one, other) {
  if (typeof one === "string") return one.localeCompare(other ?? "", "en", { numeric: true });
  return (one ?? -Infinity) === (other ?? -Infinity) ? 0 : (one ?? -Infinity) < (other ?? -Infinity) ? -1 : 1;
}
