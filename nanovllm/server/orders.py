"""What a chat request orders from the engine: one Generate per choice.

Knows nothing of what becomes of the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from nanovllm.server.errors import ApiError, bad_value
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import GenerationConfig, Served
from nanovllm.server.template import Prompt
from nanovllm.wire import Generate, Sampling

FORCED = 1000.0  # a logit that no other overcomes, and float32 still adds exactly enough to


def generates(
    request: ChatRequest,
    prompt: Prompt,
    served: Served,
    seed: int,
    new_id: Callable[[], int],
) -> list[Generate]:
    """One engine request per choice. Raises ApiError if the prompt does not fit."""
    num_prompt, context = len(prompt.ids), served.max_model_tokens
    if num_prompt >= context:
        raise ApiError(
            400,
            f"messages: the prompt has {num_prompt} tokens; with at least one token to generate "
            f"it must have at most {context - 1} (the context is {context})",
            param="messages",
            code="context_length_exceeded",
        )
    limit = request.token_limit
    room = context - num_prompt
    stop_ids = set(request.stop_token_ids or ())
    if not request.ignore_eos:
        stop_ids |= served.eos_ids
    first_seed = seed if request.seed is None else request.seed
    biases = _biases(request, served)
    grammar = _grammar(request, served, prompt)
    packed = array("i", prompt.ids).tobytes()
    return [
        Generate(
            request_id=new_id(),
            prompt=packed,
            max_new=room if limit is None else min(limit, room),
            stop_ids=sorted(stop_ids),
            sampling=sampling(request, served.defaults, wrapped(first_seed + index), biases),
            priority=request.priority or 0,
            salt=request.cache_salt or "",
            grammar=grammar,
        )
        for index in range(request.num_choices)
    ]


def _grammar(request: ChatRequest, served: Served, prompt: Prompt) -> str:
    """The structural tag that the output must match; empty if it may be anything."""
    if (field := request.constrained_by) is None:
        return ""
    text = f"{field} asks for a constrained output, which this server does not have yet"
    raise ApiError(400, text, param=field, code="invalid_value")


def _biases(request: ChatRequest, served: Served) -> dict[int, float]:
    """logit_bias, with allowed tokens and forbidden words written in the same way."""
    biases = dict(request.logit_bias or {})
    for token_id in request.allowed_token_ids or ():
        biases[token_id] = biases.get(token_id, 0.0) + FORCED
    encode = served.template.tokenizer.encode
    for at, word in enumerate(request.bad_words or ()):
        spellings = [encode(text, add_special_tokens=False).ids for text in (word, f" {word}")]
        single = {ids[0] for ids in spellings if len(ids) == 1}
        if not all(single.intersection(ids) for ids in spellings):
            requirement = "a single token of this model: longer words cannot be forbidden"
            raise bad_value(f"bad_words[{at}]", requirement, word)
        for token_id in single:
            biases[token_id] = biases.get(token_id, 0.0) - 2 * FORCED
    return biases


def sampling(
    request: ChatRequest, defaults: GenerationConfig, seed: int, biases: dict[int, float]
) -> Sampling:
    """What the request says, else what the model's authors say, else plain sampling."""

    def chosen(field: str, otherwise: float) -> float:
        for source in (request, defaults):
            value: float | None = getattr(source, field)
            if value is not None:
                return value
        return otherwise

    return Sampling(
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p", 1.0),
        top_k=max(0, int(chosen("top_k", 0))),
        min_p=chosen("min_p", 0.0),
        # It multiplies, and would undo what is forced.
        repetition_penalty=1.0 if request.allowed_token_ids else chosen("repetition_penalty", 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=seed,
        logit_bias=biases,
        min_tokens=request.min_tokens or 0,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
    )


def wrapped(seed: int) -> int:
    """Into 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63
