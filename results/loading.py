"""The time to load weights, and to read the same files: from the disk, then from memory.

    python results/loading.py FOLDER RECIPE [--set key=value ...] [--ranks N] [--json PATH]

FOLDER has a checkpoint of the recipe's model. If it is empty, a random checkpoint is written
there (`--set model.num_layers=N` limits its size). Each number is from one pass over the files:
by one thread that reads 16 MiB at a time, then by the loader. "Cold" means that the pages of the
files were dropped from memory, as far as the system allows it. With `--ranks N`, only rank 0 of N
loads.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from nanovllm.bench.record import of_this_machine
from nanovllm.bench.store import put
from nanovllm.checkpoint import weight_files
from nanovllm.config import DEMO, Config, load_config
from nanovllm.models.quantised import in_blocks
from nanovllm.models.shards import DTYPES
from nanovllm.models.weights import destinations, filler
from nanovllm.parallel.mesh import Mesh
from nanovllm.runner.resolved import Resolved, resolve_config

SHARD = 4 << 30  # bytes of a file, as on the hub
READ = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = datetime.now(UTC)
    if not (options.folder / "config.json").is_file():
        write_random(load_config(options.recipe, [*options.changes, "load.format=dummy"]), options)
    config = load_config(options.recipe, [*options.changes, f"model={options.folder}"])
    resolved = resolve_config(config, Mesh(0, options.ranks))
    paths = weight_files(options.folder)[1]
    total = sum(path.stat().st_size for path in paths)
    metrics = {"file_gb": total / 1e9}
    for name, loader in {
        "plain": lambda: plain(paths),
        "load": lambda: load(config, resolved),
    }.items():
        for state in ("cold", "warm"):
            if state == "cold":
                forget(paths)
            seconds = timed(loader)
            metrics[f"{name}_{state}_s"] = seconds
            metrics[f"{name}_{state}_gb_per_s"] = total / seconds / 1e9
            click.echo(f"{name} {state}: {seconds:.2f} s, {total / seconds / 1e9:.2f} GB/s")
    if options.json is not None:
        record = of_this_machine(
            kind="load",
            started_at=began.isoformat(timespec="seconds"),
            duration_s=(datetime.now(UTC) - began).total_seconds(),
            recipe={"model": config.recipe.model},
            changed=config.changed,
            workload={"name": "loading", "files": len(paths), "ranks": options.ranks},
            metrics=metrics,
        )
        put(record, options.json)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain(paths: list[Path]) -> None:
    buffer = bytearray(READ)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def load(config: Config, resolved: Resolved) -> None:
    """Load the weights as a start does. Each of several ranks would do the same work."""
    filler(resolved.empty_model(resolved.device), config)()
    if resolved.device.type == "cuda":
        torch.cuda.synchronize()
    gc.collect()


def forget(paths: list[Path]) -> None:
    """Write the files to the disk, and drop their pages from memory."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_random(config: Config, options: argparse.Namespace) -> None:
    """Write a checkpoint of the recipe's model with the names and shapes of a real one."""
    resolved = resolve_config(config, Mesh())
    model = resolved.empty_model(torch.device("meta"))
    file_layout = in_blocks(
        destinations(model, model.WEIGHTS), made=config.recipe.quantize is not None
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEMO / "tokenizer.json", options.folder)
    raw = json.loads(Path(config.config_path).read_text())
    raw["num_hidden_layers"] = resolved.model_config.num_hidden_layers
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05}.safetensors"
        save_file(shard, options.folder / name)
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, to in file_layout.items():
        dtype = torch.bfloat16 if "BF16" in to.dtypes else DTYPES[to.dtypes[0]]
        shard[name] = torch.randn(to.shape).mul_(to.shape[-1] ** -0.5).to(dtype)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            flush()
    flush()
    (options.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (options.folder / "config.json").write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
