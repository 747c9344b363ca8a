"""The Triton kernels also compile for Hopper, which needs no GPU.

The tests run in a process of their own, as nothing is compiled under TRITON_INTERPRET. The compiler
rejects code that the interpreter accepts, such as a name with different types in two branches.

Cases are compiled as they are launched, with Triton's specialisation for pointers and strides that
are multiples of 16. Triton pipelines loads only with that alignment, and may fail to.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from nanovllm_kernels import KERNELS as CHECKED, device

from tests.hopper import Hopper
from tests.kernels.compiled import printed

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, types, num_warps=4, aligned=(), **constants):
    \"\"\"Arguments without a type are int32; None is a constant; some are multiples of 16.\"\"\"
    signature, values, attrs = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        known = name in constants
        if name in aligned:
            attrs[at,] = [["tt.divisibility", 16]]
        signature[name] = "constexpr" if known else types.get(name, "i32")
        if known:
            values[at,] = constants[name]
    source = ASTSource(kernel, signature, values, attrs)
    options = {"num_warps": num_warps}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("compiled", kernel.__name__, made.metadata.shared < 232448)
    return made.asm["ptx"]

ROWS = dict(page_table_RM="*i32", starts_R1="*i32", lengths_R="*i32", plan_N5="*i32")
"""
KERNELS = {
    "shrink": """
from nanovllm_kernels.adapters.deltas import shrink_kernel
tables = dict.fromkeys(("tokens_X", "token_XT", "pages_X", "page_XP"), "*i32")
few, many = (dict(tables, x_TD="*bf16", a_RID="*bf16", h_CITR=h) for h in ("*fp32", "*bf16"))
aligned = {*few, "num_inputs", "x_stride", "a_stride", "part_stride"}
compiled(shrink_kernel, few, aligned=aligned, PAGE=16, TOKENS=16, INPUTS=512, LOADS=2, CHUNKS=1,
         SUMS=12, IS_FIRST=False, WAITS=True)
ptx = compiled(shrink_kernel, many, aligned=aligned, PAGE=16, TOKENS=32, INPUTS=512, LOADS=2,
               CHUNKS=12, SUMS=1, IS_FIRST=True, WAITS=False)
assert "mma.sync" in ptx and "wgmma.mma" not in ptx
""",
    "expand": """
from nanovllm_kernels.adapters.deltas import expand_kernel
tables = dict.fromkeys(("tokens_X", "token_XT", "pages_X", "page_XP"), "*i32")
few, many = (dict(tables, h_CITR=h, b_RN="*bf16", y_TN="*bf16") for h in ("*fp32", "*bf16"))
aligned = {*few, "num_ranks", "y_stride", "b_stride"}
compiled(expand_kernel, few, aligned=aligned, PAGE=16, TOKENS=16, COLUMNS=256, BLOCKS=1, SUMS=12,
         WAITS=True)
ptx = compiled(expand_kernel, many, aligned=aligned, PAGE=16, TOKENS=32, COLUMNS=128, BLOCKS=4,
               SUMS=1, WAITS=False)
assert "mma.sync" in ptx and "wgmma.mma" not in ptx
""",
    "latent_store": """
from nanovllm_kernels.attention.latent_store import latent_store_kernel
types = dict(kv_TX="*bf16", norm_weight_X="*bf16", q_THA="*bf16", cos_sin_LA="*fp32", eps="fp32",
             positions_T="*i64", slot_mapping_T="*i64", latents_PSX="*LATENTS", keys_PSA="*bf16",
             scales_PS="*fp32")
for heads, num_warps in ((8, 2), (64, 4)):
    compiled(latent_store_kernel, types, num_warps, LEAST=2.0**-40, MOST=448.0, H=128, A=192, X=512,
             X_BLOCK=512, HALF=32, HALF_BLOCK=32, HEADS=heads, WAITS=True, **SCALES)
""",
    "latent_decode": """
from nanovllm_kernels.attention.latent_decode import latent_decode_kernel
types = dict(ROWS, q_THX="*bf16", rotated_THA="*bf16", latents_PSX="*LATENTS", keys_PSA="*bf16",
             scales_PS="*fp32", o_THX="*bf16", partial_o="*fp32", partial_lse="*fp32", scale="fp32")
for pairs, num_warps in ((16, 4), (64, 8)):
    compiled(latent_decode_kernel, types, num_warps, RAGGED=True, WAITS=True, TILE=pairs, X=512,
             X_BLOCK=512, A=64, A_BLOCK=64, S=128, BLOCK=32, STAGES=3, **SCALES)
""",
    "latent_merge": """
from nanovllm_kernels.attention.latent_decode import latent_merge_kernel
types = dict(starts_R1="*i32", plan_N5="*i32", o_THX="*bf16", partial_o="*fp32",
             partial_lse="*fp32")
for lanes, merged, columns in ((128, 64, 64), (0, 2, 512)):
    compiled(latent_merge_kernel, types, merged * columns // 1024, W=4, RAGGED=True, X=512,
             X_BLOCK=columns, LANES=lanes, MERGED=merged, WAITS=True)
""",
    "few_quantise": """
from nanovllm_kernels.products.quantise import few_quantise_kernel
types = dict(x_TD="*bf16", norm_weight_D="*bf16", values_TD="*fp8e4nv", scale_BT="*fp32",
             eps="fp32")
aligned = {*types, "stride"} - {"eps"}
compiled(few_quantise_kernel, types, 8, aligned, WIDTH=4096, BLOCKS=32, WAITS=True)
compiled(few_quantise_kernel, types, 4, aligned - {"norm_weight_D"}, WIDTH=12288, BLOCKS=8,
         WAITS=True, norm_weight_D=None)
""",
    "few_fp8": """
from nanovllm_kernels.products.few_fp8 import SHAPES, few_fp8_kernel
types = dict(x_TD="*fp8e4nv", x_scale_BT="*fp32", weight_ND="*fp8e4nv", scale="*fp32",
             residual_TN="*bf16", y_TN="*bf16", parts="*fp32", tickets_X="*i32")
for rows in SHAPES:
    for shape, steps in zip(SHAPES[rows], (8, 32), strict=True):
        absent = {} if steps == 8 else dict(residual_TN=None, parts=None)
        ptx = compiled(few_fp8_kernel, types, shape.warps, N=6144, D=4096, SHARED=128, ROWS=rows,
                       FEATURES=shape.features, STEPS=steps, STAGES=shape.stages, WAITS=True,
                       **absent)
        assert ".e4m3.e4m3" in ptx, "weights are widened"
""",
}


KERNELS["delta_prefill"] = """
import re
from nanovllm_kernels.delta.prefill import conv_kernel, scan_kernel
types = dict(slots_R="*i64", starts_R1="*i32", parts_X="*i32", targets_X="*i32", l2_eps="fp32")
types |= dict.fromkeys("x_TC conv_CW conv_NCW saved_NCW y_TC w_THK u_THV seen_THX o_THV".split(),
                       "*bf16")
types |= dict.fromkeys("sums_TH recurrent_NHKV saved_NHKV".split(), "*fp32")
aligned = {"conv_NCW", "saved_NCW", "recurrent_NHKV", "saved_NHKV", "o_THV", "y_TC", "conv_stride",
           "stride", "x_TC", "x_stride"}
sizes = dict(G=16, H=32, K=128, V=128, K_BLOCK=128)
conv = compiled(conv_kernel, types, 4, aligned, V_BLOCK=128, WIDTH=4, ROWS=32, RUNS=8, LENGTH=8,
                **sizes)
scan = compiled(scan_kernel, types, 4, aligned, V_BLOCK=64, PIECE=64, STAGES=3, **sizes)
for ptx in (conv, scan):  # in whole words, also across a bus
    widths = set(re.findall(r"st\\.global(\\.v\\d)", ptx))
    assert len(re.findall(r"st\\.global\\.b", ptx)) == 0 and widths <= {".v2", ".v4"}, widths
"""


@pytest.mark.parametrize(
    ("name", "is_fp8"),
    [
        (name, is_fp8)
        for name, code in KERNELS.items()
        for is_fp8 in ((False, True) if re.search("LATENTS|SCALES", code) else (False,))
    ],
)
def test_kernels_compile_for_hopper(name: str, is_fp8: bool) -> None:
    code = KERNELS[name].replace("LATENTS", "fp8e4nv" if is_fp8 else "bf16")
    scales = "SCALES = {}" if is_fp8 else "SCALES = {'scales_PS': None}"
    lines = printed(f"{COMPILE}{scales}\n{code}")
    assert len(lines) == (6 if name == "few_fp8" else 2)
    names = ("conv", "scan") if name == "delta_prefill" else (name,)
    assert {*lines} == {f"compiled {each}_kernel True" for each in names}


EXCHANGES = """
from nanovllm_kernels.exchange.tokens import NO_EXPERT, add_own_sums_kernel, gather_kernel
common = dict(SIZE=2, PROGRAMS=64, WAITS=True)
peers = dict(addresses_I="*i64", calls_X="*i32")
words = dict.fromkeys(gather_kernel.arg_names[:6], "*i32")
compiled(gather_kernel, peers | words, WIDTH=1024, K=8, FILL=NO_EXPERT, BLOCK=512, **common)
for bits, like in (("*i16", "*bf16"), ("*i32", "*fp32")):
    types = peers | dict(bits_ITD=bits, stream_TD=like)
    compiled(add_own_sums_kernel, types, 8, BLOCK=2048, **common)
from nanovllm_kernels.exchange.long_sums import STEPS, long_sum_kernel
types = dict.fromkeys(("x_TD", "residual_TD", "norm_weight_D", "y_TD"), "*bf16") | {
    "addresses_I": "*i64", "calls_P": "*i32", "eps": "fp32"}
aligned = {*types, "share_bytes"} - {"eps"}
for more in ({}, dict(norm_weight_D=None), dict(norm_weight_D=None, residual_TD=None)):
    ptx = compiled(long_sum_kernel, types, 4, aligned, SIZE=2, WIDTH=5120, BLOCK=8192, STEPS=STEPS,
                   **more)
    assert ptx.count("sys.release") == ptx.count("sys.acquire") == STEPS
    assert "ld.global.cg.v4.b32" in ptx
    assert "st.global.b16" not in ptx, "rows are stored in words of 16 bytes"
"""


def test_exchanges_compile_for_hopper() -> None:
    names = [line.split()[1] for line in printed(COMPILE + EXCHANGES) if line.endswith("True")]
    longs = ["long_sum_kernel"] * 3
    assert names == ["gather_kernel", "add_own_sums_kernel", "add_own_sums_kernel", *longs]


AHEAD = {  # cases of kernels that pipeline loads: copies in flight during a wait, at most
    "paged_decode": {
        "normal rows=9 longest=300 HGA=(4, 2, 128) page=16 bfloat16": 2,
        "normal rows=9 longest=300 HGA=(3, 1, 80) page=32 bfloat16 fp8": 2,
        "newest rows=14 longest=300 HGA=(8, 2, 128) page=16 bfloat16 W=2": 4,  # including starts_R1
        "newest rows=14 longest=300 HGA=(8, 2, 128) page=16 bfloat16 W=2 fp8": 4,
        "newest rows=14 longest=300 HGA=(20, 1, 16) page=16 bfloat16 W=2 fp8": 4,
    },
    "paged_prefill": {
        "rows=6 new=130 longest=200 HGA=(2, 2, 64) page=128 bfloat16": 2,
        "fp8 rows=6 new=130 longest=200 HGA=(2, 2, 64) page=128 bfloat16": 2,
    },
    "short_prefill": {
        "HGA=(4, 2, 128) page=128 bfloat16 parts=2": 2,
        "fp8 HGA=(4, 2, 128) page=128 bfloat16 parts=2": 2,
    },
    "latent_decode": {
        "normal rows=16 longest=5000 HGA=(16, 1, 576) page=64 bfloat16 W=4": 2,
        # Rows have 644 bytes, so keys in them are not aligned, and are not pipelined.
        "normal rows=16 longest=5000 HGA=(16, 1, 576) page=64 bfloat16 W=4 fp8": 1,
    },
}
OTHERS = {
    "caches": {
        "rope_store": (
            "normal T=7 H=16 G=8 A=128 bfloat16 fp8", "row T=7 H=3 G=1 A=80 float32 fp8"
        ),
        "latent_store": ("9+11+40+80+24 bfloat16 fp8",),
        "delta_decode": (
            "rows=5 of 1 GH=(2, 2) KV=(16, 16) W=4 bfloat16",
            "rows=64 of 1 GH=(4, 8) KV=(128, 128) W=4 bfloat16",
        ),
        "delta_drafted": (
            "rows=5 of 4 GH=(2, 2) KV=(16, 16) W=4 bfloat16",
            "rows=64 of 4 GH=(16, 32) KV=(128, 128) W=4 bfloat16 states bfloat16",
        ),
        "delta_ordered": (
            "rows=4 of 20 GH=(2, 2) KV=(16, 16) W=4 bfloat16",
            "rows=64 of 1 GH=(16, 32) KV=(128, 128) W=4 bfloat16",
        ),
        "delta_ordered_drafted": ("rows=64 of 4 GH=(16, 32) KV=(128, 128) W=4 bfloat16",),
        "per_head": ("T=70 H=3 D=80 N=20 float32", "T=64 H=128 D=128 N=512 bfloat16"),
        "delta_prefill": (
            "rows=5 of 149 GH=(2, 2) KV=(16, 16) W=4 bfloat16",
            "rows=5 of 300 GH=(16, 32) KV=(128, 128) W=4 bfloat16 states bfloat16",
        ),
    },
    "rows": {
        "add_deltas": (
            "T=7 D=2100 N=200+16+16 ranks=16+33+4 bfloat16",
            "T=140 D=1300 N=700+40 ranks=20+16 bfloat16",
            "T=33 D=160 N=64+40 ranks=8+16 float32",
        ),
        "gated_deltas": (
            "T=37 D=300 N=130+130 ranks=40+20+16 bfloat16",
            "T=140 D=300 N=600+600 ranks=20+16 bfloat16",
        ),
        "norm_quantise": ("normal T=7 D=1160",),
        "silu_mul_quantise": ("strided T=7 D=2320",),
        "sigmoid_mul": ("slices T=7 F=1000 bfloat16",),
        "route": (
            "T=7 E=128 K=8 softmax groups=1 shared=none hashed",
            "T=7 E=33 K=10 softmax groups=1 shared=gated tied",
            "T=7 E=160 K=6 sigmoid groups=8 shared=whole placed",
        ),
        "sort_rows": (
            "T=1 E=128 K=8 0+128 tile=16 plain", "T=4000 E=512 K=10 0+512 tile=128 plain",
        ),
        "few_gate_up": ("T=1 K=3 E=6 F=96 D=200 fp8",),
        "few_down": ("T=1 K=3 E=6 F=96 D=200 fp8",),
        "tiled_gate_up": ("T=2 K=4 E=24 F=200 D=136 fp8 experts 20-22 all to the last",),
        "thresholds": ("S=5 V=6007 k=20 p=0.9 min_p_gap=-inf float32",),
        "ngram": ("R=1 L=300 V=1 30-1024",),
        "first_rows": ("R=7 W=none page=128 lag=0", "R=150 W=4 page=16 lag=1"),
        "later_rows": ("R=1 nth=3 page=128 lag=0", "R=127 nth=2 page=16 lag=1"),
    },
}  # fmt: skip


def compile_launches(wanted: dict[str, Sequence[str]]) -> None:
    """Compile the launches of the named cases, on CPU tensors that are never read.

    Prints the kernel and case of each launch, True if its shared memory fits, and the most copies
    in flight during a wait.
    """
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(Hopper())
    launch = JITFunction.run
    at: list[str] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = launch(self, *args, grid=grid, warmup=True, **options)
        ahead = re.findall(r"cp.async.wait_group\s+(\d+)", made.asm["ptx"])
        fits = made.metadata.shared <= 232448
        sys.stdout.write(f"{';'.join(at)};{fits};{max(map(int, ahead), default=0)}\n")

    JITFunction.run = run
    device.generation = lambda where: device.HOPPER
    for name, cases in wanted.items():
        module, _, attribute = CHECKED[name].partition(":")
        kernel = getattr(import_module(module), attribute)
        for case in kernel.cases:
            if case.name in cases:
                at[:] = [name, case.name]
                kernel.run(*case.inputs(torch.device("cpu")))


def launches(wanted: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], int]:
    """Return the most copies in flight during a wait for each case. All must compile."""
    code = f"from {__name__} import compile_launches as of; of({wanted!r})"
    found: dict[tuple[str, str], int] = {}
    for line in printed(code):
        name, case, fits, ahead = line.split(";")
        assert fits == "True", line
        found[name, case] = max(int(ahead), found.get((name, case), 0))
    return found


@pytest.mark.parametrize("name", AHEAD)
def test_loads_are_under_way_while_others_are_used(name: str) -> None:
    expected = {(name, case): ahead for case, ahead in AHEAD[name].items()}
    assert launches({name: [*AHEAD[name]]}) == expected


@pytest.mark.parametrize("group", OTHERS)
def test_launches_compile_for_hopper(group: str) -> None:
    asked = {(name, case) for name, cases in OTHERS[group].items() for case in cases}
    assert launches(OTHERS[group]).keys() == asked
