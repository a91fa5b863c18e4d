"""Replicas behind one address, such as Modal's, which routes by a header to the one that is named."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stitch_core.replica.auth import BadTokens
from stitch_gateway.modal_flash import ModalFlashPool, proxy_keys
from tests.gateway.fleet import Fleet
from tests.replica.scripted import generated, span


class Front:
    """Routes as Modal does: by the upstream that is named, unless a session is.

    With ``token`` it lets in who shows that, a key and a secret: 401 without, 403 with another.
    """

    def __init__(self, places: dict[str, str], token: tuple[str, str] | None = None) -> None:
        self.places, self.sessions, self.token = places, 0, token
        self.shown: set[tuple[str, ...]] = set()
        self.paths: set[str] = set()
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        shown = tuple(v for name in ("Modal-Key", "Modal-Secret") for v in request.headers.getall(name, ()))
        self.shown.add(shown)
        self.paths.add(request.path)
        if self.token is not None and shown != self.token:
            return web.Response(status=403 if shown else 401, text="modal-http: no")
        if "modal-session-id" in request.headers:
            self.sessions += 1
        place = self.places.get(request.headers.get("modal-flash-upstream", ""))
        if place is None or "modal-session-id" in request.headers:
            return web.Response(status=503)
        skipped = ("host", "content-length")
        headers = {key: value for key, value in request.headers.items() if key.lower() not in skipped}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, place + str(request.rel_url), headers=headers,
                            data=await request.read()) as answer,
        ):  # fmt: skip
            kept = {key: value for key, value in answer.headers.items() if key.lower().startswith("x-stitch")}
            return web.Response(
                status=answer.status, body=await answer.read(), content_type=answer.content_type, headers=kept
            )


class Handle:
    """A ``modal.Server`` whose containers a test names."""

    def __init__(self, url: str, places: dict[str, str]) -> None:
        rows = [modal_server(host) for host in places]

        async def get_url() -> str:
            return url

        async def containers() -> list[Any]:
            return rows

        self.get_url = type("Method", (), {"aio": staticmethod(get_url)})
        self._experimental_list_containers = type("Method", (), {"aio": staticmethod(containers)})


def modal_server(place: str) -> Any:
    host, _, port = place.partition(":")
    return type("Container", (), {"container_id": f"ta-{host}", "host": host, "port": int(port)})


@contextlib.asynccontextmanager
async def served(front: Front) -> AsyncIterator[str]:
    """Its URL."""
    runner = web.AppRunner(front.app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_requests_reach_the_container_that_was_chosen(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's own session header would have Modal choose: it is for the gateway's hashing only."""
    servers = [fleet.add(7), fleet.add(8)]
    for number, server in zip((7, 8), servers, strict=True):
        server.engine.body = generated(span(f"r/weight_v{number:06d}", 0, 3))
    places = {f"h{number}:443": server.url for number, server in enumerate(servers)}
    front = Front(places)
    async with served(front) as url:
        pool = ModalFlashPool(Handle(url, places))
        monkeypatch.setattr("tests.gateway.fleet.StaticPool", lambda urls: pool)
        await fleet.start(run="r", peers=pool)
        for number in (7, 8, 7, 8):
            headers = {"Modal-Session-ID": "mine", "modal-flash-upstream": "h0:443"}
            body = {"text": "x", "weight_version": {"exact_version": number}}
            status, answer = await fleet.post(body, headers=headers)
            assert (status, answer["meta_info"]["weight_version"]) == (200, str(number))
        assert front.sessions == 0
        status, answer = await fleet.post({"rid": "nothing"}, "/abort_request")
        assert (status, answer["replicas"]) == (200, 2)
        assert answer["gateways"] == 2, "of several behind one URL none was reached"
        assert front.shown == {()}


async def test_every_request_to_a_replica_shows_the_gateways_token_and_none_a_clients(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests, probes, wakes, aborts and what is every replica's; the token is in nothing that is said."""
    caplog.set_level(logging.DEBUG)
    server, token = fleet.add(7), ("wk-ours", "ws-ours")
    front = Front({"h0:443": server.url}, token)
    environ = dict(zip(("MODAL_PROXY_KEY", "MODAL_PROXY_SECRET"), token, strict=True))
    async with served(front) as url:
        pool = ModalFlashPool(Handle(url, front.places), proxy_keys(environ))
        monkeypatch.setattr("tests.gateway.fleet.StaticPool", lambda urls: pool)
        await fleet.start(run="r", until_ready=1)
        (replica,) = fleet.gateway.fleet.replicas
        theirs = {"Modal-Key": "wk-theirs", "Modal-Secret": "ws-theirs"}
        status, answer = await fleet.post({"text": "x"}, headers=theirs)
        assert (status, answer["meta_info"]["weight_version"]) == (200, "7")
        assert (await fleet.post({"rid": "nothing"}, "/abort_request"))[1]["replicas"] == 1
        assert (await fleet.post({}, "/wake"))[1]["replicas"] == 1
        await fleet.get("/v1/models")
        asked = {"/ready", "/generate", "/abort_request", "/wake", "/v1/models", "/v1/loads"}
        await fleet.until(lambda: asked <= front.paths)
        assert front.shown == {token}
        said = f"{await fleet.get('/status')} {replica} {await pool.replicas()} {caplog.text}"
        assert "ours" not in said


@pytest.mark.parametrize(("token", "status"), [((), 401), (("wk-of", "ws-another"), 403)])
async def test_a_gateway_that_is_not_let_in_says_what_it_was_answered(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, token: tuple[str, ...], status: int
) -> None:
    """It said that the answer was no JSON."""
    front = Front({"h0:443": fleet.add(7).url}, ("wk-ours", "ws-ours"))
    environ = dict(zip(("MODAL_PROXY_KEY", "MODAL_PROXY_SECRET"), token, strict=False))
    async with served(front) as url:
        pool = ModalFlashPool(Handle(url, front.places), proxy_keys(environ))
        monkeypatch.setattr("tests.gateway.fleet.StaticPool", lambda urls: pool)
        await fleet.start(run="r", until_ready=0)
        await fleet.until(lambda: any(r.error != "not probed yet" for r in fleet.gateway.fleet.replicas))
        (replica,) = fleet.gateway.fleet.replicas
        assert (replica.ready, replica.error) == (False, f"it answered {status} to this gateway")


@pytest.mark.slow
async def test_a_token_that_is_changed_in_its_file_is_shown_from_then_on(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("wk-old ws-old\n")
    pool = ModalFlashPool(
        Handle("http://x", {"h0:443": ""}), proxy_keys({"STITCH_MODAL_PROXY_FILE": str(file)})
    )
    (before,) = await pool.replicas()
    assert (before.headers["modal-key"], before.headers["modal-secret"]) == ("wk-old", "ws-old")
    file.write_text("wk-newer ws-newer\n")
    await asyncio.sleep(1.1)  # a file is looked at once a second
    (after,) = await pool.replicas()
    assert (after.headers["modal-key"], after.headers["modal-secret"]) == ("wk-newer", "ws-newer")
    file.write_text("half\n")
    await asyncio.sleep(1.1)
    assert (await pool.replicas())[0].headers == after.headers


@pytest.mark.parametrize(
    "environ",
    [
        {"MODAL_PROXY_KEY": "wk-sesame"},
        {"MODAL_PROXY_SECRET": "ws-sesame"},
        {"MODAL_PROXY_KEY": "wk-sesame ws-sesame", "MODAL_PROXY_SECRET": "ws-sesame"},
        {"MODAL_PROXY_KEY": "wk-sesame", "MODAL_PROXY_SECRET": "ws-\N{SNOWMAN}sesame"},
    ],
)
def test_half_a_token_is_refused_without_repeating_it(environ: dict[str, str]) -> None:
    with pytest.raises(BadTokens, match="MODAL_PROXY_KEY and MODAL_PROXY_SECRET: expected") as refused:
        proxy_keys(environ)
    assert "sesame" not in str(refused.value)
