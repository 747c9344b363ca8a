"""A first check of a recipe's ranks against config.json and the visible GPUs, without torch.

It runs before any process is started. If it finds a fault, the full check (parallel/cut.py), which
imports torch, decides and raises the error. It may miss faults of one family, which rank 0 finds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from nanovllm.checkpoint import text_fields
from nanovllm.config import NOT_JSON, Config, given_gpus
from nanovllm.parallel.places import EXPERTS, check_gpus, num_ranks

DEVICES = Path("/dev")


def check_ranks(config: Config) -> None:
    """Raise ConfigError if the model cannot be cut over the ranks, or GPUs are missing."""
    recipe = config.recipe
    if recipe.engine != "model":
        return
    parallel, num_gpus = recipe.parallel, visible_gpus()
    if recipe.device != "cpu" and num_gpus:
        check_gpus(parallel, num_gpus)
    if num_ranks(parallel) > 1 and not divides(
        read_fields(config.config_path), parallel.tp, parallel.ep
    ):
        from nanovllm.models.config import read_model_config
        from nanovllm.parallel.cut import check_cut
        from nanovllm.parallel.mesh import first_rank

        check_cut(first_rank(parallel), read_model_config(config)[1])


def divides(fields: dict[str, Any], tp: int, ep: int) -> bool:
    """Return False if a count of config.json is not a multiple of the ranks that share it."""
    experts = next((name for name in EXPERTS if fields.get(name)), None)
    shared = {"num_attention_heads": tp, "linear_num_key_heads": tp}
    if ep > 1:
        if experts is None:
            return False
        shared[experts] = ep
    elif experts is None:
        shared["intermediate_size"] = tp
    elif "moe_intermediate_size" in fields:
        shared["moe_intermediate_size"] = tp
    counts = [(fields.get(name), ranks) for name, ranks in shared.items()]
    heads = fields.get("num_key_value_heads")
    if isinstance(heads, int) and heads > 0 and "kv_lora_rank" not in fields:
        counts.append((max(heads, tp), min(heads, tp)))
    return all(not isinstance(count, int) or count % ranks == 0 for count, ranks in counts)


def read_fields(path: str) -> dict[str, Any]:
    """Return the fields of config.json; {} if it is unreadable, which later checks report."""
    try:
        return text_fields(msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any]))
    except (OSError, *NOT_JSON):
        return {}


def visible_gpus() -> int:
    """Return an upper bound of the GPUs that processes will find; 0 if it is unknown."""
    num = sum(path.name.removeprefix("nvidia").isdigit() for path in DEVICES.glob("nvidia*"))
    named = given_gpus()
    if named is None:
        return num
    return min(num, sum(bool(name.strip()) for name in named.split(",")))
