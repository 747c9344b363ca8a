"""State of a chat request, sans-I/O: ChatRequest to Generate messages, tokens to the answer.

Holds the text of a request from the first token to the last. Independent of sockets and asyncio;
the engine is reached through two callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from nanovllm.server.answers import (
    DONE,
    ChunkWriter,
    Details,
    WholeWriter,
    chunk_head,
    usage_chunk,
)
from nanovllm.server.counted import CountedWriter
from nanovllm.server.detokenize import Detokenizer, StopStrings
from nanovllm.server.errors import ApiError
from nanovllm.server.orders import generates
from nanovllm.server.parsers.base import Event, Reasoning, joined
from nanovllm.server.protocol import ChatRequest, StreamOptions
from nanovllm.server.served import Served
from nanovllm.server.shapes import (
    ChatCompletion,
    CompletionDetails,
    PromptDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from nanovllm.server.template import Prompt
from nanovllm.wire import (
    Finish,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    TokenLogprobs,
)

REFUSALS = {  # kind -> status, param, code
    RefusalKind.QUEUE_FULL: (503, None, "queue_full"),
    RefusalKind.TOO_LONG: (400, "messages", "context_length_exceeded"),
    RefusalKind.FAILED: (500, None, "admission_failed"),
    RefusalKind.BUSY: (503, None, "compiler_busy"),
}
CORRUPTED = "corrupted_output"
FAILURES = {  # message, code
    FinishReason.ERROR: (
        "the model produced NaN or infinite logits; this answer is invalid",
        CORRUPTED,
    ),
    FinishReason.FAILED: (
        "the engine failed while computing this answer; see the server's log",
        "internal_error",
    ),
}
# An ABORT only confirms our own Abort; the answer is over by then.
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ChatSession:
    """The choices of one request and the answer they form.

    A streaming answer grows in `out`, ready to send. Any other is `body()` once `is_done`. `update`
    is called after each step that changes the session.
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
        """`seed` serves a request without one. Raise ApiError if the prompt does not fit."""
        self.request = request
        self.served = served
        self.out: list[bytes] = []
        self.failure: ApiError | None = None
        self.is_started = False
        self.num_prompt = len(prompt.ids)
        self.num_cached = 0
        self.prompt_ids = prompt.ids if request.return_token_ids else []
        self.num_tokens = 0  # of all choices
        self.update = update
        self.abort = abort
        self._response_id = response_id
        self._created = created
        self._model = request.model or served.name
        self._head = chunk_head(response_id, created, self._model)
        options = request.stream_options or StreamOptions()
        self._ends_with_usage = options.include_usage
        streaming = CountedWriter if options.continuous_usage_stats else ChunkWriter
        twice = served.reasoning_content
        self._whole: list[WholeWriter] = []
        self.choices: list[Choice] = []
        messages = generates(request, prompt, served, seed=seed, new_id=new_id)
        for index, message in enumerate(messages):
            writer: ChunkWriter | WholeWriter
            if request.stream:
                writer = streaming(self._head, index, self.out, reasoning_content=twice)
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
        return self._usage(self.num_tokens, sum(choice.num_reasoning for choice in self.choices))

    def usage_told(self) -> Usage:
        """Return the usage covered by the chunks written so far."""
        num_tokens = sum(choice.num_told for choice in self.choices)
        return self._usage(num_tokens, sum(choice.reasoning_told for choice in self.choices))

    def _usage(self, num_tokens: int, num_reasoning: int) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=num_tokens,
            total_tokens=self.num_prompt + num_tokens,
            prompt_tokens_details=PromptDetails(self.num_cached),
            completion_tokens_details=CompletionDetails(num_reasoning),
        )

    def body(self) -> bytes:
        wanted = bool(self.request.logprobs)
        choices = [writer.choice(with_logprobs=wanted) for writer in self._whole]
        completion = ChatCompletion(
            id=self._response_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self.usage(),
            prompt_token_ids=self.prompt_ids or UNSET,
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
        """Record a failure. The first one decides the error of the whole request."""
        self.failure = self.failure or failure

    def abort_all(self) -> None:
        for choice in self.choices:
            if not choice.reason:
                self.abort(choice.message.request_id)


class Choice:
    """Sink of one engine request, which turns its tokens into text and the text into events."""

    def __init__(
        self,
        session: ChatSession,
        message: Generate,
        writer: ChunkWriter | WholeWriter,
        turn: str,
    ) -> None:
        request = session.request
        self.message = message
        self.reason = ""  # finish reason; "" = running
        self.num_reasoning = 0
        self.num_told = self.reasoning_told = 0  # tokens in written chunks that carry the usage
        self.started = session.start
        self.flush = session.update
        if isinstance(writer, CountedWriter):
            writer.usage = self._usage_so_far
            self.flush = self._flush
        self._session = session
        self._writer = writer
        self._num_tokens = 0
        self._logprobs: list[TokenLogprob] = []  # of tokens still to come in this step
        self._details = Details() if request.logprobs or request.return_token_ids else None
        self._hides_reasoning = request.include_reasoning is False
        self._interval = (request.stream_interval or 1) if request.stream else 1
        self._waiting: list[Event] = []
        self._due_at = 0  # number of tokens at which events are written next
        include_stop = bool(request.include_stop_str_in_output)
        self._hidden_ids = frozenset(() if include_stop else message.stop_ids)
        skip_special = request.skip_special_tokens is not False
        self._vocabulary = session.served.vocabulary
        self._detokenizer = Detokenizer(self._vocabulary, skip_special=skip_special)
        self._stops = None
        if request.stops:
            stops = {*request.stops, *map(self._vocabulary.marked, request.stops)}
            self._stops = StopStrings(sorted(stops), include=include_stop)
        self._parser = session.served.parser(
            turn,
            request.schemas,
            is_spelled=request.spells_markers,
            mends=request.constrained_by is None,
        )

    def logprobs(self, entry: TokenLogprobs) -> None:
        tops = [
            TopLogprob(*self._shown(token_id, logprob))
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        self._logprobs.append(TokenLogprob(*self._shown(entry.token_id, entry.logprob), tops))

    def tokens(self, token_ids: Sequence[int]) -> None:
        """Take a step's tokens. They are parsed one by one and written together."""
        self._due_at = max(self._due_at, self._num_tokens + len(token_ids))
        for token_id in token_ids:
            if not self.reason:  # otherwise a stop string came before
                self._token(token_id)
        if self._waiting:
            self._write([])

    def finish(self, finish: Finish) -> None:
        if finish.reason in FAILURES:
            self.reason = "error"
            text, code = FAILURES[finish.reason]
            self._session.fail(ApiError(500, text, code=code))
            return
        if text := self._detokenizer.finish():
            self._show(text)
        if not self.reason:
            self._end(REASONS[finish.reason])

    def refused(self, refusal: Refusal) -> None:
        otherwise = 400, self._session.request.constrained_by, "invalid_value"
        status, param, code = REFUSALS.get(refusal.kind, otherwise)
        self._session.fail(ApiError(status, refusal.message, param=param, code=code))

    def lost(self) -> None:
        text = "the engine failed before this request was finished"
        self._session.fail(ApiError(503, text, code="engine_failed"))

    def _flush(self) -> None:
        """Replace `flush` if chunks carry the usage."""
        self._writer.flush()
        self._session.update()

    def _usage_so_far(self) -> Usage:
        """Return the usage for the chunk being written, which covers all tokens so far."""
        self.num_told = self._num_tokens
        self.reasoning_told = self.num_reasoning
        return self._session.usage_told()

    def _token(self, token_id: int) -> None:
        session = self._session
        if not self._num_tokens:
            self._writer.begin(session.prompt_ids)
        session.num_tokens += 1
        self._num_tokens += 1
        if self._parser.in_reasoning:
            self.num_reasoning += 1
        if self._details is not None:
            self._details.logprobs += self._logprobs[:1]
            del self._logprobs[:1]
            if session.request.return_token_ids:
                self._details.token_ids.append(token_id)
        if token_id in self._hidden_ids:
            return
        if text := self._detokenizer.feed(token_id):
            self._show(text)

    def _show(self, text: str) -> None:
        """Pass raw text to the parser, up to the first stop string."""
        is_stopped = False
        if self._stops is not None and self._num_tokens > self.message.sampling.min_tokens:
            text, is_stopped = self._stops.feed(text)
        if text:
            self._write(self._parser.feed(text))
        if is_stopped:
            self._session.abort(self.message.request_id)
            self._end("stop", is_cut=True)

    def _end(self, reason: str, *, is_cut: bool = False) -> None:
        """End the choice. `is_cut` means that a stop string ended it, perhaps within a call."""
        if self._stops is not None and (text := self._stops.finish()):
            self._write(self._parser.feed(text))
        self._write(self._parser.finish(), is_last=True)
        is_cut = is_cut and self._parser.is_amid_call
        is_named = self._session.request.choice_of_tools.is_named
        if reason == "stop" and self._writer.num_calls and not is_named and not is_cut:
            reason = "tool_calls"  # as with OpenAI, only if the model was free to call
        self.reason = reason
        self._writer.end(reason, self._details)
        self._session.end_choice()

    def _write(self, events: list[Event], *, is_last: bool = False) -> None:
        if self._hides_reasoning and any(isinstance(event, Reasoning) for event in events):
            events = [event for event in events if not isinstance(event, Reasoning)]
            self._details = self._details and Details()
        if self._num_tokens < self._due_at and not is_last:
            self._waiting += events
            return
        if self._waiting:
            events, self._waiting = joined(self._waiting + events), []
        if events:
            self._due_at = self._num_tokens + self._interval
        for event in events:
            self._writer.write(event, self._details)
            if self._details is not None:
                self._details = Details()

    def _shown(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        piece = self._vocabulary.bytes_of(token_id)
        text = piece.decode(errors="replace")
        if self._session.request.return_tokens_as_token_ids:
            text = f"token_id:{token_id}"  # parts of characters may look alike, ids do not
        # JSON has no infinity; -9999.0 stands for the -inf of a forbidden token.
        return text, max(logprob, -9999.0), list(piece)
