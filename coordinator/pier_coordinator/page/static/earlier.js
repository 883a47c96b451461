// An earlier run, for comparison: curves that were saved from its page, and are read from a file. Nothing is sent anywhere.
import { $, say } from "./dom.js";
import { inOrder } from "./store.js";
import { save } from "./export.js";

const FORMAT = "pier-curves-1";
const MOST_BYTES = 4_000_000;

export class Earlier {
  constructor(onChange) {
    Object.assign(this, { curves: null, name: "", state: null });
    $("save-curves").addEventListener("click", () => this.state && save(new Blob([JSON.stringify(kept(this.state))], { type: "application/json" }), `${this.state.run.name || "run"}.curves.json`));
    $("compare").addEventListener("click", () => (this.curves ? this.forget(onChange) : $("compare-file").click()));
    $("compare-file").addEventListener("change", () => this.read($("compare-file").files[0]).catch((error) => this.refuse(error)).finally(onChange));
  }

  async read(file) {
    if (!file) return;
    if (file.size > MOST_BYTES) throw new Error("the file is too large");
    const told = JSON.parse(await file.text());
    if (told?.format !== FORMAT) throw new Error("these are no curves that this page has saved");
    this.curves = Object.fromEntries(Object.entries(told.curves).map(([name, points]) => [name, curve(points)]));
    this.name = String(told.name || "earlier run").slice(0, 64);
    $("compare-file").value = "";
    say($("compare"), "Stop comparing");
    say($("compare-said"), `with ${this.name}`);
  }

  refuse(error) {
    $("compare-file").value = "";
    say($("compare-said"), `cannot be compared: ${error.message}`);
  }

  forget(onChange) {
    this.curves = null;
    say($("compare"), "Compare…");
    say($("compare-said"), "");
    onChange();
  }

  // On an axis of time both runs begin together.
  shifted(curves) {
    const [here, there] = [began(curves), began(this.curves)];
    if (here === null || there === null) return this.curves;
    const byTime = (points) => new Map([...points].map(([time, values]) => [time - there + here, values]));
    return Object.fromEntries(Object.entries(this.curves).map(([name, points]) => [name, name === "validation_loss" ? points : byTime(points)]));
  }
}

const began = (curves) => inOrder(curves.inner_step ?? new Map())[0]?.[0] ?? null;

const kept = ({ run, curves }) => ({ format: FORMAT, name: run.name, curves: Object.fromEntries(Object.entries(curves).map(([name, points]) => [name, inOrder(points)])) });

function curve(points) {
  const good = (it) => Array.isArray(it) && Array.isArray(it[1]) && it[1].length === 3 && [it[0], ...it[1]].every(Number.isFinite);
  if (!Array.isArray(points) || !points.every(good)) throw new Error("a curve in it is damaged");
  return new Map(points);
}
