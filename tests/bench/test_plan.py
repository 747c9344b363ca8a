"""Plans compared with values by hand: weights, steps, caches, least times, measured pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from nanovllm.bench.gpus import CPU, KNOWN, gpu_of
from nanovllm.bench.kv import numbers
from nanovllm.bench.plan import (
    CUDA_BYTES,
    GRAPHS,
    LOGPROBS,
    OTHERS,
    RANKS_BYTES,
    STATES,
    STEP,
    WEIGHTS,
    MemoryPlan,
    halved,
    nearest,
    pins,
    plan_of,
)
from nanovllm.config import Config, ConfigError, load_config, read_recipe
from nanovllm.experts import ExpertLoad, write_placement
from nanovllm.kv.layout import CacheLayout, PagedGroup, StateGroup
from nanovllm.models.decoder import Decoder
from nanovllm.runner.build import build, load
from nanovllm.runner.resolved import Resolved, resolve_config

GIB, MIB = 1 << 30, 1 << 20
H200 = KNOWN["h200"]


def config_of(name: str | None, *overrides: str) -> Config:
    return load_config(name, ["load.format=dummy", *overrides])


def page_bytes(plan: MemoryPlan) -> int:
    return plan.resolved.layout.bytes_per_token * plan.resolved.page_tokens


def on_h200(name: str, *overrides: str, tp: int = 1) -> MemoryPlan:
    return plan_of(config_of(name, *overrides), H200, tp)


# -- memory ------------------------------------------------------------------------------------


def test_a_small_model_by_hand() -> None:
    """The demo model: 8 layers of 256, 8 heads and 2 key/value heads of 32, inner size 768."""
    plan = plan_of(config_of(None, "schedule.slots=4", "schedule.step_tokens=64"), H200, 1)
    demo = plan.resolved.model_config
    hidden, heads, kv, size, inner, vocab, layers = (
        demo.hidden_size, demo.num_attention_heads, demo.num_key_value_heads, demo.head_size,
        demo.intermediate_size, demo.vocab_size, demo.num_hidden_layers,
    )  # fmt: skip
    queries, qkv = heads * size, (heads + 2 * kv) * size
    block = hidden * (qkv + queries + 3 * inner) + 2 * hidden + 2 * size
    assert plan.used[WEIGHTS] == 2 * (vocab * hidden + layers * block + hidden) + 4096 * size * 4
    assert plan.resolved.layout.bytes_per_token == layers * kv * 2 * size * 2
    page = 128 * plan.resolved.layout.bytes_per_token
    columns = 4 * (4 + 1) * (4096 + 1 + 32)
    widest = max(3 * hidden + qkv + 2 * queries, 3 * hidden + max(inner + hidden, inner))
    rows = max(2 * 64 * widest, 2 * 4 * vocab)
    assert plan.used[STEP] == columns + 2 * page + 32 * MIB + rows
    assert plan.used[LOGPROBS] == 4 * vocab * (2 + 4 + 4)
    assert (plan.used[OTHERS], plan.used[GRAPHS]) == (CUDA_BYTES, GIB)
    assert plan.pages == 4 * 32 and plan.tokens == 4 * 4096  # 4 slots cannot use more


@pytest.mark.parametrize(
    ("name", "weights", "token", "step", "pages"),
    [
        # Embedding and head, blocks, norms. The rotary table is float32.
        ("qwen3-0.6b", 151936 * 1024 + 28 * 15_730_944 + 1024, 28 * 8 * 256 * 2,
         # 8192 tokens: three tensors of the stream's width; qkv, q, and attention's output.
         2 * 8192 * (3 * 1024 + 4096 + 2 * 2048), 8970),
        ("qwen3-8b", 2 * 151936 * 4096 + 36 * 192_946_432 + 4096, 36 * 8 * 256 * 2,
         # The stream twice, its norm, and gate and up; o's product is added in place.
         2 * 8448 * (3 * 4096 + 12288), 6159),
        ("qwen3-32b", 2 * 151936 * 5120 + 64 * 487_598_336 + 5120, 64 * 8 * 256 * 2,
         2 * 8448 * (4 * 5120 + 25600), None),
        ("r1-distill-llama-70b", 2 * 128256 * 8192 + 80 * 855_654_400 + 8192, 80 * 8 * 256 * 2,
         2 * 2048 * (4 * 8192 + 28672), 52),
    ],
)  # fmt: skip
def test_models_by_hand_and_the_pages_that_an_h200_had(
    name: str, weights: int, token: int, step: int, pages: int | None
) -> None:
    plan = on_h200(name)
    slots = int(plan.resolved.recipe.schedule.slots)
    assert plan.used[WEIGHTS] == 2 * weights + 32768 * 128 * 4
    assert plan.resolved.layout.bytes_per_token == token and page_bytes(plan) == 128 * token
    columns = 4 * (slots + 1) * (32768 + 1 + 256)
    assert plan.used[STEP] == columns + 2 * page_bytes(plan) + 32 * MIB + step
    if pages is not None:  # from records and results/h200-x1/kv
        assert plan.pages == pages


def test_a_cache_of_8_bits_takes_half() -> None:
    wide, narrow = on_h200("qwen3-8b"), on_h200("qwen3-8b", "cache.dtype=fp8")
    assert narrow.resolved.layout.bytes_per_token == wide.resolved.layout.bytes_per_token // 2
    more = narrow.used[STEP] - wide.used[STEP]
    assert more == -2 * page_bytes(narrow)
    assert narrow.pages == pytest.approx(2 * wide.pages, rel=0.02)
    assert "cache: {dtype: fp8, page_tokens: 128" in pins(narrow)


def test_a_full_step_as_it_was_measured() -> None:
    """The 70B model on an H200 needs 356.2 MiB, as in results/h200-x1/kv."""
    assert round(on_h200("r1-distill-llama-70b").used[STEP] / MIB, 1) == 356.2


def test_without_the_fused_gate_a_step_takes_more() -> None:
    fused, apart = (plan_of(config_of("qwen3-8b"), gpu_of(name), 1) for name in ("h200", "b200"))
    assert apart.used[STEP] - fused.used[STEP] == 2 * 8448 * 2 * 12288


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_key_value_heads_are_cut_and_then_copied(tp: int, heads: int) -> None:
    plan = on_h200("qwen3-8b", tp=tp)
    assert plan.resolved.mesh.tp_size == tp
    (group,) = plan.resolved.layout.paged
    assert (group.num_heads, group.bytes_per_token) == (heads, 36 * heads * 256 * 2)
    copied = 36 * 4096 * max(0, 2 * tp - 16) * 128  # over all ranks
    vocabulary = min(151936, -(-75 // tp) * 2048)  # whole blocks; rank 0 has one more than others
    weights = 2 * vocabulary * 4096 + (36 * 192_946_432 + copied) // tp
    assert plan.used[WEIGHTS] - 16 * MIB == pytest.approx(2 * weights, rel=0.01)
    assert plan.used[OTHERS] == CUDA_BYTES + (RANKS_BYTES if tp > 1 else 0)


def test_the_recipe_says_pages_share_and_context() -> None:
    plan = on_h200("qwen3-8b", "cache.pages=300", "cache.memory_fraction=0.5")
    assert (plan.pages, plan.tokens, plan.context) == (300, 38400, 32768)
    assert plan.share == int(0.5 * int(139.8 * GIB)) and plan.problem([32000]) == ""
    assert on_h200("qwen3-8b", "server.max_model_tokens=4096").context == 4096
    assert on_h200("r1-distill-llama-70b").context == 6656
    with pytest.raises(ConfigError, match="the model's context is 40960 tokens"):
        on_h200("qwen3-8b", "server.max_model_tokens=50000")


def test_an_unknown_gpu_has_room_too() -> None:
    assert plan_of(config_of("qwen3-8b"), gpu_of("mine:48"), 1).pages > 1000


def test_on_a_cpu_the_engine_takes_as_many_pages() -> None:
    config = load_config(None, ["cache.cpu_gib=0.01"], {"device": "cpu"})
    plan = plan_of(config, CPU, 1)
    assert plan.pages == build(config).recipe.cache.pages == int(0.01 * GIB) // (16 * 8192) - 1
    asked = load_config(None, ["cache.pages=9000"], {"device": "cpu"})
    assert plan_of(asked, CPU, 1).pages == 9000 and plan_of(asked, CPU, 1).problem([4096]) == ""


def test_weights_counted_from_shapes_are_those_loaded() -> None:
    config = load_config(None, flags={"device": "cpu"})
    model, draft_model = load(config, resolve_config(config))
    assert draft_model is None
    held = {t.data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    held[model.cos_sin_LA.data_ptr()] = model.cos_sin_LA.nbytes
    assert plan_of(config, CPU, 1).used[WEIGHTS] == sum(held.values())


def test_a_state_is_a_cache_as_well() -> None:
    layout = CacheLayout(
        paged=(PagedGroup((0,), 1, 8, 8, 2),), state=StateGroup((1, 2), 6, 3, 2, 2, 2, 2)
    )
    assert (layout.bytes_per_token, layout.bytes_per_state) == (32, 2 * (36 + 32))


def test_the_states_of_a_hybrid_model_come_first_then_checkpoints_and_pages() -> None:
    plan = on_h200("qwen3-next-80b-a3b", "quantize=fp8", "parallel.tp=1", "schedule.slots=64")
    assert plan.used[STATES] == 65 * 36 * (8192 * 3 * 2 + 4 * 32 * 128 * 128)
    kept = plan.split.bytes
    assert kept["checkpoints"] == pytest.approx(0.25 * plan.room, rel=0.01)
    assert kept["pages"] == pytest.approx(0.75 * plan.room, rel=0.01)
    assert plan.problem([32768]) == "" and "checkpoints: 149" in pins(plan)
    short = on_h200("qwen3-next-80b-a3b", "quantize=fp8", "parallel.tp=1", "schedule.slots=64",
                    "cache.state_dtype=bfloat16")  # fmt: skip
    assert short.used[STATES] == 65 * 36 * (8192 * 3 * 2 + 2 * 32 * 128 * 128)
    assert "cache: {state_dtype: bfloat16, page_tokens: " in pins(short)
    dense = on_h200("qwen3-8b")
    assert dense.used[STATES] == 0 and "checkpoints" not in pins(dense)
    none = on_h200("qwen3-next-80b-a3b", "quantize=fp8", "parallel.tp=1", "cache.checkpoints=0")
    assert none.split.bytes["checkpoints"] == 0
    assert plan.pages // plan.pages_of(500) > 64  # but the number of states is the limit
    assert numbers(plan, [500])["requests of 500"] == 64
    assert numbers(dense, [500])["requests of 500"] == 1539
    many = on_h200("qwen3-next-80b-a3b", "quantize=fp8", "parallel.tp=1", "cache.checkpoints=900")
    assert "GiB short of the smallest cache (2 pages)" in many.problem([32768])


def test_pages_in_the_hosts_memory_are_planned() -> None:
    found = numbers(on_h200("qwen3-8b", "parallel.tp=1", "cache.host_gib=64"), [500, 8000])
    assert found["pages in host memory"] == 64 * 1024 // 18
    assert found["loads from host memory pay from, tokens"] == 76
    assert "loads from disk pay from, tokens" not in found  # 1 GB/s is slower than computing


def test_checkpoints_in_the_hosts_memory_are_planned() -> None:
    shape = ("qwen3-next-80b-a3b", "quantize=fp8", "parallel.tp=1", "schedule.slots=64")
    in_host = ("cache.checkpoint_fraction=0", "cache.host_gib=64", "cache.checkpoints=889")
    on_device, plan = on_h200(*shape), on_h200(*shape, *in_host)
    assert plan.room == on_device.room and plan.used == on_device.used
    assert plan.split.bytes["checkpoints"] == 0
    assert plan.pages / on_device.pages == pytest.approx(1 / 0.75, rel=0.01)
    found = numbers(plan, [500])
    assert (found["checkpoints"], found["a state, MiB"]) == (889, pytest.approx(73.69, abs=0.01))
    assert found["all checkpoints in the host's memory, GiB"] == pytest.approx(64, abs=0.1)
    assert plan.problem([32768]) == ""
    line = pins(plan).splitlines()[1]
    assert "checkpoints: 889, checkpoint_fraction: 0, host_gib: 64.0," in line
    again = plan_of(config_of(*shape, line.replace(": ", "=", 1)), H200, 1)
    assert (again.pages, again.split.checkpoints) == (plan.pages, 889)
    cut = on_h200(shape[0], "quantize=fp8", *in_host, tp=2)  # of each rank
    assert cut.split.host_bytes / GIB == pytest.approx(32, abs=0.1)
    three = on_h200(shape[0], "quantize=fp8", *in_host, "parallel.dp=3", tp=2)
    host = numbers(three, [500])["all checkpoints in the host's memory, GiB"]
    assert host == pytest.approx(3 * 2 * 32, abs=0.3)  # two ranks of three engines


# -- models that do not fit --------------------------------------------------------------------


def test_problems() -> None:
    config = config_of("r1-distill-llama-70b")
    assert plan_of(config, H200, 1).problem([6656]) == ""
    assert plan_of(config, H200, 1).problem([6657]) == (
        "6,656 tokens of cache are fewer than 6,657"
    )
    lacks = plan_of(config, KNOWN["h100"], 1)
    lacking = (page_bytes(lacks) * 3 - lacks.room) / GIB
    assert lacks.pages == 0 and 50 < lacking < 60
    assert lacks.problem([1]) == f"{lacking:.2f} GiB short of the smallest cache (2 pages)"
    asked = on_h200("r1-distill-llama-70b", "cache.pages=60")
    assert asked.problem([]).endswith("GiB short of a cache of 60 pages")
    long = on_h200("r1-distill-llama-70b", "server.max_model_tokens=8000")
    assert long.problem([500]) == "6,656 tokens of cache are fewer than 8,000"
    many = on_h200("qwen3-0.6b", "cache.memory_fraction=0.99", "schedule.slots=2048")
    assert many.problem([]) == (
        "log-probabilities of all slots exceed what cache.memory_fraction leaves"
    )


def test_the_nearest_has_more_gpus_then_smaller_steps_then_a_shorter_context() -> None:
    config = config_of("r1-distill-llama-70b")
    more = nearest(config, H200, [32000])
    assert more is not None and more.resolved.mesh.tp_size == 2
    assert more.resolved.recipe.schedule.slots == 32
    small = gpu_of("mine:20.7")
    smaller = nearest(config, small, [32000])
    assert smaller is not None and smaller.resolved.mesh.tp_size == 8
    schedule = smaller.resolved.recipe.schedule
    assert (schedule.slots, schedule.step_tokens) == (16, 1024)
    assert smaller.problem([32000]) == ""
    shorter = nearest(config, gpu_of("mine:20.3"), [32000])
    assert shorter is not None and shorter.resolved.mesh.tp_size == 8 and shorter.context == 21120
    assert nearest(config, gpu_of("mine:16"), [32000]) is None


def test_the_nearest_builds_a_model_once_for_each_number_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, empty_model = [], Resolved.empty_model

    def counted(self: Resolved, device: torch.device) -> Decoder:
        built.append(self.mesh.tp_size)
        return empty_model(self, device)

    monkeypatch.setattr(Resolved, "empty_model", counted)
    assert nearest(config_of("qwen3-8b"), gpu_of("mine:2"), [32000]) is None
    assert built == [1, 2, 4, 8]  # for 48 plans


def test_a_larger_cache_than_fits_becomes_what_fits() -> None:
    found = nearest(config_of("qwen3-8b", "cache.pages=9000"), H200, [500])
    assert found is not None and (found.resolved.mesh.tp_size, found.pages) == (1, 6159)


def test_half_the_slots_and_half_the_tokens() -> None:
    schedule = config_of("qwen3-8b").recipe.schedule
    numbers = [halved(schedule, times, 8192) for times in (0, 1, 5)]
    assert [(one.slots, one.step_tokens) for one in numbers] == [
        (512, 8448), (256, 4224), (16, 264),
    ]  # fmt: skip
    assert halved(replace(schedule, slots=3, step_tokens=5), 3, 8192).slots == 1


def test_engines_behind_one_server_stay_pinned() -> None:
    assert pins(on_h200("qwen3-8b", "parallel.dp=4")).startswith("parallel: {tp: 1, dp: 4}\n")
    lanes = on_h200("qwen3-30b-a3b", "parallel.ep=2", "parallel.dp=2", tp=2)
    assert pins(lanes).startswith("parallel: {tp: 1, ep: 2, dp: 2}\n")
    dense = nearest(config_of("qwen3-8b", "parallel.ep=4"), H200, [500])  # a model without experts
    assert dense is not None and pins(dense).startswith("parallel: {tp: 1, ep: 1}\n")


def test_adapters_in_host_memory_are_counted_for_all_ranks() -> None:
    """Dummy adapters are one copy on each rank: 64 ranks of 5.455 MB, over two engines."""
    asked = ("adapters.folder=dummy", "adapters.slots=8", "parallel.tp=1", "parallel.dp=2")
    plain, plan = on_h200("qwen3-8b", *asked[2:]), on_h200("qwen3-8b", *asked)
    each = 64 * 2 * 36 * (4096 * 6 + 12288 + 4096 * 3 + 2 * 1024 + 2 * 12288)
    assert plan.adapters.host_bytes == each and plan.used["adapters"] == 8 * each
    name = "all adapters in the host's memory, GiB"
    assert numbers(plan, [500])[name] == 2 * each / GIB and name not in numbers(plain, [500])


def test_weights_that_a_cpu_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-8B in float32 takes 30.52 GiB, in addition to 2 GiB of cache and tables."""
    config = load_config("qwen3-8b", ["load.format=dummy"], {"device": "cpu"})
    plan = plan_of(config, CPU, 1)
    monkeypatch.setattr("nanovllm.runner.host_memory.host_memory", lambda: 30 * GIB)
    assert plan.problem([500]) == "2.52 GiB short of a cache of 454 pages"
    assert nearest(config, CPU, [500]) is None
    monkeypatch.setattr("nanovllm.runner.host_memory.host_memory", lambda: 33 * GIB)
    assert plan.problem([500]) == ""


def test_the_pinned_lines_are_a_recipe_of_the_same_plan() -> None:
    plan = on_h200("qwen3-32b", tp=4)
    lines = pins(plan).splitlines()
    assert lines == [
        "parallel: {tp: 4}",
        f"cache: {{page_tokens: 128, pages: {plan.pages}, memory_fraction: 0.9}}",
        "schedule: {slots: 512, step_tokens: 8448}",
        "server: {max_model_tokens: 32768}",
    ]
    overrides = [line.replace(": ", "=", 1) for line in lines[:3]]
    recipe = read_recipe("qwen3-32b", overrides).recipe
    assert (recipe.parallel.tp, recipe.cache.pages) == (4, plan.pages)
    again = plan_of(config_of("qwen3-32b", *overrides), H200, 4)
    assert again.pages == plan.pages and again.problem([32768]) == ""


# -- least times -------------------------------------------------------------------------------


def test_decode_steps_of_8b_by_hand() -> None:
    plan, two = on_h200("qwen3-8b"), on_h200("qwen3-8b", tp=2)
    read = 36 * 192_946_432 + 151936 * 4096  # all layers and the head
    assert plan.decode_s(1, 1024) == pytest.approx((2 * read + 1024 * 147456) / 4.28e12)
    assert 1e3 * plan.decode_s(1, 1024) == pytest.approx(3.57, abs=0.01)
    cached = 256 * 1024 * 147456 / 4.28e12
    assert plan.decode_s(256, 1024) == pytest.approx(2 * 256 * read / 790e12 + cached)
    assert two.decode_s(64, 2000) == pytest.approx(plan.decode_s(64, 2000) / 2, rel=3e-3)
    eight, sixteen = (on_h200("qwen3-8b", tp=tp) for tp in (8, 16))
    cached = 64 * 2000 * 36 * 256 * 2 / 4.28e12  # one head per rank, some of them copies
    of_weights = [plan.decode_s(64, 2000) - cached for plan in (eight, sixteen)]
    assert 1.7 < of_weights[0] / of_weights[1] < 2


def test_prompts_of_8b_by_hand() -> None:
    plan = on_h200("qwen3-8b")
    layers, head = 36 * 192_946_432, 151936 * 4096
    attention = 36 * 32 * 128 * 2 * 4000**2
    flops = 16 * (2 * layers * 4000 + 2 * head + attention)
    assert plan.prefill_s(16, 4000) == pytest.approx(flops / 790e12)
    assert plan.prefill_s(1, 1) == pytest.approx(2 * (layers + head) / 4.28e12)  # reads the weights


def test_copies_of_experts_take_room(tmp_path: Path) -> None:
    """Each of four ranks has one more of 128. The file does not fit other numbers of ranks."""
    path = tmp_path / "x"
    lines = ExpertLoad([*range(48)], bytes(8 * 48 * 128), b"").lines()
    write_placement(lines, path, 4, 1)
    ep = "parallel.tp=4", "parallel.ep=4"
    plain, more = (
        on_h200("qwen3-30b-a3b", *ep, *keys, tp=4) for keys in ((), (f"experts.placement={path}",))
    )
    assert more.used[WEIGHTS] - plain.used[WEIGHTS] == 48 * 2 * 3 * 768 * 2048
    assert pins(more).startswith("parallel: {tp: 4, ep: 4}\n")
    found = nearest(config_of("qwen3-30b-a3b", *ep, f"experts.placement={path}"), H200, [500])
    assert found is not None and found.resolved.mesh.tp_size == 4


@pytest.mark.parametrize("ep", [1, 4])
def test_experts_of_30b_by_hand(ep: int) -> None:
    """There are 128 experts of 3 * 768 * 2048; a token uses 8. Each of four GPUs has a quarter."""
    dense = 2048 * (4096 + 2 * 512 + 4096) + 2 * 2048 + 2 * 128 + 128 * 2048
    experts, head = 128 * 3 * 768 * 2048, 151936 * 2048
    plan = on_h200("qwen3-30b-a3b")
    assert plan.used[WEIGHTS] == 2 * (48 * (dense + experts) + 2 * head + 2048) + 32768 * 128 * 4
    for rows in (1, 64):
        chosen = 1 - (1 - 8 / 128) ** rows
        read = 2 * (48 * (dense + chosen * experts) + head) + rows * 1024 * 98304
        assert plan.decode_s(rows, 1024) == pytest.approx(read / H200.gb_per_s / 1e9)
    flops = 2 * 64000 * 48 * (dense + experts / 16) + 16 * (2 * head + 2 * 48 * 4096 * 4000**2)
    assert plan.prefill_s(16, 4000) == pytest.approx(flops / H200.tflops / 1e12)
    four = on_h200("qwen3-30b-a3b", "parallel.tp=4", f"parallel.ep={ep}", tp=4)
    assert four.decode_s(64, 1024) == pytest.approx(plan.decode_s(64, 1024) / 4, rel=0.01)
    columns = 4 * (512 + 1) * (32768 + 1 + 256)
    # 16384 tokens: the stream twice and its norm, memory per pair, logits, and the result.
    step = 2 * 16384 * (3 * 2048 + 8 * (768 + 2048 + 8) + 128 + 2048)
    assert plan.used[STEP] == columns + 2 * 128 * 98304 + 32 * MIB + step


def test_lanes_have_whole_attention_and_all_of_the_cache_each() -> None:
    """Each of four GPUs has a quarter of the experts and of the requests."""
    dense = 2048 * (4096 + 2 * 512 + 4096) + 2 * 2048 + 2 * 128 + 128 * 2048
    experts, head = 128 * 3 * 768 * 2048, 151936 * 2048
    plan = on_h200("qwen3-30b-a3b", "parallel.ep=4", tp=4)
    weights = 2 * (48 * (dense + experts / 4) + 2 * head + 2048) + 32768 * 128 * 4
    mesh = plan.resolved.mesh
    assert plan.used[WEIGHTS] == weights and (mesh.tp_size, mesh.lanes) == (1, 4)
    assert plan.resolved.layout.bytes_per_token == 98304  # of all heads
    read = 2 * (48 * (dense + (1 - (1 - 8 / 128) ** 64) * experts / 4) + head) + 16 * 1024 * 98304
    assert plan.decode_s(64, 1024) == pytest.approx(read / H200.gb_per_s / 1e9)
    flops = 2 * 64000 * 48 * (dense + experts / 16) + 16 * (2 * head + 2 * 48 * 4096 * 4000**2)
    assert plan.prefill_s(16, 4000) == pytest.approx(flops / 4 / H200.tflops / 1e12)
    columns = 4 * (512 + 1) * (32768 + 1 + 256)
    # In addition to one rank: tokens of all lanes, 16384 at a time, and their sums.
    step = 2 * 16384 * (5 * 2048 + 8 * (768 + 2048 + 8) + 128 + 2048)
    assert plan.used[STEP] == columns + 2 * 128 * 98304 + 32 * MIB + step
    assert pins(plan).startswith("parallel: {tp: 1, ep: 4}\n")
    table = numbers(plan, [2000])
    assert table["requests of 2,000"] == 4 * (plan.pages // 16) and table["lanes"] == 4


@pytest.mark.parametrize("rows", [1, 64, 256])
def test_an_expert_that_all_tokens_share_is_read_once(rows: int) -> None:
    """A token of Qwen3-Next uses 10 of 512 experts and a shared one, 3 * 512 * 2048 each."""
    plan = on_h200("qwen3-next-80b-a3b", tp=2)
    full = 12 * (2 * 4096 + 2 * 512 + 4096) * 2048 // 2
    recurrent = 36 * ((2 * 2048 + 2 * 4096 + 64 + 4096) * 2048 + 8192 * 4) // 2
    routers, head = 48 * 513 * 2048, 75 // 2 * 2048 * 2048
    experts = 48 * (512 * (1 - (1 - 10 / 512) ** rows) + 1) * 3 * 512 * 2048 / 2
    each = 500 * plan.resolved.layout.bytes_per_token + 2 * plan.resolved.layout.bytes_per_state
    read = 2 * (full + recurrent + routers + head + experts) + rows * each
    assert plan.decode_s(rows, 500) == pytest.approx(read / H200.gb_per_s / 1e9, rel=3e-3)


def test_minimax_m2_has_a_byte_a_weight() -> None:
    plan = on_h200("minimax-m2", "parallel.tp=4", "parallel.ep=4", tp=4)
    assert plan.used[WEIGHTS] == pytest.approx(230e9 / 4, rel=0.01)
    experts = 62 * 256 * 3 * 1536 * 3072 / 4
    routers = 62 * 256 * 3072 * (4 + 3 * 2)  # in float32, and as three parts in bfloat16
    assert 0.975 < (experts + routers) / plan.used[WEIGHTS] < 1
    assert plan.resolved.layout.bytes_per_token == 62 * 2 * 2 * 128 * 2  # of two heads


def test_r1_over_eight_ranks_by_hand() -> None:
    """All ranks have the latents, and a 16-bit copy of kv_b for products."""
    plan = on_h200("deepseek-r1", tp=8)
    hidden, experts, dense = 7168, 257, 3 * 7168 * 18432
    kept = 16 * 192 * 1536, 16 * 256 * 512, 16 * 128 * 7168  # q_b, kv_b and o of 16 heads
    attention = (1536 + 576) * hidden + sum(kept)
    sparse = experts * 3 * hidden * 2048 // 8
    in_fp8 = 61 * attention + 3 * dense // 8 + 58 * sparse
    copies = 61 * 2 * kept[1]
    routers = 58 * 256 * ((hidden + 1) * 4 + 3 * hidden * 2)  # and up to three parts in bfloat16
    vocabulary = 2 * 2 * hidden * 8 * 2048  # whole blocks; rank 0 has 8 of 64
    tables = plan.resolved.max_model_tokens * 64 * 4
    expected = in_fp8 * (1 + 4 / 128**2) + copies + routers + vocabulary + tables
    assert plan.used[WEIGHTS] == pytest.approx(expected, rel=1e-3)
    assert plan.resolved.layout.bytes_per_token == 61 * 576 * 2 == 70272
    assert plan.problem([32000]) == "" and plan.tokens > 500_000
    active = 61 * attention + 3 * dense / 8 + 58 * (9 / 257 * sparse + 256 * hidden)
    pairs = 61 * 16 * (192 + 128) * 32000**2  # keys are longer than values; half is masked
    flops = 2 * 32000 * active + pairs + 2 * 8 * 2048 * hidden
    assert plan.prefill_s(1, 32000) == pytest.approx(flops / H200.tflops / 1e12, rel=1e-3)
    narrow = on_h200("deepseek-r1", "cache.dtype=fp8", tp=8)
    assert narrow.resolved.layout.bytes_per_token == 61 * (512 + 2 * 64 + 16) == 40016
    assert narrow.tokens == pytest.approx(plan.tokens * 70272 / 40016, rel=1e-3)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_decode_steps_of_latents_multiply_longer_than_they_read(dtype: str) -> None:
    """A rank with all 128 heads multiplies longer than it reads latents; one with 16 does not."""
    lanes = on_h200("deepseek-r1", "parallel.tp=1", "parallel.ep=8", f"cache.dtype={dtype}", tp=8)
    ranks = on_h200("deepseek-r1", f"cache.dtype={dtype}", tp=8)
    read = {"auto": 70272, "fp8": 40016}[dtype] / 4.28e12
    for plan, heads, own in ((lanes, 128, 8), (ranks, 16, 64)):
        multiplied = 61 * 2 * heads * (2 * 512 + 64) / 790e12
        assert (multiplied > read) is (heads == 128)
        least = own * 30_000 * max(multiplied, read)
        growth = plan.decode_s(64, 32_000) - plan.decode_s(64, 2_000)
        assert growth == pytest.approx(least, rel=1e-6)


def test_the_first_layers_of_r1_on_one_gpu() -> None:
    """The configuration of comparisons with other engines."""
    plan = on_h200("deepseek-r1", "model.num_layers=6", "experts.routing=uniform")
    assert 40e9 < plan.used[WEIGHTS] < 44e9
    assert plan.problem([4000] * 16) == ""


def test_drafts_of_every_slot_have_logits() -> None:
    """1,024 slots of Qwen3-0.6B with four rows each need 1.24 GB, more than a prefill."""
    many = "schedule.slots=1024"
    plain, drafting = (
        on_h200("qwen3-0.6b", many, *more).used[STEP]
        for more in ((), ("speculate.method=ngram", "speculate.tokens=3"))
    )
    columns = 4 * 1025 * (32768 + 1 + 256)
    assert drafting == columns + 2 * 128 * 114688 + 32 * MIB + 1024 * 4 * 151936 * 2
    assert plain < drafting
