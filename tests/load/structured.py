"""Acceptance of structured outputs: the demo model fills schemas, and `jsonschema` judges.

    python -m tests.load.structured --url http://127.0.0.1:8000/v1 --results-dir results

1,000 requests over 100 schemas of the kinds that users write. Each schema has ten requests, with
different prompts, seeds and temperatures. An answer that was cut off counts as a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec

from nanovllm.bench import record, store

log = logging.getLogger("structured")
Schema = dict[str, Any]
MOST_NEW = 1500
TOPICS = (
    "a person named Ada",
    "a book about the sea",
    "an order of two lamps",
    "the weather in Oslo",
    "a small company",
    "a train to Lima",
    "a pet cat",
    "a recipe for soup",
    "a concert in May",
    "a broken server",
)


def thing(*optional: str, **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def text(**more: object) -> Schema:
    return {"type": "string", "maxLength": 24, **more}


def shaped(name: str) -> Schema:
    return {"type": "string", "format": name}


def like(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def whole(low: int, high: int, **more: object) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def between(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def several(items: Schema, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


YES = {"type": "boolean"}
POINT = thing(x=between(-90, 90), y=between(-180, 180))
MONEY = thing(amount=between(0, 9999.99), currency=one_of("EUR", "USD", "PEN"))
PERSON = thing("email", name=text(minLength=1), age=whole(0, 120), email=shaped("email"))
ADDRESS = thing("unit", street=text(), city=text(), zip=like("^[0-9]{5}$"), unit=maybe(text()))
CAT = thing(kind={"const": "cat"}, lives=whole(1, 9))
DOG = thing(kind={"const": "dog"}, tricks=several(text()))
TREE = {
    "$defs": {"node": thing("left", v=whole(0, 9), left=maybe(ref("leaf"))), "leaf": thing(v=YES)},
    **thing(root=ref("node")),
}
PARTS: dict[str, Schema] = {
    "text": text(),
    "short": text(minLength=2, maxLength=8),
    "count": whole(0, 100),
    "negative": whole(-20, -1),
    "above": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "step": whole(0, 60, multipleOf=15),
    "share": between(0, 1),
    "odds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "flag": YES,
    "nothing": {"type": "null"},
    "color": one_of("red", "green", "dark blue"),
    "mixed": one_of(1, "two", None, True, 2.5),
    "constant": {"const": "v1"},
    "boxed": {"const": {"a": [1, 2]}},
    "day": shaped("date"),
    "hour": shaped("time"),
    "moment": shaped("date-time"),
    "mail": shaped("email"),
    "id": shaped("uuid"),
    "address4": shaped("ipv4"),
    "address6": shaped("ipv6"),
    "host": shaped("hostname"),
    "span": shaped("duration"),
    "plate": like("^[A-Z]{2}-[0-9]{3,4}$"),
    "phone": like(r"^\+?[0-9]{1,3}(-[0-9]{2,4}){2}$"),
    "slug": like("^[a-z]{2,8}(-[a-z]{2,8})?$"),
    "version": like(r"^(0|[1-9]\d?)\.(0|[1-9]\d?)\.\d{1,2}(-(alpha|beta)\d?)?$"),
    "hex": like("^#(?:[0-9a-f]{3}){1,2}$"),
    "tags": several(text(maxLength=10), 1, 4),
    "numbers": several(whole(0, 50), 2, 5),
    "pairs": several({"type": "array", "prefixItems": [text(), whole(0, 9)], "minItems": 2,
                      "maxItems": 2, "items": False}, 1, 2),
    "matrix": several(several(whole(0, 9), 2, 2), 2, 2),
    "point": POINT,
    "money": MONEY,
    "person": PERSON,
    "people": several(PERSON, 1, 2),
    "place": ADDRESS,
    "optional": thing("a", "b", "c", a=text(), b=whole(0, 5), c=YES),
    "at_least_two": {**thing("a", "b", "c", a=YES, b=YES, c=YES), "minProperties": 2},
    "nullable": maybe(text()),
    "types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 7},
    "either": {"anyOf": [whole(0, 9), text(), several(YES)]},
    "pet": {"oneOf": [CAT, DOG]},
    "pets": several({"oneOf": [CAT, DOG]}, 1, 2),
    "rating": whole(1, 5, description="stars"),
    "flags": {
        "type": "object",
        "required": ["on"],
        "additionalProperties": YES,
        "maxProperties": 1,
    },
    "deep": thing(a=thing(b=thing(c=thing(d=several(one_of("x", "y"), 1, 2))))),
    "empty": thing(),
    "annotated": {"type": "string", "title": "T", "description": "D", "examples": ["a"],
                  "default": "a", "maxLength": 6},
    # Without a type, a text of any length would be valid: `required` applies to objects only.
    "implied": {"type": ["object", "null"], "properties": {"a": whole(0, 3)}, "required": ["a"]},
}  # fmt: skip
NAMES = list(PARTS)
SCHEMAS: list[Schema] = [
    *(thing(value=PARTS[name]) for name in NAMES),
    *(
        thing(*NAMES[i : i + 1], **{NAMES[j % len(NAMES)]: PARTS[NAMES[j % len(NAMES)]]
          for j in (i, i * 3 + 7, i * 7 + 20)})
        for i in range(len(NAMES) - 3)
    ),
    TREE,
    {"$defs": {"p": PERSON, "m": MONEY}, **thing("tip", buyer=ref("p"), seller=ref("p"),
                                                 price=ref("m"), tip=maybe(ref("m")))},
    {"$ref": "#/$defs/order", "$defs": {
        "order": thing(items=several(ref("item"), 1, 2), total=whole(0, 999)),
        "item": thing(name=text(), count=whole(1, 9))}},
]  # fmt: skip


@dataclass
class Found:
    num_valid: int = 0
    num_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    duration_s: float = 0.0


async def run(url: str, model: str, count: int, concurrency: int) -> Found:
    """Send `count` requests for each schema."""
    found, begun, places = Found(), time.monotonic(), asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(number: int, turn: int) -> None:
            async with places:
                body = request(model, number, turn)
                answer = await client.post("/chat/completions", json=body)
                judge(found, number, answer)

        await asyncio.gather(*(one(n, t) for t in range(count) for n in range(len(SCHEMAS))))
    found.duration_s = round(time.monotonic() - begun, 1)
    return found


def request(model: str, number: int, turn: int) -> dict[str, Any]:
    topic = TOPICS[(number + turn) % len(TOPICS)]
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Describe {topic} as JSON."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": f"s{number}", "schema": SCHEMAS[number], "strict": True},
        },
        "chat_template_kwargs": {"enable_thinking": (None, False, True)[turn % 3]},
        "thinking_token_budget": 40,
        "temperature": (0.0, 0.7, 1.0)[(number + turn) % 3],
        "seed": 1000 * turn + number,
        "max_tokens": MOST_NEW,
    }


def judge(found: Found, number: int, answer: httpx.Response) -> None:
    if answer.status_code != 200:
        found.failures.append(f"schema {number}: {answer.status_code} {answer.text[:300]}")
        return
    body = answer.json()
    (choice,) = body["choices"]
    content = choice["message"]["content"]
    found.num_tokens += body["usage"]["completion_tokens"]
    validator = jsonschema.Draft202012Validator
    try:
        if choice["finish_reason"] != "stop":
            raise ValueError(f"ended by {choice['finish_reason']}")
        checker = validator.FORMAT_CHECKER
        validator(SCHEMAS[number], format_checker=checker).validate(json.loads(content))
        found.num_valid += 1
    except (ValueError, TypeError, jsonschema.ValidationError) as problem:
        found.failures.append(f"schema {number}: {str(problem)[:200]} in {content!r:.200}")


def record_of(found: Found, started_at: str, count: int, concurrency: int) -> record.Record:
    metrics = {
        "valid_percent": 100 * found.num_valid / (count * len(SCHEMAS)),
        "valid": found.num_valid,
        "output_tokens": found.num_tokens,
    }
    workload = {"name": "structured", "concurrency": concurrency, "schemas": len(SCHEMAS)}
    made = record.of_this_machine(
        kind="demo",
        started_at=started_at,
        duration_s=found.duration_s,
        recipe={"model": "demo"},
        changed={},
        workload=workload | {"requests": count * len(SCHEMAS)},
        metrics=metrics,
    )
    argv = ["python", "-m", "tests.load.structured", *sys.argv[1:]]
    return msgspec.structs.replace(made, argv=argv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of a running server")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--count", type=int, default=10, help="requests for each schema")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--results-dir", type=Path, help="write a record there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    found = asyncio.run(run(args.url, args.model, args.count, args.concurrency))
    for failure in found.failures[:20]:
        log.info("%s", failure)
    log.info("%d valid, %d not, %.0f s", found.num_valid, len(found.failures), found.duration_s)
    if args.results_dir is not None:
        made = record_of(found, started_at, args.count, args.concurrency)
        log.info("record: %s", store.write(made, args.results_dir))
    sys.exit(bool(found.failures))


if __name__ == "__main__":
    main()
