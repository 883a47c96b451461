// The run's configuration, as run.toml has it: section by section, each key with its value, as text.
import { $, make } from "./dom.js";

let shown = null;

export function showConfig({ config }) {
  $("h-config").closest("section").hidden = !config;
  if (!config || config === shown) return;
  shown = config;
  $("config").replaceChildren(...Object.entries(config).map(([name, section]) => make("div", {}, make("h3", { textContent: `[${name}]` }), list(section))));
}

function list(section) {
  return make("dl", {}, ...Object.entries(section).flatMap(([key, value]) => [make("dt", { textContent: key }), make("dd", { textContent: said(value) })]));
}

function said(value) {
  if (typeof value === "string") return value || "-";
  return JSON.stringify(value).replaceAll(/[,:]/g, "$& ");
}
