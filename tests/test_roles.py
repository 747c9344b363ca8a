"""Recipe section `transfer`: what each role needs, in one clear error; secrets are not shown."""

from __future__ import annotations

import pytest

from nanovllm.config import ConfigError, load_config, read_recipe
from nanovllm.launch import serve
from nanovllm.roles import TransferRole, address_of, for_engine, hidden

LISTEN = "transfer.listen=127.0.0.1:5600"
PEERS = "transfer.peers=[127.0.0.1:5600]"


@pytest.mark.parametrize(
    ("role", "keys", "error"),
    [
        (None, [LISTEN], "transfer needs a role: add --role prefill or --role decode"),
        ("prefill", [], "transfer.listen is missing"),
        ("prefill", ["transfer.listen=5600"], "transfer.listen is 5600|transfer.listen"),
        ("prefill", ["transfer.listen=a:70000"], "transfer.listen is 'a:70000'; write HOST:PORT"),
        ("prefill", ["transfer.listen=a:0"], "listen is 'a:0'; name a port from 1 to 65535, which"),
        ("decode", ["transfer.peers=[a:1, a:0]"], "peers is 'a:0'; name a port from 1 to 65535"),
        ("prefill", ["transfer.listen=a:65535", "parallel.dp=2"], "dp 2 needs as many ports"),
        ("decode", [LISTEN], "transfer.peers is empty"),
        ("decode", ["transfer.peers=[a]"], "transfer.peers is 'a'; write HOST:PORT"),
        ("decode", [PEERS], "needs cache.host_gib"),
        ("both", [LISTEN], "transfer.role"),
        ("prefill", [LISTEN, "transfer.backend=mooncake"], "transfer.backend"),
    ],
)
def test_a_role_that_cannot_be_served(role: str | None, keys: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_recipe(None, keys, {"transfer.role": role})


def test_one_recipe_serves_both_roles() -> None:
    keys = [LISTEN, PEERS, "cache.host_gib=1", "transfer.secret=0123456789abcdef"]
    for role in ("prefill", "decode"):
        recipe = read_recipe(None, keys, {"transfer.role": role}).recipe
        assert recipe.transfer is not None and recipe.transfer.role == role
        shown = hidden(recipe.transfer)
        assert shown is not None and shown.secret == "..." and shown.peers == ["127.0.0.1:5600"]
    for role, address in (("prefill", "[::1]:5602"), ("decode", "[::1]:5600")):
        second = for_engine(TransferRole(role=role, listen="[::1]:5600"), 2)  # type: ignore[arg-type]
        assert second is not None and second.listen == address
    assert hidden(None) is None and hidden(TransferRole()) == TransferRole()
    assert address_of("[::1]:80", "x") == ("::1", 80)


def test_a_secret_is_checked_before_a_process_starts(monkeypatch) -> None:
    monkeypatch.setattr("nanovllm.launch.engine_processes", None)
    for secret, words in (
        ("", "transfer.secret is missing: set it, or NANOVLLM_TRANSFER_SECRET, to the same text"),
        (
            "short",
            "transfer.secret (or NANOVLLM_TRANSFER_SECRET) has 5 characters; use at least 16",
        ),
    ):
        monkeypatch.setenv("NANOVLLM_TRANSFER_SECRET", secret)
        with pytest.raises(ConfigError) as refused:
            serve(load_config(None, [LISTEN], {"transfer.role": "prefill"}))
        assert words in str(refused.value)
