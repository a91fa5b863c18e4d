"""However a path is spelt, nobody reaches a control route through a gateway or a replica's gate.

Real sockets, and request lines as an attacker would write them, not as clients tidy them.
"""

import asyncio
import posixpath
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stitch_core.replica.auth import Tokens, parse_tokens
from stitch_core.replica.routes import BLOCKED, ROUTES
from stitch_core.replica.server import listen, serve
from tests.gateway import echo
from tests.gateway.fleet import Fleet

TOKEN = "generate-0123456789"
# What one that may generate may ask for, of a gateway or of a replica.
ALLOWED = {
    "/generate", "/v1/completions", "/v1/chat/completions", "/abort_request", "/wake", "/ready", "/health",
    "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/models", "/health_generate",
}  # fmt: skip
CONTROL = sorted(
    BLOCKED | {"/activate_weights", "/status", "/metrics", "/workers", "/get_weight_version", "/v1/loads"}
)


class Servers:
    """A facade and a replica with tokens, on a loop of their own; ``reached``: paths that got through."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str]] = []
        self.ports: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._start())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _noted(self, app: Any, where: str) -> Any:
        async def noted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self.reached.append((where, scope["path"]))
            await app(scope, receive, send)

        return noted

    async def _start(self) -> None:
        grants = parse_tokens(f"generate {TOKEN}", "here")
        tokens = Tokens(lambda: grants)
        engine = await self._noted(echo.engine, "engine")
        behind = await self._noted(echo.replica(engine=echo.engine), "gateway")
        self._end, self._tasks = asyncio.Event(), []
        for name, app in (("replica", echo.replica(tokens, engine)), ("behind", behind)):
            listener = listen("127.0.0.1", 0)
            self.ports[name] = listener.getsockname()[1]
            self._tasks.append(asyncio.ensure_future(serve(app, listener, self._end, grace=1)))
        self.fleet = Fleet()
        url = f"http://127.0.0.1:{self.ports['behind']}"
        await self.fleet.start(url, until_ready=1, hold=0.02, run="r", facade=True, tokens=tokens)
        self.ports["gateway"] = int(self.fleet.url.rpartition(":")[2])

    def close(self) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _stop(self) -> None:
        await self.fleet.close()
        self._end.set()
        await asyncio.gather(*self._tasks)

    def ask(self, name: str, method: str, target: bytes, version: str, *headers: str) -> int:
        """The status of the answer; 0 if the server only closed the connection."""
        lines = [f"HTTP/{version}", "host: x", f"authorization: Bearer {TOKEN}", "content-length: 2"]
        data = "\r\n".join([*lines, "connection: close", *headers, "", "{}"]).encode()
        with socket.create_connection(("127.0.0.1", self.ports[name]), 10) as connection:
            connection.sendall(method.encode() + b" " + target + b" " + data)
            got = b""
            while b"\r\n" not in got and (more := connection.recv(4096)):
                got += more
        return int(got.split()[1]) if got else 0


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def escaped(text: str, places: set[int], times: int) -> str:
    """The characters at these places percent-encoded, so many times over."""
    for _ in range(times):
        text = "".join(f"%{ord(c):02x}" if i in places and ord(c) < 256 else c for i, c in enumerate(text))
        places = {i for i, c in enumerate(text) if c == "%"}
    return text


PIECES = st.sampled_from(
    ["/", "//", "/.", "/./", "/..", "/x/..", "/generate/..", "/generate/../", "/%2e%2e", "/..;", ";x=y",
     "%2f", "%2F", "%5c", "\\", "%00", "%0a", "%09", "%20", "?", "?x=/generate", "#", "#/generate", "%23",
     "%3f", "/generate", "/health", "%c0%ae", "%c0%af", "%e2%80%8b", "%", "%2", "%zz", "*", ":80", "@", "/*"]
)  # fmt: skip


@st.composite
def targets(draw: st.DrawFn) -> bytes:
    """A control route, spelt somehow."""
    path = draw(st.sampled_from(CONTROL))
    if draw(st.booleans()):
        places = draw(st.sets(st.integers(0, len(path) - 1), max_size=4))
        path = escaped(path, places, draw(st.integers(1, 2)))
    change = draw(st.sampled_from([str, str.upper, str.title, str.swapcase]))
    before, after = (draw(st.lists(PIECES, max_size=3)) for _ in range(2))
    form = draw(st.sampled_from(["", "", "", "http://127.0.0.1", "http://x/generate@y", "//x", "HTTP://x:1"]))
    return (form + "".join(before) + change(path) + "".join(after)).replace(" ", "%20").encode()


def plain(target: bytes) -> str:
    """The path that a target means, by other code than the servers'."""
    path = target.decode()
    scheme, found, rest = path.partition("://")
    if found and scheme.isalpha():
        path = "/" + rest.partition("/")[2]
    path = unquote(path.partition("#")[0].partition("?")[0])
    return posixpath.normpath("/" + path.lstrip("/"))


@given(
    target=targets(),
    method=st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]),
    version=st.sampled_from(["1.1", "1.1", "1.0"]),
    name=st.sampled_from(["gateway", "replica"]),
    headers=st.sampled_from(
        [(), ("x-http-method-override: POST",), ("x-original-url: /flush_cache",),
         ("x-rewrite-url: /flush_cache",), ("x-forwarded-prefix: /flush_cache",)]
    ),
)  # fmt: skip
@example(b"/generate/..%2fflush_cache", "POST", "1.1", "gateway", ())
@example(b"/flush_cache%00", "POST", "1.1", "replica", ())
@example(b"http://127.0.0.1/flush_cache", "POST", "1.0", "gateway", ())
@example(b"/%2566lush_cache", "POST", "1.1", "gateway", ())
@example(b"/generate", "GET", "1.1", "gateway", ("x-http-method-override: POST",))
def test_nobody_reaches_a_control_route(
    servers: Servers, target: bytes, method: str, version: str, name: str, headers: tuple[str, ...]
) -> None:
    servers.reached.clear()
    status = servers.ask(name, method, target, version, *headers)
    for where, path in list(servers.reached):
        passed = {path for path in ALLOWED if path in ROUTES} | {"/v1/loads"}
        assert path in passed, (where, path)
        # A gateway counts what its replicas have in their queues; nobody else may look.
        assert path != "/v1/loads" or where == "gateway"
    if 200 <= status < 300 and method != "OPTIONS":
        assert plain(target) in ALLOWED, status
    assert status < 500 or plain(target) in ALLOWED


def test_the_same_routes_are_reached_by_their_names(servers: Servers) -> None:
    """What the property says would be true of servers that refuse everything."""
    servers.reached.clear()
    for name in ("gateway", "replica"):
        assert servers.ask(name, "POST", b"/generate", "1.1") == 200
        assert servers.ask(name, "POST", b"//x/../%67enerate/", "1.1") == 200
        assert servers.ask(name, "GET", b"/v1/models", "1.1") == 200
    assert ("engine", "/generate") in servers.reached
    assert ("gateway", "/generate") in servers.reached
