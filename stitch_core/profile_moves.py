"""The two ways in which an update reaches a replica: it follows a store, or a trainer's routes drive it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chain import ChainReader
from .manifest import Manifest
from .ports import Clock
from .profile import Moved
from .traffic import Json, Server, ServerError
from .versions import PolicyVersion

LOOK_SECONDS = 0.05
HEAD_SECONDS = 0.1


class NotMoved(Exception):
    """The server did not come to serve the version; the message says what it says."""


@dataclass
class Follow:
    """A replica that follows ``run``. ``publish`` makes the next version; None waits for a trainer's.

    Raises NotMoved, ServerError, and what reading the store raises.
    """

    server: Server
    chain: ChainReader
    run: str
    clock: Clock
    patience: float
    publish: Callable[[], Awaitable[object]] | None = None

    async def __call__(self) -> Moved:
        old = await self.serving()
        head, _ = await self.chain.head(self.run)
        if head.number != old:
            raise NotMoved(f"version {head.number} was published before the update was measured: try again")
        publishing = asyncio.ensure_future(self.publish()) if self.publish else None
        try:
            target = await self._newer(old, publishing)
            began = self.clock.monotonic()
            await self.server.ask("POST", "/wake")
            ready = await self._served(target.number)
            served = self.clock.monotonic()
        finally:
            if publishing is not None:
                await publishing  # it may still put its things away
        # A trainer may have gone on meanwhile, and the replica with it.
        row = await self.chain.find(target, lambda one: one.number == old)
        status = await stitch_status(self.server)
        return _moved(target, began, served, ready, status, row is not None and row.state == target.state)

    async def serving(self) -> int:
        """The number that is served now. Raises NotMoved."""
        ready = await _ready(self.server)
        if not ready.get("ready") or ready.get("run") != self.run:
            raise NotMoved(
                f"the server is to serve run {self.run} before the update: it serves {ready.get('run')}, "
                f"{ready.get('why_not_ready') or 'ready'}"
            )
        return int(ready["applied"])

    async def _newer(self, old: int, publishing: asyncio.Future[object] | None) -> Manifest:
        deadline = self.clock.monotonic() + self.patience
        while True:
            if publishing is not None and publishing.done():
                publishing.result()
            head, _ = await self.chain.head(self.run)
            if head.number > old:
                return await self.chain.manifest(self.run, head)
            if publishing is None and self.clock.monotonic() > deadline:
                raise NotMoved(f"nothing newer than version {old} was published in {self.patience:g} s")
            await asyncio.sleep(HEAD_SECONDS)

    async def _served(self, number: int) -> Json:
        deadline = self.clock.monotonic() + self.patience
        while True:
            ready = await _ready(self.server)
            if ready.get("ready") and (ready.get("applied") or 0) >= number:
                if ready["applied"] == number:
                    return ready
                raise NotMoved(
                    f"version {ready['applied']} is served: the run moved on while {number} was measured"
                )
            if self.clock.monotonic() > deadline:
                problem = (ready.get("problem") or {}).get("message", ready.get("activity"))
                raise NotMoved(f"version {number} is not served after {self.patience:g} s: {problem}")
            await asyncio.sleep(LOOK_SECONDS)


@dataclass
class Receive:
    """A receiver, driven as a stock trainer does: pull, then activate what was pulled. Raises NotMoved."""

    server: Server
    source: Path
    local: Path
    number: int
    clock: Clock
    destination: str | None = None

    async def __call__(self) -> Moved:
        began = self.clock.monotonic()
        pull: Json = {
            "local_checkpoint_dir": str(self.local), "source_dir": str(self.source),
            "target_version": self.number,
        }  # fmt: skip
        if self.destination is not None:
            pull["destination"] = self.destination
        await self._done("/pull_weights", pull)
        pulled = self.clock.monotonic()
        await self._activate()
        served = self.clock.monotonic()
        status = await stitch_status(self.server)
        last = _last_update(status, self.number)
        # No request asks for an exact version here, so that there is nothing to drain.
        return Moved(
            path=_path(status, last), version=last.get("version", str(self.number)), number=self.number,
            began=began, served=served, drain=0.0, pause=served - pulled, stage=pulled - began,
            copy=last.get("copy"), copied=last.get("bytes"), image=_image(last),
            excludes=("looking for the new version: the trainer says it",),
        )  # fmt: skip

    async def _activate(self) -> None:
        """By our route where there is one, else by the stock one."""
        status, answer = await self.server.ask("POST", "/activate_weights", {"target_version": self.number})
        if status in (403, 404, 405):
            update = {"model_path": str(self.local), "weight_version": str(self.number)}
            await self._done("/update_weights_from_disk", update)
        elif status != 200:
            raise NotMoved(f"/activate_weights: {status} {_message(answer)}")

    async def _done(self, path: str, body: Json) -> None:
        status, answer = await self.server.ask("POST", path, body)
        if status != 200:
            raise NotMoved(f"{path}: {status} {_message(answer)}")


async def stitch_status(server: Server) -> Json:
    """What ``GET /stitch/status`` says, nothing where that route is not."""
    status, answer = await server.ask("GET", "/stitch/status")
    return answer if status == 200 and isinstance(answer, dict) else {}


async def _ready(server: Server) -> Json:
    _, answer = await server.ask("GET", "/ready")
    if not isinstance(answer, dict) or "applied" not in answer:
        raise ServerError("GET /ready says no version: is this server a replica of Stitch?")
    return answer


def _moved(
    target: Manifest, began: float, served: float, ready: Json, status: Json, same_state: bool
) -> Moved:
    version = str(target.version)
    updates = [one for one in ready.get("updates", ()) if one["version"] == version]
    if not updates:
        raise NotMoved(f"the server serves {version} and says nothing of how it came to")
    update, last = updates[-1], _last_update(status, target.number)
    # It may have seen the head before we did.
    began = min(began, served - sum(update[part] for part in ("fetch", "stage", "drain", "pause")))
    return Moved(
        path=_path(status, last), version=version, number=target.number, began=began, served=served,
        drain=update["drain"], pause=update["pause"], copy=last.get("copy"), fetch=update["fetch"],
        stage=update["stage"], bytes=update["bytes"], tensors=update["tensors"], copied=last.get("bytes"),
        image=_image(last), same_state=same_state,
    )  # fmt: skip


def _last_update(status: Json, number: int) -> Json:
    """What the engine's side says of the activation of ``number``; nothing if it was another's."""
    last = status.get("last_update")
    if not isinstance(last, dict) or PolicyVersion.parse(last["version"]).number != number:
        return {}
    return last


def _path(status: Json, last: Json) -> str:
    """The destination that the update took; "engine" for engines that have only their own."""
    return str(last.get("destination") or status.get("destination", {}).get("uses") or "engine")


def _image(last: Json) -> int | None:
    """Bytes of the images of all ranks."""
    stage = last.get("stage")
    return sum(stage["image_bytes"]) * stage["images"] if stage else None


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error")
        return str(answer.get("message") or (error.get("message") if isinstance(error, dict) else answer))
    return str(answer)[:200]
