"""Telling gateways or replicas that the head has moved: a hint that may be lost, and is in nobody's way.

Replicas look at the store by themselves; a wake only spares them the wait for their next look.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .replica.auth import outgoing
from .urls import is_http

VARIABLE, FILE_VARIABLE = "STITCH_WAKE_TOKEN", "STITCH_WAKE_TOKEN_FILE"
SECONDS = 2.0
"""For which a connection, and then an answer, is waited for."""

logger = logging.getLogger("stitch")


class BadWakeUrl(ValueError):
    """What is to be woken is no server's URL."""


def wake_urls(given: object) -> tuple[str, ...]:
    """URLs from one text, with commas between them, or from a list of such. Raises BadWakeUrl."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise BadWakeUrl(f"{given!r} cannot be woken: expected the URL of a gateway, or a list of URLs")
    urls = [url.strip() for text in texts for url in text.split(",")]
    for url in urls:
        if "@" in url:
            raise BadWakeUrl(
                f"a URL has no user in it: put the token into {VARIABLE}, or a file {FILE_VARIABLE}"
            )
        if not is_http(url) or "?" in url or "#" in url or url.split() != [url]:
            raise BadWakeUrl(
                f"{url!r} cannot be woken: expected the URL of a gateway or a replica, http://HOST:PORT"
            )
    return tuple(dict.fromkeys(url.rstrip("/").removesuffix("/wake") for url in urls))


class Waker:
    """POSTs ``/wake`` to each of its URLs when it is told to, from threads of its own."""

    def __init__(
        self, urls: Sequence[str], token: Callable[[], str | None] = lambda: None, seconds: float = SECONDS
    ) -> None:
        """``token``: asked for anew each time, for who wants one (role generate). Raises BadWakeUrl."""
        self._seconds = seconds
        self._bells = [_Bell(url, token, seconds) for url in wake_urls(list(urls))]

    @classmethod
    def given(
        cls, urls: Sequence[str], token_file: Path | None = None, environ: Mapping[str, str] = os.environ
    ) -> Waker:
        """With the token that ``token_file``, else the environment names.

        Raises BadWakeUrl, BadTokens and OSError.
        """
        token = outgoing(token_file, environ, (VARIABLE, FILE_VARIABLE)) if urls else lambda: None
        return cls(urls, token)

    def wake(self) -> None:
        """Return at once. Nothing that goes wrong is raised: the log says so, once until it changes."""
        for bell in self._bells:
            bell.ring()

    def flush(self) -> None:
        """Before a process ends: give what is under way the time that a connection may take, and no more."""
        until = time.monotonic() + self._seconds + 0.5
        for bell in self._bells:
            bell.idle.wait(max(0.0, until - time.monotonic()))


class _Bell:
    """One URL. Rung while its thread is at it, however often, it calls once more: heads have moved since."""

    def __init__(self, url: str, token: Callable[[], str | None], seconds: float) -> None:
        self._url, self._token, self._seconds = url, token, seconds
        self._lock = threading.Lock()
        self._asked = self._running = False
        self._problem: str | None = None
        self.idle = threading.Event()
        self.idle.set()

    def ring(self) -> None:
        with self._lock:
            self._asked = True
            if self._running:
                return
            self._running = True
            self.idle.clear()
        try:
            # No pool's thread: those are waited for when a process ends, and a server may never answer.
            threading.Thread(target=self._run, name="stitch-wake", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._note(str(error))
            self._done()

    def _done(self) -> None:
        self._running = False
        self.idle.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._done()
                    return
                self._asked = False
            try:
                self._note(self._post())
            except Exception as error:  # whatever it is, the version is published
                self._note(str(error) or type(error).__name__)

    def _post(self) -> str | None:
        """What went wrong, if the server answered; otherwise it raises."""
        parts = urlsplit(self._url)
        kind: Any = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        token, headers = self._token(), {"content-type": "application/json", "connection": "close"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        connection = kind(parts.hostname, parts.port, timeout=self._seconds)
        try:
            connection.request("POST", f"{parts.path}/wake", b"{}", headers)
            status = connection.getresponse().status
        finally:
            connection.close()
        if status in (401, 403):
            return f"it answered {status}, it wants a token of the role generate: {VARIABLE}, {FILE_VARIABLE}"
        return None if status < 300 else f"it answered {status}"

    def _note(self, problem: str | None) -> None:
        if problem is not None and problem != self._problem:
            logger.warning(
                "%s is not woken by new versions, replicas notice them at their next look: %s",
                self._url,
                problem,
            )
        self._problem = problem
