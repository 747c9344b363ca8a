// The official openai client for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as demo from "./checks.mjs";

const user = (content) => [{ role: "user", content }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather for a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", description: "The city to look up." } },
      required: ["city"],
    },
  },
};
const Person = z.object({ name: z.string(), age: z.int(), city: z.string() });

export async function openai(url) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const chat = client.chat.completions;
  const ask = (content, more = {}) => chat.create({ model: "demo", messages: user(content), ...more });
  const check = (name, run) => demo.check(`openai: ${name}`, run);

  await check("models", async () => {
    const models = await client.models.list();
    assert.deepEqual(models.data.map((model) => model.id), ["demo"]);
  });

  await check("a whole answer with reasoning", async () => {
    const { data, response } = await ask(demo.SUM).withResponse();
    const { message, finish_reason } = data.choices[0];
    assert.equal(message.content, demo.SUM_ANSWER);
    assert.match(message.reasoning, /^17 \+ 25: .* So 42\.$/);
    assert.equal(finish_reason, "stop");
    assert.equal(data.id, `chatcmpl-${response.headers.get("x-request-id")}`);
    assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + data.usage.completion_tokens);
  });

  await check("a stream of reasoning, text and usage", async () => {
    const whole = (await ask(demo.SUM)).choices[0].message;
    const options = { stream: true, stream_options: { include_usage: true } };
    let [text, reasoning, pieces, usage] = ["", "", 0, null];
    for await (const chunk of await ask(demo.SUM, options)) {
      const delta = chunk.choices[0]?.delta ?? {};
      pieces += delta.content ? 1 : 0;
      text += delta.content ?? "";
      reasoning += delta.reasoning ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, demo.SUM_ANSWER);
    assert.equal(reasoning, whole.reasoning);
    assert.ok(pieces > 1, "the text came in one piece");
    assert.ok(usage.completion_tokens_details.reasoning_tokens > 0);
  });

  await check("streamed tool calls, and the answer from their result", async () => {
    const calls = [];
    let reason = null;
    for await (const chunk of await ask(demo.TWO_CITIES, { tools: [weather], stream: true })) {
      for (const part of chunk.choices[0].delta.tool_calls ?? []) {
        calls[part.index] ??= { id: part.id, name: part.function.name, pieces: [] };
        if (part.function.arguments) calls[part.index].pieces.push(part.function.arguments);
      }
      reason = chunk.choices[0].finish_reason ?? reason;
    }
    assert.equal(reason, "tool_calls");
    assert.deepEqual(calls.map((call) => call.name), ["get_weather", "get_weather"]);
    const cities = calls.map((call) => JSON.parse(call.pieces.join("")).city);
    assert.deepEqual(cities, ["Oslo", "Lima"]);
    assert.ok(calls[0].pieces.length > 1, "the arguments came in one piece");
    assert.notEqual(calls[0].id, calls[1].id);
  });

  await check("runTools calls the function and gets its answer", async () => {
    const asked = [];
    const tool = { ...weather, function: { ...weather.function, parse: JSON.parse } };
    tool.function.function = ({ city }) => (asked.push(city), JSON.stringify(demo.WEATHER_NOW));
    const runner = chat.runTools({
      model: "demo", messages: user(demo.WEATHER), tools: [tool], stream: true,
    });
    assert.equal(await runner.finalContent(), demo.WEATHER_ANSWER);
    assert.deepEqual(asked, ["Oslo"]);
  });

  await check("the stream helper's events and final completion", async () => {
    const stream = chat.stream({ model: "demo", messages: user(demo.SUM) });
    let text = "";
    stream.on("content.delta", ({ delta }) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(text, demo.SUM_ANSWER);
    assert.equal(final.choices[0].message.content, demo.SUM_ANSWER);
  });

  await check("a parsed structured output", async () => {
    const answer = await chat.parse({
      model: "demo",
      messages: user(demo.EXTRACT),
      response_format: zodResponseFormat(Person, "person"),
    });
    assert.deepEqual(answer.choices[0].message.parsed, demo.PERSON);
  });

  await check("a parsed call of a strict tool", async () => {
    const parameters = z.object({ city: z.string() });
    const answer = await chat.parse({
      model: "demo",
      messages: user(demo.WEATHER),
      tools: [zodFunction({ name: "get_weather", parameters })],
      tool_choice: "required",
    });
    const call = answer.choices[0].message.tool_calls[0].function;
    assert.deepEqual(call.parsed_arguments, { city: "Oslo" });
  });

  await check("refusals are the client's own errors", async () => {
    for (const stream of [false, true]) {
      const error = await ask(demo.SUM, { temperature: 3, stream }).catch((error) => error);
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      assert.match(error.message, /temperature must be between 0 and 2, not 3/);
      assert.ok(error.requestID);
    }
    const missing = await ask(demo.SUM, { model: "nope" }).catch((error) => error);
    assert.ok(missing instanceof OpenAI.NotFoundError);
    assert.equal(missing.code, "model_not_found");
  });

  await check("an aborted stream frees its place", async () => {
    const stream = await ask(demo.ABOUT, { stream: true, ...demo.LONG });
    for await (const chunk of stream) {
      if (!chunk.choices[0].delta.content) continue;
      await demo.runs(url, 1);
      break; // leaving the loop aborts
    }
    await demo.runs(url, 0);
  });
}
