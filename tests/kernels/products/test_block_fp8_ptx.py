"""Results of the products of block-scaled fp8 numbers, by simulation of their PTX on the CPU.

Each case has several tiles per cluster, ragged rows, and more blocks of inputs than its ring has
stages. All kinds and sizes are checked on a GPU (check-kernels).
"""

from __future__ import annotations

import re
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from nanovllm_kernels.case import Case, Kernel, check
from nanovllm_kernels.products import block_fp8_cute
from nanovllm_kernels.products.block_fp8_cases import (
    BLOCK_FP8_GATED,
    BLOCK_FP8_LINEAR,
    EXPERTS_GATED,
    experts_inputs,
    inputs,
)
from nanovllm_kernels.products.block_fp8_cute import DEEP, Kind, Operands, Product, Tile
from torch import Tensor

from tests.kernels.compiled import compiled_with
from tests.kernels.played_memory import Memory
from tests.kernels.ptx import Box, Launch, Program, play

CPU = torch.device("cpu")
KEEP = """
    text = compiled.__ptx__
    Path("_".join(map(str, kind))).write_text(text if isinstance(text, str) else text.decode())
"""
ADDED = (128, 128, 2, 128, True, False, False)
FEW_SCALED = (64, 64, 1, 32, False, False, False)
GATED = (64, 256, 1, 32, False, False, True)
GATED_EXPERTS = (128, 256, 2, 128, False, True, True)
CASES: dict[tuple[int, ...], tuple[Kernel, partial]] = {
    ADDED: (BLOCK_FP8_LINEAR, partial(inputs, 130, 264, 272, added=True, tile=Tile(*ADDED[:3]))),
    FEW_SCALED: (
        BLOCK_FP8_LINEAR,
        partial(inputs, 70, 200, 400, block_rows=32, tile=Tile(*FEW_SCALED[:3])),
    ),
    GATED: (
        BLOCK_FP8_GATED,
        partial(inputs, 70, 320, 400, block_rows=32, tile=Tile(*GATED[:3]), zeros=True),
    ),
    GATED_EXPERTS: (EXPERTS_GATED, partial(experts_inputs, (0, 70, 0, 130), 5, 256, 400, 256)),
}
NAMES = {ADDED: "added", FEW_SCALED: "scales of 32 rows", GATED: "gated", GATED_EXPERTS: "experts"}
SEEDS = range(6)  # each with another order of execution
WAITS = r"group \d of block \d waits for barrier \d+, \d+ arrivals and -?\d+ bytes are missing"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], str]:
    """Return the PTX of each kind."""
    folder: Path = tmp_path_factory.mktemp("ptx")
    compiled_with("--keep-ptx", CASES, KEEP, folder)
    return {kind: (folder / "_".join(map(str, kind))).read_text() for kind in CASES}


def as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def passed(address: int, tensor: Tensor) -> bytes:
    """Return a tensor as a parameter of CuTe DSL kernels.

    It has the address, the sizes, and all strides except the last, which is one.
    """
    sizes = struct.pack(f"<Q{tensor.dim()}i", address, *tensor.shape)
    strides = struct.pack(f"<{tensor.dim() - 1}q", *tensor.stride()[:-1])
    return sizes + bytes(-len(sizes) % 8) + strides


def launch_of(
    text: str, kind: tuple[int, ...], x8: Tensor, w8: Tensor, given: Operands, num_clusters: int
) -> tuple[Launch, list[slice]]:
    """Return the launch of Product.__call__, and the addresses of its outputs."""
    product = Product(Tile(*kind[:3]), kind[3], Kind(*map(bool, kind[4:])))
    memory = Memory(1 << 21)
    tensors = [tensor.contiguous() for tensor in given if tensor is not None]
    written = [id(each) for each in (given.y, given.y_scale)]
    places = [memory.place(as_bytes(n), id(n) in written) for n in tensors]
    high = product.tile.rows * product.weight_shared
    wide = product.tile.columns * product.x_shared
    tall, across = -(-len(x8) // high), -(-w8.shape[-2] // wide)
    size = -(-x8.shape[1] // DEEP), tall, across, len(x8)
    parameters = [
        Box(as_bytes(x8), product.tile.rows // product.x_shared),
        bytes(4 * x8.dim()),
        Box(as_bytes(w8), product.columns // product.weight_shared),
        bytes(4 * w8.dim()),
        *(passed(place.start, n) for place, n in zip(places, tensors, strict=True)),
        bytes(1),  # the tiled MMA
        *(struct.pack("<i", n) for n in size),
    ]
    if not product.kind.grouped:
        num_clusters = min(num_clusters, tall * across)
    program, threads = Program(text), product.threads + 128
    launch = Launch(program, kind[2], num_clusters, threads, parameters, memory)
    return launch, [n for n, tensor in zip(places, tensors, strict=True) if id(tensor) in written]


def play_product(
    text: str,
    seed: int,
    kind: tuple[int, ...],
    x8: Tensor,
    w8: Tensor,
    given: Operands,
    num_clusters: int,
) -> None:
    """Run in place of a compiled kernel, and check that each byte of the result is written once.

    No other byte may be written.
    """
    launch, places = launch_of(text, kind, x8, w8, given, num_clusters)
    play(launch, seed)
    end = len(x8) if given.starts is None else int(given.starts[-1])
    results = [tensor for tensor in (given.y, given.y_scale) if tensor is not None]
    for place, tensor in zip(places, results, strict=True):
        times = launch.memory.times_written[place].reshape(*as_bytes(tensor).shape)
        rows = times if tensor is given.y else times.reshape(*tensor.shape, 4).swapaxes(0, 1)
        assert {*rows[:end].ravel().tolist()} == {1}, "bytes are not written once"
        assert not rows[end:].any(), "bytes behind the last row are written"
        as_bytes(tensor)[:] = launch.memory.content[place].reshape(times.shape)


def error_of(
    kind: tuple[int, ...], text: str, seed: int, num_clusters: int, patch: pytest.MonkeyPatch
) -> float:
    """Return the worst error as a fraction of the error that the case allows."""

    def compile_tile(*of: int) -> partial:
        assert of == kind
        return partial(play_product, text, seed, kind)

    patch.setattr(block_fp8_cute, "compile_tile", compile_tile)
    patch.setattr(block_fp8_cute, "processors", lambda device: num_clusters * kind[2])
    kernel, of = CASES[kind]
    return check(kernel, Case("played", of), CPU)


@pytest.mark.parametrize("kind", CASES, ids=NAMES.get)
def test_the_compiled_kernel_computes_what_the_reference_does(
    kind: tuple[int, ...], texts: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated kernel matches the reference, for one cluster and for two that share tiles."""
    for seed in SEEDS:
        assert error_of(kind, texts[kind], seed, 1 + seed % 2, monkeypatch) < 0.9


def changed(pattern: str, new: str, text: str, nth: int = 0) -> str:
    """Replace the nth match of the pattern."""
    found = [*re.finditer(pattern, text)][nth]
    return text[: found.start()] + found.expand(new) + text[found.end() :]


TRY_WAIT = r"mbarrier\.try_wait.*\n"
STORE = r"(st\.global\.v4\.b32 \t\[%rd\d+)"
WRONG = {  # kernel, change and expected message
    "one arrival less": (GATED, partial(changed, r"mbarrier\.arrive\.shared.*\n", ""), WAITS),
    "a byte too many": (GATED, partial(changed, r", 40960;(\n\tmbarrier)", r", 40961;\1"), WAITS),
    "no wait for a stage to be free": (GATED, partial(changed, TRY_WAIT, ""), "more threads"),
    "no wait for a stage to be there": (
        GATED,
        partial(changed, TRY_WAIT, "", nth=1),
        "more threads",
    ),
    "the other block's threads are not waited for": (
        GATED_EXPERTS,
        partial(changed, r", 16;(\n\tmbarrier)", r", 8;\1"),
        "more threads",
    ),
    **{
        f"phases of {NAMES[kind]} do not turn": (
            kind,
            partial(changed, r"xor\.b32 \t(%r\d+), \1, .*\n", ""),
            "more threads",
        )
        for kind in CASES
    },
    "copied to one block alone": (ADDED, partial(changed, r"(%rs\d+), 3;", r"\1, 1;"), WAITS),
    "a neighbour too far": (GATED, partial(changed, ", 1, 31, -1;", ", 2, 31, -1;"), "an error of"),
    "nothing is added": (
        ADDED,
        partial(changed, r"ld\.global\.v4\.b32 .*\n", ""),
        "an error of",
    ),
    "the same bytes twice": (GATED, partial(changed, STORE + r"\+64", r"\1"), "not written once"),
    "bytes behind the end": (
        GATED,
        partial(changed, rf"@%p\d+ bra.*\n((.*\n){{,16}}?\t{STORE})", r"\1", nth=-1),
        "beside the tensors",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong: str, texts: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one seed finds each fault. Races between threads depend on the seed."""
    kind, change, said = WRONG[wrong]
    text, found = change(texts[kind]), []
    for seed in SEEDS:
        try:
            error = error_of(kind, text, seed, 1, monkeypatch)
            found.append("" if error < 4 else f"an error of {error}")
        except AssertionError as failed:
            found.append(str(failed))
        if re.search(said, found[-1]):
            return
    pytest.fail(f"not found: {found}")


def test_an_instruction_that_is_not_modelled_is_named(
    texts: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = changed(r"shfl\.sync\.bfly", "shfl.sync.up", texts[GATED])
    with pytest.raises(NotImplementedError, match=r"shfl\.sync\.up\.b32"):
        error_of(GATED, text, 0, 1, monkeypatch)
