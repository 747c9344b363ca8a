// The server's routes: relative addresses, so that the page also works behind a path of a proxy.
// Owns the API key, which lives as long as the tab.

const KEY = "nanovllm-api-key";

let askForKey = async () => false;

// `ask(wasWrong)` resolves to whether there is a key now.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export const storedKey = () => sessionStorage.getItem(KEY);
export const storeKey = (key) => sessionStorage.setItem(KEY, key);

let served = null;

// The model that the server serves: {id, max_model_len}. Asked for once.
export async function model() {
  served ??= (await json("v1/models")).data[0];
  return served;
}

// What a server answered instead of what it was asked for.
export class ServerError extends Error {
  constructor(status, error) {
    super(error?.message || `the server answered ${status}`);
    this.status = status;
    this.code = error?.code || error?.type || "";
    this.param = error?.param || "";
  }
}

// A response with status 2xx. Throws ServerError, or TypeError where nobody answers.
export async function ask(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.ok) return response;
    if (response.status === 401 && storedKey() !== key) continue; // another one has asked meanwhile
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

// The objects of a streamed chat completion. Throws ServerError also for an error in the stream.
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
    if (done) throw new ServerError(response.status, { message: "the stream ended in the middle" });
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection alive
      if (event === "data: [DONE]") return;
      const told = JSON.parse(event.slice(6));
      if (told.error) throw new ServerError(response.status, told.error);
      yield told;
    }
  }
}
