// Prometheus text, and rates and quantiles of the time between two readings of it.

// {name: [[labels, value], ...]}
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const [, name, labels, value] = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
    if (!name) continue;
    const pairs = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)];
    (found[name] ??= []).push([Object.fromEntries(pairs.map(([, key, label]) => [key, label])), Number(value)]);
  }
  return found;
}

export class Reading {
  // `at`: seconds. Samples of other engines than `engine` are left out.
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

  // A metric's samples by one label.
  by(name, label) {
    return new Map(this.list(name).map(([labels, value]) => [labels[label], value]));
  }
}

// Return a counter's rise per second, or null if it fell, as when a process was restarted.
export function rate(before, after, name) {
  const rise = after.value(name) - before.value(name);
  return rise < 0 || after.at <= before.at ? null : rise / (after.at - before.at);
}

// Return a quantile of a histogram's new values, interpolated within its bucket, or null if there
// are none.
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
