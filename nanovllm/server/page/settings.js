// The settings panel, and the request fields that follow from it.

import { button, el } from "./dom.js";

const EXAMPLE_TOOLS = [
  {
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
  },
];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string" },
    age: { type: "integer", minimum: 0 },
    city: { type: "string" },
  },
  required: ["name", "age", "city"],
  additionalProperties: false,
};
// Name, meaning, minimum, maximum, step.
const NUMBERS = [
  ["temperature", "0: always the most likely token", 0, 2, 0.05],
  ["top_p", "Sample from the most likely tokens whose probabilities add up to this", 0, 1, 0.01],
  ["top_k", "Sample from the k most likely tokens", 0, null, 1],
  ["min_p", "Sample from tokens at least this likely, relative to the most likely one", 0, 1, 0.01],
  ["max_tokens", "Limit of an answer, thinking included", 1, null, 1],
  ["seed", "The same seed gives the same text", null, null, 1],
  ["n", "Number of answers", 1, 16, 1],
  ["presence_penalty", "Penalty for tokens that occurred", -2, 2, 0.1],
  ["frequency_penalty", "Penalty for each occurrence of a token", -2, 2, 0.1],
  ["repetition_penalty", "Above 1: penalty for tokens that occurred, also in the prompt", 0, 2, 0.05],
];

// Build the form in `place`; its button calls `close()`. Return {fields, schema}. `fields()` returns
// the system message and the fields of a request's body except its messages. `schema()` returns the
// JSON schema of answers, or null. Both throw an Error that names an unreadable setting.
export function startSettings(place, close) {
  const inputs = {};
  const select = (name, label, options) => {
    const choices = options.map(([value, text]) => el("option", { value }, text));
    inputs[name] = el("select", { id: `set-${name}` }, choices);
    return el("label", {}, el("span", {}, label), inputs[name]);
  };
  const area = (name, label, rows, placeholder) => {
    inputs[name] = el("textarea", { id: `set-${name}`, rows, placeholder, spellcheck: rows < 5 });
    return el("label", { className: "tall" }, el("span", {}, label), inputs[name]);
  };
  const numbers = NUMBERS.map(([name, title, min, max, step]) => {
    const limits = { ...(min === null ? {} : { min }), ...(max === null ? {} : { max }) };
    inputs[name] = el("input", { id: `set-${name}`, type: "number", step, placeholder: "auto", ...limits });
    return el("label", { title }, el("span", {}, name), inputs[name]);
  });
  inputs.stop = el("input", { id: "set-stop", type: "text", placeholder: "none" });
  inputs.logprobs = el("input", { id: "set-logprobs", type: "checkbox" });
  const fill = (name, value) => () => {
    inputs[name].value = JSON.stringify(value, null, 2);
    inputs[name].dispatchEvent(new Event("input"));
  };
  const schemaArea = area("schema", "Schema", 9, "A JSON schema");
  const useSchema = () => {
    fill("schema", EXAMPLE_SCHEMA)();
    inputs.format.value = "json_schema";
  };
  place.append(
    el("div", { className: "row panel-head" }, el("h2", {}, "Settings"), button("Done", close, { id: "hide-settings" })),
    group("Prompt", true, area("system", "System message", 3, "none"), thinking(select)),
    group("Sampling", false, el("div", { className: "pairs" }, numbers), el(
      "label", { title: "The answer ends before this text" }, el("span", {}, "stop"), inputs.stop,
    ), el(
      "label", { className: "check" }, inputs.logprobs, "Show token probabilities",
    )),
    group(
      "Tools", false,
      area("tools", "Functions, as JSON", 9, "A list of tools"),
      el("p", { className: "row" }, button("Example", fill("tools", EXAMPLE_TOOLS), { id: "example-tools" })),
      select("tool_choice", "tool_choice", [["", "auto"], ["none", "none"], ["required", "required"]]),
    ),
    group(
      "Answer format", false,
      select("format", "Format", [["", "text"], ["json_object", "any JSON object"], ["json_schema", "JSON schema"]]),
      schemaArea,
      el("p", { className: "row" }, button("Example", useSchema, { id: "example-schema" })),
    ),
  );
  const schema = () => (inputs.format.value === "json_schema" ? parsed("Schema", inputs.schema.value) : null);
  return { fields: () => fieldsOf(inputs, schema()), schema };
}

function group(title, open, ...children) {
  return el("details", { open }, el("summary", {}, title), ...children);
}

function thinking(select) {
  return select("thinking", "Thinking", [["", "Model default"], ["on", "on"], ["off", "off"]]);
}

function parsed(label, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${text.trim() ? error.message : "is empty"}`);
  }
}

function fieldsOf(inputs, schema) {
  const fields = {};
  for (const [name] of NUMBERS) {
    if (!inputs[name].validity.valid) throw new Error(`${name}: ${inputs[name].validationMessage}`);
    if (inputs[name].value !== "") fields[name] = Number(inputs[name].value);
  }
  if (inputs.stop.value) fields.stop = [inputs.stop.value];
  if (inputs.logprobs.checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  if (inputs.tools.value.trim()) fields.tools = parsed("Tools", inputs.tools.value);
  if (fields.tools && inputs.tool_choice.value) fields.tool_choice = inputs.tool_choice.value;
  if (inputs.format.value === "json_object") fields.response_format = { type: "json_object" };
  if (schema !== null) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (inputs.thinking.value) {
    fields.chat_template_kwargs = { enable_thinking: inputs.thinking.value === "on" };
  }
  const system = inputs.system.value.trim();
  return { system, fields };
}
