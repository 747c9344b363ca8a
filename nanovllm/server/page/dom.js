// Elements, made without ever parsing text as markup: whatever a model or a server says becomes a
// text node. (The page's Content-Security-Policy refuses innerHTML and its like besides.)

// An element with properties, and with children that are elements or texts. `on` has listeners,
// `aria` and `data` what their names begin with.
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  const { on = {}, aria = {}, data = {}, ...others } = properties;
  for (const [name, value] of Object.entries(others)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  for (const [name, value] of Object.entries(aria)) node.setAttribute(`aria-${name}`, value);
  for (const [name, value] of Object.entries(data)) node.dataset[name] = value;
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function button(text, click, properties = {}) {
  return el("button", { type: "button", on: { click }, ...properties }, text);
}

// A name that somebody else chose, for one line: what would turn the line around, break it or hide
// in it is shown as its code.
export function visible(name) {
  const hidden = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
  return String(name).replace(hidden, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// Texts with ``` blocks, `code` and **strong** as elements; all else as it is.
export function formatted(text) {
  return text.split(/^```/m).map((part, at) => {
    if (at % 2 === 0) return el("div", { className: "prose", dir: "auto" }, ...spans(part));
    const [, language, code] = /^([^\n]*)\n?([\s\S]*)$/.exec(part);
    return el("pre", { dir: "ltr", title: visible(language) }, el("code", {}, code));
  });
}

function spans(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part, at) => {
    if (at % 2 === 0) return part;
    return part[0] === "`" ? el("code", {}, part.slice(1, -1)) : el("strong", {}, part.slice(2, -2));
  });
}

// 0.0123 -> "12 ms", 12.3 -> "12.3 s"
export function seconds(value) {
  if (!Number.isFinite(value)) return "-";
  if (value < 0.001) return `${Math.round(value * 1e6)} us`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

// 1234567 -> "1.23M"
export function short(value) {
  if (!Number.isFinite(value)) return "-";
  for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= unit) {
      const scaled = value / (sign === "k" ? 1000 : unit);
      return `${scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0)}${sign}`;
    }
  }
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0 });
}

// Calls `work` once in the next frame, however often it is asked to until then.
export function onceAFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}
