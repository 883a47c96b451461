// Types on with the ensemble, and shows who speaks. What comes from the server is only ever set as text.
import { events } from "./events.js";
import { Experts } from "./experts.js";

const $ = (id) => document.getElementById(id);
let asked = null;

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

async function refuse(answer) {
  const told = await answer.json().catch(() => null);
  throw new Error(told?.error?.message ?? `the server answers ${answer.status}`);
}

function show(choice, experts) {
  const { tokens, posterior } = choice.logprobs;
  tokens.forEach((text, at) => experts.add(text, posterior[at]));
  if (choice.posterior) experts.now(choice.posterior);
}

async function goOn(experts) {
  asked = new AbortController();
  const body = {
    model: $("model").value, prompt: $("prompt").value, max_tokens: Number($("count").value),
    temperature: Number($("temperature").value), stream: true, logprobs: 0,
  };
  const answer = await fetch("/v1/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: asked.signal,
  });
  if (!answer.ok) await refuse(answer);
  let made = 0;
  for await (const told of events(answer.body)) {
    if (told.error) throw new Error(told.error.message);
    for (const choice of told.choices) {
      show(choice, experts);
      made += choice.logprobs.tokens.length;
    }
    $("state").textContent = `${made} tokens`;
  }
}

$("ask").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  complain("");
  $("go").disabled = true;
  $("stop").disabled = false;
  const experts = new Experts($("text"), $("experts").tBodies[0], $("words"), $("token"));
  experts.begin($("prompt").value, names);
  try {
    await goOn(experts);
    $("state").textContent += ", done";
  } catch (error) {
    if (error.name === "AbortError") $("state").textContent += ", stopped";
    else complain(error.message);
  }
  experts.end();
  $("go").disabled = false;
  $("stop").disabled = true;
});
$("stop").addEventListener("click", () => asked?.abort());

let names = [];
async function begin() {
  const { data } = await (await fetch("/v1/models")).json();
  const [all, ...each] = data.map((model) => model.id);
  names = each.length ? each : [all];
  $("name").textContent = all;
  const whole = each.length ? `all (${each.length})` : all;
  $("model").append(new Option(whole, all), ...each.map((name) => new Option(`only ${name}`, name)));
}
begin().catch((error) => complain(`The server does not answer: ${error.message}`));
