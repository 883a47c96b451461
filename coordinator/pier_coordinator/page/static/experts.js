// Experts: who trains what and what came out, as a table; and each site's work, planned and done, as a bar.
import { $, cell, make, mark, order, say } from "./dom.js";
import { count, span, fixed, percent, several } from "./format.js";

const COLUMNS = ["Domain", "State", "Site", "Size", "Steps", "Bits/byte", "Against parent", "Expected"];
const WORDS = { nobody: "no site can" };
const ENDED = ["accepted", "refused"];

export class Experts {
  constructor() {
    this.rows = new Map();
    this.lanes = new Map();
    const heads = COLUMNS.map((title, at) => {
      const head = make("th", { scope: "col", className: at > 3 ? "n" : "", textContent: title });
      head.setAttribute("role", "columnheader");
      return head;
    });
    $("experts").tHead.rows[0].append(...heads);
  }

  show({ experts }) {
    $("h-experts").closest("section").hidden = !experts;
    if (!experts || experts === this.shown) return;
    this.shown = experts;
    const rows = experts.rows;
    say($("experts-mode"), experts.mode);
    say($("experts-words"), words(experts));
    const complete = rows.every((row) => ENDED.includes(row.state));
    $("experts-serve").hidden = !complete;
    if (complete) say($("experts-command"), serving(rows));
    const inPlan = [...rows].sort((one, other) => one.number - other.number);
    order($("experts").tBodies[0], inPlan.map((row) => this.row(row)));
    const sites = [...new Set(rows.filter((row) => row.node).map((row) => row.node))];
    const lanes = sites.map((node) => rows.filter((row) => row.node === node));
    const longest = Math.max(experts.seconds ?? 0, ...lanes.map(total)) || 1;
    order($("schedule"), lanes.map((lane) => this.lane(lane, longest)).sort((one, other) => one.title.localeCompare(other.title)));
  }

  row(row) {
    if (!this.rows.has(row.number)) this.rows.set(row.number, blankRow());
    const { line, word, tds } = this.rows.get(row.number);
    const texts = [row.domain, null, row.site || "-", row.size, `${count(row.done)} of ${count(row.steps)}`, fixed(row.loss, 3), against(row), span(row.seconds)];
    texts.forEach((text, at) => { if (text !== null) say(tds[at], text); });
    say(word, WORDS[row.state] ?? row.state);
    mark(word, "state", row.state);
    return line;
  }

  lane(jobs, longest) {
    const node = jobs[0].node;
    if (!this.lanes.has(node)) this.lanes.set(node, blankLane());
    const { line, name, bar, time } = this.lanes.get(node);
    const [all, done] = [total(jobs), total(jobs.map((job) => ({ seconds: job.seconds * part(job) })))];
    line.title = jobs[0].site;
    say(name, jobs[0].site);
    say(time, `${percent(done / (all || 1))} of ${span(all)}`);
    bar.setAttribute("aria-label", `${jobs[0].site}: ${jobs.map((job) => `${job.domain} ${percent(part(job))}`).join(", ")}`);
    bar.replaceChildren(...jobs.map((job) => block(job, longest)));
    return line;
  }
}

const total = (jobs) => jobs.reduce((sum, job) => sum + (job.seconds ?? 0), 0);
const part = (job) => job.done / job.steps;

function against(row) {
  if (row.loss === null || row.parent_loss === null) return "-";
  const gain = row.loss - row.parent_loss;
  return `${gain > 0 ? "+" : "−"}${Math.abs(gain).toFixed(3)} ± ${fixed(row.error, 3)}`;
}

function words({ rows, seconds }) {
  const [ended, refused] = [rows.filter((row) => ENDED.includes(row.state)), rows.filter((row) => row.state === "refused")];
  const gate = refused.length ? `, ${count(refused.length)} of them refused: its parent stands in` : "";
  const homeless = rows.filter((row) => row.state === "nobody").map((row) => row.domain);
  const nobody = homeless.length ? `. No site can train: ${homeless.join(", ")}` : "";
  return `${count(ended.length)} of ${several(rows.length, "expert")} done${gate}; planned to take ${span(seconds)}${nobody}`;
}

// The command that collects the ensemble, on the coordinator's machine, and answers with it.
function serving(rows) {
  const sites = [...new Set(rows.map((row) => row.site))].sort().map((site) => `--from ${site.toUpperCase()}_FOLDER`);
  return `pier-coordinator experts collect ensemble ${sites.join(" ")} && pier-node serve --experts ensemble`;
}

function blankRow() {
  const word = make("span", { className: "state" });
  const tds = COLUMNS.map((title, at) => cell(title, at > 3 ? "n" : ["name", "state-cell"][at] ?? ""));
  tds[1].append(word);
  const line = make("tr", {}, ...tds);
  line.setAttribute("role", "row");
  return { line, word, tds };
}

function blankLane() {
  const [name, bar, time] = [make("span", { className: "who" }), make("div", { className: "lane" }), make("span", { className: "muted" })];
  bar.setAttribute("role", "img");
  return { line: make("li", {}, name, bar, time), name, bar, time };
}

function block(job, longest) {
  const done = make("i", { className: job.state === "refused" ? "refused" : "" });
  const made = make("span", { title: `${job.domain}: ${count(job.done)} of ${count(job.steps)} steps, expected to take ${span(job.seconds)}` }, done, make("b", { textContent: job.domain }));
  made.style.width = `${(100 * job.seconds) / longest}%`;
  done.style.width = `${100 * part(job)}%`;
  return made;
}
