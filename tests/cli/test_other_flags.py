"""Options of vLLM and SGLang: answers with nanovllm's options, in every command and in README."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import asdict

from nanovllm import cli, launch
from nanovllm.bench import store
from nanovllm.cli.other_flags import BENCH, SERVERS, answer, markdown
from nanovllm.config import ConfigError, load_config
from nanovllm.registry import resolve
from tests.bench.test_online import fake_chat

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).with_name("options_of_others.txt").read_text()
BEGIN, END = "<!-- options of other servers -->", "<!-- /options of other servers -->"
OPTIONS = {
    head: text.split() for head, text in re.findall(r"^# (.+)\n((?:-.*\n)+)", LISTED, re.MULTILINE)
}


def refused(*line: str) -> str:
    error = CliRunner().invoke(resolve(cli.COMMANDS, line[0]), line[1:]).exception
    assert isinstance(error, ConfigError), error
    return str(error)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--max-model-len 8192", "use --set server.max_model_tokens=8192"),
        ("--max-model-len=8192", "use --set server.max_model_tokens=8192"),
        ("--max_model_len 8192", "use --set server.max_model_tokens=8192"),
        ("--max-model-len 8k", "use --set server.max_model_tokens=8000"),
        ("--max-model-len 8K", "use --set server.max_model_tokens=8192"),
        ("--max-model-len -1", "use --set server.max_model_tokens=auto"),
        ("--max-model-len", "use --set server.max_model_tokens=N"),
        ("--context-length 4096", "use --set server.max_model_tokens=4096"),
        ("--tensor-parallel-size 2", "use --tp 2"),
        ("-tp 2", "use --tp 2"),
        ("-tp=2", "use --tp 2"),
        ("--tp-size 2", "use --tp 2"),
        ("-dp 4", "use --dp 4"),
        ("--gpu-memory-utilization 0.85", "use --set cache.memory_fraction=0.85"),
        ("--mem-fraction-static 0.85", "use --set cache.memory_fraction=0.85"),
        ("--max-num-seqs 64", "use --set schedule.slots=64"),
        ("--max-running-requests 64", "use --set schedule.slots=64"),
        ("--chunked-prefill-size 4096", "use --set schedule.step_tokens=4096"),
        ("--chunked-prefill-size -1", "not offered: long prompts are always computed in chunks"),
        ("--block-size 32", "use --set cache.page_tokens=32"),
        ("--kv-cache-dtype fp8_e4m3", "use --set cache.dtype=fp8"),
        ("--kv-cache-dtype auto", "leave it out, this is the default"),
        ("--enable-prefix-caching", "always on"),
        ("--no-enable-prefix-caching", "use --set cache.prefix=false"),
        ("--disable-radix-cache", "use --set cache.prefix=false"),
        ("--no-enable-chunked-prefill",
         "--enable-chunked-prefill is always on and cannot be turned off"),
        ("--no-enable-lora", "leave it out"),
        ("--no-lora-dtype", "leave it out; --lora-dtype is not offered"),
        ("--no-enforce-eager", "leave it out"),
        ("--enforce-eager",
         "use --eager (plain torch; kernels without graphs: --set kernels.cuda_graphs=false)"),
        ("--disable-cuda-graph", "use --set kernels.cuda_graphs=false"),
        ("--dtype half", "not offered: use bfloat16, the default on GPUs"),
        ("--dtype bfloat16", "use --set dtype=bfloat16 (bfloat16 or float32)"),
        ("--trust-remote-code", "not needed: no code of a model is ever run"),
        ("--attention-backend FLASH_ATTN", "use --set kernels.attention=flash"),
        ("--lora-modules a=b", "use --set adapters.folder=DIR (with a folder for each adapter; a "
                               "request names one as its model)"),
        ("--max-loras 4", "use --set adapters.slots=4"),
        ("--max-lora-rank 16", "use --set adapters.max_rank=16"),
        ("--lora-dtype auto", "not offered: only the keys of `adapters` in a recipe"),
        ("--kv-offloading-size 40",
         "use --set cache.host_gib=GIB (of host memory for each rank)"),
        ("--hicache-storage-backend file",
         "use --set 'cache.disk={path: DIR, gib: N}' (below cache.host_gib)"),
        ("--hicache-write-policy p", "not offered: only cache.host_gib and cache.disk"),
        ("--cpu-offload-gb 8", "not offered: weights stay in the GPU's memory"),
        ("--kv-transfer-config {}",
         "use --role ROLE (prefill or decode, with a recipe's section transfer)"),
        ("--limit-mm-per-prompt {}", "not offered: nanovllm generates text from text"),
        ("-O3", "not offered: `auto` chooses every kernel, and graphs are captured"),
        ("-cc.mode 3", "not offered: `auto` chooses every kernel, and graphs are captured"),
        ("--quantization=awq",
         "not offered: serve the unquantised checkpoint or its FP8 version"),
        ("--speculative-algorithm EAGLE",
         "not offered: only ngram, draft_model, eagle3 and mtp"),
        ("--speculative-algorithm EAGLE3", "use --set speculate.method=eagle3"),
        ("--spec-model small", "use --set speculate.model=small"),
        ("--num-speculative-tokens 5", "use --set speculate.tokens=5"),
        ("--served-model-name m", "use --set server.served_name=m"),
        ("--tool-call-parser hermes",
         "not needed: the parser follows from the model; --set server.parser=NAME overrides it"),
        ("--ssl-keyfile k", "not offered: put a proxy with TLS in front"),
        ("--api-server-count 4", "use --set server.workers=4"),
    ],
)  # fmt: skip
def test_an_option_is_answered_with_ours(typed: str, told: str) -> None:
    name = re.split(r"[ =]", typed)[0]
    assert refused("serve", "Qwen/Qwen3-8B", *typed.split(" ")) == f"{name}: {told}"
    assert refused("profile-kv", "qwen3-8b", *typed.split(" ")) == f"{name}: {told}"


def test_all_of_a_command_line_is_answered_at_once() -> None:
    line = (
        "Qwen/Qwen3-8B --max-model-len 8192 --port 9 -tp 2 --set a=--dtype --enable-prefix-caching"
    )
    assert refused("serve", *line.split()) == (
        "--max-model-len: use --set server.max_model_tokens=8192; -tp: use --tp 2; "
        "--enable-prefix-caching: always on"
    )


@pytest.mark.parametrize("head", OPTIONS)
def test_every_option_of_others_is_known(head: str) -> None:
    names = OPTIONS[head]
    assert len(names) > 90
    command = resolve(cli.COMMANDS, "bench" if "bench" in head else "serve")
    own = {name for param in command.params for name in param.opts}
    for name in names:
        text = answer(name, "1", command.others)
        assert name in own or (text and len(text) > 3), name
        if name.startswith("--") and text:
            assert answer(f"--no-{name[2:]}", None, command.others), name


def test_what_is_written_instead_is_ours() -> None:
    """Every `--set` of the table has a key of a recipe. All other options are nanovllm's."""
    own = {
        name
        for command in cli.COMMANDS
        for param in resolve(cli.COMMANDS, command).params
        for name in (*param.opts, *param.secondary_opts)
    }
    texts = [
        text
        for table in (SERVERS, BENCH)
        for rows in table.values()
        for row in rows
        for text in (row.filled_in(), row.text, row.note, *row.values.values())
    ]
    keys = {key for text in texts for key in re.findall(r"--set '?([\w.]+)=", text)}
    assert len(keys) > 25
    for key in keys:
        with pytest.raises(ConfigError) as caught:  # an error of the value, not of the key
            load_config(None, [f"{key}={{nothing: [of, the, kind]}}"])
        assert f"unknown key {key};" not in str(caught.value) and key in str(caught.value)
    drafts = load_config(None, ["speculate={method: ngram, tokens: 3}"]).recipe.speculate
    assert drafts is not None and drafts.tokens == 3
    flags = {flag for text in texts for flag in re.findall(r"(?<!\S)(--[a-z][a-z-]+)", text)}
    assert flags - own <= {"--revision", "--local-dir"}  # of `hf download`


def test_the_model_may_be_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(launch, "serve", lambda config: seen.append(config.recipe.model) or 0)
    serve = resolve(cli.COMMANDS, "serve")
    for line in (["qwen3-8b"], ["--model", "qwen3-8b"], ["--model-path=qwen3-8b"]):
        done = CliRunner().invoke(serve, [*line, "--load-format", "dummy"])
        assert done.exit_code == 0, done.exception
    assert seen == ["Qwen/Qwen3-8B"] * 3
    assert refused("serve", "demo", "--model", "qwen3-8b") == (
        "RECIPE is demo and --model is qwen3-8b; give one of them"
    )


def test_eager_is_one_switch_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(launch, "serve", lambda config: seen.append(config) or 0)
    serve = resolve(cli.COMMANDS, "serve")
    for line in ([], ["--eager"], ["--eager", "--set", "kernels.silu_mul=triton"]):
        assert CliRunner().invoke(serve, ["demo", *line]).exit_code == 0
    usual, eager, but_one = (asdict(config.recipe.kernels) for config in seen)
    assert [config.changed.get("kernels.eager") for config in seen] == [None, True, True]
    assert usual["cuda_graphs"] and {usual[name] for name in usual if eager[name] == "torch"} == {
        "auto"
    }
    others = dict(eager=True, decode="auto", cuda_graphs=False, invariant=False)
    others["mixed_graph_tokens"] = 2048
    assert eager == dict.fromkeys(eager, "torch") | others
    assert but_one == eager | {"silu_mul": "triton"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--max-concurrency 8", "--max-concurrency: use --concurrency 8"),
        ("--base-url=http://h:1/v1", "--base-url: use --url http://h:1/v1"),
        ("--random-input-len 100", "--random-input-len: use --input-len 100"),
        ("--random-output-len 9", "--random-output-len: use --output-len 9"),
        ("--model m", "--model: not needed: the server names its model and counts its tokens"),
        ("--result-dir r", "--result-dir: use --results-dir r"),
        ("--lora-modules a", "--lora-modules: use --adapters N (N of the server's adapters in "
                             "turn)"),
        ("--dataset-path p", "--dataset-path: not offered: prompts are random words of exactly "
                             "--input-len tokens, no two alike"),
        ("--max-model-len 9", "--max-model-len: use --set server.max_model_tokens=9"),
        ("serve", "bench has no command serve: it measures a server at --url, RECIPE with "
                  "--start, or only its engine with --offline"),
        ("--goodput ttft:3 tpot:4", "--goodput takes one limit; repeat it, as in --goodput "
                                    "ttft:500 --goodput tpot:50"),
        ("--request-rate inf", "--request-rate inf: write --concurrency N, as many as "
                               "--num-prompts"),
    ],
)  # fmt: skip
def test_options_of_other_benchmarks(line: str, told: str) -> None:
    assert refused("bench", *line.split()) == told


def test_an_option_that_none_has_is_still_none() -> None:
    assert answer("--nope", None, SERVERS) is None and answer("--no-nope", None, SERVERS) is None
    assert CliRunner().invoke(resolve(cli.COMMANDS, "serve"), ["--nope"]).exit_code == 2


def table_in(text: str) -> str | None:
    """Return the lines between the markers, or None without markers."""
    found = re.search(f"{re.escape(BEGIN)}\n(.*?)\n{re.escape(END)}", text, re.DOTALL)
    return found[1].strip() if found else None


def test_the_table_of_recipes_is_made_from_the_code() -> None:
    made = markdown()
    rows = made.splitlines()
    assert rows[0] == "| vLLM, SGLang | nanovllm |"
    assert all(row.count(" | ") == 1 for row in rows[2:]) and len(rows) > 50
    assert "| `--max-model-len`, `--context-length` | `--set server.max_model_tokens=N` |" in rows
    assert table_in(f"# A\n{BEGIN}\n{made}\n{END}\n") == made
    assert table_in((ROOT / "recipes" / "README.md").read_text()) == made


# -- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", "/v1/models", "/v1/chat/completions"])
def test_a_server_s_address_may_end_as_clients_have_it(tail: str, tmp_path: Path) -> None:
    with fake_chat() as url:
        line = ["--url", url + tail, "--num-prompts", "1", "--warmup", "0", "--input-len", "31"]
        line += ["--output-len", "2", "--results-dir", str(tmp_path)]
        done = CliRunner().invoke(resolve(cli.COMMANDS, "bench"), line)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.rglob("records.jsonl")
    (made,) = store.read(path)
    assert json.loads(bytes(made.record))["metrics"]["completed"] == 1.0


def test_the_module_prints_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "nanovllm.cli.other_flags")
    runpy.run_module("nanovllm.cli.other_flags", run_name="__main__")
    assert capsys.readouterr().out == markdown() + "\n"
