"""One soak: quiet answers, a warm-up, clients and abusers at once, and the final state."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any

import httpx
import msgspec

from tests.load.soak.abuses import ABUSES, PATIENCE_S, Target
from tests.load.soak.questions import Answer, Body, RefusedError, answer, asked, questions
from tests.load.soak.state import CACHE, MIB, State, slope_mib_per_hour, state

log = logging.getLogger("soak")
ABUSERS = 2  # at once, each with its own abuse
REFUSED = (501, 503, 505)  # statuses from 500 that do not report a failure of the server
PAUSE_S = 0.2  # between two abuses
AFTER_FLOOD_S = 5.0  # until the flood's last requests have left the queue
SETTLE_S = 120.0  # until all resources must be freed
LOOK_S = 0.5
GRAMMARS = "compiled grammars"  # part of the engine's memory, and bounded
SAMPLE_S = 10.0
MINUTE_S = 60.0
FILLER_TOKENS = 2500  # minimum number of tokens of one prompt
MOST_PROBLEMS = 40


class Soak:
    """One run against a server. `problems` describes every failure; empty means success."""

    def __init__(
        self,
        url: str,
        supervisor: int | None,
        clients: int,
        seed: int = 0,
        asks: Iterable[Body] | None = None,
        abuses: Iterable[str] | None = None,
    ) -> None:
        """Prepare a run. `supervisor`: see state(). `asks`, `abuses`: default to all."""
        address = httpx.URL(url)
        self.problems: list[str] = []
        self.seconds = 0.0  # of the whole run
        self.counts: Counter[str] = Counter()
        self.abuses: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()  # statuses of the abusers' answers
        self.before = self.after = State({}, {})
        self.samples: dict[
            str, list[tuple[float, float]]
        ] = {}  # (second, MiB) by process, and of the engine's cached grammars
        self._url, self._supervisor, self._clients = url, supervisor, clients
        self._asks = questions() if asks is None else list(asks)
        self._names = list(ABUSES if abuses is None else abuses)
        self._draw = random.Random(seed)
        self._target = Target(address.host, address.port or 80, random.Random(seed + 1))
        self._quiet: list[Answer] = []
        self._begun = 0.0
        self._num_floods = 0  # floods that run now
        self._flood_until = 0.0

    # -- the run --------------------------------------------------------------------------------

    async def run(self, abused_s: float) -> None:
        """Run the soak. Raise httpx.HTTPError or RefusedError if the server fails without load."""
        started = time.monotonic()
        limits = httpx.Limits(max_connections=self._clients)
        http = httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=120, limits=limits)
        async with http:
            self._quiet = [await answer(http, body) for body in self._asks]
            log.info("%d quiet answers, %.0f s", len(self._quiet), time.monotonic() - started)
            await self._warm_up(http)
        self.before = await self._settled(None)
        log.info("warm after %.0f s: %s", time.monotonic() - started, shown(self.before))
        self._forget_warm_up()
        self._begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for work in self._work(self._begun + abused_s):
                tasks.create_task(work)
        self.after = await self._settled(self.before)
        self.problem_unless_empty(self.after.not_back(self.before))
        await self._ask_again()
        self.seconds = time.monotonic() - started
        log.info("at rest: %s", shown(self.after))
        slopes = {name: slope_mib_per_hour(samples) for name, samples in self.samples.items()}
        told = ", ".join(f"{name} {slope:+.0f}" for name, slope in slopes.items())
        log.info("MiB an hour, in the last two thirds: %s", told)

    def _work(self, until: float) -> list[Coroutine[Any, Any, None]]:
        clients = [self._client(until) for _ in range(self._clients)]
        return [*clients, *(self._abuser(until) for _ in range(ABUSERS)), self._watch(until)]

    async def _warm_up(self, http: httpx.AsyncClient) -> None:
        """Write every page of the cache, and run every question and every abuse once.

        Memory that is allocated at the first use of each must not count as growth.
        """
        await self._fill_cache(http)
        for at in range(0, len(self._names), 4):
            await asyncio.gather(*map(self._abuse, self._names[at : at + 4]))
        await asyncio.gather(*(self._ask(http, n) for n in range(len(self._asks))))

    async def _fill_cache(self, http: httpx.AsyncClient) -> None:
        """Write all pages of the cache: a CPU's memory counts as resident once it is written."""
        page = (await http.get("/metrics")).text
        (line,) = (one for one in page.splitlines() if one.startswith("vllm:cache_config_info{"))
        size, num = (int(line.split(f'{name}="')[1].split('"')[0]) for name in CACHE_LABELS)
        if self._supervisor is None or size * num > MOST_FILLED:
            return
        for n in range(size * num // FILLER_TOKENS + 1):
            text = " ".join(f"{n}-{i}" for i in range(FILLER_TOKENS // 4))
            await answer(http, asked(text, max_tokens=1))

    def _forget_warm_up(self) -> None:
        """Reset the counters of the warm-up. Its problems stay."""
        for counter in (self.counts, self.abuses, self.statuses):
            counter.clear()

    async def _settled(self, before: State | None) -> State:
        """Return the state once the server is at rest, or the last one after SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        await asyncio.sleep(LOOK_S)
        last = await state(self._url, self._supervisor)
        while time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            now = await state(self._url, self._supervisor)
            if not now.not_back(last if before is None else before):
                return now
            last = now
        return last

    async def _ask_again(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=120) as http:
            for number in range(len(self._asks)):
                await self._ask(http, number)

    # -- clients and abusers ----------------------------------------------------------------------

    async def _client(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=120) as http:
            while time.monotonic() < until:
                await self._ask(http, self._draw.randrange(len(self._asks)))

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        was_flood = self._is_flooded
        begun = time.monotonic()
        try:
            found = await answer(http, self._asks[number])
        except RefusedError as error:
            if error.status == 503 and (was_flood or self._is_flooded):
                self.counts["refused_in_floods"] += 1
                await asyncio.sleep(0.5)
                return
            self._count("refused", number, str(error))
        except (httpx.HTTPError, ValueError, LookupError) as error:
            self._count("failed", number, repr(error))
        else:
            difference = found.differs_from(self._quiet[number])
            if difference:
                self._count("different", number, difference)
            else:
                self.counts["equal"] += 1
        longest = 1000 * (time.monotonic() - begun)
        self.counts["longest_ms"] = max(self.counts["longest_ms"], round(longest))

    async def _abuser(self, until: float) -> None:
        """Run one abuse after another, each equally often."""
        while time.monotonic() < until:
            for name in self._draw.sample(self._names, len(self._names)):
                if time.monotonic() < until:
                    await self._abuse(name)
                    await asyncio.sleep(PAUSE_S)

    async def _abuse(self, name: str) -> None:
        floods = ABUSES[name].floods
        self._num_floods += floods
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                statuses = await ABUSES[name].act(self._target)
        except TimeoutError:
            self.counts["abuses_cut_off"] += 1
            statuses = []
        except OSError:  # the server closed the connection, which is allowed
            statuses = []
        finally:
            self._num_floods -= floods
            if floods:
                self._flood_until = time.monotonic() + AFTER_FLOOD_S
        self.abuses[name] += 1
        self.statuses.update(statuses)
        if bad := [status for status in statuses if status >= 500 and status not in REFUSED]:
            self.problem_unless_empty([f"{name} was answered {bad}"])

    async def _watch(self, until: float) -> None:
        """Sample memory, and log a line every minute."""
        next_line = self._begun + min(MINUTE_S, until - self._begun)
        while True:
            try:
                now = await state(self._url, self._supervisor)
            except httpx.HTTPError as error:
                self.problem_unless_empty([f"no metrics: {error!r}"])
            else:
                second = round(time.monotonic() - self._begun, 1)
                # The mean: trials come and go as forks, which share most of their memory.
                sizes = {name: held.rss_mib / held.processes for name, held in now.held.items()}
                for name, size in {**sizes, GRAMMARS: now.gauges[CACHE] / MIB}.items():
                    self.samples.setdefault(name, []).append((second, round(size, 1)))
                if time.monotonic() >= next_line:
                    next_line += MINUTE_S
                    log.info("%5.1f min: %s; %s", second / 60, self._tally(), shown(now))
            if time.monotonic() >= until:
                return
            await asyncio.sleep(min(SAMPLE_S, max(0.0, until - time.monotonic())))

    @property
    def _is_flooded(self) -> bool:
        return self._num_floods > 0 or time.monotonic() < self._flood_until

    # -- results --------------------------------------------------------------------------------

    def problem_unless_empty(self, found: list[str]) -> None:
        room = MOST_PROBLEMS - len(self.problems)
        self.problems += found[: max(0, room)]

    def _count(self, what: str, number: int, why: str) -> None:
        self.counts[what] += 1
        text = self._asks[number]["messages"][0]["content"][:40]
        self.problem_unless_empty([f"question {number} ({text!r}) {what}: {why[:1000]}"])

    def _tally(self) -> str:
        names = ("equal", "refused_in_floods", "refused", "failed", "different")
        told = ", ".join(f"{self.counts[name]} {name.replace('_', ' ')}" for name in names)
        return f"{told}; {self.abuses.total()} abuses"

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a record."""
        names = ("equal", "different", "failed", "refused", "refused_in_floods", "abuses_cut_off")
        made = {name: float(self.counts[name]) for name in names}
        made["longest_answer_ms"] = float(self.counts["longest_ms"])
        made["problems"] = float(len(self.problems))
        for when, seen in (("before", self.before), ("after", self.after)):
            for name, held in seen.held.items():
                facts = msgspec.structs.asdict(held)
                made |= {f"{name}_{what}_{when}": float(n) for what, n in facts.items()}
            for name, value in seen.gauges.items():
                made[f"{name}_{when}"] = value
        for name, samples in self.samples.items():
            made[f"{name}_slope_mib_per_h"] = round(slope_mib_per_hour(samples), 2)
            made[f"{name}_peak_mib"] = max(size for _, size in samples)
        return made

    def told(self) -> dict[str, Any]:
        """Return a record's workload: numbers of questions and abuses, and memory over time."""
        return {
            "questions": len(self._asks),
            "abuses": dict(sorted(self.abuses.items())),
            "statuses_of_abuses": {str(key): n for key, n in sorted(self.statuses.items())},
            "mib_by_second": self.samples,
        }


CACHE_LABELS = ("block_size", "num_gpu_blocks")
MOST_FILLED = 40_000  # tokens of a cache; to write a larger one takes too long


def shown(now: State) -> str:
    """Return the state as text: `nanovllm-engine 300 MiB 40 fds 12 threads`, and so on."""
    parts = [
        f"{name} {held.rss_mib:.0f} MiB {held.descriptors} fds {held.threads} threads"
        for name, held in now.held.items()
    ]
    return ", ".join([*parts, f"{now.gauges[CACHE] / MIB:.0f} MiB of grammars"])
