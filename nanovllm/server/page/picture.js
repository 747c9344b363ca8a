// Watch as a file: one picture as PNG, or some seconds as a video. Drawn on a canvas of its own,
// wider than a phone's screen, with the same functions as the page.

import { axisLabels, LANES_LEGEND, STRIPS, valuesOf } from "./bands.js";
import { el, short } from "./dom.js";
import * as draw from "./draw.js";
import { nameOf } from "./history.js";
import { ownerOf } from "./lanes.js";
import { speedText } from "./tiles.js";
import { withoutZeros } from "./words.js";

const WIDTH = 1200;
const MARGIN = 28;
const GUTTER = 150;
const SCALE = 2; // pixels per unit
const FRAMES_PER_S = 20;
const HEAD = 104;
const STRIP = 52;
const TITLE = 26;
const PITCH = 18;
const VIDEO_TYPES = ["video/mp4;codecs=avc1", "video/webm;codecs=vp9", "video/webm;codecs=vp8", "video/webm"];

export async function save(shot, colors) {
  const canvas = el("canvas");
  paint(canvas, shot, colors);
  download(await new Promise((done) => canvas.toBlob(done, "image/png")), "png");
}

export function canRecord() {
  return typeof MediaRecorder === "function" && videoType() !== undefined;
}

// Record pictures of `shot()` for some seconds, and download the video.
export async function record(shot, colors, seconds) {
  const canvas = el("canvas");
  const lanes = shot().view.slots; // fixed, so that the picture keeps its size
  const next = () => {
    const now = shot();
    paint(canvas, { ...now, view: { ...now.view, slots: lanes } }, colors());
  };
  next();
  const type = videoType();
  const recorder = new MediaRecorder(canvas.captureStream(FRAMES_PER_S), { mimeType: type, videoBitsPerSecond: 6e6 });
  const parts = [];
  recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
  const ended = new Promise((done, failed) => {
    recorder.addEventListener("stop", done);
    recorder.addEventListener("error", () => failed(new Error("this browser cannot encode it")));
  });
  const timer = setInterval(next, 1000 / FRAMES_PER_S);
  recorder.start();
  setTimeout(() => recorder.state === "inactive" || recorder.stop(), seconds * 1000);
  await ended.finally(() => clearInterval(timer));
  download(new Blob(parts, { type }), type.startsWith("video/mp4") ? "mp4" : "webm");
}

const videoType = () => VIDEO_TYPES.find((type) => MediaRecorder.isTypeSupported(type));

function download(blob, ending) {
  const address = URL.createObjectURL(blob);
  const stamp = new Date().toISOString().slice(0, 19).replaceAll(":", "-");
  el("a", { href: address, download: `nanovllm-watch-${stamp}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

// Draw the whole picture; the canvas gets the size that the lanes need.
export function paint(canvas, shot, colors) {
  const { history, view } = shot;
  const lanesHeight = Math.max(1, view.slots.length) * Math.min(PITCH, view.pitch);
  const height = HEAD + TITLE + lanesHeight + 24 + STRIPS.length * (TITLE + STRIP + 8) + 40;
  const size = [WIDTH * SCALE, height * SCALE];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(SCALE, 0, 0, SCALE, 0, 0);
  ctx.fillStyle = colors.surface;
  ctx.fillRect(0, 0, WIDTH, height);
  const pen = { ctx, colors };
  paintHead(pen, shot);
  let top = HEAD;
  paintTitle(pen, top, "Requests by slot", LANES_LEGEND.map(([colour, label]) => [colour, label, null]));
  top += TITLE;
  const pitch = Math.min(PITCH, view.pitch);
  paintLabels(pen, top, history, { ...view, pitch });
  inside(ctx, top, lanesHeight, (on) => draw.lanes(on, history, { ...view, pitch }, colors));
  top += lanesHeight;
  paintAxis(pen, top, view);
  top += 24;
  for (const strip of STRIPS) {
    paintTitle(pen, top, strip.title, valuesOf(strip, shot.state, history.latest, view.isLive));
    top += TITLE;
    const axisTop = strip.top(draw.within(history.steps, view.span), history.latest);
    inside(ctx, top, STRIP, (on) => strip.paint(on, { steps: history.steps, top: axisTop, span: view.span, colors }));
    write(pen, withoutZeros(short(axisTop)), GUTTER + MARGIN - 8, top + 6, { size: 12, align: "right", colour: "soft" });
    write(pen, "0", GUTTER + MARGIN - 8, top + STRIP - 6, { size: 12, align: "right", colour: "soft" });
    top += STRIP + 8;
  }
  write(pen, shot.text, MARGIN, top + 14, { size: 13, colour: "soft" });
}

// Draw in the part of the canvas to the right of the labels.
function inside(ctx, top, height, work) {
  const width = WIDTH - 2 * MARGIN - GUTTER;
  ctx.save();
  ctx.translate(MARGIN + GUTTER, top);
  ctx.beginPath();
  ctx.rect(0, 0, width, height);
  ctx.clip();
  work({ ctx, width, height });
  ctx.restore();
}

function paintHead(pen, { speed, tiles, model }) {
  const number = speedText(speed);
  write(pen, number, MARGIN, 44, { size: 46, weight: 700 });
  write(pen, "tokens per second", MARGIN, 80, { size: 14, colour: "soft" });
  const each = 122;
  for (const [at, [label, value]] of tiles.entries()) {
    const left = 262 + at * each;
    write(pen, label, left, 34, { size: 13, colour: "soft" });
    write(pen, value, left, 56, { size: 20, weight: 600 });
  }
  write(pen, "nanovllm", WIDTH - MARGIN, 34, { size: 20, weight: 700, align: "right", colour: "accent" });
  write(pen, model, WIDTH - MARGIN, 56, { size: 13, align: "right", colour: "soft", room: 170 });
}

function paintTitle(pen, top, title, legend) {
  write(pen, title, MARGIN, top + 12, { size: 13, weight: 600 });
  let left = MARGIN + GUTTER;
  for (const [colour, label, value] of legend) {
    pen.ctx.fillStyle = pen.colors[colour];
    pen.ctx.fillRect(left, top + 7, 10, 10);
    left += 15 + write(pen, label, left + 15, top + 12.5, { size: 12, colour: "soft" });
    if (value !== null) left += 5 + write(pen, short(value), left + 5, top + 12.5, { size: 12, weight: 600 });
    left += 16;
  }
}

function paintLabels(pen, top, history, view) {
  if (view.pitch < 11) return;
  for (const [row, slot] of view.slots.entries()) {
    const [request, state] = ownerOf(history, slot, view);
    const middle = top + (row + 0.5) * view.pitch;
    write(pen, String(slot), MARGIN + 18, middle, { size: 11, colour: "soft", align: "right" });
    write(pen, request === undefined ? "-" : `#${nameOf(request)}`, MARGIN + 30, middle, { size: 11 });
    write(pen, state, MARGIN + 82, middle, { size: 11, colour: "soft" });
  }
}

function paintAxis(pen, top, { span, isLive }) {
  const width = WIDTH - 2 * MARGIN - GUTTER;
  for (const [share, text] of axisLabels(span.to - span.from, width, isLive)) {
    const align = share > 0.99 ? "right" : share < 0.03 ? "left" : "center";
    write(pen, text, MARGIN + GUTTER + share * width, top + 11, { size: 12, align, colour: "soft" });
  }
}

// Draw a text around a middle line and return its width.
function write({ ctx, colors }, text, left, middle, { size, weight = 400, align = "left", colour = "ink", room }) {
  ctx.font = draw.font(size, weight);
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  ctx.fillStyle = colors[colour];
  ctx.fillText(text, left, middle, room);
  return ctx.measureText(text).width;
}
