"""The engine's side of grammars: what compiles, what is refused, and the masks that follow."""

from __future__ import annotations

import json
import threading
import time
from array import array

import numpy as np
import pytest

from nanovllm.config import DEMO
from nanovllm.engine import grammars
from nanovllm.engine.grammars import Grammars, Outcome
from nanovllm.wire import Generate, Sampling, StepOutput

VOCAB, END = 2048, 2041
THINK, END_THINK = 2042, 2043


def token(token_id) -> dict:
    return {"type": "token", "token": token_id}


def ebnf(text) -> dict:
    return {"type": "grammar", "grammar": text}


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


@pytest.fixture
def made() -> Grammars:
    return Grammars(DEMO, VOCAB, [END])


def compiled(made, *requests) -> list[Outcome]:
    futures = [made.compile(asked.grammar) for asked in requests]
    return [future.result(timeout=30) for future in futures]


def allowed(made, *request_ids) -> list[list[int]]:
    masks = made.fill(list(request_ids))
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


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (ebnf("root ::= root"), "the grammar does not compile: nothing matches it"),
        (ebnf("root ::= nope"), 'the grammar does not compile: .*Rule "nope" is not defined'),
        (ebnf('root ::= (("a" | [b-z]+){1,1000} "x"){1,1000}'), "masks take .* ms a token"),
        ({"type": "nope"}, "the grammar does not compile: .*nope"),
    ],
)
def test_refused(made, form, reason, monkeypatch) -> None:
    monkeypatch.setattr(grammars, "MASK_S", 0.01)
    (found,) = compiled(made, request(form))
    assert isinstance(found, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


def test_a_slow_grammar_is_in_nobodys_way(made, monkeypatch) -> None:
    going_on = threading.Event()
    quickly = made._compile

    def slowly(tag):
        if "slow" in tag:
            going_on.wait(30)
        return quickly(tag)

    compiled(made, request(token(THINK)))
    monkeypatch.setattr(grammars, "COMPILE_S", 0.3)
    monkeypatch.setattr(made, "_compile", slowly)
    slow = [request(ebnf(f'root ::= "slow{i}"'), i) for i in range(3)]
    begun = time.monotonic()
    late = compiled(made, *slow, slow[0])
    assert set(late) == {"the grammar takes longer than 0.3 s to compile"}
    assert not isinstance(compiled(made, request(token(END_THINK)))[0], str)
    assert time.monotonic() - begun < 5
    going_on.set()
    while isinstance(compiled(made, slow[0])[0], str):  # until it is ready after all
        time.sleep(0.01)


def test_the_cache_is_bounded_and_drops_what_was_not_used(made, monkeypatch) -> None:
    asked = [request(ebnf(f'root ::= "{"ab" * 50}{i}"')) for i in range(20)]
    (first,) = compiled(made, asked[0])
    size = first.memory_size_bytes
    assert size > 100
    monkeypatch.setattr(grammars, "CACHE_BYTES", 5 * size)
    for one in asked:
        compiled(made, asked[0], one)
    time.sleep(0.05)
    assert 3 <= len(made._known) <= 6
    assert asked[0].grammar in made._known and asked[1].grammar not in made._known


def test_where_there_is_no_way_on_the_output_ends(made) -> None:
    body = "".join(f'"{c}" ' for c in "abcdefghijklmnopqrstuvwxyz")  # longer than what is tried
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
