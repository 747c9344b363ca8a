"""Tokens of the tokenizer outside the model's vocabulary are refused by name, never with a 500."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nanovllm.config import load_config
from nanovllm.server.errors import ApiError
from nanovllm.server.orders import generates, with_grammar
from nanovllm.server.served import Served
from tests.server.fake_engine import READY
from tests.server.tiny_tokenizer import tiny_tokenizer, write_folder

IDS = tiny_tokenizer().get_vocab()
USER = "<\uff5cUser\uff5c>"  # the last one
THINK = IDS["<think>"]
SAID = (
    "the tokenizer's token {text!r} (id {id}) is outside "
    "the model's vocabulary, whose largest id is {last}"
)


def served(folder: Path, vocab_size: int) -> Served:
    write_folder(folder)
    (folder / "config.json").write_text("{}")
    config = load_config(None, [f"model={folder}", "load.format=dummy", "server.parser=qwen3"])
    return Served(config, replace(READY, vocab_size=vocab_size))


def refused(model: Served, text: str = "x", **fields: object) -> ApiError:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    with pytest.raises(ApiError) as caught:
        request = model.request(msgspec.json.encode(body))
        prompt = with_grammar(request, model.template.prompt(request), model)
        generates(request, prompt, model, seed=1, ids=[1])
    assert caught.value.status == 400
    return caught.value


def test_a_warning_counts_them_and_names_the_first(tmp_path) -> None:
    assert served(tmp_path, len(IDS)).warnings() == []
    assert served(tmp_path, len(IDS) + 9).warnings() == []  # rows without a token do no harm
    (warning,) = served(tmp_path, THINK).warnings()
    assert warning == (
        f"5 tokens of the tokenizer, the first one '<think>' (id {THINK}), are outside the model's "
        f"vocabulary of {THINK}: requests that contain them are refused"
    )


def test_a_prompt_with_one_is_refused(tmp_path) -> None:
    model = served(tmp_path, len(IDS) - 1)
    error = refused(model, f"hello {USER} there")
    named = SAID.format(text=USER, id=len(IDS) - 1, last=len(IDS) - 2)
    assert (error.message, error.param) == (f"messages: {named}", "messages")
    template = served(tmp_path, THINK)
    error = refused(template, chat_template_kwargs={"enable_thinking": True})
    assert SAID.format(text="<think>", id=THINK, last=THINK - 1) in error.message


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("bad_words", ["fox", USER], "bad_words[1]"),
        ("stop_token_ids", [len(IDS) - 1], "stop_token_ids"),
        ("allowed_token_ids", [1, len(IDS) - 1], "allowed_token_ids"),
        ("logit_bias", {str(len(IDS) - 1): 1}, f"logit_bias.{len(IDS) - 1}"),
        (
            "response_format",
            {"type": "structural_tag", "format": {"type": "token", "token": USER}},
            "response_format.format.token",
        ),
        (
            "response_format",
            {"type": "structural_tag", "format": {"type": "token", "token": len(IDS) - 1}},
            "response_format.format.token",
        ),
    ],
)
def test_every_field_that_names_one_is_refused(tmp_path, field, value, param) -> None:
    error = refused(served(tmp_path, len(IDS) - 1), **{field: value})
    assert error.param == param
    assert USER in error.message or str(len(IDS) - 1) in error.message


def test_a_marker_that_the_model_lacks_is_text_to_grammars(tmp_path) -> None:
    """A grammar spells `</think>` if its id is outside the vocabulary."""
    model = served(tmp_path, IDS["</think>"])
    body = {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 3}
    request = model.request(msgspec.json.encode(body))
    tag = with_grammar(request, model.template.prompt(request), model).grammar
    assert f'"token":{IDS["</think>"]}' not in tag and "</think>" in tag
    assert f'"token":{THINK}' in tag


def test_a_model_without_an_end_refuses_grammars(tmp_path) -> None:
    model = served(tmp_path, len(IDS))
    model.eos_ids = frozenset()
    error = refused(model, response_format={"type": "json_object"})
    assert "needs a token that ends the output, and the model has none" in error.message
