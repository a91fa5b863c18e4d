"""Writes the provenance log (``stitch_core.provenance``): a thread parses and appends, no request waits."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from stitch_core.provenance import SUFFIX, entries
from stitch_core.replica.sse import Splitter, data_of
from stitch_core.versions import PolicyVersion

from .call import Call
from .routing import Replica

FILE_BYTES = 64 << 20
KEEP_FILES = 64
MOST_WAITING = 100_000
MOST_WAITING_BYTES = 256 << 20
# Of a final event, whatever the engine's JSON writer puts between.
MARK = b'"weight_version_start"'

logger = logging.getLogger("stitch")


@dataclass
class Trace:
    """One answer on its way to a client. ``parts``: the answer, or those of its events that have versions."""

    log: ProvenanceLog
    fields: dict[str, Any]
    streamed: bool = False
    parts: list[bytes] = field(default_factory=list)

    def feed(self, events: bytes) -> None:
        """Whole events of a stream."""
        self.streamed = True
        if MARK in events:
            self.parts.append(events)

    def end(self, outcome: str, body: bytes | None = None) -> None:
        """``outcome``: whole, cut (the replica was lost), left (the client was)."""
        if body is not None:
            self.parts.append(body)
        self.fields |= {"time": time.time(), "outcome": outcome}
        self.log.add(self)


class ProvenanceLog:
    """Files ``<host>-<start>-<random>.jsonl`` in one directory, which gateways and hosts may share."""

    def __init__(
        self,
        directory: Path,
        *,
        file_bytes: int = FILE_BYTES,
        keep: int = KEEP_FILES,
        head: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        """``head`` knows the newest version of a run. ``keep``: files of this host. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._file_bytes, self._keep, self._head = directory, file_bytes, keep, head
        self._host = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:60]
        self._waiting: queue.Queue[Trace | None] = queue.Queue(MOST_WAITING)
        self._bytes = 0
        self._lock = threading.Lock()
        self.dropped = self.written = 0
        self._file = self._begin()
        self._thread = threading.Thread(target=self._run, name="stitch-provenance", daemon=True)
        self._thread.start()

    def trace(self, call: Call, replica: Replica, admitted: PolicyVersion) -> Trace:
        """For an answer that begins."""
        fields = {
            "run": admitted.run, "session": call.session or call.group,
            "consumer": call.scope.consumer if call.scope else None,
            "replica": replica.id, "route": call.path, "admitted": admitted.number,
            "head": self._head(admitted.run),
        }  # fmt: skip
        if len(call.ids) == 1:  # those of a batch are the answers' own
            fields["id"] = call.ids[0]
        if call.group is not None:
            fields["group"] = call.group
        return Trace(self, fields)

    def add(self, trace: Trace) -> None:
        """To be written. What the disk cannot keep up with is dropped and counted: requests come first."""
        size = sum(map(len, trace.parts))
        with self._lock:
            full = self._bytes + size > MOST_WAITING_BYTES
            self._bytes += 0 if full else size
        try:
            if full:
                raise queue.Full
            self._waiting.put_nowait(trace)
        except queue.Full:
            with self._lock:
                self.dropped += 1
                self._bytes -= 0 if full else size

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join(30)
        self._file.close()

    # ---------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while (trace := self._waiting.get()) is not None:
            with self._lock:
                self._bytes -= sum(map(len, trace.parts))
            try:
                self._write(b"".join(_line(fields) for fields in _lines(trace)))
            except OSError as error:
                with self._lock:
                    self.dropped += 1
                    first = self.dropped == 1
                if first:
                    logger.warning("the provenance log cannot be written in %s: %s", self._directory, error)
            except Exception:  # an answer of a kind that nobody knows must not end the log
                logger.exception("an answer has no line in the provenance log")

    def _write(self, lines: bytes) -> None:
        if self._file.tell() + len(lines) > self._file_bytes and self._file.tell():
            self._file.close()
            self._file = self._begin()
        self._file.write(lines)
        self._file.flush()
        self.written += 1

    def _begin(self) -> BinaryIO:
        name = f"{self._host}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        opened = os.fdopen(os.open(self._directory / name, flags, 0o640), "ab")
        own = sorted(self._directory.glob(f"{self._host}-*{SUFFIX}"))
        for path in own[: -self._keep]:
            with contextlib.suppress(OSError):
                path.unlink()
        return opened


def _lines(trace: Trace) -> Iterator[dict[str, Any]]:
    found = False
    for answer in _answers(trace):
        for entry in entries(answer):
            found = True
            said = {key: value for key, value in entry.items() if value is not None}
            yield {**said, **trace.fields}
    if not found:  # a stream that ended before its report, or an answer without one
        outcome = trace.fields["outcome"]
        yield {**trace.fields, "outcome": "unreported" if outcome == "whole" else outcome}


def _answers(trace: Trace) -> Iterator[Any]:
    for part in trace.parts:
        if not trace.streamed:
            yield _json(part)
            continue
        for event in Splitter().feed(part):
            if MARK in event and (data := data_of(event)) is not None:
                yield _json(data)


def _json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
