"""Cost of masks over an adversarial walk of every form of string and number.

    python -m tests.grammars.runtime.walk FOLDER

FOLDER holds the tokenizer.json of a model. Searches every form for its most expensive mask, after
each kind of character and before every limit. Prints milliseconds of CPU time, by form and in
total.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from nanovllm.grammars.formats import FORMATS
from nanovllm.grammars.runtime.compiler import Compiler
from nanovllm.grammars.runtime.dearest import Search
from nanovllm.grammars.runtime.matching import Matcher
from nanovllm.grammars.schema import compiled

log = logging.getLogger("walk")
STRING, NUMBER = {"type": "string"}, {"type": "number"}
FORMS: dict[str, dict[str, Any]] = {
    **{f"format {name}": STRING | {"format": name} for name in FORMATS},
    "email of 30": STRING | {"format": "email", "maxLength": 30},
    "uri of 80": STRING | {"format": "uri", "maxLength": 80},
    "string": STRING,
    **{f"at most {most}": STRING | {"maxLength": most} for most in (8, 40, 256, 100_000)},
    "at least 5": STRING | {"minLength": 5},
    "10 to 100": STRING | {"minLength": 10, "maxLength": 100},
    "two limits": {"anyOf": [STRING | {"maxLength": 30}, STRING | {"maxLength": 60}]},
    "found": STRING | {"pattern": "foo"},
    "letters": STRING | {"pattern": "^[a-z]{1,300}$"},
    "line": STRING | {"pattern": "^.{1,64}$"},
    "path": STRING | {"pattern": "^$|^([a-z]{1,90}/){0,9}x$"},
    "shares": STRING | {"pattern": "^[^@]+@[^@]+$", "maxLength": 100},
    "escapes": STRING | {"pattern": '^"([^"]|\\\\.)*"$'},
    "number": NUMBER,
    "integer": {"type": "integer"},
    "bounded integer": {"type": "integer", "minimum": -5, "maximum": 10**9},
    "bounded number": NUMBER | {"minimum": 0.001, "exclusiveMaximum": 1e9},
    "multiple": NUMBER | {"multipleOf": 0.01, "maximum": 10**308},
}
BEGUN = {"format email": '"\\"abc def', "format idn-email": '"\\"abc def'}


class Cost(NamedTuple):
    """CPU seconds of the build and of each mask. `text` precedes the most expensive mask."""

    build_s: float
    masks_s: list[float]
    text: str

    def at(self, share: float) -> float:
        return self.masks_s[min(len(self.masks_s) - 1, int(len(self.masks_s) * share))]


def tag_of(schema: object) -> str:
    form = {"type": "grammar", "grammar": compiled(schema, "x", exact=True)}
    return json.dumps({"type": "structural_tag", "format": form})


def walk(compiler: Compiler, tokenizer: Tokenizer, name: str, cpu_s: float, most: int) -> Cost:
    """Search the masks of a form in an object's property, also after its start from BEGUN."""
    schema = {"type": "object", "properties": {"a": FORMS[name]}, "required": ["a"]}
    begun = time.process_time()
    grammar = compiler.build(tag_of(schema))
    build_s, masks_s, found = time.process_time() - begun, [0.0], []
    for text in ["", BEGUN[name]] if name in BEGUN else [""]:
        matcher, vocab_size = Matcher(grammar), tokenizer.get_vocab_size()
        for token in tokenizer.encode('{"a": ' + text).ids:
            assert matcher.accept_token(token), text
        search = Search(matcher, compiler.texts, vocab_size)
        dearest = search.run(cpu_s, most)
        masks_s += search.costs_s
        found.append((dearest.cost_s, text + tokenizer.decode(dearest.output)))
    return Cost(build_s, sorted(masks_s), max(found)[1])


def walks(folder: Path, names: list[str], cpu_s: float, most: int) -> Iterator[tuple[str, Cost]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    compiler = Compiler(folder, tokenizer.get_vocab_size(), [0])
    compiler.prepare()
    for name in names:
        yield name, walk(compiler, tokenizer, name, cpu_s, most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", action="append", choices=list(FORMS))
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU time for each form")
    parser.add_argument("--masks", type=int, default=1000, help="most masks of each form")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    log.info(f"{'':28}{'build':>8}{'masks':>7}{'p50':>8}{'p99':>8}{'worst':>8}  before the dearest")
    together: list[float] = []
    for name, cost in walks(args.folder, args.form or list(FORMS), args.seconds, args.masks):
        together += cost.masks_s
        shown = "".join(f"{1000 * cost.at(share):8.2f}" for share in (0.5, 0.99, 1.0))
        build = f"{1000 * cost.build_s:8.0f}{len(cost.masks_s):7}"
        log.info(f"{name:28}{build}{shown}  {cost.text[-40:]!r}")
    whole = Cost(0.0, sorted(together), "")
    shown = "".join(f"{1000 * whole.at(share):8.2f}" for share in (0.5, 0.99, 1.0))
    log.info(f"{'all':28}{'':8}{len(together):7}{shown}")


if __name__ == "__main__":
    main()
