"""Tables of rows that nanovllm and vLLM run in turn on this machine, with random weights.

    VLLM_PYTHON=~/vllm/bin/python python -m results.rows PART [--rows NAME,...] [--list]

A row is one command: one start of one engine under one or more loads. Its time limit is printed and
enforced, and its records are written one by one. After a failed row, the next one runs. Without
VLLM_PYTHON, rows of vLLM are skipped. `results/measure.sh PART` is the same, with ROWS and FLAGS.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click

from nanovllm.bench.record import fingerprint
from nanovllm.config import load_config
from results.peers import NANOVLLM, folder_for_both

PEERS = [sys.executable, str(Path(__file__).with_name("peers.py"))]
LIMIT = 2.0  # limit of a row over its expected time
ENDED_S = 10.0  # from SIGTERM to SIGKILL
OURS_S, THEIRS_S = 40, 125  # one start, without its loads
DENSE, EXPERTS = "recipes/qwen3-8b.yaml", "recipes/qwen3-30b-a3b.yaml"
NEXT, R1 = "recipes/qwen3-next-80b-a3b.yaml", "recipes/deepseek-r1.yaml"
SMALL, WIDE = "recipes/qwen3-0.6b.yaml", "recipes/qwen3-32b.yaml"
LARGE, MOE = "recipes/qwen3.5-27b.yaml", "recipes/qwen3.5-35b-a3b.yaml"
FIVE = "w1,bs1,bs64,bs256,prefill"
UNIFORM = ["--set", "experts.routing=uniform"]
RANDOM = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random"
NO_DEEP_GEMM, TRITON = "VLLM_USE_DEEP_GEMM=0", {"gdn_prefill_backend": "triton"}
RANK = 16
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STREAMS = "--concurrency 64 --num-prompts 512 --input-len 200 --processes 4"
HTTP = "--streams 1,64,256 --servers 4 --input-len 1000 --output-len 256"
AGENTS = "--concurrency 16 --sessions 16 --turns 8 --shared-len 4000 --growth 1000-3000"
AGENTS += " --answers 50-300 --longest 24000 --pauses 0.5-2 --warmup 0 --processes 4"
RETURNING = [sys.executable, "-m", "tests.load.returning"]
# With R1's first 6 layers, a prompt has 207 MB of pages.
RETURNED = "--tokens 30000 --rounds 1 --disk-gib 4"


class Row(NamedTuple):
    """One command. `gpus` are those it needs."""

    name: str
    engine: str  # "nanovllm" or "vllm"
    command: list[str]
    seconds: int  # expected time on H100s
    gpus: int = 1


def ours(name: str, recipe: str, loads: str, *flags: str, seconds: int = 15, gpus: int = 1) -> Row:
    """Return a row of `nanovllm bench --offline`. `seconds` are those of the loads."""
    line = [*NANOVLLM, "bench", "--offline", recipe, "--workload", loads]
    command = [*line, "--load-format", "dummy", *flags]
    return Row(name, "nanovllm", command, OURS_S + seconds, gpus)


def theirs(
    name: str,
    recipe: str,
    loads: str,
    *flags: str,
    settings: dict[str, Any] | None = None,
    variables: Sequence[str] = (),
    seconds: int = 15,
    gpus: int = 1,
) -> Row:
    """Return a row of vLLM without HTTP. `settings` are arguments of vllm.LLM."""
    line = ["env", *variables, *PEERS, "offline", recipe, "--only", "vllm", "--workloads", loads]
    arguments = ["--theirs", json.dumps(settings)] if settings else []
    return Row(name, "vllm", [*line, *flags, *arguments], THEIRS_S + seconds, gpus)


def setting(**values: object) -> list[str]:
    """Return --set flags. Two underscores in a name are a point."""
    words = (f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items())
    return [word for text in words for word in ("--set", text.replace('"', ""))]


def note(text: str) -> list[str]:
    return ["--note", text]


def first_layers(recipe: str) -> list[str]:
    """Return the flags by which both engines run the layers that one GPU holds."""
    return {NEXT: ["--layers", "16"], R1: ["--layers", "6"]}.get(recipe, [])


# -- files that both engines read ---------------------------------------------------------------


def of_target(recipe: str) -> dict[str, Any]:
    config = json.loads(Path(load_config(recipe, ["load.format=dummy"]).config_path).read_text())
    return dict(config.get("text_config", config))


def eagle_head(recipe: str) -> Path:
    """Write the config of an EAGLE-3 head of one layer that fits the model. Return its folder."""
    target = of_target(recipe)
    same = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
    same += ["head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings"]
    depth = target["num_hidden_layers"]
    taps = {"eagle_aux_hidden_state_layer_ids": [2, depth // 2, depth - 3]}
    head = {name: target[name] for name in same} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "draft_vocab_size": min(32_000, target["vocab_size"]),
        "eagle_config": taps,  # vLLM's runners read one place each
        **taps,
    }
    folder = Path(tempfile.gettempdir(), "nanovllm-peers", "eagle3", Path(recipe).stem)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head))
    return folder


def random_adapter(recipe: str, modules: Sequence[str], *, copies: int = 1) -> Path:
    """Write equal adapters of rank RANK, named a1, a2, ... Return the folder of their folders."""
    import torch
    from safetensors.torch import save_file

    target = of_target(recipe)
    size, heads, head_dim = (target[k] for k in ("hidden_size", "num_attention_heads", "head_dim"))
    inner, kv = heads * head_dim, target["num_key_value_heads"] * head_dim
    middle = target["intermediate_size"]
    shapes = {  # inputs, outputs
        "q_proj": (size, inner), "k_proj": (size, kv), "v_proj": (size, kv),
        "o_proj": (inner, size), "gate_proj": (size, middle), "up_proj": (size, middle),
        "down_proj": (middle, size),
    }  # fmt: skip
    tensors = {}
    for layer in range(target["num_hidden_layers"]):
        for module in modules:
            part = "self_attn" if module in ALL_LINEARS[:4] else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            inputs, outputs = shapes[module]
            a_RI, b_OR = torch.randn(RANK, inputs), torch.randn(outputs, RANK)
            tensors[f"{name}.lora_A.weight"] = (0.02 * a_RI).bfloat16()
            tensors[f"{name}.lora_B.weight"] = (0.02 * b_OR).bfloat16()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*modules]}
    every = Path(tempfile.gettempdir(), "nanovllm-peers", "adapters", Path(recipe).stem)
    weights = every / "a1" / "adapter_model.safetensors"
    for nth in range(1, copies + 1):
        folder = every / f"a{nth}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        copy = folder / weights.name
        copy.unlink(missing_ok=True)
        if nth == 1:
            save_file(tensors, weights)
        else:
            copy.hardlink_to(weights)
    return every


# -- the tables ---------------------------------------------------------------------------------


def drafted(method: str, rates: Sequence[float], model: str = "") -> tuple[list[str], list[str]]:
    """Return the flags of nanovllm and of vLLM for drafts accepted at given rates.

    `rates` are shares of all steps in which a draft is accepted, in both engines.
    """
    own = {
        "speculate__method": method,
        "speculate__tokens": len(rates),
        "speculate__accept": [*rates],
    }
    config = {
        "method": method,
        "num_speculative_tokens": len(rates),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [*rates],
    }
    if method == "draft_model":  # vLLM needs a folder, and nanovllm a config
        small = load_config(model, ["load.format=dummy"])
        own["speculate__model"], config["model"] = small.config_path, str(folder_for_both(small))
    elif model:
        own["speculate__model"] = config["model"] = model
    rates_text = ",".join(map(str, rates))
    return setting(**own), [*note(f"speculate={method} {rates_text}"), json.dumps(config)]


def drafts(recipe: str) -> Iterator[Row]:
    """Drafts by a head, the model's own layer, a small model, and n-grams."""
    head = str(eagle_head(recipe or DENSE))
    seen: set[str] = set()
    for name, model, loads, method, rates, drafter in (
        ("eagle3", recipe or DENSE, "bs1,bs64", "eagle3", (0.65, 0.4, 0.2), head),
        ("none", recipe or DENSE, "bs1,bs64", "eagle3", (0.0, 0.0, 0.0), head),
        ("small", recipe or DENSE, "bs1", "draft_model", (0.7, 0.5, 0.35), SMALL),
        ("next", NEXT, "bs1", "mtp", (0.85, 0.6), ""),
        ("r1", R1, "bs1", "mtp", (0.85,), ""),
    ):
        layers, variables, settings, same = first_layers(model), [], {}, []
        if model in (NEXT, R1):
            variables = [RANDOM, NO_DEEP_GEMM]
            settings = dict(TRITON) if model == NEXT else {}
            same = [*UNIFORM, *setting(parallel__tp=1, model__num_layers=int(layers[1]))]
        if model not in seen:
            yield ours(
                f"{name}-base", model, "bs1,bs64" if model not in (NEXT, R1) else loads, *same
            )
        seen.add(model)
        own, (*notes, config) = drafted(method, rates, drafter)
        yield ours(name, model, loads, *same, *own)
        settings |= {"speculative_config": json.loads(config)}
        alike = ["--set", "parallel.tp=1"] if same else []
        yield theirs(
            name, model, loads, *layers, *alike, *notes, settings=settings, variables=variables
        )
    for name, served in (("ngram-0.6b", SMALL), ("ngram-demo", "recipes/demo.yaml")):
        line = [*NANOVLLM, "bench", "--start", served, *shlex.split(STREAMS)]
        line += ["--load-format", "dummy"] if served == SMALL else []
        yield Row(f"{name}-base", "nanovllm", line, OURS_S + 15)
        yield Row(name, "nanovllm", [*line, *setting(speculate__method="ngram")], OURS_S + 15)


def adapters(recipe: str) -> Iterator[Row]:
    """1 and 64 requests, without adapters and with 1, 8 and 64 of them."""
    model = recipe or DENSE
    yield ours("base", model, "bs1,bs64")
    for name, loads, slots, used in (
        ("unused", "bs1,bs64", 8, 0), ("one", "bs1,bs64", 8, 1), ("eight", "bs64", 8, 8),
        ("many", "bs64", 64, 64),
    ):  # fmt: skip
        flags = setting(adapters__folder="dummy", adapters__slots=slots, adapters__max_rank=RANK)
        yield ours(name, model, loads, *flags, "--adapters", str(used))
    place = str(random_adapter(model, ALL_LINEARS) / "a1")
    yield theirs("base", model, "bs1,bs64")
    for name, loads, slots in (
        ("eight", "bs1,bs64,bs1:1,bs64:1,bs64:8", 8), ("many", "bs64:64", 64),
    ):  # fmt: skip
        settings = {"enable_lora": True, "max_loras": slots, "max_lora_rank": RANK}
        yield theirs(
            name, model, loads, "--adapter", place, *note(f"slots={slots}"), settings=settings
        )
    if recipe:
        return
    every = random_adapter(EXPERTS, ALL_LINEARS[:4], copies=8)
    flags = setting(adapters__folder=str(every), adapters__slots=8, adapters__max_rank=RANK)
    yield ours("experts-base", EXPERTS, "bs1,bs64", *UNIFORM, seconds=25)
    yield ours("experts", EXPERTS, "bs1,bs64", *UNIFORM, *flags, "--adapters", "8", seconds=25)
    settings = {"enable_lora": True, "max_loras": 8, "max_lora_rank": RANK}
    yield theirs(
        "experts", EXPERTS, "bs1,bs64,bs1:1,bs64:8", "--adapter", str(every / "a1"),
        *note("slots=8"), settings=settings, variables=[RANDOM], seconds=30,
    )  # fmt: skip


def agents(recipe: str) -> Iterator[Row]:
    """Agents of 260,000 tokens, a GPU's cache of 87,000, and 40 GiB of host memory.

    Row "disk" gives the first token of a long prompt that is computed, and that returns from each
    tier, with the disk's own rate. Its model has small pages: at 1 GB/s, loads of 8B do not pay.
    """
    line = [*PEERS, "online", recipe or DENSE, "--streams", "agents", *shlex.split(AGENTS)]
    for name, also in (("off", []), ("on", setting(cache__host_gib=40))):
        own = [*line, "--servers", "4", *setting(cache__pages=680), *also, "--only", "nanovllm"]
        yield Row(name, "nanovllm", own, OURS_S + 110)
    settings = {"num_gpu_blocks_override": 5440, "enable_prompt_tokens_details": True}
    for name, offload in (("off", {}), ("on", {"kv_offloading_size": 40})):
        arguments = json.dumps(settings | offload)
        flags = ["--servers", "4", "--theirs", arguments, "--only", "vllm"]
        yield Row(name, "vllm", [*line, *flags], THEIRS_S + 130)
    sizes = setting(load__format="dummy", cache__pages=300, cache__host_gib=0.7)
    if not recipe:
        sizes += [*UNIFORM, *setting(parallel__tp=1, model__num_layers=6)]
    returned = [*RETURNING, recipe or R1, *sizes, *shlex.split(RETURNED)]
    yield Row("disk", "nanovllm", returned, OURS_S + 15)


def new(recipe: str) -> Iterator[Row]:
    """Qwen3.5-35B-A3B in fp8 and 27B in bf16, without and with MTP."""
    own, (*notes, config) = drafted("mtp", (0.85, 0.6))
    speculative = {"speculative_config": json.loads(config)}
    for name, model, flags, fp8 in (
        ("35b", MOE, [*UNIFORM, *setting(quantize="fp8")], ["--fp8"]), ("27b", LARGE, [], []),
    ):  # fmt: skip
        loads = "bs1,bs64,bs256,prefill"
        # 80 GB hold 54 GB of weights, and the states of 64 requests.
        slots = setting(schedule__slots=64) if name == "27b" else []
        used, variables = recipe or model, [RANDOM, NO_DEEP_GEMM]
        yield ours(name, used, loads, *flags, *slots, seconds=60)
        yield ours(f"{name}-mtp", used, loads, *flags, *slots, *own, seconds=50)
        settings = TRITON | ({"max_num_seqs": 64} if name == "27b" else {})
        yield theirs(name, used, loads, *fp8, settings=settings, variables=variables, seconds=75)
        yield theirs(
            f"{name}-mtp", used, loads, *fp8, *notes,
            settings=settings | speculative, variables=variables, seconds=65,
        )  # fmt: skip


def thin(recipe: str) -> Iterator[Row]:
    """Loads in which the lead is small."""
    five = "w1,bs1,bs64,bs256-128,prefill"
    yield ours("8b", recipe or DENSE, five, seconds=50)
    yield theirs("8b", recipe or DENSE, five, seconds=60)
    for engine, seconds in (("nanovllm", OURS_S + 110), ("vllm", THEIRS_S + 120)):
        line = [*PEERS, "online", recipe or DENSE, *shlex.split(HTTP), "--only", engine]
        yield Row("http", engine, line, seconds)
    most = "bs1-256,bs64,bs256-128,prefill"
    yield ours("30b", recipe or EXPERTS, most, *UNIFORM, seconds=40)
    yield theirs("30b", recipe or EXPERTS, most, variables=[RANDOM], seconds=45)
    if not recipe:
        four = [*setting(parallel__tp=4), *setting(schedule__slots=256)]
        yield ours("32b", WIDE, most, *four, seconds=60, gpus=4)
        yield theirs(
            "32b", WIDE, most, "--tp", "4", variables=["VLLM_ALLREDUCE_USE_SYMM_MEM=0"],
            seconds=75, gpus=4,
        )  # fmt: skip


def invariant(recipe: str) -> Iterator[Row]:
    """The price of kernels.invariant, with vLLM's own."""
    for name, model, loads in (
        ("0.6b", SMALL, FIVE), ("8b", DENSE, FIVE), ("30b", EXPERTS, "bs1,bs64"),
        ("next", NEXT, "bs1-256,bs64"),
    ):  # fmt: skip
        flags = UNIFORM if name in ("30b", "next") else []
        flags = (
            [*flags, *setting(parallel__tp=1, model__num_layers=16)] if name == "next" else flags
        )
        for key in (False, True):
            suffix = "-invariant" if key else ""
            yield ours(f"{name}{suffix}", recipe or model, loads, *flags,
                       *setting(kernels__invariant=key), seconds=40)  # fmt: skip
    for value in ("0", "1"):
        variables, notes = [f"VLLM_BATCH_INVARIANT={value}"], note(f"invariant={value}")
        suffix = "-invariant" if value == "1" else ""
        yield theirs(f"8b{suffix}", recipe or DENSE, FIVE, *notes, variables=variables, seconds=65)
    test = [sys.executable, "-m", "pytest", "-q", "--tb=short", "tests/gpu/test_invariant.py"]
    yield Row("tests", "nanovllm", test, 240)
    yield Row("kernels", "nanovllm", [*NANOVLLM, "check-kernels", "--invariant"], 60)


PARTS: dict[str, Callable[[str], Iterator[Row]]] = {
    part.__name__: part for part in (drafts, adapters, agents, new, thin, invariant)
}


# -- running them -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", default="", help="names of rows, by default all")
    parser.add_argument("--engine", choices=("nanovllm", "vllm"), help="by default both")
    parser.add_argument("--recipe", default="", help="a recipe in place of those of the rows")
    parser.add_argument("--loads", default="", help="other loads for all rows without HTTP")
    parser.add_argument("--list", action="store_true", help="print the rows' commands and times")
    parser.add_argument("--results-dir", default="results")
    options, flags = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are stopped
    names = {name for name in options.rows.split(",") if name}
    every = [*PARTS[options.part](options.recipe)]
    if unknown := names - {row.name for row in every}:
        parser.error(f"no row {', '.join(sorted(unknown))} in {options.part}")
    rows = [row for row in every if not names or row.name in names]
    rows = [row for row in rows if options.engine in (None, row.engine)]
    if "VLLM_PYTHON" not in os.environ and not options.list:
        click.echo("VLLM_PYTHON is not set: rows of vLLM are skipped")
        rows = [row for row in rows if row.engine != "vllm"]
    if not options.list and (
        wide := [row for row in rows if row.gpus > max(1, fingerprint().gpu_count)]
    ):
        click.echo(f"too few GPUs for {', '.join(f'{row.engine} {row.name}' for row in wide)}")
        rows = [row for row in rows if row not in wide]
    total = sum(row.seconds for row in rows)
    click.echo(f"{options.part}: {len(rows)} rows, {total} s expected")
    failed = []
    for row in rows:
        for_all = [*flags, "--results-dir", options.results_dir]
        command = with_flags(row.command, options.loads, for_all)
        click.echo(f"{row.engine} {row.name}: {row.seconds} s expected: {shlex.join(command)}")
        if options.list:
            continue
        begin, limit_s = time.perf_counter(), LIMIT * row.seconds
        problem = run(command, limit_s)
        duration = f"{time.perf_counter() - begin:.0f} s"
        click.echo(f"{row.engine} {row.name}: {problem or 'measured'} after {duration}")
        if problem:
            failed.append(f"{row.engine} {row.name}")
    if failed:
        click.echo(f"failed: {', '.join(failed)}", err=True)
        sys.exit(1)


def with_flags(command: Sequence[str], loads: str, flags: Sequence[str]) -> list[str]:
    """Return a command with the flags of all rows, which tests do not take, and other loads.

    In vLLM's rows, each load keeps its number of adapters.
    """
    words = [*command]
    for flag in ("--workload", "--workloads"):
        if loads and flag in words:
            at = words.index(flag) + 1
            counts = dict.fromkeys(text.partition(":")[2] for text in words[at].split(","))
            new = (f"{name}:{n}" if n else name for n in counts for name in loads.split(","))
            words[at] = ",".join(new) if words[at] != "agents" else words[at]
    takes_flags = {"bench", "online", "offline", RETURNING[-1]} & {*command}
    return [*words, *flags] if takes_flags else words


def run(command: Sequence[str], limit_s: float) -> str:
    """Run a command. Return why it failed, or "". After `limit_s` stop it and its processes."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"stopped at its limit of {limit_s:.0f} s"
    else:
        return f"failed with exit code {code}" if code else ""
    finally:
        process.terminate()  # both engines stop their own processes
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
