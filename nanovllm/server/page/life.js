// The life of one request, as a list.

import { el, seconds, short } from "./dom.js";

export function lifeOf(history, request) {
  const life = history.lives.get(request);
  const queued = history.queue.find(([id]) => id === request);
  if (!life) {
    return el("p", {}, queued ? `Waits since ${seconds(history.now - queued[1])}.` : "Nothing is known of it any more.");
  }
  const begun = life.came ?? life.events[0]?.at ?? history.now;
  const rows = [];
  const row = (at, ...said) =>
    rows.push(el("li", {}, el("time", {}, `+${seconds(Math.max(0, at - begun))}`), el("span", {}, ...said)));
  if (life.came !== null) row(life.came, "came");
  let chunks = [];
  const closeChunks = () => {
    if (!chunks.length) return;
    const tokens = chunks.reduce((sum, one) => sum + one.tokens, 0);
    const sizes = chunks.length > 1 ? ` in ${chunks.length} chunks: ${listed(chunks.map((one) => one.tokens))}` : "";
    row(chunks[0].at, `${short(tokens)} tokens fed${sizes}`);
    chunks = [];
  };
  for (const event of life.events) {
    if (event.kind === "chunk") {
      chunks.push(event);
      continue;
    }
    closeChunks();
    if (event.kind === "admitted") {
      row(event.at, `got slot ${event.slot}; ${short(event.tokens)} tokens to know, ${short(event.cached)} of them cached`);
    } else if (event.kind === "preempted") {
      row(event.at, "preempted: its pages were needed; it waits and goes on later");
    } else if (event.kind === "finished") {
      if (life.decoded) row(event.at, said(life));
      row(event.at, `finished: ${event.reason}`);
    }
  }
  closeChunks();
  if (!life.finish && life.decoded) row(life.lastToken, said(life));
  if (!life.finish && queued) row(history.now, queued[2] ? "waits for pages" : "waits");
  return el("ol", { className: "life" }, rows);
}

// Its decode steps so far, and how fast they came.
function said(life) {
  const took = life.lastToken - life.firstToken;
  const pace = life.decoded > 1 && took > 0 ? `, one in ${seconds(took / life.decoded)}` : "";
  return `${short(life.decoded)} decode steps${pace}`;
}

const listed = (numbers) => (numbers.length > 8 ? [...numbers.slice(0, 8), "..."] : numbers).join(", ");
