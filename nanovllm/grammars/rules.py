"""Grammar rules in the syntax of xgrammar 0.2.8, with rules for texts, automata and lengths.

The form of the rules follows from their cost. xgrammar 0.2.8 precomputes a token mask for every
place in a rule that reads characters. Each costs a pass over most of the vocabulary if most letters
may follow. Tokens that may extend past the end of a rule are tried again for each mask. Free text
is therefore one rule that refers to itself and includes its own end. Lookahead states the text that
may follow a rule, and automata share their common parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count

from nanovllm.grammars.automata import LAST, Dfa, Ranges, inverted, merged
from nanovllm.grammars.regexes import MANY

Sequence = tuple[str, ...]  # of terminals, which begin with a quote or a bracket, and of rules
Rule = list[Sequence]  # alternatives

MAX_RULES = 60_000
SPACE = r"[ \n\r\t]"
FREE = r'[^"\\\x00-\x1f]'  # characters of strings that need no escape
ENDS = {"value": r"[,}\]]", "key": '":"'}  # lookahead after a string
BEGINS = r' (= ["{\[0-9\-tfn])'  # lookahead before a value
ESCAPES = {0x22: '"', 0x5C: "\\\\", 0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r"}
GROUPS = tuple(
    tuple((ord(c), ord(c)) for c in sorted(letters))
    for letters in ("aeiou", "bcdfg", "hjklm", "npqrst", "vwxyz", "ABCDEFGHIJKLM",
                    "NOPQRSTUVWXYZ", "0123456789", " _-./:@$")
)  # fmt: skip
_GROUPED = merged([pair for group in GROUPS for pair in group])
_SPECIAL: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF))


class TooManyRulesError(Exception):
    """More rules than MAX_RULES."""


class Rules:
    """Named rules. Equal rules are made only once."""

    def __init__(self, max_space: int) -> None:
        self._space = f"{SPACE}{{0,{max_space}}}"
        self.bodies: dict[str, Rule] = {}
        self._marks: dict[str, str] = {}
        self._ahead: dict[str, str] = {}
        self._known: dict[object, str] = {}
        self._numbers = count()
        self.bodies["ws"] = [(self._space,)]
        self.bodies["colon"] = [("ws", '":"', "ws")]
        self.bodies["comma"] = [("ws", '","', "ws")]
        self._ahead["colon"] = self._ahead["comma"] = BEGINS
        self.bodies["next"] = [("ws", '","', "ws", r'"\""')]  # up to the next key

    def name(self, hint: str) -> str:
        if len(self.bodies) > MAX_RULES:
            raise TooManyRulesError
        return f"{hint}{next(self._numbers)}"

    def add(self, hint: str, body: Rule, *, end: str = "", mark: str = "") -> str:
        """Add a rule. `end`: key of ENDS for its lookahead. `mark`: its attribute in brackets."""
        name = self.name(hint)
        self.bodies[name] = body
        self.annotate(name, end, mark)
        return name

    def annotate(self, name: str, end: str, mark: str = "") -> None:
        if end:
            self._ahead[name] = f" (= {self._space} {ENDS[end]})"
        if mark:
            self._marks[name] = f"[{mark}]"

    # -- JSON's own rules -----------------------------------------------------------------------

    def basic(self, name: str) -> str:
        if name in self.bodies:
            return name
        if name in ("value_chars", "key_chars"):
            self.annotate(name, name.partition("_")[0])
        self.bodies[name] = _BASIC[name]
        for sequence in _BASIC[name]:
            for item in sequence:
                if is_rule(item) and bare(item) in _BASIC:
                    self.basic(bare(item))
        return name

    # -- strings ------------------------------------------------------------------------------

    def lengthy(self, low: int, high: int | None, end: str) -> str:
        """Return the rule for any string of `low` to `high` characters, with its quotes."""
        key = (low, high, end)
        if key in self._known:
            return self._known[key]
        if high is None:
            name = self.add("text", [(r'"\""', self._counted(low, None, end))])
        elif high <= MANY:
            name = self.add("text", [(r'"\""', self._counted(low, high, end))])
        else:
            inner = self._counted(low, None, "", closing=end)
            body = self.add("body", [(inner,)], mark=f"max_chars={high}")
            name = self.add("text", [(r'"\""', body, r'"\""')])
        self._known[key] = name
        return name

    def _counted(self, low: int, high: int | None, end: str, closing: str = "") -> str:
        """Return the rule for the rest of a string: characters and, with `end`, the closing quote.

        `closing`: lookahead after a quote that another rule writes.
        """
        if not low and high is None and end:
            return self.basic(f"{end}_chars")
        key = ("rest", low, high, end, closing)
        if key in self._known:
            return self._known[key]
        body: Rule = [] if low else [(r'"\""' if end else '""',)]
        name = self.name("rest")
        self._known[key] = name
        self.bodies[name] = body
        self.annotate(name, end)
        if closing:
            self._ahead[name] = f' (= "\\"" {self._space} {ENDS[closing]})'
        if high != 0:
            most = None if high is None else high - 1
            less = self._counted(max(0, low - 1), most, end, closing)
            body += [(FREE, less), (r'"\\"', self.basic("escape"), less)]
        return name

    def words(self, texts: Iterable[str]) -> str:
        """Return a rule for these texts as JSON strings."""
        sequences: Rule = [
            (literal(json.dumps(text, ensure_ascii=not is_plain(text))),) for text in texts
        ]
        return self.add("word", sequences)

    def dfa(self, dfa: Dfa, end: str = "", *, in_json: bool = True) -> str:
        """Return a rule for an automaton's texts.

        In JSON they are escaped, and with an `end` the closing quote follows.
        """
        key = (dfa, end, in_json)
        if key in self._known:
            return self._known[key]
        names = [self.name("at") for _ in dfa.edges]
        free = f"{end}_chars" if end and in_json else ""
        for at, edges in enumerate(dfa.edges):
            if free and at in dfa.finals and edges == ((0, LAST, at),):
                names[at] = self.basic(free)
        for at, edges in enumerate(dfa.edges):
            if names[at] == free:
                continue
            body: Rule = []
            by_target: dict[int, list[tuple[int, int]]] = {}
            for low, high, to in edges:
                by_target.setdefault(to, []).append((low, high))
            for to, ranges in by_target.items():
                body += self._moves(merged(ranges), names[to], in_json=in_json, free=free)
            if at in dfa.finals:
                body.append((r'"\""' if end and in_json else '""',))
            self.bodies[names[at]] = body
            self.annotate(names[at], end)
        self._known[key] = names[0]
        return names[0]

    def character(self, ranges: Ranges) -> str:
        """Return a class or a rule for one of these characters within a JSON string."""
        if not without(((0, 0x10FFFF),), _SPECIAL) or not any(
            a <= high and low <= b for low, high in ranges for a, b in _SPECIAL
        ):
            return class_text(ranges)
        key = ("character", ranges)
        if key not in self._known:
            self._known[key] = self.add("character", self.moves(ranges))
        return self._known[key]

    def moves(self, ranges: Ranges, to: str = "") -> Rule:
        """Return alternatives for one of these characters in a JSON string, then rule `to`."""
        made = self._moves(ranges, to or "ws", in_json=True, free="")
        return made if to else [sequence[:-1] for sequence in made]

    def _moves(self, ranges: Ranges, to: str, *, in_json: bool, free: str) -> Rule:
        """Return alternatives for one of these characters, followed by rule `to`."""
        rule: Rule = []
        if not in_json:
            return [(class_text(without(ranges, ((0xD800, 0xDFFF),))), to)]
        plain = without(ranges, _SPECIAL)
        if to == free:
            for number, group in enumerate((*GROUPS, without(inverted(_GROUPED), _SPECIAL))):
                if not without(group, plain):
                    plain = without(plain, group)
                    rule.append((self._shared(number, group, to),))
        if plain:
            rule.append((class_text(plain), to))
        special = [c for low, high in ranges for c in range(low, min(high, 0x5C) + 1)
                   if c < 0x20 or c in ESCAPES]  # fmt: skip
        if len(special) == 0x22:
            return [*rule, (r'"\\"', self.basic("escape"), to)]
        if short := [ESCAPES[c] for c in special if c in ESCAPES]:
            rule.append((r'"\\"', f"[{''.join(short)}]", to))
        for code in special:
            if code not in ESCAPES:
                rule.append((f'"\\\\u{code:04x}"', to))
        return rule

    def _shared(self, number: int, group: Ranges, to: str) -> str:
        key = ("group", number, to)
        if key not in self._known:
            end = to.partition("_")[0]
            self._known[key] = self.add("group", [(class_text(group), to)], end=end)
        return self._known[key]

    # -- the whole grammar --------------------------------------------------------------------

    def text(self, root: str) -> str | None:
        """Return the grammar of a rule and the rules it needs, or None if it matches nothing."""
        bodies = productive(self.bodies)
        if not bodies[root]:
            return None
        same = {name: body[0][0] for name, body in bodies.items()
                if len(body) == 1 and len(body[0]) == 1 and is_rule(body[0][0])
                and name not in self._marks and "{" not in body[0][0]}  # fmt: skip
        lines, seen, waiting = [], {root}, [root]
        while waiting:
            name = waiting.pop()
            sequences = []
            for sequence in bodies[name]:
                items = [renamed(item, same) for item in sequence]
                sequences.append(" ".join(items))
                new = {bare(item): 0 for item in items if is_rule(item) and bare(item) not in seen}
                seen.update(new)
                waiting += new
            shown = "root" if name == root else name + self._marks.get(name, "")
            body = " | ".join(dict.fromkeys(sequences))
            lines.append(f"{shown} ::= {body}{self._ahead.get(name, '')}")
        if any(bare(item) == root for name in seen for s in bodies[name] for item in s):
            lines.append(f"{root} ::= root")
        return "\n".join(lines)


def productive(bodies: dict[str, Rule]) -> dict[str, Rule]:
    """Return the rules without alternatives that need a rule that matches nothing."""
    users: dict[str, list[tuple[str, int]]] = {}
    missing: dict[tuple[str, int], int] = {}
    good: set[str] = set()
    waiting: list[str] = []
    for name, body in bodies.items():
        for i, sequence in enumerate(body):
            needs = {bare(item) for item in sequence if is_rule(item) and "{0," not in item}
            missing[name, i] = len(needs)
            for need in needs:
                users.setdefault(need, []).append((name, i))
            if not needs and name not in good:
                good.add(name)
                waiting.append(name)
    while waiting:
        for name, i in users.get(waiting.pop(), ()):
            missing[name, i] -= 1
            if not missing[name, i] and name not in good:
                good.add(name)
                waiting.append(name)
    return {
        name: [
            tuple(item for item in sequence if not is_rule(item) or bare(item) in good) or ('""',)
            for i, sequence in enumerate(body)
            if not missing[name, i]
        ]
        for name, body in bodies.items()
    }


def renamed(item: str, same: dict[str, str]) -> str:
    """Replace a rule that only refers to another rule by that rule."""
    if not is_rule(item):
        return item
    name, brace, counts = item.partition("{")
    seen = set()
    while name in same and name not in seen:
        seen.add(name)
        name = same[name]
    return name + brace + counts


def is_rule(item: str) -> bool:
    return item[0] not in '"['


def bare(item: str) -> str:
    """Return a rule's name without its repetition counts."""
    return item.partition("{")[0]


def is_plain(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def literal(text: str) -> str:
    return '"' + "".join(
        c if " " <= c <= "~" and c not in '"\\' else f"\\{c}" if c in '"\\' else _code(ord(c))
        for c in text
    ) + '"'  # fmt: skip


def class_text(ranges: Ranges) -> str:
    parts = (_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)
    return f"[{''.join(parts)}]"


def _code(code: int) -> str:
    if 0x30 <= code <= 0x39 or 0x41 <= code <= 0x5A or 0x61 <= code <= 0x7A:
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def without(ranges: Ranges, others: Ranges) -> Ranges:
    remaining = []
    for begin, end in ranges:
        low = begin
        for a, b in others:
            if b < low or a > end:
                continue
            if a > low:
                remaining.append((low, a - 1))
            low = b + 1
        if low <= end:
            remaining.append((low, end))
    return tuple(remaining)


_CHARS = {
    f"{end}_chars": [(r'"\""',), (FREE, f"{end}_chars"), (r'"\\"', "any_escape", f"{end}_chars")]
    for end in ENDS
}
_BASIC: dict[str, Rule] = {
    **_CHARS,
    "any_escape": [(r'["\\/bfnrt]',), ('"u"', "[0-9a-fA-F]{4}")],
    "escape": [(r'["\\bfnrt]',), ('"u00"', "[01]", "[0-9a-fA-F]")],  # only where required
    "string": [(r'"\""', "value_chars")],
    "integer": [('"0"',), ("sign", "[1-9]", "[0-9]*")],
    "sign": [('""',), ('"-"',)],
    "number": [("sign", "whole", "fraction", "exponent")],
    "whole": [('"0"',), ("[1-9]", "[0-9]*")],
    "fraction": [('""',), ('"."', "[0-9]+")],
    "exponent": [('""',), ("[eE]", "[+-]?", "[0-9]+")],
    "any": [*((name,) for name in ("number", "string", "any_array", "any_object")),
            ('"true"',), ('"false"',), ('"null"',)],
    "any_array": [('"["', "ws", '"]"'), ('"["', "ws", "any", "any_items", "ws", '"]"')],
    "any_items": [('""',), ("comma", "any", "any_items")],
    "any_object": [('"{"', "ws", '"}"'),
                   ('"{"', "ws", r'"\""', "any_pair", "any_pairs", "ws", '"}"')],
    "any_pair": [("key_chars", "colon", "any")],
    "any_pairs": [('""',), ("next", "any_pair", "any_pairs")],
}  # fmt: skip
