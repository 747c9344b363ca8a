"""A model or cache that cannot fit is refused before loading, with the arithmetic and a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from nanovllm.config import ConfigError, load_config
from nanovllm.engine import paper
from nanovllm.runner import host_memory as host
from nanovllm.runner.build import build, with_caches
from nanovllm.runner.host_memory import host_memory
from nanovllm.runner.resolved import Resolved, resolve_config
from nanovllm.runner.room import check_room, need_of, smaller_ones

GIB = 1 << 30
DUMMY = "load.format=dummy"


def on_a_cpu(named: str | None, *overrides: str) -> Resolved:
    return resolve_config(load_config(named, [*overrides, "device=cpu"]))


def refused(named: str | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_room(on_a_cpu(named, *overrides))
    return str(caught.value)


# -- weights and memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "overrides", "line"),
    [
        (21.3, (), "30.5 GiB and 2.0 GiB of cache (cache.cpu_gib); this machine has 21.3 GiB "
         "available; --set dtype=bfloat16 takes 17.3 GiB in total"),
        (31.5, (), "30.5 GiB and 2.0 GiB of cache (cache.cpu_gib); this machine has 31.5 GiB "
         "available; --set cache.cpu_gib=0.9 takes 31.4 GiB in total"),
        (16.0, (), "30.5 GiB and 2.0 GiB of cache (cache.cpu_gib); this machine has 16.0 GiB "
         "available; --set dtype=bfloat16 --set cache.cpu_gib=0.7 takes 16.0 GiB in total"),
        (8.0, (), "30.5 GiB and 2.0 GiB of cache (cache.cpu_gib); this machine has 8.0 GiB "
         "available; use a smaller model or a larger machine"),
        (31.5, ("cache.pages=1000",), "30.5 GiB and 4.4 GiB of cache (cache.pages); this machine "
         "has 31.5 GiB available; --set cache.pages=221 takes 31.5 GiB in total"),
    ],
)  # fmt: skip
def test_8b_on_a_small_machine(monkeypatch, gib: float, overrides: tuple[str], line: str) -> None:
    monkeypatch.setattr(host, "host_memory", lambda: int(gib * GIB))
    assert refused("qwen3-8b", DUMMY, *overrides) == (
        f"Qwen/Qwen3-8B does not fit: 8.19 B parameters x 4 bytes (float32) = {line}"
    )


def test_adapters_count_as_weights(monkeypatch) -> None:
    """Rank 64 over all linears: 2 x 64 x (5 x 4096 + 2 x 12288 + ...) x 36 layers, in bf16."""
    asked = (DUMMY, "dtype=bfloat16", "cache.pages=100", "adapters.folder=dummy")
    monkeypatch.setattr(host, "host_memory", lambda: 17 * GIB)
    with_adapters = need_of(on_a_cpu("qwen3-8b", *asked, "adapters.slots=64"))
    plain = need_of(on_a_cpu("qwen3-8b", *asked[:3]))
    inputs, outputs = 4096 * 5 + 4096 + 12288, 4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096
    each = 64 * 2 * 36 * (inputs + outputs)  # rank, bytes, layers
    assert with_adapters.total - plain.total == with_adapters.adapter_bytes == 64 * each
    assert refused("qwen3-8b", *asked, "adapters.slots=64") == (
        "Qwen/Qwen3-8B does not fit: 8.19 B parameters x 2 bytes (bfloat16) = 15.3 GiB and "
        f"{64 * each / GIB:.1f} GiB of adapters (adapters.slots) and 0.2 GiB of cache "
        f"(cache.pages); this machine has {17 - each / GIB:.1f} GiB available; lower "
        "adapters.slots (or "
        "adapters.max_rank with adapters.runtime)"
    )


def test_adapters_must_fit_the_hosts_memory(monkeypatch) -> None:
    """All dummy adapters are one copy. Each of two ranks may use half of the memory."""
    tiny = (DUMMY, "dtype=bfloat16", "model.num_layers=4", "cache.pages=100")
    asked = ("adapters.folder=dummy", "adapters.slots=2", "adapters.max_rank=500")
    monkeypatch.setattr(host, "host_memory", lambda: 30 * GIB)
    before, found = (need_of(on_a_cpu("qwen3-8b", *tiny, *more)) for more in ((), asked))
    rank_bytes = 2 * 4 * (4096 * 5 + 4096 + 12288 + 4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096)
    assert before.room - found.room == 512 * rank_bytes  # 500 ranks are 32 pages of 16
    assert found.adapter_bytes == 2 * 512 * rank_bytes
    monkeypatch.setattr(host, "host_memory", lambda: 512 * rank_bytes - 1)
    assert refused("qwen3-8b", *tiny, *asked) == (
        "adapters.names: a rank's adapters in host memory take 512 ranks x 0.606 MB = 0.3 GiB; "
        "this machine has 0.3 GiB available for them; load fewer adapters"
    )
    monkeypatch.setattr(host, "host_memory", lambda: GIB)
    line = refused("qwen3-8b", *tiny, *asked, "cache.host_gib=0.9")
    assert "adapters.names: " in line and "this machine has 0.1 GiB available for them" in line


def test_nothing_is_built_before_the_check(monkeypatch) -> None:
    monkeypatch.setattr(host, "host_memory", lambda: 16 * GIB)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("it was built"))
    with pytest.raises(ConfigError, match="does not fit"):
        build(load_config("qwen3-8b", [DUMMY, "device=cpu"]))


def test_what_is_suggested_is_less_and_what_the_check_takes(monkeypatch) -> None:
    monkeypatch.setattr(host, "host_memory", lambda: 18 * GIB)
    for flags, smaller in smaller_ones(need_of(on_a_cpu("qwen3-8b", DUMMY))):
        found = on_a_cpu("qwen3-8b", DUMMY, *flags.replace("--set ", "").split())
        tables = 1 << 24  # tables of positions follow the context, which follows the cache
        assert abs(need_of(found).total - smaller.total) < tables, flags
        if smaller.total <= 18 * GIB:
            check_room(found)


def test_the_demo_fits() -> None:
    check_room(on_a_cpu(None))


def test_a_gpu_s_room_is_its_share_less_what_others_took(monkeypatch) -> None:
    found = on_a_cpu("qwen3-8b", DUMMY, "dtype=bfloat16")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Small GPU")
    object.__setattr__(found, "device", gpu)
    object.__setattr__(found, "recipe", replace(found.recipe, device="cuda"))
    need = need_of(found)
    assert (need.room, need.cache_bytes) == (int(24 * GIB * 0.9) - 4 * GIB, 0)
    check_room(found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15 * GIB, 16 * GIB))
    with pytest.raises(ConfigError) as caught:
        check_room(found)
    assert str(caught.value) == (
        "Qwen/Qwen3-8B does not fit: 8.19 B parameters x 2 bytes (bfloat16) = 15.3 GiB; Small GPU "
        "with cache.memory_fraction 0.9 has 13.4 GiB available; use a smaller model or a "
        "larger machine"
    )


def test_checkpoints_must_fit_the_hosts_memory(monkeypatch) -> None:
    """The limit is per rank. On a CPU, weights and pages also use the host's memory."""
    tiny = ("load.format=dummy", "dtype=bfloat16", "model.num_layers=4", "parallel.tp=1")
    monkeypatch.setattr(host, "host_memory", lambda: 30 * GIB)
    before = need_of(on_a_cpu("qwen3-next-80b-a3b", *tiny))
    all_states = "cache.checkpoint_fraction=0", "cache.checkpoints=1000"
    found = need_of(on_a_cpu("qwen3-next-80b-a3b", *tiny, *all_states, "cache.host_gib=20"))
    assert before.room == 30 * GIB and 10 * GIB <= found.room < 10.1 * GIB
    assert found.state_bytes < before.state_bytes and found.cache_bytes == before.cache_bytes
    for ranks, had in ((1, 30), (2, 15)):
        sizes = (f"parallel.tp={ranks}", "cache.host_gib=31")
        line = refused("qwen3-next-80b-a3b", *tiny, *all_states, *sizes)
        assert re.fullmatch(
            r"cache.host_gib: a rank's [\d,]+ pages and 1,000 recurrent states in host memory take "
            rf"31.0 GiB; this machine has {had}.0 GiB available for them",
            line,
        )
    line = refused("qwen3-next-80b-a3b", *tiny, *all_states, "cache.host_gib=3")
    assert line == (
        "cache.host_gib is 3; it must be 0, or at least 5.996705 for 1000 recurrent states"
    )
    decode = ["transfer.role=decode", "transfer.peers=[127.0.0.1:1]"]
    for key, more in (("cache.disk", ["cache.disk={path: x}"]), ("transfer.role decode", decode)):
        line = refused("qwen3-next-80b-a3b", *tiny, *all_states, "cache.host_gib=5.996705", *more)
        assert line == (
            f"{key} needs 198 pages in host memory, and cache.host_gib has room for 0; raise it, "
            "or lower cache.checkpoints"
        )


def test_pages_below_the_device_must_fit_the_hosts_memory(monkeypatch) -> None:
    tiny = ("load.format=dummy", "dtype=bfloat16", "model.num_layers=4", "cache.page_tokens=128")
    monkeypatch.setattr(host, "host_memory", lambda: 30 * GIB)
    before = need_of(on_a_cpu("qwen3-8b", *tiny))
    found = need_of(on_a_cpu("qwen3-8b", *tiny, "cache.host_gib=20"))
    assert (before.room, found.room) == (30 * GIB, 10 * GIB)
    assert found.cache_bytes == before.cache_bytes
    for ranks, pages, had in ((1, 15_872, 30), (2, 31_744, 15)):  # 2 MiB a page, or half of it
        line = refused("qwen3-8b", *tiny, f"parallel.tp={ranks}", "cache.host_gib=31")
        assert line == (
            f"cache.host_gib: a rank's {pages:,} pages in host memory take 31.0 GiB; this machine "
            f"has {had}.0 GiB available for them"
        )
    line = refused("qwen3-8b", *tiny, "cache.host_gib=0.001")
    assert line == (
        "cache.host_gib is 0.001; it must be 0, or at least 0.001954 for a page of 128 tokens, "
        "16 KiB each"
    )
    line = refused("qwen3-8b", *tiny, "cache.host_gib=1", "cache.prefix=false")
    assert line == "cache.host_gib needs cache.prefix, which is false; drop one of them"


def test_engines_of_one_server_share_the_hosts_memory(monkeypatch) -> None:
    """Each engine checks alone, before or after other engines have allocated."""
    tiny = ("load.format=dummy", "dtype=bfloat16", "model.num_layers=4", "parallel.tp=1")
    tiny += ("parallel.dp=3", "cache.host_gib=20")
    for first, later in ((58, 58), (58, 19), (90, 19)):  # GiB of all memory and of free memory
        had = {True: first * GIB, False: later * GIB}
        monkeypatch.setattr(host, "host_memory", lambda *, in_all=False: had[in_all])  # noqa: B023
        line = refused("qwen3-next-80b-a3b", *tiny)
        least = min(first / 3, later)
        assert line.endswith(
            " pages in host memory take 20.0 GiB; this machine has "
            f"{least:.1f} GiB available for them"
        )
    had = {True: 90 * GIB, False: 29 * GIB}  # two engines run, and a third one restarts
    monkeypatch.setattr(host, "host_memory", lambda *, in_all=False: had[in_all])
    assert 9 * GIB <= need_of(on_a_cpu("qwen3-next-80b-a3b", *tiny)).room < 10.1 * GIB


# -- memory of a machine --------------------------------------------------------------------------


def machine(root: Path, available_gib: float, cgroup: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    kib = int(available_gib * GIB) // 1024
    total = f"MemTotal: {64 * GIB // 1024} kB"
    (root / "proc/meminfo").write_text(f"{total}\nMemAvailable:   {kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path, 21.5, "0::/\n")) == int(21.5 * GIB)
    assert host_memory(tmp_path, in_all=True) == 64 * GIB
    assert host_memory(tmp_path / "not Linux") == host.NO_LIMIT
    assert 1 << 20 < host_memory() < host.NO_LIMIT


@pytest.mark.parametrize("folder", ["a", "a__b"])
def test_a_control_group_above_limits_it(tmp_path: Path, folder: str) -> None:
    files = {
        f"{folder}__memory_dot_max": f"{8 * GIB}\n",
        f"{folder}__memory_dot_current": f"{5 * GIB}\n",
        f"{folder}__memory_dot_stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
        "memory_dot_max": "max\n",
    }
    assert host_memory(machine(tmp_path, 21.5, "0::/a/b\n", **files)) == 5 * GIB
    assert host_memory(tmp_path, in_all=True) == 8 * GIB


def test_the_older_control_groups_too(tmp_path: Path) -> None:
    files = {
        "memory__x__memory_dot_limit_in_bytes": f"{4 * GIB}\n",
        "memory__x__memory_dot_usage_in_bytes": f"{GIB}\n",
        "memory__x__memory_dot_stat": "total_inactive_file 0\ntotal_active_file 0\n",
        "memory__memory_dot_limit_in_bytes": "9223372036854771712\n",
        "memory__memory_dot_usage_in_bytes": "1\n",
        "memory__memory_dot_stat": "total_inactive_file 0\n",
    }
    groups = "4:cpu,memory:/x\n2:cpuset:/y\n0::/\n"
    assert host_memory(machine(tmp_path, 21.5, groups, **files)) == 3 * GIB
    assert host_memory(tmp_path, in_all=True) == 4 * GIB


# -- cache and context ----------------------------------------------------------------------------


def test_the_context_is_what_the_cache_holds() -> None:
    """The default for 0.6B on a CPU. With a longer context, the printed curl line got a 400."""
    found = on_a_cpu("qwen3-0.6b", DUMMY)
    pages = 2 * GIB // (16 * 28 * 8 * 256 * 4) - 1
    assert (pages, found.max_model_tokens) == (584, 584 * 16)
    larger = on_a_cpu("qwen3-0.6b", DUMMY, "cache.cpu_gib=9")
    assert larger.max_model_tokens == 32768
    assert on_a_cpu(None, "cache.pages=10").max_model_tokens == 160
    assert on_a_cpu(None).max_model_tokens == 4096  # the demo model's limit


def test_a_context_that_was_asked_for_must_fit() -> None:
    def refusal(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            on_a_cpu("qwen3-0.6b", DUMMY, "server.max_model_tokens=20000", *overrides)
        return str(caught.value)

    assert refusal() == (
        "server.max_model_tokens is 20000, but the cache holds 9344 tokens (584 pages of 16, 224 "
        "KiB a token; --set cache.cpu_gib=4.3, or --set server.max_model_tokens=9344)"
    )
    assert refusal("cache.pages=600") == (
        "server.max_model_tokens is 20000, but the cache holds 9600 tokens (600 pages of 16, 224 "
        "KiB a token; --set cache.pages=1250, or --set server.max_model_tokens=9600)"
    )
    for cure in ("cache.cpu_gib=4.3", "cache.pages=1250"):
        found = on_a_cpu("qwen3-0.6b", DUMMY, "server.max_model_tokens=20000", cure)
        assert found.max_model_tokens == 20000
    with pytest.raises(ConfigError, match="the model's context is 4096 tokens"):
        on_a_cpu(None, "server.max_model_tokens=5000")


def test_device_tensors_have_the_context_s_size() -> None:
    built = build(load_config(None, ["cache.pages=10", "device=cpu"]))
    assert built.recipe.server.max_model_tokens == 160
    assert built.runner.slots.tokens_NL.shape == (17, 161)
    assert built.runner.slots.max_pages == 10


def test_a_measured_cache_shortens_the_context(monkeypatch) -> None:
    """On a GPU the number of pages is known only after the weights are loaded."""
    found = on_a_cpu(None)
    assert found.max_model_tokens == 4096
    monkeypatch.setattr("nanovllm.runner.build.num_pages_that_fit", lambda *_, **how: 100)
    runner, recipe = with_caches(found, found.empty_model(found.device))
    assert (recipe.cache.pages, recipe.server.max_model_tokens) == (100, 1600)
    assert runner.slots.tokens_NL.shape[1] == 1601
    asked = on_a_cpu(None, "server.max_model_tokens=1601")
    with pytest.raises(ConfigError, match="but the cache holds 1600 tokens"):
        with_caches(asked, asked.empty_model(asked.device))


def test_the_paper_engine_follows() -> None:
    built = paper.build(load_config("paper", ["cache.pages=7"]))[1]
    assert (built.cache.pages, built.server.max_model_tokens) == (7, 7 * 128)
    with pytest.raises(ConfigError, match="holds 896 tokens"):
        paper.build(load_config("paper", ["cache.pages=7", "server.max_model_tokens=897"]))


def test_weights_of_other_types_are_counted_by_their_bytes() -> None:
    """MiniMax-M2 has fp8 and float32 weights; each of four ranks has whole experts."""
    need = need_of(on_a_cpu("minimax-m2", DUMMY, "dtype=bfloat16", "parallel.ep=4"))
    fp8 = 62 * (64 * 3 * 1536 * 3072 + 3072 * (2 * 1536 + 2 * 256))
    assert need.others == " + 53.1 GiB of other types" and fp8 / GIB == pytest.approx(52.9, abs=0.1)
    bf16 = 2 * 51200 * 3072 + 3072 * (2 * 62 + 1) + 62 * (1536 + 256)
    assert need.parameters == pytest.approx(bf16, rel=0.05)
    assert "B parameters x 2 bytes (bfloat16) + 53.1 GiB of other types = " in need.arithmetic
    assert need.weight_bytes == pytest.approx(fp8 + 2 * bf16, rel=0.01)
