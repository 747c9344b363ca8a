"""Least times of steps with drafts, compared with bytes and FLOP of small configs by hand.

All products read bfloat16 weights unless they are in block fp8, which has a float32 scale for each
128 x 128 weights. The GPU reads 4.28e12 bytes and computes 790e12 FLOP in a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nanovllm.bench import record
from nanovllm.bench.gpus import KNOWN
from nanovllm.bench.plan import MemoryPlan, plan_of
from nanovllm.cli.commands import profile_kv
from nanovllm.config import ConfigError, load_config

BYTES, FLOP, LENGTH, DRAFTS = 4.28e12, 790e12, 1000, 3
TARGET = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=4096, hidden_size=256,
    intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=10000.0,
    tie_word_embeddings=False, eos_token_id=1,
)  # fmt: skip
# Of a layer of 4 query heads and 2 key/value heads of 64: qkv, o, gate, up and down, and norms.
LAYER = 256 * (4 + 2 * 2) * 64 + 4 * 64 * 256 + 3 * 256 * 512 + 2 * 256 + 2 * 64
HEAD = 4096 * 256
EAGLE3 = dict(
    architectures=["LlamaForCausalLMEagle3"], vocab_size=4096, draft_vocab_size=1024,
    hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-6,
    rope_theta=10000.0, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
)  # fmt: skip
FC = 3 * 256 * 256  # of three taps
# A head's qkv takes two vectors. Its last product has 1,024 draft tokens.
EAGLE3_PASS = 2 * 256 * (4 + 2 * 2) * 64 + 4 * 64 * 256 + 3 * 256 * 512 + 1024 * 256
SMALL = dict(
    TARGET, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
SMALL_LAYER = 128 * (2 + 2 * 1) * 64 + 2 * 64 * 128 + 3 * 128 * 256 + 2 * 128 + 2 * 64
HYBRID = dict(
    TARGET, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
    linear_conv_kernel_dim=4, mtp_num_hidden_layers=1, attn_output_gate=True,
)  # fmt: skip
# A product of two vectors, and a layer whose queries have gates.
MTP_PASS = 2 * 256 * 256 + LAYER + 256 * 4 * 64


def planned(folder: Path, config: dict[str, Any], *keys: str, tp: int = 1) -> MemoryPlan:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    fixed = ["load.format=dummy", f"config={path}", "schedule.slots=2048", "dtype=bfloat16"]
    return plan_of(load_config("qwen3-8b", [*fixed, *keys]), KNOWN["h200"], tp)


def test_a_step_of_ngrams_reads_weights_once_for_all_its_tokens(tmp_path: Path) -> None:
    """Nothing is computed to propose such drafts. Each row's keys and values are read once."""
    plan = planned(tmp_path, TARGET, "speculate={method: ngram, tokens: 3}")
    cached = 4 * LENGTH * 2 * 2 * 64 * 2  # of 4 layers
    read = 2 * (4 * LAYER + HEAD)
    assert plan.drafted_s(1, LENGTH) == pytest.approx((read + cached) / BYTES)
    assert plan.drafted_s(1, LENGTH) == plan.decode_s(1, LENGTH)
    # 4,096 tokens are slower to multiply than the weights are to read.
    products = 2 * 4096 * (4 * LAYER + HEAD) / FLOP
    assert plan.drafted_s(1024, LENGTH) == pytest.approx(products + 1024 * cached / BYTES)
    products = 2 * 1024 * (4 * LAYER + HEAD) / FLOP
    assert plan.decode_s(1024, LENGTH) == pytest.approx(products + 1024 * cached / BYTES)


@pytest.mark.parametrize("dtype", ["own", "fp8"])
def test_an_eagle3_head_is_read_in_each_pass_and_its_taps_once(dtype: str, tmp_path: Path) -> None:
    (tmp_path / "head.json").write_text(json.dumps(EAGLE3))
    keys = f"method: eagle3, tokens: 3, dtype: {dtype}, model: {tmp_path / 'head.json'}"
    plan = planned(tmp_path, TARGET, f"speculate={{{keys}}}")
    each = 2.0 if dtype == "own" else 1 + 4 / 128**2
    norms = 2 * 3 * 256
    read = each * FC + 3 * (each * EAGLE3_PASS + norms)
    cached = 3 * LENGTH * 2 * 2 * 64 * 2  # in each pass
    more = plan.drafted_s(1, LENGTH) - plan.decode_s(1, LENGTH, fed=4)
    assert more == pytest.approx((read + cached) / BYTES, rel=1e-6)


def test_a_draft_model_computes_one_more_token_in_its_first_pass(tmp_path: Path) -> None:
    """For 1,024 rows, arithmetic takes longer than reading: passes of 5, 1 and 1 tokens.

    The model is whole on each of two ranks.
    """
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    keys = f"method: draft_model, tokens: 3, model: {tmp_path / 'small.json'}"
    plan = planned(tmp_path, TARGET, f"speculate={{{keys}}}")
    layers, head, cached = 2 * SMALL_LAYER, 4096 * 128, 2 * LENGTH * 2 * 64 * 2
    for one in (plan, planned(tmp_path, TARGET, f"speculate={{{keys}}}", tp=2)):
        more = one.drafted_s(1, LENGTH) - one.decode_s(1, LENGTH, fed=4)
        assert more == pytest.approx(3 * (2 * (layers + head) + cached) / BYTES)
    more = plan.drafted_s(1024, LENGTH) - plan.decode_s(1024, LENGTH, fed=4)
    products = 2 * 1024 * ((5 + 1 + 1) * layers + 3 * head) / FLOP
    assert more == pytest.approx(products + 3 * 1024 * cached / BYTES)


@pytest.mark.parametrize("dtype", ["own", "fp8"])
def test_mtp_reads_the_output_head_or_its_fp8_copy_in_each_pass(dtype: str, tmp_path: Path) -> None:
    plan = planned(tmp_path, HYBRID, f"speculate={{method: mtp, tokens: 3, dtype: {dtype}}}")
    head = 2 * HEAD if dtype == "own" else HEAD + 4 * HEAD // 128**2
    cached = LENGTH * 2 * 2 * 64 * 2  # of one layer, without recurrent states
    more = plan.drafted_s(1, LENGTH) - plan.decode_s(1, LENGTH, fed=4)
    assert more == pytest.approx(3 * (2 * MTP_PASS + head + cached) / BYTES)


def test_times_per_token_at_given_rates(tmp_path: Path) -> None:
    """At rates of 0.8, 0.5 and 0.2, a step has 2.5 tokens of a request."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    config, path = tmp_path / "config.json", tmp_path / "kv.json"
    config.write_text(json.dumps(TARGET))
    drafts = f"method: draft_model, tokens: 3, model: {tmp_path / 'small.json'}"

    def metrics(*flags: str, keys: str = drafts) -> dict[str, float]:
        given = ["qwen3-8b", "--gpu", "h200", "--set", f"config={config}", "--json", str(path)]
        given += ["--lengths", "1000", "--set", f"speculate={{{keys}}}", *flags]
        done = CliRunner().invoke(profile_kv, given)
        assert done.exit_code == 0, done.output
        assert "tp 1: fits" in done.output
        return record.read(path).metrics

    own = 2 * (4 * LAYER + HEAD) + 4 * LENGTH * 512
    more = 3 * (2 * (2 * SMALL_LAYER + 4096 * 128) + 2 * LENGTH * 256)
    drafted_ms = 1e3 * (own + more) / BYTES
    for found in (
        metrics("--accept", "0.8,0.5,0.2"),
        metrics(keys=drafts + ", accept: [0.8, 0.5, 0.2]"),
        metrics("--accept", "0.8, 0.5, 0.2", keys=drafts + ", accept: [1, 1, 1]"),
    ):
        assert found["tp 1: decode with 3 drafts 1 x 1,000, ms"] == pytest.approx(drafted_ms)
        token_ms = found["tp 1: a token with 3 drafts 1 x 1,000, ms"]
        assert token_ms == pytest.approx(drafted_ms / 2.5)
        assert found["tp 1: tokens of a request in a step"] == 2.5
        assert not [name for name in found if "pay from, accepted" in name]
    found = metrics()
    assert found["tp 1: decode 1 x 1,000, ms"] == pytest.approx(1e3 * own / BYTES)
    pays = found["tp 1: drafts pay from, accepted a step 1 x 1,000"]
    assert pays == pytest.approx(more / own) and 0.5 < pays < 1
    assert not [name for name in found if "a token with" in name]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accept", "0.5"],
         "--accept: the recipe has no drafts; add --set speculate.method=NAME"),
        (["--set", "speculate={method: ngram, tokens: 2}", "--accept", "0.5"],
         "--accept is 0.5; it must be 2 numbers (speculate.tokens) between 0 and 1, each at most"),
        (["--set", "speculate={method: ngram, tokens: 2}", "--accept", "0.5,0.7"],
         "--accept is 0.5, 0.7; it must be 2 numbers"),
        (["--accept", "half"], "--accept half: write a number for each draft, as in 0.8,0.55,0.3"),
        (["--accept", ""], "--accept : write a number for each draft"),
    ],
)  # fmt: skip
def test_wrong_rates_are_one_line(flags: list[str], message: str) -> None:
    error = CliRunner().invoke(profile_kv, ["qwen3-8b", "--gpu", "h200", *flags]).exception
    assert isinstance(error, ConfigError) and str(error).startswith(message)
