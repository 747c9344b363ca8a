// Prometheus text, and what two readings of it say of the time between them.

// {name: [[labels, value], ...]}
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const [, name, labels, value] = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
    if (!name) continue;
    const pairs = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)];
    (found[name] ??= []).push([Object.fromEntries(pairs.map(([, key, told]) => [key, told])), Number(value)]);
  }
  return found;
}

export class Reading {
  // `at`: seconds. Of several engines only `engine` counts.
  constructor(text, at, engine) {
    this.at = at;
    this._samples = parse(text);
    this._engine = String(engine);
  }

  list(name) {
    const all = this._samples[name] ?? [];
    return all.filter(([labels]) => labels.engine === undefined || labels.engine === this._engine);
  }

  // The sum of a metric's samples.
  value(name) {
    return this.list(name).reduce((sum, [, value]) => sum + value, 0);
  }

  // By the values of one label.
  by(name, label) {
    return new Map(this.list(name).map(([labels, value]) => [labels[label], value]));
  }
}

// How fast a counter rose; null if it was set back, as by another API process's numbers.
export function rate(before, after, name) {
  const rise = after.value(name) - before.value(name);
  return rise < 0 || after.at <= before.at ? null : rise / (after.at - before.at);
}

// The mean of a histogram's new values; null if there are none.
export function mean(before, after, name) {
  const count = after.value(`${name}_count`) - before.value(`${name}_count`);
  return count > 0 ? (after.value(`${name}_sum`) - before.value(`${name}_sum`)) / count : null;
}

// A quantile of a histogram's new values, within its bucket by a straight line; null without any.
export function quantile(before, after, name, share) {
  const old = before.by(`${name}_bucket`, "le");
  const rises = [...after.by(`${name}_bucket`, "le")].map(([bound, count]) => [
    bound === "+Inf" ? Infinity : Number(bound), count - (old.get(bound) ?? 0),
  ]);
  const all = rises.at(-1)?.[1] ?? 0;
  if (!(all > 0)) return null;
  let low = 0;
  let below = 0;
  for (const [bound, count] of rises) {
    if (count >= share * all) {
      if (bound === Infinity) return low;
      return low + ((share * all - below) / Math.max(1, count - below)) * (bound - low);
    }
    [low, below] = [bound, count];
  }
  return low;
}
