// A request as a command to paste, for curl or the openai package.

// Fields that the openai package takes by name. Others must be passed as `extra_body`.
const KNOWN = new Set([
  "model", "messages", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream",
  "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "tools", "tool_choice",
  "response_format", "stream_options", "reasoning_effort",
]);

export function curl(body, address, hasKey) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $KEY"` : "";
  return `curl -N ${address}v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' -d '${quoted}'\n`;
}

export function python(body, address, hasKey) {
  const known = Object.entries(body).filter(([name]) => KNOWN.has(name) && name !== "stream_options");
  const extra = Object.entries(body).filter(([name]) => !KNOWN.has(name));
  const lines = known.map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra), "    ")},`);
  const key = hasKey ? 'os.environ["KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${address}v1`)}, api_key=${key})`,
    "for chunk in client.chat.completions.create(",
    ...lines,
    "):",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    "",
  ].join("\n");
}

// Return a value as Python source. The escapes of a JSON string have the same meaning in Python.
// Characters beyond 16 bits, whose JSON escapes would differ, are not escaped by JSON.stringify.
function literal(value, indent) {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((one) => `${inner}${literal(one, inner)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const parts = Object.entries(value).map(
      ([name, one]) => `${inner}${JSON.stringify(name)}: ${literal(one, inner)},\n`,
    );
    return parts.length ? `{\n${parts.join("")}${indent}}` : "{}";
  }
  return JSON.stringify(value);
}
