"""Grammars in the engine: compilation, refusals and masks."""

from __future__ import annotations

import json
import re
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from nanovllm.config import DEMO
from nanovllm.grammars.runtime import compiler, trials as trials_module
from nanovllm.grammars.runtime.masks import Grammars
from nanovllm.grammars.runtime.queue import CompileOutcome, Failure
from nanovllm.grammars.runtime.trials import WALL_FACTOR, Attempt, Trials
from nanovllm.wire import (
    Finish,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    Sampling,
    StepOutput,
)

VOCAB, END = 2048, 2041
THINK, END_THINK = 2042, 2043
COMPILE_S = 1.5


def token(token_id) -> dict:
    return {"type": "token", "token": token_id}


def ebnf(text) -> dict:
    return {"type": "grammar", "grammar": text}


def thinking(begun, answer, **how) -> dict:
    """Return the tag that server.tag makes for an answer after thinking."""
    text = {"type": "any_text", **how}
    end = {"type": "tag", "begin": "", "content": text, "end": token(END_THINK)}
    thoughts = [end, {"type": "regex", "pattern": "\n{0,2}"}]
    if not begun:
        form = {"type": "sequence", "elements": [token(THINK), *thoughts]}
        thoughts = [{"type": "optional", "content": form}]
    return {"type": "sequence", "elements": [*thoughts, answer]}


def request(form, request_id=1, stop_ids=(END,)) -> Generate:
    tag = json.dumps({"type": "structural_tag", "format": form})
    return Generate(
        request_id=request_id,
        prompt=b"",
        max_new=9,
        stop_ids=list(stop_ids),
        sampling=Sampling(),
        grammar=tag,
    )


@pytest.fixture(scope="module")
def made() -> Iterator[Grammars]:
    made = Grammars(DEMO, VOCAB, [END], COMPILE_S)
    yield made
    made.close()


@pytest.fixture(scope="module")
def attempt() -> Attempt:
    return compiler.attempt_of(DEMO, VOCAB, [END])


def compiled(made, *requests) -> list[CompileOutcome]:
    told: list[Future[CompileOutcome]] = [Future() for _ in requests]
    for at, (asked, future) in enumerate(zip(requests, told, strict=True)):
        made.queue.submit(at, asked.grammar, future.set_result)
    return [future.result(timeout=60) for future in told]


def allowed(made, *request_ids) -> list[list[int]]:
    masks = made.fill([(request_id, []) for request_id in request_ids])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def output(**tokens) -> StepOutput:
    ids = [int(name[1:]) for name in tokens]
    return StepOutput(ids=array("q", ids).tobytes(), tokens=array("i", tokens.values()).tobytes())


def test_grammars_that_differ_in_token_ids_alone_are_not_mixed_up(made) -> None:
    for request_id, token_id in enumerate((THINK, END_THINK), 1):
        asked = request(token(token_id), request_id)
        made.follow(asked, *compiled(made, asked))
    assert allowed(made, 1, 2) == [[THINK], [END_THINK]]
    made.advance(output(r1=THINK))
    assert allowed(made, 1, 2, 3) == [[END], [END_THINK], list(range(VOCAB))]


WORDLESS = [
    (begun, form)
    for begun in (True, False)
    for form in (
        ebnf("root ::= root"),
        ebnf('root ::= "twelve letters" x\nx ::= x'),
        {"type": "regex", "pattern": r"[^\s\S]"},
    )
]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (ebnf("root ::= root"), "the grammar does not compile: nothing matches it"),
        (ebnf("root ::= nope"), 'the grammar does not compile: .*Rule "nope" is not defined'),
        (ebnf('root ::= (("a" | [b-z]+){1,1000} "x"){1,1000}'), "masks take up to .* ms a token"),
        *((thinking(*form), "nothing matches it") for form in WORDLESS),
        ({"type": "nope"}, "the grammar does not compile: .*nope"),
        (ebnf("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000), "Nest layer exceeded"),
    ],
)
def test_refused(attempt, form, reason, monkeypatch) -> None:
    monkeypatch.setattr(compiler, "MASK_S", 0.005)
    found = attempt(request(form).grammar)
    assert found.startswith("the grammar does not compile: ") and re.search(reason, found), found
    assert attempt(request(token(THINK)).grammar) == ""


def test_too_much_memory_is_refused() -> None:
    trials = Trials(short_of_memory)
    found = trials.begin().result(request(heavy(0)).grammar, 60)
    assert found == "the grammar takes more than 512 MiB to compile"
    assert trials.begin().result(request(token(THINK)).grammar, 60) == ""
    trials.close()


def short_of_memory() -> Attempt:
    """Return an attempt with a small memory limit. Runs in the trials' process."""
    trials_module.MEMORY_BYTES = 64 << 20
    return compiler.attempt_of(DEMO, VOCAB, [END])


def heavy(number) -> dict:
    """Return a grammar whose compilation takes much more than 20 s."""
    branches = " | ".join(f'[a-z]{{1,{i + 1}}} "{i}-{number}"' for i in range(1000))
    return ebnf(f"root ::= {branches}")


def test_heavy_grammars_whose_requests_left_hold_nobody(made) -> None:
    compiled(made, request(token(THINK)))  # one-time initialisation is done
    for i in range(12):
        made.queue.submit(100 + i, request(heavy(i)).grammar, refuse_to_hear)
    time.sleep(0.3)
    for i in range(12):
        made.queue.leave(100 + i)
    begun = time.monotonic()
    (found,) = compiled(made, request(ebnf('root ::= "trivial"')))
    assert not isinstance(found, Failure)
    assert time.monotonic() - begun < 15
    assert made.queue.failures["timeout"] == 0


def refuse_to_hear(outcome) -> None:
    raise AssertionError("it left")


def test_a_heavy_grammar_really_ends(made) -> None:
    begun = time.monotonic()
    (found, again) = compiled(made, *[request(heavy("slow"))] * 2)
    assert found is again
    reason = "the grammar takes more than 1.5 s of CPU time to compile"
    assert found[:2] == (RefusalKind.INVALID, reason)
    assert time.monotonic() - begun < WALL_FACTOR * COMPILE_S + 20
    server = made._trials._process.pid
    children = Path(f"/proc/{server}/task/{server}/children")
    while children.read_text().split():
        assert time.monotonic() - begun < WALL_FACTOR * COMPILE_S + 40
        time.sleep(0.01)


def test_whatever_ends_a_request_drops_its_matcher(made) -> None:
    asked = [request(token(THINK), request_id) for request_id in range(10, 15)]
    for one, grammar in zip(asked, compiled(made, *asked), strict=True):
        made.follow(one, grammar)
    before = made.num_followed
    ended = [Finish(10 + i, reason) for i, reason in enumerate(list(FinishReason)[:4])]
    made.advance(StepOutput(finished=ended))
    assert made.num_followed == before - 4
    made.advance(StepOutput(refused=[Refusal(14, RefusalKind.QUEUE_FULL, "")]))
    assert made.num_followed == before - 5


def test_where_there_is_no_way_on_the_output_ends(made) -> None:
    # The body is longer than the search for an end.
    body = "".join(f'"{c}" ' for c in "abcdefghijklmnopqrstuvwxyz")
    asked = request(ebnf(f"root ::= {body} dead\ndead ::= dead"))
    made.follow(asked, *compiled(made, asked))
    for _ in range(30):
        ((*tokens,),) = allowed(made, 1)
        if tokens == [END]:
            break
        made.advance(output(r1=min(tokens)))
    assert tokens == [END]
    made.advance(output(r1=END))
    assert allowed(made, 1) == [list(range(VOCAB))]


def test_a_token_that_a_grammar_does_not_allow_fails_its_request_alone(made) -> None:
    asked = [request(ebnf('root ::= "ab" "ab"'), request_id) for request_id in (21, 22)]
    for one, grammar in zip(asked, compiled(made, *asked), strict=True):
        made.follow(one, grammar)
    before, (right, *_) = made.num_followed, allowed(made, 22)[0]
    assert set(made.advance(output(r21=THINK, r22=right))) == {21}
    assert allowed(made, 21) == [list(range(VOCAB))] and made.num_followed == before - 1
    assert THINK not in allowed(made, 22)[0]
    assert not made.advance(StepOutput(finished=[Finish(22, FinishReason.ABORT)]))


def test_a_mask_that_cannot_be_made_fails_its_request_alone(made) -> None:
    class Broken:
        stop_token_ids = (END,)

        def is_terminated(self) -> bool:
            return False

    asked = request(token(THINK), 24)
    made.follow(asked, *compiled(made, asked))
    made._matchers[23] = Broken()
    assert allowed(made, 23, 24) == [list(range(VOCAB)), [THINK]]
    assert set(made.advance(output(r24=THINK))) == {23}
    assert 23 not in made._matchers and allowed(made, 24) == [[END]]
    made.advance(StepOutput(finished=[Finish(24, FinishReason.STOP)]))


def test_a_grammar_without_a_token_to_end_with_is_refused() -> None:
    made = Grammars(DEMO, VOCAB, [], COMPILE_S)
    asked = request(token(THINK), 1, stop_ids=())
    grammar = compiled(made, asked)[0]
    with pytest.raises(ValueError, match="a grammar needs a token that ends the text"):
        made.follow(asked, grammar)
    made.follow(request(token(THINK), 2), grammar)  # the request's own stop id is sufficient
    made.advance(output(r2=THINK))
    assert allowed(made, 2) == [[END]]
    made.close()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("text", ["", "a", "twelve letters"])
def test_what_has_words_is_taken_behind_thinking_too(attempt, begun: bool, text: str) -> None:
    for how in ({}, {"max_tokens": 3}):
        tag = request(thinking(begun, ebnf(f'root ::= "{text}"'), **how)).grammar
        assert attempt(tag) == ""
    wordless = thinking(begun, ebnf("root ::= root"), max_tokens=3)
    assert attempt(request(wordless).grammar).endswith(": nothing matches it")
