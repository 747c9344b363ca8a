"""Masks after drafts equal those of a matcher that accepts the same tokens one by one."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from functools import cache
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.config import DEMO, load_config
from nanovllm.grammars.runtime.compiler import Compiler
from nanovllm.grammars.runtime.masks import Grammars
from nanovllm.grammars.runtime.matching import CompiledPair, Matcher
from nanovllm.server.protocol import parse_request
from nanovllm.server.served import Served
from nanovllm.server.tag import structural_tag
from nanovllm.wire import Finish, FinishReason, Generate, Ready, Sampling, StepOutput

VOCAB, END = 2048, 2041
WORDS = VOCAB // 32
READY = Ready(
    worker=0,
    model="demo",
    max_model_tokens=400,
    vocab_size=VOCAB,
    num_pages=4,
    page_tokens=16,
    num_slots=4,
)
TURNS = ("", "<think>\n", "<think>\n\n</think>\n\n")
FAMILIES = ("qwen3", "qwen3_coder", "minimax_m2", "deepseek_r1", "plain")
LEAVES = (
    {"type": "boolean"},
    {"type": "integer", "minimum": -3, "maximum": 20},
    {"type": "string", "maxLength": 4},
    {"enum": ["a", "ab", "<think>", None]},
)
SHORT = ('"', "}", "]", ",", ":", " ", "\n", "a", "t", "</think>", "<tool_call>", "</tool_call>")

leaves = st.sampled_from(LEAVES)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(
            lambda named, more: {"type": "object", "properties": named, "required": more},
            st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            st.lists(st.sampled_from("ab"), max_size=1),
        ),
    ),
    max_leaves=4,
)
contents = st.one_of(
    st.builds(lambda schema: {"json": schema}, schemas),
    st.just({"choice": ["yes", "yes, no", "y"]}),
    st.just({"regex": "a{2,5}(b|<think>)*"}),
)


@st.composite
def constrained(draw) -> dict[str, object]:
    """Return fields of a request with a grammar."""
    family = draw(st.sampled_from(FAMILIES))
    fields: dict[str, object] = {"family": family, "turn": draw(st.sampled_from(TURNS))}
    if draw(st.booleans()):
        fields["thinking_token_budget"] = draw(st.integers(0, 6))
    if family == "plain" or draw(st.booleans()):
        fields["structured_outputs"] = draw(contents)
    else:
        objects = {"type": "object", "properties": {"a": draw(schemas)}}
        function = {"name": "f", "parameters": objects, "strict": True}
        fields["tools"] = [{"type": "function", "function": function}]
        fields["tool_choice"] = draw(st.sampled_from(["required", "auto"]))
        if fields["tool_choice"] == "auto":
            fields["structured_outputs"] = draw(contents)
    return fields


@cache
def served(family) -> Served:
    return Served(load_config(None, [f"server.parser={family}"]), READY)


@cache
def compiler() -> Compiler:
    made = Compiler(DEMO, VOCAB, [END])
    made.prepare()
    return made


@cache
def short_ids() -> list[int]:
    tokenizer = served("qwen3").template.tokenizer
    return [END, *(i for text in SHORT for i in tokenizer.encode(text).ids)]


def grammar_of(family="qwen3", turn="", **fields) -> CompiledPair:
    raw = {"messages": [{"role": "user", "content": "x"}], **fields}
    asked = parse_request(msgspec.json.encode(raw), model="demo", vocab_size=VOCAB)
    return compiler().build(structural_tag(asked, served(family), turn))


@pytest.fixture(scope="module")
def made() -> Iterator[Grammars]:
    made = Grammars(DEMO, VOCAB, [END], 1.0)
    yield made
    made.close()


def follow(made, request_id, grammar) -> None:
    made.follow(Generate(request_id, b"", 9, [END], Sampling()), grammar)


def one_by_one(grammar, known, drafts) -> list[list[int]]:
    """Return the tokens allowed after `known` and each draft, or all where no mask applies."""
    matcher = Matcher(grammar, [END])
    assert all(matcher.accept_token(token) for token in known)
    found = []
    for at in range(1 + len(drafts)):
        if matcher.is_terminated() or (at and not matcher.accept_token(drafts[at - 1])):
            break
        if matcher.is_terminated():
            break
        mask = np.zeros((1, WORDS), np.int32)
        matcher.fill(mask[0])
        found += tokens_of(mask)
    return found + [list(range(VOCAB))] * (1 + len(drafts) - len(found))


def tokens_of(masks) -> list[list[int]]:
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def likely(rng: Random, allowed: list[int]) -> int:
    """Return a random allowed token. Markers, quotes and the end token are preferred."""
    short = [token for token in allowed if token in short_ids()]
    return rng.choice(short if short and rng.random() < 0.6 else allowed)


def guess(rng: Random, grammar, known, count) -> list[int]:
    """Return drafts, most of which the grammar allows."""
    drafts: list[int] = []
    for _ in range(count):
        allowed = one_by_one(grammar, known, drafts)[-1]
        drafts.append(rng.randrange(VOCAB) if rng.random() < 0.15 else likely(rng, allowed))
    return drafts


def output_of(texts: dict[int, list[int]]) -> StepOutput:
    return StepOutput(
        ids=array("q", texts).tobytes(),
        tokens=array("i", [token for text in texts.values() for token in text]).tobytes(),
        counts=array("i", map(len, texts.values())).tobytes(),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(constrained(), min_size=1, max_size=3), st.integers(0, 999))
def test_masks_behind_drafts(made, requests, seed) -> None:
    rng = Random(seed)
    grammars = dict(enumerate(grammar_of(**fields) for fields in requests))
    known: dict[int, list[int]] = {request_id: [] for request_id in grammars}
    for request_id, grammar in grammars.items():
        follow(made, request_id, grammar)
    for _ in range(12):
        rows = [
            (i, guess(rng, grammars[i], known[i], rng.choice([0, 0, 1, 3, 7]))) for i in grammars
        ]
        rows.append((99, [5, 6]))  # has no grammar
        rng.shuffle(rows)
        masks = tokens_of(made.fill(rows))
        step: dict[int, list[int]] = {}
        for request_id, drafts in rows:
            mine, masks = masks[: 1 + len(drafts)], masks[1 + len(drafts) :]
            if request_id == 99:
                assert mine == [list(range(VOCAB))] * 3
                continue
            text = known[request_id]
            assert mine == one_by_one(grammars[request_id], text, drafts)
            if END in text:
                continue
            drawn = step.setdefault(request_id, [])
            for allowed, draft in zip(mine, [*drafts, -1], strict=True):
                is_right = draft in allowed and rng.random() < 0.7
                drawn.append(draft if is_right else likely(rng, allowed))
                if drawn[-1] != draft or draft == END:
                    break
        assert masks == []
        made.advance(output_of(step))
        for request_id, drawn in step.items():
            known[request_id] += drawn
    for request_id in grammars:
        made._matchers.pop(request_id)


def test_thinking_ends_and_a_call_begins_inside_a_window(made) -> None:
    tokenizer = served("qwen3").template.tokenizer
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    grammar = grammar_of(
        turn="<think>\n", tools=tools, tool_choice="required", thinking_token_budget=2
    )
    follow(made, 1, grammar)
    end_think, call = (tokenizer.token_to_id(text) for text in ("</think>", "<tool_call>"))
    (word,) = tokenizer.encode("a").ids
    drafts = [word, word, end_think, call]
    masks = tokens_of(made.fill([(1, drafts)]))
    assert end_think in masks[0] and word in masks[0] and word in masks[1]
    assert end_think in masks[2] and word not in masks[2]  # the budget is used up
    assert call in masks[3] and word not in masks[3]
    assert set(masks[4]) <= {*tokenizer.encode("\n{").ids, *all_beginning("\n{")}
    assert made.fill([(1, [])]).tolist() == made.fill([(1, [word])])[:1].tolist()


def test_a_step_that_uses_up_a_budget_and_ends_thinking_writes_nothing_to_stderr(
    made, capfd
) -> None:
    """xgrammar would warn that the budget was exceeded, though it was not."""
    tokenizer = served("qwen3").template.tokenizer
    end_think = tokenizer.token_to_id("</think>")
    (word,) = tokenizer.encode("a").ids
    limits = {"structured_outputs": {"regex": "[a-z]{0,40}"}}
    for request_id, fields in ((1, {}), (2, limits)):
        grammar = grammar_of(turn="<think>\n", thinking_token_budget=2, **fields)
        assert grammar.may_limit_tokens
        follow(made, request_id, grammar)
    step = [word, word, end_think]
    masks = tokens_of(made.fill([(1, step), (2, step)]))
    assert [row == [end_think] for row in masks] == [False, False, True, False] * 2
    made.advance(output_of({1: step, 2: step}))
    assert made.num_followed == 2
    assert tokens_of(made.fill([(1, []), (2, [])])) == [masks[3], masks[7]]
    assert capfd.readouterr() == ("", "")
    made.advance(StepOutput(finished=[Finish(i, FinishReason.STOP) for i in (1, 2)]))


@pytest.mark.parametrize(
    ("schema", "text"),
    [({"type": "string"}, '"abab'), ({"maxLength": 30, "type": "string"}, '"abab')],
)
def test_a_step_makes_masks_for_its_drafts_only_while_a_budget_applies(
    made, schema, text, monkeypatch, capfd
) -> None:
    """`fill` makes the masks of a step in a batch, so the counted ones are further masks."""
    further: list[Matcher] = []
    fill = Matcher.fill
    monkeypatch.setattr(
        Matcher, "fill", lambda self, mask: (further.append(self), fill(self, mask))[1]
    )
    tokenizer = served("qwen3").template.tokenizer
    end_think, (word,) = tokenizer.token_to_id("</think>"), tokenizer.encode("a").ids
    fields = {"structured_outputs": {"json": schema}}
    grammar = grammar_of(turn="<think>\n", thinking_token_budget=2, **fields)
    assert (grammar.free is not None) == ("maxLength" in schema)
    follow(made, 1, grammar)
    counts = []
    answer = tokenizer.encode(text, add_special_tokens=False).ids
    blank = tokenizer.encode("\n\n", add_special_tokens=False).ids
    for step in ([word, word, end_think], [*blank, *answer], [word] * 4):
        made.fill([(1, step)])
        assert made.advance(output_of({1: step})) == set()
        counts.append(len(further))
    assert made.num_followed == 1 and counts == [2, 2, 2]
    assert capfd.readouterr() == ("", "")
    made.advance(StepOutput(finished=[Finish(1, FinishReason.STOP)]))


def all_beginning(letters) -> set[int]:
    vocabulary = served("qwen3").vocabulary
    return {
        i for i in range(VOCAB) if vocabulary.bytes_of(i).decode(errors="replace")[0] in letters
    }


def test_a_way_that_only_a_draft_would_take_may_end_nowhere(made) -> None:
    """Rows of 1 + 2 tokens where the grammar has no continuation after the first draft."""
    tokenizer = served("qwen3").template.tokenizer
    a, b, c = (tokenizer.token_to_id(letter) for letter in "abc")
    text = 'root ::= "a" dead | "a" "b" "c"? | "c"\ndead ::= "z" dead'
    stuck = 'root ::= "c" | "a" dead\ndead ::= dead'
    for request_id, rules in ((1, stuck), (2, stuck), (3, text)):
        tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": rules}}
        follow(made, request_id, compiler().build(json.dumps(tag)))
    masks = tokens_of(made.fill([(1, [a, b]), (2, [a]), (3, [a, b])]))
    assert masks[:3] == [[a, c], [END], list(range(VOCAB))]
    assert masks[3:5] == [[a, c], [END]]
    assert masks[7] == [c, END]
    before = made.num_followed
    made.advance(output_of({1: [a, END], 2: [c], 3: [a, b, END]}))
    assert made.num_followed == before - 1  # the first request ended against its grammar
    assert tokens_of(made.fill([(1, []), (2, []), (3, [c])])) == [
        list(range(VOCAB)),
        [END],
        *[list(range(VOCAB))] * 2,
    ]


def test_a_token_against_its_mask_is_no_end(made) -> None:
    a, b = (served("qwen3").template.tokenizer.token_to_id(letter) for letter in "ab")
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= "a" "a"'}}
    for request_id, token in ((1, b), (2, END)):
        follow(made, request_id, compiler().build(json.dumps(tag)))
        assert made.advance(output_of({request_id: [a, token]})) == {request_id}
        assert made.advance(output_of({request_id: [a]})) == set()  # its matcher is gone
