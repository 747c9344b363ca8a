"""Engine requests of a chat request: one Generate per choice."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msgspec import structs

from nanovllm.server.errors import bad_value, invalid_field, too_long
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import Served
from nanovllm.server.tag import structural_tag, vet_tools
from nanovllm.server.template import Prompt
from nanovllm.transfer.params import used_ticket
from nanovllm.wire import Generate, Sampling

MAX_BAD_WORD_TOKENS = 32


def with_grammar(request: ChatRequest, prompt: Prompt, served: Served) -> Prompt:
    """Return the prompt with its grammar, if there is one.

    Slow for large schemas, so call it on a thread. Raise ApiError.
    """
    if request.constrained_by is not None:
        return structs.replace(prompt, grammar=structural_tag(request, served, prompt.turn))
    if request.tools:
        vet_tools(request, served)
    return prompt


def generates(
    request: ChatRequest, prompt: Prompt, served: Served, *, seed: int, ids: Sequence[int]
) -> list[Generate]:
    """Return one engine request per choice, with these ids. Raise ApiError if the prompt does not
    fit.
    """
    num_prompt = len(prompt.ids)
    context = served.max_model_tokens
    if num_prompt >= context:
        raise too_long(num_prompt, context)
    served.check_tokens("messages", prompt.ids)
    max_new = context - num_prompt
    if request.token_limit is not None:
        max_new = min(max_new, request.token_limit)
    if request.min_tokens is not None and request.min_tokens > max_new:
        text = f"at most {max_new}, the room left by max_tokens and the prompt"
        raise bad_value("min_tokens", text, request.min_tokens)
    stop_ids = {*(request.stop_token_ids or ()), *(() if request.ignore_eos else served.eos_ids)}
    first_seed = seed if request.seed is None else request.seed
    words = _bad_words(request, served)
    banned = {word[-1] for word in words} | (stop_ids if request.min_tokens else set())
    if all(one in banned for one in request.allowed_token_ids or range(served.vocab_size)):
        text = "leaves no token: each one allowed ends the output or is banned by bad_words"
        raise invalid_field("min_tokens" if request.min_tokens else "bad_words", text)
    packed, adapter = array("i", prompt.ids).tobytes(), served.adapter_of(request)
    ticket = used_ticket(request.transfer)
    return [
        Generate(
            request_id=request_id,
            prompt=packed,
            max_new=max_new,
            stop_ids=sorted(stop_ids),
            sampling=sampling(request, served, wrapped(first_seed + index), words),
            priority=request.priority or 0,
            salt=request.cache_salt or "",
            grammar=prompt.grammar,
            adapter=adapter,
            # A stream has no place for the object, so its pages would be held in vain.
            lends=request.transfer.role == "prefill" and not request.stream,
            # The other choices share the pages that the first one reads.
            ticket=ticket if index == 0 else "",
        )
        for index, request_id in enumerate(ids)
    ]


def _bad_words(request: ChatRequest, served: Served) -> list[list[int]]:
    """Return the tokens of each word, at the beginning of a text and after a space.

    Raise ApiError (400) if the model's vocabulary lacks a token of a word. A spelling after a space
    is left out in that case, as the model cannot write it.
    """
    words = [word.lstrip() for word in request.bad_words or ()]
    spellings = [spelling for word in words for spelling in (word, f" {word}")]
    encode = served.template.tokenizer.encode_batch_fast
    words_as_ids: list[list[int]] = []
    for at, encoded in enumerate(encode(spellings, add_special_tokens=False)):
        if len(encoded.ids) > MAX_BAD_WORD_TOKENS:
            where = f"bad_words[{at // 2}]"
            raise bad_value(where, f"at most {MAX_BAD_WORD_TOKENS} tokens long", words[at // 2])
        if at % 2 == 0:
            served.check_tokens(f"bad_words[{at // 2}]", encoded.ids)
        is_possible = max(encoded.ids, default=0) < served.vocab_size
        if encoded.ids and is_possible and encoded.ids not in words_as_ids:
            words_as_ids.append(encoded.ids)
    return words_as_ids


def sampling(
    request: ChatRequest, served: Served, seed: int, bad_words: list[list[int]]
) -> Sampling:
    """Return the request's parameters, else the model's defaults, else those of plain sampling."""

    def chosen(field: str, otherwise: float) -> float:
        given = (getattr(source, field) for source in (request, served.defaults))
        return next((value for value in given if value is not None), otherwise)

    top_k = int(chosen("top_k", 0))
    return Sampling(
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p", 1.0),
        top_k=top_k if 0 < top_k < served.vocab_size else 0,
        min_p=chosen("min_p", 0.0),
        repetition_penalty=chosen("repetition_penalty", 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=seed,
        logit_bias={int(key): float(bias) for key, bias in (request.logit_bias or {}).items()},
        allowed_tokens=request.allowed_token_ids or [],
        min_tokens=request.min_tokens or 0,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
        bad_words=bad_words,
    )


def wrapped(seed: int) -> int:
    """Return the seed modulo 2**64 as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
