"""Cache events of an engine: the log that its memory writes, and the log's publisher."""

from __future__ import annotations

import socket

from nanovllm.config import Config, ConfigError, Recipe
from nanovllm.kv.events import EventWriter
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.page_log import PageLog
from nanovllm.parallel.places import Place


def page_log_of(
    config: Config, recipe: Recipe, layout: CacheLayout, place: Place
) -> PageLog | None:
    """Return the log whose changes are published, or None if the recipe has no `kv_events`.

    Raise ConfigError if a port cannot be used, or if pages alone cannot be reused.
    """
    events = recipe.kv_events
    if events is None:
        return None
    if layout.state is not None:
        raise ConfigError("kv_events does not support models with recurrent states; drop it")
    from nanovllm.kv.publisher import EventPublisher  # imports zmq

    topic = events.topic
    if topic == "auto":
        topic = f"kv@{socket.gethostname()}@{config.served_name}"
    is_latent = any(group.kind == "latent" for group in layout.paged)
    kind = "mla_attention" if is_latent else "full_attention"
    writer = EventWriter(int(recipe.cache.page_tokens), kind)
    publisher = EventPublisher(events, topic, place.engine or 0, writer)
    return PageLog(publisher.send, publisher.close)
