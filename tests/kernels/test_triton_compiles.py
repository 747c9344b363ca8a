"""Triton kernels that the interpreter accepts are compiled for Hopper, too, which needs no GPU.

In a process of its own: under TRITON_INTERPRET nothing is compiled. The interpreter lets a name be
of one type in one branch and of another in the other, say, and a compiler does not.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, types, num_warps=4, **constants):
    \"\"\"Arguments without a type are int32; None is a constant.\"\"\"
    signature, values = {}, {}
    for at, name in enumerate(kernel.arg_names):
        known = name in constants
        signature[name] = "constexpr" if known else types.get(name, "i32")
        if known:
            values[at,] = constants[name]
    source = ASTSource(kernel, signature, values, {})
    options = {"num_warps": num_warps}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("compiled", kernel.__name__, made.metadata.shared < 232448)
    return made.asm["ptx"]

ROWS = dict(page_table_RM="*i32", starts_R1="*i32", lengths_R="*i32", plan_N5="*i32")
"""
KERNELS = {
    "latent_store": """
from nanovllm_kernels.latent_store import latent_store_kernel
types = dict(kv_TX="*bf16", norm_weight_X="*bf16", q_THA="*bf16", cos_sin_LA="*fp32", eps="fp32",
             positions_T="*i64", slot_mapping_T="*i64", latents_PSX="*LATENTS", keys_PSA="*bf16",
             scales_PS="*fp32")
for heads, num_warps in ((8, 2), (64, 4)):
    compiled(latent_store_kernel, types, num_warps, LEAST=2.0**-40, MOST=448.0, H=128, A=192, X=512,
             X_BLOCK=512, HALF=32, HALF_BLOCK=32, HEADS=heads, WAITS=True, **SCALES)
""",
    "latent_decode": """
from nanovllm_kernels.latent_decode import latent_decode_kernel
types = dict(ROWS, q_THX="*bf16", rotated_THA="*bf16", latents_PSX="*LATENTS", keys_PSA="*bf16",
             scales_PS="*fp32", o_THX="*bf16", partial_o="*fp32", partial_lse="*fp32", scale="fp32")
for pairs, num_warps in ((16, 4), (64, 8)):
    compiled(latent_decode_kernel, types, num_warps, RAGGED=True, WAITS=True, TILE=pairs, X=512,
             X_BLOCK=512, A=64, A_BLOCK=64, S=128, BLOCK=32, STAGES=3, **SCALES)
""",
    "latent_merge": """
from nanovllm_kernels.latent_decode import latent_merge_kernel
types = dict(starts_R1="*i32", plan_N5="*i32", o_THX="*bf16", partial_o="*fp32",
             partial_lse="*fp32")
for lanes, merged, columns in ((128, 64, 64), (0, 2, 512)):
    compiled(latent_merge_kernel, types, merged * columns // 1024, W=4, RAGGED=True, X=512,
             X_BLOCK=columns, LANES=lanes, MERGED=merged, WAITS=True)
""",
    "few_fp8": """
from nanovllm_kernels.few_fp8 import SHAPES, few_fp8_kernel
is_quantised = not SCALES
types = dict(x_TD="*LATENTS", x_scale_BT="*fp32", weight_ND="*fp8e4nv", scale="*fp32",
             norm_weight_D="*bf16", residual_TN="*bf16", y_TN="*bf16", parts="*fp32",
             tickets_X="*i32", eps="fp32")
for rows, shape in ((rows, shape) for rows in SHAPES for shape in SHAPES[rows]):
    for gated in (False, True):
        absent = dict.fromkeys(["norm_weight_D"] if is_quantised else ["x_scale_BT"])
        absent |= dict.fromkeys(["residual_TN", "parts"] if gated else [])
        ptx = compiled(few_fp8_kernel, types, shape.warps, N=6144, D=4096, SHARED=128, GATED=gated,
                       FEATURES=shape.features // (1 + gated), ROWS=rows, STEPS=32 if gated else 8,
                       STAGES=shape.stages, WAITS=True, **absent)
        assert ".e4m3.e4m3" in ptx, "weights are widened"
""",
}


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper(name: str, is_fp8: bool) -> None:
    code = KERNELS[name].replace("LATENTS", "fp8e4nv" if is_fp8 else "bf16")
    scales = "SCALES = {}" if is_fp8 else "SCALES = {'scales_PS': None}"
    command = ["env", "-u", "TRITON_INTERPRET", sys.executable, "-c", f"{COMPILE}{scales}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == (12 if name == "few_fp8" else 2)
    assert all(line == f"compiled {name}_kernel True" for line in lines)


EXCHANGES = """
from nanovllm_kernels.exchange import NOBODY, add_own_sums_kernel, gather_kernel
common = dict(SIZE=2, PROGRAMS=64, WAITS=True)
peers = dict(addresses_I="*i64", calls_X="*i32")
words = dict.fromkeys(gather_kernel.arg_names[:6], "*i32")
compiled(gather_kernel, peers | words, WIDTH=1024, K=8, FILL=NOBODY, BLOCK=512, **common)
for bits, like in (("*i16", "*bf16"), ("*i32", "*fp32")):
    types = peers | dict(bits_ITD=bits, stream_TD=like)
    compiled(add_own_sums_kernel, types, 8, BLOCK=2048, **common)
"""


def test_exchanges_compile_for_hopper() -> None:
    command = ["env", "-u", "TRITON_INTERPRET", sys.executable, "-c", COMPILE + EXCHANGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = [line.split()[1] for line in done.stdout.splitlines() if line.endswith("True")]
    assert names == ["gather_kernel", "add_own_sums_kernel", "add_own_sums_kernel"]
