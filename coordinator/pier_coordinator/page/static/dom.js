// Small helpers for elements. What comes from sites is only ever set as text.
export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, key, value) {
  if (element.dataset[key] !== value) element.dataset[key] = value;
}

// Changes the children only when they are others: focus and scrolling stay where they are.
export function order(parent, children) {
  const same = parent.children.length === children.length && children.every((child, at) => parent.children[at] === child);
  if (!same) parent.replaceChildren(...children);
}

export function cells(row, texts) {
  return make("tr", {}, ...texts.map((text, at) => make(at ? "td" : "th", at ? { textContent: text } : { textContent: text, scope: "row" })));
}

// A cell of a table that becomes cards on small screens: its heading goes along.
export function cell(title, className) {
  const td = make("td", { className });
  td.dataset.label = title;
  td.setAttribute("role", "cell");
  return td;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Runs at most once in so many milliseconds, and always once after the last call.
export function seldom(milliseconds, work) {
  let due = null;
  let last = -Infinity;
  return () => {
    if (due !== null) return;
    due = setTimeout(() => {
      due = null;
      last = performance.now();
      work();
    }, Math.max(0, last + milliseconds - performance.now()));
  };
}
