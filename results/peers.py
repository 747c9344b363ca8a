"""vLLM and nanovllm in turn on this machine: one client, the same prompts, random weights.

    VLLM_PYTHON=~/vllm/bin/python python results/peers.py online RECIPE [--servers 1,4] [--tp N]
    VLLM_PYTHON=~/vllm/bin/python python results/peers.py offline RECIPE [--tp N] [--layers N]

Both engines read one folder: the recipe's config.json and the demo's tokenizer, in which every id
of the model's vocabulary has a text. Every record has the name and version of its engine, the
command line and the VLLM_* variables that were set. Flags that are not in --help go to
`nanovllm bench`. The last output is a table of ratios to vLLM, and a plot. results/rows.py has the
tables of which one row after another is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from nanovllm.bench import record, store, sweep
from nanovllm.bench.measure import now
from nanovllm.bench.record import Record
from nanovllm.bench.started import NotStarted, started
from nanovllm.bench.workload import TokenLoad, token_load
from nanovllm.config import DEMO, Config, load_config

NANOVLLM = [sys.executable, "-m", "nanovllm"]
# Prompts and answers of 100 to 2,000 tokens. As for all rates, ramp and tail are counted.
LENGTHS = ["--input-len", "1050", "--output-len", "1050", "--range-ratio", "0.905"]
MIXED = ["--concurrency", "64", "--num-prompts", "256", *LENGTHS]
MOST_PROMPTS = 768
PREFILL = ["--concurrency", "16", "--num-prompts", "64", "--input-len", "4000", "--output-len", "1"]
ERROR = re.compile("error|traceback", re.IGNORECASE)
SHOWN = 15  # last lines of vLLM's log, printed if it fails
FREED_S = 2.0  # time until the GPU memory of a stopped engine is free
BLOCK_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def main() -> None:
    options, flags = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are stopped
    config = load_config(options.recipe, ["load.format=dummy", *options.set])
    options.gpus = options.tp or config.recipe.parallel.tp
    folder = folder_for_both(config, options.layers, is_fp8=options.fp8)
    measure = online if options.how == "online" else offline
    records = measure(options, flags, folder)
    if options.only is None:
        conclude_all(records, options.results_dir)
    num_theirs = sum(one.engine != "nanovllm" for one in records)
    expected = len(options.workloads.split(",")) if options.how == "offline" else 1
    if options.only != "nanovllm" and num_theirs < expected:  # the reason is printed
        sys.exit(1)


def conclude_all(records: Sequence[Record], results_dir: Path) -> None:
    """Print the tables of ratios, and plot. Mixed lengths and prefill have their own."""
    mixed = [one for one in records if one.workload["name"].endswith("-mixed")]
    prefill = [one for one in records if one.metrics["output_tokens"] == one.metrics["completed"]]
    others = [one for one in records if one not in mixed and one not in prefill]
    for some, name in ((others, "peers"), (mixed, "peers-mixed"), (prefill, "peers-prefill")):
        if some:
            conclude(some, results_dir, name)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("how", choices=("online", "offline"))
    parser.add_argument("recipe")
    parser.add_argument(
        "--servers", default="1,4", help="numbers of API processes, one set-up each"
    )
    parser.add_argument("--streams", default="1,4,16,64,256,mixed", help="loads of online")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="KEY=VALUE[,...]",
        help="online: nanovllm once more with these keys",
    )
    parser.add_argument(
        "--workloads", default="bs1-256,bs64,bs256-128,prefill", help="loads of offline"
    )
    parser.add_argument("--tp", type=int, help="tensor-parallel GPUs (default: RECIPE's)")
    parser.add_argument("--layers", type=int, help="offline: number of first layers, for both")
    parser.add_argument(
        "--theirs", type=json.loads, default={}, help="arguments of vllm.LLM as JSON"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="KEY=VALUE of the recipe, nanovllm only"
    )
    parser.add_argument("--only", choices=("vllm", "nanovllm"), help="measure one engine")
    parser.add_argument(
        "--note",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="offline: a change by --theirs or a variable, for the record",
    )
    parser.add_argument("--fp8", action="store_true", help="offline: block fp8 weights in vLLM")
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="offline: bs64:8 has 8 adapters like this one in vLLM"
    )
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    options, flags = parser.parse_known_args()
    if options.only != "nanovllm" and "VLLM_PYTHON" not in os.environ:
        parser.error("VLLM_PYTHON must name an interpreter that has vLLM")
    options.ours = ["--tp", str(options.tp)] if options.tp else []
    options.ours += [word for text in options.set for word in ("--set", text)]
    return options, flags


def folder_for_both(config: Config, num_layers: int | None = None, *, is_fp8: bool = False) -> Path:
    """Return a model folder without weights, whose tokenizer has all ids of the vocabulary.

    The tokenizer cuts text as the demo's does. `num_layers` reduces the model to its first layers.
    Of a model with an image encoder, only the text model remains. `is_fp8` describes block fp8
    weights, of which a bf16 config has nothing.
    """
    folder = Path(tempfile.gettempdir(), "nanovllm-peers", config.served_name)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEMO / "chat_template.jinja", folder)
    model = text_model(json.loads(Path(config.config_path).read_text()))
    if is_fp8:
        model["quantization_config"] = BLOCK_FP8 | {
            "modules_to_not_convert": modules_in_bf16(model)
        }
    if num_layers is not None:
        model["num_hidden_layers"] = num_layers
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    # No merge makes one of these, so no text is encoded to them; \u0120 is a byte-level space.
    vocabulary |= {f"\u0120{at:x}": at for at in range(len(vocabulary), model["vocab_size"])}
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    settings["model_max_length"] = model["max_position_embeddings"]
    files = {"config": model, "tokenizer": tokenizer, "tokenizer_config": settings}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def text_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model alone, with the name of its class."""
    if "text_config" not in config:
        return config
    (name,) = config["architectures"]
    text = {"architectures": [name.replace("ForConditionalGeneration", "ForCausalLM")]}
    return {**text, "tie_word_embeddings": config["tie_word_embeddings"], **config["text_config"]}


def modules_in_bf16(model: dict[str, Any]) -> list[str]:
    """Return the modules that published checkpoints in block fp8 leave in bf16."""
    small = ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate", "mlp.shared_expert_gate")
    layers = [f"model.layers.{nth}" for nth in range(model["num_hidden_layers"])]
    modules = [f"{layer}.{name}" for layer in [*layers, "mtp.layers.0"] for name in small]
    return ["lm_head", "mtp.fc", *modules]


def online(options: argparse.Namespace, flags: list[str], folder: Path) -> list[Record]:
    """Measure every set-up of both engines under every load. Start each set-up once.

    If vLLM fails, return the records of nanovllm alone.
    """
    records = []
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    for command, bench_args in set_ups(options, folder, port):
        line = [*NANOVLLM, "bench", *bench_args, "--url", url, "--processes", "6"]
        try:
            with serving(command, url):
                for load in loads(options.streams, flags):
                    records += bench([*line, *load], options.results_dir)
        except (NotStarted, subprocess.CalledProcessError) as error:
            if command[0] != os.environ["VLLM_PYTHON"]:
                raise
            click.echo(f"vLLM failed: {error}", err=True)
    return records


def set_ups(
    options: argparse.Namespace, folder: Path, port: int
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the command that serves, and the arguments of `bench` that describe it.

    For each number of API processes: vLLM, nanovllm, and nanovllm with the keys of each --also.
    """
    for count in options.servers.split(","):
        theirs = f"serve {folder} --load-format dummy --port {port}"
        for key, value in options.theirs.items():
            theirs += f" --{key.replace('_', '-')}" + ("" if value is True else f" {value}")
        theirs += f" --tensor-parallel-size {options.gpus}" if options.gpus > 1 else ""
        theirs += f" --api-server-count {count}" if count != "1" else ""
        vllm = [os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.cli.main", *theirs.split()]
        if options.only != "nanovllm":
            yield vllm, ["--served-by", f"{vllm_settings()}vllm {theirs}"]
        ours = f"{options.recipe} --set model={folder} --load-format dummy --set server.port={port}"
        ours += f" --set server.workers={count}" if count != "1" else ""
        variants = ([], *(text.split(",") for text in options.also))
        for changes in variants if options.only != "vllm" else ():
            set_flags = [word for change in changes for word in ("--set", change)]
            own = [*ours.split(), *options.ours, *set_flags]
            yield [*NANOVLLM, "serve", *own], own


def offline(options: argparse.Namespace, flags: list[str], folder: Path) -> list[Record]:
    """Measure vLLM without HTTP, then nanovllm without HTTP, on the same token ids.

    If vLLM fails, return the records that it made until then, and those of nanovllm.
    """
    records = [] if options.only == "nanovllm" else vllm_offline(options, folder)
    if options.only == "vllm":
        return records
    same = ["--set", f"model.num_layers={options.layers}"] if options.layers else []
    engine_flags = "--load-format", "dummy", *options.ours, *same, *flags
    line = [*NANOVLLM, "bench", "--offline", options.recipe, "--workload", options.workloads]
    return records + bench([*line, *engine_flags], options.results_dir)


def vllm_offline(options: argparse.Namespace, folder: Path) -> list[Record]:
    """Measure all loads with one start of vLLM, and write each record as soon as it is made."""
    names = options.workloads.split(",")
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    loads, jobs = [], []
    for nth, text in enumerate(names):
        name, _, adapters = text.partition(":")
        load = token_load(name, seed=2 * nth, vocab_size=vocab_size)
        pair = (load.warm_up(2 * nth + 1, vocab_size), load)
        jobs.append([[*plain_load(one), int(adapters or 0)] for one in pair])
        loads.append(replace(load, name=f"{name}-lora{adapters}" if adapters else name))
    settings = {"model": str(folder), "max_model_len": 4096, "tensor_parallel_size": options.gpus}
    job = {"settings": settings | options.theirs, "loads": jobs, "adapter": options.adapter}
    altered = {"tp": options.gpus if options.gpus > 1 else None, "num_layers": options.layers}
    changed = {key: value for key, value in altered.items() if value is not None}
    changed |= {key: value for key, _, value in (text.partition("=") for text in options.note)}
    changed |= {"quantize": "fp8"} if options.fp8 else {}
    started_at, records = now(), []
    for load, result in zip(loads, run_vllm(job), strict=False):
        one = vllm_record(load, result, folder.name, started_at, changed)
        rate = one.metrics["output_tokens_per_s"]
        click.echo(f"vLLM, {load.name}: {rate:,.1f} tok/s, {one.duration_s:.3f} s")
        click.echo(f"record: {store.write(one, options.results_dir)}")
        records.append(one)
    return records


def vllm_record(
    load: TokenLoad, result: dict[str, Any], model: str, started_at: str, changed: dict[str, Any]
) -> Record:
    """Return the record of a load from the result of vllm_offline.py."""
    tokens, inputs, duration_s = (
        sum(load.outputs),
        sum(map(len, load.prompts)),
        result["duration_s"],
    )
    return record.of_this_machine(
        kind="offline",
        started_at=started_at,
        duration_s=duration_s,
        recipe={
            "model": model,
            "served_by": f"vllm {result['version']}",
            "command": f"{vllm_settings()}LLM({result['settings']})",
        },
        changed=changed,
        workload={
            "name": load.name,
            "concurrency": len(load.prompts),
            "request_rate": None,
            "num_prompts": len(load.prompts),
            "temperature": load.sampling.temperature,
            "ignore_eos": True,
            "arrivals": "all at once",
        },
        metrics={
            "output_tokens_per_s": tokens / duration_s,
            "input_tokens_per_s": inputs / duration_s,
            "duration_s": duration_s,
            "completed": len(load.prompts),
            "input_tokens": inputs,
            "output_tokens": tokens,
            "start_to_ready_s": result["ready_s"],
        },
    )


def run_vllm(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of vllm_offline.py, one for each load. Print its last errors if it fails.

    All its processes are killed at the end.
    """
    line = [os.environ["VLLM_PYTHON"], str(Path(__file__).with_name("vllm_offline.py"))]
    log = Path(tempfile.gettempdir(), "nanovllm-peers", "offline.log")
    job_file = log.with_name("job.json")
    job_file.write_text(json.dumps(job))
    click.echo(f"vLLM runs; its log: {log}")
    num_results = 0
    with job_file.open() as source, log.open("w") as output:
        process = subprocess.Popen(
            line,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for text in process.stdout:
                output.write(text)
                output.flush()
                if text.startswith("RESULT "):
                    num_results += 1
                    yield json.loads(text.removeprefix("RESULT "))
            process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(FREED_S if record.fingerprint().gpu_count else 0.0)
    if process.returncode == 0 and num_results == len(job["loads"]):
        return
    code = process.returncode
    ending = "without a result" if code == 0 else f"with exit code {code}"
    lines = log.read_text(errors="replace").splitlines() or ["no output"]
    error_lines = [one for one in lines if ERROR.search(one) or one == lines[-1]]
    click.echo("\n".join([f"vLLM ended {ending}; of {log}:", *error_lines[-SHOWN:]]), err=True)


def plain_load(load: TokenLoad) -> tuple[list[list[int]], list[int], dict[str, float]]:
    """Return prompts, numbers of output tokens and sampling, as vllm_offline.py reads them."""
    of = load.sampling
    sampling_params = {"temperature": of.temperature, "top_p": of.top_p, "top_k": of.top_k or -1}
    return load.prompts, load.outputs, sampling_params  # -1 means no limit in vLLM


def vllm_settings() -> str:
    """Return the VLLM_* variables that are set, as a shell writes them before a command.

    Keys are left out, because records are published.
    """
    hidden = {"VLLM_PYTHON", "VLLM_API_KEY"}
    names = sorted(name for name in {*os.environ} - hidden if name.startswith("VLLM_"))
    return "".join(f"{name}={shlex.quote(os.environ[name])} " for name in names)


@contextmanager
def serving(command: Sequence[str], url: str) -> Iterator[None]:
    """Start a server, and stop it with all its processes after the block."""
    log, group = Path(tempfile.gettempdir(), "nanovllm-peers", "server.log"), None
    # With exec, signals reach the server itself. With setsid, its children share one group.
    line = ["setsid", "bash", "-c", 'exec "$@" >"$0" 2>&1', str(log), *command]
    try:
        with started(line, url) as server:
            group = server.pid
            click.echo(f"ready in {server.ready_s:.1f} s: {shlex.join(command)}")
            yield
    except NotStarted:
        click.echo("\n".join(log.read_text(errors="replace").splitlines()[-60:]), err=True)
        raise
    finally:
        if group is not None:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            time.sleep(FREED_S if record.fingerprint().gpu_count else 0.0)


def loads(streams: str, flags: list[str]) -> Iterator[list[str]]:
    """Yield the arguments of each load. Given `flags` replace those of every load but prefill."""
    for name in streams.split(","):
        if name == "agents":
            yield ["--workload", "agents", *flags]
        elif name == "mixed":
            yield [*MIXED, *flags]
        elif name == "prefill":
            yield [*flags, *PREFILL]
        else:
            num = max(6, min(4 * int(name), MOST_PROMPTS))
            yield ["--concurrency", name, "--num-prompts", str(num), "--seed", name, *flags]


def bench(line: Sequence[str], results_dir: Path) -> list[Record]:
    """Run `nanovllm bench`, print its output, and return the records that it wrote."""
    line = [*line, "--results-dir", str(results_dir)]
    process = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    click.echo(process.stdout)
    process.check_returncode()
    places = re.findall(r"^record: (.+)$", process.stdout, re.MULTILINE)
    return [store.find(place, results_dir) for place in places]


def conclude(records: Sequence[Record], results_dir: Path, name: str) -> None:
    """Print the records' table of ratios and, of several loads, plot them."""
    digests = {(one.workload["name"], one.workload.get("digest")) for one in records}
    if len(digests) > len({name for name, _ in digests}):
        raise click.ClickException(f"the engines got different prompts: {sorted(digests)}")
    shared, curves = sweep.curves(records)
    again = sweep.command(records, results_dir)
    click.echo(f"\n{sweep.table(shared, curves)}\nthis table again: {again}")
    is_curve = len({sweep.intensity(one) for one in records}) > 1 and records[0].kind == "serve"
    if is_curve and not (problem := sweep.missing()):
        plot = sweep.plot_path(records, results_dir, name)
        sweep.draw(plot, shared, curves)
        click.echo(f"plot: {plot}")
    elif is_curve:
        click.echo(f"no plot: {problem}")


if __name__ == "__main__":
    main()
