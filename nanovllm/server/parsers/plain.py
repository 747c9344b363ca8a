"""Models that call nothing: their text is the answer, after a thought if they think."""

from __future__ import annotations

from nanovllm.server.parsers.base import Family

PLAIN = Family(thinks=False)
THINKING = Family()
