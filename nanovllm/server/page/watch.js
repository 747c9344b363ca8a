// Watch: what the scheduler does, as it does it. Owns the view's parts and asks the server for what
// they show; while nobody looks it asks nothing.

import * as api from "./api.js";
import { CurveBoard } from "./curves.js";
import { button, el, seconds, short } from "./dom.js";
import * as draw from "./draw.js";
import { History, nameOf } from "./history.js";
import { Lanes } from "./lanes.js";
import { lifeOf } from "./life.js";
import { Reading } from "./metrics.js";
import { KINDS, Samples } from "./tryit.js";

const STEPS_EVERY_MS = 250;
const METRICS_EVERY_MS = 1000;
const DELAY_S = 0.35; // the right edge is so long ago: by then everything is known of it
const FRAME_MS = 45; // between two pictures: smooth enough, and the engine may share the machine
const SPANS = [1, 2, 5, 10, 30, 60, 120];

export function startWatch() {
  const watch = new Watch(document.getElementById("watch"));
  document.addEventListener("view", (event) => watch.look(event.detail === "watch"));
  document.addEventListener("visibilitychange", () => watch.look(watch.isShown));
  document.addEventListener("theme", () => watch.recolour());
}

class Watch {
  constructor(place) {
    this.isShown = false;
    this._history = new History();
    this._engine = 0;
    this._span = 10; // seconds
    this._end = null; // the right edge where it stands still; null: live
    this._offset = null; // engine's clock minus the page's, in seconds
    this._chosen = null; // a request
    this._isRunning = false;
    this._turn = 0; // how often it has begun: what runs of an earlier turn ends
    this._build(place);
    this.recolour();
  }

  // Begins or ends to ask and to draw.
  look(isShown) {
    this.isShown = isShown;
    const runs = isShown && !document.hidden;
    if (runs && !this._isRunning) {
      this._isRunning = true;
      this._turn += 1;
      const turn = this._turn;
      this._ask(STEPS_EVERY_MS, () => this._askSteps());
      this._ask(METRICS_EVERY_MS, () => this._askMetrics());
      let drawn = 0;
      const frame = (now) => {
        if (!this._isRunning || turn !== this._turn) return;
        if (now - drawn > FRAME_MS) {
          drawn = now;
          this._draw();
        }
        requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    } else if (!runs) {
      this._isRunning = false;
    }
  }

  recolour() {
    this._colors = draw.palette();
    this._curves.recolour(this._colors);
  }

  // -- asking -------------------------------------------------------------------------------

  async _ask(everyMs, what) {
    const turn = this._turn;
    while (this._isRunning && turn === this._turn) {
      const begun = performance.now();
      try {
        await what();
        this._problem.hidden = true;
      } catch (error) {
        this._problem.hidden = false;
        this._problem.textContent =
          error instanceof TypeError ? "The server does not answer; asking again." : error.message;
        await sleep(1000);
      }
      await sleep(Math.max(20, everyMs - (performance.now() - begun)));
    }
  }

  async _askSteps() {
    const engine = this._engine;
    const answer = await api.json(`debug/steps?since=${this._history.newest}&engine=${engine}`);
    if (engine !== this._engine) return;
    const offset = answer.now_s - performance.now() / 1000;
    // The answer that came fastest knows best; a clock that was set is followed at once.
    if (this._offset === null || offset > this._offset || this._offset - offset > 1) this._offset = offset;
    this._history.take(answer);
    this._offerEngines(answer.engines);
    this._summary();
    if (this._chosen !== null) this._showLife();
  }

  async _askMetrics() {
    const text = await api.text("metrics");
    const reading = new Reading(text, performance.now() / 1000, this._engine);
    this._curves.take(reading);
    this._totals(reading);
  }

  // -- what there is ------------------------------------------------------------------------

  _build(place) {
    this._problem = el("p", { className: "notice", role: "alert", hidden: true });
    this._engines = el("select", { ariaLabel: "Engine", hidden: true, on: { change: () => this._choose(Number(this._engines.value)) } });
    this._pause = button("Pause", () => this._hold(this._end === null ? this._now() : null), { id: "pause" });
    this._pause.setAttribute("aria-pressed", "false");
    const zoom = (by) => () => {
      const at = SPANS.indexOf(this._span) + by;
      this._span = SPANS[Math.max(0, Math.min(SPANS.length - 1, at))];
      this._spanShown.textContent = `${this._span} s`;
    };
    this._spanShown = el("output", { ariaLabel: "Seconds shown" }, `${this._span} s`);
    this._past = el("input", {
      type: "range", id: "past", min: -120, max: 0, step: 0.05, value: 0, ariaLabel: "Scroll back in time",
      on: { input: () => this._hold(this._now() + Number(this._past.value)) },
    });
    this._cards = el("dl", { className: "cards" });
    this._lanes = new Lanes((request) => this._chooseRequest(request), (by) => this._move(by));
    this._queueStrip = strip("Waiting and running", "running");
    this._tokenStrip = strip("Tokens of each step", "budget");
    this._pageStrip = strip("Pages of the cache", "pages");
    this._life = el("aside", { id: "life", ariaLabel: "Life of a request", hidden: true });
    this._curves = new CurveBoard();
    this._said = el("p", { className: "quiet", id: "said", role: "status" });
    place.append(
      this._problem,
      el("div", { className: "bar" }, this._tryIt(), el(
        "div", { className: "row" }, this._engines, button("-", zoom(1), { ariaLabel: "Show more seconds" }),
        this._spanShown, button("+", zoom(-1), { ariaLabel: "Show fewer seconds" }), this._past, this._pause,
      )),
      this._cards,
      el(
        "div", { className: "stage" },
        el(
          "div", { className: "timeline" },
          this._queueStrip.node, this._lanes.node, this._tokenStrip.node, this._pageStrip.node,
          this._said, legend(),
        ),
        this._life,
      ),
      this._curves.node,
    );
  }

  _tryIt() {
    const running = el("span", { className: "quiet" });
    const stop = button("Stop them", () => samples.stop(), { hidden: true, id: "stop-samples" });
    const samples = new Samples(
      (count) => {
        running.textContent = count ? `${count} on their way` : "";
        stop.hidden = !count;
      },
      (error) => {
        this._problem.hidden = false;
        this._problem.textContent = error.message;
      },
    );
    const buttons = KINDS.map((kind) =>
      button(kind.name, () => samples.send(kind).catch((error) => (running.textContent = error.message)), {
        title: kind.title ?? `Sends ${kind.count} sample requests`,
      }),
    );
    return el("div", { className: "row tryit", role: "group", ariaLabel: "Try it" }, el("span", {}, "Try it:"), buttons, stop, running);
  }

  _offerEngines(count) {
    if (count === this._engines.length) return;
    this._engines.replaceChildren(...Array.from({ length: count }, (_, at) => el("option", { value: at }, `engine ${at}`)));
    this._engines.hidden = count < 2;
  }

  _choose(engine) {
    this._engine = engine;
    this._history.clear();
    this._curves.clear();
    this._offset = null;
    this._chooseRequest(null);
  }

  // -- time ---------------------------------------------------------------------------------

  _now() {
    return this._offset === null ? 0 : performance.now() / 1000 + this._offset - DELAY_S;
  }

  // Stands still with this right edge, or is live again.
  _hold(end) {
    this._end = end;
    this._pause.textContent = end === null ? "Pause" : "Live";
    this._pause.setAttribute("aria-pressed", String(end !== null));
    if (end === null) this._past.value = 0;
  }

  _move(share) {
    const oldest = this._history.steps[0]?.from ?? this._now();
    const wanted = (this._end ?? this._now()) + share * this._span;
    if (wanted >= this._now()) this._hold(null);
    else this._hold(Math.max(wanted, oldest));
    this._past.value = this._end === null ? 0 : this._end - this._now();
  }

  // -- showing ------------------------------------------------------------------------------

  _draw() {
    const end = this._end ?? this._now();
    const span = { from: end - this._span, to: end };
    const { steps } = this._history;
    const colors = this._colors;
    this._lanes.draw(this._history, span, colors, this._chosen);
    const seen = draw.within(steps, span);
    const mostQueued = Math.max(4, ...seen.map((step) => step.waiting + step.running));
    this._queueStrip.draw(String(mostQueued), (on) => {
      draw.grid(on, span, colors);
      draw.areas(on, steps, [[colors.decode, (s) => s.running], [colors.wait, (s) => s.waiting]], mostQueued, span);
    });
    const fed = (step) => step.chunks.reduce((sum, [, tokens]) => sum + tokens, 0);
    const mostFed = Math.max(8, ...seen.map((step) => fed(step) + step.rows + step.drafted));
    this._tokenStrip.draw(short(mostFed), (on) => {
      draw.grid(on, span, colors);
      const parts = [[colors.decode, (s) => s.rows], [colors.draft, (s) => s.drafted], [colors.prompt, fed]];
      draw.stacks(on, steps, parts, mostFed, span);
      draw.limits(on, seen, (step) => step.budget, mostFed, span, colors);
    });
    const pages = this._history.latest?.num_pages ?? 1;
    this._pageStrip.draw(short(pages), (on) => {
      const parts = [
        [colors.held, (s) => pages - s.free], [colors.cached, (s) => s.cached],
        [colors.blank, (s) => s.free - s.cached],
      ];
      draw.areas(on, steps, parts, pages, span);
    });
    this._curves.draw();
  }

  _summary() {
    const { latest, owners, steps } = this._history;
    const step = steps.at(-1);
    this._said.textContent = step
      ? `Step ${step.step}: ${step.rows} decode rows, ${step.chunks.length} chunks, ` +
        `${step.masked ? `${step.masked} masked, ` : ""}host ${seconds(step.host_s)}, device ` +
        `${seconds(step.device_s)}, ${step.mode || "no mode"}. ` +
        `${owners.size} of ${latest.num_slots} slots in use, ${latest.waiting} waiting.`
      : "No step yet: talk to the model, or try it above.";
  }

  _totals(reading) {
    const card = (name, value, title) =>
      el("div", { title }, el("dt", {}, name), el("dd", { data: { total: name } }, value));
    const total = (name) => reading.value(name);
    const prompt = total("vllm:prompt_tokens_total");
    const cached = total("vllm:prompt_tokens_cached_total");
    const { tokens, first, between } = this._curves.newest;
    this._cards.replaceChildren(
      card("running", short(total("vllm:num_requests_running")), "vllm:num_requests_running"),
      card("waiting", short(total("vllm:num_requests_waiting")), "vllm:num_requests_waiting"),
      card("tokens/s", short(tokens ?? 0), "of the last second"),
      card("first token", seconds(first), "mean of the newest"),
      card("per token", seconds(between), "mean of the newest"),
      card("generated", total("vllm:generation_tokens_total").toLocaleString("en"), "tokens since the start"),
      card("prompts", prompt.toLocaleString("en"), "tokens since the start"),
      card("cached", prompt ? `${Math.round((100 * cached) / prompt)} %` : "-", "of the prompts' tokens"),
      card("preempted", total("vllm:num_preemptions_total").toLocaleString("en"), "since the start"),
      card("steps", total("nanovllm:steps_total").toLocaleString("en"), "since the start"),
    );
  }

  _chooseRequest(request) {
    this._chosen = request === this._chosen ? null : request;
    this._life.hidden = this._chosen === null;
    if (this._chosen !== null) this._showLife();
  }

  _showLife() {
    const close = button("Close", () => this._chooseRequest(null));
    this._life.replaceChildren(
      el("div", { className: "row" }, el("h2", {}, `Request ${nameOf(this._chosen)}`), close),
      lifeOf(this._history, this._chosen),
    );
  }
}

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// A canvas below the lanes, with its name and its highest value beside it.
function strip(name, id) {
  const canvas = el("canvas", { role: "img", ariaLabel: name });
  const top = el("span", { className: "top" });
  const node = el("div", { className: "strip", id: `strip-${id}` }, el("p", { className: "gutter" }, el("span", {}, name), top), canvas);
  return {
    node,
    draw(most, work) {
      if (top.textContent !== most) top.textContent = most;
      work(draw.surface(canvas, 56));
    },
  };
}

function legend() {
  const items = [
    ["wait", "waiting"], ["prompt", "prompt chunk"], ["decode", "decoding"], ["draft", "drafts"],
    ["cached", "cached"], ["preempted", "preempted"], ["finished", "finished"], ["held", "pages held"],
    ["faint", "budget of a step"],
  ];
  return el("ul", { className: "legend" }, items.map(([name, text]) => el("li", { className: `k-${name}` }, text)));
}
