"""Seeded loads: token prompts for the engine, text prompts and arrival times for a server.

Knows neither HTTP nor the engine. The offline shapes are the ones other engines were measured on:
same generator, same seed, therefore the same token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.wire import Sampling

MAX_PROMPT_ID = 10_000
SHAPES = {  # requests, prompt tokens, output tokens
    "bs1": (1, 128, 512),
    "bs64": (64, 1024, 256),
    "bs256": (256, 128, 256),
    "prefill": (16, 4000, 1),
}
OFFLINE_NAMES = ("w1", "w1-top", *SHAPES)
RECORDS = {
    "name": "records",
    "strict": True,
    "schema": {
        "type": "array",
        "minItems": 1000,
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "name": {"type": "string", "maxLength": 20},
                "kind": {"enum": ["sensor", "engine", "valve", "pump"]},
                "values": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
                "in_use": {"type": "boolean"},
            },
            "required": ["id", "name", "kind", "values", "in_use"],
            "additionalProperties": False,
        },
    },
}


class TokenLoad(Struct, frozen=True):
    """Requests that are all submitted at once, and may not stop early."""

    name: str
    prompts: list[list[int]]
    outputs: list[int]  # tokens to generate, per prompt
    sampling: Sampling

    def warm_up(self, seed: int, vocab_size: int) -> TokenLoad:
        """Other prompts of the same shapes with short outputs that end at as different times."""
        other = token_load(self.name, seed=seed, vocab_size=vocab_size)
        return replace(other, outputs=[1 + num // 32 for num in other.outputs])


def token_load(name: str, *, seed: int, vocab_size: int) -> TokenLoad:
    """One of OFFLINE_NAMES. Ids wrap around in vocabularies below 10,001 tokens.

    "w1-top" is "w1" cut as Qwen3's own generation_config.json asks for.
    """
    rng = Random(seed)
    sampling = Sampling(temperature=0.6 if name.startswith("w1") else 0.0)

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randint(0, MAX_PROMPT_ID) for _ in range(num_tokens)]

    if name == "w1-top":
        sampling = replace(sampling, top_k=20, top_p=0.95)
    if name.startswith("w1"):
        prompts = [prompt(rng.randint(100, 1024)) for _ in range(256)]
        outputs = [rng.randint(100, 1024) for _ in range(256)]
    else:
        count, prompt_tokens, output_tokens = SHAPES[name]
        prompts = [prompt(prompt_tokens) for _ in range(count)]
        outputs = [output_tokens] * count
    if vocab_size <= MAX_PROMPT_ID:
        prompts = [[token % vocab_size for token in tokens] for tokens in prompts]
    return TokenLoad(name, prompts, outputs, sampling)


class Load(Struct, frozen=True, kw_only=True):
    """What a server is asked. Exactly one of `concurrency` and `request_rate` is set."""

    num_prompts: int
    input_len: int  # tokens, chat template included
    output_len: int
    range_ratio: float = 0.0  # lengths are uniform in [(1 - ratio) * len, (1 + ratio) * len]
    concurrency: int | None = None  # closed loop: so many requests in flight, always
    request_rate: float | None = None  # open loop: so many arrivals a second, come what may
    burstiness: float = 1.0  # shape of the gamma-distributed gaps: 1 is Poisson, below is burstier
    seed: int = 0
    temperature: float = 0.6
    ignore_eos: bool = True
    structured: bool = False  # every answer follows RECORDS, which no output length gets to end

    @property
    def name(self) -> str:
        name = f"c{self.concurrency}" if self.request_rate is None else f"rate{self.request_rate:g}"
        return f"{name}-structured" if self.structured else name

    def warm_up(self, count: int) -> Load:
        """`count` other prompts of the same lengths with at most 16 output tokens, closed loop."""
        return replace(
            self,
            num_prompts=count,
            output_len=min(self.output_len, 16),
            concurrency=min(count, self.concurrency or count),
            request_rate=None,
            seed=self.seed + 1_000_003,
        )


class Wording:
    """Texts of exactly so many prompt tokens, from words whose tokens are known.

    A text is LEAD and words after it. Every word costs the same in every place, because tokenizers
    cut text at spaces first.
    """

    def __init__(self, overhead: int, costs: Mapping[str, int]) -> None:
        """`overhead`: tokens of a prompt that is LEAD alone, chat template included."""
        self.overhead = overhead
        self._costs = costs
        self._fitting: list[list[str]] = [[]]  # by the tokens that are left: words that may follow

    def shortest(self) -> int:
        """Prompt tokens of LEAD and one word."""
        return self.overhead + min(self._costs.values())

    def reaches(self, num_tokens: int) -> bool:
        """Whether any text has so many tokens."""
        return num_tokens > self.overhead and bool(self._words_for(num_tokens - self.overhead))

    def text(self, rng: Random, num_tokens: int) -> str:
        """A message whose prompt has so many tokens, if its words can make up that length."""
        left, words = num_tokens - self.overhead, [LEAD]
        while left:
            words.append(rng.choice(self._words_for(left)))
            left -= self._costs[words[-1]]
        return " ".join(words)

    def _words_for(self, left: int) -> list[str]:
        """Those after which the rest can be made of words again, or nothing is left."""
        fitting = self._fitting
        while len(fitting) <= left:
            rests = ((word, len(fitting) - cost) for word, cost in self._costs.items())
            words = [w for w, rest in rests if rest == 0 or (rest > 0 and fitting[rest])]
            fitting.append(fitting[-1] if words == fitting[-1] else words)
        return fitting[left]


def chat_body(load: Load, model: str, text: str) -> dict[str, object]:
    """What makes the prompt of a request, and how its tokens are chosen."""
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": load.temperature,
        "ignore_eos": load.ignore_eos,
    }
    if load.structured:  # without a thought before it, which follows no schema
        body["response_format"] = {"type": "json_schema", "json_schema": RECORDS}
        body["chat_template_kwargs"] = {"enable_thinking": False}
        del body["ignore_eos"]  # the schema says where an answer may end
    return body


def chat_bodies(load: Load, model: str, text: Callable[[Random, int], str]) -> list[bytes]:
    """The JSON bodies of a run; `text` makes one of so many prompt tokens."""
    rng = Random(load.seed)
    bodies = []
    for _ in range(load.num_prompts):
        body = chat_body(load, model, text(rng, _length(rng, load.input_len, load.range_ratio)))
        body |= {
            "max_tokens": _length(rng, load.output_len, load.range_ratio),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        bodies.append(msgspec.json.encode(body))
    return bodies


def arrivals(load: Load) -> list[float]:
    """Seconds after the start at which each request is due; empty for a closed loop."""
    if load.request_rate is None:
        return []
    rng = Random(f"arrivals {load.seed}")
    shape = load.burstiness
    at, times = 0.0, []
    for _ in range(load.num_prompts):
        times.append(at)
        at += rng.gammavariate(shape, 1.0 / (load.request_rate * shape))
    return times


def lengths(mean: int, ratio: float) -> range:
    return range(max(1, round(mean * (1.0 - ratio))), max(1, round(mean * (1.0 + ratio))) + 1)


def _length(rng: Random, mean: int, ratio: float) -> int:
    return rng.choice(lengths(mean, ratio))


LEAD = "Words:"
# Short and common, so that most tokenizers spend one token on each.
TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work number night
point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea kid body information back parent face level
office door health person art war history party result change morning reason research girl guy
moment air teacher force education foot boy age policy music market sense nation plan college
interest death experience effect use class control field development role effort rate heart
drug show leader light voice wife police mind price report decision son view town road drive
arm difference value building action season society tax director record paper space ground form
event official matter center couple site project base activity star table need court oil half
"""
WORDS = tuple(TEXT.split())
