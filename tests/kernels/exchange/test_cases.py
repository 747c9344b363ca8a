"""Output of `check-kernels --tp N`. Without GPUs its ranks are mocks."""

from __future__ import annotations

import json
from multiprocessing import Pipe

import pytest
import torch
from click.testing import CliRunner
from nanovllm_kernels.exchange import cases as peer_cases
from nanovllm_kernels.exchange.all_reduce import Peers
from nanovllm_kernels.exchange.cases import followed, kernels

from nanovllm.cli.check_kernels import check_kernels
from nanovllm.config import ConfigError

FOUND = {"kernel": "all_reduce", "case": "T=1 D=4096", "worst": 0.0}
TIMED = FOUND | {"us": 4.0, "nccl_us": 20.0, "tb_per_s": 0.225, "share": 0.5}
LOST = {"kernel": "ranks", "case": "", "problem": "rank 1: RuntimeError: lost"}


@pytest.mark.parametrize(
    ("sent", "ends", "expected"),
    [
        ([[FOUND, None], [None]], True, [FOUND]),
        ([[FOUND], [LOST]], True, [FOUND, LOST]),
        ([[FOUND], [None]], True, [FOUND, LOST | {"problem": "a rank ended"}]),
        ([[FOUND], [None]], False, [FOUND, LOST | {"problem": "no message for 0.05 s"}]),
    ],
    ids=["done", "raised", "ended", "silent"],
)
def test_ranks_are_followed_until_one_fails(monkeypatch, sent, ends, expected) -> None:
    monkeypatch.setattr(peer_cases, "PATIENCE_S", 0.05)
    pairs = [Pipe(duplex=False) for _ in sent]
    for (_, pipe), messages in zip(pairs, sent, strict=True):
        for message in messages:
            pipe.send(message)
        if ends:
            pipe.close()
    assert list(followed([reads for reads, _ in pairs])) == expected


def test_too_few_gpus_are_one_line(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = CliRunner().invoke(check_kernels, ["--tp", "2"])
    assert isinstance(done.exception, ConfigError)  # main shows it, and exits with 2
    assert str(done.exception) == "--tp is 2; this machine has 1 GPUs"


def test_no_gpus_are_refused() -> None:
    done = CliRunner().invoke(check_kernels, ["--tp", "0"])
    assert done.exit_code == 2 and "'--tp': 0 is not in the range x>=1" in done.output


def test_kernels_of_one_gpu_have_no_ranks(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    done = CliRunner().invoke(check_kernels, ["--tp", "2", "--kernel", "draw"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == "--kernel draw runs on one GPU; with --tp it has no effect"


def test_times_stand_beside_those_of_nccl(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(peer_cases, "check_ranks", lambda *_: iter((TIMED, LOST)))
    path = tmp_path / "record.json"
    done = CliRunner().invoke(check_kernels, ["--tp", "2", "--json", str(path)])
    first, second, last = done.output.splitlines()
    assert first.startswith("ok   all_reduce          T=1 D=4096")
    assert first.endswith(" 0.000      4.00 us  0.23 TB/s (50%) NCCL 20.00 us")
    assert second.startswith("FAIL ranks") and second.endswith("rank 1: RuntimeError: lost")
    assert (last.split(" on ")[0], done.exit_code) == ("1 of 2 cases pass", 1)
    record = json.loads(path.read_text())
    assert record["workload"]["cases"][0] == TIMED
    assert record["metrics"]["all_reduce: T=1 D=4096: us"] == 4.0


def test_what_the_link_must_carry() -> None:
    peers = Peers(0, 4, 64, *[torch.zeros(4)] * 2)
    moved = {
        f"{kernel.name} {case.name}": case.num_bytes
        for kernel, _ in kernels(peers, None)
        for case in kernel.cases
    }
    assert moved["all_reduce_add T=8 D=5120"] == 2 * 3 / 4 * 8 * 5120 * 2
    assert moved["all_gather S=64"] == 3 * 64 * 8
