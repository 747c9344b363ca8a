"""Numbers of ranks that do not fit a model are refused before any process starts, without torch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanovllm import launch, rank_check
from nanovllm.config import DEMO, Config, ConfigError, load_config
from nanovllm.models.config import read_model_config
from nanovllm.parallel.cut import check_cut
from nanovllm.parallel.mesh import first_rank
from nanovllm.rank_check import check_ranks, divides

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "recipes" / "configs").glob("*.json"))
SIZES = (2, 3, 4, 6, 8, 16, 64)


def config_of(path: Path, *overrides: str, **fields: object) -> Config:
    """Return the demo's recipe with another model's config.json."""
    config = load_config(None, ["device=cpu", *overrides])
    return msgspec.structs.replace(config, config_path=str(path), **fields)


def full_error(config: Config) -> str:
    try:
        check_cut(first_rank(config.recipe.parallel), read_model_config(config)[1])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", [DEMO / "config.json", *SHIPPED], ids=lambda path: path.stem)
def test_it_refuses_what_the_full_check_refuses(path: Path) -> None:
    """The messages are those of the full check. Only fp8 weights are left to it."""
    num_missed = 0
    keys = [(f"parallel.tp={size}",) for size in SIZES]
    keys += [(f"parallel.ep={size}",) for size in SIZES]
    keys += [(f"parallel.tp={size}", f"parallel.ep={size}") for size in SIZES]
    for overrides in keys:
        config = config_of(path, *overrides)
        said = ""
        with contextlib.suppress(ConfigError):
            check_ranks(config)
            said = "passed"
        expected = full_error(config)
        if said == "passed" and expected:
            assert "fp8" in expected, (overrides, expected)
            num_missed += 1
        assert (said == "passed") or expected, overrides
    assert num_missed <= 6


def test_the_usual_case_needs_no_torch() -> None:
    code = (
        "import sys; from nanovllm.config import load_config\n"
        "from nanovllm.rank_check import check_ranks\n"
        "check_ranks(load_config(None, ['device=cpu', 'parallel.tp=8']))\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "False\n", run.stderr


def test_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "spawn", lambda *_, **__: pytest.fail("a process"))
    monkeypatch.setattr(launch.tempfile, "mkdtemp", lambda **_: pytest.fail("a folder"))
    said = r"^parallel.tp is 16; the model's num_attention_heads 8 is not a multiple of it; it can"
    with (
        pytest.raises(ConfigError, match=said),
        launch.engine_processes(config_of(DEMO / "config.json", "parallel.tp=16")),
    ):
        pass


@pytest.mark.parametrize(
    ("fields", "tp", "ep", "is_even"),
    [
        ({"num_attention_heads": 12}, 8, 1, False),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, 4, 1, False),  # 3 heads, 4 ranks
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, 1, True),  # copies of heads
        ({"num_attention_heads": 8, "num_key_value_heads": 6}, 4, 1, False),
        ({"num_attention_heads": 8, "intermediate_size": 100}, 8, 1, False),
        ({"num_attention_heads": 8, "intermediate_size": 100, "num_experts": 4}, 8, 1, True),
        ({"num_attention_heads": 8, "n_routed_experts": 6}, 1, 4, False),
        ({"num_attention_heads": 7, "n_routed_experts": 8}, 1, 4, True),  # lanes have all heads
        ({"num_attention_heads": 8}, 1, 2, False),  # no experts
        ({"num_attention_heads": "eight"}, 8, 1, True),  # the full check names the field
        ({}, 8, 1, True),
    ],
)
def test_counts(fields: dict[str, Any], tp: int, ep: int, is_even: bool) -> None:
    assert divides(fields, tp, ep) == is_even


def test_a_broken_config_json_is_left_to_the_full_check(tmp_path: Path) -> None:
    for text in (None, "{", "[1]", json.dumps({"num_attention_heads": 3})[:-1]):
        path = tmp_path / "config.json"
        if text is not None:
            path.write_text(text)
        assert rank_check.read_fields(str(path)) == {}


@pytest.mark.parametrize(
    ("nodes", "named", "expected"),
    [
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "0,1,GPU-5", 2),
        (["nvidia0", "nvidia1"], "", 0),
        (["null"], None, 0),
        (["null"], "0,1", 0),
    ],
)
def test_more_gpus_than_are_visible(
    nodes: list[str],
    named: str | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in nodes:
        (tmp_path / name).touch()
    monkeypatch.setattr(rank_check, "DEVICES", tmp_path)
    monkeypatch.setattr(rank_check, "given_gpus", lambda: named)
    assert rank_check.visible_gpus() == expected
    asked = ["parallel.tp=4", "parallel.dp=2"]
    check_ranks(config_of(DEMO / "config.json", *asked))  # ranks on a CPU need no GPU
    on_gpus = load_config(None, asked)
    if not expected:
        check_ranks(on_gpus)  # the number is unknown, or it is a CPU
        return
    said = f"parallel needs 8 GPUs, 4 for each of 2 engines; {expected} are visible. "
    with pytest.raises(ConfigError) as caught:
        check_ranks(on_gpus)
    assert str(caught.value).startswith(said)


def test_the_paper_engine_has_one_rank_whatever_is_asked_for() -> None:
    check_ranks(load_config("paper", ["parallel.tp=16"]))
