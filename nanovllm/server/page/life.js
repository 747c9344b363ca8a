// The events of one request, as a list.

import { el, seconds, short } from "./dom.js";
import { counted } from "./words.js";

export function lifeOf(history, request) {
  const life = history.lives.get(request);
  const queued = history.queue.find(([id]) => id === request);
  if (!life) {
    return el("p", {}, queued ? `Waiting for ${seconds(history.now - queued[1])}.` : "No events of this request are kept.");
  }
  const begun = life.came ?? life.events[0]?.at ?? history.now;
  const rows = [];
  const row = (at, ...text) =>
    rows.push(el("li", {}, el("time", {}, `+${seconds(Math.max(0, at - begun))}`), el("span", {}, ...text)));
  if (life.came !== null) row(life.came, "arrived");
  let chunks = [];
  const closeChunks = () => {
    if (!chunks.length) return;
    const tokens = chunks.reduce((sum, one) => sum + one.tokens, 0);
    const sizes = chunks.length > 1 ? ` in ${chunks.length} chunks: ${listed(chunks.map((one) => one.tokens))}` : "";
    row(chunks[0].at, `${counted(tokens, "prompt token")} computed${sizes}`);
    chunks = [];
  };
  for (const event of life.events) {
    if (event.kind === "chunk") {
      chunks.push(event);
      continue;
    }
    closeChunks();
    if (event.kind === "arriving") {
      row(event.at, `${counted(event.tokens, "token")} began to arrive from a tier below the GPU`);
    } else if (event.kind === "admitted") {
      row(event.at, `assigned slot ${event.slot}: ${counted(event.tokens, "token")}, ${short(event.cached)} from the cache`);
    } else if (event.kind === "preempted") {
      row(event.at, "preempted: its pages were needed; it resumes later");
    } else if (event.kind === "finished") {
      if (life.decoded) row(event.at, decodeSteps(life));
      row(event.at, `finished: ${event.reason}`);
    }
  }
  closeChunks();
  if (!life.finish && life.decoded) row(life.lastToken, decodeSteps(life));
  if (!life.finish && queued) row(history.now, queued[2] ? "waiting for pages" : "waiting");
  return el("ol", { className: "life" }, rows);
}

// The number of decode steps so far, and the time between them.
function decodeSteps(life) {
  const took = life.lastToken - life.firstToken;
  const pace = life.decoded > 1 && took > 0 ? `, one every ${seconds(took / life.decoded)}` : "";
  return `${counted(life.decoded, "decode step")}${pace}`;
}

const listed = (numbers) => (numbers.length > 8 ? [...numbers.slice(0, 8), "..."] : numbers).join(", ");
