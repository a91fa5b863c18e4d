"""Tokens: who may do what at a replica, and what never happens to a token."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from stitch_core.replica import auth
from stitch_core.replica.auth import BadTokens, Guard, Reloaded, Tokens, needed, outgoing, parse_tokens
from stitch_core.replica.routes import ROUTES
from stitch_core.testing.asgi_client import AsgiClient
from tests.replica.scripted import Replica

ASK, LOOK, ALL = "ask-0123456789abcdef", "look-0123456789abcdef", "all-0123456789abcdef"
TEXT = f"# who\ngenerate {ASK}\n\nread  {LOOK}\nadmin {ALL}\n"


def tokens(text: str = TEXT) -> Tokens:
    grants = parse_tokens(text, "here")
    return Tokens(lambda: grants)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def client(replica: Replica, held: Tokens | None = None) -> AsgiClient:
    return AsgiClient(Guard(replica.app, held or tokens()))


async def test_roles(replica: Replica) -> None:
    asked = client(replica)
    codes: dict[str, list[int | None]] = {}
    for path, method in (("/generate", "POST"), ("/ready", "GET"), ("/v1/loads", "GET"), ("/wake", "POST")):
        for token in (ASK, LOOK, ALL):
            answer = await asked.request(method, path, {"text": "x"}, headers=bearer(token))
            codes.setdefault(path, []).append(answer.status)
    assert codes["/generate"] == [200, 403, 200]
    assert codes["/ready"] == [200, 200, 200]
    assert codes["/v1/loads"][0] == 403
    assert 403 not in codes["/v1/loads"][1:]
    assert codes["/wake"] == [202, 403, 202]


@pytest.mark.parametrize("given", [
    "", ASK, f"Basic {ASK}", f"Bearer {ASK}x", f"Bearer {ASK[:-1]}", "Bearer", "Bearer \xff\xfe",
    f"Bearer {ASK} {ASK}",
])  # fmt: skip
async def test_others_are_told_nothing_but_how_to_ask(replica: Replica, given: str) -> None:
    asked = client(replica)
    scope_headers = {"authorization": given} if given else {}
    answer = await AsgiClient(_latin(asked.app)).post("/generate", {"text": "x"}, headers=scope_headers)
    assert answer.status == 401
    assert answer.json()["error"]["type"] == "Unauthenticated"
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert ASK not in answer.body.decode()


def _latin(app: Any) -> Any:
    """Header values as servers hand them on: any bytes."""

    async def changed(scope: Any, receive: Any, send: Any) -> None:
        headers = [(name, value.decode().encode("latin-1")) for name, value in scope["headers"]]
        await app({**scope, "headers": headers}, receive, send)

    return changed


async def test_health_is_open_and_two_authorizations_are_none(replica: Replica) -> None:
    asked = client(replica)
    assert (await asked.get("/health")).status == 200

    async def twice(scope: Any, receive: Any, send: Any) -> None:
        extra = [(b"authorization", f"Bearer {ASK}".encode())]
        await asked.app({**scope, "headers": [*scope["headers"], *extra]}, receive, send)

    answer = await AsgiClient(twice).post("/generate", {"text": "x"}, headers=bearer(ASK))
    assert answer.status == 401


async def test_the_engine_never_sees_a_token(replica: Replica) -> None:
    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]))
        await replica.app(scope, receive, send)

    answer = await AsgiClient(Guard(inner, tokens())).post("/generate", {"text": "x"}, headers=bearer(ASK))
    assert answer.status == 200
    assert [b"authorization" in headers for headers in seen] == [False]


SPELLINGS = (
    "{}", "/{}", "//{}", "{}/", "/x/..{}", "/./{}", "{}//", "/generate/../{}", "/generate/..{}", "{};x",
    "{}\x00",
)  # fmt: skip


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/pause_generation", "/activate_weights"])
async def test_no_spelling_of_a_control_route_passes_for_a_generating_one(
    replica: Replica, path: str
) -> None:
    """The path that is judged is the one that is routed: the engine sees clean, known ones."""
    reached: list[str] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await replica.engine(scope, receive, send)

    replica.app._app = engine
    asked = client(replica)
    for spelling in SPELLINGS:
        wanted = spelling.format(path)
        for token, least in ((ASK, 403), (ALL, 403)):
            answer = await asked.post(wanted, {}, headers=bearer(token))
            assert answer.status in (least, 404), (wanted, answer.status)
    assert reached == []


def test_every_route_needs_a_role_and_what_is_unknown_needs_admin() -> None:
    assert [path for path in ROUTES if needed(path) is None] == ["/health"]
    assert needed("/update_weights_from_disk") == needed("/no/such") == frozenset({"admin"})


@pytest.mark.parametrize("text", [
    "", "# nothing\n", "generate", "root " + ASK, f"generate {ASK} more", "read short",
    "generate,root " + ASK,
    "read pässword-0123456789",
])  # fmt: skip
def test_tokens_that_cannot_be_used_are_refused_without_showing_one(text: str) -> None:
    with pytest.raises(BadTokens) as refused:
        parse_tokens(text, "here")
    assert not any(word in str(refused.value) for word in (ASK, "short", "0123456789"))
    assert "here" in str(refused.value)


def test_a_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    file = tmp_path / "tokens"
    file.write_text(f"generate {ASK}")
    reloaded = Reloaded(file, parse_tokens, clock=lambda: now)
    held = Tokens(reloaded.value)  # type: ignore[arg-type]
    assert held.roles(f"Bearer {ASK}") == {"generate"}
    (tmp_path / "next").write_text(f"read {LOOK}")
    os.replace(tmp_path / "next", file)  # as secrets are mounted
    assert held.roles(f"bearer {ASK}") == {"generate"}
    now = 1.5
    with caplog.at_level(logging.INFO, "stitch"):
        assert held.roles(f"Bearer {ASK}") is None
        assert held.roles(f"Bearer {LOOK}") == {"read"}
        now = 3.0
        file.write_text("broken\n")
        assert held.roles(f"Bearer {LOOK}") == {"read"}
        now = 5.0
        file.unlink()
        assert held.roles(f"Bearer {LOOK}") == {"read"}
    assert any("stay as they were" in record.message for record in caplog.records)
    assert not any(token in record.message for record in caplog.records for token in (ASK, LOOK))


def test_where_tokens_come_from(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TEXT)
    assert Tokens.given(None, {}) is None
    for held in (
        Tokens.given(file, {}),
        Tokens.given(None, {"STITCH_TOKEN_FILE": str(file)}),
        Tokens.given(None, {"STITCH_TOKENS": f"read {LOOK}; admin {ALL}"}),
    ):
        assert held is not None
        assert held.roles(f"Bearer {ALL}") == {"admin"}
    with pytest.raises(OSError, match="gone"):
        Tokens.given(tmp_path / "gone", {})
    assert outgoing(None, {})() is None
    assert outgoing(None, {"STITCH_REPLICA_TOKEN": ASK})() == ASK
    file.write_text(f"{ALL}\n")
    assert outgoing(file, {})() == ALL


async def test_headers_are_limited(replica: Replica) -> None:
    asked = AsgiClient(Guard(replica.app, None))
    answer = await asked.get("/ready", headers={"x": "y" * auth.MOST_HEADER_BYTES})
    assert (answer.status, answer.json()["error"]["type"]) == (431, "HeadersTooLarge")
    answer = await asked.get("/ready", headers={f"x{i}": "y" for i in range(auth.MOST_HEADERS + 1)})
    assert answer.status == 431
    assert (await asked.get("/ready")).status == 200


def test_servers_that_others_reach_are_warned_of() -> None:
    assert auth.exposed("127.0.0.1", None) is None
    assert auth.exposed("0.0.0.0", tokens()) is None
    assert "--token-file" in str(auth.exposed("0.0.0.0", None))
