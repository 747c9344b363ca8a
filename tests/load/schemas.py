"""Acceptance of a folder of schemas with instances: accepted schemas, and instances they allow.

    python -m tests.load.schemas FOLDER --results-dir results

A file has `schema` and `tests`, a list of `data` and whether it is `valid`. JSONSchemaBench and the
JSON Schema test suite use this format. Each schema is compiled strictly and as best effort. The
strict grammar reads every instance byte by byte, with its keys in the schema's order. If a key that
the schema does not name stops a valid instance, the instance is read again without that key.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema
import msgspec
import xgrammar

from nanovllm.bench import record, store
from nanovllm.grammars.document import SchemaError
from nanovllm.grammars.schema import compiled

log = logging.getLogger("schemas")
LIMIT_S = 20.0  # seconds for one schema, instances included
MOST_KEYS = 60  # maximum number of keys left out of one instance
ENDED = "xgrammar took too long"
Json: TypeAlias = Any
Unnamed = set[tuple[int, str]]  # id of an object, and a key of it


@dataclass
class Found:
    """Result of one file."""

    name: str
    refusal: str | None = None  # reason for refusing the schema in strict mode
    best_refusal: str | None = None
    problem: str | None = None  # error of xgrammar for the compiled grammar, or timeout
    compile_s: float = 0.0
    grammar_bytes: int = 0
    valid: int = 0
    valid_passed: int = 0
    closed: int = 0  # valid instances that passed only without keys that the schema does not name
    invalid: int = 0
    invalid_refused: int = 0
    wrong: list[str] = field(default_factory=list)


def judge(path: Path) -> Found:
    body = json.loads(path.read_text())
    schema, found = body["schema"], Found(path.stem)
    try:
        compiled(schema, "schema", exact=False)
    except SchemaError as error:
        found.best_refusal = str(error)
    begun = time.process_time()
    try:
        text = compiled(schema, "schema", exact=True)
    except SchemaError as error:
        found.refusal = str(error)
    found.compile_s = time.process_time() - begun
    if found.refusal is None:
        found.grammar_bytes = len(text)
        try:
            grammar = compiler().compile_structural_tag(tag(text))
        except RuntimeError as error:
            found.problem = str(error)[:300]
            return found
        for test in body["tests"]:
            weigh(found, grammar, schema, test)
    return found


def tag(text: str) -> str:
    form = {"type": "grammar", "grammar": text}
    return json.dumps({"type": "structural_tag", "format": form})


def compiler() -> xgrammar.GrammarCompiler:
    """Return a compiler for a vocabulary of bytes. It is fast, and only texts are read here."""
    table = xgrammar.TokenizerInfo([*(bytes([i]) for i in range(256)), b""], stop_token_ids=[256])
    return xgrammar.GrammarCompiler(table, max_threads=1, cache_enabled=False)


def weigh(found: Found, grammar: xgrammar.CompiledGrammar, schema: Json, test: Json) -> None:
    data = plain(test["data"])
    unnamed: Unnamed = set()
    arranged = arrange(data, schema, schema, unnamed)
    passes = matches(grammar, arranged) or matches(grammar, data)
    if not test["valid"]:
        found.invalid += 1
        found.invalid_refused += not passes
        if passes:
            found.wrong.append(f"accepted: {json.dumps(data, ensure_ascii=False)[:300]}")
        return
    found.valid += 1
    left_out = 0
    while not passes and left_out < MOST_KEYS and drop(arranged, grammar, unnamed):
        left_out += 1
        passes = matches(grammar, arranged)
    found.valid_passed += passes and not left_out
    found.closed += passes and left_out > 0
    if not passes:
        text = shown(arranged)
        at = reached(grammar, text)
        found.wrong.append(f"refused at {text[:at][-60:]!r} before {text[at:][:60]!r}")


def matches(grammar: xgrammar.CompiledGrammar, data: object) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(shown(data)) and matcher.is_completed())


def reached(grammar: xgrammar.CompiledGrammar, text: str) -> int:
    """Return the number of characters that the grammar reads."""
    matcher = xgrammar.GrammarMatcher(grammar)
    for at, letter in enumerate(text):
        if not matcher.accept_string(letter):
            return at
    return len(text)


def drop(data: Json, grammar: xgrammar.CompiledGrammar, unnamed: Unnamed) -> bool:
    """Delete the key at which the grammar stops. Return False if a schema names that key."""
    text = shown(data)
    at = reached(grammar, text)
    for owner, key, begin, end in spans(data):
        if begin <= at < end and (id(owner), key) in unnamed:
            del owner[key]
            return True
    return False


def spans(data: Json, at: int = 0) -> Iterator[tuple[dict[str, Any], str, int, int]]:
    """Yield owner, key, start and end of every object key in the text, separators included."""
    if isinstance(data, dict):
        at += 1
        for i, (key, value) in enumerate(list(data.items())):
            begin = at - 2 * (i > 0)
            end = at + len(shown(key)) + 2
            yield data, key, begin, end
            yield from spans(value, end)
            at = end + len(shown(value)) + 2
    elif isinstance(data, list):
        at += 1
        for value in data:
            yield from spans(value, at)
            at += len(shown(value)) + 2


def shown(data: object) -> str:
    return json.dumps(data, ensure_ascii=False)


def plain(data: Json) -> Json:
    """Return the data with whole floats as integers, because integer grammars have no decimals."""
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list):
        return [plain(value) for value in data]
    return (
        int(data) if isinstance(data, float) and data == data // 1 and abs(data) < 2**53 else data
    )


# -- the order of properties -----------------------------------------------------------------------


def arrange(data: Json, schema: Json, root: Json, unnamed: Unnamed, depth: int = 0) -> Json:
    """Return the data in the grammar's key order. Add keys that no schema names to `unnamed`."""
    schemas = list(together(schema, root, data, 0)) if depth < 60 else []
    if isinstance(data, list):
        return [arrange(v, {"allOf": list(items(schemas, i))}, root, unnamed, depth + 1)
                for i, v in enumerate(data)]  # fmt: skip
    if not isinstance(data, dict):
        return data
    order = named_by(schemas, data)
    known = set(order)
    for name in data:
        order.setdefault(name, [])
        for one in schemas:
            if name not in mapping(one.get("properties")):
                order[name] += list(mapping(one.get("patternProperties")).values())
                order[name].append(one.get("additionalProperties", True))
    made = {
        name: arrange(data[name], {"allOf": inner}, root, unnamed, depth + 1)
        for name, inner in order.items()
        if name in data
    }
    unnamed.update((id(made), name) for name in made if name not in known)
    return made


def named_by(schemas: list[Json], data: Json) -> dict[str, list[Json]]:
    """Return the subschemas of every named property, in the grammar's order."""
    order: dict[str, list[Json]] = {}
    for one in schemas:
        for value in [one.get("const"), *listed(one.get("enum"))]:
            if value == data:
                order |= {name: [{"const": inner}] for name, inner in mapping(value).items()}
        for name, inner in mapping(one.get("properties")).items():
            order.setdefault(name, []).append(inner)
    for one in schemas:
        names = listed(one.get("required"))
        for keyword in ("dependentRequired", "dependencies"):
            for name, needed in mapping(one.get(keyword)).items():
                names = [*names, name, *listed(needed)]
        for name in names:
            order.setdefault(name, [])
    return order


def items(schemas: list[Any], at: int) -> Iterator[Json]:
    for one in schemas:
        prefix = one.get("prefixItems", one.get("items"))
        if isinstance(prefix, list):
            yield (
                prefix[at]
                if at < len(prefix)
                else one.get("additionalItems", one.get("items", True))
            )
        else:
            yield one.get("items", True)


def together(schema: Json, root: Json, data: Json, depth: int) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas it merges for this instance, in the grammar's order."""
    if not isinstance(schema, dict) or depth > 30:
        return
    yield schema
    inner = [target(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    inner += listed(schema.get("allOf"))
    for keyword in ("anyOf", "oneOf"):
        branches = listed(schema.get(keyword))
        right = [branch for branch in branches if is_valid(data, branch, root)]
        inner += right[:1] or branches
    if "if" in schema:
        holds = is_valid(data, schema["if"], root)
        inner += [schema["if"], schema.get("then")] if holds else [schema.get("else")]
    for keyword in ("dependentSchemas", "dependencies"):
        inner += [s for name, s in mapping(schema.get(keyword)).items() if name in mapping(data)]
    for one in inner:
        yield from together(one, root, data, depth + 1)


def is_valid(data: Json, branch: Json, root: Json) -> bool:
    shared: dict[str, Json] = {
        key: root[key] for key in ("$defs", "definitions", "$schema") if key in mapping(root)
    }
    whole: dict[str, Json] = {"allOf": [branch], **shared}
    try:
        return bool(jsonschema.validators.validator_for(whole)(whole).is_valid(data))
    except Exception:  # a reference that cannot be followed, or a schema that cannot be read
        return False


def target(reference: str, root: Json) -> Json:
    at = root
    for step in reference.removeprefix("#").split("/")[1:]:
        at = mapping(at).get(step.replace("~1", "/").replace("~0", "~"))
    return at


def mapping(value: Json) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: Json) -> list[Any]:
    return value if isinstance(value, list) else []


# -- all of them ----------------------------------------------------------------------------------


class EndedError(Exception):
    pass


def limited(path: Path) -> Found:
    def end(*_: object) -> None:
        raise EndedError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        return judge(path)
    except EndedError:
        return Found(path.stem, problem=ENDED)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(paths: list[Path], jobs: int) -> list[Found]:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with context.Pool(jobs, maxtasksperchild=500) as pool:
        return list(pool.imap_unordered(limited, paths, chunksize=4))


def summary(found: list[Found]) -> dict[str, float]:
    accepted = [one for one in found if one.refusal is None and one.problem is None]
    valid, invalid = (sum(getattr(one, name) for one in accepted) for name in ("valid", "invalid"))
    passed, closed, refused = (
        sum(getattr(one, name) for one in accepted)
        for name in ("valid_passed", "closed", "invalid_refused")
    )
    times = sorted(one.compile_s for one in found) or [0.0]
    return {
        "schemas": len(found),
        "strict_percent": round(100 * len(accepted) / len(found), 2),
        "best_effort_percent": round(100 * sum(not f.best_refusal for f in found) / len(found), 2),
        "not_compiled": sum(one.problem is not None for one in found),
        "valid": valid,
        "valid_percent": round(100 * (passed + closed) / max(1, valid), 2),
        "valid_as_they_are_percent": round(100 * passed / max(1, valid), 2),
        "invalid": invalid,
        "invalid_refused_percent": round(100 * refused / max(1, invalid), 2),
        "compile_ms_p50": round(1000 * times[len(times) // 2], 2),
        "compile_ms_p99": round(1000 * times[len(times) * 99 // 100], 2),
        "compile_ms_max": round(1000 * times[-1], 1),
    }


def reasons(found: list[Found]) -> Counter[str]:
    refusals = (one.problem or one.refusal for one in found)
    return Counter(text.partition(", at #")[0][:110] for text in refusals if text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, help="so many of them, by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, default=20, help="reasons and wrong answers shown")
    parser.add_argument("--results-dir", type=Path, help="write a record there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    paths = sorted(args.folder.glob("*.json"))
    if args.sample is not None:
        paths = random.Random(args.seed).sample(paths, min(args.sample, len(paths)))
    started_at, begun = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    found = run(paths, args.jobs)
    for reason, count in reasons(found).most_common(args.show):
        log.info("%6d  %s", count, reason)
    for one in [one for one in found if one.best_refusal][: args.show]:
        log.info("best effort: %s: %s", one.name, one.best_refusal)
    wrong = [(one.name, text) for one in found for text in one.wrong]
    for name, text in sorted(wrong, key=lambda pair: pair[1])[: args.show]:
        log.info("%s: %s", name, text)
    metrics = summary(found)
    log.info("%s", json.dumps(metrics, indent=1))
    if args.results_dir is not None:
        duration_s = round(time.monotonic() - begun, 1)
        made = record_of(metrics, started_at, duration_s, args.folder.name, args.sample)
        log.info("record: %s", store.write(made, args.results_dir))


def record_of(
    metrics: dict[str, float], started_at: str, duration_s: float, folder: str, sample: int | None
) -> record.Record:
    made = record.of_this_machine(
        kind="demo",
        started_at=started_at,
        duration_s=duration_s,
        recipe={"model": folder},
        changed={},
        workload={"name": "schemas", "sample": sample or 0},
        metrics=metrics,
    )
    argv = ["python", "-m", "tests.load.schemas", folder, *sys.argv[2:]]
    return msgspec.structs.replace(made, argv=argv)


if __name__ == "__main__":
    main()
