// The conversation of this tab, as data. It survives a reload and ends with the tab.

const KEY = "nanovllm-talk";

export const isKept = () => load().length > 0;

export function clear() {
  sessionStorage.removeItem(KEY);
}

// The stored turns, in order. Data that cannot be read is dropped.
export function load() {
  try {
    const turns = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
    return Array.isArray(turns) ? turns.filter((turn) => typeof turn?.role === "string") : [];
  } catch {
    clear();
    return [];
  }
}

// A tab may store some megabytes. A longer conversation is stored without its token probabilities,
// or not at all.
export function store(turns) {
  if (!turns.length) {
    clear();
    return;
  }
  for (const data of [turns, turns.map(withoutTokens)]) {
    try {
      sessionStorage.setItem(KEY, JSON.stringify(data));
      return;
    } catch {
      clear();
    }
  }
}

function withoutTokens(turn) {
  if (!turn.answer) return turn;
  const choices = turn.answer.choices.map((choice) => ({ ...choice, tokens: [] }));
  return { ...turn, answer: { ...turn.answer, choices } };
}
