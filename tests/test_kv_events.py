"""Recipe section `kv_events`: one clear error for what cannot be served."""

from __future__ import annotations

import pytest

from nanovllm.config import ConfigError, read_recipe
from nanovllm.kv_events import address_of

ENDPOINT = "kv_events.endpoint=tcp://*:5557"


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (["kv_events.replay=tcp://*:5558"], "kv_events.endpoint is missing; write tcp://HOST:PORT"),
        (["kv_events.endpoint=5557"], "kv_events.endpoint"),
        (["kv_events.endpoint=tcp://*"], r"kv_events.endpoint is 'tcp://\*'; write"),
        ([ENDPOINT, "kv_events.replay=tcp://a:66000"], "kv_events.replay is 'tcp://a:66000'"),
        ([ENDPOINT, "kv_events.topic=kv@pod"], "kv_events.topic is 'kv@pod'; write kv@POD@MODEL"),
        ([ENDPOINT, "kv_events.buffer_steps=0"], "buffer_steps is 0; it must be between 1 and"),
        ([ENDPOINT, "cache.prefix=false"], "kv_events needs cache.prefix"),
        (
            [ENDPOINT, "kv_events.replay=tcp://*:5558", "parallel.dp=2"],
            "needs a port at least 2 from that of kv_events.endpoint",
        ),
    ],
)
def test_what_cannot_be_served(keys: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_recipe(None, keys)


def test_off_by_default_and_one_port_per_engine() -> None:
    assert read_recipe(None).recipe.kv_events is None
    section = "kv_events={endpoint: 'tcp://*:5557', replay: 'tcp://*:5600', topic: kv@10.0.0.1@m}"
    found = read_recipe(None, [section, "parallel.dp=8"]).recipe.kv_events
    assert found is not None and found.buffer_steps == 10_000
    assert found.endpoint and address_of(found.endpoint, 3) == "tcp://*:5560"
