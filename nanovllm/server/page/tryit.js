// Sample requests for Watch.
//
// Decision: a browser opens at most six connections to a server, and Watch polls on one of them. A
// sample is therefore one stream of up to 16 choices, each of which the engine serves as a request:
// "64 requests" take four connections, and five are allowed, so 64 can join 16 that are running.

import { chat, model } from "./api.js";

const MAX_STREAMS = 5;
const MAX_CHOICES = 16;
const TOPICS = ["a lighthouse", "the tides", "a slow train", "bread", "an old map", "winter", "bees", "glass"];
const FILLER =
  "The harbour town keeps a book of every ship that came in, with its cargo, its captain and the " +
  "weather of the day. ";
const FILLER_TOKENS = 30; // about

// `tokens`: the most tokens of an answer; `least`: the fewest, where an answer may end by itself.
// `filler`: tokens of text that lengthen the prompt. Counts, or shares of the context if below 1.
export const KINDS = [
  { name: "1 request", count: 1, tokens: 240, least: 140, title: "Send one sample request" },
  { name: "16 requests", count: 16, tokens: 240, least: 140, title: "Send 16 sample requests" },
  { name: "64 requests", count: 64, tokens: 240, least: 140, title: "Send 64 sample requests: those without a slot wait" },
  {
    name: "16 with a shared prefix", count: 16, tokens: 120, filler: 0.3,
    title: "Send 16 requests with one long prompt: computed in chunks once, then found in the prefix cache",
  },
  {
    name: "Overflow the cache", count: 16, tokens: 0.6, filler: 0.3,
    title: "Send 16 requests whose answers outgrow the cache: some are preempted and resume later",
  },
];
export const FIRST = KINDS[1];

export class Samples {
  // `changed(inFlight, held)`: requests that are sent, and those that need a free connection.
  // `failed(error)`: a request failed.
  constructor(changed, failed) {
    this._changed = changed;
    this._failed = failed;
    this._running = new Map(); // number of requests by AbortController
    this._held = []; // bodies
    this._number = 0; // of the latest prompt
  }

  // `spread`: the least number of streams, so that each of several engines gets one.
  async send({ count, tokens, least, filler = 0 }, spread = 1) {
    const context = (await model()).max_model_len;
    const size = (length) => (length < 1 ? Math.floor(length * context) : length);
    const streams = Math.min(count, Math.max(spread, Math.ceil(count / MAX_CHOICES)));
    for (let at = 0; at < streams; at += 1) {
      const topic = TOPICS[this._number++ % TOPICS.length];
      const task = `Number ${this._number}: write a long text about ${topic}. `;
      this._held.push({
        messages: [{ role: "user", content: task + FILLER.repeat(Math.round(size(filler) / FILLER_TOKENS)) }],
        n: Math.floor((count + at) / streams),
        max_tokens: size(tokens),
        ...(least ? { min_tokens: least } : { ignore_eos: true }),
        temperature: 1.6, // makes the answers to one prompt differ, also in length
        stream: true,
      });
    }
    this._go();
  }

  stop() {
    this._held = [];
    for (const running of this._running.keys()) running.abort();
    this._go();
  }

  _go() {
    while (this._held.length && this._running.size < MAX_STREAMS) this._run(this._held.shift());
    const inFlight = [...this._running.values()].reduce((sum, n) => sum + n, 0);
    this._changed(inFlight, this._held.reduce((sum, body) => sum + body.n, 0));
  }

  async _run(body) {
    const running = new AbortController();
    this._running.set(running, body.n);
    try {
      for await (const chunk of chat(body, running.signal)) void chunk;
    } catch (error) {
      if (error.name !== "AbortError") this._failed(error);
    }
    this._running.delete(running);
    this._go();
  }
}
