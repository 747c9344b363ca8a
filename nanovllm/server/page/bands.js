// The strips below the lanes, as data (title, legend, axis and drawing), and the time axis.
// The page and the saved picture draw the same strips.

import { el, short } from "./dom.js";
import * as draw from "./draw.js";
import { counted, roundUp, withoutZeros } from "./words.js";

const chunkTokens = (step) => step.chunks.reduce((sum, [, tokens]) => sum + tokens, 0);

// `legend`: [colour, label, value at the right edge]. A value function gets {state, latest}, where
// `state.step` is the last step, or undefined if nothing runs.
export const LANES_LEGEND = [
  ["wait", "waiting"], ["arriving", "pages arriving"], ["prompt", "prompt chunk"], ["decode", "decoding"], ["cached", "prefix hit"],
  ["preempted", "preempted"], ["finished", "finished"],
];
export const STRIPS = [
  {
    id: "running",
    title: "Requests",
    text: "In the batch, and in the queue.",
    legend: [["decode", "running", ({ state }) => state.running], ["wait", "waiting", ({ state }) => state.waiting]],
    top: (seen) => roundUp(Math.max(4, ...seen.map((step) => step.waiting + step.running))),
    paint(on, { steps, top, span, colors }) {
      draw.grid(on, span, colors);
      draw.areas(on, steps, [[colors.decode, (s) => s.running], [colors.wait, (s) => s.waiting]], top, span);
    },
  },
  {
    id: "budget",
    title: "Tokens per step",
    text: "One bar per step of the model.",
    legend: [
      ["decode", "decode", ({ state }) => state.step?.rows ?? 0],
      ["prompt", "prompt", ({ state }) => (state.step ? chunkTokens(state.step) : 0)],
      ["draft", "drafts", ({ state }) => state.step?.drafted ?? 0],
      ["limit", "budget"],
    ],
    top: (seen) => roundUp(Math.max(8, ...seen.map((step) => chunkTokens(step) + step.rows + step.drafted))),
    paint(on, { steps, top, span, colors }) {
      draw.grid(on, span, colors);
      const parts = [[colors.decode, (s) => s.rows], [colors.draft, (s) => s.drafted], [colors.prompt, chunkTokens]];
      draw.stacks(on, steps, parts, top, span);
      draw.limits(on, draw.within(steps, span), (step) => step.budget, top, span, colors);
    },
  },
  {
    id: "pages",
    title: "Cache pages",
    text: "KV cache in use, and kept for reuse.",
    legend: [
      ["held", "in use", ({ latest, step }) => pagesOf(latest) - (step ?? latest).free],
      ["cached", "reusable", ({ latest, step }) => (step ?? latest).cached],
      ["blank", "empty", ({ latest, step }) => (step ?? latest).free - (step ?? latest).cached],
    ],
    top: (_, latest) => pagesOf(latest),
    paint(on, { steps, top, span, colors }) {
      const parts = [
        [colors.held, (s) => top - s.free], [colors.cached, (s) => s.cached], [colors.blank, (s) => s.free - s.cached],
      ];
      draw.areas(on, steps, parts, top, span);
    },
  },
];

const pagesOf = (latest) => latest?.num_pages ?? 1;

// The legend's values at the right edge: [colour, label, number or null].
export function valuesOf(strip, state, latest, isLive) {
  if (!latest) return strip.legend.map(([colour, label]) => [colour, label, null]);
  const isIdle = !state.running && !state.waiting;
  const view = { state: isIdle ? { ...state, step: undefined } : state, latest, step: isLive ? null : state.step };
  return strip.legend.map(([colour, label, value]) => [colour, label, value ? value(view) : null]);
}

// A heading with a legend.
export function bandHead(title, legend) {
  const chips = legend.map(([colour, label]) => {
    const value = el("b");
    return { node: el("li", { className: `k-${colour}` }, `${label} `, value), value };
  });
  const node = el("div", { className: "band-head" }, el("h2", {}, title), el("ul", { className: "legend" }, chips.map((chip) => chip.node)));
  return { node, set: (values) => values.forEach((value, at) => setText(chips[at].value, value ?? "")) };
}

export class Strip {
  constructor(spec) {
    this.spec = spec;
    this._head = bandHead(spec.title, spec.legend);
    this._canvas = el("canvas", { role: "img", ariaLabel: `${spec.title} over time` });
    this._top = el("span");
    this.node = el(
      "section", { className: "band", id: `strip-${spec.id}`, ariaLabel: spec.title }, this._head.node,
      el(
        "div", { className: "strip" },
        el("div", { className: "gutter" }, el("p", {}, spec.text), el("p", { className: "ends", title: "Ends of the axis" }, this._top, el("span", {}, "0"))),
        this._canvas,
      ),
    );
  }

  draw({ steps, latest }, { span, state, isLive }, colors) {
    const top = this.spec.top(draw.within(steps, span), latest);
    setText(this._top, withoutZeros(short(top)));
    this._head.set(valuesOf(this.spec, state, latest, isLive).map(([, , value]) => (value === null ? "" : short(value))));
    this.spec.paint(draw.surface(this._canvas, 46), { steps, top, span, colors });
  }
}

// The labels of the time axis: [share of the width, text].
export function axisLabels(seconds, width, isLive) {
  return draw.ticks(seconds, width).map((back) => [
    1 - back / seconds, back ? `-${Number(back.toFixed(1))} s` : isLive ? "now" : "paused",
  ]);
}

export class Axis {
  constructor() {
    this._labels = el("div", { className: "axis-labels" });
    this.node = el("div", { className: "axis", role: "img", ariaLabel: "Time axis in seconds" }, el("span"), this._labels);
    this._shown = "";
  }

  draw(seconds, isLive) {
    const width = this._labels.clientWidth;
    const key = `${seconds} ${width} ${isLive}`;
    if (key === this._shown) return;
    this._shown = key;
    this._labels.replaceChildren(
      ...axisLabels(seconds, width, isLive).map(([share, text]) => {
        const label = el("span", { className: share > 0.99 ? "end" : share < 0.03 ? "begin" : "" }, text);
        label.style.left = `${100 * share}%`;
        return label;
      }),
    );
  }
}

// Return sentences about the scheduler's state at the right edge.
export function sentences(history, state, isLive, modeName, seconds) {
  const { latest, steps } = history;
  const { step, running, waiting } = state;
  if (!latest || !step) return "No step yet. Send some requests, or talk to the model.";
  const slots = `${running} of ${latest.num_slots} slots in use, ${waiting} waiting.`;
  const paused = isLive ? "" : `Paused; the engine is at step ${steps.at(-1).step}. `;
  if (!running && !waiting) return `${paused}Nothing is running. ${slots} ${counted(step.step, "step")} so far.`;
  const rows = `${counted(step.rows, "decode row")}, ${counted(step.chunks.length, "prompt chunk")}`;
  const masked = step.masked ? `, ${step.masked} with a grammar` : "";
  const times = `device ${seconds(step.device_s)}, host ${seconds(step.host_s)}`;
  const mode = step.mode ? `, ${modeName(step.mode)}` : "";
  return `${paused}${slots} Step ${step.step}: ${rows}${masked}; ${times}${mode}.`;
}

function setText(node, value) {
  const text = String(value);
  if (node.textContent !== text) node.textContent = text;
}
