// Small charts of what /metrics says, over the last minute.

import { el, seconds, short } from "./dom.js";
import * as draw from "./draw.js";
import { mean, quantile, rate } from "./metrics.js";

const SHOWN_S = 60;
const FIRST = "vllm:time_to_first_token_seconds";
const BETWEEN = "vllm:inter_token_latency_seconds";
// Title, unit, lines: [label, colour, what two readings say].
const CHARTS = [
  ["Requests", short, [
    ["running", "decode", (_, now) => now.value("vllm:num_requests_running")],
    ["waiting", "wait", (_, now) => now.value("vllm:num_requests_waiting")],
  ]],
  ["Tokens a second", short, [
    ["generated", "decode", (before, now) => rate(before, now, "vllm:generation_tokens_total")],
    ["prompts", "prompt", (before, now) => rate(before, now, "vllm:prompt_tokens_total")],
  ]],
  ["First token", seconds, [
    ["median", "prompt", (before, now) => quantile(before, now, FIRST, 0.5)],
    ["p99", "preempted", (before, now) => quantile(before, now, FIRST, 0.99)],
  ]],
  ["Between tokens", seconds, [
    ["median", "decode", (before, now) => quantile(before, now, BETWEEN, 0.5)],
    ["p99", "preempted", (before, now) => quantile(before, now, BETWEEN, 0.99)],
  ]],
  ["Cache in use", (share) => `${Math.round(100 * share)} %`, [
    ["held", "held", (_, now) => now.value("vllm:kv_cache_usage_perc")],
    ["prefix hits", "cached", hits],
  ]],
  ["Device waits for host", (share) => `${short(100 * share)} %`, [
    ["bubbles", "preempted", (before, now) => rate(before, now, "nanovllm:host_bubble_seconds_total")],
  ]],
];
const MODE_COLORS = ["decode", "prompt", "cached", "draft", "wait", "finished"];

// Of the prompts' tokens in between, the cached share.
function hits(before, now) {
  const prompt = rate(before, now, "vllm:prompt_tokens_total");
  return prompt ? rate(before, now, "vllm:prompt_tokens_cached_total") / prompt : null;
}

export class CurveBoard {
  constructor() {
    this._colors = {};
    this._charts = CHARTS.map(([title, unit, lines]) => new Chart(title, unit, lines));
    this._modes = new Chart("Steps a second, by mode", short, []);
    this.node = el("div", { className: "curves" }, [...this._charts, this._modes].map((chart) => chart.node));
    this.clear();
  }

  clear() {
    this._before = null;
    this.newest = { tokens: null, first: null, between: null };
    for (const chart of [...this._charts, this._modes]) chart.clear();
  }

  recolour(colors) {
    this._colors = colors;
  }

  take(reading) {
    const before = this._before;
    this._before = reading;
    if (before === null) return;
    this.newest = {
      tokens: rate(before, reading, "vllm:generation_tokens_total"),
      first: mean(before, reading, FIRST) ?? this.newest.first,
      between: mean(before, reading, BETWEEN) ?? this.newest.between,
    };
    for (const chart of this._charts) chart.take(before, reading);
    const modes = [...new Set(reading.list("nanovllm:graph_steps_total").map(([labels]) => `${labels.mode}/${labels.phase}`))];
    for (const mode of modes.slice(this._modes.lines.length)) {
      const colour = MODE_COLORS[this._modes.lines.length % MODE_COLORS.length];
      this._modes.add([mode, colour, (old, now) => stepsOf(old, now, mode)]);
    }
    this._modes.take(before, reading);
  }

  draw() {
    const now = performance.now() / 1000;
    for (const chart of [...this._charts, this._modes]) {
      chart.draw({ from: now - SHOWN_S, to: now }, this._colors);
    }
  }
}

function stepsOf(before, now, mode) {
  const count = (reading) =>
    reading.list("nanovllm:graph_steps_total").find(([of]) => `${of.mode}/${of.phase}` === mode)?.[1] ?? 0;
  return (count(now) - count(before)) / (now.at - before.at);
}

class Chart {
  constructor(title, unit, lines) {
    this._title = title;
    this._unit = unit;
    this._canvas = el("canvas", { role: "img", ariaLabel: title });
    this._values = el("p", { className: "values" });
    this._top = el("span", { className: "top" });
    this.node = el("figure", {}, el("figcaption", {}, el("span", {}, title), this._top), this._canvas, this._values);
    this.lines = [];
    for (const line of lines) this.add(line);
  }

  add([label, colour, value]) {
    const shown = el("b");
    this._values.append(el("span", { className: `k-${colour}` }, `${label} `, shown));
    this.lines.push({ colour, value, shown, points: [] });
  }

  clear() {
    for (const line of this.lines) line.points = [];
  }

  take(before, now) {
    for (const line of this.lines) {
      const value = line.value(before, now);
      line.points.push([now.at, value]);
      while (line.points[0][0] < now.at - SHOWN_S) line.points.shift();
      line.shown.textContent = value === null ? "-" : this._unit(value);
    }
  }

  draw(span, colors) {
    const all = this.lines.flatMap((line) => line.points.map(([, value]) => value ?? 0));
    const most = Math.max(0, ...all);
    const top = most ? this._unit(most) : "";
    if (this._top.textContent !== top) this._top.textContent = top;
    draw.curves(draw.surface(this._canvas, 84), this.lines.map((line) => [colors[line.colour], line.points]), most, span, colors);
  }
}
