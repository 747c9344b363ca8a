"""Engines with the gated delta rule in Triton write transformers' text for Qwen3-Next.

They run in Triton's interpreter in a separate process: TRITON_INTERPRET must be set before triton
is imported. tests/end_to_end has the rule in plain torch.
"""

from __future__ import annotations

import numpy as np
import pytest

from nanovllm.attention import delta_kernels
from nanovllm.attention.delta_triton import TRITON
from nanovllm.config import ConfigError, Speculate
from tests.interpreted import in_interpreter, in_parent, passes
from tests.models.tiny import NEXT, config_of, make_tiny
from tests.whole_engine import WholeEngine, references

DRAFTED = Speculate(method="ngram", tokens=2)
LENGTHS, NEW = (5, 66), 8


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 2)


@in_parent
@pytest.mark.parametrize("taps", [1, 5])
def test_a_convolution_that_the_kernels_cannot_compute_is_refused(
    taps, tmp_path, monkeypatch
) -> None:
    """The kernels would ignore inputs older than three tokens."""
    make_tiny(tmp_path, "qwen3_next", **{**NEXT, "linear_conv_kernel_dim": taps})
    WholeEngine(config_of(tmp_path))  # accepted in plain torch
    monkeypatch.setattr(delta_kernels, "TORCH", TRITON)
    with pytest.raises(ConfigError) as caught:
        WholeEngine(config_of(tmp_path))
    assert str(caught.value) == (
        f"linear_conv_kernel_dim is {taps}; it must be 2 to 4, or kernels.delta torch"
    )


@in_interpreter
@pytest.mark.parametrize(("heads", "speculate"), [((2, 4), None), ((1, 3), DRAFTED)])
def test_engines_write_what_transformers_writes(heads, speculate, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(delta_kernels, "TORCH", TRITON)  # kernels.delta=triton needs a GPU
    keys, values = heads
    changed = dict(NEXT, linear_num_key_heads=keys, linear_num_value_heads=values)
    changed |= dict(num_hidden_layers=2, full_attention_interval=2)
    model = make_tiny(tmp_path, "qwen3_next", **changed)
    engine = WholeEngine(config_of(tmp_path), step_tokens=40, speculate=speculate)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 199, length).tolist() for length in LENGTHS]
    prompts.append([7, 8, 9, 10] * 5)  # a repetitive text, which has drafts
    for name, prompt in enumerate(prompts):
        engine.submit(name, prompt, NEW)
    engine.run()
    assert engine.text == dict(enumerate(references(model, prompts, NEW)))
