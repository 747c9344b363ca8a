"""Checkpoints whose files disagree about the token that ends a text, through complete servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end import demo_server
from tests.server.tiny_tokenizer import write_folder

END = 1  # the tokenizer's eos, with which the template ends turns
SIZES = dict(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=405,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
)
A_WORD = {"structured_outputs": {"regex": "[ab]{1,9}"}, "thinking_token_budget": 0}


@pytest.fixture(scope="module", params=[2, None], ids=["config names another", "config names none"])
def url(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = write_folder(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(SIZES | {"eos_token_id": request.param}))
    server = demo_server.start(str(folder), "--load-format", "dummy", "--device", "cpu")
    yield server.url
    assert server.stop() == 0


def answered(url: str, **fields: object) -> tuple[list[int], str]:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "temperature": 0}
    body |= {"return_token_ids": True, **fields}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["token_ids"], choice["finish_reason"]


def test_the_tokenizers_end_ends_a_text(url) -> None:
    assert answered(url, logit_bias={END: 100}) == ([END], "stop")
    ids, reason = answered(url, logit_bias={END: 100}, min_tokens=3)
    assert (len(ids), ids[3:], reason) == (4, [END], "stop")
    assert answered(url, logit_bias={END: 100}, ignore_eos=True) == ([END] * 20, "length")


@pytest.mark.parametrize("token_id", [0, 2, 300, 404])
@pytest.mark.parametrize(
    "grammar",
    [{"thinking_token_budget": 0}, A_WORD, {"response_format": {"type": "json_object"}}],
    ids=["thinking budget", "regex", "json"],
)
def test_a_grammar_ends_with_the_same_token(url, grammar, token_id) -> None:
    """A grammar ends with the server's end token; one of its own used to stop the engine."""
    ids, reason = answered(url, logit_bias={token_id: 100}, **grammar)
    if grammar is A_WORD:
        assert ids[-1] in (END, 2) and reason == "stop"
    assert answered(url, logit_bias={END: 100})[1] == "stop"  # the engine lives


def test_an_ordinary_token_may_stop_a_grammar(url) -> None:
    """An ordinary stop token ends the output only where the grammar may end."""
    letter = answered(url, logit_bias={END: -100}, **A_WORD, max_tokens=1)[0][0]
    ids, reason = answered(url, stop_token_ids=[letter], **A_WORD)
    assert ids[0] != letter and reason == "stop"
    assert answered(url, logit_bias={END: 100})[1] == "stop"
