// Which expert most of a token came from: as a colour, in a table, and in words.
const COLOURS = 8;
const percent = (part) => `${(100 * part).toFixed(0)} %`;

function make(tag, text = "", className = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className });
}

export class Experts {
  constructor(text, rows, words, hint) {
    Object.assign(this, { text, rows, words, hint, names: [], counts: new Map(), cells: new Map(), made: 0, run: null });
  }

  begin(prompt, names) {
    this.text.replaceChildren(make("span", prompt, "prompt"));
    this.words.replaceChildren();
    this.rows.replaceChildren();
    names.forEach((name) => this.know(name));
  }

  know(name) {
    if (this.cells.has(name)) return;
    const number = this.names.push(name) - 1;
    const head = make("th");
    head.scope = "row";
    head.append(make("span", String(number + 1), `key ${this.colour(name)}`), name);
    const cells = { share: make("td", "-"), weight: make("td", "-") };
    const row = make("tr");
    row.append(head, cells.share, cells.weight);
    this.rows.append(row);
    this.cells.set(name, cells);
    this.counts.set(name, 0);
  }

  // After eight experts the colours come again, underlined.
  colour(name) {
    const number = this.names.indexOf(name);
    return `e${number % COLOURS}${number >= COLOURS ? " again" : ""}`;
  }

  add(text, parts) {
    const sorted = Object.entries(parts).sort((one, other) => other[1] - one[1]);
    if (!sorted.length) return;
    sorted.forEach(([name]) => this.know(name));
    const [first] = sorted[0];
    const low = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 40;
    const token = make("span", text, this.colour(first));
    const said = sorted.map(([name, part]) => `${name} ${percent(part)}`).join(", ");
    token.title = said;
    token.addEventListener("pointerenter", () => { this.hint.textContent = `${JSON.stringify(text)}: ${said}`; });
    this.text.append(token);
    if (low) this.text.scrollTop = this.text.scrollHeight;
    this.count(first);
    this.say(first, text);
    this.now(parts);
  }

  count(name) {
    this.made += 1;
    this.counts.set(name, this.counts.get(name) + 1);
    for (const [each, count] of this.counts) this.cells.get(each).share.textContent = percent(count / this.made);
  }

  say(name, text) {
    if (this.run?.name !== name) {
      this.end();
      this.run = { name, text: "" };
    }
    this.run.text += text;
  }

  // A list item for a run of tokens of one expert, once it is over: screen readers are not told of every token.
  end() {
    if (this.run) this.words.append(make("li", `${this.run.name}: ${this.run.text}`));
    this.run = null;
  }

  now(weights) {
    for (const [name, cells] of this.cells) cells.weight.textContent = name in weights ? percent(weights[name]) : "-";
  }
}
