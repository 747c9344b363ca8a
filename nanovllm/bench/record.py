"""The record of one measurement: its schema, and a file with one record.

A record has the machine, the commit and the versions of packages. Files with many records are in
`store`. `python -m nanovllm.bench.record > results/schema.json` writes the schema.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from nanovllm.config import NOT_JSON, ConfigError

Kind = Literal[
    "serve", "offline", "kernels", "kv", "graphs", "load", "page", "parity", "demo", "clients"
]  # fmt: skip
# Changed keys that are not part of a record's name.
UNNAMED = ("load", "model", "port", "server.host", "server.port", "server.api_key", "server.served")

ROOT = Path(__file__).parents[2]  # root of the checkout
PACKAGES = (
    "nanovllm", "torch", "triton", "nvidia-cutlass-dsl", "flash-attn-4", "transformers",
    "tokenizers", "xgrammar", "uvicorn", "uvloop", "httptools", "msgspec", "numpy",
)  # fmt: skip
GPU_FIELDS = {  # fields of Machine: their names for nvidia-smi
    "gpu": "name", "driver": "driver_version", "power_limit_w": "power.limit",
    "max_sm_mhz": "clocks.max.sm", "max_memory_mhz": "clocks.max.mem", "sm_mhz": "clocks.sm",
    "gpu_memory_mib": "memory.total",
}  # fmt: skip


class Machine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpu: str = ""  # empty: no NVIDIA GPU
    gpu_count: int = 0
    gpu_memory_mib: float = 0.0
    driver: str = ""
    cuda: str = ""  # latest version that the driver supports
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
        # Of "NVIDIA H100 80GB HBM3" the memory does not matter here. It is a field of its own.
        name = re.sub(r"nvidia|geforce|\d+gb|hbm\w+|[^a-z0-9]+", " ", self.gpu.lower())
        return f"{'-'.join(name.split())}-x{self.gpu_count}"


class Commit(Struct, frozen=True):
    hash: str  # 40 digits; empty when unknown
    is_dirty: bool


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int = 1
    kind: Kind
    machine: Machine
    commit: str  # full hash; empty when unknown
    dirty: bool  # the tree differed from the commit
    started_at: str  # UTC, ISO 8601
    duration_s: float
    argv: list[str]  # command that reproduces it, without secrets
    recipe: dict[str, Any]  # fully resolved
    changed: dict[str, Any]  # values from flags and --set
    workload: dict[str, Any]  # name, concurrency, seed, lengths, arrivals
    metrics: dict[str, float]  # names carry units
    versions: dict[str, str]
    notes: str = ""  # begins with "invalid:" if the run is invalid

    @property
    def is_publishable(self) -> bool:
        return bool(self.commit) and not self.dirty and not self.notes.startswith("invalid:")

    @property
    def model(self) -> str:
        """Return the last part of the model's name or path."""
        return str(self.recipe["model"]).rstrip("/").rsplit("/", 1)[-1]

    @property
    def engine(self) -> str:
        """Return `nanovllm`, or the name and version of another engine: `vllm 0.26.0`."""
        return str(self.recipe.get("served_by", "nanovllm"))

    @property
    def version(self) -> str:
        """Return `4f2c9ab`, or `4f2c9ab-dirty`."""
        return (self.commit[:7] or "unknown") + ("-dirty" if self.dirty else "")

    @property
    def altered(self) -> dict[str, Any]:
        """Return the part of `changed` that distinguishes records of the same day."""
        return {key: value for key, value in self.changed.items() if not key.startswith(UNNAMED)}


def write_to(path: Path, record: Record) -> None:
    """Write a record to a file. Raise ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def of_this_machine(
    recipe: Mapping[str, Any],
    changed: Mapping[str, Any],
    **measured: Any,  # noqa: ANN401
) -> Record:
    """Return a record of this machine and of the running command line.

    `measured` has the other fields.
    """
    tree = commit()
    return Record(
        machine=fingerprint(),
        commit=tree.hash,
        dirty=tree.is_dirty,
        argv=without_secrets(["nanovllm", *sys.argv[1:]]),
        recipe=hide_secrets(recipe),
        changed=hide_secrets(changed),
        versions=versions(),
        **measured,
    )


def fingerprint() -> Machine:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    query = [f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    facts = parse_gpus(_output(["nvidia-smi", *query]), _output(["nvidia-smi"])) | {
        "cpu": model[1].strip() if model else platform.processor(),
        "cpu_cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }
    return msgspec.convert(facts, Machine, strict=False)


def commit(root: Path = ROOT, stated: str | None = None) -> Commit:
    """Return the checkout's commit; without git `stated`, or the content of the file `.commit`.

    Both are the output of `git describe --always --abbrev=40 --dirty`. Results and `.commit` itself
    do not make a tree dirty.
    """
    head = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if head and (root / ".git").exists():  # excludes a repository around an installed package
        ignored = [":!results", ":!.commit"]
        changes = _output(["git", "-C", str(root), "status", "--porcelain", "--", ".", *ignored])
        return Commit(head, bool(changes))
    file = root / ".commit"
    text = stated or (file.read_text().strip() if file.is_file() else "")
    name, dash, _ = text.partition("-dirty")
    return Commit(name, bool(dash)) if re.fullmatch("[0-9a-f]{40}", name) else Commit("", True)


def versions() -> dict[str, str]:
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            by_package[package] = metadata.version(package)
    return by_package


def parse_gpus(csv: str, header: str) -> dict[str, Any]:
    """Return Machine's GPU fields from nvidia-smi's output for GPU_FIELDS and its header."""
    rows = [line.split(", ") for line in csv.splitlines()]
    if not rows:
        return {}
    cells = zip(GPU_FIELDS, rows[0], strict=True)
    known = {field: cell for field, cell in cells if not cell.startswith("[")}  # [N/A] and the like
    cuda = re.search(r"CUDA Version\s*:\s*([\d.]+)", header)
    return known | {"gpu_count": len(rows), "cuda": cuda[1] if cuda else ""}


def read(path: Path) -> Record:
    """Read a record. Raise ConfigError with the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (*NOT_JSON, OSError) as error:
        raise ConfigError(f"{path} is not a record: {error}") from None


def name(record: Record) -> str:
    """Return `qwen3-8b_w1_depth0`: model, workload, other engine, and altered keys."""
    altered = [f"{key.rsplit('.', 1)[-1]}{value}" for key, value in record.altered.items()]
    peer = [record.engine] if "served_by" in record.recipe else []
    return "_".join(map(_slug, (record.model, str(record.workload["name"]), *peer, *altered)))


def without_secrets(argv: list[str]) -> list[str]:
    """Return a command line without API keys and transfer secrets.

    Bytes that are not UTF-8, which JSON cannot have, are escaped.
    """
    shown: list[str] = []
    for text in argv:
        text = text.encode(errors="backslashreplace").decode()
        text = re.sub(r"(--api-key[ =])\S+", r"\1...", text)
        if shown and shown[-1] == "--api-key":
            text = "..."
        elif "api_key" in text or "transfer.secret" in text:
            secret = r"^(.*?(?:api.key|transfer\.secret)|[^=]*)=.*"
            text = re.sub(secret, r"\1=...", text, flags=re.DOTALL)
        shown.append(text)
    return shown


def hide_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe or of overrides without secrets, at any depth."""
    shown: dict[str, Any] = {}
    for key, value in values.items():
        if key.rsplit(".", 1)[-1] in ("api_key", "secret") and value is not None:
            value = "..."
        shown[key] = hide_secrets(value) if isinstance(value, Mapping) else value
    return shown


def schema() -> bytes:
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Record)), indent=2) + b"\n"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _output(command: list[str]) -> str:
    """Return the output of a command; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.stdout.buffer.write(schema())
