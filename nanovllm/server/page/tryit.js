// Sample requests, so that there is something to watch.
//
// A browser opens six connections to a server at most, and the page's own questions need two: so
// many requests are few, with several choices each, which the engine serves like requests.

import { chat, model } from "./api.js";

const MOST_STREAMS = 4;
const MOST_CHOICES = 16;
const TOPICS = ["a lighthouse", "the tides", "a slow train", "bread", "an old map", "winter", "bees", "glass"];
const LONG =
  "The harbour town keeps a book of every ship that came in, with its cargo, its captain and the " +
  "weather of the day. ";

export const KINDS = [
  { name: "1 request", count: 1, tokens: 200 },
  { name: "16", count: 16, tokens: 200 },
  { name: "64", count: 64, tokens: 200 },
  { name: "16, one long beginning", count: 16, tokens: 120, words: 0.3, title: "Prompts that begin alike: chunks of the first, then hits of the prefix cache" },
  { name: "More than fits", count: 16, tokens: 0.6, words: 0.1, apart: true, title: "Answers that outgrow the cache together: some are preempted and go on later" },
];

export class Samples {
  // `changed(number)` hears how many requests are running, `failed(error)` what went wrong.
  constructor(changed, failed) {
    this._changed = changed;
    this._failed = failed;
    this._running = new Map(); // controllers, and how many requests each has
    this._waiting = [];
    this._num = 0;
  }

  // `tokens` of an answer, and the length of what stands in all prompts: whole numbers, or shares of
  // the context. `apart`: the prompts differ from their first word on.
  async send({ count, tokens, words = 0, apart = false }) {
    const context = (await model()).max_model_len;
    const streams = Math.max(Math.min(count, MOST_STREAMS), Math.ceil(count / MOST_CHOICES));
    const beginning = LONG.repeat(Math.round((words * context) / 30)); // some 30 tokens each
    const most = tokens < 1 ? Math.floor(tokens * context) : tokens;
    for (let at = 0; at < streams; at += 1) {
      const topic = TOPICS[this._num++ % TOPICS.length];
      const task = `Number ${this._num}: write a long text about ${topic}. `;
      const content = apart ? task + beginning : beginning + task;
      this._waiting.push({
        messages: [{ role: "user", content }],
        n: Math.floor(count / streams),
        max_tokens: most,
        ignore_eos: true,
        temperature: 1,
        stream: true,
      });
    }
    this._go();
  }

  stop() {
    this._waiting = [];
    for (const running of this._running.keys()) running.abort();
  }

  get number() {
    const waiting = this._waiting.reduce((sum, body) => sum + body.n, 0);
    return [...this._running.values()].reduce((sum, n) => sum + n, waiting);
  }

  _go() {
    while (this._waiting.length && this._running.size < MOST_STREAMS) this._run(this._waiting.shift());
    this._changed(this.number);
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
