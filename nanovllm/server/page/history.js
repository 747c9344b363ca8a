// The answers of /debug/steps as a history: steps in order, bars and marks of each slot, and the
// events of each request. Independent of drawing.
//
// A slot's bars are {kind, request, from, to, steps, tokens}. Kinds: "wait" (before the request got
// the slot), "arriving" (its pages came from a tier below the GPU), "prompt" (a chunk), "decode"
// (consecutive steps; `step` is the last one). Its marks are
// {kind, request, at}. Kinds: "finished" with a reason, "preempted", "cached". Times are seconds of
// the engine's clock.

const KEPT_S = 180;
const KEPT_STEPS = 30000;
const KEPT_LIVES = 4000;
const KEPT_ANSWERS = 40;
export const RATE_S = 2;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = [];
    this.bars = new Map(); // by slot, in the order of time
    this.marks = new Map(); // by slot
    this.lives = new Map(); // by request
    this.newest = 0; // number of the latest step
    this.now = 0; // the engine's time in the latest answer
    this.owners = new Map(); // request by slot, as of the latest answer
    this.arriving = new Map(); // time since which a request's pages arrive, as of the latest answer
    this.queue = []; // [request, arrival time, preempted], as of the latest answer
    this.latest = null; // the latest answer without its steps
    this._owners = new Map(); // as of the latest step
    this._decodes = [];
    this._answers = []; // {at, running, waiting} of the last answers
  }

  // Add one answer. The first answer of a restarted engine clears the history.
  take(answer) {
    if (answer.newest < this.newest) this.clear();
    const { steps, ...latest } = answer;
    for (const step of steps) this._take(step);
    this.latest = latest;
    this.now = answer.now_s;
    this.owners = new Map(Object.entries(answer.slots).map(([slot, id]) => [Number(slot), id]));
    this.arriving = new Map(answer.arriving);
    this.queue = answer.queue;
    this._answers.push({ at: answer.now_s, running: this.owners.size, waiting: answer.waiting });
    if (this._answers.length > KEPT_ANSWERS) this._answers.shift();
    if (steps.length) this._forget(answer.now_s - KEPT_S);
  }

  // The last step that had ended at a time; undefined before the first one.
  stepAt(time) {
    return this.steps[firstFrom(this.steps, time + 1e-9, (step) => step.ended_s) - 1];
  }

  // {running, waiting, step} at a time: of the last step, or of an answer that is later.
  stateAt(time) {
    const step = this.stepAt(time);
    const answer = this._answers.findLast((one) => one.at <= time);
    const last = answer && !(step?.ended_s > answer.at) ? answer : step;
    return { running: last?.running ?? 0, waiting: last?.waiting ?? 0, step };
  }

  // Tokens generated per second in the RATE_S seconds before a time.
  rateAt(time) {
    let tokens = 0;
    for (let at = firstFrom(this.steps, time - RATE_S, (step) => step.ended_s); at < this.steps.length; at += 1) {
      if (this.steps[at].ended_s > time) break;
      tokens += this.steps[at].generated;
    }
    return tokens / RATE_S;
  }

  // The times from arrival to first token of requests that got it since a time, sorted.
  firstTokens(since) {
    const lives = [...this.lives.values()].filter((life) => life.came !== null && life.firstToken >= since);
    return lives.map((life) => life.firstToken - life.came).sort((one, other) => one - other);
  }

  _take(step) {
    const before = this.steps.at(-1);
    const follows = before !== undefined && before.step + 1 === step.step;
    if (!follows) this._owners = new Map(); // steps are missing, and the events in them
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

  _admitted({ slot, request, prompt, tokens, cached, came_s: came, loaded, arriving_s: arriving }, step) {
    const life = this._life(request, came);
    const preempted = life.events.findLast((event) => event.kind === "preempted");
    life.slot = slot;
    life.prompt = prompt;
    life.came ??= came;
    if (!preempted) life.cached = cached;
    const from = loaded ? arriving || step.from : step.from;
    if (loaded) life.events.push({ kind: "arriving", at: from, tokens: loaded });
    life.events.push({ kind: "admitted", at: step.from, slot, tokens, cached });
    this._bar(slot, { kind: "wait", request, from: preempted?.at ?? came, to: from, steps: 0, tokens: 0 });
    if (loaded) this._bar(slot, { kind: "arriving", request, from, to: step.from, steps: 0, tokens: loaded });
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
    if (life.finish) return; // the step was planned before the request ended
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

  // The slot of an unfinished request has no owner or another one: the request was preempted.
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
    let numOld = Math.max(0, this.steps.length - KEPT_STEPS);
    while (numOld < this.steps.length && this.steps[numOld].ended_s < until) numOld += 1;
    if (numOld < 500) return; // prune rarely, in large batches
    const since = this.steps[numOld - 1].ended_s;
    this.steps.splice(0, numOld);
    for (const lists of [this.bars, this.marks]) {
      for (const [slot, list] of lists) {
        const kept = list.filter((one) => (one.to ?? one.at) > since);
        if (kept.length) lists.set(slot, kept);
        else lists.delete(slot);
      }
    }
    for (const [request, life] of this.lives) {
      if (this.lives.size <= KEPT_LIVES) break;
      if (life.finish) this.lives.delete(request);
    }
  }
}

// The index of the first element with key(element) >= value. `list` is sorted by `key`.
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

// "0.17": the index of the API process, and the request's number in that process.
export function nameOf(request) {
  const worker = Math.floor(request / 2 ** 48);
  return worker ? `${worker}.${request % 2 ** 48}` : String(request);
}
