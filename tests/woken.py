"""A server that is woken: it keeps what it was sent, and answers as a test wants, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Woken:
    """``calls``: (path, authorization) of every POST. While ``hangs``, none is answered until ``go``."""

    def __init__(self, status: int = 202, *, hangs: bool = False) -> None:
        self.status, self.hangs = status, hangs
        self.calls: list[tuple[str, str | None]] = []
        self.go = threading.Event()
        self.changed = threading.Condition()
        self.url = ""

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until that holds; it is asked again at each call."""
        with self.changed:
            assert self.changed.wait_for(condition, 60)

    @contextmanager
    def running(self) -> Iterator[Woken]:
        here = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                with here.changed:
                    here.calls.append((self.path, self.headers["authorization"]))
                    here.changed.notify_all()
                if here.hangs:
                    here.go.wait()
                self.send_response(here.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self.go.set()
            server.shutdown()
            thread.join()
            server.server_close()
