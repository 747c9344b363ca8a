"""Formats of xgrammar's structural tags, and a function's parameters as XML in them.

Parameters are one element each, in the order of the schema. Strings are written as raw text, all
other values as JSON. Some templates write Python's True, False and None in calls of the history. A
parameter may then have these words as values, too, if the parser reads them so.

Decision: the styles of xgrammar 0.2.8 are not used. They allow white space around values, which
these models do not write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.grammars import texts
from nanovllm.grammars.automata import Dfa, PatternError, difference, intersection
from nanovllm.grammars.document import InexactError, SchemaError
from nanovllm.grammars.facts import Conj, Object, String
from nanovllm.grammars.objects import Objects
from nanovllm.grammars.regexes import found
from nanovllm.grammars.rules import Rules
from nanovllm.grammars.schema import MAX_SPACE, OBJECT, Grammar, read

Format = dict[str, Any]
ANY_TEXT: Format = {"type": "any_text"}
NO_STRING = {"type": ["null", "boolean", "number", "object", "array"]}


def grammar(text: str) -> Format:
    return {"type": "grammar", "grammar": text}


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def either(*branches: Format) -> Format:
    return {"type": "or", "elements": list(branches)} if len(branches) > 1 else branches[0]


def sequence(*elements: Format) -> Format:
    """Return the elements in sequence, without empty strings. One element is returned by itself.

    Only empty constants are dropped, since a client's format may be any JSON.
    """
    elements_left = [element for element in elements if element != constant("")]
    return (
        {"type": "sequence", "elements": elements_left}
        if elements_left[1:]
        else next(iter(elements_left), constant(""))
    )


def optional(*elements: Format) -> Format:
    return {"type": "optional", "content": sequence(*elements)}


class Parameters:
    def __init__(
        self,
        syntax: tuple[str, str],
        names: re.Pattern[str],
        *,
        schema: object,
        where: str,
        exact: bool,
        spell: Callable[[str], list[Format]] = lambda text: [constant(text)],
        words_of: Callable[[str | None], Mapping[str, bool | None]] = lambda _: {},
    ) -> None:
        """`syntax`: the text before and after a parameter, with NAME for its name.

        `names`: the names that the model can write. `spell` returns the formats of a text that may
        have markers. `words_of` returns the words other than JSON's for values of a parameter, or
        of all that the schema does not name for None.
        """
        self._before, self._after = syntax
        self._spell = spell
        self._words_of = words_of
        self._names = names
        self._where = where
        self._reader = read(schema, where, exact=exact)
        self._conj = self._reader.conj(schema, "#") + self._reader.conj(OBJECT, "#")

    def form(self) -> Format:
        """Return the format of all parameters. Raise SchemaError."""
        forms = []
        for facts in self._reader.settled(self._conj):
            try:
                form = self._object(facts.object) if facts.object else None
            except (InexactError, PatternError) as error:
                self._reader.inexact("#", str(error))
                form = self._object(facts.object.simple()) if facts.object else None
            forms += [form] if form else []
        if not forms:
            self._reader.refuse("#", "must be an object's")
        return either(*forms)

    def _object(self, facts: Object) -> Format | None:
        """Return the format for one alternative, or None if nothing matches."""
        parts, others = Objects(self._reader).parts(facts, "#")
        if facts.low > len(facts.required) or facts.high is not None:
            self._reader.inexact("#", "'minProperties' or 'maxProperties' of parameters")
        members = []
        for name, conj, is_required in parts:
            value = self._value(conj, self._words_of(name))
            if value is None and is_required:
                return None
            if value is None:
                continue
            if not self._names.fullmatch(name):
                text = f"this model cannot write a parameter named {name!r}"
                raise SchemaError(self._where, text)
            begin = self._spell(self._before.replace("NAME", name))
            join = sequence if is_required else optional
            members.append(join(*begin, value, *self._spell(self._after)))
        members += [self._more(names, conj) for names, conj in others]
        return sequence(*members)

    def _more(self, names: Dfa, conj: Conj) -> Format:
        """Return the format for any number of unnamed parameters."""
        value = self._value(conj, self._words_of(None))
        if value is None:
            return constant("")
        begin, end = self._before.split("NAME")
        rules = Rules(0)
        names = intersection(names, found(f"^(?:{self._names.pattern})$"))
        name = rules.text(rules.dfa(names, in_json=False))
        if name is None:
            return constant("")
        element = sequence(
            *self._spell(begin), grammar(name), *self._spell(end), value, *self._spell(self._after)
        )
        return {"type": "star", "content": element}

    def _value(self, conj: Conj, words: Mapping[str, bool | None]) -> Format | None:
        """Return the format of a parameter's value, or None if no value is allowed.

        `words` are other texts of values, which count only if the schema allows these.
        """
        alternatives = self._reader.settled(conj)
        forms: list[Format] = []
        if any(facts.text == String() for facts in alternatives):
            forms.append(self._any_text())
        else:
            forms += [form for facts in alternatives if facts.text
                      if (form := self._text(facts.text, self._reader.path(conj)))]  # fmt: skip
        values: set[bool | None] = {value for facts in alternatives for value in facts.booleans}
        values |= {None for facts in alternatives if facts.null}
        allowed = [word for word, value in words.items() if value in values]
        conj += self._reader.conj(NO_STRING, "#")
        others = Grammar(self._reader, MAX_SPACE).text(conj, allowed)
        if others is not None:
            forms.append(grammar(others))
        return either(*forms) if forms else None

    def _any_text(self) -> Format:
        return ANY_TEXT | {"excludes": [self._after.strip()]}

    def _text(self, text: String, path: str) -> Format | None:
        try:
            if text.values is not None:
                words = texts.words_of(text)
                return either(*map(constant, words)) if words else None
            if not text.patterns and not text.formats and not text.excluded:
                free = self._any_text()
                if text.high is not None:
                    free |= {"max_chars": text.high - text.low}
                least = {"type": "regex", "pattern": f"[^<]{{{text.low}}}"}
                return sequence(least, free) if text.low else free
            dfa, high = texts.loose(text)
            dfa = difference(dfa, found(self._after.strip()))
        except PatternError as error:
            self._reader.inexact(path, f"a string with {error}")
            return self._any_text()
        rules = Rules(0)
        body = rules.dfa(dfa, in_json=False)
        if high is not None:
            body = rules.add("text", [(rules.add("body", [(body,)], mark=f"max_chars={high}"),)])
        rule = rules.text(body)
        return None if rule is None else grammar(rule)
