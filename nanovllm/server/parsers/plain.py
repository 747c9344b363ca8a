"""A model that neither thinks nor calls: its text is the answer."""

from __future__ import annotations

from nanovllm.server.parsers.base import Family

PLAIN = Family(thinks=False)
