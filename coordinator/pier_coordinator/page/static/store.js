// What the page knows: everything once, and after that what changed (see read_model.py, changes).
export function empty() {
  return { boot: "", public: false, stamp: 0, now: 0, heardAt: 0, run: {}, totals: {}, sites: new Map(), links: new Map(), config: null, experts: null, pipeline: null, events: [], samples: [], alerts: [], curves: {}, rounds: { width: 1, rows: new Map() } };
}

const MOST_EVENTS = 500;
const MOST_SAMPLES = 20;

export function take(state, told) {
  if (told.full) Object.assign(state, empty());
  for (const key of ["boot", "stamp", "now", "run", "totals", "alerts"]) state[key] = told[key];
  state.public = Boolean(told.public);
  if (told.config) state.config = told.config;
  if (told.experts) state.experts = told.experts;
  if (told.pipeline) state.pipeline = told.pipeline;
  state.heardAt = performance.now();
  for (const site of told.sites) state.sites.set(site.node, { ...state.sites.get(site.node), ...site });
  for (const link of told.links) state.links.set(`${link.node} ${link.peer}`, link);
  for (const [key, link] of state.links) if (revoked(state, link.node) || revoked(state, link.peer)) state.links.delete(key);
  state.events = [...state.events, ...told.events].sort((one, other) => one.time - other.time).slice(-MOST_EVENTS);
  for (const [name, points] of Object.entries(told.curves)) {
    state.curves[name] = joined(state.curves[name], points);
  }
  takeRounds(state.rounds, told.rounds);
  state.samples = [...state.samples, ...told.samples].slice(-MOST_SAMPLES);
}

const revoked = (state, node) => state.sites.get(node)?.state === "revoked";

// A curve is a map from its place (a time, a round) to [mean, min, max].
export function joined(curve, points) {
  const all = !curve || points.reset ? new Map() : curve;
  points.x.forEach((x, at) => all.set(x, [points.mean[at], points.min[at], points.max[at]]));
  return all;
}

function takeRounds(rounds, told) {
  if (told.reset) rounds.rows.clear();
  rounds.width = told.width;
  for (const row of told.rows) rounds.rows.set(row.first, row);
}

export const inOrder = (map) => [...map.entries()].sort((one, other) => one[0] - other[0]);

// Seconds since the epoch by the coordinator's clock.
export const now = (state) => state.now + (performance.now() - state.heardAt) / 1000;

export const byName = (state, nodes) => [...nodes].sort((one, other) => nameOf(state, one).localeCompare(nameOf(state, other), "en", { numeric: true }));

export const nameOf = (state, node) => state.sites.get(node)?.name ?? node.slice(0, 12);
