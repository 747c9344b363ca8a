"""Messages between API processes and the engine process.

Every message is immutable, msgpack-encoded, and carries plain values only. Token ids and request
ids travel as packed little-endian arrays: one step of 256 requests is two byte strings, not 256
objects. A field that only one of the two processes needs does not belong here.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from nanovllm.experts import ExpertLoad
from nanovllm.look import Look, Steps

WORKER_BITS = 48  # request_id = (API worker << WORKER_BITS) | counter


class FinishReason(IntEnum):
    STOP = 1  # a stop token (end of sequence, stop_token_ids)
    LENGTH = 2  # max_new tokens, or the context is full
    ABORT = 3  # by the client's request, or because it disconnected
    ERROR = 4  # its logits were NaN or infinite; the text sent so far may be wrong
    FAILED = 5  # an exception in the engine that concerns this request only; see the log


class RefusalKind(IntEnum):
    TOO_LONG = 1  # can never fit: HTTP 400
    QUEUE_FULL = 2  # try again later: HTTP 503
    INVALID = 3  # the engine cannot honour a field: HTTP 400
    FAILED = 4  # its admission raised an exception, which is logged: HTTP 500
    BUSY = 5  # its grammar was not compiled in time, for want of CPU: HTTP 503
    NO_ADAPTER = 6  # its adapter was unloaded after the server checked the name: HTTP 404


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters. temperature == 0 means argmax; every default means "off"."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # any int64; the API process draws one when the client gave none
    logit_bias: dict[int, float] = {}
    allowed_tokens: list[int] = []  # empty: all
    min_tokens: int = 0  # stop_ids are impossible before this many output tokens
    logprobs: int = -1  # -1 = none; n = the chosen token's and the n best ones'
    bad_words: list[list[int]] = []  # sequences of token ids that may not occur


class Generate(Struct, frozen=True, tag="gen", array_like=True):
    request_id: int
    prompt: bytes  # int32 token ids, at least one
    max_new: int
    stop_ids: list[int]
    sampling: Sampling
    priority: int = 0  # lower is served first
    salt: str = ""  # requests share cached pages only within equal salts
    grammar: str = ""  # a structural tag (JSON) that the text must match from its first token
    adapter: str = ""  # name of an adapter; empty: the model alone
    lends: bool = False  # hold its pages for a decode server, if this is a prefill server
    ticket: str = ""  # of a prefill server that has computed the prompt


class Abort(Struct, frozen=True, tag="abort", array_like=True):
    request_id: int


class Unwanted(Struct, frozen=True, tag="unwanted", array_like=True):
    """The ticket of a request that was refused before the engine received it."""

    ticket: str


class LoadAdapter(Struct, frozen=True, tag="load", array_like=True):
    """Load an adapter from a folder in `adapters.folder`, under a name."""

    number: int  # of the message; its high bits are the worker, as in request ids
    name: str
    folder: str
    replaces: bool = False  # whether the name may be loaded already


class UnloadAdapter(Struct, frozen=True, tag="unload", array_like=True):
    number: int
    name: str


class AdapterAnswer(Struct, frozen=True, tag="adapter", array_like=True):
    number: int  # of the message
    error: str = ""  # empty: done, on all ranks
    digest: bytes = b""  # of the files of an adapter that was loaded


class Ready(Struct, frozen=True, tag="ready", array_like=True):
    """The engine's first message on every connection."""

    worker: int  # this connection's number, the high bits of its request ids
    model: str  # served name
    max_model_tokens: int
    vocab_size: int
    num_pages: int
    page_tokens: int
    num_slots: int
    # JSON, for records and logs: the recipe with every "auto" resolved except mixed_step_tokens.
    recipe: str = "{}"
    tier_pages: int = 0  # pages of host memory below the device
    adapters: dict[str, str] = {}  # folders of the loaded adapters, by name
    digests: dict[str, bytes] = {}  # likewise, of their files as they were read


class Started(Struct, frozen=True, array_like=True):
    """The request left the queue for the first time."""

    request_id: int
    num_cached: int  # prompt tokens found in the prefix cache
    num_loaded: int = 0  # of these, tokens that came from a tier below the device


class Finish(Struct, frozen=True, array_like=True):
    """Sent with, or after, the request's last tokens."""

    request_id: int
    reason: FinishReason
    handover: str = ""  # kv_transfer_params of the answer, in JSON; "" if no pages are held


class Refusal(Struct, frozen=True, array_like=True):
    request_id: int
    kind: RefusalKind
    message: str


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of one generated token and of its alternatives, best first."""

    request_id: int
    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


FETCH_BYTES = tuple(4.0**power for power in range(6, 18))
FETCH_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class TransferStats(Struct, kw_only=True):
    """Transfers of pages to and from other engines. All but two fields are counters."""

    num_leases: int = 0  # gauge of a prefill server: leases that are held
    num_leased_pages: int = 0  # gauge
    leases: dict[str, int] = {}  # "granted"; by their end; "late": messages after the end
    sent_bytes: int = 0
    tickets: dict[str, int] = {}  # of a decode server: "read", or the reason against
    num_failed: int = 0  # fetches
    fetched_bytes: int = 0
    fetches_by_bytes: list[int] = []  # with up to FETCH_BYTES[i] bytes; the last entry: more
    fetch_s: float = 0.0
    fetches_by_s: list[int] = []  # of up to FETCH_S[i] seconds; the last entry: more


class Stats(Struct, frozen=True, kw_only=True):
    """Statistics of an engine: current gauges, and counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_reason: dict[
        str, int
    ] = {}  # "capacity", "adapter", or "shared_prompt": another request computes it
    kv_usage: float = 0.0  # 0..1
    checkpoints: dict[str, int] = {}  # recurrent states for reuse: "places", "kept"
    checkpoint_events: dict[str, int] = {}  # "saved", "restored", "evicted"
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    generated_tokens: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # tokens computed in all steps
    steps_by_tokens: list[int] = []  # steps with up to STEP_TOKENS[i] tokens; the last entry: more
    host_bubble_s: float = 0.0  # time that the device waited for the host while there was work
    host_s: dict[str, float] = {}  # host time by part of a step: "plan", "launch", ...
    host_step_p50_s: float = 0.0  # median of their sum, over the latest thousand steps
    steps_by_mode: dict[str, int] = {}  # keys of plan.mode_key: "FULL/decode", "NONE/mixed", ...
    padded_tokens: int = 0
    num_drafts: int = 0  # rows with drafts, summed over steps
    draft_tokens: int = 0  # real drafts that were verified
    accepted_tokens: int = 0  # drafts that were accepted
    accepted_by_position: list[int] = []  # accepted drafts by position in their row
    num_compiling: int = 0  # requests that wait for their grammars; not in num_waiting
    num_matchers: int = 0  # grammars that running requests follow
    grammar_cache_bytes: int = 0  # memory of the compiled grammars in the cache
    grammar_failures: dict[str, int] = {}  # by reason: "invalid", "timeout", "died", "busy"
    experts: ExpertLoad | None = None  # only of models with experts
    # Cache tiers below the device (kv/tiers.py); empty if there are none. Gauges: "host.pages" and
    # "host.pages_used" (of page_tokens tokens each), "host.page_bytes" (of one rank), "arriving"
    # (requests that wait for a load), "host.queued" (pages to store), "host.loading" (pages in
    # loads). Counters of prompt tokens: "asked_tokens", "gpu.hit_tokens", "host.hit_tokens".
    # Other counters: "host.stored", "host.loaded", "host.dropped" (pages that were not stored),
    # "host.evicted" (pages), "host.failed" and "host.declined" (loads; the latter would cost more
    # than computing). Of rank 0: "host.store_bytes", "host.load_bytes", and the time of the copies
    # in seconds, "host.store_s" and "host.load_s". With a disk, also "disk.hit_tokens",
    # "disk.stored", "disk.loaded", "disk.dropped" and "disk.failed", which mean the same, and the
    # gauges "disk.pages" and "disk.pages_used": files of pages in the folder, one per rank.
    # On a decode server, "peer.hit_tokens", "peer.loaded" and "peer.failed" are those of pages of
    # prefill servers. "loaded_tokens" is the part of cached_tokens that came from these tiers.
    # All hit_tokens are counted at a request's first start, so those of the GPU and of these tiers
    # add up to cached_tokens.
    tiers: dict[str, float] = {}
    transfer: TransferStats | None = None  # only of prefill and decode servers
    # Slots for adapters on the device: "capacity", "loaded" (with an adapter), and "in_use" (by
    # requests in slots of the batch). Empty without adapters.
    adapter_slots: dict[str, int] = {}
    # Requests by adapter: "running", "waiting". Names of unloaded adapters are left out.
    adapters: dict[str, dict[str, int]] = {}


class StepOutput(Struct, frozen=True, tag="out", array_like=True):
    """Output of one engine step for one API process."""

    ids: bytes = b""  # int64 request ids of the rows that gained tokens
    tokens: bytes = b""  # int32, in row order
    counts: bytes = b""  # int32 tokens per row; empty means one each
    started: list[Started] = []
    finished: list[Finish] = []
    refused: list[Refusal] = []
    logprobs: list[TokenLogprobs] = []
    stats: Stats | None = None


class Beat(Struct, frozen=True, tag="beat", array_like=True):
    """Heartbeat of the engine process, sent twice a second by a thread of its own.

    A stopped process sends none. The fields show whether the step loop hangs.
    """

    step_age_s: float  # time since the loop last made progress; 0 while it is idle
    late_s: float  # the part of step_age_s beyond the limit that earlier steps suggest


ToEngine = Generate | Abort | Unwanted | Look | LoadAdapter | UnloadAdapter
FromEngine = Ready | StepOutput | Beat | Steps | AdapterAnswer
