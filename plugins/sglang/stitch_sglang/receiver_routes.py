"""The routes by which stock slime and Miles drive an engine, as a receiver answers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stitch_core.replica.asgi import (
    App,
    Disconnected,
    Receive,
    Scope,
    Send,
    clean_path,
    header_map,
    read_body,
    send_json,
    send_refusal,
)
from stitch_core.requests import Refused, json_object
from stitch_core.versions import malformed

if TYPE_CHECKING:
    from .receiver import Receiver

MAX_BODY = 1 << 20
Json = dict[str, Any]


class ReceiverRoutes:
    """Answers what a trainer asks, passes the rest to ``app``."""

    def __init__(self, app: App, receiver: Receiver) -> None:
        self._app, self._receiver = app, receiver
        self._routes: dict[tuple[str, str], Callable[[Json], Awaitable[tuple[int, Any]]]] = {
            ("POST", "/pull_weights"): self._pull,
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/activate_weights"): self._activate,
            ("POST", "/update_weight_version"): self._version,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._ok,
            ("POST", "/flush_cache"): self._ok,
            ("GET", "/flush_cache"): self._ok,
            ("GET", "/get_weight_version"): self._get_version,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = clean_path(scope["path"]) if scope["type"] == "http" else ""
        route = self._routes.get((scope.get("method", ""), path))
        is_abort = (scope.get("method"), path) == ("POST", "/abort_request")
        if route is None and not is_abort:
            await self._app(scope, receive, send)
            return
        try:
            raw = await read_body(receive, header_map(scope["headers"]), MAX_BODY)
            body = json_object(raw) if raw.strip() else {}
            if route is not None:
                status, answer = await route(body)
            elif body.get("abort_all"):
                await self._receiver.abort_all()
                status, answer = 200, {}
            else:
                await self._app(scope, _again(raw, receive), send)
                return
        except Refused as error:
            await send_refusal(send, error.refusal)
        except Disconnected:
            return
        else:
            await send_json(send, status, answer)

    async def _pull(self, body: Json) -> tuple[int, Any]:
        local, source = _path(body, "local_checkpoint_dir"), _path(body, "source_dir")
        target = body.get("target_version")
        if not isinstance(target, int) or isinstance(target, bool) or target < 0:
            raise Refused(malformed(f"target_version must be a non-negative integer, not {target!r}"))
        destination = body.get("destination", "auto")
        if destination not in ("disk", "cpu", "auto"):
            raise Refused(malformed(f"destination must be disk, cpu or auto, not {destination!r}"))
        return await _done(self._receiver.pull(local, source, target, destination))

    async def _activate(self, body: Json) -> tuple[int, Any]:
        target = body.get("target_version")
        if target is not None and (not isinstance(target, int) or isinstance(target, bool)):
            raise Refused(malformed(f"target_version must be an integer, not {target!r}"))
        return await _done(self._receiver.update(None, None if target is None else str(target)))

    async def _update(self, body: Json) -> tuple[int, Any]:
        number = body.get("weight_version")
        if number is not None and not isinstance(number, str):
            raise Refused(malformed(f"weight_version must be text, not {number!r}"))
        status, answer = await _done(self._receiver.update(_path(body, "model_path"), number))
        return status, {**answer, "num_paused_requests": 0}

    async def _version(self, body: Json) -> tuple[int, Any]:
        served, said = self._receiver.serving_number(), body.get("new_version")
        same = said == str(served)
        message = f"version {served} is served" + ("" if same else f": it cannot be called {said!r}")
        return 200 if same else 400, {"success": same, "message": message, "new_version": str(served)}

    async def _pause(self, body: Json) -> tuple[int, Any]:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise Refused(malformed(f"mode must be abort, retract or in_place, not {mode!r}"))
        if mode == "abort":
            await self._receiver.abort_all()
        return await self._ok(body)

    async def _ok(self, body: Json) -> tuple[int, Any]:
        return 200, {"status": "ok", "success": True, "message": "the update itself pauses and separates KV"}

    async def _get_version(self, body: Json) -> tuple[int, Any]:
        served = self._receiver.serving_number()
        return (503, {"weight_version": None}) if served is None else (200, {"weight_version": str(served)})


async def _done(call: Awaitable[str]) -> tuple[int, Json]:
    from .receiver import NotDone

    try:
        return 200, {"success": True, "message": await call}
    except NotDone as error:
        return 400, {"success": False, "message": str(error)}


def _path(body: Json, name: str) -> Path:
    value = body.get(name)
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise Refused(malformed(f"{name} must be an absolute path, not {value!r}"))
    return Path(value)


def _again(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body first, as it came."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Any:
        return next(messages, None) or await receive()

    return again
