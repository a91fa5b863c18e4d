"""Logs as JSON lines, for collectors: with ``STITCH_LOG=json``. Each says of which run and version it is."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

VARIABLE = "STITCH_LOG"
# Of Stitch inside other programs, whose own logs stay as they are, and of the servers that it runs itself.
OWN = ("stitch", "stitch_sglang")
LOGGERS = (*OWN, "aiohttp", "uvicorn.error")

_context: Callable[[], Mapping[str, Any]] = dict


def asked() -> bool:
    """Whether logs are JSON."""
    return os.environ.get(VARIABLE) == "json"


def set_context(read: Callable[[], Mapping[str, Any]]) -> None:
    """What every line of this process says besides, asked anew for each: run, version, replica ..."""
    global _context
    _context = read


def line(message: str, *, level: str = "info", logger: str = "stitch", at: float | None = None) -> str:
    """One line; what has no value in the context is left out."""
    fields = {"time": time.time() if at is None else at, "level": level, "logger": logger}
    try:
        said = {key: value for key, value in _context().items() if value is not None}
    except Exception:  # a log line must come out whatever state it is about
        said = {}
    return json.dumps({**fields, **said, "message": message}, default=str)


def visible(text: str, kept: str = "\n\t") -> str:
    """``text`` with what moves a cursor or colours a terminal escaped: names in a store are anybody's."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def tell(text: str, *, level: str = "info") -> None:
    """A line on stderr, as JSON where that is asked for. That it is full, closed or not read ends nobody."""
    stream = sys.stderr
    if stream is not None:  # it is None where the descriptor was closed from the start
        with contextlib.suppress(OSError, ValueError):
            print(line(text, level=level) if asked() else visible(text), file=stream, flush=True)


class JsonFormatter(logging.Formatter):
    """A record as ``line`` has it, with its traceback in the message."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return line(message, level=record.levelname.lower(), logger=record.name, at=record.created)


def configure(loggers: Iterable[str] = LOGGERS) -> None:
    """Send the logs of Stitch and its servers to stderr as JSON lines, if that is asked for."""
    if not asked():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in loggers:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
