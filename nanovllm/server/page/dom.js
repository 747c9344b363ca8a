// Elements, made without parsing text as markup: each text of a model or a server becomes a text
// node. (The page's Content-Security-Policy also refuses innerHTML and similar properties.)

// Return an element with properties and children, which are elements or texts. `on` has listeners;
// `aria` and `data` have attributes without the prefix of their names.
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

// Return a foreign name for one line: characters that reverse the line, break it or are invisible
// are shown as their codes.
export function visible(name) {
  const hidden = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
  return String(name).replace(hidden, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// Return elements for a text with ``` blocks, `code` and **strong**. The rest is unchanged, except
// for blank space at the start and the end of a block.
export function formatted(text) {
  return text.split(/^```/m).flatMap((part, at) => {
    if (at % 2 === 0) {
      const prose = part.trimStart().replace(/\n+$/, "");
      return prose || at === 0 ? [el("div", { className: "prose", dir: "auto" }, ...spans(prose))] : [];
    }
    const [, language, code] = /^([^\n]*)\n?([\s\S]*)$/.exec(part);
    return [el("pre", { dir: "ltr", title: visible(language) }, el("code", {}, code))];
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
  if (value < 0.0000005) return "0 ms";
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

// Return a function that runs `work` once in the next frame, however often it is called until then.
export function onceAFrame(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      work();
    });
  };
}
