"""One run on a server: query the server, and distribute the load over client processes."""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from threading import BrokenBarrierError
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.bench import client
from nanovllm.bench.agents import AgentLoad, agent_facts
from nanovllm.bench.client import Done, TokenCounts
from nanovllm.bench.measure import Advance, Outcome, ProgressBar, concluded, now
from nanovllm.bench.record import without_secrets
from nanovllm.bench.report import engine_facts, samples_of, speculation
from nanovllm.bench.started import LiveServer, cpu_facts, cpu_s
from nanovllm.bench.workload import LEAD, WORDS, Message, Wording, Workload, user
from nanovllm.config import Config, ConfigError
from nanovllm.typed_yaml import NOT_JSON

EXPERTS = [f"/debug/experts?engine={at}" for at in range(64)]  # 404 after the last engine
ROUTE = re.compile(r"(/v1(/chat/completions|/models)?)?/*$")  # path of a copied address
DRAFTS = "vllm:spec_decode_num_drafts_total"  # metric of servers with speculative decoding
ServerLoad = Workload | AgentLoad
SCRAPE_S = 1.0
PROGRESS_S = 0.2
SOME_WORDS = WORDS[:64]  # sufficient for distinct prompts


T = TypeVar("T")


class _Card(Struct):
    """A model in a server's list."""

    id: str
    max_model_len: int | None = None
    owned_by: str | None = None
    parent: str | None = None  # of an adapter


class _Models(Struct):
    data: list[_Card]


class _Whole(Struct):
    """An answer that is not streamed."""

    usage: TokenCounts


class ServerFacts(Struct, frozen=True):
    """Properties of a server, and texts with exact numbers of its tokens."""

    model: str
    engine: str  # name and version, as in `vllm 0.26.0`
    wording: Wording
    has_drafts: bool  # a step may give a request several tokens
    names: Sequence[str]  # values of the field model that requests have in turn


class _Api:
    """Client for the requests that are not measured."""

    def __init__(self, url: str, api_key: str | None, prefill_url: str = "") -> None:
        check_url("--url", url)
        if prefill_url:
            check_url("--prefill-url", prefill_url)
        self.prefill_url, url = ROUTE.sub("", prefill_url), ROUTE.sub("", url)
        self.url, self.api_key = url, api_key
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        # Proxies of the environment must not be used between a benchmark and its server.
        self.http = httpx.Client(base_url=url, headers=headers, timeout=120.0, trust_env=False)

    def call(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            reply = self.http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"no server answers at {self.url} ({error}); start one with `nanovllm serve`, "
                "or name another with --url"
            ) from None
        if reply.status_code != 200:
            raise ConfigError(f"{self.url}{path}: HTTP {reply.status_code}: {reply.text[:300]}")
        return reply

    def answer(self, method: str, path: str, kind: type[T], body: object = None) -> T:
        """Return an answer in JSON. Raise ConfigError if it has another form."""
        reply = self.call(method, path, body)
        try:
            return msgspec.json.decode(reply.content, type=kind)
        except NOT_JSON as error:
            raise ConfigError(
                f"{self.url}{path} does not answer as OpenAI's API does ({error}); name a server "
                f"of it with --url. The answer begins with {reply.content[:100]!r}"
            ) from None

    def page(self, path: str) -> str:
        """Return a page; "" if the server does not have it."""
        try:
            return self.call("GET", path).text
        except ConfigError:
            return ""

    def metrics(self) -> dict[str, float]:
        return samples_of(self.page("/metrics"))

    def prompt_tokens(self, fields: Mapping[str, object], messages: list[Message]) -> int:
        """Return the server's number of prompt tokens for a request with these messages."""
        body = dict(fields) | {"messages": messages, "max_tokens": 1}
        return self.answer("POST", "/v1/chat/completions", _Whole, body).usage.prompt_tokens


def check_url(option: str, url: str) -> None:
    """Raise ConfigError if a URL is not that of a server."""
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port above 65535, or half of an IPv6 address
        is_server = False
    if not is_server:
        raise ConfigError(f"{option} {url}: write it as http://host:port")


def measure_server(
    load: ServerLoad,
    config: Config | None,
    *,
    url: str,
    api_key: str | None,
    goals_ms: Mapping[str, float],
    warmup: int | None,
    processes: int,
    bar: ProgressBar,
    server: LiveServer | None = None,
    command: str = "",
    prefill_url: str = "",
) -> Outcome:
    """Warm up, send the load, and read the server's metrics.

    `config`, or another engine's `command`, started the server. `server`: its process, if local.
    `prefill_url` is that of a prefill server, to which each request is sent first.
    """
    api = _Api(url, api_key, prefill_url)
    with api.http:
        served, load = ask_server(api, load)
        if config is not None and served.model not in config.model_names:
            raise ConfigError(f"{url} serves {served.model}; the recipe is {config.served_name}")

        def send(part: ServerLoad, label: str) -> tuple[Done, dict[str, float]]:
            with bar(part.num_requests, label) as advance:
                return run(part, served, api, processes, advance=advance)

        if num_warm := (load.concurrency or 8) if warmup is None else warmup:
            send(load.warm_up(num_warm), "warm-up")
        before, started_at = api.metrics(), now()
        cpu_before = cpu_s(server.pid) if server else {}
        result, peaks = send(load, served.model)
        cpu_after = cpu_s(server.pid) if server else {}
        after, experts = api.metrics(), "".join(takewhile(is_load, map(api.page, EXPERTS))).encode()
    tokens = sum(sample.output_tokens for sample in result.samples if not sample.error)
    (shown,) = without_secrets([command])
    peer = {"model": served.model, "served_by": served.engine, "command": shown}
    is_agents = isinstance(load, AgentLoad)
    return concluded(
        kind="serve",
        started_at=started_at,
        samples=result.samples,
        experts=experts,
        goals_ms=goals_ms,
        recipe=peer if config is None else msgspec.to_builtins(config.recipe),
        changed=flags(shown) if config is None else config.changed,
        workload=described(load, served.wording)
        | {"warmup": num_warm, "processes": processes}
        | ({"prefill_url": api.prefill_url} if prefill_url else {}),
        engine=engine_facts(before, after, peaks) | cpu_facts(cpu_before, cpu_after, tokens),
        extra={"client_busy": result.busy}
        | speculation(before, after)
        | ({"start_to_ready_s": server.ready_s} if server else {}),
        conversations=agent_facts(result.samples, before, after) if is_agents else {},
    )


def is_load(page: str) -> bool:
    """Return False for the empty page of a refusal, and for the page of another server."""
    return page.startswith("{")


def described(load: ServerLoad, wording: Wording) -> dict[str, Any]:
    """Return a record's description of a load."""
    described_load: dict[str, Any] = msgspec.to_builtins(load)
    own = {"name": load.name, "digest": digest_of(load, wording)}
    return described_load | own | load.described


def digest_of(load: ServerLoad, wording: Wording) -> str:
    """Return a digest of all requests. It is the same for servers with equal token counts."""
    digest = hashlib.sha256()
    for conversation in load.conversations([""], wording):
        digest.update(conversation.head)
        for turn in conversation.turns:
            digest.update(turn.messages + turn.tail)
            if turn.pause_s:
                digest.update(f"{turn.pause_s:.3f}".encode())
    return digest.hexdigest()[:12]


def ask_server(api: _Api, load: ServerLoad) -> tuple[ServerFacts, ServerLoad]:
    """Return the server's properties, and the load with those that its texts depend on.

    Short requests measure the tokens of each word, so no tokenizer is needed.
    """
    models = api.answer("GET", "/v1/models", _Models).data
    if not models:
        raise ConfigError(f"{api.url}/v1/models lists no model")
    model, limit = models[0].id, models[0].max_model_len
    adapters = [one.id for one in models if one.parent]
    if len(adapters) < load.adapters:
        raise ConfigError(f"--adapters {load.adapters}: {api.url} serves {len(adapters)} adapters")
    version = re.findall(r'"version": ?"(.+?)"', api.page("/version"))
    engine = " ".join([models[0].owned_by or "unknown", *version])
    options, longest = load.longest_request
    if limit is not None and longest > limit:
        raise ConfigError(
            f"{options} is up to {longest:.0f} tokens; {model} at {api.url} takes at most {limit}"
        )
    count = partial(api.prompt_tokens, load.fields(model))
    wording = wording_of(lambda text: count([user(text)]))
    fitted = load.fitted(wording, count, api.url)
    served = ServerFacts(
        model,
        engine,
        wording,
        has_drafts=DRAFTS in api.page("/metrics"),
        names=adapters[: load.adapters] or [model],
    )
    return served, fitted


def flags(command: str) -> dict[str, str]:
    """Return the flags of a command line: {"max-model-len": "8192"} for `--max-model-len 8192`."""
    return dict(re.findall(r"(?<= --)([\w-]+)(?:[ =](?!--)(\S+))?", command))


def wording_of(count: Callable[[str], int]) -> Wording:
    """Return the wording, from `count`, which returns the prompt tokens of a text.

    One more request suffices if every word is one token; otherwise some words are counted singly.
    """
    overhead = count(LEAD)
    if count(" ".join((LEAD, *WORDS))) == overhead + len(WORDS):
        return Wording(overhead, dict.fromkeys(WORDS, 1))
    return Wording(overhead, {word: count(f"{LEAD} {word}") - overhead for word in SOME_WORDS})


def run(
    load: ServerLoad, served: ServerFacts, api: _Api, processes: int, *, advance: Advance
) -> tuple[Done, dict[str, float]]:
    """Send the load from client processes. Return the samples, and maxima of server metrics."""
    due = load.due_s()
    texts = load.conversations(served.names, served.wording, counted=served.has_drafts)
    count = min(processes, len(texts), load.concurrency or processes)
    context = multiprocessing.get_context("spawn")
    shared = client.RunState(context, count)
    pipes: list[Connection] = []
    workers = []
    try:
        for at in range(count):
            share = client.Share(
                url=api.url,
                api_key=api.api_key,
                conversations=texts,
                due_s=[],
                num_lanes=0,
                prefill_url=api.prefill_url,
            )
            if load.concurrency is None:  # each process has its own arrivals
                share = replace(share, conversations=texts[at::count], due_s=due[at::count])
            else:  # every process may hold every conversation
                share = replace(share, num_lanes=len(range(at, load.concurrency, count)))
            here, there = context.Pipe()
            worker = context.Process(target=client.main, args=(share, shared, there), daemon=True)
            worker.start()
            there.close()  # so that the worker's death is an EOF on the other end
            pipes.append(here)
            workers.append(worker)
        shared.all_ready.wait(client.READY_S)
        return _gather(pipes, shared, api, advance)
    except (BrokenBarrierError, EOFError, OSError):
        raise RuntimeError("a client process died or did not start") from None
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _gather(
    pipes: list[Connection], shared: client.RunState, api: _Api, advance: Advance
) -> tuple[Done, dict[str, float]]:
    total, peaks = Done([], 0.0), dict[str, float]()
    scraped, shown, waiting = 0.0, (0, 0), set(pipes)
    while waiting:
        for pipe in wait(waiting, PROGRESS_S):
            assert isinstance(pipe, Connection)
            done = msgspec.msgpack.decode(pipe.recv_bytes(), type=Done)
            total.samples += done.samples
            total.busy = max(total.busy, done.busy)
            waiting.remove(pipe)
        _, finished, tokens = shared.counts[:]
        advance(finished - shown[0], tokens - shown[1])
        shown = finished, tokens
        if time.perf_counter() - scraped > SCRAPE_S:
            for name, value in api.metrics().items():
                peaks[name] = max(value, peaks.get(name, value))
            scraped = time.perf_counter()
    return total, peaks
