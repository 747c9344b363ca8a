// The lanes: one row for each slot. A canvas has the picture. The buttons next to it
// describe the same in words, and select a request.

import { el } from "./dom.js";
import * as draw from "./draw.js";
import { nameOf } from "./history.js";
import { STATES } from "./words.js";

const FEW_SLOTS = 24; // up to this number, free slots also have a row
const LABEL_EVERY_MS = 500;
const MAX_HEIGHT = 460;
const MIN_PITCH = 9;
const MAX_PITCH = 18;

export class Lanes {
  // `choose(request)`: a lane was chosen. `move(share)`: scroll by a share of the span.
  constructor(choose, move) {
    this._choose = choose;
    this._labels = el("div", { className: "labels", role: "list", ariaLabel: "Slots" });
    this._canvas = el("canvas", { role: "img", id: "lanes-picture" });
    this._empty = el("p", { className: "empty" }, "Nothing is running. Send some requests above; each active one gets a row.");
    this.node = el("div", { className: "lanes", id: "lanes" }, this._labels, this._canvas, this._empty);
    this.view = null; // the latest drawing's {slots, pitch, span, isLive, chosen}
    this._buttons = new Map(); // by slot
    this._history = null;
    this._labelledAt = 0;
    this._listen(move);
  }

  draw(history, span, colors, { chosen, isLive }) {
    this._history = history;
    const seen = slotsSeen(history, span);
    const numSlots = history.latest?.num_slots ?? 0;
    const slots = numSlots <= FEW_SLOTS ? Array.from({ length: numSlots }, (_, slot) => slot) : seen;
    const pitch = Math.max(MIN_PITCH, Math.min(MAX_PITCH, Math.floor(MAX_HEIGHT / Math.max(1, slots.length))));
    this._empty.hidden = seen.length > 0;
    const now = performance.now();
    const hasChanged = slots.join() !== this.view?.slots.join();
    this.view = { slots, pitch, span, isLive, chosen };
    if (hasChanged || now - this._labelledAt > LABEL_EVERY_MS) {
      this._labelledAt = now;
      this._label(history, chosen);
    }
    const on = draw.surface(this._canvas, Math.max(1, slots.length * pitch));
    draw.lanes(on, history, this.view, colors);
  }

  _label(history, chosen) {
    const { slots, pitch } = this.view;
    this._canvas.setAttribute("aria-label", `${slots.length} lanes of slots over time`);
    for (const [slot, node] of this._buttons) {
      if (!slots.includes(slot)) {
        node.remove();
        this._buttons.delete(slot);
      }
    }
    this.node.classList.toggle("tight", pitch < 13);
    for (const [row, slot] of slots.entries()) {
      const [request, state] = ownerOf(history, slot, this.view);
      let node = this._buttons.get(slot);
      if (!node) {
        const choose = () => node.dataset.request && this._choose(Number(node.dataset.request));
        node = el("button", { type: "button", data: { slot }, on: { click: choose } });
        this._buttons.set(slot, node);
      }
      if (this._labels.children[row] !== node) this._labels.insertBefore(node, this._labels.children[row] ?? null);
      const name = request === undefined ? "-" : `#${nameOf(request)}`;
      if (node.textContent !== `${slot} ${name} ${state}`) {
        node.replaceChildren(el("span", {}, `${slot} `), el("span", {}, `${name} `), el("span", {}, state));
        node.setAttribute("aria-label", `Slot ${slot}, ${request === undefined ? "" : `request ${nameOf(request)}, `}${state}`);
      }
      node.dataset.request = request ?? "";
      node.dataset.state = state;
      node.style.height = `${pitch}px`;
      node.setAttribute("aria-pressed", String(request !== undefined && request === chosen));
    }
  }

  _listen(move) {
    let from = null;
    let hasMoved = false;
    this._canvas.addEventListener("pointerdown", (event) => {
      from = event.clientX;
      hasMoved = false;
      this._canvas.setPointerCapture(event.pointerId);
    });
    this._canvas.addEventListener("pointermove", (event) => {
      if (from === null || (!hasMoved && Math.abs(event.clientX - from) < 4)) return;
      hasMoved = true;
      move((from - event.clientX) / this._canvas.clientWidth);
      from = event.clientX;
    });
    this._canvas.addEventListener("pointerup", (event) => {
      if (from !== null && !hasMoved) this._choose(this._requestAt(event));
      from = null;
    });
    this.node.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        event.preventDefault();
        move(event.key === "ArrowLeft" ? -0.1 : 0.1);
      }
    });
  }

  // The request whose bar is at the pointer, or null.
  _requestAt(event) {
    const { slots, pitch, span } = this.view;
    const box = this._canvas.getBoundingClientRect();
    const slot = slots[Math.floor((event.clientY - box.top) / pitch)];
    const share = (event.clientX - box.left) / box.width;
    const time = span.from + share * (span.to - span.from);
    const near = (span.to - span.from) / 200;
    const bars = this._history?.bars.get(slot) ?? [];
    return bars.findLast((bar) => bar.from - near <= time && time <= bar.to + near)?.request ?? null;
  }
}

// The last request of a slot within the span, and its state at the right edge.
export function ownerOf(history, slot, { span, isLive }) {
  const owner = history.owners.get(slot);
  if (isLive && history.arriving.has(owner)) return [owner, STATES.arriving];
  const bar = history.bars.get(slot)?.findLast((one) => one.kind !== "wait" && one.from <= span.to);
  const life = history.lives.get(bar?.request);
  const isOwner = owner === bar?.request;
  if (bar === undefined || (bar.to < span.from && !isOwner)) return [undefined, STATES.free];
  if (life?.finish?.at <= span.to) return [bar.request, STATES.finished];
  const left = history.marks.get(slot)?.findLast((mark) => mark.kind === "preempted" && mark.at <= span.to);
  if (left?.request === bar.request && left.at >= bar.to) return [bar.request, STATES.preempted];
  return [bar.request, STATES[bar.kind]];
}

function slotsSeen(history, span) {
  const seen = new Set();
  for (const [slot, bars] of history.bars) {
    if (bars.some((bar) => bar.to >= span.from && bar.from <= span.to && bar.kind !== "wait")) seen.add(slot);
  }
  for (const [slot, owner] of history.owners) if (history.arriving.has(owner)) seen.add(slot);
  return [...seen].sort((one, other) => one - other);
}
