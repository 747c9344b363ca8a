"""Where and from what a measurement came: the machine's fingerprint, the commit, the versions.

Knows neither records nor benchmarks.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

ROOT = Path(__file__).parents[2]  # of the checkout
PACKAGES = (
    "nanovllm", "torch", "triton", "nvidia-cutlass-dsl", "flash-attn-4", "transformers",
    "tokenizers", "xgrammar", "uvicorn", "uvloop", "httptools", "msgspec", "numpy",
)  # fmt: skip
GPU_FIELDS = {  # of Machine: what nvidia-smi calls them
    "gpu": "name",
    "driver": "driver_version",
    "power_limit_w": "power.limit",
    "max_sm_mhz": "clocks.max.sm",
    "max_memory_mhz": "clocks.max.mem",
    "sm_mhz": "clocks.sm",
    "gpu_memory_mib": "memory.total",
}


class Machine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpu: str = ""  # empty: no NVIDIA GPU
    gpu_count: int = 0
    gpu_memory_mib: float = 0.0
    driver: str = ""
    cuda: str = ""  # the newest the driver serves
    power_limit_w: float = 0.0
    max_sm_mhz: float = 0.0
    max_memory_mhz: float = 0.0
    sm_mhz: float = 0.0  # at the end of the measurement
    cpu: str
    cpu_cores: int
    memory_gib: float
    system: str

    @property
    def slug(self) -> str:
        """`h200-x8`, or `cpu-x2` without a GPU."""
        if not self.gpu:
            return f"cpu-x{self.cpu_cores}"
        name = re.sub(r"nvidia|geforce|[^a-z0-9]+", " ", self.gpu.lower())
        return f"{'-'.join(name.split())}-x{self.gpu_count}"


class Commit(Struct, frozen=True):
    hash: str  # 40 digits; empty when unknown
    is_dirty: bool


def fingerprint() -> Machine:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    query = [f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    found = parse_gpus(_output(["nvidia-smi", *query]), _output(["nvidia-smi"])) | {
        "cpu": model[1].strip() if model else platform.processor(),
        "cpu_cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }
    return msgspec.convert(found, Machine, strict=False)


def commit(root: Path = ROOT, given: str | None = None) -> Commit:
    """The checkout's commit. `given`, else the file `.commit`, stand in only where git is absent.

    Both are the output of `git describe --always --abbrev=40 --dirty`. Results and `.commit` itself
    do not make a tree dirty.
    """
    head = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if head and (root / ".git").exists():  # not some repository around an installed package
        ignored = [":!results", ":!.commit"]
        changes = _output(["git", "-C", str(root), "status", "--porcelain", "--", ".", *ignored])
        return Commit(head, bool(changes))
    file = root / ".commit"
    text = given or (file.read_text().strip() if file.is_file() else "")
    name, dash, _ = text.partition("-dirty")
    return Commit(name, bool(dash)) if re.fullmatch("[0-9a-f]{40}", name) else Commit("", True)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def parse_gpus(csv: str, header: str) -> dict[str, Any]:
    """Machine's GPU fields from nvidia-smi's answer to GPU_FIELDS and its plain header."""
    rows = [line.split(", ") for line in csv.splitlines()]
    if not rows:
        return {}
    cells = zip(GPU_FIELDS, rows[0], strict=True)
    known = {field: cell for field, cell in cells if not cell.startswith("[")}  # [N/A] and the like
    cuda = re.search(r"CUDA Version\s*:\s*([\d.]+)", header)
    return known | {"gpu_count": len(rows), "cuda": cuda[1] if cuda else ""}


def _output(command: list[str]) -> str:
    """What a command prints; empty when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
