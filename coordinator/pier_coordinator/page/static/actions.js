// What the operator does: a token once, kept for this tab only, and then buttons. Whatever ends something asks first.
import { $, make, say } from "./dom.js";
import { openDialog } from "./dialog.js";

const KEY = "pier-operator-token";
const ALL = {
  pause: ["Pause all sites?", "They finish the round under way, then wait until somebody resumes them.", "Pause all"],
  stop: ["Stop all sites?", "They leave the run at the next round boundary, and end. To resume, start each of them again.", "Stop all"],
};
const DONE = { pause: "will pause at the next round boundary", resume: "will train on", stop: "will leave the run and end", revoke: "is no longer part of the run" };

// A private page: the token is exchanged for a cookie, with which this browser may look.
export function askToLook(onDone) {
  askForToken("This page is private", "Its token is in the file viewer.token of the coordinator's folder. This browser keeps it for 30 days.", "Show", async (token) => {
    await post("/api/login", {}, token);
    onDone();
  });
}

function askForToken(title, words, ok, onToken) {
  const input = make("input", { type: "password", required: true, autocomplete: "off", id: "token" });
  openDialog(title, [make("p", { className: "muted", textContent: words }), make("label", {}, "Token", input)], ok, () => onToken(input.value.trim()));
}

async function post(path, body, token) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` }, body: JSON.stringify(body) });
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(told.error ?? `the coordinator answered ${answer.status}`);
  return told;
}

export class Operator {
  constructor(onChange) {
    this.onChange = onChange;
    $("operator").addEventListener("click", () => (this.token ? this.forget() : this.askToken()));
    for (const button of document.querySelectorAll("[data-act]")) {
      button.addEventListener("click", () => this.onAll(button.dataset.act));
    }
    this.showState();
  }

  get token() {
    return sessionStorage.getItem(KEY);
  }

  showState() {
    const known = Boolean(this.token);
    if (known) document.body.dataset.operator = "yes";
    else delete document.body.dataset.operator;
    $("operations").hidden = !known;
    say($("operator"), known ? "Lock" : "Operator");
    this.onChange();
  }

  forget() {
    sessionStorage.removeItem(KEY);
    this.showState();
  }

  post(action, body, token = this.token) {
    return post(`/api/actions/${action}`, body, token);
  }

  askToken() {
    askForToken("Operator's token", "It is in the file operator.token of the coordinator's folder. It is kept for this tab only.", "Unlock", async (token) => {
      await this.post("check", {}, token);
      sessionStorage.setItem(KEY, token);
      this.showState();
    });
  }

  onAll(action) {
    if (action === "invite") return this.invite();
    const act = () => this.act(action, { nodes: [] }, "All sites");
    if (!ALL[action]) return act();
    const [title, warning, ok] = ALL[action];
    return openDialog(title, [make("p", { textContent: warning })], ok, act);
  }

  onSite(site) {
    const pick = (text, action, body, warning) => {
      const button = make("button", { type: "button", textContent: text, className: warning ? "danger" : "" });
      button.addEventListener("click", () => {
        $("dialog").close();
        if (!warning) this.act(action, body, site.name);
        else openDialog(`${text} ${site.name}?`, [make("p", { textContent: warning })], text, () => this.act(action, body, site.name));
      });
      return button;
    };
    const nodes = { nodes: [site.node] };
    openDialog(site.name, [make("div", { className: "choices" }, pick("Pause", "pause", nodes), pick("Resume", "resume", nodes),
      pick("Stop", "stop", nodes, "It leaves the run at the next round boundary, and ends."),
      pick("Revoke", "revoke", { node: site.node }, "Its certificate is taken away, and its invite ends if that has uses left: it can come back with a new invite only."))]);
  }

  async act(action, body, who) {
    try {
      const told = await this.post(action, body);
      toast(`${who}: ${DONE[action]}${action === "revoke" ? besides(told) : ""}`);
    } catch (error) {
      toast(`${who}: ${error.message}`);
    }
  }

  invite() {
    const name = make("input", { maxLength: 64, placeholder: "any" });
    const hours = make("input", { type: "number", min: 1, max: 8760, value: 24 });
    const uses = make("input", { type: "number", min: 1, max: 10000, value: 1 });
    openDialog("Invite a site", [make("label", {}, "Name", name), make("label", {}, "Valid for (hours)", hours), make("label", {}, "Sites that may use it", uses)], "Invite", async () => {
      const told = await this.post("invite", { name: name.value.trim(), expires_seconds: 3600 * Number(hours.value), uses: Number(uses.value) });
      openDialog("Paste this at the site", [...copied(told.command, "command"), make("p", { textContent: "It asks for this token:" }), ...copied(told.token, "token")]);
    });
  }
}

function copied(text, what) {
  const shown = make("pre", { textContent: text });
  const button = copyButton(shown);
  button.setAttribute("aria-label", `Copy the ${what}`);
  return [shown, make("div", { className: "bar end" }, button)];
}

// Copies the text of an element. Browsers offer their clipboard to pages over https and on this machine only.
function copyButton(source) {
  const button = make("button", { type: "button", className: "primary", textContent: "Copy" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      say(button, "Copied");
    } catch {
      getSelection().selectAllChildren(source);
      say(button, document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C");
    }
  });
  return button;
}

const besides = ({ invite, sites }) =>
  (invite ? `; its invite ${invite} is taken back too` : "") + (sites?.length ? `; with the same invite came ${sites.join(", ")}, and stay` : "");

let fading = null;
function toast(text) {
  clearTimeout(fading);
  $("toast").hidden = false;
  say($("toast"), text);
  fading = setTimeout(() => { $("toast").hidden = true; }, 6000);
}
