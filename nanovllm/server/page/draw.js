// Drawing on canvases that show the same span of time: lanes of slots, and strips below them.
// An area is {ctx, width, height}; a span is {from, to} in seconds of the engine's clock.

import { firstFrom } from "./history.js";

const COLORS = [
  "wait", "arriving", "prompt", "decode", "draft", "preempted", "finished", "cached", "held", "blank", "track",
  "grid", "ink", "soft", "limit", "surface", "page", "on-bar", "accent",
];
const FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
const MIN_TICK_PX = 46;
const MAX_TICKS = 10;
const MIN_STEP_PX = 7; // narrower steps of a decode bar are not separated

export const font = (size, weight = 400) => `${weight} ${size}px ${FONT}`;

// The current theme's colours by name.
export function palette() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(COLORS.map((name) => [name, style.getPropertyValue(`--c-${name}`).trim()]));
}

// Return the cleared area of a canvas in CSS pixels, as sharp as the screen.
export function surface(canvas, height) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return { ctx, width, height };
}

// Return the function from a time to a place.
export function scaleOf(span, width) {
  const perSecond = width / (span.to - span.from);
  return (time) => (time - span.from) * perSecond;
}

// The distances of the time axis' ticks from its right edge, in seconds.
export function ticks(seconds, width) {
  const every = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60]
    .find((s) => (s / seconds) * width >= MIN_TICK_PX && seconds / s <= MAX_TICKS) ?? 60;
  const count = Math.floor(seconds / every + 1e-9);
  return Array.from({ length: count + 1 }, (_, at) => at * every);
}

export function grid({ ctx, width, height }, span, colors) {
  const seconds = span.to - span.from;
  ctx.fillStyle = colors.grid;
  for (const back of ticks(seconds, width)) {
    ctx.fillRect(Math.min(width - 1, Math.round(width - (back / seconds) * width)), 0, 1, height);
  }
}

// Draw one lane for each of `slots`, `pitch` pixels high. `chosen`: the request that stands out.
export function lanes(on, history, { slots, pitch, span, isLive, chosen }, colors) {
  const { ctx, width } = on;
  const x = scaleOf(span, width);
  const gap = pitch > 6 ? 2 : pitch > 3 ? 1 : 0;
  const edge = history.stepAt(span.to)?.step ?? 0;
  for (let row = 0; row < slots.length; row += 1) {
    ctx.fillStyle = colors.track;
    ctx.fillRect(0, row * pitch + gap / 2, width, pitch - gap);
  }
  grid(on, span, colors);
  const bounds = stepBounds(history.steps, span, x, width);
  for (const [row, slot] of slots.entries()) {
    const place = { top: row * pitch + gap / 2, high: pitch - gap, width, x };
    const bars = history.bars.get(slot) ?? [];
    for (let at = bars.length - 1; at >= 0; at -= 1) {
      const bar = bars[at];
      if (bar.kind === "wait" ? bar.to < span.from : bar.from > span.to) continue;
      if (bar.kind !== "wait" && bar.to < span.from) break;
      ctx.globalAlpha = chosen === null || bar.request === chosen ? 1 : 0.25;
      // The step in flight is not reported yet, so a running request's bar reaches the edge.
      const isOpen = isLive && at === bars.length - 1 && isRunning(history, slot, bar);
      drawBar(ctx, bar, place, { isOpen, edge, bounds }, colors);
    }
    const owner = history.owners.get(slot);
    if (isLive && history.arriving.has(owner)) {
      ctx.globalAlpha = chosen === null || owner === chosen ? 1 : 0.25;
      const bar = { kind: "arriving", from: history.arriving.get(owner), to: span.to, tokens: "" };
      drawBar(ctx, bar, place, { isOpen: true, edge, bounds }, colors);
    }
    for (const mark of history.marks.get(slot) ?? []) {
      if (mark.at < span.from || mark.at > span.to) continue;
      ctx.globalAlpha = chosen === null || mark.request === chosen ? 1 : 0.25;
      drawMark(ctx, mark, place, colors);
    }
  }
  ctx.globalAlpha = 1;
}

function isRunning(history, slot, bar) {
  const isOwner = history.owners.get(slot) === bar.request;
  return bar.kind === "decode" && isOwner && !history.lives.get(bar.request)?.finish;
}

// The places where steps begin, or none if they are too close together.
function stepBounds(steps, span, x, width) {
  const seen = within(steps, span);
  if (seen.length > width / MIN_STEP_PX) return [];
  return seen.map((step) => x(step.from));
}

function drawBar(ctx, bar, { top, high, width, x }, { isOpen, edge, bounds }, colors) {
  const left = Math.max(0, x(bar.from));
  const right = isOpen ? width : Math.min(width, x(bar.to));
  const wide = Math.max(right - left, 1);
  if (bar.kind === "wait") {
    const thick = Math.max(2, high / 5);
    ctx.fillStyle = colors.wait;
    ctx.fillRect(left, top + (high - thick) / 2, wide, thick);
    return;
  }
  ctx.fillStyle = colors[bar.kind];
  ctx.fillRect(left, top, wide, high);
  ctx.fillStyle = colors.surface;
  if (bar.kind === "prompt" || bar.kind === "arriving") {
    if (wide > 4) ctx.fillRect(right - 1, top, 1, high);
    barText(ctx, String(bar.tokens), { left: left + 10, top, high, room: wide - 14 }, colors);
    return;
  }
  const alpha = ctx.globalAlpha;
  ctx.globalAlpha = alpha * 0.28;
  for (const place of bounds) {
    if (place > left + 2 && place < right - 2) ctx.fillRect(Math.round(place), top, 1, high);
  }
  ctx.globalAlpha = alpha;
  const steps = Math.max(1, Math.min(bar.steps, edge - (bar.step - bar.steps)));
  barText(ctx, String(steps), { left: right - 5, top, high, room: wide - 10, align: "right" }, colors);
}

// A number in a bar, if there is room for it.
function barText(ctx, text, { left, top, high, room, align = "left" }, colors) {
  if (high < 12 || room < 8 * text.length) return;
  ctx.font = font(Math.min(11, high - 4), 600);
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  ctx.fillStyle = colors["on-bar"];
  ctx.fillText(text, left, top + high / 2 + 0.5);
}

function drawMark(ctx, mark, { top, high, x }, colors) {
  const at = x(mark.at);
  if (mark.kind === "cached") {
    const size = Math.min(9, high);
    ctx.fillStyle = colors.cached;
    ctx.beginPath();
    ctx.moveTo(at, top);
    ctx.lineTo(at + size, top + size / 2);
    ctx.lineTo(at, top + size);
    ctx.fill();
    return;
  }
  const isBad = mark.kind === "preempted" || mark.reason === "error";
  ctx.fillStyle = isBad ? colors.preempted : colors.finished;
  const wide = isBad ? 4 : 2.5;
  ctx.fillRect(at - wide / 2, top, wide, high);
}

// Draw stacked bars, one for each step. `parts`: [colour, function of a step].
// If several steps share a pixel, the highest is drawn.
export function stacks({ ctx, width, height }, steps, parts, top, span) {
  const x = scaleOf(span, width);
  const columns = [];
  for (const step of within(steps, span)) {
    const left = x(step.from);
    const right = x(step.ended_s);
    const wide = Math.max(1, right - left - (right - left > 6 ? 1 : 0));
    const values = parts.map(([, value]) => value(step));
    const sum = values.reduce((all, one) => all + one, 0);
    const column = { left: wide === 1 ? Math.floor(left) : left, wide, values, sum };
    const last = columns.at(-1);
    if (last?.wide === 1 && wide === 1 && last.left === column.left) {
      if (sum > last.sum) columns[columns.length - 1] = column;
    } else {
      columns.push(column);
    }
  }
  for (const { left, wide, values } of columns) {
    let bottom = height;
    for (const [index, [colour]] of parts.entries()) {
      const high = (values[index] / top) * height;
      ctx.fillStyle = colour;
      ctx.fillRect(left, bottom - high, wide, high);
      bottom -= high;
    }
  }
}

// Draw a line at a value of each step, where it is below the top.
export function limits({ ctx, width, height }, steps, value, top, span, colors) {
  const x = scaleOf(span, width);
  ctx.fillStyle = colors.limit;
  for (const step of steps) {
    const left = Math.round(x(step.from));
    const high = (value(step) / top) * height;
    if (high <= height) ctx.fillRect(left, height - high, Math.max(1, Math.round(x(step.ended_s)) - left), 1.5);
  }
}

// The steps that overlap a span of time.
export function within(steps, span) {
  const begin = firstFrom(steps, span.from, (step) => step.ended_s);
  return steps.slice(begin, firstFrom(steps, span.to, (step) => step.from));
}

// Draw values that hold from one step's end to the next one's as stacked areas.
export function areas({ ctx, width, height }, steps, parts, top, span) {
  const x = scaleOf(span, width);
  const begin = Math.max(0, firstFrom(steps, span.from, (step) => step.ended_s) - 1);
  for (let at = begin; at < steps.length && steps[at].ended_s <= span.to; at += 1) {
    // Whole pixels, or the seams between steps would be visible.
    const left = Math.max(0, Math.round(x(steps[at].ended_s)));
    const right = at + 1 < steps.length ? Math.min(width, Math.round(x(steps[at + 1].ended_s))) : width;
    if (right <= left) continue;
    let bottom = height;
    for (const [colour, value] of parts) {
      const high = (value(steps[at]) / top) * height;
      ctx.fillStyle = colour;
      ctx.fillRect(left, bottom - high, right - left, high);
      bottom -= high;
    }
  }
}

// Draw lines over time.
// `lines`: {colour, points: [[time, value or null], ...], isDashed, isThin, isFilled}.
export function curves({ ctx, width, height }, lines, top, span, colors) {
  const x = scaleOf(span, width);
  const y = (value) => height - 1 - (value / (top || 1)) * (height - 3);
  ctx.fillStyle = colors.grid;
  for (const share of [0, 0.5, 1]) ctx.fillRect(0, Math.round(y(share * top)), width, 1);
  ctx.lineJoin = "round";
  for (const { colour, points, isDashed, isThin, isFilled } of lines) {
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = isThin ? 1.2 : 1.8;
    ctx.setLineDash(isDashed ? [4, 3] : []);
    for (const run of runsOf(points)) {
      ctx.beginPath();
      for (const [time, value] of run) ctx.lineTo(x(time), y(value));
      if (run.length === 1) ctx.lineTo(x(run[0][0]) + 2, y(run[0][1]));
      ctx.stroke();
      if (!isFilled) continue;
      ctx.lineTo(x(run.at(-1)[0]), height);
      ctx.lineTo(x(run[0][0]), height);
      ctx.globalAlpha = 0.14;
      ctx.fill();
      ctx.globalAlpha = 1;
    }
  }
  ctx.setLineDash([]);
}

// The runs of points without missing values.
function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (Number.isFinite(point[1]) && point[1] !== null) runs.at(-1).push(point);
    else if (runs.at(-1).length) runs.push([]);
  }
  return runs.filter((run) => run.length);
}
