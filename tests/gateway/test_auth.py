"""Tokens at the gateway: its clients' and its own, and control routes that nobody reaches through it."""

import asyncio
import http.client
from pathlib import Path
from typing import Any

import pytest

from stitch_core.replica.auth import Guard, Tokens, outgoing, parse_tokens
from stitch_core.replica.server import listen, serve
from tests.gateway.fleet import Fleet, Server
from tests.replica.test_auth import ALL, ASK, LOOK, TEXT, bearer

OWN = "own-0123456789abcdef"


def tokens(text: str = TEXT) -> Tokens:
    grants = parse_tokens(text, "here")
    return Tokens(lambda: grants)


class Guarded(Server):
    """A replica that wants the gateway's token, and notes what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str | None]] = []
        guard = Guard(self.replica.app, tokens(f"generate,read {OWN}"))

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                given = dict(scope["headers"]).get(b"authorization")
                self.seen.append((scope["path"], given and given.decode()))
            await guard(scope, receive, send)

        self._end.set()
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url, self.id = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{self.port}"
        self._end = asyncio.Event()
        self._task = asyncio.ensure_future(serve(noted, self.listener, self._end, grace=1))


@pytest.fixture
async def guarded(fleet: Fleet) -> Guarded:
    server = Guarded()
    server.serves(7)
    fleet.servers.append(server)
    return server


async def test_clients_show_theirs_and_replicas_get_the_gateways(fleet: Fleet, guarded: Guarded) -> None:
    await fleet.start(run="r", tokens=tokens(), replica_token=lambda: OWN)
    assert (await fleet.post({"text": "x"}))[0] == 401
    assert (await fleet.post({"text": "x"}, headers=bearer(LOOK)))[0] == 403
    assert (await fleet.post({"text": "x"}, headers=bearer(ASK)))[0] == 200
    assert {given for _, given in guarded.seen} == {f"Bearer {OWN}"}
    assert [path for path, _ in guarded.seen if path != "/ready"] == ["/generate"]
    async with fleet.session.get(fleet.url + "/status", headers=bearer(ASK)) as answer:
        assert answer.status == 403
    async with fleet.session.get(fleet.url + "/metrics", headers=bearer(LOOK)) as answer:
        assert answer.status == 200
        page = await answer.text()
    assert 'code="401"' in page
    assert not any(token in page for token in (OWN, ASK, LOOK, ALL))
    async with fleet.session.get(fleet.url + "/health") as answer:
        assert answer.status == 200


async def test_without_its_token_replicas_do_not_answer_the_gateway(fleet: Fleet, guarded: Guarded) -> None:
    await fleet.start(run="r", hold=0.05, until_ready=0)
    await fleet.until(lambda: bool(guarded.seen))
    status, answer = await fleet.post({"text": "x"})
    assert (status, answer["error"]["type"]) == (409, "WeightVersionNotReady")
    assert "/generate" not in {path for path, _ in guarded.seen}


async def test_a_new_token_for_replicas_is_taken_over(
    fleet: Fleet, guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stitch_core.replica.auth.SECONDS_BETWEEN_LOOKS", 0.0)
    file = tmp_path / "token"
    file.write_text("wrong-0123456789abcdef")
    await fleet.start(run="r", until_ready=0, replica_token=outgoing(file, {}))
    await fleet.until(lambda: bool(guarded.seen))
    file.write_text(f"{OWN}\n")
    assert (await fleet.post({"text": "x"}))[0] == 200


async def test_a_gateway_without_tokens_passes_the_engines_key_on(fleet: Fleet) -> None:
    server = fleet.add(7)
    await fleet.start(run="r")
    assert (await fleet.post({"text": "x"}, headers=bearer(ASK)))[0] == 200
    assert server.engine.headers["authorization"] == f"Bearer {ASK}"


ODD = (
    "/update_weights_from_disk", "//update_weights_from_disk", "/%75pdate_weights_from_disk",
    "/generate/../update_weights_from_disk", "/generate/%2e%2e/update_weights_from_disk",
    "/update_weights_from_disk/", "/x/..//pause_generation", "/pause_generation?x=/generate",
    "http://127.0.0.1/flush_cache", "/%2fflush_cache", "/generate%2f..%2fflush_cache",
)  # fmt: skip


async def test_no_spelling_of_a_control_route_reaches_a_replica(fleet: Fleet, guarded: Guarded) -> None:
    await fleet.start(run="r", tokens=tokens(), replica_token=lambda: OWN)
    host = fleet.url.removeprefix("http://")

    def ask(target: str, token: str) -> int:
        """Just as it is spelt here, which clients would tidy."""
        connection = http.client.HTTPConnection(host, timeout=10)
        try:
            connection.putrequest("POST", target, skip_accept_encoding=True)
            connection.putheader("authorization", f"Bearer {token}")
            connection.putheader("content-length", "2")
            connection.endheaders(b"{}")
            return connection.getresponse().status
        finally:
            connection.close()

    for target in ODD:
        assert await asyncio.to_thread(ask, target, ASK) in (403, 404), target
        assert await asyncio.to_thread(ask, target, ALL) in (403, 404), target
    assert {"/ready"} <= {path for path, _ in guarded.seen} <= {"/ready", "/v1/loads"}  # the probes


async def test_headers_are_limited(fleet: Fleet) -> None:
    fleet.add(7)
    await fleet.start(run="r")
    many, large = {f"x-{i}": "y" for i in range(300)}, {"x": "y" * 9000}
    wide = {f"x-{i}": "y" * 7000 for i in range(20)}
    for headers in (many, large, wide):
        async with fleet.session.post(fleet.url + "/generate", json={"text": "x"}, headers=headers) as answer:
            assert answer.status == 431
