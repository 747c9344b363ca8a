"""One chat request, sans-I/O: a ChatRequest becomes Generates, tokens become an answer.

Owns a request's text from its first token to its last. Knows neither sockets nor asyncio; the
engine is two callbacks away.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from nanovllm.server.answers import (
    DONE,
    ChoiceWriter,
    ChunkWriter,
    WholeWriter,
    chunk_head,
    usage_chunk,
)
from nanovllm.server.detokenize import StopStrings
from nanovllm.server.errors import ApiError
from nanovllm.server.parsers.base import Event
from nanovllm.server.protocol import (
    ChatCompletion,
    ChatRequest,
    CompletionDetails,
    PromptDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from nanovllm.server.served import GenerationConfig, Served
from nanovllm.server.template import Prompt
from nanovllm.wire import (
    Finish,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    Sampling,
    TokenLogprobs,
)

# ABORT is the answer to our own Abort, after which nobody listens.
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ChatSession:
    """The choices of one request, and what they have to say.

    Streaming answers grow in `out`, ready to send; `body()` is the other kind once `is_done`.
    `update` is called whenever a step has changed something.
    """

    def __init__(
        self,
        request: ChatRequest,
        prompt: Prompt,
        served: Served,
        *,
        response_id: str,
        created: int,
        seed: int,
        new_id: Callable[[], int],
        abort: Callable[[int], None],
        update: Callable[[], None],
    ) -> None:
        """`seed`: for a request without one. Raises ApiError if the prompt does not fit."""
        self.request = request
        self.served = served
        self.out: list[bytes] = []
        self.failure: ApiError | None = None
        self.is_started = False
        self.num_prompt = len(prompt.ids)
        self.num_cached = 0
        self.num_tokens = 0  # of all choices
        self.num_reasoning = 0
        self.update = update
        self.abort = abort
        self._response_id = response_id
        self._created = created
        self._head = chunk_head(response_id, created, served.name)
        options = request.stream_options
        self._ends_with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        messages = generates(request, prompt, served, seed, new_id)
        twice = served.reasoning_content
        self._whole: list[WholeWriter] = []
        self.choices: list[Choice] = []
        for index, message in enumerate(messages):
            writer: ChoiceWriter
            if request.stream:
                usage = self.usage if continuous else None
                head = self._head
                writer = ChunkWriter(head, index, self.out, usage, reasoning_content=twice)
            else:
                writer = WholeWriter(index, reasoning_content=twice)
                self._whole.append(writer)
            self.choices.append(Choice(self, message, writer, prompt.turn))
        self._num_open = len(self.choices)

    @property
    def is_done(self) -> bool:
        return not self._num_open

    @property
    def finish_reasons(self) -> str:
        return ",".join(sorted({choice.reason for choice in self.choices if choice.reason}))

    def usage(self) -> Usage:
        return Usage(
            self.num_prompt,
            self.num_tokens,
            self.num_prompt + self.num_tokens,
            PromptDetails(self.num_cached),
            CompletionDetails(self.num_reasoning),
        )

    def body(self) -> bytes:
        wanted = bool(self.request.logprobs)
        choices = [writer.choice(with_logprobs=wanted) for writer in self._whole]
        completion = ChatCompletion(
            self._response_id, self._created, self.served.name, choices, self.usage()
        )
        return msgspec.json.encode(completion)

    def start(self, num_cached: int) -> None:
        if not self.is_started:
            self.is_started = True
            self.num_cached = num_cached

    def end_choice(self) -> None:
        self._num_open -= 1
        if self.is_done and self.request.stream:
            if self._ends_with_usage:
                self.out.append(usage_chunk(self._head, self.usage()))
            self.out.append(DONE)

    def fail(self, failure: ApiError) -> None:
        """The first failure is the whole request's; nothing more is wanted from the engine."""
        if self.failure is None:
            self.failure = failure
            self.abort_all()

    def abort_all(self) -> None:
        for choice in self.choices:
            if not choice.reason:
                self.abort(choice.message.request_id)


class Choice:
    """The sink of one engine request: its tokens become text, the text events."""

    def __init__(
        self, session: ChatSession, message: Generate, writer: ChoiceWriter, turn: str
    ) -> None:
        request = session.request
        self.message = message
        self.reason = ""  # why it ended
        self.flush = session.update
        self._session = session
        self._writer = writer
        self._num_tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._include_stop = bool(request.include_stop_str_in_output)
        self._stop_ids = frozenset(message.stop_ids)
        skip_special = request.skip_special_tokens is not False
        self._vocabulary = session.served.vocabulary
        self._detokenizer = self._vocabulary.detokenizer(skip_special=skip_special)
        self._stops = None
        if request.stops:
            stops = {*request.stops, *map(self._vocabulary.marked, request.stops)}
            self._stops = StopStrings(sorted(stops), include=self._include_stop)
        self._parser = session.served.parser(turn, request.schemas)

    def started(self, num_cached: int) -> None:
        self._session.start(num_cached)

    def logprobs(self, entry: TokenLogprobs) -> None:
        tops = [
            TopLogprob(*self._shown(token_id, logprob))
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        self._logprobs.append(TokenLogprob(*self._shown(entry.token_id, entry.logprob), tops))

    def tokens(self, token_ids: Sequence[int]) -> None:
        session = self._session
        count = len(token_ids)
        session.num_tokens += count
        if not self._num_tokens:
            self._writer.begin()
        self._num_tokens += count
        if self._parser.in_reasoning:
            session.num_reasoning += count
        if token_ids[-1] in self._stop_ids and not self._include_stop:
            token_ids = token_ids[:-1]
        text = self._detokenizer.feed(token_ids)
        if text:
            self._show(text)

    def finish(self, finish: Finish) -> None:
        if text := self._detokenizer.finish():
            self._show(text)
        if not self.reason:
            self._end(REASONS[finish.reason])

    def refused(self, refusal: Refusal) -> None:
        if refusal.kind == RefusalKind.QUEUE_FULL:
            failure = ApiError(503, refusal.message, code="queue_full")
        elif refusal.kind == RefusalKind.TOO_LONG:
            code = "context_length_exceeded"
            failure = ApiError(400, refusal.message, param="messages", code=code)
        else:
            failure = ApiError(400, refusal.message, code="invalid_value")
        self._session.fail(failure)

    def lost(self) -> None:
        text = "the engine failed before this request was finished"
        self._session.fail(ApiError(503, text, code="engine_failed"))

    def _show(self, text: str) -> None:
        """Raw text, stop strings included, reaches the parser up to the first stop string."""
        is_stopped = False
        if self._stops is not None and self._num_tokens > self.message.sampling.min_tokens:
            text, is_stopped = self._stops.feed(text)
        if text:
            self._write(self._parser.feed(text))
        if is_stopped:
            self._session.abort(self.message.request_id)
            self._end("stop")

    def _end(self, reason: str) -> None:
        if self._stops is not None and (text := self._stops.finish()):
            self._write(self._parser.feed(text))
        self._write(self._parser.finish())
        if reason == "stop" and self._writer.num_calls:
            reason = "tool_calls"
        self.reason = reason
        self._writer.end(reason, self._logprobs)
        self._session.end_choice()

    def _write(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.write(event, self._logprobs)
            if self._logprobs:
                self._logprobs = []

    def _shown(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        piece = self._vocabulary.bytes_of(token_id)
        # JSON has no infinity; a forbidden token's is the most negative number clients expect.
        return piece.decode(errors="replace"), max(logprob, -9999.0), list(piece)


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
    packed = array("i", prompt.ids).tobytes()
    return [
        Generate(
            request_id=new_id(),
            prompt=packed,
            max_new=room if limit is None else min(limit, room),
            stop_ids=sorted(stop_ids),
            sampling=sampling(request, served.defaults, wrapped(first_seed + index)),
            priority=request.priority or 0,
            salt=request.cache_salt or "",
        )
        for index in range(request.num_choices)
    ]


def sampling(request: ChatRequest, defaults: GenerationConfig, seed: int) -> Sampling:
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
        repetition_penalty=chosen("repetition_penalty", 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=seed,
        logit_bias=request.logit_bias or {},
        min_tokens=request.min_tokens or 0,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
    )


def wrapped(seed: int) -> int:
    """Into 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63
