"""Unsupported models of the Hub are refused at once, in a separate process without torch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.config import DEMO
from tests import fake_hub
from tests.fake_hub import COMMIT, Hub
from tests.server.tiny_tokenizer import metaspace_tokenizer

ROOT = Path(__file__).parents[1]
CONFIG = json.loads((ROOT / "recipes" / "configs" / "Qwen3-8B.json").read_text())
AWQ = {**CONFIG, "quantization_config": {"quant_method": "awq", "bits": 4}}
RUN = """
import resource, sys
from nanovllm import cli, launch

def started(config):
    # With its end: without a buffer, print() writes it apart, and the log may come before it.
    print(f"STARTED {config.model_dir} {config.source}\\n", end="")
    return 0

launch.serve = started
try:
    cli.main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"CPU {used.ru_utime + used.ru_stime} {'torch' in sys.modules}\\n", end="")
"""
REALLY = RUN.replace("launch.serve = started\n", "")
PROXIES = {"http_proxy", "https_proxy", "all_proxy"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with fake_hub.running() as hub:
        yield hub


def serve(home: Path, *arguments: str, run: str = RUN, **environment: str) -> tuple[int, str, str]:
    """Return the exit code, the last line of stderr, and the output of `serve`.

    Assert that it takes at most 3 s of CPU time and does not import torch.
    """
    kept = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES}
    kept |= {"HF_HOME": str(home), **environment}
    command = [sys.executable, "-c", run, "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=kept, cwd=ROOT, check=False)
    (cpu,) = [line.split() for line in done.stdout.splitlines() if line.startswith("CPU")]
    assert float(cpu[1]) < 3 and cpu[2] == "False", done.stdout
    assert "Traceback" not in done.stderr
    return done.returncode, (done.stderr.splitlines() or [""])[-1], done.stdout


def refused(hub: Hub, home: Path, model: str, files: dict[str, bytes] | None = None) -> str:
    if files is not None:
        hub.repositories[model] = files
    code, line, _ = serve(home, model, HF_ENDPOINT=hub.url)
    assert code == 2 and line.startswith("error: ")
    return line.removeprefix("error: ")


def encoded(config: dict[str, object]) -> bytes:
    return json.dumps(config).encode()


WHOLE = {"config.json": encoded(CONFIG), "model.safetensors": b"x"}


def test_a_quantised_model_is_not_downloaded_first(hub, tmp_path) -> None:
    files = {**WHOLE, "config.json": encoded(AWQ)}
    line = refused(hub, tmp_path, "some/Qwen3-8B-AWQ", files)
    assert line.endswith(
        "the weights are quantised with AWQ (4 bits), which is not supported; serve the "
        "unquantised Qwen/Qwen3-8B, or Qwen/Qwen3-8B-FP8"
    )
    assert not [path for path in hub.asked if "safetensors" in path]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"Qwen3-8B-Q4_K_M.gguf": b"x", "README.md": b""}, "has GGUF files, which nanovllm cannot"),
        ({"config.json": encoded(CONFIG), "pytorch_model.bin": b"x"}, "has only pickled weights"),
        (
            {
                "adapter_config.json": b'{"base_model_name_or_path": "Qwen/Qwen3-8B"}',
                "adapter_model.safetensors": b"x",
            },
            "is a PEFT adapter, not a model: merge it into Qwen/Qwen3-8B with PEFT's",
        ),
        ({"README.md": b"x"}, "has no config.json, so it is not a model"),
    ],
)
def test_the_list_of_files_is_enough(hub, tmp_path, files, says) -> None:
    assert refused(hub, tmp_path, "some/model", files).startswith(f"some/model {says}")


def test_a_gated_model_has_terms(hub, tmp_path) -> None:
    hub.gated.add("some/model")
    assert refused(hub, tmp_path, "some/model", WHOLE) == (
        f"some/model is a gated model: accept its terms at {hub.url}/some/model, and set HF_TOKEN "
        "to a token of your account (or log in with `hf auth login`)"
    )


def test_a_misspelt_id_is_near_another(hub, tmp_path) -> None:
    assert refused(hub, tmp_path, "Qwen/Qwen3-8b-it") == (
        "the Hub has no model Qwen/Qwen3-8b-it: did you mean Qwen/Qwen3-8B? Check its spelling at "
        f"{hub.url}; a private one needs HF_TOKEN"
    )
    assert "did you mean" not in refused(hub, tmp_path, "zzz/yyy")


def test_a_disk_without_room_is_known_before(hub, tmp_path) -> None:
    hub.sizes["model.safetensors"] = 10**15
    line = refused(hub, tmp_path, "some/model", WHOLE)
    assert line.startswith(
        f"no room for some/model in {tmp_path}/hub: 1000000.0 GB are to be downloaded, "
    )
    assert line.endswith("free some, or set HF_HOME to a folder on another disk")
    assert not [path for path in hub.asked if "safetensors" in path]


def test_a_hub_that_is_ill(hub, tmp_path) -> None:
    hub.status = 503
    assert refused(hub, tmp_path, "some/model", WHOLE).startswith(
        "the Hub refused some/model with status 503: try again later"
    )


def test_no_network(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    code, line, _ = serve(tmp_path, "some/model", HF_ENDPOINT=url)
    assert code == 2 and line == (
        f"error: no connection to {url} (Connection refused), and some/model is not in the Hub's "
        "cache: check the network, or copy the model here and name its folder"
    )
    code, line, _ = serve(tmp_path, "some/model", HF_ENDPOINT="https://nowhere.invalid")
    assert code == 2 and line.startswith("error: no connection to https://nowhere.invalid (")


def test_a_network_that_swallows_connections_is_not_waited_for(tmp_path) -> None:
    server, waiting = socket.socket(), []
    server.bind(("127.0.0.1", 0))
    server.listen(0)
    for _ in range(4):  # the queue is full, so the system drops further connections
        waiting.append(client := socket.socket())
        client.setblocking(False)
        client.connect_ex(server.getsockname())
    url, begun = f"http://127.0.0.1:{server.getsockname()[1]}", time.monotonic()
    code, line, _ = serve(tmp_path, "some/model", HF_ENDPOINT=url)
    assert code == 2 and f"no connection to {url} (no answer within 1.5 s)" in line
    assert time.monotonic() - begun < 30  # 3 s on an idle machine
    for one in (server, *waiting):
        one.close()


def test_what_is_not_cached_cannot_be_had_offline(tmp_path) -> None:
    code, line, _ = serve(tmp_path, "some/model", HF_HUB_OFFLINE="1")
    assert code == 2 and "HF_HUB_OFFLINE forbids downloading it" in line


def test_a_model_is_downloaded_once_and_then_served_without_a_network(hub, tmp_path) -> None:
    names = [path for path in DEMO.iterdir() if path.is_file()]
    hub.repositories["some/demo"] = {path.name: path.read_bytes() for path in names}
    folder = tmp_path / "hub" / "models--some--demo" / "snapshots" / COMMIT
    for url in (hub.url, hub.url, "http://127.0.0.1:1"):
        code, _, said = serve(tmp_path, "some/demo", HF_ENDPOINT=url)
        assert code == 0 and f"STARTED {folder} some/demo" in said
    gets = [path for path in hub.asked if path.endswith("/model.safetensors")]
    assert 1 <= len(gets) <= 3  # metadata, content, metadata again
    assert (folder / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()


def test_a_download_that_was_cut_is_not_served(hub, tmp_path) -> None:
    refused(hub, tmp_path, "some/model", {**WHOLE, "config.json": encoded(AWQ)})
    code, line, _ = serve(tmp_path, "some/model", HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 2 and "some/model is not in the Hub's cache" in line


def test_a_hub_id_that_a_recipe_serves_uses_it(hub, tmp_path) -> None:
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
    hub.repositories["Qwen/Qwen3-8B"] = files
    code, _, said = serve(tmp_path, "Qwen/Qwen3-8B", HF_ENDPOINT=hub.url)
    assert code == 0 and said.split("STARTED")[1].split()[1].endswith("/qwen3-8b.yaml")


def test_folders_are_refused_as_fast(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    code, line, _ = serve(tmp_path, str(tmp_path))
    assert code == 2 and line.startswith(
        f"error: {tmp_path}/config.json: architectures is Qwen2ForCausalLM; supported are "
    )
    assert line.endswith("; the nearest supported model is Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json: "),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "Metaspace", "tokenizer.json: the decoder must be ByteLevel"),
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "{% if %}", "the chat template in "),
        ("chat_template.jinja", "", "/model is empty"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: "),
        (
            "generation_config.json",
            '{"repetition_penalty": 0}',
            "generation_config.json: repetition_penalty must be above 0 and at most 2, not 0.0",
        ),
    ],
)
def test_broken_files_are_named_before_an_engine_starts(tmp_path, name, content, says) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("draft"))
    if content is None:
        (folder / name).unlink()
    elif content == "Metaspace":
        metaspace_tokenizer().save(str(folder / name))
    else:
        (folder / name).write_text(content)
    code, line, _ = serve(tmp_path, str(folder), "--port", "0", run=REALLY)
    assert code == 2 and line.startswith("error: ") and says in line
