// What happened, the newest first, with a filter.
import { $, make } from "./dom.js";
import { clock, moment } from "./format.js";

const SHOWN = 150;

export class Events {
  constructor() {
    this.state = null;
    this.newest = "";
    $("filter").addEventListener("input", () => this.draw());
    $("level").addEventListener("change", () => this.draw());
  }

  show(state) {
    this.state = state;
    const newest = `${state.boot} ${Math.max(0, ...state.events.map((event) => event.stamp))}`;
    if (newest === this.newest) return;
    this.newest = newest;
    this.draw();
  }

  draw() {
    const [text, level] = [$("filter").value.trim().toLowerCase(), Number($("level").value)];
    const fit = (this.state?.events ?? []).filter((event) => event.level >= level && `${event.name} ${event.text}`.toLowerCase().includes(text));
    $("events").replaceChildren(...fit.slice(-SHOWN).reverse().map(item));
    $("no-events").hidden = fit.length > 0;
  }
}

function item(event) {
  const grade = event.level >= 40 ? "error" : event.level >= 30 ? "warning" : "";
  const time = make("time", { textContent: clock(event.time), title: moment(event.time), dateTime: new Date(1000 * event.time).toISOString() });
  const what = make("span", { className: "what", textContent: grade ? `${grade}: ${event.text}` : event.text });
  return make("li", { className: grade }, time, make("span", { className: "who", textContent: event.name || "run" }), what);
}
