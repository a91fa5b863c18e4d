"""Replicas behind Modal's one address: the real SDK against a servicer on loopback."""

import argparse
import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpclib.server
import modal
import pytest
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from stitch_core.cli import scale as command
from stitch_core.cli.common import UsageError
from stitch_core.ports import Unavailable
from stitch_gateway.modal_flash import open_modal_flash
from tests.modal.fake import _Rest


class Servicer(_Rest):
    """What the pool calls; ``failing`` answers everything with an error."""

    def __init__(self) -> None:
        self.containers = [("ta-1", "h1.modal.host", 443), ("ta-2", "h2.modal.host", 8443)]
        self.scaled: list[Any] = []
        self.failing = False

    async def _begin(self, stream: Any) -> Any:
        request = await stream.recv_message()
        if self.failing:
            raise GRPCError(Status.PERMISSION_DENIED, "not yours")
        return request

    async def ClientHello(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        claims = base64.urlsafe_b64encode(json.dumps({"exp": int(time.time()) + 3600}).encode())
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=f"a.{claims.rstrip(b'=').decode()}.b"))

    async def FunctionGet(self, stream: Any) -> None:
        request = await self._begin(stream)
        if request.object_tag != "Replica":
            raise GRPCError(Status.NOT_FOUND, f"no server {request.object_tag}")
        metadata = api_pb2.FunctionHandleMetadata(
            function_name=request.object_tag, function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION,
            _experimental_flash_urls=["https://x--replica.us-east.modal.direct/"],
        )  # fmt: skip
        ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=api_pb2.Function(is_server=True))
        data = api_pb2.FunctionData(ranked_functions=[ranked], is_server=True)
        answer = api_pb2.FunctionGetResponse(function_id="fu-1", handle_metadata=metadata, function=data)
        await stream.send_message(answer)

    async def FlashContainerList(self, stream: Any) -> None:
        await self._begin(stream)
        make = api_pb2.FlashContainerListResponse.Container
        rows = [make(task_id=task, host=host, port=port) for task, host, port in self.containers]
        await stream.send_message(api_pb2.FlashContainerListResponse(containers=rows))

    async def FunctionUpdateSchedulingParams(self, stream: Any) -> None:
        request = await self._begin(stream)
        self.scaled.append(request.settings)
        done = api_pb2.FunctionUpdateSchedulingParamsResponse(current_settings=request.settings)
        await stream.send_message(done)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[tuple[Servicer, Any]]:
    loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    servicer, found = Servicer(), {}

    async def run() -> None:
        server = grpclib.server.Server([servicer])
        await server.start("127.0.0.1", 0)
        assert server._server is not None
        found["port"] = server._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        ready.set()
        await ended.wait()
        server.close()
        await server.wait_closed()

    def serve() -> None:
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    monkeypatch.setenv("MODAL_SERVER_URL", f"http://127.0.0.1:{found['port']}")
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))
    client = modal.Client.from_credentials("ak-x", "as-x")
    try:
        yield servicer, client
    finally:
        client.close()
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)


async def test_containers_are_replicas_behind_one_url(served: tuple[Servicer, Any]) -> None:
    servicer, client = served
    pool = open_modal_flash("modal_flash:app/Replica", client=client)
    found = [(r.id, r.url, dict(r.headers)) for r in await pool.replicas()]
    url = "https://x--replica.us-east.modal.direct"
    assert found == [
        ("ta-1", url, {"modal-flash-upstream": "h1.modal.host:443"}),
        ("ta-2", url, {"modal-flash-upstream": "h2.modal.host:8443"}),
    ]
    servicer.containers = [("ta-3", "h3", 1)]
    assert [r.id for r in await pool.replicas()] == ["ta-3"]
    servicer.failing = True
    assert [r.id for r in await pool.replicas()] == ["ta-3"]
    await pool.close()


async def test_what_modal_does_not_know_is_said(served: tuple[Servicer, Any]) -> None:
    pool = open_modal_flash("modal_flash:app/Other", client=served[1])
    with pytest.raises(Unavailable, match="Modal does not say where its server is: NotFoundError"):
        await pool.replicas()


@pytest.mark.parametrize("url", ["modal_flash:", "modal_flash:a", "modal_flash:a/b/c", "modal_flash:a/b?x=y"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not modal_flash:APP/SERVER"):
        open_modal_flash(url)


async def test_scale(
    served: tuple[Servicer, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, client = served
    opened = lambda url: open_modal_flash(url, client=client)  # noqa: E731
    monkeypatch.setattr(command.plugins, "load", lambda group, name: opened)
    options = argparse.Namespace(pool="modal_flash:app/Replica", count=3, json=True)
    assert await command.run(options) == 0
    assert json.loads(capsys.readouterr().out)["set"] == "min_containers=3, max_containers=3"
    assert (servicer.scaled[0].min_containers, servicer.scaled[0].max_containers) == (3, 3)
    options.count = 0
    assert await command.run(options) == 0
    assert servicer.scaled[1].min_containers == 0
    servicer.failing = True
    with pytest.raises(Unavailable, match="Modal did not set the number"):
        await command.run(options)


async def test_pools_that_start_nothing_say_who_does() -> None:
    with pytest.raises(UsageError, match="a static pool starts no replicas"):
        await command.run(argparse.Namespace(pool="static:http://a:1", count=3, json=True))
