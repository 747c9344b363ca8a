"""Benchmark runs on the engine process without HTTP: token ids in, token ids out, over IPC."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

import msgspec

from nanovllm.bench.measure import Advance, Outcome, ProgressBar, Sample, concluded, now
from nanovllm.bench.report import engine_facts, samples_of, speculation
from nanovllm.bench.workload import TokenLoad, token_load
from nanovllm.config import Config
from nanovllm.ipc.client import EngineClient
from nanovllm.server.metrics import Metrics, Seen, render
from nanovllm.wire import Finish, Generate, Refusal, Started, TokenLogprobs

STATS_S = 0.5  # the engine sends its counters five times a second, and when it becomes idle


async def measure_engine(
    path: str,
    config: Config,
    workloads: Sequence[str],
    *,
    ready_s: float,
    seed: int,
    warm_up: bool,
    num_adapters: int,
    bar: ProgressBar,
    publish: Callable[[Outcome], object],
) -> None:
    """Warm up and run some of OFFLINE_NAMES, one after another, on the engine at `path`.

    Requests use `num_adapters` of the engine's adapters in turn, or none with 0. `ready_s` is the
    time from start to ready. Seeds of successive loads differ by two, so that no load finds prompts
    of another or of a warm-up in the cache. `publish` gets each outcome before the next load
    starts, which may crash the engine. Raise EngineLostError if the engine is lost.
    """
    client = await EngineClient.connect(path)
    ready = client.ready
    adapters = [*ready.adapters][:num_adapters]
    suffix, used = (f"-lora{num_adapters}", {"adapters": num_adapters}) if adapters else ("", {})
    for nth, name in enumerate(workloads):
        load = token_load(name, seed=seed + 2 * nth, vocab_size=ready.vocab_size)
        if warm_up:
            warm = load.warm_up(seed + 2 * nth + 1, ready.vocab_size)
            with bar(len(warm.prompts), "warm-up") as advance:
                await run(client, warm, advance, adapters)
            await asyncio.sleep(STATS_S)  # so that no step of the warm-up is counted
        before, started_at = samples_now(client), now()
        with bar(len(load.prompts), f"{ready.model} {load.name}") as advance:
            samples = await run(client, load, advance, adapters)
        await asyncio.sleep(STATS_S)
        after, load_of = samples_now(client), client.stats.experts
        described = {
            "name": load.name + suffix, "concurrency": len(load.prompts), "request_rate": None,
            "seed": seed + 2 * nth, "num_prompts": len(load.prompts),
            "temperature": load.sampling.temperature, "ignore_eos": True,
            "arrivals": "all at once",
            "prompts": "random token ids, no two prompts alike, other ones in the warm-up",
            "warmup": len(load.prompts) if warm_up else 0, **used,
        }  # fmt: skip
        publish(concluded(
            kind="offline", started_at=started_at, samples=samples, goals_ms={},
            recipe=msgspec.json.decode(ready.recipe), changed=config.changed, workload=described,
            engine=engine_facts(before, after, {}),
            experts=b"" if load_of is None else load_of.lines(),
            extra={"start_to_ready_s": ready_s} | speculation(before, after),
        ))  # fmt: skip
    client.close()


def samples_now(client: EngineClient) -> dict[str, float]:
    """Return the engine's metrics by name, as on a server's metrics page."""
    seen = Seen(ready=client.ready, stats=client.stats, metrics=Metrics())
    return samples_of(render([seen], ()).decode())


class Stopwatch:
    """Sink and stream of one request, which stamps its results."""

    def __init__(self, num_prompt: int, max_new: int, finished: Callable[[int], None]) -> None:
        self.sample = Sample(sent=time.perf_counter(), stamps=[], input_tokens=num_prompt)
        self._max_new, self._finished = max_new, finished

    def started(self, start: Started) -> None:
        self.sample.cached_tokens = start.num_cached

    def tokens(self, token_ids: Sequence[int]) -> bool:
        self.sample.stamps.append(time.perf_counter())
        self.sample.output_tokens += len(token_ids)
        self.sample.counts.append(self.sample.output_tokens)
        return False

    def logprobs(self, entry: TokenLogprobs) -> None:
        raise AssertionError("nobody asked for logprobs")

    def finish(self, finish: Finish) -> None:
        if self.sample.output_tokens != self._max_new:
            self.sample.error = (
                f"{self.sample.output_tokens} tokens received instead of {self._max_new}"
            )
        self._finished(self.sample.output_tokens)

    def refused(self, refusal: Refusal) -> None:
        self.sample.error = refusal.message
        self._finished(0)

    def lost(self) -> None:
        self.sample.error = "the engine died"
        self._finished(0)

    def flush(self) -> None: ...


async def run(
    engine: EngineClient, load: TokenLoad, advance: Advance, adapters: Sequence[str] = ()
) -> list[Sample]:
    """Submit all requests at once, with the adapters in turn, and wait for their ends."""
    done = asyncio.Semaphore(0)

    def finished(num_tokens: int) -> None:
        advance(1, num_tokens)
        done.release()

    prompts = [array("i", prompt).tobytes() for prompt in load.prompts]
    sinks = []
    for at, prompt in enumerate(prompts):
        # Without stop ids only the length ends a request.
        sampling = msgspec.structs.replace(load.sampling, seed=at)
        request = Generate(
            request_id=engine.new_id(),
            prompt=prompt,
            max_new=load.outputs[at],
            stop_ids=[],
            sampling=sampling,
            adapter=adapters[at % len(adapters)] if adapters else "",
        )
        sink = Stopwatch(len(load.prompts[at]), load.outputs[at], finished)
        sinks.append(sink)
        engine.submit(request, sink, sink)
    for _ in sinks:
        await done.acquire()
    return [sink.sample for sink in sinks]
