"""Names of GPUs for --gpu, and errors for unsupported ones."""

from __future__ import annotations

import pytest

from nanovllm.bench.gpus import KNOWN, gpu_of
from nanovllm.config import ConfigError


def test_known_gpus_by_any_spelling() -> None:
    assert [*KNOWN] == ["h100", "h200", "b200", "a100", "l40s", "rtx4090"]
    for text in ("h200", "H200", "NVIDIA H200", "nvidia-h200"):
        assert gpu_of(text) is KNOWN["h200"]
    assert gpu_of("NVIDIA GeForce RTX 4090") is gpu_of("rtx-4090") is KNOWN["rtx4090"]
    assert gpu_of("NVIDIA H100 80GB HBM3").gb_per_s == 2987
    assert gpu_of("NVIDIA A100-SXM4-80GB") is KNOWN["a100"]
    assert gpu_of("A1000:8").facts == "A1000, 8 GiB"  # not an A100
    assert [gpu.is_hopper for gpu in KNOWN.values()] == [True, True, False, False, False, False]
    assert KNOWN["h200"].facts == "H200, 139.8 GiB, 4,280 GB/s, 790 TFLOP/s"


def test_all_gpus_are_on_one_scale() -> None:
    """Data sheets have 989 TFLOP/s for H100 and H200; 790 were measured on the H200 only."""
    h100, h200 = KNOWN["h100"], KNOWN["h200"]
    assert (h100.tflops, h200.tflops) == (790, 790)
    assert h100.gb_per_s / h200.gb_per_s == pytest.approx(3350 / 4800, abs=1e-3)
    for gpu, gb_per_s, tflops in (("b200", 7700, 2250), ("a100", 2039, 312), ("l40s", 864, 362)):
        found = KNOWN[gpu]
        assert found.gb_per_s == pytest.approx(gb_per_s * 4280 / 4800, abs=1)
        assert found.tflops == pytest.approx(tflops * 790 / 989, abs=1)


def test_any_memory_with_a_name() -> None:
    small = gpu_of("a100:39.4")
    assert (small.name, small.gib, small.gb_per_s) == ("A100", 39.4, 1818)
    other = gpu_of("mine:48")
    assert (other.name, other.gib, other.gb_per_s, other.facts) == (
        "mine",
        48.0,
        0.0,
        "mine, 48 GiB",
    )


@pytest.mark.parametrize(
    "text",
    [
        "foo",
        "",
        "a1000",
        "NVIDIA H2000",
        ":48",
        "mine:",
        "mine:0",
        "mine:0.5",
        "mine:x",
        "h200:-1",
        "h200:1e3",
        "x:99999",
    ],
)
def test_others_are_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpu_of(text)
    assert str(caught.value) == (
        f"--gpu {text}: write h100, h200, b200, a100, l40s, rtx4090, or name:GiB with 1 to 9999, "
        "as in mine:48"
    )
