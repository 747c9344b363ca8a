"""Logging setup: one structured line per event on stdout."""

from __future__ import annotations

import logging
import os
import sys


class _Line(logging.Formatter):
    """`2026-11-21T12:00:00.123 info server request id=... tokens=...`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        text = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower()} {record.name}"
        text = f"{text} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def setup() -> None:
    """Send everything at NANOVLLM_LOG (default info) and above to stdout. Call once a process."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Line())
    level = os.environ.get("NANOVLLM_LOG", "info").upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("httpx", "urllib3", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)


def fields(**values: object) -> str:
    """`a=1 b=two`, floats at three decimals, None left out."""
    shown = {k: f"{v:.3f}" if isinstance(v, float) else v for k, v in values.items()}
    return " ".join(f"{k}={v}" for k, v in shown.items() if v is not None)
