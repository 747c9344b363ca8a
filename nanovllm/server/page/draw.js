// Drawing on canvases that show the same span of time: lanes of slots, and strips below them.

import { firstFrom } from "./history.js";

export const COLORS = [
  "wait", "prompt", "prompt-edge", "decode", "decode-2", "draft", "preempted", "finished", "cached", "held",
  "blank", "grid", "ink", "faint", "surface",
];

// The colours of the page as it is now, dark or light.
export function palette() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(COLORS.map((name) => [name, style.getPropertyValue(`--c-${name}`).trim()]));
}

// A canvas with a drawing surface in CSS pixels; as sharp as the screen.
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

// `span`: {from, to} in seconds. Returns what maps a time to a place.
export function scaleOf(span, width) {
  const perSecond = width / (span.to - span.from);
  return (time) => (time - span.from) * perSecond;
}

export function grid({ ctx, width, height }, span, colors) {
  const x = scaleOf(span, width);
  const every = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60].find((s) => x(span.from + s) >= 60) ?? 60;
  ctx.fillStyle = colors.grid;
  for (let time = Math.ceil(span.from / every) * every; time < span.to; time += every) {
    ctx.fillRect(Math.round(x(time)), 0, 1, height);
  }
}

// One lane for each of `slots`, `pitch` pixels high. `chosen`: a request that stands out.
export function lanes(on, history, slots, pitch, span, colors, chosen) {
  const { ctx, width } = on;
  const x = scaleOf(span, width);
  const gap = pitch > 6 ? 2 : pitch > 3 ? 1 : 0;
  grid(on, span, colors);
  for (const [row, slot] of slots.entries()) {
    const top = row * pitch + gap / 2;
    const high = pitch - gap;
    const bars = history.bars.get(slot) ?? [];
    for (let at = bars.length - 1; at >= 0; at -= 1) {
      const bar = bars[at];
      if (bar.kind === "wait" ? bar.to < span.from : bar.from > span.to) continue;
      if (bar.kind !== "wait" && bar.to < span.from) break;
      ctx.globalAlpha = chosen === null || bar.request === chosen ? 1 : 0.25;
      drawBar(ctx, bar, Math.max(0, x(bar.from)), Math.min(width, x(bar.to)), top, high, colors);
    }
    for (const mark of history.marks.get(slot) ?? []) {
      if (mark.at < span.from || mark.at > span.to) continue;
      ctx.globalAlpha = chosen === null || mark.request === chosen ? 1 : 0.25;
      drawMark(ctx, mark, x(mark.at), top, high, colors);
    }
  }
  ctx.globalAlpha = 1;
}

function drawBar(ctx, bar, left, right, top, high, colors) {
  const wide = Math.max(right - left, 1);
  if (bar.kind === "wait") {
    ctx.fillStyle = colors.wait;
    ctx.fillRect(left, top + high - Math.max(1.5, high / 6), wide, Math.max(1.5, high / 6));
    return;
  }
  const shade = bar.request % 2 ? "decode" : "decode-2"; // so that two in turn can be told apart
  ctx.fillStyle = bar.kind === "prompt" ? colors.prompt : colors[shade];
  ctx.fillRect(left, top, wide, high);
  if (bar.kind === "prompt" && wide > 4) {
    ctx.fillStyle = colors["prompt-edge"];
    ctx.fillRect(right - 1, top, 1, high);
    if (wide > 44 && high > 11) {
      ctx.font = `${Math.min(11, high - 3)}px system-ui, sans-serif`;
      ctx.fillStyle = colors.surface;
      ctx.fillText(String(bar.tokens), left + 4, top + high / 2 + 4);
    }
  }
}

function drawMark(ctx, mark, at, top, high, colors) {
  if (mark.kind === "cached") {
    ctx.fillStyle = colors.cached;
    ctx.beginPath();
    ctx.moveTo(at, top);
    ctx.lineTo(at + Math.min(8, high), top);
    ctx.lineTo(at, top + Math.min(8, high));
    ctx.fill();
    return;
  }
  const isBad = mark.kind === "preempted" || mark.reason === "error";
  ctx.fillStyle = isBad ? colors.preempted : colors.finished;
  const wide = isBad ? 4 : 2.5;
  ctx.fillRect(at - wide / 2, top, wide, high);
}

// Bars of one value a step, several stacked. `parts`: [colour, step => value]. Where steps are
// narrower than a pixel, each pixel shows the highest of its steps.
export function stacks(on, steps, parts, most, span) {
  const { ctx, width, height } = on;
  const x = scaleOf(span, width);
  let pixel = -1;
  let tallest = 0;
  for (let at = firstFrom(steps, span.from, (step) => step.ended_s); at < steps.length; at += 1) {
    const step = steps[at];
    if (step.from > span.to) break;
    const left = x(step.from);
    const right = x(step.ended_s);
    const wide = Math.max(1, right - left - (right - left > 6 ? 1 : 0));
    const values = parts.map(([, value]) => value(step));
    const sum = values.reduce((all, one) => all + one, 0);
    if (wide === 1 && Math.floor(left) === pixel) {
      if (sum <= tallest) continue;
      ctx.clearRect(Math.floor(left), 0, 1, height);
    } else {
      tallest = 0;
    }
    pixel = Math.floor(left);
    tallest = Math.max(tallest, sum);
    let bottom = height;
    for (const [index, [colour]] of parts.entries()) {
      const high = (values[index] / most) * height;
      ctx.fillStyle = colour;
      ctx.fillRect(wide === 1 ? pixel : left, bottom - high, wide, high);
      bottom -= high;
    }
  }
}

// A line at a value of each step, where it is not too high to be seen.
export function limits({ ctx, width, height }, steps, value, most, span, colors) {
  const x = scaleOf(span, width);
  ctx.fillStyle = colors.faint;
  for (const step of steps) {
    const left = Math.round(x(step.from));
    const high = (value(step) / most) * height;
    if (high <= height) ctx.fillRect(left, height - high, Math.max(1, Math.round(x(step.ended_s)) - left), 1.5);
  }
}

// The steps that have a part in a span of time.
export function within(steps, span) {
  const begin = firstFrom(steps, span.from, (step) => step.ended_s);
  return steps.slice(begin, firstFrom(steps, span.to, (step) => step.from));
}

// Values that hold from step to step, stacked as areas.
export function areas(on, steps, parts, most, span) {
  const { ctx, width, height } = on;
  const x = scaleOf(span, width);
  const begin = Math.max(0, firstFrom(steps, span.from, (step) => step.ended_s) - 1);
  for (let at = begin; at < steps.length && steps[at].ended_s <= span.to; at += 1) {
    // Whole pixels, or the seams between steps would show.
    const left = Math.max(0, Math.round(x(steps[at].ended_s)));
    const right = at + 1 < steps.length ? Math.round(x(steps[at + 1].ended_s)) : width;
    if (right <= left) continue;
    let bottom = height;
    for (const [colour, value] of parts) {
      const high = (value(steps[at]) / most) * height;
      ctx.fillStyle = colour;
      ctx.fillRect(left, bottom - high, right - left, high);
      bottom -= high;
    }
  }
}

// Lines over equally long pasts. `lines`: [colour, [[time, value or null], ...]].
export function curves(on, lines, most, span, colors) {
  const { ctx, width, height } = on;
  const x = scaleOf(span, width);
  ctx.fillStyle = colors.grid;
  for (const share of [0.5, 1]) ctx.fillRect(0, Math.round(height - share * (height - 4)), width, 1);
  ctx.lineWidth = 1.75;
  ctx.lineJoin = "round";
  for (const [colour, points] of lines) {
    ctx.strokeStyle = colour;
    ctx.beginPath();
    let isDown = false;
    for (const [time, value] of points) {
      if (value === null || !Number.isFinite(value)) {
        isDown = false;
        continue;
      }
      const place = [x(time), height - 1 - (value / (most || 1)) * (height - 5)];
      if (isDown) ctx.lineTo(...place);
      else ctx.moveTo(...place);
      isDown = true;
    }
    ctx.stroke();
  }
}
