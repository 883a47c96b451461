// What the model writes as it is trained, the newest first.
import { $, make, order } from "./dom.js";
import { count } from "./format.js";
import { nameOf } from "./store.js";

export class Samples {
  constructor() {
    this.items = new WeakMap();
  }

  show(state) {
    $("h-samples").closest("section").hidden = !state.samples.length;
    order($("samples"), [...state.samples].reverse().map((sample) => this.item(state, sample)));
  }

  item(state, sample) {
    if (!this.items.has(sample)) {
      const who = make("b", { textContent: `round ${count(sample.round)}`, title: `written at ${nameOf(state, sample.node)}` });
      this.items.set(sample, make("li", {}, who, make("span", { textContent: sample.text })));
    }
    return this.items.get(sample);
  }
}
