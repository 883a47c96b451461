// The run in numbers, and what is wrong with it in words.
import { $, make, order, say } from "./dom.js";
import { age, big, bytes, count, fixed, seconds, several, span, speed } from "./format.js";

export function showHeader(state) {
  const { run, totals } = state;
  document.title = run.name ? `${run.name} · Pier` : "Pier";
  say($("run-name"), run.name || "…");
  $("algorithm").hidden = !run.algorithm;
  say($("algorithm"), [run.algorithm, run.codec && run.codec !== "none" ? run.codec : ""].filter(Boolean).join(" · "));
  say($("t-round"), run.rounds ? `${count(totals.round)} of ${count(run.rounds)}` : count(totals.round));
  say($("t-left"), totals.seconds_left ? `about ${age(totals.seconds_left)} left` : "");
  say($("t-speed"), speed(totals.tokens_per_second));
  say($("t-tokens"), `tokens/s · ${big(totals.tokens)} in all`);
  say($("t-validation"), fixed(totals.validation_loss, 3));
  say($("t-perplexity"), totals.validation_loss === null ? "not measured yet" : `perplexity ${Math.exp(totals.validation_loss).toPrecision(3)}`);
  say($("t-loss"), fixed(totals.loss, 3));
  say($("t-steps"), `nats · step ${count(totals.inner_step)}`);
  say($("t-sites"), `${count(totals.alive)} of ${count(Math.max(totals.sites, run.sites ?? 0))}`);
  say($("t-expected"), totals.paused ? `there now, ${totals.paused === totals.alive ? "all" : count(totals.paused)} paused` : "there now");
  say($("t-sent"), bytes(totals.bytes_sent));
  say($("t-seconds"), totals.round_seconds ? `${seconds(totals.round_seconds)} a round` : "between sites");
  showFinished(state);
  showProgress(run.rounds ? (100 * totals.round) / run.rounds : 0);
}

// The run itself is over; experts, if any are planned, are trained after that.
function showFinished({ run, totals, experts }) {
  const over = run.rounds > 0 && totals.round >= run.rounds;
  $("finished").hidden = !over;
  if (!over) return;
  const loss = totals.validation_loss === null ? "" : `, validation loss ${fixed(totals.validation_loss, 3)}`;
  const time = totals.seconds ? ` in ${span(totals.seconds)}` : "";
  const busy = experts && !experts.rows.every((row) => ["accepted", "refused", "nobody"].includes(row.state));
  say($("finished-words"), `${several(run.rounds, "round")}, ${big(totals.tokens)} tokens${time}${loss}.`);
  say($("finished-next"), busy ? "The sites train the experts now." : "Use the model at any site: pier-node generate, pier-node evaluate, pier-node export.");
}

function showProgress(percent) {
  const bar = $("progress");
  bar.setAttribute("aria-valuenow", String(Math.round(percent)));
  bar.firstElementChild.style.width = `${Math.min(100, percent)}%`;
}

export function showConnection(word) {
  $("connection").dataset.state = word;
  say($("connection"), word);
}

const shown = new Map();

// An alert keeps its element, so that a screen reader reads only what is new.
export function showAlerts(alerts) {
  const keys = alerts.map((alert) => `${alert.kind} ${alert.node}`);
  for (const key of shown.keys()) if (!keys.includes(key)) shown.delete(key);
  alerts.forEach((alert, at) => {
    if (!shown.has(keys[at])) shown.set(keys[at], blank(alert.severity));
    const [, body] = shown.get(keys[at]).children;
    say(body.children[0], alert.text);
    say(body.children[1], `; ${alert.remedy}`);
  });
  order($("alerts"), keys.map((key) => shown.get(key)));
}

function blank(severity) {
  const body = make("div", {}, make("b"), make("span", { className: "remedy" }));
  const word = make("span", { className: "severity", textContent: severity === "error" ? "Error" : "Warning" });
  return make("div", { className: `alert ${severity}` }, word, body);
}
