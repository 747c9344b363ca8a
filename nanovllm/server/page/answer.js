// One answer of one or several choices: the content of its stream so far, and its elements.

import { el, formatted, onceAFrame, seconds, short, visible } from "./dom.js";
import { complaint } from "./schema.js";

// One choice, assembled from its chunks.
class Choice {
  constructor(index) {
    this.index = index;
    this.content = "";
    this.reasoning = "";
    this.calls = []; // {id, name, arguments}
    this.tokens = []; // of logprobs
    this.finish = null;
    this.thoughtFrom = this.thoughtTo = null; // ms
  }

  take({ delta, logprobs, finish_reason: finish }, now) {
    if (delta.reasoning) {
      this.thoughtFrom ??= now;
      this.reasoning += delta.reasoning;
    }
    if (delta.content || delta.tool_calls || finish) this.thoughtTo ??= now;
    this.content += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
      call.id += part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    if (logprobs?.content && !delta.reasoning) this.tokens.push(...logprobs.content);
    this.finish = finish ?? this.finish;
  }

  // Convert the choice to data and back.
  get data() {
    const { index, content, reasoning, calls, tokens, finish } = this;
    const thought = this.thoughtFrom === null ? null : (this.thoughtTo ?? performance.now()) - this.thoughtFrom;
    return { index, content, reasoning, calls, tokens, finish, thought };
  }

  static from({ thought, ...data }) {
    const times = thought === null ? {} : { thoughtFrom: 0, thoughtTo: thought };
    return Object.assign(new Choice(data.index), data, times);
  }

  // The message for the next request.
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning = this.reasoning;
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({
        id, type: "function", function: { name, arguments: text },
      }));
    }
    return message;
  }
}

export class Answer {
  static _count = 0;

  // `schema`: the JSON schema of the content, or null. `choose()` is called when the visitor selects
  // another choice to continue from.
  constructor(schema, choose) {
    this.node = el("div", { className: "choices" });
    this.stats = el("p", { className: "stats" });
    this.choices = [];
    this.chosen = 0;
    this.usage = null;
    this.isOver = this.wasStopped = false;
    this.error = null;
    this.begun = performance.now();
    this.first = this.last = null; // ms: the times of the first and the latest token
    this.draw = onceAFrame(() => this.drawNow());
    this._schema = schema;
    this._choose = choose;
    this._group = `chosen-${(Answer._count += 1)}`; // of radio buttons
    this._views = [];
  }

  get message() {
    return this.choices[this.chosen]?.message ?? null;
  }

  get calls() {
    return this.choices[this.chosen]?.calls ?? [];
  }

  take(chunk) {
    const now = performance.now();
    this.usage = chunk.usage ?? this.usage;
    for (const part of chunk.choices) {
      const { delta } = part;
      if (delta.content || delta.reasoning || delta.tool_calls) {
        this.first ??= now;
        this.last = now;
      }
      (this.choices[part.index] ??= new Choice(part.index)).take(part, now);
    }
    this.draw();
  }

  // Convert the answer to data and back. Times count from the request's start.
  get data() {
    const { chosen, usage, error } = this;
    const since = (time) => (time === null ? null : time - this.begun);
    return {
      chosen, usage, choices: this.choices.filter(Boolean).map((choice) => choice.data),
      first: since(this.first), last: since(this.last), wasStopped: this.wasStopped || !this.isOver,
      error: error && { message: error.message, status: error.status, code: error.code, name: error.name },
    };
  }

  static from({ choices, error, ...data }, schema, choose) {
    const answer = Object.assign(new Answer(schema, choose), data, { begun: 0, isOver: true });
    for (const choice of choices) answer.choices[choice.index] = Choice.from(choice);
    answer.error = error && Object.assign(new Error(error.message), { status: error.status, code: error.code });
    answer.drawNow();
    return answer;
  }

  // The answer is complete. `error`: the Error that ended it, or null.
  end(error) {
    this.isOver = true;
    this.wasStopped = error?.name === "AbortError";
    this.error = this.wasStopped ? null : error;
    this.drawNow();
  }

  drawNow() {
    for (const choice of this.choices) {
      if (!choice) continue;
      const view = (this._views[choice.index] ??= this._view(choice));
      view.draw(choice, this.isOver);
    }
    this.node.classList.toggle("several", this.choices.length > 1);
    this.stats.textContent = this._summary();
  }

  _view(choice) {
    const change = () => {
      this.chosen = choice.index;
      this._choose();
    };
    const checked = choice.index === this.chosen;
    const pick = el("input", { type: "radio", name: this._group, checked, on: { change } });
    const view = new ChoiceView(choice.index, this._schema, pick);
    this.node.append(view.node);
    return view;
  }

  // First token, speed, tokens and finish reason, as far as they are available.
  _summary() {
    const parts = [];
    if (this.first !== null) parts.push(`first token ${seconds((this.first - this.begun) / 1000)}`);
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: count } = this.usage;
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      const took = (this.last - this.first) / 1000;
      if (took > 0 && count > 1) parts.push(`${short((count - 1) / took)} tok/s`);
      parts.push(`${short(count)} tokens`, `prompt ${short(prompt)}, ${short(cached)} cached`);
    }
    const ends = [...new Set(this.choices.map((choice) => choice?.finish).filter(Boolean))];
    if (ends.length) parts.push(`finish: ${ends.map(visible).join(", ")}`);
    if (this.wasStopped) parts.push("stopped");
    return parts.join(" \u00b7 ");
  }
}

class ChoiceView {
  constructor(index, schema, pick) {
    this._schema = schema;
    this._shown = "";
    this._thoughtTime = el("summary");
    this._thought = el("div", { className: "prose", dir: "auto" });
    this._thinking = el("details", { className: "thinking", hidden: true }, this._thoughtTime, this._thought);
    this._content = el("div", { className: "content" });
    this._calls = el("div");
    this._verdict = el("p", { className: "verdict", hidden: true });
    const head = el("label", { className: "pick" }, pick, `Answer ${index + 1}`);
    this.node = el(
      "div", { className: "choice", data: { choice: index } },
      head, this._thinking, this._content, this._calls, this._verdict,
    );
  }

  draw(choice, isOver) {
    if (choice.reasoning) {
      this._thinking.hidden = false;
      const isThinking = choice.thoughtTo === null && !isOver;
      const took = ((choice.thoughtTo ?? performance.now()) - choice.thoughtFrom) / 1000;
      this._thoughtTime.textContent = isThinking ? "Thinking..." : `Thought for ${seconds(took)}`;
      this._thought.textContent = choice.reasoning.trim();
    }
    const shown = `${choice.content}/${choice.tokens.length}`;
    if (shown !== this._shown) {
      this._shown = shown;
      const tokens = tokensOf(choice.content.trimStart(), choice.tokens);
      this._content.replaceChildren(...(tokens.length ? [shaded(tokens)] : formatted(choice.content)));
    }
    if (choice.calls.length) this._calls.replaceChildren(...choice.calls.map(callCard));
    if (isOver && this._schema !== null && choice.content) this._check(choice.content);
  }

  _check(content) {
    let found = null;
    try {
      found = complaint(JSON.parse(content), this._schema);
    } catch (error) {
      found = error.message;
    }
    this._verdict.hidden = false;
    this._verdict.className = found ? "verdict bad" : "verdict good";
    this._verdict.textContent = found ? `Does not follow the schema: ${found}` : "Follows the schema";
  }
}

function callCard(call) {
  return el(
    "div", { className: "call" },
    el("p", {}, "Calls ", el("bdi", { className: "name" }, visible(call.name))),
    el("pre", { dir: "ltr" }, pretty(call.arguments)),
  );
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet, or not JSON
  }
}

// Return the content's tokens without the markers of thinking and calls around them. The first token
// loses its leading blank space. Return [] while the content is not a sequence of whole tokens,
// as in the middle of a character.
function tokensOf(content, tokens) {
  const begin = content ? tokens.map((token) => token.token).join("").lastIndexOf(content) : -1;
  if (begin < 0) return [];
  let at = 0;
  return tokens.flatMap((token) => {
    const from = at;
    at += token.token.length;
    if (at <= begin || from >= begin + content.length) return [];
    return from < begin ? [{ ...token, token: token.token.slice(begin - from) }] : [token];
  });
}

// Tokens, shaded by improbability: a darker one was less likely. The title lists the alternatives.
function shaded(tokens) {
  const spans = tokens.map((token) => {
    const chance = Math.exp(token.logprob);
    const others = (token.top_logprobs ?? [])
      .map((one) => `${percent(Math.exp(one.logprob))}  ${visible(one.token) || "(nothing)"}`)
      .join("\n");
    const span = el("span", { className: "token", title: `${percent(chance)}\n\n${others}` }, token.token);
    span.style.setProperty("--doubt-share", (1 - chance).toFixed(3));
    return span;
  });
  return el("div", { className: "prose tokens", dir: "auto" }, spans);
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0).padStart(4)} %`;
