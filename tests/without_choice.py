"""Checks in a copy of the project without one module, for tests/test_choices.py.

They import all remaining modules and use other choices in place of the deleted one.
"""

from __future__ import annotations

import pkgutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import nanovllm
from nanovllm.attention import BACKENDS
from nanovllm.config import ConfigError, Speculate, load_config
from nanovllm.registry import resolve
from nanovllm.sampling import PROCESSORS
from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import Text
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.spec import DRAFTERS
from nanovllm.wire import Sampling
from tests.models.tiny import config_of, make_tiny
from tests.whole_engine import WholeEngine

PROMPT, BIASED = [5, 6, 7], 900
LOUD = Sampling(temperature=0.0, logit_bias={BIASED: 100.0})


def text(engine: WholeEngine, sampling: Sampling = Sampling(temperature=0.0)) -> list[int]:
    engine.submit(1, PROMPT, 8, sampling)
    engine.run()
    return engine.text[1]


def demo(speculate: Speculate | None = None) -> WholeEngine:
    return WholeEngine(load_config(None, ["device=cpu"]), slots=2, pages=40, speculate=speculate)


def model(gone: str) -> None:
    other = "llama" if gone.endswith("qwen3") else "qwen3"
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder), other)
        assert len(text(WholeEngine(config_of(Path(folder))))) == 8


def attention(gone: str) -> None:
    if "torch" in BACKENDS:
        assert len(text(demo())) == 8
        return
    try:
        demo()
    except ConfigError:
        return
    raise AssertionError("attention without a backend for this machine")


def sampling(gone: str) -> None:
    plain = text(demo())
    assert BIASED not in plain
    biased = text(demo(), LOUD)
    without = text(demo(), Sampling(temperature=0.0, bad_words=[[plain[0]]]))
    assert (set(biased) == {BIASED}) == ("logit_bias" in PROCESSORS)
    assert (plain[0] not in without) == ("bad_words" in PROCESSORS)


def drafts(gone: str) -> None:
    plain = text(demo())
    for method in DRAFTERS:
        accept = [0.8, 0.5] if method == "synthetic" else []
        found = text(demo(Speculate(method=method, tokens=2, accept=accept)))
        assert found == plain if method == "ngram" else len(found) == 8


def parser(gone: str) -> None:
    for name in PARSERS:
        family = resolve(PARSERS, name)
        machine = OutputParser(family, {marker: marker for marker in family.markers}, "", None)
        said = "</think>two words" if family.thinks else "two words"
        events = [*machine.feed(said), *machine.finish()]
        assert "".join(event.text for event in events if isinstance(event, Text)) == "two words"


CHECKS = {"models": model, "attention": attention, "sampling": sampling, "spec": drafts,
          "parsers": parser}  # fmt: skip


def main(gone: str) -> None:
    for found in pkgutil.walk_packages(nanovllm.__path__, "nanovllm."):
        if not found.name.endswith("__main__"):
            import_module(found.name)
    assert gone not in sys.modules
    CHECKS[gone.split(".")[-2]](gone)
    sys.stdout.write("all of the rest works\n")
