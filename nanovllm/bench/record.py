"""The record of one measurement: its schema, its place under results/, its writer and reader.

Does not know how anything was measured. `python -m nanovllm.bench.record > results/schema.json`
writes the schema.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from nanovllm.bench.machine import Machine, commit, fingerprint, versions
from nanovllm.config import ConfigError

Kind = Literal["serve", "offline", "kernels", "kv", "graphs", "parity", "demo", "clients"]
SECRETS = ("--api-key", "server.api_key")
# Changed keys that do not tell records of a day apart.
UNNAMED = ("load.", "server.host", "server.port", "server.api_key", "server.served_name")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int = 1
    kind: Kind
    machine: Machine
    commit: str  # full hash; empty when unknown
    dirty: bool  # the tree differed from the commit
    started_at: str  # UTC, ISO 8601
    duration_s: float
    argv: list[str]  # the command that reproduces it, secrets left out
    recipe: dict[str, Any]  # fully resolved
    changed: dict[str, Any]  # what flags and --set altered
    workload: dict[str, Any]  # name, concurrency, seed, lengths, arrivals
    metrics: dict[str, float]  # names carry units
    versions: dict[str, str]
    notes: str = ""  # begins with "invalid:" when the run says nothing

    @property
    def is_publishable(self) -> bool:
        return bool(self.commit) and not self.dirty and not self.notes.startswith("invalid:")

    @property
    def model(self) -> str:
        """The last part of its name or path."""
        return str(self.recipe["model"]).rstrip("/").rsplit("/", 1)[-1]

    @property
    def version(self) -> str:
        """`4f2c9ab`, or `4f2c9ab-dirty`."""
        return (self.commit[:7] or "unknown") + ("-dirty" if self.dirty else "")

    @property
    def altered(self) -> dict[str, Any]:
        """Of `changed`, what tells records of a day apart."""
        return {key: value for key, value in self.changed.items() if not key.startswith(UNNAMED)}


def write(record: Record, results_dir: Path) -> Path:
    path = new_path(record, results_dir)
    write_to(path, record)
    return path


def new_path(record: Record, results_dir: Path, suffix: str = ".json") -> Path:
    """results/<machine>/<kind>/<date>_<commit>_<name>.json, or scratch/ if nobody could redo it.

    Never one that exists: a second record of that name gets a number.
    """
    place = Path(record.machine.slug, record.kind)
    folder = results_dir / (place if record.is_publishable else "scratch" / place)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{record.started_at[:10]}_{record.commit[:7] or 'unknown'}_{name(record)}"
    path, again = folder / f"{stem}{suffix}", 1
    while path.exists():
        again += 1
        path = folder / f"{stem}_{again}{suffix}"
    return path


def write_to(path: Path, record: Record) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def of_this_machine(
    *,
    kind: Kind,
    started_at: str,
    duration_s: float,
    recipe: Mapping[str, Any],
    changed: Mapping[str, Any],
    workload: dict[str, Any],
    metrics: dict[str, float],
    notes: str = "",
) -> Record:
    """What was just measured here, by the command line that runs."""
    tree = commit()
    return Record(
        kind=kind,
        machine=fingerprint(),
        commit=tree.hash,
        dirty=tree.is_dirty,
        started_at=started_at,
        duration_s=duration_s,
        argv=without_secrets(["nanovllm", *sys.argv[1:]]),
        recipe=hide_secrets(recipe),
        changed=hide_secrets(changed),
        workload=workload,
        metrics=metrics,
        versions=versions(),
        notes=notes,
    )


def read(path: Path) -> Record:
    """Raises ConfigError that names the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no record: {error}") from None


def name(record: Record) -> str:
    """`qwen3-8b_w1_depth0`: the model, the workload, and what was altered."""
    altered = [f"{key.rsplit('.', 1)[-1]}{value}" for key, value in record.altered.items()]
    return "_".join(map(_slug, (record.model, str(record.workload["name"]), *altered)))


def without_secrets(argv: list[str]) -> list[str]:
    """A command line fit to be published."""
    shown: list[str] = []
    for text in argv:
        if shown and shown[-1] in SECRETS:
            text = "..."
        shown.append(re.sub(rf"^({'|'.join(SECRETS)})=.*", r"\1=...", text))
    return shown


def hide_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a recipe's or an override's keys, at any depth."""
    shown: dict[str, Any] = {}
    for key, value in values.items():
        if key.rsplit(".", 1)[-1] == "api_key" and value is not None:
            value = "..."
        shown[key] = hide_secrets(value) if isinstance(value, Mapping) else value
    return shown


def schema() -> bytes:
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Record)), indent=2) + b"\n"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    sys.stdout.buffer.write(schema())
