"""Families without calls: the text is the answer, after reasoning if the models think."""

from __future__ import annotations

from nanovllm.server.parsers.base import Family

PLAIN = Family(thinks=False)
THINKING = Family()
