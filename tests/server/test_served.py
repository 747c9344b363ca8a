"""Values read from a model's files at start."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec.structs import replace

from nanovllm.config import ConfigError, load_config
from nanovllm.server.errors import ApiError
from nanovllm.server.orders import sampling
from nanovllm.server.parsers.json_calls import QWEN3
from nanovllm.server.parsers.plain import PLAIN
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import Served
from tests.server.fake_engine import READY
from tests.server.tiny_tokenizer import write_folder

MINE = replace(READY, model="mine", vocab_size=500)
HELLO = {"messages": [{"role": "user", "content": "x"}]}


def served(folder, config=None, generation=None, *overrides: str) -> Served:
    folder.mkdir(exist_ok=True)
    write_folder(folder)
    (folder / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Served(load_config(None, [f"model={folder}", "load.format=dummy", *overrides]), MINE)


def test_the_end_tokens_of_the_start_are_taken_as_they_are(tmp_path) -> None:
    model = served(tmp_path, {"eos_token_id": 7})
    assert model.eos_ids == {1, 7}  # the tokenizer's <|im_end|> is 1
    config = replace(
        load_config(None, [f"model={tmp_path}", "load.format=dummy"]), eos_ids=(3, 10_000)
    )
    assert Served(config, MINE).eos_ids == {3}  # 10000 is not a token of the model


def test_the_authors_sampling_stands_in_for_what_a_request_leaves_out(tmp_path) -> None:
    authors = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "do_sample": True}
    model = served(tmp_path, {}, authors)
    silent = sampling(msgspec.convert(HELLO, ChatRequest), model, 3, [])
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (0.6, 0.95, 20, 0.1)
    said = {**HELLO, "temperature": 0, "top_k": -1, "repetition_penalty": 1.5}
    loud = sampling(msgspec.convert(said, ChatRequest), model, 3, [])
    assert (loud.temperature, loud.top_k, loud.top_p) == (0.0, 0, 0.95)
    assert (loud.repetition_penalty, loud.seed) == (1.5, 3)


def test_the_parser_is_chosen_by_architecture_or_by_name(tmp_path) -> None:
    qwen3 = {"architectures": ["Qwen3ForCausalLM"]}
    assert served(tmp_path, qwen3).family is QWEN3
    assert served(tmp_path, qwen3, None, "server.parser=plain").family is PLAIN
    with pytest.raises(ConfigError, match=r"server.parser is 'x'; it must be auto, .*qwen3"):
        served(tmp_path, qwen3, None, "server.parser=x")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_files_are_named(tmp_path, name) -> None:
    served(tmp_path, {}, {})
    (tmp_path / name).write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match=rf"{name}: .*eos_token_id"):
        Served(load_config(None, [f"model={tmp_path}", "load.format=dummy"]), MINE)
    (tmp_path / name).write_bytes(b'{"x": ' + b"[" * 100_000)
    with pytest.raises(ConfigError, match=rf"{name}: maximum recursion depth"):
        Served(load_config(None, [f"model={tmp_path}", "load.format=dummy"]), MINE)


@pytest.mark.parametrize(("most", "waiting"), [(3, 3), (16, 4096)])
def test_more_choices_than_may_wait_are_refused_for_good(tmp_path, most: int, waiting: int) -> None:
    """`n` is limited by the queue, since all choices of a request wait for a moment."""
    model = served(tmp_path, {}, None, f"schedule.max_queue={waiting}")
    assert model.request(msgspec.json.encode({**HELLO, "n": most})).n == most
    with pytest.raises(ApiError) as caught:
        model.request(msgspec.json.encode({**HELLO, "n": most + 1}))
    assert (caught.value.status, caught.value.param) == (400, "n")
    assert caught.value.message == f"n must be between 1 and {most}, not {most + 1}"


def test_every_name_of_the_model_is_accepted_and_a_wrong_one_lists_them(tmp_path) -> None:
    model = served(tmp_path / "my-model", {}, None, "server.served_name=prod")
    assert model.names == ["prod", "my-model", "mine"] and model.name == "mine"
    for name in (None, "", "prod", "my-model", "mine", str(tmp_path / "my-model")):
        request = model.request(msgspec.json.encode({**HELLO, "model": name}))
        assert (request.model, model.adapter_of(request)) == (name, "")
    with pytest.raises(ApiError) as caught:
        model.request(msgspec.json.encode({**HELLO, "model": "gpt-9"}))
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert caught.value.message == (
        "the model 'gpt-9' does not exist; this server has 'prod' or 'my-model' or 'mine'"
    )
