"""GPUs by name: memory size, memory bandwidth and FLOP/s.

Memory is CUDA's total, which is less than the data sheet's GB. Speeds are those of NVIDIA's data
sheets times REACHED, which is the same for all GPUs, so that plans can be compared.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

from nanovllm.config import ConfigError


class Gpu(Struct, frozen=True):
    name: str
    gib: float
    gb_per_s: float = 0.0  # bandwidth of a copy; 0: unknown
    tflops: float = 0.0  # speed of a large product in dense bfloat16; 0: unknown
    is_hopper: bool = False  # Hopper-specific kernels are used

    @property
    def facts(self) -> str:
        size = f"{self.name}, {self.gib:g} GiB" if self.gib else self.name
        speeds = f", {self.gb_per_s:,.0f} GB/s, {self.tflops:,.0f} TFLOP/s" if self.gb_per_s else ""
        return size + speeds


# Fractions of the data sheet's bandwidth and FLOP/s that a copy and a product of 8192^3 reached on
# an H200. Its data sheet has 4,800 GB/s and 989 TFLOP/s.
REACHED = 4280 / 4800, 790 / 989


def of_data_sheet(
    name: str, gib: float, gb_per_s: float, tflops: float, *, is_hopper: bool = False
) -> Gpu:
    """Return a GPU with its expected speeds in whole numbers."""
    return Gpu(
        name=name,
        gib=gib,
        gb_per_s=round(gb_per_s * REACHED[0]),
        tflops=round(tflops * REACHED[1]),
        is_hopper=is_hopper,
    )


CPU = Gpu("CPU", 0.0)  # memory is set by the recipe
# Memory of the H200 is from mem_get_info, that of the others from torch's out-of-memory messages.
KNOWN = {
    "h100": of_data_sheet("H100", 79.1, 3350, 989, is_hopper=True),  # SXM, 80 GB
    "h200": of_data_sheet("H200", 139.8, 4800, 989, is_hopper=True),
    "b200": of_data_sheet("B200", 178.3, 7700, 2250),
    "a100": of_data_sheet("A100", 79.1, 2039, 312),  # SXM, 80 GB
    "l40s": of_data_sheet("L40S", 44.5, 864, 362),
    "rtx4090": of_data_sheet("RTX 4090", 23.6, 1008, 165),
}


def gpu_of(text: str) -> Gpu:
    """Return the GPU of `h200`, `NVIDIA H200`, or `name:GiB`. Raise ConfigError for other text."""
    name, has_size, size = text.partition(":")
    slug = re.sub(r"nvidia|geforce|(?<!\d)[^a-z0-9]", "", name.lower())
    known = next((gpu for key, gpu in KNOWN.items() if re.match(rf"{key}(?!\d)", slug)), None)
    if known is not None and not has_size:
        return known
    if not slug or not re.fullmatch(r"\d{1,4}(\.\d+)?", size) or float(size) < 1:
        raise ConfigError(
            f"--gpu {text}: write {', '.join(KNOWN)}, or name:GiB with 1 to 9999, as in mine:48"
        )
    return replace(known or Gpu(name, 0.0), gib=float(size))
