"""Rejection of unsupported configs, with one sentence for each kind, before torch is imported.

The sentence gives the nearest supported model, by architecture and size. `read_model_config` checks
the rest of config.json, with torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from nanovllm.checkpoint import made_from, text_fields
from nanovllm.config import NOT_JSON, ConfigError
from nanovllm.models import MODELS

ONLY: dict[str, object] = {  # fields with a single supported value in all families
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
}
ROPE_TYPES = ("default", "llama3", "yarn")
BLOCK_SIZE = [128, 128]  # of fp8 weights
IF_TOO_LARGE = "(with --set quantize=fp8 if that is too large)"


class Known(Struct, frozen=True):
    """A supported model, and the sizes by which it is found."""

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    has_fp8: bool = True

    @property
    def fp8(self) -> str:
        """Return the id of its FP8 version, if there is a supported one."""
        return f"{self.name}-FP8" if self.has_fp8 and self.name.startswith("Qwen/") else ""

    @property
    def advice(self) -> str:
        """Return the words that name this model in place of a quantised version of it."""
        if self.architecture in FP8_ONLY:
            return f"{self.name}, whose weights are in block fp8"
        smaller = f", or {self.fp8}" if self.fp8 else f" {IF_TOO_LARGE}"
        return f"the unquantised {self.name}{smaller}"


QWEN3, QWEN3_MOE, LLAMA = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM"
DEEPSEEK, MINIMAX, NEXT = "DeepseekV3ForCausalLM", "MiniMaxM2ForCausalLM", "Qwen3NextForCausalLM"
FP8_ONLY = DEEPSEEK, MINIMAX  # their authors publish weights in block fp8 only
GLM = "Glm4MoeLiteForCausalLM"
QWEN3_5, QWEN3_5_MOE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
KNOWN = (
    Known("Qwen/Qwen3-0.6B", QWEN3, 1024, 28),
    Known("Qwen/Qwen3-1.7B", QWEN3, 2048, 28),
    Known("Qwen/Qwen3-4B", QWEN3, 2560, 36),
    Known("Qwen/Qwen3-8B", QWEN3, 4096, 36),
    Known("Qwen/Qwen3-14B", QWEN3, 5120, 40),
    Known("Qwen/Qwen3-32B", QWEN3, 5120, 64),
    Known("Qwen/Qwen3-30B-A3B", QWEN3_MOE, 2048, 48),
    Known("Qwen/Qwen3-235B-A22B", QWEN3_MOE, 4096, 94),
    Known("Qwen/Qwen3-Next-80B-A3B-Instruct", NEXT, 2048, 48),
    Known("Qwen/Qwen3.5-0.8B", QWEN3_5, 1024, 24, has_fp8=False),
    Known("Qwen/Qwen3.5-2B", QWEN3_5, 2048, 24, has_fp8=False),
    Known("Qwen/Qwen3.5-4B", QWEN3_5, 2560, 32, has_fp8=False),
    Known("Qwen/Qwen3.5-9B", QWEN3_5, 4096, 32, has_fp8=False),
    Known("Qwen/Qwen3.5-27B", QWEN3_5, 5120, 64),
    Known("Qwen/Qwen3.6-27B", QWEN3_5, 5120, 64),
    Known("Qwen/Qwen3.5-35B-A3B", QWEN3_5_MOE, 2048, 40),
    Known("Qwen/Qwen3.6-35B-A3B", QWEN3_5_MOE, 2048, 40),
    Known("Qwen/Qwen3.5-122B-A10B", QWEN3_5_MOE, 3072, 48),
    Known("Qwen/Qwen3.5-397B-A17B", QWEN3_5_MOE, 4096, 60),
    Known("meta-llama/Llama-3.2-1B-Instruct", LLAMA, 2048, 16),
    Known("meta-llama/Llama-3.2-3B-Instruct", LLAMA, 3072, 28),
    Known("meta-llama/Llama-3.1-8B-Instruct", LLAMA, 4096, 32),
    Known("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", LLAMA, 4096, 32),
    Known("meta-llama/Llama-3.1-70B-Instruct", LLAMA, 8192, 80),
    Known("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", LLAMA, 8192, 80),
    Known("deepseek-ai/DeepSeek-V3", DEEPSEEK, 7168, 61),
    Known("deepseek-ai/DeepSeek-V3-0324", DEEPSEEK, 7168, 61),
    Known("deepseek-ai/DeepSeek-V3.1", DEEPSEEK, 7168, 61),
    Known("deepseek-ai/DeepSeek-R1", DEEPSEEK, 7168, 61),
    Known("deepseek-ai/DeepSeek-R1-0528", DEEPSEEK, 7168, 61),
    Known("MiniMaxAI/MiniMax-M2", MINIMAX, 3072, 62),
    Known("MiniMaxAI/MiniMax-M2.1", MINIMAX, 3072, 62),
    Known("MiniMaxAI/MiniMax-M2.5", MINIMAX, 3072, 62),
    Known("MiniMaxAI/MiniMax-M2.7", MINIMAX, 3072, 62),
    Known("zai-org/GLM-4.7-Flash", GLM, 2048, 47),
)  # fmt: skip
# Nearest family of an unsupported architecture: that of the first pattern matching its name.
NEAREST = (
    (r"Deepseek|Kimi", DEEPSEEK),
    (r"Glm4MoeLite", GLM),
    (r"MiniMax", MINIMAX),
    (r"Qwen3Next", NEXT),
    (r"Qwen3_?5Moe", QWEN3_5_MOE),
    (r"Qwen3_?5", QWEN3_5),
    (r"(Llama|Mistral|Ministral|Yi|SmolLM)(?!.*4)", LLAMA),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
METHODS = {  # quant_method -> spelling of its authors
    "awq": "AWQ",
    "gptq": "GPTQ",
    "gptq_marlin": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
}
SEPARATE = {  # files of older checkpoints, whose config.json names no quantisation
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def check_config(path: Path, name: str = "") -> dict[str, Any]:
    """Return the fields of config.json. Raise ConfigError if its model cannot be served.

    Those of `text_config` are at the same level as the others. `name` is the model's folder or Hub
    id. The suggestion of another model is derived from it.
    """
    try:
        raw: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except NOT_JSON as error:
        raise ConfigError(f"{path}: {error}") from None
    check_architecture(raw, path)
    raw = text_fields(raw)
    check_quantization(raw, path, name)
    check_only(raw, ONLY, path)
    check_rope(raw, path)
    return raw


def check_architecture(raw: dict[str, Any], path: Path) -> None:
    if "architectures" not in raw:
        raise ConfigError(f"{path}: Object missing required field `architectures`")
    architectures = raw["architectures"]
    if not isinstance(architectures, list) or not all(isinstance(x, str) for x in architectures):
        raise ConfigError(f"{path}: architectures must be a list of names")
    name = architectures[0] if architectures else "empty"
    if name in MODELS:
        return
    only = ""
    if not name.endswith("ForCausalLM"):
        only = " (a text generator's name ends with ForCausalLM)"
    raise ConfigError(
        f"{path}: architectures is {name}{only}; supported are {', '.join(sorted(MODELS))}; the "
        f"nearest supported model is {nearest(name, raw).name}"
    )


def nearest(architecture: str, raw: dict[str, Any]) -> Known:
    """Return the model of the nearest size in the nearest family."""
    inner = (raw.get(key) for key in ("text_config", "llm_config", "thinker_config"))
    parts = [raw, *(part for part in inner if isinstance(part, dict))]
    family = next((family for pattern, family in NEAREST if re.match(pattern, architecture)), None)
    if family in (None, LLAMA):
        named = "moe" in architecture.lower() or architecture.startswith("Mixtral")
        has_experts = named or any(part.get(key) for part in parts for key in EXPERTS)
        family = QWEN3_MOE if has_experts else family or QWEN3
    size = next((candidate for part in parts if (candidate := size_of(part)) is not None), None)
    models = [model for model in KNOWN if model.architecture == family]
    if size is None:
        return models[len(models) // 2]
    return min(models, key=lambda one: abs(math.log(one.hidden_size**2 * one.num_layers / size)))


def size_of(raw: dict[str, Any]) -> int | None:
    """Return a number proportional to the parameters of a dense model, or None."""
    width, depth = raw.get("hidden_size"), raw.get("num_hidden_layers")
    if type(width) is not int or type(depth) is not int or width < 1 or depth < 1:
        return None
    return width**2 * depth


def check_quantization(raw: dict[str, Any], path: Path, name: str) -> None:
    """Raise ConfigError if weights are stored neither as floats nor in block fp8."""
    section = raw.get("quantization_config") or raw.get("compression_config") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: quantization_config must be an object")
    separate = next((SEPARATE[one] for one in SEPARATE if (path.parent / one).is_file()), None)
    if not section and separate is None:
        return
    method = section.get("quant_method") or separate or "an unnamed method"
    if method == "fp8" and section.get("weight_block_size") == BLOCK_SIZE:
        return  # the rest is checked with the model
    form = METHODS.get(str(method), str(method))
    if method == "fp8":
        form = "FP8 scales of other blocks than 128 x 128"
    elif type(bits := section.get("bits", section.get("w_bit"))) is int:
        form = f"{form} ({bits} bits)"
    raise ConfigError(
        f"{path}: the weights are quantised with {form}, which is not supported; serve "
        f"{instead_of(name or path.parent.name, raw)}"
    )


def instead_of(name: str, raw: dict[str, Any]) -> str:
    """Return the words that name the model to serve instead of a quantised one."""
    base = made_from(name)
    same = [one for one in KNOWN if one.name.rsplit("/", 1)[-1].lower() == base.lower()]
    architecture = str(next(iter(raw.get("architectures") or ()), ""))
    if not same:
        sizes = raw.get("hidden_size"), raw.get("num_hidden_layers")
        same = [
            one
            for one in KNOWN
            if (one.hidden_size, one.num_layers) == sizes and one.architecture == architecture
        ]
    if not same:
        return f"the unquantised model {IF_TOO_LARGE}"
    return same[0].advice


def check_rope(raw: dict[str, Any], path: Path) -> None:
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(field)
    if not isinstance(rope, dict):
        return
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise ConfigError(f"{path}: rope_type of {field} is {kind}; supported are {known}")


def check_only(raw: dict[str, Any], only: Mapping[str, object], path: Path) -> None:
    """Raise ConfigError if a field of config.json differs from the only supported value."""
    for field, value in only.items():
        if raw.get(field, value) != value:
            shown, allowed = json.dumps(raw[field]), json.dumps(value)
            raise ConfigError(f"{path}: {field} is {shown}; only {allowed} is supported")
