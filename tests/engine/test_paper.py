"""`engine: paper`, the whole server without a model, and its measurement."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from nanovllm.bench import store
from nanovllm.bench.started import cpu_facts, cpu_s
from nanovllm.config import DEMO, ConfigError, load_config
from nanovllm.engine import paper
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.paper import PaperExecutor, PaperHandle
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepResult
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, Sampling, StepOutput
from tests.bench.test_online import free_port
from tests.end_to_end.demo_server import Server, start
from tests.engine.no_grammars import NoGrammars
from tests.forks import with_server_packages
from tests.times import least

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "paper.yaml")
QUESTION = [{"role": "user", "content": "Hello?"}]


# -- the executor ----------------------------------------------------------------------------


class Collector(NoGrammars):
    """Publisher into lists, and also a masker."""

    def __init__(self) -> None:
        self.said: dict[int, list[int]] = {}

    def publish(self, output: StepOutput) -> None:
        names = np.frombuffer(output.ids, np.int64).tolist()
        for name, token in zip(names, np.frombuffer(output.tokens, np.int32).tolist(), strict=True):
            self.said.setdefault(name, []).append(token)


def run(num_pages: int, max_new: Sequence[int], step_s: float = 0.0) -> tuple[Collector, int]:
    """Run one request for each of `max_new`. Return the collector and the number of preemptions."""
    memory = KVMemory(num_pages, page_tokens=4)
    scheduler = Scheduler(memory, num_slots=8, step_tokens=32, max_model_tokens=64)
    collector = Collector()
    executor = PaperExecutor([5, 6, 7, 8, 9], 8, step_s)
    loop = EngineLoop(scheduler, executor, collector.publish, collector)
    for name, count in enumerate(max_new):
        prompt = array("i", [name] * 6).tobytes()
        loop.handle(Generate(name, prompt, count, [], Sampling()))
    while not loop.idle:
        loop.step()
    return collector, scheduler.stats().num_preemptions


def test_everyone_hears_the_sentence_from_its_beginning_also_after_a_preemption() -> None:
    max_new = [3, 18, 17, 20, 1, 19]
    collector, num_preempted = run(num_pages=10, max_new=max_new)
    assert num_preempted > 0
    assert collector.said == {name: ([5, 6, 7, 8, 9] * 4)[:n] for name, n in enumerate(max_new)}


def test_a_step_takes_its_time_whatever_was_planned_meanwhile() -> None:
    begin = time.monotonic()
    run(num_pages=64, max_new=[20] * 4, step_s=0.005)
    assert time.monotonic() - begin >= 20 * 0.005


def test_a_mask_is_obeyed() -> None:
    result = StepResult(1, np.array([[5], [40], [40]], np.int32))
    masks = np.zeros((2, 2), np.int32)
    masks[0] = 1 << 8, 1 << 7  # tokens 8 and 39
    masks[1] = 1 << 3, 1 << 8  # tokens 3 and 40
    handle = PaperHandle(result, [1, 2], 0.0)
    handle.sample(masks)
    assert handle.wait().tokens.tolist() == [[5], [8], [40]]


def test_the_numbers_come_from_the_recipe_else_from_the_model() -> None:
    _, recipe, vocab_size, _ = paper.build(load_config(RECIPE))
    assert (vocab_size, recipe.server.max_model_tokens) == (2048, 4096)
    assert (recipe.schedule.slots, recipe.schedule.step_tokens) == (512, 8192)
    assert (recipe.cache.page_tokens, recipe.cache.pages) == (128, 512 * 32)
    chosen = ["schedule.slots=4", "cache.page_tokens=16", "server.max_model_tokens=100"]
    _, recipe, *_ = paper.build(load_config(RECIPE, chosen))
    assert (recipe.schedule.slots, recipe.cache.pages) == (4, 4 * 7)
    with pytest.raises(ConfigError, match=r"paper\.tokens_per_s is 0\.0; it must be between 0\.01"):
        load_config(RECIPE, ["paper.tokens_per_s=0"])
    with pytest.raises(ConfigError, match="engine"):
        load_config(RECIPE, ["engine=card"])


# -- with the real server ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = start(
        RECIPE, "--set", "paper.tokens_per_s=400", "--set", "server.workers=2", is_fork=False
    )
    yield server
    assert server.stop() == 0


def processes(server: Server) -> dict[str, int]:
    """Return process ids by the names that the system shows."""
    return {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in server.children()}


def spoken(num_tokens: int) -> str:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    sentence = tokenizer.encode(paper.SENTENCE, add_special_tokens=False).ids
    return str(tokenizer.decode((sentence * num_tokens)[:num_tokens]))


def test_two_api_processes_serve_one_port_at_the_engine_s_rate(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, count: int) -> tuple[str, float]:
        begin, text = time.monotonic(), ""
        stream = await client.chat.completions.create(
            model="demo", messages=QUESTION, max_tokens=count, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text, time.monotonic() - begin

    async def everyone() -> list[tuple[str, float]]:
        async with server.async_client() as client:
            return list(await asyncio.gather(*(ask(client, 60 + i % 5) for i in range(32))))

    def duration_s() -> float:
        begin = time.monotonic()
        answers = asyncio.run(everyone())
        assert [text for text, _ in answers] == [spoken(60 + i % 5) for i in range(32)]
        assert min(seconds for _, seconds in answers) >= 59 / 400
        return time.monotonic() - begin

    limit_s = 32 * 60 / 400  # requests do not run one after the other
    assert least(duration_s, limit_s) < limit_s


def test_both_api_processes_take_connections(server: Server) -> None:
    names = processes(server)
    apis = [pid for name, pid in names.items() if name.startswith("nanovllm-api")]
    assert sorted(names)[:3] == ["nanovllm-api0", "nanovllm-api1", "nanovllm-engine"]
    idle = [num_sockets(pid) for pid in apis]
    deadline = time.monotonic() + 30
    clients = []
    try:
        while not all(num_sockets(pid) > count for pid, count in zip(apis, idle, strict=True)):
            assert time.monotonic() < deadline, "one of them takes none"
            clients.append(httpx.Client(base_url=server.url, trust_env=False))
            assert clients[-1].get("/health").status_code == 200
    finally:
        for client in clients:
            client.close()


def num_sockets(pid: int) -> int:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return sum(link.startswith("socket:") for link in links)


def test_the_engine_process_has_no_torch(server: Server) -> None:
    for name, pid in processes(server).items():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps, name
        # This shows that the check can detect libraries.
        assert "tokenizers" in maps or not name.startswith(("nanovllm-api", "nanovllm-engine"))


# -- the measurement -------------------------------------------------------------------------


def test_bench_counts_the_cpu_time_of_each_kind_of_process(tmp_path: Path) -> None:
    arguments = ["--start", RECIPE, "--set", f"server.port={free_port()}"]
    arguments += ["--set", "server.workers=2", "--concurrency", "16", "--num-prompts", "32"]
    arguments += ["--input-len", "31", "--output-len", "100", "--results-dir", str(tmp_path)]
    line = [sys.executable, "-m", "nanovllm", "bench", *arguments]
    done = with_server_packages().start(line, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Server CPU us per token:" in done.stdout
    (written,) = store.records(tmp_path)
    metrics = written.metrics
    assert metrics["output_tokens"] == 3200.0
    assert written.recipe["engine"] == "paper"
    for name in ("server_cpu_us_per_token", "engine_cpu_us_per_token"):
        # At most the time of two cores for the API processes, and of one for the engine.
        assert 0.0 < metrics[name] < 2e6 * metrics["duration_s"] / 3200 + 2000


def test_cpu_time_is_that_of_the_named_children_and_their_own() -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass\n"
    child = (
        "import subprocess, sys, time\n"
        "open('/proc/self/comm', 'w').write(sys.argv[1])\n"
        f"{spin}"
        "subprocess.Popen([sys.executable, '-IS', '-c', sys.argv[2]])\n"
        "print('spun', flush=True)\n"
        "time.sleep(60)\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", child, name, inner],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for name, inner in (
            # A rank, which counts as part of the engine.
            ("nanovllm-engine", f"{spin}time.sleep(60)"),
            ("nanovllm-api0", "pass"),
            ("something-else", "pass"),
        )
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == b"spun\n"
        deadline = time.monotonic() + 20
        while (used := cpu_s(os.getpid())).get("Engine", 0.0) < 0.98:
            assert time.monotonic() < deadline, used
            time.sleep(0.02)
        assert used.keys() == {"Server", "Engine"}
        # More than what spins is the start of its child; any other process that counts adds 0.5.
        assert 0.48 <= used["Server"] < 0.95
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    facts = cpu_facts({"Server": 1.0}, {"Server": 1.5, "Engine": 0.25}, 10_000)
    assert facts == {"Server CPU us per token": 50.0, "Engine CPU us per token": 25.0}
    assert cpu_s(1 << 30) == {}
