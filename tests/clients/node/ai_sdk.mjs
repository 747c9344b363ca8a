// The AI SDK with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";
import * as demo from "./checks.mjs";

const Person = z.object({ name: z.string(), age: z.int(), city: z.string() });

export async function aiSdk(url) {
  const provider = createOpenAICompatible({
    name: "nanovllm",
    baseURL: `${url}/v1`,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  const fixed = { model: provider("demo"), maxRetries: 0 };
  const check = (name, run) => demo.check(`ai-sdk: ${name}`, run);

  await check("a whole answer with reasoning", async () => {
    const answer = await generateText({ ...fixed, prompt: demo.SUM });
    assert.equal(answer.text, demo.SUM_ANSWER);
    assert.match(answer.finalStep.reasoningText, /^17 \+ 25: .* So 42\.$/);
    assert.equal(answer.finishReason, "stop");
    assert.ok(answer.usage.outputTokenDetails.reasoningTokens > 0);
  });

  await check("a stream of reasoning and text parts", async () => {
    const parts = { "reasoning-delta": [], "text-delta": [] };
    const order = [];
    const answer = streamText({ ...fixed, prompt: demo.SUM });
    for await (const part of answer.stream) {
      order.push(part.type);
      parts[part.type]?.push(part.text);
    }
    assert.match(parts["reasoning-delta"].join(""), /^17 \+ 25: .* So 42\.$/);
    assert.equal(parts["text-delta"].join(""), demo.SUM_ANSWER);
    assert.ok(parts["text-delta"].length > 1, "the text came in one piece");
    assert.ok(order.indexOf("reasoning-end") < order.indexOf("text-start"));
    assert.equal(await answer.finishReason, "stop");
    assert.ok((await answer.usage).inputTokens > 0);
  });

  const asked = [];
  const getWeather = tool({
    description: "Get the current weather for a city.",
    inputSchema: z.object({ city: z.string().describe("The city to look up.") }),
    execute: async ({ city }) => (asked.push(city), demo.WEATHER_NOW),
  });
  const withTools = { ...fixed, tools: { get_weather: getWeather }, stopWhen: isStepCount(3) };

  await check("a tool is executed and its result answered", async () => {
    asked.length = 0;
    const answer = await generateText({ ...withTools, prompt: demo.WEATHER });
    assert.deepEqual(asked, ["Oslo"]);
    assert.equal(answer.text, demo.WEATHER_ANSWER);
    assert.deepEqual(answer.steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
  });

  await check("reasoning goes back with the tool's result", async () => {
    const thinking = { nanovllm: { chat_template_kwargs: { enable_thinking: true } } };
    const answer = await generateText({
      ...withTools,
      prompt: demo.WEATHER,
      providerOptions: thinking,
      include: { requestBody: true },
    });
    assert.equal(answer.steps[0].reasoningText, "I call get_weather with city Oslo.");
    const sent = JSON.parse(answer.steps[1].request.body).messages.at(-2);
    assert.equal(sent.reasoning_content, "I call get_weather with city Oslo.");
    assert.equal(answer.text, demo.WEATHER_ANSWER);
  });

  await check("streamed arguments are parsed and executed", async () => {
    asked.length = 0;
    let [text, json, pieces] = ["", "", 0];
    for await (const part of streamText({ ...withTools, prompt: demo.WEATHER }).stream) {
      if (part.type === "tool-input-delta") (json += part.delta), (pieces += 1);
      if (part.type === "text-delta") text += part.text;
      if (part.type === "tool-call") assert.deepEqual(part.input, { city: "Oslo" });
    }
    assert.deepEqual(JSON.parse(json), { city: "Oslo" });
    assert.ok(pieces > 1, "the arguments came in one piece");
    assert.deepEqual(asked, ["Oslo"]);
    assert.equal(text, demo.WEATHER_ANSWER);
  });

  await check("two calls in one turn", async () => {
    asked.length = 0;
    const answer = streamText({ ...withTools, stopWhen: isStepCount(1), prompt: demo.TWO_CITIES });
    await answer.consumeStream();
    assert.deepEqual(asked.sort(), ["Lima", "Oslo"]);
  });

  await check("a generated object", async () => {
    const output = Output.object({ schema: Person });
    const answer = await generateText({ ...fixed, output, prompt: demo.EXTRACT });
    assert.deepEqual(answer.output, demo.PERSON);
  });

  await check("a streamed object grows", async () => {
    const output = Output.object({ schema: Person });
    const answer = streamText({ ...fixed, output, prompt: demo.EXTRACT });
    const partial = await Array.fromAsync(answer.partialOutputStream);
    assert.ok(partial.length > 1, "the object came in one piece");
    assert.deepEqual(await answer.output, demo.PERSON);
  });

  await check("an object of nullable, optional, listed and bounded values", async () => {
    const schema = z.object({
      name: z.string().max(20),
      age: z.int().min(0).max(150),
      city: z.string().max(20).nullable(),
      size: z.enum(["small", "large"]),
      tags: z.array(z.string().max(12)).max(3),
      height: z.number().optional(),
    });
    const output = Output.object({ schema });
    const { age, size } = (await generateText({ ...fixed, output, prompt: demo.EXTRACT })).output;
    assert.equal(age, demo.PERSON.age);
    assert.ok(["small", "large"].includes(size));
  });

  await check("a choice, and JSON of any form", async () => {
    const choice = Output.choice({ options: ["yes", "no"] });
    const { output } = await generateText({ ...fixed, output: choice, prompt: demo.SUM });
    assert.ok(["yes", "no"].includes(output));
    const json = await generateText({ ...fixed, output: Output.json(), prompt: demo.EXTRACT });
    assert.deepEqual(json.output, demo.PERSON);
  });

  await check("a required tool call", async () => {
    asked.length = 0;
    const required = { ...withTools, stopWhen: isStepCount(1), toolChoice: "required" };
    const answer = await generateText({ ...required, prompt: demo.WEATHER });
    assert.equal(answer.finishReason, "tool-calls");
    assert.deepEqual(asked, ["Oslo"]);
  });

  await check("refusals are API call errors with status and message", async () => {
    const error = await generateText({ ...fixed, prompt: demo.SUM, temperature: 3 }).catch((e) => e);
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature must be between 0 and 2, not 3/);
    assert.equal(error.isRetryable, false);
    let streamed = null;
    const onError = ({ error }) => (streamed = error);
    await streamText({ ...fixed, prompt: demo.SUM, temperature: 3, onError }).consumeStream();
    assert.equal(streamed.statusCode, 400);
  });

  await check("an aborted stream frees its place", async () => {
    const abort = new AbortController();
    const answer = streamText({
      ...fixed,
      prompt: demo.ABOUT,
      abortSignal: abort.signal,
      providerOptions: { nanovllm: demo.LONG },
    });
    const seen = [];
    for await (const part of answer.stream) {
      if (part.type === "text-delta" && !abort.signal.aborted) {
        await demo.runs(url, 1);
        abort.abort();
      }
      seen.push(part.type);
    }
    assert.equal(seen.at(-1), "abort");
    await demo.runs(url, 0);
  });
}
