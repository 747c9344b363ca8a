"""Selection of `pytest -m quick`, about two minutes for all packages, and the slowest files."""

from __future__ import annotations

QUICK = (
    "adapters/test_slots.py", "attention/",
    "bench/test_gpus.py", "bench/test_record.py", "bench/test_report.py", "bench/test_workload.py",
    "cli/test_bench.py",
    "load/test_soak.py",
    "end_to_end/test_generate.py",
    "engine/test_clock.py", "engine/test_pace.py", "engine/test_process.py",
    "engine/test_progress.py", "engine/test_recent.py",
    "grammars/test_automata.py",
    "ipc/",
    "kernels/sampling/test_reference.py",
    "kv/",
    "layers/",
    "models/",
    "paper/test_corruption.py", "paper/test_engine.py", "paper/test_sharing.py",
    "parallel/test_mesh.py", "parallel/test_ring.py",
    "runner/test_corrupted.py", "runner/test_graphs_piecewise.py", "runner/test_room.py",
    "sampling/test_sampler.py",
    "sched/",
    "server/parsers/test_families.py",
    "server/test_tag.py",
    "server/test_choice.py", "server/test_debug_steps.py", "server/test_detokenize.py",
    "server/test_metrics.py",
    "server/test_protocol.py", "server/test_served.py", "server/test_small_routes.py",
    "server/test_template.py", "server/test_tool_choice.py", "server/test_unsupported.py",
    "spec/",
    "transfer/",
    "test_config_model.py", "test_config_names.py", "test_config_schedule.py", "test_log.py",
    "test_named_by_tests.py", "test_quick.py", "test_shape_of_code.py", "test_shapes.py",
    "test_docstrings.py", "test_speculate.py", "test_tour.py",
)  # fmt: skip
SLOW = {  # tests of the quick files that take seconds
    "test_in_the_interpreter",
    "test_a_sleeping_reader_wakes_and_an_idle_one_computes_nothing",
    "test_a_sweep_starts_its_server_once",
    "test_a_sweep_writes_a_record_per_concurrency_and_one_plot",
    "test_lanes_never_change_the_text",
    "test_no_tensor_is_invisible",
    "test_compiled_references_mean_the_same_for_any_number_of_tokens",
    "test_ready_until_the_engine_is_gone_or_the_server_ends",
    "test_the_backend_does_not_import_the_language_of_its_kernel",
}
LONG = (  # files with tests of ten seconds or more
    "attention/test_latent_rows.py", "end_to_end/test_hybrid.py",
    "kernels/delta/test_delta_kernels.py", "kernels/exchange/test_all_reduce.py",
    "kernels/experts/test_routed_kernels.py", "kernels/sampling/test_draw.py",
    "kernels/test_interpreted.py", "kernels/test_triton_compiles.py",
    "paper/test_random_batches.py", "runner/test_nothing_compiles_later.py", "sched/test_lanes.py",
)  # fmt: skip


def is_quick(name: str, test: str = "") -> bool:
    """Return True if a path below tests/ is in a quick file or folder."""
    listed = any(name == one or (one.endswith("/") and name.startswith(one)) for one in QUICK)
    return listed and test not in SLOW
