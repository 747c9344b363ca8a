// What /debug/steps has told so far: steps in their order, what happened in each slot, and the life
// of each request. Knows nothing of drawing.
//
// A slot's bars are {kind, request, from, to, steps, tokens}: "wait" (before it got the slot),
// "prompt" (a chunk), "decode" (steps in a row). Its marks are {kind, request, at}: "finished" with
// a reason, "preempted", "cached". Times are seconds of the engine's clock.

const KEPT_S = 180;
const KEPT_STEPS = 30000;
const KEPT_LIVES = 4000;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = [];
    this.bars = new Map(); // by slot, in the order of time
    this.marks = new Map(); // by slot
    this.lives = new Map(); // by request
    this.newest = 0; // number of the newest step
    this.now = 0; // of the engine, when it answered last
    this.owners = new Map(); // request by slot, as of the newest answer
    this.queue = []; // [request, came, preempted], as of the newest answer
    this.latest = null; // the newest answer without its steps
    this._owners = new Map(); // as of the newest step
    this._decodes = [];
  }

  // Takes one answer. That of an engine that began anew clears all.
  take(answer) {
    if (answer.newest < this.newest) this.clear();
    const { steps, ...latest } = answer;
    for (const step of steps) this._take(step);
    this.latest = latest;
    this.now = answer.now_s;
    this.owners = new Map(Object.entries(answer.slots).map(([slot, id]) => [Number(slot), id]));
    this.queue = answer.queue;
    if (steps.length) this._forget(answer.now_s - KEPT_S);
  }

  // The request's state as of the newest answer.
  stateOf(request) {
    if (this.queue.some(([id]) => id === request)) return "waiting";
    const life = this.lives.get(request);
    if (life?.finish) return "finished";
    for (const [slot, id] of this.owners) {
      if (id === request) return this._decodes.includes(slot) ? "decoding" : "prompt";
    }
    return "gone";
  }

  _take(step) {
    const before = this.steps.at(-1);
    const follows = before !== undefined && before.step + 1 === step.step;
    if (!follows) this._owners = new Map(); // what became of them was not told
    step.from = follows && step.begun_s < before.ended_s ? before.ended_s : step.begun_s;
    const owners = step.slots
      ? new Map(Object.entries(step.slots).map(([slot, id]) => [Number(slot), id]))
      : this._owners;
    this._decodes = step.decodes ?? this._decodes;
    step.decodes = this._decodes;
    for (const [slot, request] of this._owners) {
      if (owners.get(slot) !== request) this._left(slot, request, step);
    }
    this._owners = owners;
    for (const admit of step.admitted) this._admitted(admit, step);
    for (const [slot, tokens] of step.chunks) this._fed(slot, tokens, step);
    for (const slot of step.decodes) this._decoded(slot, step);
    for (const [request, reason] of step.finished) this._finished(request, reason, step.ended_s);
    delete step.slots;
    this.steps.push(step);
    this.newest = step.step;
  }

  _life(request, came) {
    let life = this.lives.get(request);
    if (!life) {
      life = { request, came, slot: -1, events: [], prompt: 0, cached: 0, fed: 0, decoded: 0, finish: null };
      this.lives.set(request, life);
    }
    return life;
  }

  _admitted({ slot, request, prompt, tokens, cached, came_s: came }, step) {
    const life = this._life(request, came);
    const preempted = life.events.findLast((event) => event.kind === "preempted");
    life.slot = slot;
    life.prompt = prompt;
    life.came ??= came;
    if (!preempted) life.cached = cached;
    life.events.push({ kind: "admitted", at: step.from, slot, tokens, cached });
    this._bar(slot, { kind: "wait", request, from: preempted?.at ?? came, to: step.from, steps: 0, tokens: 0 });
    if (cached) this._mark(slot, { kind: "cached", request, at: step.from, tokens: cached });
  }

  _fed(slot, tokens, step) {
    const request = this._owners.get(slot);
    if (request === undefined) return;
    const life = this._life(request, null);
    life.slot = slot;
    life.fed += tokens;
    life.events.push({ kind: "chunk", at: step.from, to: step.ended_s, step: step.step, tokens });
    this._bar(slot, { kind: "prompt", request, from: step.from, to: step.ended_s, steps: 1, tokens });
  }

  _decoded(slot, step) {
    const request = this._owners.get(slot);
    if (request === undefined) return;
    const life = this._life(request, null);
    if (life.finish) return; // the step was planned before it ended
    life.slot = slot;
    life.decoded += 1;
    life.firstToken ??= step.from;
    life.lastToken = step.ended_s;
    const last = this.bars.get(slot)?.at(-1);
    if (last?.kind === "decode" && last.request === request && last.step === step.step - 1) {
      Object.assign(last, { to: step.ended_s, steps: last.steps + 1, step: step.step });
    } else {
      const bar = { kind: "decode", request, from: step.from, to: step.ended_s, steps: 1, tokens: 0 };
      this._bar(slot, { ...bar, step: step.step });
    }
  }

  _finished(request, reason, at) {
    const life = this.lives.get(request);
    if (!life) return;
    life.finish = { at, reason };
    life.events.push({ kind: "finished", at, reason });
    if (life.slot >= 0) this._mark(life.slot, { kind: "finished", request, at, reason });
  }

  // Its slot has another owner, or none, and it is not over: it was preempted.
  _left(slot, request, step) {
    const life = this.lives.get(request);
    if (!life || life.finish || !step.preempted) return;
    life.events.push({ kind: "preempted", at: step.from });
    this._mark(slot, { kind: "preempted", request, at: step.from });
    life.slot = -1;
  }

  _bar(slot, bar) {
    if (!this.bars.has(slot)) this.bars.set(slot, []);
    this.bars.get(slot).push(bar);
  }

  _mark(slot, mark) {
    if (!this.marks.has(slot)) this.marks.set(slot, []);
    this.marks.get(slot).push(mark);
  }

  _forget(until) {
    let gone = Math.max(0, this.steps.length - KEPT_STEPS);
    while (gone < this.steps.length && this.steps[gone].ended_s < until) gone += 1;
    if (gone < 500) return; // all at once, now and then
    const since = this.steps[gone - 1].ended_s;
    this.steps.splice(0, gone);
    for (const of of [this.bars, this.marks]) {
      for (const [slot, list] of of) {
        const kept = list.filter((one) => (one.to ?? one.at) > since);
        if (kept.length) of.set(slot, kept);
        else of.delete(slot);
      }
    }
    for (const [request, life] of this.lives) {
      if (this.lives.size <= KEPT_LIVES) break;
      if (life.finish) this.lives.delete(request);
    }
  }
}

// The index of the first of `list`, which is in the order of `key`, with key(one) >= value.
export function firstFrom(list, value, key) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(list[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// "0.17": the API process that took a request, and its how manieth it is there.
export function nameOf(request) {
  const worker = Math.floor(request / 2 ** 48);
  return worker ? `${worker}.${request % 2 ** 48}` : String(request);
}
