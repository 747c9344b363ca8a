// The lanes: one for each slot that somebody had in the time shown. A canvas has the picture; the
// buttons beside it say the same in words, and choose a request.

import { el } from "./dom.js";
import * as draw from "./draw.js";
import { nameOf } from "./history.js";

const STATES = { waiting: "waiting", prompt: "prompt", decoding: "decoding", finished: "finished", gone: "" };

export class Lanes {
  // `choose(request)`: a lane was chosen. `move(share)`: go so many spans forth, or back.
  constructor(choose, move) {
    this._choose = choose;
    this._labels = el("div", { className: "labels", role: "list", ariaLabel: "Slots" });
    this._canvas = el("canvas", { role: "img", id: "lanes-picture" });
    this._empty = el("p", { className: "quiet empty" }, "Nothing runs. Try it above: lanes appear as requests get slots.");
    this.node = el("div", { className: "lanes", id: "lanes" }, this._labels, this._canvas, this._empty);
    this._buttons = new Map(); // by slot
    this._rows = []; // slots, from the top
    this._span = { from: 0, to: 1 };
    this._pitch = 18;
    this._history = null;
    this._labelledAt = 0;
    this._listen(move);
  }

  draw(history, span, colors, chosen) {
    this._history = history;
    this._span = span;
    const rows = slotsSeen(history, span);
    this._pitch = Math.max(9, Math.min(20, Math.floor(460 / Math.max(1, rows.length))));
    this._empty.hidden = rows.length > 0;
    const now = performance.now();
    if (rows.join() !== this._rows.join() || now - this._labelledAt > 500) {
      this._rows = rows;
      this._labelledAt = now;
      this._label(history, chosen);
    }
    const on = draw.surface(this._canvas, Math.max(1, rows.length * this._pitch));
    draw.lanes(on, history, rows, this._pitch, span, colors, chosen);
  }

  _label(history, chosen) {
    this._canvas.setAttribute("aria-label", `${this._rows.length} lanes of slots over time`);
    for (const [slot, node] of this._buttons) {
      if (!this._rows.includes(slot)) {
        node.remove();
        this._buttons.delete(slot);
      }
    }
    this.node.classList.toggle("tight", this._pitch < 13);
    for (const [row, slot] of this._rows.entries()) {
      const request = history.owners.get(slot) ?? lastOf(history, slot);
      const state = STATES[request === undefined ? "gone" : history.stateOf(request)];
      let node = this._buttons.get(slot);
      if (!node) {
        node = el("button", { type: "button", data: { slot }, on: { click: () => this._choose(Number(node.dataset.request)) } });
        this._buttons.set(slot, node);
      }
      if (this._labels.children[row] !== node) this._labels.insertBefore(node, this._labels.children[row] ?? null);
      const text = request === undefined ? `slot ${slot}` : `${slot} \u00b7 #${nameOf(request)} `;
      if (node.textContent !== text + state) {
        node.replaceChildren(text, el("span", {}, state));
        node.setAttribute("aria-label", `Slot ${slot}, request ${nameOf(request ?? 0)}, ${state || "not running"}`);
      }
      node.dataset.request = request ?? "";
      node.dataset.state = state;
      node.style.height = `${this._pitch}px`;
      node.setAttribute("aria-pressed", String(request !== undefined && request === chosen));
    }
  }

  _listen(move) {
    let from = null;
    let moved = false;
    this._canvas.addEventListener("pointerdown", (event) => {
      from = event.clientX;
      moved = false;
      this._canvas.setPointerCapture(event.pointerId);
    });
    this._canvas.addEventListener("pointermove", (event) => {
      if (from === null || (!moved && Math.abs(event.clientX - from) < 4)) return;
      moved = true;
      move((from - event.clientX) / this._canvas.clientWidth);
      from = event.clientX;
    });
    this._canvas.addEventListener("pointerup", (event) => {
      if (from !== null && !moved) this._choose(this._requestAt(event));
      from = null;
    });
    this.node.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        event.preventDefault();
        move(event.key === "ArrowLeft" ? -0.1 : 0.1);
      }
    });
  }

  // Whose bar it is; null where there is none.
  _requestAt(event) {
    const box = this._canvas.getBoundingClientRect();
    const slot = this._rows[Math.floor((event.clientY - box.top) / this._pitch)];
    const share = (event.clientX - box.left) / box.width;
    const time = this._span.from + share * (this._span.to - this._span.from);
    const bars = this._history?.bars.get(slot) ?? [];
    const near = (this._span.to - this._span.from) / 200;
    const hit = bars.findLast((bar) => bar.from - near <= time && time <= bar.to + near);
    return hit?.request ?? null;
  }
}

function slotsSeen(history, span) {
  const seen = new Set();
  for (const [slot, bars] of history.bars) {
    if (bars.some((bar) => bar.to >= span.from && bar.from <= span.to && bar.kind !== "wait")) seen.add(slot);
  }
  return [...seen].sort((one, other) => one - other);
}

const lastOf = (history, slot) => history.bars.get(slot)?.at(-1)?.request;
