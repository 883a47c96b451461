// A chart as a file: its numbers as CSV, and what is drawn as PNG.
import { colour, make } from "./dom.js";

export function saveCsv(title, axis, data, names) {
  const place = axis.key === "time" ? (x) => new Date(1000 * x).toISOString() : String;
  const head = [axis.key, names[0], `${names[0]} least`, `${names[0]} most`, ...names.slice(1)].map(quoted);
  const rows = data[0].map((x, at) => [place(x), ...data.slice(1).map((column) => column[at] ?? "")]);
  save(new Blob([[head, ...rows].map((row) => `${row.join(",")}\n`).join("")], { type: "text/csv" }), `${title}.csv`);
}

// Names come from sites: a spreadsheet must not take one for a formula.
const quoted = (name) => `"${name.replace(/^[=+\-@\t]/, "'$&").replaceAll('"', '""')}"`;

export function savePng(title, drawn, keys) {
  const [ratio, top, bottom] = [devicePixelRatio, 34, 30];
  const canvas = make("canvas", { width: drawn.width, height: drawn.height + (top + bottom) * ratio });
  const ink = canvas.getContext("2d");
  ink.fillStyle = colour("panel");
  ink.fillRect(0, 0, canvas.width, canvas.height);
  ink.drawImage(drawn, 0, top * ratio);
  ink.scale(ratio, ratio);
  const write = (text, x, y, font, style) => {
    Object.assign(ink, { font: `${font} system-ui, sans-serif`, fillStyle: style });
    ink.fillText(text, x, y);
    return x + ink.measureText(text).width;
  };
  write(title, 12, 22, "600 14px", colour("text"));
  let x = 12;
  for (const { name, colour: paint } of keys) {
    ink.fillStyle = paint;
    ink.fillRect(x, drawn.height / ratio + top + 10, 12, 3);
    x = write(name, x + 18, drawn.height / ratio + top + 16, "12px", colour("muted")) + 16;
  }
  canvas.toBlob((blob) => save(blob, `${title}.png`));
}

export function save(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
