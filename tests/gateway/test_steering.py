"""Replicas behind one address, such as Modal's, which routes by a header to the one that is named."""

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stitch_gateway.modal_flash import ModalFlashPool
from tests.gateway.fleet import Fleet
from tests.replica.scripted import generated, span


class Front:
    """Routes as Modal does: by the upstream that is named, unless a session is."""

    def __init__(self, places: dict[str, str]) -> None:
        self.places, self.sessions = places, 0
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
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


async def test_requests_reach_the_container_that_was_chosen(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's own session header would have Modal choose: it is for the gateway's hashing only."""
    servers = [fleet.add(7), fleet.add(8)]
    for number, server in zip((7, 8), servers, strict=True):
        server.engine.body = generated(span(f"r/weight_v{number:06d}", 0, 3))
    places = {f"h{number}:443": server.url for number, server in enumerate(servers)}
    front = Front(places)
    runner = web.AppRunner(front.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    pool = ModalFlashPool(Handle(url, places))
    monkeypatch.setattr("tests.gateway.fleet.StaticPool", lambda urls: pool)
    try:
        await fleet.start(run="r")
        for number in (7, 8, 7, 8):
            headers = {"Modal-Session-ID": "mine", "modal-flash-upstream": "h0:443"}
            body = {"text": "x", "weight_version": {"exact_version": number}}
            status, answer = await fleet.post(body, headers=headers)
            assert (status, answer["meta_info"]["weight_version"]) == (200, str(number))
        assert front.sessions == 0
        status, answer = await fleet.post({"rid": "nothing"}, "/abort_request")
        assert (status, answer["replicas"]) == (200, 2)
    finally:
        await runner.cleanup()
