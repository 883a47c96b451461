// Puts the parts together: the feed fills the store, and what is on the screen follows at its own pace.
import { Operator, askToLook } from "./actions.js";
import { Charts } from "./charts.js";
import { Chosen } from "./chosen.js";
import { showConfig } from "./config.js";
import { listenToDialog } from "./dialog.js";
import { $, say, seldom } from "./dom.js";
import { Events } from "./events.js";
import { Experts } from "./experts.js";
import { follow } from "./feed.js";
import { showAlerts, showConnection, showHeader } from "./header.js";
import { Links } from "./links.js";
import { Log } from "./log.js";
import { Pipeline } from "./pipeline.js";
import { Rounds } from "./rounds.js";
import { Samples } from "./samples.js";
import { SitesTable } from "./sites.js";
import { empty, take } from "./store.js";

const state = empty();
const chosen = new Chosen(() => { drawCharts(); drawTable(); });
const charts = new Charts(chosen);
const rounds = new Rounds();
const links = new Links();
const events = new Events();
const log = new Log();
const samples = new Samples();
const experts = new Experts();
const pipeline = new Pipeline();
let ready = false;

const drawCharts = seldom(1000, () => ready && charts.show(state).catch(() => undefined));
const drawTable = seldom(250, () => ready && table.show(state));
const drawLinks = seldom(2000, () => ready && links.show(state));
const operator = new Operator(() => drawTable());
const table = new SitesTable(chosen, (site) => operator.onSite(site));

function show(told) {
  const began = performance.now();
  take(state, told);
  ready = true;
  $("main").removeAttribute("aria-busy");
  chosen.offer([...state.sites.values()]);
  $("operator").hidden = state.public;
  showHeader(state);
  showAlerts(state.alerts);
  table.show(state);
  events.show(state);
  log.show(state);
  samples.show(state);
  experts.show(state);
  pipeline.show(state);
  showConfig(state);
  rounds.show(state);
  drawCharts();
  drawLinks();
  document.documentElement.dataset.stamp = String(state.stamp);
  performance.measure("pier-update", { start: began, end: performance.now() });
}

listenToDialog();
follow(show, showConnection, (again) => { say($("loading"), "This page is private."); askToLook(again); });
setInterval(() => ready && table.show(state), 1000);
