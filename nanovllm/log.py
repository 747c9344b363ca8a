"""Logging: one line per event on stdout, as text or as JSON, written by a thread of its own.

A slow reader of stdout does not block the process: lines wait in a bounded queue. Lines beyond the
bound, and lines lost on a full disk, are counted. The next line that is written is preceded by
their number. A closed pipe ends the output only.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import threading
import time
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error", "critical")
MOST_LINES = 4096  # maximum lines waiting to be written
FLUSH_S = 1.0  # longest wait for the last lines at exit
ALWAYS = ("serve",)  # loggers that log info at every level: the server's address, its end
STDOUT = 1


class LogFields(str):
    """Fields of a log line: `a=1 b=two` as text, and the values for the JSON format."""

    values: dict[str, object]


def fields(**values: object) -> LogFields:
    """Return the fields. Floats are shown with three decimals; a value of None is left out."""
    values = {k: v for k, v in values.items() if v is not None}
    shown = {k: f"{v:.3f}" if isinstance(v, float) else v for k, v in values.items()}
    text = LogFields(" ".join(f"{k}={v}" for k, v in shown.items()))
    text.values = values
    return text


class TextLine(logging.Formatter):
    """`2026-11-21T12:00:00.123 info server request id=... tokens=...`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        text = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower()} {record.name}"
        text = f"{text} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonLine(logging.Formatter):
    """`{"time": "2026-11-21T12:00:00.123+00:00", "level": "info", ..., "id": ...}`, in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for argument in record.args if isinstance(record.args, tuple) else ():
            if isinstance(argument, LogFields):
                line = {**line, **argument.values, **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLine, "json": JsonLine}


class QueuedLines(logging.Handler):
    """Log handler that writes to a file descriptor without blocking the caller."""

    def __init__(self, fd: int = STDOUT, most_lines: int = MOST_LINES) -> None:
        super().__init__()
        self._fd = fd
        self._most_lines = most_lines
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._dropped = 0  # lines dropped since the latest queued line
        self._is_read = True
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        with self._counting:
            if self._lines.qsize() >= self._most_lines:
                self._dropped += 1
                return
            dropped, self._dropped = self._dropped, 0
        if dropped:
            warning = f"{dropped} lines of this log are missing here: stdout did not accept them"
            self._put(logging.LogRecord("log", logging.WARNING, "", 0, warning, None, None))
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except Exception:  # for example arguments that do not fit their message
            self.handleError(record)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                if self._is_read:
                    self._write(line)
            except BrokenPipeError:
                self._is_read = False
            except OSError:  # a full disk, which may have room again later
                with self._counting:
                    self._dropped += 1

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # another process has made this pipe non-blocking
                select.select([], [self._fd], [])

    def flush(self) -> None:
        """Wait up to FLUSH_S until all queued lines are written."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(FLUSH_S)

    def close(self) -> None:
        self._lines.put(None)
        super().close()


class Progress:
    """Progress lines of a long task: at its start, every two seconds, and at its end."""

    EVERY_S = 2.0

    def __init__(self, log: logging.Logger, what: str, total: float, unit: str) -> None:
        """`unit` is "GB" for a total in bytes, otherwise the name of the counted objects."""
        self._log = log
        self._what = what
        self._total = total
        self._unit = unit
        self._done = 0.0
        self._began = time.monotonic()
        self._due = self._began + self.EVERY_S
        log.info("%s: %s %s", what, self._shown(total), unit)

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now >= self._due and self._done < self._total:
            self._due = now + self.EVERY_S
            done, total = self._shown(self._done), self._shown(self._total)
            share = self._done / self._total
            state = f"{done} of {total} {self._unit}"
            self._log.info("%s: %s, %.0f %%", self._what, state, 100 * share)

    def finish(self) -> None:
        self._log.info("%s: done in %.1f s", self._what, time.monotonic() - self._began)

    def _shown(self, amount: float) -> str:
        return f"{amount / 1e9:.2f}" if self._unit == "GB" else f"{amount:.0f}"


def setup(log_format: str = "text") -> None:
    """Log the level of NANOVLLM_LOG (default info) and above to stdout. Call once per process.

    Raise ValueError if there is no such level.
    """
    level = os.environ.get("NANOVLLM_LOG", "info")
    if level.lower() not in LEVELS:
        raise ValueError(f"NANOVLLM_LOG is {level!r}; it must be one of {', '.join(LEVELS)}")
    handler = QueuedLines()
    handler.setFormatter(FORMATS[log_format]())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ALWAYS:
        logging.getLogger(name).setLevel(min(logging.getLogger().level, logging.INFO))
    for name in ("httpx", "urllib3", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
