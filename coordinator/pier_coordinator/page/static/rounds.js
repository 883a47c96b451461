// Rounds: which of them are shown, what is asked for, and the words and tables around the drawing.
import { $, cells, order, say, seldom } from "./dom.js";
import { ask } from "./feed.js";
import { count, seconds, several } from "./format.js";
import { inOrder } from "./store.js";
import { Timeline, Overview, PARTS } from "./timeline.js";

export class Rounds {
  constructor() {
    if (innerWidth < 640) $("span").value = "10";
    this.follows = true;
    this.told = { sites: [], oldest: 1 };
    this.timeline = new Timeline($("timeline"));
    this.overview = new Overview($("overview"), (round) => this.goTo(round));
    this.fetch = seldom(1000, () => this.refresh());
    $("span").addEventListener("change", () => this.refresh());
    $("until").addEventListener("input", () => this.goTo(Number($("until").value)));
    const again = () => this.draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new ResizeObserver(again).observe($("timeline"));
  }

  show(state) {
    const newer = state.totals.round !== this.state?.totals.round || state.boot !== this.boot;
    Object.assign(this, { state, boot: state.boot });
    const last = Math.max(1, state.totals.round);
    $("until").max = String(last);
    if (this.follows) $("until").value = String(last);
    this.sayUntil();
    if (newer) this.fetch();
  }

  goTo(round) {
    const last = this.state?.totals.round ?? 1;
    $("until").value = String(round);
    this.follows = round >= last;
    this.sayUntil();
    this.fetch();
    this.draw();
  }

  sayUntil() {
    const round = Number($("until").value);
    say($("until-said"), this.follows ? "the newest" : `round ${count(round)}`);
    $("until").setAttribute("aria-valuetext", `round ${round}`);
  }

  // First and last round that are shown.
  window() {
    const [span, last] = [Number($("span").value), Number($("until").value)];
    return span ? [Math.max(1, last - span + 1), last] : [1, this.state.totals.round];
  }

  async refresh() {
    if (!this.state?.totals.round) return this.draw();
    const [first, last] = this.window();
    try {
      this.told = await ask(`/api/rounds?first=${first}&last=${last}`);
    } catch {
      return undefined; // the line is down: the stream says so, and asks again when it is up
    }
    return this.draw();
  }

  draw() {
    if (!this.state) return;
    const [first, last] = this.window();
    const buckets = inOrder(this.state.rounds.rows).map(([, row]) => row);
    const width = this.state.rounds.width;
    const detailed = first >= this.told.oldest && this.told.sites.length > 0;
    const seen = buckets.filter((row) => row.first + width > first && row.first <= last);
    if (detailed) this.timeline.drawSites(this.told.sites);
    else this.timeline.drawSums(seen, width);
    this.overview.draw(buckets, width, first, last);
    say($("rounds-words"), detailed ? this.told.words : this.wordsOf(seen));
    this.table();
  }

  // Of rounds so long ago that only their sums are kept.
  wordsOf(rows) {
    if (!rows.length) return "No rounds yet.";
    const times = new Map();
    for (const row of rows) times.set(row.slowest, (times.get(row.slowest) ?? 0) + 1);
    const [[node, most]] = [...times].sort((one, other) => other[1] - one[1]);
    const mean = rows.reduce((sum, row) => sum + total(row), 0) / rows.length;
    const longest = Math.max(...rows.map((row) => row.longest));
    const name = this.state.sites.get(node)?.name ?? node.slice(0, 12);
    return `A round took ${seconds(mean)} in the mean, the longest ${seconds(longest)}; most often the slowest: ${name} (${most} of ${several(rows.length, "group")} of ${several(this.state.rounds.width, "round")}). Parts are shown site by site for the last 200 rounds.`;
  }

  table() {
    const rows = this.told.sites.map((site) => {
      const means = PARTS.map((_, part) => seconds(site.segments.reduce((sum, row) => sum + row[part + 2], 0) / (site.segments.length || 1)));
      return cells(null, [site.name, count(site.segments.length), ...means]);
    });
    order($("rounds-table").tBodies[0], rows);
  }
}

const total = (row) => PARTS.reduce((sum, part) => sum + row[part], 0);
