// The numbers at the top of Watch: tokens per second, tiles, and totals since the server's start.

import { el, seconds } from "./dom.js";
import { RATE_S } from "./history.js";

// Name, label, note below the value, meaning.
const TILES = [
  ["running", "Running", "requests", "Requests that have a slot of the batch"],
  ["waiting", "Waiting", "requests", "Requests in the queue"],
  ["first", "First token", "1-minute median", "Time from a request's arrival to its first token: the median of the last minute"],
  ["between", "Between tokens", "1-minute median", "Time from one token of a request to its next: the median of the last minute"],
  ["cached", "Prefix hits", "of prompt tokens", "Share of the prompt tokens that was found in the cache, since the server's start"],
  ["preempted", "Preempted", "since the start", "Preemptions since the server's start"],
];
const TOTALS = [["generated", "tokens generated"], ["prompts", "prompt tokens"], ["steps", "steps"]];

export class Tiles {
  // `chart`: the node of the chart next to the large number.
  constructor(chart) {
    this._values = {};
    this.speed = 0; // tokens per second, as shown
    this._speed = el("output", { id: "speed", ariaLabel: "Tokens per second" }, "0");
    const value = (name) => (this._values[name] = el("span", { data: { total: name } }, "-"));
    const tiles = TILES.map(([name, label, note, title]) => {
      const unit = el("small", { data: { note: name } }, note);
      return el("div", { title }, el("dt", {}, label), el("dd", {}, value(name)), el("dd", {}, unit));
    });
    this._slots = tiles[0].querySelector("small");
    const totals = TOTALS.flatMap(([name, label], at) => [at ? ", " : "", el("b", {}, value(name)), ` ${label}`]);
    this.node = el(
      "section", { className: "hero", ariaLabel: "Speed and load" },
      el(
        "div", { className: "speed", title: `Generated tokens, over the last ${RATE_S} seconds of the picture` },
        this._speed, el("p", {}, "tokens per second"),
      ),
      chart,
      el("dl", { className: "tiles" }, tiles),
    );
    this.totals = el("p", { className: "quiet totals" }, "Since the start: ", totals, ".");
  }

  // Show the numbers of the right edge of the picture.
  showState({ running, waiting }, rate, latest) {
    this.speed = rate;
    this._set("running", running);
    this._set("waiting", waiting);
    write(this._speed, speedText(rate));
    if (latest) write(this._slots, `of ${latest.num_slots.toLocaleString("en")} slots`);
  }

  // Show the numbers that the metrics count.
  showTotals(reading, medians) {
    const prompt = reading.value("vllm:prompt_tokens_total");
    const cached = reading.value("vllm:prompt_tokens_cached_total");
    write(this._values.first, seconds(medians.first ?? NaN));
    write(this._values.between, seconds(medians.between ?? NaN));
    write(this._values.cached, prompt ? `${Math.round((100 * cached) / prompt)} %` : "-");
    this._set("preempted", reading.value("vllm:num_preemptions_total"));
    this._set("generated", reading.value("vllm:generation_tokens_total"));
    this._set("prompts", prompt);
    this._set("steps", reading.value("nanovllm:steps_total"));
  }

  // The tiles as texts, for the saved picture: [label, value].
  get texts() {
    return TILES.map(([name, label]) => [label, this._values[name].textContent]);
  }

  _set(name, value) {
    write(this._values[name], value.toLocaleString("en"));
  }
}

// 8.5, 64, 1,284
export function speedText(rate) {
  return rate.toLocaleString("en", { maximumFractionDigits: rate < 9.95 && rate % 1 ? 1 : 0 });
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
