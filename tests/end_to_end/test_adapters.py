"""Adapters of a server over HTTP: names, answers, and changes while it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.adapters.folder import DEMO
from tests.end_to_end.demo_server import Server, start
from tests.end_to_end.test_replicas import SMALL, engines_of
from tests.forks import with_server_packages
from tests.server.serving import eventually

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = {"Authorization": "Bearer secret"}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is nanovllm?"}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(DEMO / "pirate", folder / "pirate")
    shutil.copytree(DEMO / "pirate", folder / "other")
    section = f"adapters={{folder: {folder}, names: [pirate], slots: 1, runtime: true}}"
    server = start("--set", section, "--device", "cpu", "--api-key", "secret")
    yield server, folder
    assert server.stop() == 0


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=KEY, timeout=60)


def text_of(server: Server, model: str | None) -> str:
    response = post(server, "chat/completions", **ASKED, model=model)
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["message"]["content"]
    assert response.json()["model"] == (model or "demo")
    return found


def names(server: Server) -> dict[str, Any]:
    cards = httpx.get(f"{server.url}/v1/models", headers=KEY).json()["data"]
    return {card["id"]: card for card in cards}


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def break_weights(folder: Path) -> str:
    """Put NaN into a tensor of an adapter. Return the name of the tensor's module."""
    tensors = load_file(folder / WEIGHTS)
    name = min(tensors)
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, folder / WEIGHTS)
    return name.removeprefix("base_model.model.").partition(".lora_")[0]


def test_requests_choose_an_adapter_by_its_name(served: tuple[Server, Path]) -> None:
    server, _ = served
    plain, pirate = text_of(server, None), text_of(server, "pirate")
    assert pirate.startswith("Ahoy!") and plain.startswith("nanovllm is")
    assert text_of(server, "demo") == plain
    card = names(server)["pirate"]
    assert (card["root"], card["parent"], card["max_model_len"]) == ("pirate", "demo", None)
    missing = post(server, "chat/completions", **ASKED, model="other")
    assert missing.status_code == 404 and "'demo' or 'pirate'" in missing.text


def test_adapters_change_while_the_server_runs(served: tuple[Server, Path]) -> None:
    server, folder = served
    load, unload = "load_lora_adapter", "unload_lora_adapter"
    assert httpx.post(f"{server.url}/v1/{load}", json={}).status_code == 401
    for body, status, words in (
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "pirate", "lora_path": "pirate"}, 400, "already loaded"),
        ({"lora_name": "demo", "lora_path": "pirate"}, 400, "has the model's name"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "must be 1 to 64 characters"),
        ({"lora_name": "x", "lora_path": "../x"}, 400, "must be 1 to 64 characters"),
        ({"lora_name": "x", "lora_path": "none"}, 404, "has no adapter_config.json"),
    ):
        refused = post(server, load, **body)
        assert (refused.status_code, words in refused.text) == (status, True), refused.text
    before = text_of(server, "pirate")
    answer = post(server, load, lora_name="new", lora_path="other")
    assert answer.text == "Success: LoRA adapter 'new' added successfully."
    assert names(server)["new"]["root"] == "other"
    assert text_of(server, "new") == before
    weights = folder / "other" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    broken = post(server, load, lora_name="new", lora_path="other", load_inplace=True)
    assert broken.status_code == 400 and "not a complete safetensors file" in broken.text
    assert text_of(server, "new") == before  # the former one is still there
    assert post(server, unload, lora_name="new").text == (
        "Success: LoRA adapter 'new' removed successfully."
    )
    assert post(server, unload, lora_name="new").status_code == 404
    assert post(server, "chat/completions", **ASKED, model="new").status_code == 404
    assert text_of(server, "pirate") == before
    metrics = httpx.get(f"{server.url}/metrics", headers=KEY).text
    assert ',max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} 1' in metrics
    assert 'adapter="pirate",state="running"} 0' in metrics
    counts = re.findall(r'nanovllm:adapter_slots\{.*,state="(\w+)"\} (\d)', metrics)
    assert counts == [("capacity", "1"), ("loaded", "1"), ("in_use", "0")]


def test_an_engine_that_returns_refuses_files_that_were_replaced(tmp_path: Path) -> None:
    """The other engine answers alone, with the old weights, until the adapter is loaded again."""
    shutil.copytree(DEMO / "pirate", tmp_path / "pirate")
    section = f"adapters={{folder: {tmp_path}, slots: 1, runtime: true}}"
    server = start("--set", section, "--api-key", "secret", "--dp", "2", *SMALL)
    before, plain = text_of(server, "pirate"), text_of(server, "demo")
    weights = tmp_path / "pirate" / WEIGHTS
    save_file({name: 0 * tensor for name, tensor in load_file(weights).items()}, weights)
    os.kill(engines_of(server)[1], signal.SIGKILL)
    eventually(lambda: "reconnected to engine 1" in "".join(server.lines), 60)
    line = "engine 1 has no adapter pirate: its files are not those that another engine has read"
    assert "".join(server.lines).count(line) == 1
    assert [text_of(server, "pirate") for _ in range(4)] == [before] * 4
    again = post(
        server, "load_lora_adapter", lora_name="pirate", lora_path="pirate", load_inplace=True
    )
    assert again.status_code == 200
    assert [text_of(server, "pirate") for _ in range(4)] == [plain] * 4 != [before] * 4
    assert server.stop() == 0


def test_a_body_that_is_not_json_is_refused(served: tuple[Server, Path]) -> None:
    server, _ = served
    for route in ("load_lora_adapter", "unload_lora_adapter"):
        for body, words in (
            (b"{", "the body is not valid JSON"),
            (b'{"lora_name": "\xe9"}', "the body is not valid UTF-8: invalid continuation byte"),
            (b'{"a": ' + b"[" * 50_000, "the body is nested too deeply"),
        ):
            refused = httpx.post(f"{server.url}/v1/{route}", headers=KEY, content=body)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["message"].startswith(words)


def test_bad_loads_are_refused_and_the_server_goes_on(served: tuple[Server, Path]) -> None:
    server, folder = served
    before, listed = text_of(server, "pirate"), names(server).keys()
    for name in ("dora", "large", "nan"):
        shutil.copytree(DEMO / "pirate", folder / name)
    change_config(folder / "dora", use_dora=True)
    change_config(folder / "large", r=999)
    broken = break_weights(folder / "nan")
    for name, words in (
        ("dora", f"adapter dora: {CONFIG}: use_dora is True; DoRA is not supported"),
        ("large", "adapter large: its rank is 999; adapters.max_rank is 64"),
        ("nan", f"adapter nan: {broken} has NaN or infinite numbers"),
    ):
        refused = post(server, "load_lora_adapter", lora_name="x", lora_path=name)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "invalid_value")
        assert error["message"].startswith(words), error
        missing = post(server, "chat/completions", **ASKED, model="x")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert names(server).keys() == listed
    assert text_of(server, "pirate") == before


@pytest.mark.parametrize("part", [CONFIG, WEIGHTS])
def test_a_bad_adapter_ends_the_start_with_one_line(tmp_path: Path, part: str) -> None:
    """The config is read before the engine starts, and the tensors are read by the engine."""
    shutil.copytree(DEMO / "pirate", tmp_path / "bad")
    words = f"{CONFIG}: use_dora is True; DoRA is not supported"
    if part == WEIGHTS:
        words = f"{break_weights(tmp_path / 'bad')} has NaN or infinite numbers"
    else:
        change_config(tmp_path / "bad", use_dora=True)
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", "--device", "cpu"]
    command += ["--set", f"adapters.folder={tmp_path}"]
    run = with_server_packages().start(command, timeout=300)
    last = run.stderr.splitlines()[-1]
    assert (run.returncode, last) == (2, f"error: adapter bad: {words}"), run.stderr
    assert run.stderr.count("bad") == 1 and "Traceback" not in run.stderr
