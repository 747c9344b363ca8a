"""Random PEFT adapters of tiny models, and the texts of PEFT itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanovllm.adapters.section import located
from nanovllm.config import Adapters, Config
from tests.models.tiny import config_of
from tests.whole_engine import references

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(model_folder: Path, folder: Path, seed: int, **settings: Any) -> None:
    """Save an adapter with random A and B, so that each of its tensors changes the logits."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": DENSE, **settings}
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    torch.manual_seed(seed)
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)


def peft_model(model_folder: Path, adapter: Path | None) -> PreTrainedModel:
    """Return the model as PEFT computes it, in float32. With None, the model alone."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    return base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()


def texts_of(
    model_folder: Path, adapter: Path | None, prompts: list[list[int]], max_new: int
) -> list[list[int]]:
    """Return PEFT's greedy text of each prompt."""
    model = peft_model(model_folder, adapter)
    return references(model, prompts, max_new)


def config_with(model_folder: Path, folder: Path, **settings: Any) -> Config:
    """Return the config of a model with the adapters in a folder."""
    config = config_of(model_folder)
    adapters = located(Adapters(folder=str(folder), **settings), Path(), config.model_names)
    return replace(config, recipe=replace(config.recipe, adapters=adapters))
