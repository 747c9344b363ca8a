// The server's routes, as relative addresses: the page also works under a path of a proxy.
// Owns the API key, which is kept until the tab is closed.

const KEY = "nanovllm-api-key";
export const DEMO = "demo"; // the name of the embedded model

let askForKey = async () => false;

// `ask(wasWrong)` resolves to true if there is a key now.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export const storedKey = () => sessionStorage.getItem(KEY);
export const storeKey = (key) => sessionStorage.setItem(KEY, key);

let served = null;

// The model being served: {id, max_model_len}. Fetched once.
export async function model() {
  served ??= (await json("v1/models")).data[0];
  return served;
}

// A response with an error status, or an error event of a stream.
export class ServerError extends Error {
  constructor(status, error) {
    super(error?.message || `the server responded with status ${status}`);
    this.status = status;
    this.code = error?.code || error?.type || "";
    this.param = error?.param || "";
  }
}

// Return a response with status 2xx. Throw ServerError, or TypeError if there is no connection.
export async function ask(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.ok) return response;
    if (response.status === 401 && storedKey() !== key) continue; // the key has changed since
    if (response.status === 401 && (await askForKey(key !== null))) continue;
    throw new ServerError(response.status, (await read(response))?.error);
  }
}

async function read(response) {
  try {
    return await response.json();
  } catch {
    return null;
  }
}

export const json = async (path) => (await ask(path)).json();
export const text = async (path) => (await ask(path)).text();

// Yield the chunks of a streamed chat completion. Throw ServerError also for an error event.
export async function* chat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError(response.status, { message: "the stream ended early" });
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection alive
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new ServerError(response.status, chunk.error);
      yield chunk;
    }
  }
}
