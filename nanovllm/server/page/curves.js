// Small charts of /metrics over the last minute, each with its own axis.

import { el, seconds, short } from "./dom.js";
import * as draw from "./draw.js";
import { quantile, rate } from "./metrics.js";
import { modeAndPhase, roundUp, withoutZeros } from "./words.js";

const SHOWN_S = 60;
const FIRST = "vllm:time_to_first_token_seconds";
const BETWEEN = "vllm:inter_token_latency_seconds";
const percent = (share) => `${short(100 * share)} %`;
// Lines: {label, colour, value(before, now, minute), isDashed, isThin, isFilled}.
// `minute` is the oldest reading of the last minute.
const SPEED = {
  title: "Generated tokens per second, last minute", unit: short,
  lines: [{ label: "", colour: "decode", isFilled: true, value: (before, now) => rate(before, now, "vllm:generation_tokens_total") }],
};
const CHARTS = [
  {
    title: "Prompt tokens per second", unit: short,
    lines: [
      { label: "computed", colour: "prompt", value: computed },
      { label: "from the cache", colour: "cached", value: (before, now) => rate(before, now, "vllm:prompt_tokens_cached_total") },
    ],
  },
  {
    title: "Time to first token, last minute", unit: seconds,
    lines: [
      { label: "median", colour: "ink", value: (_, now, minute) => firstToken(minute, now, 0.5) },
      { label: "p99", colour: "soft", isDashed: true, value: (_, now, minute) => firstToken(minute, now, 0.99) },
    ],
  },
  {
    title: "Time between tokens", unit: seconds,
    lines: [
      { label: "median", colour: "ink", value: (before, now) => quantile(before, now, BETWEEN, 0.5) },
      { label: "p99", colour: "soft", isDashed: true, value: (before, now) => quantile(before, now, BETWEEN, 0.99) },
    ],
  },
  {
    title: "Cache", unit: percent, top: 1,
    lines: [
      { label: "pages in use", colour: "held", value: (_, now) => now.value("vllm:kv_cache_usage_perc") },
      { label: "prefix hits, last minute", colour: "cached", value: (_, now, minute) => hits(minute, now) },
    ],
  },
  {
    title: "Device idle, waiting for the host", unit: percent,
    lines: [{ label: "of the time", colour: "wait", value: (before, now) => rate(before, now, "nanovllm:host_bubble_seconds_total") }],
  },
];
const CACHE = CHARTS.findIndex((chart) => chart.title === "Cache");
const MODES = { title: "Steps per second", unit: short, lines: [] };
// Blue lines are steps with prompt chunks, green ones those without. Thin lines are eager steps.
const PHASES = {
  prefill: { colour: "prompt" }, mixed: { colour: "prompt", isDashed: true },
  decode: { colour: "decode" }, structured: { colour: "decode", isDashed: true },
};

// A quantile of the time to first token: from the metrics, or without new samples there, from the
// engine's own times.
function firstToken(minute, now, share) {
  const times = now.firstTokens;
  return quantile(minute, now, FIRST, share) ?? times[Math.ceil(share * times.length) - 1] ?? null;
}

function computed(before, now) {
  const all = rate(before, now, "vllm:prompt_tokens_total");
  return all === null ? null : Math.max(0, all - (rate(before, now, "vllm:prompt_tokens_cached_total") ?? 0));
}

// The cached share of the prompt tokens between two readings.
function hits(before, now) {
  const prompt = rate(before, now, "vllm:prompt_tokens_total");
  return prompt ? rate(before, now, "vllm:prompt_tokens_cached_total") / prompt : null;
}

export class CurveBoard {
  constructor() {
    this._colors = {};
    this.speed = new Chart(SPEED);
    this._modes = new Chart(MODES);
    this._charts = [...CHARTS.map((spec) => new Chart(spec)), this._modes];
    this.node = el("div", { className: "curves" }, this._charts.map((chart) => chart.node));
    this.clear();
  }

  clear() {
    this._readings = []; // of the last minute
    this.medians = { first: null, between: null };
    for (const chart of [this.speed, ...this._charts]) chart.clear();
  }

  recolour(colors) {
    this._colors = colors;
  }

  // `firstTokens`: the engine's times to first token of the last minute, sorted.
  take(reading, firstTokens) {
    reading.firstTokens = firstTokens;
    const before = this._readings.at(-1);
    this._readings.push(reading);
    while (this._readings[0].at < reading.at - SHOWN_S) this._readings.shift();
    if (before === undefined) return;
    const [minute] = this._readings;
    this.medians = { first: firstToken(minute, reading, 0.5), between: quantile(minute, reading, BETWEEN, 0.5) };
    this._addModes(reading);
    this._addTiers(reading);
    for (const chart of [this.speed, ...this._charts]) chart.take(before, reading, minute);
  }

  _addModes(reading) {
    const keys = [...new Set(reading.list("nanovllm:graph_steps_total").map(([labels]) => `${labels.mode}/${labels.phase}`))];
    for (const key of keys) {
      if (this._modes.lines.some((line) => line.key === key)) continue;
      const style = PHASES[key.split("/")[1]] ?? { colour: "ink" };
      const value = (before, now) => stepsOf(before, now, key);
      this._modes.add({ key, label: modeAndPhase(key), ...style, value, isThin: key.startsWith("NONE/") });
    }
  }

  // Tiers below the GPU, where the recipe has them: the share of their pages in use.
  _addTiers(reading) {
    const chart = this._charts[CACHE];
    for (const key of new Set(reading.list("nanovllm:tier_pages").map(([labels]) => labels.tier))) {
      if (chart.lines.some((line) => line.key === key)) continue;
      chart.add({ key, label: `${key} in use`, colour: "held", isDashed: true, value: (_, now) => tierUse(now, key) });
    }
  }

  draw() {
    const now = performance.now() / 1000;
    for (const chart of [this.speed, ...this._charts]) chart.draw({ from: now - SHOWN_S, to: now }, this._colors);
  }
}

function stepsOf(before, now, key) {
  const count = (reading) =>
    reading.list("nanovllm:graph_steps_total").find(([labels]) => `${labels.mode}/${labels.phase}` === key)?.[1] ?? 0;
  return (count(now) - count(before)) / (now.at - before.at);
}

function tierUse(now, tier) {
  const pages = now.list("nanovllm:tier_pages").filter(([labels]) => labels.tier === tier);
  const count = (state) => pages.find(([labels]) => labels.state === state)?.[1] ?? 0;
  return count("used") / Math.max(1, count("capacity"));
}

class Chart {
  constructor({ title, unit, lines, top = null }) {
    this._unit = unit;
    this._fixedTop = top;
    this._canvas = el("canvas", { role: "img", ariaLabel: `${title}: chart` });
    this._values = el("ul", { className: "values" });
    this._top = el("span");
    const ends = el("p", { className: "ends", title: "Ends of the axis" }, this._top, el("span", {}, "0"));
    const times = el("p", { className: "times" }, el("span", {}, `-${SHOWN_S} s`), el("span", {}, "now"));
    this.node = el("figure", {}, el("figcaption", {}, el("span", {}, title), this._values), el("div", { className: "plot" }, ends, this._canvas), times);
    this.lines = [];
    for (const line of lines) this.add(line);
  }

  add(line) {
    const shown = el("b", {}, "-");
    const node = el("li", { className: `k-${line.colour}${line.isDashed ? " dashed" : ""}${line.isThin ? " thin" : ""}` }, line.label ? `${line.label} ` : "", shown);
    this._values.append(node);
    this.lines.push({ ...line, shown, points: [] });
  }

  clear() {
    for (const line of this.lines) line.points = [];
  }

  take(before, now, minute) {
    for (const line of this.lines) {
      const value = line.value(before, now, minute);
      line.points.push([now.at, value]);
      while (line.points[0][0] < now.at - SHOWN_S) line.points.shift();
      line.shown.textContent = value === null ? "-" : this._unit(value);
    }
  }

  draw(span, colors) {
    const all = this.lines.flatMap((line) => line.points.map(([, value]) => value ?? 0));
    const top = this._fixedTop ?? roundUp(Math.max(0, ...all));
    const text = withoutZeros(this._unit(top));
    if (this._top.textContent !== text) this._top.textContent = text;
    const lines = this.lines.map((line) => ({ ...line, colour: colors[line.colour] }));
    draw.curves(draw.surface(this._canvas, 64), lines, top, span, colors);
  }
}
