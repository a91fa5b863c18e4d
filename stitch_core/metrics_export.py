"""Showing the metrics of a process without a server of its own: on a port, or in a file.

``STITCH_METRICS`` (or ``--metrics``) is ``PORT``, ``HOST:PORT``, or the path of a ``.prom`` file, as node
exporters collect them: for commands that end before anybody asks. Nothing here may fail a publish.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .digits import whole
from .metrics import CONTENT_TYPE, Registry

VARIABLE = "STITCH_METRICS"
MOST_OFTEN = 1.0
"""Seconds between two writes of a file while things go on."""

logger = logging.getLogger("stitch")


class BadTarget(ValueError):
    """Not a place for metrics."""


class Exporter:
    """Shows ``registry`` at ``target``; without one nowhere. ``port`` is the one that it listens on."""

    def __init__(self, registry: Registry, target: str | None) -> None:
        """Raises BadTarget, and OSError where it cannot listen."""
        self.registry = registry
        self.port: int | None = None
        self._path: Path | None = None
        self._server: ThreadingHTTPServer | None = None
        self._written = -MOST_OFTEN
        if not target:
            return
        if target.endswith(".prom"):
            self._path = Path(target).absolute()
        else:
            self._server = _listen(_address(target), registry)
            self.port = self._server.server_address[1]
            threading.Thread(
                target=self._server.serve_forever, args=(0.1,), name="stitch-metrics", daemon=True
            ).start()

    def changed(self, *, last: bool = False) -> None:
        """Something was counted: the file is written, now and then and at the ``last`` time."""
        if self._path is None or (not last and time.monotonic() - self._written < MOST_OFTEN):
            return
        self._written = time.monotonic()
        try:
            _replace(self._path, self.registry.render())
        except OSError as error:
            logger.warning("metrics cannot be written to %s: %s", self._path, error)

    def close(self) -> None:
        self.changed(last=True)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def from_environment(registry: Registry) -> Exporter:
    """As ``STITCH_METRICS`` says. What cannot be done is logged: a trainer goes on without."""
    target = os.environ.get(VARIABLE)
    try:
        return Exporter(registry, target)
    except (BadTarget, OSError) as error:
        logger.warning("%s: no metrics at %s: %s", VARIABLE, target, error)
        return Exporter(registry, None)


def _address(target: str) -> tuple[str, int]:
    host, colon, port = target.rpartition(":")
    host = host.strip("[]") if colon else "127.0.0.1"
    with contextlib.suppress(ValueError):
        if host:
            return host, whole(port, most=65535)
    raise BadTarget(f"{target!r} is not a port, HOST:PORT, or the path of a .prom file")


def _listen(address: tuple[str, int], registry: Registry) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # of a client that says nothing

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = registry.render().encode() if found else b"metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("content-type", CONTENT_TYPE if found else "text/plain")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    ThreadingHTTPServer.daemon_threads = True
    return ThreadingHTTPServer(address, Handler)


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a collector may read at any time."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
