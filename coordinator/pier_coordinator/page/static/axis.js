// The x axis of all charts: time, steps, tokens or rounds. The run's own progress, known by time, converts between them.
import { big, clock, count, moment } from "./format.js";
import { inOrder } from "./store.js";

export const NAMES = { time: "time", inner_step: "step", tokens: "tokens", round: "round" };

export class Axis {
  constructor(curves, key) {
    Object.assign(this, { key, progress: along(curves[key]), rounds: along(curves.round) });
  }

  ofTime(time) {
    return this.key === "time" ? time : between(this.progress.times, this.progress.values, time);
  }

  ofRound(round) {
    return this.key === "round" ? round : this.ofTime(between(this.rounds.values, this.rounds.times, round));
  }

  // A label under the axis; `step` is the distance between two of them.
  label(value, step) {
    if (this.key === "time") return step >= 86_400 ? moment(value).slice(0, 5) : clock(value).slice(0, step < 60 ? 8 : 5);
    if (this.key === "tokens") return big(value);
    return Number.isInteger(value) ? count(value) : "";
  }
}

function along(curve) {
  const points = inOrder(curve ?? new Map());
  return { times: points.map(([time]) => time), values: points.map(([, [, , most]]) => most) };
}

// The value at a place, on the straight line between its neighbours. Both lists grow.
function between(places, values, place) {
  if (!places.length) return place;
  let [low, high] = [0, places.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < place) low = middle + 1;
    else high = middle;
  }
  if (low === 0) return values[0];
  if (low === places.length) return values[low - 1];
  const part = (place - places[low - 1]) / (places[low] - places[low - 1] || 1);
  return values[low - 1] + part * (values[low] - values[low - 1]);
}

// An exponential moving mean with the weight `keep` on what came before; corrected for its start.
export function smoothed(points, keep) {
  if (!keep) return points;
  let [sum, weight] = [0, 0];
  return points.map(([x, [mean, ...rest]]) => {
    [sum, weight] = [keep * sum + (1 - keep) * mean, keep * weight + (1 - keep)];
    return [x, [sum / weight, ...rest]];
  });
}
