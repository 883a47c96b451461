// A pipeline: the schedule of an iteration on the paths in use, drawn by the coordinator, and each site's stage and times.
import { $, cell, make, order, say } from "./dom.js";
import { count, fixed, percent, seconds, several } from "./format.js";

const COLUMNS = ["Site", "Stage", "Busy", "Forward", "Backward", "Loss time", "Holds"];

export class Pipeline {
  constructor() {
    this.rows = new Map();
    const heads = COLUMNS.map((title, at) => {
      const head = make("th", { scope: "col", className: at ? "n" : "", textContent: title });
      head.setAttribute("role", "columnheader");
      return head;
    });
    $("stages").tHead.rows[0].append(...heads);
  }

  show({ pipeline }) {
    $("h-pipeline").closest("section").hidden = !pipeline;
    if (!pipeline) return;
    const { plan } = pipeline;
    say($("pipeline-words"), words(pipeline));
    $("gantt").hidden = !plan;
    if (plan && plan.version !== this.drawn) {
      this.drawn = plan.version;
      Object.assign($("gantt").firstElementChild, { src: `/api/pipeline/chart.svg?version=${plan.version}`, alt: chart(pipeline) });
    }
    order($("stages").tBodies[0], pipeline.sites.map((row) => this.row(row)));
  }

  row(row) {
    if (!this.rows.has(row.node)) this.rows.set(row.node, blankRow());
    const { line, tds } = this.rows.get(row.node);
    const busy = row.busy === null ? "-" : percent(row.busy);
    const times = [row.forward, row.backward, row.loss].map((time) => (time ? seconds(time) : "-"));
    [row.name, String(row.stage), busy, ...times, row.memory === null ? "-" : several(row.memory, "microbatch", "microbatches")].forEach((text, at) => say(tds[at], text));
    return line;
  }
}

function words({ plan, step_seconds: step }) {
  const lately = step ? `lately it takes ${seconds(step)}, with averaging, the disk and the vote` : "";
  if (!plan) return lately ? `No paths are planned yet. An iteration: ${lately}.` : "No paths are planned yet.";
  return `${plan.title}: an iteration is planned to take ${seconds(plan.seconds)}${lately ? `; ${lately}` : ""}. Paths since round ${count(plan.round)}.`;
}

function chart({ plan, sites }) {
  const busy = sites.filter((row) => row.busy !== null).map((row) => `${row.name} ${percent(row.busy)}`);
  return `Gantt chart of an iteration of ${fixed(plan.seconds, 2)} s, ${plan.title}. Busy: ${busy.join(", ")}. The table has the stages.`;
}

function blankRow() {
  const tds = COLUMNS.map((title, at) => cell(title, at ? "n" : "name"));
  const line = make("tr", {}, ...tds);
  line.setAttribute("role", "row");
  return { line, tds };
}
