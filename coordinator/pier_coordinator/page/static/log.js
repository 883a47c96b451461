// The last lines of a site's log, while they are looked at.
import { $, make, order } from "./dom.js";
import { clock, moment } from "./format.js";
import { ask } from "./feed.js";

const EVERY = 2000;

export class Log {
  constructor() {
    this.options = new Map();
    $("log").addEventListener("toggle", () => this.refresh());
    $("log-of").addEventListener("change", () => this.refresh());
    setInterval(() => this.refresh(), EVERY);
  }

  // The public page has no logs.
  show(state) {
    $("h-log").closest("section").hidden = state.public || !state.sites.size;
    const sites = [...state.sites.values()].sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
    order($("log-of"), sites.map((site) => this.option(site)));
  }

  option({ node, name }) {
    if (!this.options.has(node)) this.options.set(node, make("option", { value: node }));
    return Object.assign(this.options.get(node), { textContent: name });
  }

  async refresh() {
    const node = $("log-of").value;
    if (!$("log").open || !node) return;
    const { lines } = await ask(`/api/log?node=${encodeURIComponent(node)}`).catch(() => ({ lines: null }));
    if (!lines || node !== $("log-of").value) return;
    const box = $("log-lines");
    const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
    box.replaceChildren(...lines.map(item));
    $("no-lines").hidden = lines.length > 0;
    if (atEnd) box.scrollTop = box.scrollHeight;
  }
}

function item({ time, level, text }) {
  const grade = level >= 40 ? "error" : level >= 30 ? "warning" : "";
  const when = make("time", { textContent: clock(time), title: moment(time), dateTime: new Date(1000 * time).toISOString() });
  return make("li", { className: grade }, when, make("span", { textContent: grade ? `${grade}: ${text}` : text }));
}
