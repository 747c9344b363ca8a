// Watch: the scheduler's steps as a moving picture. Owns the parts of the view and polls the server
// for their data; while the view is hidden, there is no polling.

import { AdapterTable } from "./adapters.js";
import * as api from "./api.js";
import { Axis, bandHead, LANES_LEGEND, sentences, Strip, STRIPS } from "./bands.js";
import { CurveBoard } from "./curves.js";
import { button, el, seconds, visible } from "./dom.js";
import * as draw from "./draw.js";
import { History, nameOf } from "./history.js";
import { Lanes } from "./lanes.js";
import { lifeOf } from "./life.js";
import { Reading } from "./metrics.js";
import * as picture from "./picture.js";
import { Tiles } from "./tiles.js";
import { FIRST, KINDS, Samples } from "./tryit.js";
import { modeName } from "./words.js";

const STEPS_EVERY_MS = 250;
const METRICS_EVERY_MS = 1000;
const STATE_EVERY_MS = 200; // numbers change less often than the picture
const DELAY_S = 0.35; // "now" is this long ago: by then the steps have arrived
const FRAME_MS = 45; // between two drawings; saves CPU time for the engine
const SPANS = [2, 5, 10, 30, 60, 120]; // seconds
const RECORD_S = 8;

export function startWatch() {
  const watch = new Watch(document.getElementById("watch"));
  document.addEventListener("view", (event) => watch.look(event.detail === "watch"));
  document.addEventListener("visibilitychange", () => watch.look(watch.isShown));
  document.addEventListener("theme", () => watch.recolour());
  return watch;
}

class Watch {
  constructor(place) {
    this.isShown = false;
    this._history = new History();
    this._engine = 0;
    this._numEngines = 1;
    this._span = 10; // seconds
    this._end = null; // the right edge while the picture is paused; null: live
    this._offset = null; // the engine's clock minus the page's, in seconds
    this._chosen = null; // a request
    this._isRunning = false;
    this._turn = 0; // counts starts: loops of an earlier start end
    this._isToPlay = false;
    this._metricsAt = this._statedAt = -Infinity;
    this._build(place);
    this.recolour();
  }

  // Start or stop polling and drawing.
  look(isShown) {
    this.isShown = isShown;
    const runs = isShown && !document.hidden;
    if (runs && !this._isRunning) {
      this._isRunning = true;
      this._turn += 1;
      const turn = this._turn;
      this._poll(turn);
      let drawn = 0;
      const frame = (now) => {
        if (!this._isRunning || turn !== this._turn) return;
        if (now - drawn > FRAME_MS) {
          drawn = now;
          this._draw(now);
        }
        requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    } else if (!runs) {
      this._isRunning = false;
    }
  }

  // Send the first sample once the engine has reported that it is idle.
  playOnce() {
    this._isToPlay = true;
  }

  recolour() {
    this._colors = draw.palette();
    this._curves.recolour(this._colors);
  }

  // -- polling ------------------------------------------------------------------------------

  // One request at a time: sample requests need the browser's other connections.
  async _poll(turn) {
    while (this._isRunning && turn === this._turn) {
      const begun = performance.now();
      try {
        await this._takeSteps();
        if (begun - this._metricsAt >= METRICS_EVERY_MS - STEPS_EVERY_MS / 2) {
          this._metricsAt = begun;
          await this._takeMetrics();
        }
        this._problem.hidden = true;
        this._play();
      } catch (error) {
        this._report(error instanceof TypeError ? "The server does not respond. Trying again." : error.message);
        await sleep(1000);
      }
      await sleep(Math.max(20, STEPS_EVERY_MS - (performance.now() - begun)));
    }
  }

  async _takeSteps() {
    const engine = this._engine;
    const answer = await api.json(`debug/steps?since=${this._history.newest}&engine=${engine}`);
    if (engine !== this._engine) return;
    const offset = answer.now_s - performance.now() / 1000;
    // Keep the largest offset: its answer was the fastest, so it is the most accurate. An offset
    // that is smaller by more than 1 s is adopted at once: the server's monotonic clock restarted.
    if (this._offset === null || offset > this._offset || this._offset - offset > 1) this._offset = offset;
    this._history.take(answer);
    this._offerEngines(answer.engines);
    if (this._chosen !== null) this._showLife();
  }

  _play() {
    if (!this._isToPlay) return;
    this._isToPlay = false;
    if (!this._history.owners.size && !this._history.latest.waiting) this._send(FIRST);
  }

  async _takeMetrics() {
    const engine = this._engine;
    const reading = new Reading(await api.text("metrics"), performance.now() / 1000, engine);
    if (engine !== this._engine) return;
    this._curves.take(reading, this._history.firstTokens(this._history.now - 60));
    this._tiles.showTotals(reading, this._curves.medians);
    this._adapters.take(reading);
  }

  _report(text) {
    this._problem.hidden = false;
    this._problem.textContent = text;
  }

  // -- parts --------------------------------------------------------------------------------

  _build(place) {
    this._problem = el("p", { className: "notice", role: "alert", hidden: true });
    this._curves = new CurveBoard();
    this._tiles = new Tiles(this._curves.speed.node);
    this._lanes = new Lanes((request) => this._chooseRequest(request), (by) => this._move(by));
    this._strips = STRIPS.map((spec) => new Strip(spec));
    this._axis = new Axis();
    this._adapters = new AdapterTable();
    this._life = el("aside", { id: "life", ariaLabel: "Events of a request", hidden: true });
    this._state = el("p", { className: "quiet", id: "said", role: "status" });
    const lanes = bandHead("Requests by slot", LANES_LEGEND).node;
    const columns = el("p", { className: "columns" }, ["Slot", "Request", "State"].map((name) => el("span", {}, name)));
    const note = el("p", { className: "note" }, "Each row is a slot of the batch. Numbers: tokens of a chunk, decode steps so far.");
    place.append(
      this._problem,
      this._tiles.node,
      this._tryIt(),
      el(
        "div", { className: "stage" },
        el(
          "div", { className: "timeline" },
          el("section", { className: "band", ariaLabel: "Lanes" }, el("div", { className: "bar" }, lanes, this._time()), el("div", { className: "lanes-head" }, columns, note), this._lanes.node),
          this._axis.node, this._strips.map((strip) => strip.node), this._state,
        ),
        this._life,
      ),
      this._adapters.node,
      this._curves.node,
      this._tiles.totals,
    );
  }

  _tryIt() {
    const status = el("span", { className: "quiet", id: "in-flight", role: "status" });
    this._failure = el("span", { className: "bad", id: "sample-failure", role: "alert" });
    const stop = button("Stop them", () => this._samples.stop(), { disabled: true, id: "stop-samples", title: "Cancel all sample requests of this page" });
    this._samples = new Samples(
      (inFlight, held) => {
        const more = held ? `; ${held} more follow when a connection is free` : "";
        status.textContent = inFlight ? `${inFlight} sample request${inFlight === 1 ? "" : "s"} in flight${more}` : "";
        stop.disabled = !inFlight;
      },
      (error) => (this._failure.textContent = error.message),
    );
    const buttons = KINDS.map((kind) => button(kind.name, () => this._send(kind), { title: kind.title }));
    return el("div", { className: "row tryit", role: "group", ariaLabel: "Send sample requests" }, el("span", { className: "label" }, "Send"), buttons, el("span", { className: "row running" }, stop, status), this._failure);
  }

  _time() {
    this._engines = el("select", { ariaLabel: "Engine", hidden: true, on: { change: () => this._choose(Number(this._engines.value)) } });
    this._spans = el(
      "select", { id: "span", ariaLabel: "Time shown", on: { change: () => (this._span = Number(this._spans.value)) } },
      SPANS.map((span) => el("option", { value: span, selected: span === this._span }, span < 60 ? `${span} s` : `${span / 60} min`)),
    );
    this._past = el("input", {
      type: "range", id: "past", min: -120, max: 0, step: 0.05, value: 0, ariaLabel: "Scroll back in time",
      on: { input: () => this._hold(this._now() + Number(this._past.value)) },
    });
    this._pause = button("Pause", () => this._hold(this._end === null ? this._now() : null), { id: "pause" });
    this._pause.setAttribute("aria-pressed", "false");
    const save = button("Save picture", () => picture.save(this._shot(), this._colors), { id: "save", title: "Download this picture as PNG" });
    this._record = button("Record", () => this._recordVideo(), {
      id: "record", title: `Download the next ${RECORD_S} seconds as a video`, hidden: !picture.canRecord(),
    });
    return el("div", { className: "row time" }, this._engines, this._spans, this._past, this._pause, save, this._record);
  }

  _send(kind) {
    this._failure.textContent = "";
    this._samples.send(kind, this._numEngines).catch((error) => (this._failure.textContent = error.message));
  }

  _offerEngines(count) {
    this._numEngines = count;
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

  // Pause with this right edge, or go live.
  _hold(end) {
    this._end = end;
    this._pause.textContent = end === null ? "Pause" : "Live";
    this._pause.setAttribute("aria-pressed", String(end !== null));
    if (end === null) this._past.value = 0;
    this._statedAt = -Infinity;
  }

  _move(share) {
    const oldest = this._history.steps[0]?.from ?? this._now();
    const wanted = (this._end ?? this._now()) + share * this._span;
    if (wanted >= this._now()) this._hold(null);
    else this._hold(Math.max(wanted, oldest));
    this._past.value = this._end === null ? 0 : this._end - this._now();
  }

  // -- showing ------------------------------------------------------------------------------

  _draw(now) {
    const isLive = this._end === null;
    const end = this._end ?? this._now();
    const span = { from: end - this._span, to: end };
    this._lanes.draw(this._history, span, this._colors, { chosen: this._chosen, isLive });
    this._axis.draw(this._span, isLive);
    const state = this._history.stateAt(end);
    for (const strip of this._strips) strip.draw(this._history, { span, state, isLive }, this._colors);
    this._curves.draw();
    if (now - this._statedAt < STATE_EVERY_MS) return;
    this._statedAt = now;
    this._tiles.showState(state, this._history.rateAt(end), this._history.latest);
    const text = sentences(this._history, state, isLive, modeName, seconds);
    if (this._state.textContent !== text) this._state.textContent = text;
  }

  // All that the saved picture shows.
  _shot() {
    return {
      history: this._history, view: this._lanes.view, state: this._history.stateAt(this._lanes.view.span.to),
      speed: this._tiles.speed, tiles: this._tiles.texts, model: visible(document.getElementById("model").textContent),
      text: this._state.textContent,
    };
  }

  async _recordVideo() {
    this._record.disabled = true;
    let left = RECORD_S;
    const count = () => (this._record.textContent = `Recording, ${left--} s left`);
    count();
    const timer = setInterval(count, 1000);
    try {
      await picture.record(() => this._shot(), () => this._colors, RECORD_S);
    } catch (error) {
      this._report(`The recording failed: ${error.message}`);
    }
    clearInterval(timer);
    this._record.textContent = "Record";
    this._record.disabled = false;
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
