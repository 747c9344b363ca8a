// Talk: a conversation with the model. Owns its turns; a turn is {role, node, ...}. The node shows
// the turn, and `data` restores it after a reload.

import { chat, model, storedKey } from "./api.js";
import { Answer } from "./answer.js";
import * as conversation from "./conversation.js";
import { button, byId, el, visible } from "./dom.js";
import { startSettings } from "./settings.js";
import * as snippets from "./snippets.js";

const SETTINGS = "nanovllm-settings";
const LEAVING_MS = 3000;
const SUGGESTIONS = [
  ["Ask", "What is nanovllm?"],
  ["Let it think", "What is 17 + 25?"],
  ["Offer a tool", "What is the weather in Oslo?"],
  ["Extract JSON", "Extract name, age and city from this text as JSON: Maria is 34 years old, lives in Lima and works as a doctor."],
];

export function startTalk() {
  const talk = new Talk(byId("messages"), startSettings(byId("settings"), () => showSettings(false)));
  byId("show-settings").addEventListener("click", () => showSettings(byId("settings").hidden));
  showSettings(sessionStorage.getItem(SETTINGS) === "shown");
  byId("new-chat").addEventListener("click", () => talk.clear());
  window.addEventListener("beforeunload", () => talk.leave());
  window.addEventListener("pagehide", () => talk.store());
  document.addEventListener("view", () => talk.scrollToEnd());
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("prompt").value;
    if (!text.trim() || talk.isBusy) return;
    byId("prompt").value = "";
    grow(byId("prompt"));
    talk.say(text);
  });
  byId("prompt").addEventListener("input", () => grow(byId("prompt")));
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("stop").addEventListener("click", () => talk.stop());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && talk.isBusy && !document.querySelector("dialog[open]")) talk.stop();
  });
  byId("copy-now").addEventListener("click", copyShown);
}

function showSettings(isShown) {
  byId("settings").hidden = !isShown;
  byId("show-settings").setAttribute("aria-expanded", String(isShown));
  sessionStorage.setItem(SETTINGS, isShown ? "shown" : "hidden");
}

// Give a text area the height of its text, within limits.
function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
}

class Talk {
  constructor(place, settings) {
    this._place = place;
    this._settings = settings;
    this._turns = [];
    this._running = null; // an AbortController
    this._isLeaving = false;
    this._restore();
  }

  get isBusy() {
    return this._running !== null;
  }

  say(content) {
    this._add(this._userTurn(content));
    this._answer();
  }

  stop() {
    this._running?.abort();
  }

  // Start a new conversation and drop the old one.
  clear() {
    this.stop();
    this._turns = [];
    this.store();
    this._welcome();
    byId("prompt").focus();
  }

  // The browser ends a running stream with a network error when the page is left.
  leave() {
    this._isLeaving = true;
    setTimeout(() => (this._isLeaving = false), LEAVING_MS); // the visitor may stay
  }

  store() {
    conversation.store(this._turns.map((turn) => turn.data));
    byId("new-chat").disabled = !this._turns.length;
  }

  scrollToEnd() {
    this._place.scrollTop = this._place.scrollHeight;
  }

  // Show the conversation that this tab had before a reload, or the welcome.
  _restore() {
    this._welcome();
    for (const data of conversation.load()) {
      if (data.role === "user") this._add(this._userTurn(data.content));
      else if (data.role === "tool") this._add(this._toolTurn(data.calls, data.results, data.areSent));
      else this._add(this._restoredAnswer(data));
    }
    byId("new-chat").disabled = !this._turns.length;
  }

  _restoredAnswer({ system, fields, schema, answer }) {
    const turn = this._answerTurn(system, fields, schema, answer);
    turn.node.removeAttribute("aria-busy");
    turn.actions.hidden = false;
    showProblem(turn.problem, turn.answer.error);
    return turn;
  }

  _welcome() {
    const asks = SUGGESTIONS.map(([label, text]) => {
      const ask = () => {
        if (text.includes("weather") && !byId("set-tools").value) byId("example-tools").click();
        this.say(text);
      };
      return el("button", { type: "button", on: { click: ask } }, el("small", {}, label), el("span", {}, text));
    });
    this._place.replaceChildren(
      el(
        "div", { className: "welcome" },
        el("h2", {}, "Talk to the model"),
        el("p", {}, "Start with one of these, or ask anything. Watch shows the server at work."),
        el("div", { className: "suggestions" }, asks),
      ),
    );
  }

  _add(turn) {
    if (!this._turns.length) this._place.replaceChildren();
    this._turns.push(turn);
    this._place.append(turn.node);
    turn.node.scrollIntoView({ block: "end" });
  }

  // Remove a turn and all after it.
  _cut(turn) {
    this.stop();
    for (const gone of this._turns.splice(this._turns.indexOf(turn))) gone.node.remove();
  }

  // -- turns --------------------------------------------------------------------------------

  _userTurn(content) {
    const shown = el("div", { className: "prose", dir: "auto" }, content);
    const data = { role: "user", content };
    const turn = { role: "user", message: data, data };
    const edit = () => {
      const area = el("textarea", { value: content, rows: 3, ariaLabel: "Edited message" });
      const save = () => {
        this._cut(turn);
        this.say(area.value);
      };
      turn.node.replaceChildren(
        area,
        el(
          "p", { className: "row" },
          button("Send again", save, { className: "primary" }),
          button("Cancel", () => turn.node.replaceChildren(...usual)),
        ),
      );
      area.focus();
    };
    const usual = [el("div", { className: "bubble" }, shown), el("p", { className: "actions" }, button("Edit", edit))];
    turn.node = el("article", { className: "turn user", ariaLabel: "You" }, usual);
    return turn;
  }

  // A form for the results of an answer's calls. `results`: texts to restore. `areSent`: the
  // conversation went on with them.
  _toolTurn(calls, results = [], areSent = false) {
    const areas = calls.map((_, at) => el("textarea", { rows: 2, className: "result", required: true, value: results[at] ?? "" }));
    const rows = calls.map((call, at) => {
      const name = el("bdi", { className: "name" }, visible(call.name));
      areas[at].placeholder = '{"temperature": 7, "condition": "rainy"}';
      return el("label", { className: "tall" }, el("span", {}, "Result of ", name), areas[at]);
    });
    const messages = () => calls.map((call, at) => ({ role: "tool", tool_call_id: call.id, content: areas[at].value }));
    const turn = {
      role: "tool",
      messages: areSent ? messages() : null,
      get data() {
        const named = calls.map(({ id, name }) => ({ id, name }));
        return { role: "tool", calls: named, results: areas.map((area) => area.value), areSent: turn.messages !== null };
      },
    };
    const send = el("button", { className: "primary" }, calls.length > 1 ? "Send the results" : "Send the result");
    const form = el("form", { className: "results" }, rows, el("p", { className: "row" }, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) return;
      const after = this._turns[this._turns.indexOf(turn) + 1];
      if (after) this._cut(after);
      turn.messages = messages();
      this._answer();
    });
    turn.node = el("article", { className: "turn tool", ariaLabel: "Results of tools" }, form);
    return turn;
  }

  // `restored`: an answer's data from before a reload, or null for a new answer.
  _answerTurn(system, fields, schema, restored = null) {
    const choose = () => this._follow(turn);
    const answer = restored ? Answer.from(restored, schema, choose) : new Answer(schema, choose);
    const turn = {
      role: "assistant",
      answer,
      get data() {
        return { role: "assistant", system, fields, schema, answer: answer.data };
      },
    };
    const again = () => {
      this._cut(turn);
      this._answer();
    };
    const copies = [["curl", snippets.curl], ["openai-python", snippets.python]].map(([name, write]) =>
      button(`Copy as ${name}`, async () => {
        const body = await this._body(system, fields, this._turns.indexOf(turn));
        showCopy(name, write(body, address(), storedKey() !== null));
      }),
    );
    turn.problem = el("p", { className: "problem", role: "alert", hidden: true });
    turn.actions = el("p", { className: "actions", hidden: true }, button("Again", again), copies);
    turn.node = el(
      "article", { className: "turn assistant", ariaLabel: "The model", ariaBusy: "true" },
      el("span", { className: "avatar" }),
      el("div", { className: "reply" }, answer.node, turn.problem, answer.stats, turn.actions),
    );
    return turn;
  }

  // A finished answer that calls tools is followed by a form for their results.
  _follow(turn) {
    if (this.isBusy) return;
    const after = this._turns[this._turns.indexOf(turn) + 1];
    if (after) this._cut(after);
    if (turn.answer.calls.length && !turn.answer.error) this._add(this._toolTurn(turn.answer.calls));
    this.store();
  }

  // -- requests -----------------------------------------------------------------------------

  // The body of the request for the turn with this index.
  async _body(system, fields, index) {
    const messages = this._turns.slice(0, index).flatMap((turn) => {
      if (turn.role === "assistant") return turn.answer.message ?? [];
      return turn.role === "tool" ? turn.messages ?? [] : turn.message;
    });
    if (system) messages.unshift({ role: "system", content: system });
    const { id } = await model();
    return { model: id, messages, ...fields, stream: true, stream_options: { include_usage: true } };
  }

  // Request the model's next turn, and show it while it arrives.
  async _answer() {
    let system, fields, schema, body;
    const running = new AbortController();
    this._busy(running);
    this.store();
    try {
      ({ system, fields } = this._settings.fields());
      schema = this._settings.schema();
      body = await this._body(system, fields, this._turns.length);
    } catch (error) {
      this._busy(null);
      this._addFailed(error);
      return;
    }
    if (running.signal.aborted) {
      this._busy(null); // the visitor stopped it or started a new chat before the request
      return;
    }
    const turn = this._answerTurn(system, fields, schema);
    this._add(turn);
    let problem = null;
    try {
      for await (const chunk of chat(body, running.signal)) {
        const follows = isAtEnd(this._place);
        turn.answer.take(chunk);
        if (follows) this.scrollToEnd();
      }
    } catch (error) {
      problem = this._isLeaving ? new DOMException("the page was left", "AbortError") : error;
    }
    if (this._running === running) this._busy(null);
    turn.answer.end(problem);
    turn.node.removeAttribute("aria-busy");
    turn.actions.hidden = false;
    showProblem(turn.problem, turn.answer.error);
    if (this._turns.includes(turn)) this._follow(turn);
    this.store();
    if (isAtEnd(this._place)) this.scrollToEnd();
  }

  // Show an error instead of an answer: no request was sent.
  _addFailed(error) {
    const turn = this._answerTurn("", {}, null);
    turn.answer.end(error);
    turn.node.removeAttribute("aria-busy");
    showProblem(turn.problem, error);
    this._add(turn);
    this.store();
  }

  _busy(running) {
    this._running = running;
    byId("send").hidden = running !== null;
    byId("stop").hidden = running === null;
  }
}

const isAtEnd = (place) => place.scrollHeight - place.scrollTop - place.clientHeight < 120;

// The API's address, for commands to paste.
const address = () => new URL(".", location.href).href;

function showProblem(node, error) {
  node.hidden = !error;
  if (!error) return;
  const code = error.status ? `${error.status}${error.code ? ` ${error.code}` : ""}: ` : "";
  const text = error instanceof TypeError ? "the server does not respond" : error.message;
  node.textContent = `${visible(code)}${text}`;
}

function showCopy(name, text) {
  byId("copy-title").textContent = `This request as ${name}`;
  byId("copy-text").value = text;
  byId("copy-now").textContent = "Copy";
  byId("copy-dialog").showModal();
}

async function copyShown() {
  byId("copy-text").select();
  try {
    await navigator.clipboard.writeText(byId("copy-text").value);
  } catch {
    document.execCommand("copy"); // the clipboard needs https
  }
  byId("copy-now").textContent = "Copied";
}
