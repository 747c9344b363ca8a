"""Fields of other servers that are refused, since ignoring them would change the answer.

Other unknown fields are ignored. Clients send many that only describe a request (store, metadata,
...). A field that would change the tokens or the content must not be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from nanovllm.server.errors import ApiError

STRUCTURED = "use structured_outputs"
INSTEAD = {
    "add_special_tokens": "the chat template writes them",
    "audio": "answers are text",
    "best_of": "use n",
    "chat_template": "this server renders prompts with the model's own",
    "custom_logit_processor": "use logit_bias, bad_words or allowed_token_ids",
    "documents": "pass them in chat_template_kwargs",
    "ebnf": STRUCTURED,
    "function_call": "use tool_choice",
    "functions": "use tools",
    "grammar": STRUCTURED,
    "guided_choice": STRUCTURED,
    "guided_grammar": STRUCTURED,
    "guided_json": STRUCTURED,
    "guided_regex": STRUCTURED,
    "json_schema": "use response_format or structured_outputs",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "lora_path": "use model, with the name of an adapter",
    "modalities": "answers are text",
    "regex": STRUCTURED,
    "stop_regex": "use stop",
    "structural_tag": STRUCTURED,
    "truncate_prompt_tokens": "prompts are never truncated",
}

STRUCTURE = ("whitespace_pattern", "disable_additional_properties")  # of structured_outputs


class Unsupported(Struct, frozen=True, kw_only=True):
    """Fields that are refused. Null, false, empty values and a field's default are accepted."""

    add_special_tokens: Any = False
    audio: Any = None
    best_of: Any = 1
    chat_template: Any = None
    custom_logit_processor: Any = None
    documents: Any = None
    ebnf: Any = None
    echo: Any = False
    function_call: Any = "none"
    functions: Any = None
    grammar: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    json_schema: Any = None
    length_penalty: Any = 1
    logits_processors: Any = None
    logprob_token_ids: Any = None
    lora_path: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = msgspec.field(default_factory=lambda: ["text"])
    prompt_logprobs: Any = None
    regex: Any = None
    repetition_detection: Any = None
    stop_regex: Any = None
    structural_tag: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = False
    vllm_xargs: Any = None


DEFAULTS = structs.asdict(Unsupported())


def check_unsupported(request: Unsupported) -> None:
    """Raise ApiError if an unsupported field has an effective value."""
    for field, default in DEFAULTS.items():
        value = getattr(request, field)
        if value is not None and value is not False and value not in (default, [], {}, ""):
            raise unsupported(field, INSTEAD.get(field, ""))


def check_structure(structured_outputs: Mapping[str, object]) -> None:
    """Raise ApiError if an unsupported field of structured_outputs has an effective value."""
    for field in STRUCTURE:
        if structured_outputs.get(field) not in (None, False):
            raise unsupported(f"structured_outputs.{field}")


def unsupported(field: str, instead: str = "") -> ApiError:
    hint = f": {instead}" if instead else ""
    text = f"{field} is not supported by this server{hint}"
    return ApiError(400, text, param=field, code="unsupported_parameter")
