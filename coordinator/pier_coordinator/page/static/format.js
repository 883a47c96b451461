// Numbers as people read them, with their units; as node/pier_node/units.py has them.
const UNKNOWN = "-";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const three = (value) => (value >= 1000 ? count(value) : String(Number(value.toPrecision(3))));

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN);
export const several = (value, thing, things = `${thing}s`) => `${count(value)} ${count(value) === "1" ? thing : things}`;
export const fixed = (value, digits) => (known(value) ? value.toFixed(digits) : UNKNOWN);
export const percent = (value) => (known(value) ? `${Math.round(100 * value)} %` : UNKNOWN);

function scaled(value, step, units) {
  if (!known(value)) return UNKNOWN;
  let unit = 0;
  while (value >= step * 0.9995 && unit < units.length - 1) { value /= step; unit += 1; }
  return `${three(value)}${units[unit] ? ` ${units[unit]}` : ""}`;
}

export const bytes = (value) => scaled(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const big = (value) => scaled(value, 1000, ["", "k", "M", "G", "T"]);
export const rate = (bytesASecond) => (known(bytesASecond) ? scaled((bytesASecond * 8) / 1e6, 1000, ["Mbit/s", "Gbit/s"]) : UNKNOWN);
export const speed = (value) => (known(value) ? (value < 100_000 ? count(value) : big(value)) : UNKNOWN);

export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  return value >= 1 ? `${three(value)} s` : `${three(1000 * value)} ms`;
}

// Seconds that something will take.
export function span(value) {
  if (!known(value)) return UNKNOWN;
  for (const [unit, size, longest] of [["s", 1, 120], ["min", 60, 7200], ["h", 3600, 172_800]]) {
    if (value < longest) return `${three(value / size)} ${unit}`;
  }
  return `${three(value / 86_400)} days`;
}

export function age(value) {
  if (!known(value)) return UNKNOWN;
  for (const [unit, longest, next] of [["s", 120, 60], ["min", 120, 60], ["h", 48, 24]]) {
    if (value < longest) return `${Math.round(value)} ${unit}`;
    value /= next;
  }
  return `${Math.round(value)} days`;
}

export const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
export const moment = (time) => new Date(1000 * time).toLocaleString("en-GB");
