// Common part of both clients. Each check prints a line, PASSED or FAILED.
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";

export const SUM = "What is 17 + 25?";
export const SUM_ANSWER = "17 + 25 = 42.";
export const ABOUT = "What is nanovllm?";
export const WEATHER = "What is the weather in Oslo?";
export const TWO_CITIES = "What is the weather in Oslo and Lima?";
export const WEATHER_ANSWER = "It is 7 degrees and rainy in Oslo.";
export const WEATHER_NOW = { temperature: 7, condition: "rainy" };
export const EXTRACT =
  "Extract name, age and city from this text as JSON: " +
  "Maria is 34 years old, lives in Lima and works as a doctor.";
export const PERSON = { name: "Maria", age: 34, city: "Lima" };
export const LONG = { max_tokens: 3000, ignore_eos: true };

export async function check(name, run) {
  try {
    await run();
    console.log(`PASSED ${name}`);
  } catch (error) {
    console.log(`FAILED ${name} - ${error.stack ?? error}`);
    process.exitCode = 1;
  }
}

async function running(url) {
  const text = await (await fetch(`${url}/metrics`)).text();
  return Number(text.match(/^vllm:num_requests_running\{.*\} (\S+)$/m)[1]);
}

// Wait until the server runs `wanted` requests.
export async function runs(url, wanted) {
  for (let waited = 0; (await running(url)) !== wanted; waited += 50) {
    assert.ok(waited < 10_000, `the server does not get to ${wanted} running requests`);
    await sleep(50);
  }
}
