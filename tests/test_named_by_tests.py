"""Each source file has a test at its own place, or one that DRIVEN_BY names for it.

The place of nanovllm/kv/memory.py is tests/kv/test_memory.py (or test_memory_*.py). That of
kernels/nanovllm_kernels/norms/norm.py is tests/kernels/norms/test_norm.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"nanovllm": "tests", "kernels/nanovllm_kernels": "tests/kernels"}
DRIVEN_BY = {
    "tests/test_config_names.py": "nanovllm/experts.py nanovllm/recipes.py nanovllm/typed_yaml.py",
    "tests/test_config_schedule.py": "nanovllm/schedule.py",
    "tests/adapters/test_mixed_batches.py": """
        nanovllm/layers/lora.py nanovllm/models/adapter_layout.py
        nanovllm/runner/adapters.py kernels/nanovllm_kernels/adapters/reference.py""",
    "tests/adapters/test_refused.py": """
        nanovllm/adapters/folder.py nanovllm/adapters/peft.py nanovllm/adapters/section.py
        nanovllm/models/adapter_files.py""",
    "tests/kv/test_page_log.py": "nanovllm/kv/events.py",
    "tests/end_to_end/test_kv_events.py": "nanovllm/engine/events.py",
    "tests/end_to_end/test_adapters.py": """
        nanovllm/engine/adapters.py nanovllm/server/adapters.py""",
    "tests/adapters/test_patterns.py": "nanovllm/adapters/patterns.py",
    "tests/adapters/test_slots.py": "nanovllm/sched/adapters.py",
    "tests/adapters/test_families.py": """
        nanovllm/models/adapter_experts.py kernels/nanovllm_kernels/adapters/experts.py""",
    "tests/end_to_end/test_operation.py": """
        nanovllm/__init__.py nanovllm/__main__.py nanovllm/launch.py
        nanovllm/cli/__init__.py nanovllm/cli/commands.py""",
    "tests/end_to_end/test_generate.py": """
        nanovllm/plan.py nanovllm/registry.py
        nanovllm/runner/batch.py nanovllm/runner/runner.py""",
    "tests/end_to_end/test_replicas.py": "nanovllm/server/metrics_page.py",
    "tests/server/test_prefill_requests.py": "nanovllm/server/handover.py",
    "tests/attention/test_choose.py": "nanovllm/attention/__init__.py",
    "tests/models/test_invariant.py": "nanovllm/attention/invariant.py",
    "tests/kernels/test_invariant.py": """
        kernels/nanovllm_kernels/activations.py
        kernels/nanovllm_kernels/attention/invariant.py
        kernels/nanovllm_kernels/products/invariant.py""",
    "tests/attention/test_torch_ref.py": "nanovllm/attention/grouped.py",
    "tests/spec/test_drafters.py": """
        nanovllm/spec/__init__.py nanovllm/spec/base.py nanovllm/spec/ngram.py
        nanovllm/spec/synthetic.py""",
    "tests/spec/test_draft_model.py": "nanovllm/spec/model_base.py nanovllm/spec/model_drafter.py",
    "tests/kernels/attention/test_latent_decode.py": """
        kernels/nanovllm_kernels/attention/latent_reference.py
        kernels/nanovllm_kernels/attention/latent_cases.py
        kernels/nanovllm_kernels/attention/latent_store.py""",
    "tests/kernels/exchange/test_all_reduce.py": """
        kernels/nanovllm_kernels/exchange/long_sums.py
        kernels/nanovllm_kernels/exchange/regions.py kernels/nanovllm_kernels/exchange/tokens.py""",
    "tests/kernels/sampling/test_draft_rows.py": """
        kernels/nanovllm_kernels/sampling/draft_reference.py""",
    "tests/kernels/sampling/test_ngram.py": "kernels/nanovllm_kernels/sampling/ngram_reference.py",
    "tests/kernels/experts/test_reference.py": """
        kernels/nanovllm_kernels/experts/route_reference.py""",
    "tests/kernels/experts/test_routed_kernels.py": """
        kernels/nanovllm_kernels/experts/combine.py kernels/nanovllm_kernels/experts/products.py
        kernels/nanovllm_kernels/experts/routed_cases.py
        kernels/nanovllm_kernels/experts/route.py kernels/nanovllm_kernels/experts/rows.py""",
    "tests/layers/experts/test_products.py": """
        nanovllm/layers/expert_kernels.py nanovllm/layers/expert_products.py""",
    "tests/layers/experts/test_moe.py": "nanovllm/layers/experts/shared.py",
    "tests/models/test_parity.py": """
        nanovllm/attention/base.py nanovllm/layers/attention.py nanovllm/layers/embedding.py
        nanovllm/layers/linear.py nanovllm/layers/mlp.py nanovllm/layers/norm.py
        nanovllm/layers/rope.py nanovllm/models/__init__.py nanovllm/models/decoder.py
        nanovllm/models/llama.py nanovllm/models/qwen3.py nanovllm/models/qwen3_moe.py
        nanovllm/models/minimax_m2.py nanovllm/models/deepseek_v3.py
        nanovllm/models/glm4_moe_lite.py nanovllm/models/latent.py
        nanovllm/layers/latent_attention.py nanovllm/layers/stretched_rope.py
        nanovllm/models/qwen3_next.py nanovllm/models/hybrid.py nanovllm/models/sparse.py
        nanovllm/models/scattered.py
        nanovllm/attention/gated_delta.py nanovllm/attention/delta_kernels.py
        nanovllm/layers/gated_delta.py nanovllm/layers/gated_attention.py
        kernels/nanovllm_kernels/norms/reference.py""",
    "tests/models/test_qwen3_5.py": "nanovllm/models/qwen3_5.py nanovllm/models/names.py",
    "tests/spec/test_heads.py": "nanovllm/spec/eagle3.py",
    "tests/models/test_mtp.py": "nanovllm/models/head.py nanovllm/spec/mtp.py",
    "tests/models/test_quantised.py": "nanovllm/models/altered.py",
    "tests/models/test_weights.py": "nanovllm/models/destination.py nanovllm/models/faults.py",
    "tests/attention/test_flash.py": "kernels/nanovllm_kernels/attention/reference.py",
    "tests/layers/test_fp8.py": "kernels/nanovllm_kernels/fp8_reference.py",
    "tests/layers/test_ops.py": """
        nanovllm/layers/describe.py nanovllm/layers/residual.py
        kernels/nanovllm_kernels/products/library_linear.py""",
    "tests/bench/test_online.py": """
        nanovllm/bench/client.py nanovllm/bench/offline.py nanovllm/bench/started.py""",
    "tests/bench/test_report.py": "nanovllm/bench/measure.py",
    "tests/engine/test_clock.py": "nanovllm/runner/results.py",
    "tests/engine/test_process.py": "nanovllm/engine/executor.py",
    "tests/engine/test_recent.py": "nanovllm/look.py",
    "tests/engine/test_lanes.py": "nanovllm/sched/lanes.py",
    "tests/engine/test_ranks.py": "nanovllm/parallel/gloo.py nanovllm/parallel/places.py",
    "tests/parallel/test_mesh.py": "nanovllm/parallel/cut.py",
    "tests/ipc/test_channel.py": "nanovllm/ipc/client.py nanovllm/wire.py",
    "tests/paper/test_engine.py": """
        nanovllm/engine/loop.py nanovllm/kv/checkpoints.py nanovllm/kv/hybrid.py
        nanovllm/kv/memory.py nanovllm/kv/pages.py
        nanovllm/sched/decoding.py nanovllm/sched/drafting.py nanovllm/sched/policy.py
        nanovllm/sched/prices.py
        nanovllm/sched/planner.py nanovllm/sched/queue.py nanovllm/sched/request.py
        nanovllm/sched/scheduler.py""",
    "tests/paper/test_sharing.py": "nanovllm/kv/keys.py",
    "tests/paper/test_arriving.py": """
        nanovllm/kv/below.py nanovllm/kv/costs.py nanovllm/kv/page_moves.py
        nanovllm/kv/host_slots.py nanovllm/kv/tiered.py nanovllm/kv/tiers.py""",
    "tests/paper/test_disk.py": """
        nanovllm/kv/page_writes.py nanovllm/kv/store_queue.py nanovllm/kv/tier_counts.py""",
    "tests/kv/disk/test_store_faults.py": """
        nanovllm/kv/disk/folder.py nanovllm/kv/disk/format.py nanovllm/kv/disk/health.py
        nanovllm/kv/disk/index.py nanovllm/kv/disk/limits.py""",
    "tests/runner/test_room.py": "nanovllm/kv/layout.py nanovllm/runner/host_memory.py",
    "tests/end_to_end/test_prefill_decode.py": "nanovllm/engine/tickets.py",
    "tests/transfer/test_remote_pages.py": "nanovllm/transfer/lender.py",
    "tests/transfer/test_page_client.py": """
        nanovllm/transfer/messages.py nanovllm/transfer/sealed.py""",
    "tests/runner/test_roles.py": "nanovllm/runner/page_shares.py",
    "tests/runner/test_transfer.py": """
        nanovllm/disk_cache.py nanovllm/engine/transfer_ends.py nanovllm/runner/copy_stream.py
        nanovllm/runner/disk.py""",
    "tests/sampling/test_sampler.py": """
        nanovllm/sampling/__init__.py nanovllm/sampling/allowed_tokens.py
        nanovllm/sampling/bad_words.py nanovllm/sampling/base.py
        nanovllm/sampling/columns.py nanovllm/sampling/logit_bias.py nanovllm/sampling/logprobs.py
        nanovllm/sampling/min_tokens.py nanovllm/sampling/penalties.py
        nanovllm/sampling/truncate.py""",
    "tests/server/test_ranges.py": "nanovllm/sampling/vetting.py",
    "tests/server/test_choice.py": """
        nanovllm/server/answers.py nanovllm/server/orders.py nanovllm/server/shapes.py""",
    "tests/server/test_stream.py": "nanovllm/server/asgi.py",
    "tests/server/test_protocol.py": "nanovllm/server/errors.py",
    "tests/server/test_large.py": "nanovllm/server/length.py",
    "tests/server/test_pieces.py": "nanovllm/server/pieces.py",
    "tests/server/test_shutdown.py": "nanovllm/server/main.py",
    "tests/server/test_renderer.py": """
        nanovllm/server/render_task.py nanovllm/server/rendering.py""",
    "tests/server/test_sandbox.py": "nanovllm/server/template_files.py",
    "tests/server/test_metrics.py": """
        nanovllm/server/metric_help.py nanovllm/server/process_facts.py""",
    "tests/server/parsers/test_json_calls.py": "nanovllm/server/parsers/json_call.py",
    "tests/server/parsers/test_families.py": """
        nanovllm/server/parsers/__init__.py nanovllm/server/parsers/base.py
        nanovllm/server/parsers/json_types.py nanovllm/server/parsers/markers.py
        nanovllm/server/parsers/json_value.py nanovllm/server/parsers/machine.py
        nanovllm/server/parsers/plain.py nanovllm/server/parsers/xml_call.py""",
    "tests/grammars/test_automata.py": "nanovllm/grammars/regexes.py nanovllm/grammars/texts.py",
    "tests/grammars/test_schema.py": """
        nanovllm/grammars/document.py nanovllm/grammars/facts.py nanovllm/grammars/keywords.py
        nanovllm/grammars/negation.py nanovllm/grammars/objects.py nanovllm/grammars/parts.py
        nanovllm/grammars/reader.py nanovllm/grammars/rules.py""",
    "tests/grammars/runtime/test_masks.py": "nanovllm/grammars/runtime/compiler.py",
    "tests/server/test_tag_parameters.py": "nanovllm/grammars/tags.py",
    "tests/kernels/test_interpreted.py": """
        nanovllm/attention/paged.py nanovllm/attention/triton.py
        kernels/nanovllm_kernels/adapters/deltas.py
        nanovllm/cli/check_kernels.py nanovllm/attention/delta_triton.py
        kernels/nanovllm_kernels/__init__.py kernels/nanovllm_kernels/norms/activation.py
        kernels/nanovllm_kernels/sampling/apply_mask.py
        kernels/nanovllm_kernels/sampling/batch_prep.py
        kernels/nanovllm_kernels/sampling/batch_reference.py
        kernels/nanovllm_kernels/case.py kernels/nanovllm_kernels/interpreter.py
        kernels/nanovllm_kernels/attention/decode_cases.py
        kernels/nanovllm_kernels/delta/cases.py kernels/nanovllm_kernels/norms/norm.py
        kernels/nanovllm_kernels/attention/paged_decode.py
        kernels/nanovllm_kernels/attention/paged_prefill.py
        kernels/nanovllm_kernels/norms/rope_cases.py
        kernels/nanovllm_kernels/norms/rope_store.py
        kernels/nanovllm_kernels/sampling/thresholds.py""",
    "tests/kernels/test_compile_cache.py": """
        kernels/nanovllm_kernels/compile_one.py kernels/nanovllm_kernels/device.py
        kernels/nanovllm_kernels/attention/flash_prefill.py""",
    "tests/kernels/products/test_block_fp8_cute.py": """
        kernels/nanovllm_kernels/products/block_fp8_cases.py""",
    "tests/kernels/products/test_gated_linear.py": """
        kernels/nanovllm_kernels/products/gated_product.py
        kernels/nanovllm_kernels/experts/grouped_product.py kernels/nanovllm_kernels/like.py
        kernels/nanovllm_kernels/products/linear_cases.py""",
    "tests/kernels/test_triton_compiles.py": "kernels/nanovllm_kernels/triton_parts.py",
    "tests/kernels/experts/test_grouped_linear.py": """
        kernels/nanovllm_kernels/experts/gated_experts.py""",
    "tests/kernels/delta/test_delta_kernels.py": """
        kernels/nanovllm_kernels/delta/decode.py kernels/nanovllm_kernels/delta/prefill.py""",
    "tests/kernels/test_rows_apart.py": """
        kernels/nanovllm_kernels/delta/ordered.py kernels/nanovllm_kernels/products/per_head.py""",
    "tests/kernels/products/test_few_fp8.py": """
        kernels/nanovllm_kernels/products/dense_fp8.py
        kernels/nanovllm_kernels/products/few_fp8_cases.py""",
    "tests/kernels/products/test_quantise.py": """
        kernels/nanovllm_kernels/products/quantise_cases.py""",
    "tests/kernels/attention/test_latent_decode_cute.py": """
        kernels/nanovllm_kernels/attention/cute_cases.py
        kernels/nanovllm_kernels/ring_cute.py""",
    "tests/gpu/test_kernels.py": """
        kernels/nanovllm_kernels/products/skinny_cases.py kernels/nanovllm_kernels/timing.py""",
}


def sources() -> set[str]:
    """Return the files that contain more than a docstring."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        str(path.relative_to(ROOT)) for path in found if len(ast.parse(path.read_text()).body) > 1
    }


def has_its_own(source: str, tests: Iterable[str]) -> bool:
    package = next(p for p in PACKAGES if source.startswith(f"{p}/"))
    path = Path(PACKAGES[package]) / Path(source).relative_to(package)
    own = re.compile(rf"{path.parent}/test_{path.stem}(_\w+)?\.py")
    return any(own.fullmatch(test) for test in tests)


def problems(
    sources: set[str], table: dict[str, str], tests: set[str], text_of: Callable[[str], str]
) -> list[str]:
    driven = {source for entry in table.values() for source in entry.split()}
    return [
        *(f"{s}: no test names it" for s in sources - driven if not has_its_own(s, tests)),
        *(f"{s}: no such source, but a line of the table" for s in driven - sources),
        *(f"{t}: no such test, but a line of the table" for t in set(table) - tests),
        *(f"{t}: without a test" for t in set(table) & tests if "def test_" not in text_of(t)),
    ]


def test_every_source_is_named() -> None:
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert problems(sources(), DRIVEN_BY, tests, lambda name: (ROOT / name).read_text()) == []


def test_what_is_wrong_is_said() -> None:
    has = {
        "nanovllm/kv/memory.py",
        "nanovllm/kv/pages.py",
        "kernels/nanovllm_kernels/norms/norm.py",
    }
    tests = {"tests/kv/test_memory_hits.py", "tests/kernels/norms/test_norm.py", "tests/test_a.py"}
    texts = {"tests/test_a.py": "import a"}.get
    assert problems(has - {"nanovllm/kv/pages.py"}, {}, tests, texts) == []
    assert problems(has, {}, tests, texts) == ["nanovllm/kv/pages.py: no test names it"]
    table = {"tests/test_a.py": "nanovllm/kv/pages.py nanovllm/b.py", "tests/test_b.py": ""}
    assert problems(has, table, tests, texts) == [
        "nanovllm/b.py: no such source, but a line of the table",
        "tests/test_b.py: no such test, but a line of the table",
        "tests/test_a.py: without a test",
    ]
