// Talk: a conversation with the model. Owns its turns; a turn is {role, node, ...} and the node is
// what is shown of it.

import { chat, model, storedKey } from "./api.js";
import { Answer } from "./answer.js";
import { button, byId, el, visible } from "./dom.js";
import { startSettings } from "./settings.js";
import * as snippets from "./snippets.js";

const SUGGESTIONS = [
  "What is nanovllm?",
  "What is 17 + 25?",
  "What is the weather in Oslo?",
  "Extract name, age and city from this text as JSON: Maria is 34 years old, lives in Lima and works as a doctor.",
];

export function startTalk() {
  const talk = new Talk(byId("messages"), startSettings(byId("settings")));
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

// As high as its text, within limits.
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
    this._welcome();
  }

  get isBusy() {
    return this._running !== null;
  }

  say(content) {
    if (!this._turns.length) this._place.replaceChildren();
    this._add(this._userTurn(content));
    this._answer();
  }

  stop() {
    this._running?.abort();
  }

  _welcome() {
    const asks = SUGGESTIONS.map((text) =>
      button(text, () => {
        if (text.includes("weather") && !byId("set-tools").value) byId("example-tools").click();
        this.say(text);
      }),
    );
    this._place.replaceChildren(
      el(
        "div", { className: "welcome" },
        el("h2", {}, "Talk to the model"),
        el("p", {}, "or look at how it is served, step by step, under Watch."),
        el("div", { className: "suggestions" }, asks),
      ),
    );
  }

  _add(turn) {
    this._turns.push(turn);
    this._place.append(turn.node);
    turn.node.scrollIntoView({ block: "end" });
  }

  // Forgets this turn and all behind it.
  _cut(turn) {
    this.stop();
    for (const gone of this._turns.splice(this._turns.indexOf(turn))) gone.node.remove();
  }

  // -- turns --------------------------------------------------------------------------------

  _userTurn(content) {
    const shown = el("div", { className: "prose", dir: "auto" }, content);
    const turn = { role: "user", message: { role: "user", content } };
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
    const usual = [shown, el("p", { className: "actions" }, button("Edit", edit))];
    turn.node = el("article", { className: "turn user", ariaLabel: "You" }, usual);
    return turn;
  }

  // A place for the results of the calls of an answer, which go on with the conversation.
  _toolTurn(calls) {
    const areas = calls.map(() => el("textarea", { rows: 2, className: "result", required: true }));
    const rows = calls.map((call, at) => {
      const name = el("bdi", { className: "name" }, visible(call.name));
      areas[at].placeholder = '{"temperature": 7, "condition": "rainy"}';
      return el("label", { className: "tall" }, el("span", {}, "Result of ", name), areas[at]);
    });
    const turn = { role: "tool", messages: null };
    const send = el("button", { className: "primary" }, calls.length > 1 ? "Send the results" : "Send the result");
    const form = el("form", { className: "results" }, rows, el("p", { className: "row" }, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) return;
      const after = this._turns[this._turns.indexOf(turn) + 1];
      if (after) this._cut(after);
      turn.messages = calls.map((call, at) => ({
        role: "tool", tool_call_id: call.id, content: areas[at].value,
      }));
      this._answer();
    });
    turn.node = el("article", { className: "turn tool", ariaLabel: "Results of tools" }, form);
    return turn;
  }

  _answerTurn(body, schema) {
    const answer = new Answer(schema, () => this._follow(turn));
    const turn = { role: "assistant", answer };
    const again = () => {
      this._cut(turn);
      this._answer();
    };
    const copies = [["curl", snippets.curl], ["openai-python", snippets.python]].map(([name, write]) =>
      button(`Copy as ${name}`, () => showCopy(name, write(body, address(), storedKey() !== null))),
    );
    turn.problem = el("p", { className: "problem", role: "alert", hidden: true });
    turn.actions = el("p", { className: "actions", hidden: true }, button("Again", again), copies);
    turn.node = el(
      "article", { className: "turn assistant", ariaLabel: "The model", ariaBusy: "true" },
      answer.node, turn.problem, answer.stats, turn.actions,
    );
    return turn;
  }

  // Behind a finished answer that calls tools comes a place for their results.
  _follow(turn) {
    if (this.isBusy) return;
    const after = this._turns[this._turns.indexOf(turn) + 1];
    if (after) this._cut(after);
    if (turn.answer.calls.length && !turn.answer.error) this._add(this._toolTurn(turn.answer.calls));
  }

  // -- requests -----------------------------------------------------------------------------

  _messages(system) {
    const said = this._turns.flatMap((turn) => {
      if (turn.role === "assistant") return turn.answer.message ?? [];
      return turn.role === "tool" ? turn.messages ?? [] : turn.message;
    });
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  // Asks for the next turn of the model, and shows it while it comes.
  async _answer() {
    let body, schema;
    const running = new AbortController();
    this._busy(running);
    try {
      const { system, fields } = this._settings.fields();
      schema = this._settings.schema();
      const messages = this._messages(system);
      const { id } = await model();
      body = { model: id, messages, ...fields, stream: true, stream_options: { include_usage: true } };
    } catch (error) {
      this._busy(null);
      this._add(this._failedTurn(error));
      return;
    }
    const turn = this._answerTurn(body, schema);
    this._add(turn);
    let problem = null;
    try {
      for await (const chunk of chat(body, running.signal)) {
        const follows = isAtEnd(this._place);
        turn.answer.take(chunk);
        if (follows) this._place.scrollTop = this._place.scrollHeight;
      }
    } catch (error) {
      problem = error;
    }
    if (this._running === running) this._busy(null);
    turn.answer.end(problem);
    turn.node.removeAttribute("aria-busy");
    turn.actions.hidden = false;
    showProblem(turn.problem, turn.answer.error);
    if (this._turns.includes(turn)) this._follow(turn);
    if (isAtEnd(this._place)) this._place.scrollTop = this._place.scrollHeight;
  }

  _failedTurn(error) {
    const turn = this._answerTurn({}, null);
    turn.answer.end(error);
    showProblem(turn.problem, error);
    return turn;
  }

  _busy(running) {
    this._running = running;
    byId("send").hidden = running !== null;
    byId("stop").hidden = running === null;
  }
}

const isAtEnd = (place) => place.scrollHeight - place.scrollTop - place.clientHeight < 120;

// Where the API is, for commands to paste.
const address = () => new URL(".", location.href).href;

function showProblem(node, error) {
  node.hidden = !error;
  if (!error) return;
  const code = error.status ? `${error.status}${error.code ? ` ${error.code}` : ""}: ` : "";
  const text = error instanceof TypeError ? "the server does not answer" : error.message;
  node.textContent = `${visible(code)}${text}`;
}

function showCopy(name, text) {
  byId("copy-title").textContent = `This request, for ${name}`;
  byId("copy-text").value = text;
  byId("copy-now").textContent = "Copy";
  byId("copy-dialog").showModal();
}

async function copyShown() {
  byId("copy-text").select();
  try {
    await navigator.clipboard.writeText(byId("copy-text").value);
  } catch {
    document.execCommand("copy"); // without https there is no other way
  }
  byId("copy-now").textContent = "Copied";
}
