// The requests by LoRA adapter, as a table. Hidden while the engine has no adapters.

import { el, visible } from "./dom.js";

const STATES = ["running", "waiting"];
const count = (number) => (number ?? 0).toLocaleString("en");

export class AdapterTable {
  constructor() {
    this._slots = el("p", { className: "quiet" });
    this._rows = el("tbody");
    const columns = ["Name", "Running", "Waiting"].map((name) => el("th", { scope: "col" }, name));
    this.node = el(
      "section", { id: "adapters", ariaLabel: "Requests by adapter", hidden: true },
      el("div", { className: "band-head" }, el("h2", {}, "Adapters"), this._slots),
      el("div", { className: "rows" }, el("table", {}, el("thead", {}, el("tr", {}, columns)), this._rows)),
    );
    this._shown = "";
  }

  take(reading) {
    const counts = new Map(); // by the adapter's name: numbers of requests, by state
    for (const [{ adapter, state }, value] of reading.list("nanovllm:adapter_requests")) {
      counts.set(adapter, { ...counts.get(adapter), [state]: value });
    }
    const slots = reading.by("nanovllm:adapter_slots", "state");
    const shown = JSON.stringify([...slots, ...counts]);
    if (shown === this._shown) return;
    this._shown = shown;
    this.node.hidden = counts.size === 0;
    this._slots.textContent = "Requests by adapter. "
      + `Slots of the device in use: ${count(slots.get("in_use"))} of ${count(slots.get("capacity"))}.`;
    this._rows.replaceChildren(...[...counts].map(([name, byState]) => rowOf(name, byState)));
  }
}

function rowOf(name, byState) {
  const numbers = STATES.map((state) => el("td", {}, count(byState[state])));
  return el("tr", {}, el("th", { scope: "row" }, visible(name)), numbers);
}
