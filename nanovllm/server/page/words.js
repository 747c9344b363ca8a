// Plain words for the engine's terms, and numbers as text.

import { visible } from "./dom.js";

const MODES = { NONE: "eager", FULL: "full graph", PIECEWISE: "piecewise graph", PAPER: "simulated" };
const PHASES = { prefill: "prompts", decode: "decode", mixed: "mixed", structured: "with grammars" };
export const STATES = {
  arriving: "arriving", prompt: "prompt", decode: "decoding", preempted: "preempted", finished: "finished", free: "free",
};

// "NONE/decode" -> "eager". An unknown mode is shown as it is.
export function modeName(key) {
  return named(key)?.mode ?? visible(key);
}

// "NONE/decode" -> "decode, eager".
export function modeAndPhase(key) {
  const names = named(key);
  return names ? `${names.phase}, ${names.mode}` : visible(key);
}

function named(key) {
  const [mode, phase, ...rest] = key.split("/");
  if (rest.length || !Object.hasOwn(MODES, mode) || !Object.hasOwn(PHASES, phase)) return null;
  return { mode: MODES[mode], phase: PHASES[phase] };
}

// "20.0k" -> "20k", "3.00 s" -> "3 s", for the narrow labels at the end of an axis.
export const withoutZeros = (text) => text.replace(/\.0+(?!\d)/, "");

// "1 chunk", "2 chunks".
export function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

// The least round number, such as 1, 2, 3, 4, 5, 6, 8, 10 or 20, that is not below `value`.
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((digit) => digit * power).find((end) => end >= value * 0.9999) ?? 10 * power;
}
