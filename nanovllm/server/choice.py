"""One choice of a chat request, sans-I/O: tokens to text, text to events, events to a writer.

Holds the text of a choice from the first token to the last. Independent of sockets, asyncio and the
engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.server.answers import ChunkWriter, Details, Tally, WholeWriter
from nanovllm.server.detokenize import Detokenizer, StopStrings
from nanovllm.server.errors import ApiError
from nanovllm.server.parsers.base import Event, Reasoning, joined
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.served import Served
from nanovllm.server.shapes import TokenLogprob, TopLogprob
from nanovllm.server.template import Prompt
from nanovllm.wire import (
    Finish,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    Started,
    TokenLogprobs,
)

REFUSALS = {  # kind -> status, param, code
    RefusalKind.QUEUE_FULL: (503, None, "queue_full"),
    RefusalKind.TOO_LONG: (400, "messages", "context_length_exceeded"),
    RefusalKind.FAILED: (500, None, "admission_failed"),
    RefusalKind.BUSY: (503, None, "compiler_busy"),
    RefusalKind.NO_ADAPTER: (404, "model", "model_not_found"),
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


class Choice:
    """Sink of one engine request, which turns its tokens into text and the text into events.

    After each step the stream reads `reason` and `failure`.
    """

    def __init__(
        self,
        request: ChatRequest,
        prompt: Prompt,
        served: Served,
        message: Generate,
        *,
        writer: ChunkWriter | WholeWriter,
        tally: Tally,
        index: int,
    ) -> None:
        """`tally.choices[index]` holds the counts of this choice."""
        self.message = message
        self._writer = writer
        self.reason = ""  # finish reason; "" = running
        self.failure: ApiError | None = None
        self.handover = ""  # kv_transfer_params of the answer, in JSON
        self._is_cut = False  # a stop string ended the text
        self._last_id = -1  # of the latest token
        self._request = request
        self._prompt_ids = prompt.ids if request.return_token_ids else []
        self._tally = tally
        self._counts = tally.choices[index]
        self._logprobs: list[TokenLogprob] = []  # of tokens still to come in this step
        self._details = Details() if request.logprobs or request.return_token_ids else None
        self._hides_reasoning = request.include_reasoning is False
        self._interval = (request.stream_interval or 1) if request.stream else 1
        self._waiting: list[Event] = []
        self._due_at = 0  # number of tokens at which events are written next
        include_stop = bool(request.include_stop_str_in_output)
        self._hidden_ids = frozenset(() if include_stop else message.stop_ids)
        skip_special = request.skip_special_tokens is not False
        self._vocabulary = served.vocabulary
        self._detokenizer = Detokenizer(self._vocabulary, skip_special=skip_special)
        self._stops = None
        if request.stops:
            marked = {self._vocabulary.marked(stop): stop for stop in request.stops}
            self._stop_of = marked | {stop: stop for stop in request.stops}  # by their two forms
            self._stops = StopStrings(sorted(self._stop_of), include=include_stop)
        self._parser = served.parser(
            prompt.turn,
            request.schemas,
            is_spelled=request.spells_markers,
            mends=request.constrained_by is None,
        )

    def started(self, start: Started) -> None:
        if self._tally.num_cached is None:
            self._tally.num_cached, self._tally.num_loaded = start.num_cached, start.num_loaded

    def logprobs(self, entry: TokenLogprobs) -> None:
        tops = [
            TopLogprob(*self._shown(token_id, logprob))
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        self._logprobs.append(TokenLogprob(*self._shown(entry.token_id, entry.logprob), tops))

    def tokens(self, token_ids: Sequence[int]) -> bool:
        """Take a step's tokens, which are parsed one by one and written together.

        Return True if a stop string ended the text, so that the engine must not continue.
        """
        self._due_at = max(self._due_at, self._counts.tokens + len(token_ids))
        for token_id in token_ids:
            if not self.reason:  # otherwise a stop string came before
                self._token(token_id)
        if self._waiting:
            self._write([])
        return self._is_cut

    def finish(self, finish: Finish) -> None:
        self.handover = finish.handover
        if finish.reason in FAILURES:
            self.reason = "error"
            text, code = FAILURES[finish.reason]
            self.failure = ApiError(500, text, code=code)
            return
        if text := self._detokenizer.finish():
            self._show(text)
        if not self.reason:
            self._end(REASONS[finish.reason])

    def refused(self, refusal: Refusal) -> None:
        otherwise = 400, self._request.constrained_by, "invalid_value"
        status, param, code = REFUSALS.get(refusal.kind, otherwise)
        self.failure = ApiError(status, refusal.message, param=param, code=code)

    def _token(self, token_id: int) -> None:
        counts = self._counts
        if not counts.tokens:
            self._writer.begin(self._prompt_ids)
        counts.tokens += 1
        self._last_id = token_id
        if self._parser.in_reasoning:
            counts.reasoning += 1
        if self._details is not None:
            self._details.logprobs += self._logprobs[:1]
            del self._logprobs[:1]
            if self._request.return_token_ids:
                self._details.token_ids.append(token_id)
        if token_id in self._hidden_ids:
            return
        if text := self._detokenizer.feed(token_id):
            self._show(text)

    def _show(self, text: str) -> None:
        """Pass raw text to the parser, up to the first stop string."""
        is_stopped = False
        if self._stops is not None and self._counts.tokens > self.message.sampling.min_tokens:
            text, is_stopped = self._stops.feed(text)
        if text:
            self._write(self._parser.feed(text))
        if is_stopped:
            self._is_cut = True
            self._end("stop")

    def _end(self, reason: str) -> None:
        """End the choice. A stop string may have cut it within a call."""
        if self._stops is not None and (text := self._stops.finish()):
            self._write(self._parser.feed(text))
        self._write(self._parser.finish(), is_last=True)
        is_open = self._is_cut and self._parser.is_amid_call
        is_named = self._request.choice_of_tools.is_named
        if reason == "stop" and self._writer.num_calls and not is_named and not is_open:
            reason = "tool_calls"  # as with OpenAI, only if the model was free to call
        self.reason = reason
        self._writer.end(reason, self._details, self._stop_reason())

    def _stop_reason(self) -> str | int | None:
        """Return the client's stop string or stop token that ended the choice, as vLLM does."""
        if self._stops is not None and self._stops.matched is not None:
            return self._stop_of[self._stops.matched]
        is_stop = self.reason != "length" and self._last_id in (self._request.stop_token_ids or ())
        return self._last_id if is_stop else None

    def _write(self, events: list[Event], *, is_last: bool = False) -> None:
        if self._hides_reasoning and any(isinstance(event, Reasoning) for event in events):
            events = [event for event in events if not isinstance(event, Reasoning)]
            self._details = self._details and Details()
        if self._counts.tokens < self._due_at and not is_last:
            self._waiting += events
            return
        if self._waiting:
            events, self._waiting = joined(self._waiting + events), []
        if events:
            self._due_at = self._counts.tokens + self._interval
        for event in events:
            self._writer.write(event, self._details)
            if self._details is not None:
                self._details = Details()

    def _shown(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        piece = self._vocabulary.bytes_of(token_id)
        text = piece.decode(errors="replace")
        if self._request.return_tokens_as_token_ids:
            text = f"token_id:{token_id}"  # parts of characters may look alike, ids do not
        # JSON has no infinity; -9999.0 stands for the -inf of a forbidden token.
        return text, max(logprob, -9999.0), list(piece)
