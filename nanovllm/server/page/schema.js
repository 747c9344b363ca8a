// A check of an answer against the common keywords of JSON Schema. It only informs the visitor: the
// server's grammar enforces the schema.

// Return the place and the reason of the first violation, or null. `path` is a JSON pointer.
export function complaint(value, schema, root = schema, path = "") {
  if (schema === true || schema === undefined) return null;
  if (schema === false) return `${path || "/"}: nothing is allowed here`;
  if (schema.$ref) return complaint(value, resolved(schema.$ref, root), root, path);
  const at = path || "/";
  if (schema.type && ![schema.type].flat().some((type) => isOf(value, type))) {
    return `${at}: must be ${[schema.type].flat().join(" or ")}, not ${kind(value)}`;
  }
  if (schema.enum && !schema.enum.some((one) => same(one, value))) return `${at}: not in the enum`;
  if ("const" in schema && !same(schema.const, value)) return `${at}: not the const`;
  return (
    combined(value, schema, root, path) ||
    (typeof value === "number" && ofNumber(value, schema, at)) ||
    (typeof value === "string" && ofText(value, schema, at)) ||
    (Array.isArray(value) && ofArray(value, schema, root, path)) ||
    (kind(value) === "object" && ofObject(value, schema, root, path)) ||
    null
  );
}

function combined(value, schema, root, path) {
  for (const part of schema.allOf ?? []) {
    const found = complaint(value, part, root, path);
    if (found) return found;
  }
  for (const name of ["anyOf", "oneOf"]) {
    const fitting = (schema[name] ?? []).filter((part) => !complaint(value, part, root, path));
    if (schema[name] && !fitting.length) return `${path || "/"}: fits none of ${name}`;
    if (name === "oneOf" && fitting.length > 1) return `${path || "/"}: fits more than one of oneOf`;
  }
  return null;
}

function ofNumber(value, schema, at) {
  if (value < schema.minimum) return `${at}: below ${schema.minimum}`;
  if (value > schema.maximum) return `${at}: above ${schema.maximum}`;
  if (value <= schema.exclusiveMinimum) return `${at}: not above ${schema.exclusiveMinimum}`;
  if (value >= schema.exclusiveMaximum) return `${at}: not below ${schema.exclusiveMaximum}`;
  return null;
}

function ofText(value, schema, at) {
  const length = [...value].length;
  if (length < schema.minLength) return `${at}: shorter than ${schema.minLength}`;
  if (length > schema.maxLength) return `${at}: longer than ${schema.maxLength}`;
  if (schema.pattern && !new RegExp(schema.pattern, "u").test(value)) return `${at}: not ${schema.pattern}`;
  return null;
}

function ofArray(value, schema, root, path) {
  if (value.length < schema.minItems) return `${path || "/"}: fewer than ${schema.minItems} items`;
  if (value.length > schema.maxItems) return `${path || "/"}: more than ${schema.maxItems} items`;
  const first = schema.prefixItems ?? [];
  for (const [at, item] of value.entries()) {
    const found = complaint(item, first[at] ?? schema.items, root, `${path}/${at}`);
    if (found) return found;
  }
  return null;
}

function ofObject(value, schema, root, path) {
  for (const name of schema.required ?? []) {
    if (!Object.hasOwn(value, name)) return `${path || "/"}: ${name} is missing`;
  }
  for (const [name, item] of Object.entries(value)) {
    const known = Object.hasOwn(schema.properties ?? {}, name);
    const rule = known ? schema.properties[name] : schema.additionalProperties;
    const found = complaint(item, rule, root, `${path}/${name}`);
    if (found) return found;
  }
  return null;
}

function resolved(reference, root) {
  const names = reference.split("/").slice(1);
  return names.reduce((at, name) => at?.[name.replaceAll("~1", "/").replaceAll("~0", "~")], root);
}

function kind(value) {
  return value === null ? "null" : Array.isArray(value) ? "array" : typeof value;
}

function isOf(value, type) {
  if (type === "integer") return Number.isInteger(value);
  return kind(value) === type;
}

const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
