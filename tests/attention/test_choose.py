"""Attention kernels that a recipe gets on this machine, and the reasons for those it does not."""

from __future__ import annotations

import pytest
import torch
from nanovllm_kernels.attention import latent_decode, paged_decode
from nanovllm_kernels.device import can_overlap, is_hopper

from nanovllm.attention.choose import choose_backend, cute_obstacle
from nanovllm.attention.paged import obstacle_of_shapes
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.config import ConfigError, Kernels
from nanovllm.kv.layout import CacheLayout, PagedGroup

LAYOUT = CacheLayout(paged=(PagedGroup((0,), 2, 64, 64, 2),))
CPU = torch.device("cpu")


def test_a_cpu_has_one_backend_for_all_rows() -> None:
    backend, kernels, passed_over = choose_backend(Kernels(), CPU, torch.float32, LAYOUT, 16)
    assert isinstance(backend, TorchPaged) and backend.page_tokens == 16
    assert (kernels.attention, kernels.decode, passed_over) == ("torch", "torch", "")


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (Kernels(attention="flash"), "kernels.attention: flash: flash-attn-4 is used on Hopper"),
        (Kernels(attention="triton"), "kernels.attention: triton: Triton's kernels run on a GPU"),
    ],
)
def test_what_cannot_run_here_is_refused_with_the_reason(kernels: Kernels, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend(kernels, CPU, torch.float32, LAYOUT, 16)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("decode", "chosen", "passed_over"),
    [
        ("auto", "triton", "decode by cute: it is for Hopper GPUs"),
        ("triton", "triton", ""),
        ("cute", None, "kernels.decode is cute, but it is for Hopper GPUs; use triton"),
        ("torch", None, "kernels.decode is torch, but kernels.attention is triton"),
    ],
)
def test_decode_rows_get_the_portable_kernel_where_there_is_no_hopper(
    decode: str, chosen: str | None, passed_over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.attention.triton.TritonPaged.supports", lambda *_: None)
    asked = Kernels(attention="triton", decode=decode)
    if chosen is None:
        with pytest.raises(ConfigError) as caught:
            choose_backend(asked, CPU, torch.float32, LAYOUT, 16)
        assert str(caught.value) == passed_over
        return
    backend, kernels, said = choose_backend(asked, CPU, torch.float32, LAYOUT, 16)
    assert (kernels.attention, kernels.decode, said) == ("triton", chosen, passed_over)
    assert backend.decode is paged_decode.DECODE and backend.kind == "grouped"
    assert backend.like.k_PSGA.shape == (0, 16, 2, 64) and backend.like.k_PSGA.itemsize == 4


def test_one_plan_of_decode_rows_wants_caches_of_one_shape() -> None:
    alike = CacheLayout((PagedGroup((0, 2), 2, 64, 64, 2), PagedGroup((1,), 2, 64, 64, 2)))
    unlike = CacheLayout((PagedGroup((0, 2), 2, 64, 64, 2), PagedGroup((1,), 1, 64, 64, 2)))
    assert obstacle_of_shapes(alike) is None
    assert obstacle_of_shapes(unlike) == (
        "one plan serves all layers, so their caches must have one shape"
    )


@pytest.mark.parametrize(
    ("capability", "hopper", "overlap"),
    [((8, 9), False, False), ((9, 0), True, True), ((10, 0), False, True), ((12, 1), False, True)],
)
def test_hopper_s_own_kernels_and_what_began_with_hopper(
    capability: tuple[int, int], hopper: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert (is_hopper(device), can_overlap(device)) == (hopper, overlap)
    assert (is_hopper(CPU), can_overlap(CPU)) == (False, False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not is_hopper(device)


@pytest.mark.parametrize(
    ("asked", "chosen"), [("auto", "flash"), ("flash", "flash"), ("triton", "triton")]
)
def test_latents_get_their_own_kernels_and_chunks_flash(
    asked: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.attention.triton.TritonPaged.supports", lambda *_: None)
    monkeypatch.setattr("nanovllm.attention.flash.FlashPaged.supports", lambda *_: None)
    latents = CacheLayout(paged=(PagedGroup((0, 1), 1, 576, 0, 2, "latent"),))
    backend, kernels, _ = choose_backend(
        Kernels(attention=asked), torch.device("cuda"), torch.bfloat16, latents, 64
    )
    assert (kernels.attention, kernels.decode) == (chosen, "triton")
    assert backend.decode is latent_decode.DECODE and backend.kind == "latent"
    assert backend.like.width == 0


def test_latents_of_which_sizes_and_types_the_cute_kernel_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nanovllm.attention.choose.is_hopper", lambda device: True)
    said = {}
    for size, bytes_each in ((576, 2), (320, 2), (656, 1)):
        group = PagedGroup((0,), 1, size, 0, bytes_each, "latent")
        layout, device = CacheLayout(paged=(group,)), torch.device("cuda")
        said[size] = cute_obstacle(device, torch.bfloat16, layout, 64)
    assert said[576] is None
    assert said[320] is not None and "latents must have 512 numbers" in said[320]
    assert said[656] is not None and "bfloat16" in said[656]
