"""SGLang as an Engine, from inside its HTTP process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from stitch_core.ports import (
    EngineBounds,
    EngineError,
    EngineIdentity,
    EngineRefused,
    EngineUncertain,
    FileMarks,
    KVMode,
    ProbeAnswer,
)
from stitch_core.replica import probe_prompt
from stitch_core.replica.progress import unless_still

from .messages import ACTIVATING, DONE, REFUSED, STAGING, StitchActivateReqInput, StitchStageReqInput
from .settings import STAGE_TIMEOUT, UPDATE_TIMEOUT, Destination

logger = logging.getLogger(__name__)

POLL_SECONDS = (0.02, 0.25)
CALL_SECONDS = 60.0


class DestinationRefused(Exception):
    """The destination that was asked for cannot be had; the message says why."""


class StageUnfit(Exception):
    """A version that cannot be staged into images, however often it is tried."""


class SGLangEngine:
    """``manager`` is SGLang's TokenizerManager. Owned by its event loop.

    ``destination``: where ``prepare`` brings a version. ``disk``: nowhere, the activation loads it. ``cpu``:
    into the ranks' images, from which the activation copies. ``auto``: cpu, if the self-test allows it.
    The pause is a part of ``activate``, one message to the scheduler, so that it cannot outlive its caller.
    ``boot_marks``: of ``--model-path``, from before SGLang began to load it; None if that was not seen.
    Seconds: ``update_timeout`` for an activation; ``stage_timeout`` for which a stage, which takes as long as
    it takes, may not get on.
    """

    def __init__(
        self,
        manager: Any,
        destination: Destination = "disk",
        boot_marks: FileMarks | None = None,
        *,
        update_timeout: float = UPDATE_TIMEOUT,
        stage_timeout: float = STAGE_TIMEOUT,
    ) -> None:
        self.bounds = EngineBounds(CALL_SECONDS, update_timeout, prepare=None)
        self._still, self._steps = stage_timeout, 0
        self._manager, self._boot_marks = manager, boot_marks
        self._instance = secrets.token_hex(8)  # the schedulers live and die with this process
        self._asked: Destination = destination
        self._uses: Literal["disk", "cpu"] | None = "disk" if destination == "disk" else None
        self._why = "asked for" if destination == "disk" else "the self-test has not ended"
        self._chosen = asyncio.Event()
        self.warm = asyncio.Event()
        """To be set once forward passes have run: what they do to the model is a part of the self-test."""
        if destination == "disk":
            self._chosen.set()
        self._ids = itertools.count(1)
        self._expected: tuple[Path, str, Destination] | None = None
        self._prepared: Path | None = None
        self._staged: str | None = None
        self._mode: KVMode = "in_place"
        self._self_test: dict[str, Any] | None = None
        self._stage: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None

    async def identity(self) -> EngineIdentity:
        label = self._manager.config_value("weight_version")
        return EngineIdentity(self._instance, label, self._boot_marks)

    # ------------------------------------------------------------------------------------- destination

    async def choose(self, boot: Path) -> None:
        """The self-test, while version 0 may be served: stage ``boot`` and compare with the live weights.

        Raises DestinationRefused if ``cpu`` was asked for and is not to be had.
        """
        if self._asked == "disk":
            return
        await self.warm.wait()
        try:
            self._self_test = await self._run("test", boot, "")
        except Exception as error:  # whatever it is, there is no proof
            self._self_test = {"outcome": "failed", "message": str(error)}
            if self._asked == "cpu":
                raise DestinationRefused(f"no destination cpu: {error}") from error
            self._use("disk", str(error))
        else:
            self._use("cpu", "the self-test has passed")
        self._chosen.set()

    def expect(self, checkpoint: Path, state: str, destination: Destination = "auto") -> None:
        """What ``checkpoint`` must hold when it is prepared next, and where it is to go (auto: as always)."""
        self._expected = (checkpoint, state, destination)

    def status(self) -> dict[str, Any]:
        """What ``/stitch/status`` says."""
        return {
            "destination": {"asked": self._asked, "uses": self._uses, "why": self._why},
            "served": self._manager.config_value("weight_version"),
            "self_test": self._self_test,
            "staged": self._stage,
            "last_update": self._last,
        }

    def _use(self, destination: Literal["disk", "cpu"], why: str) -> None:
        self._uses, self._why = destination, why
        logger.warning("stitch: destination %s: %s", destination, why)

    # -------------------------------------------------------------------------------------- activation

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        """The staged directory was verified by whoever staged it.

        On disk SGLang reads it all at activation; from images nothing is left to do then but a copy.
        """
        self._prepared = self._staged = self._stage = None
        if not changed:
            return
        await self._chosen.wait()
        known = self._expected is not None and self._expected[0] == checkpoint
        _, state, destination = self._expected if self._expected and known else (checkpoint, "", "auto")
        if destination == "cpu" and self._uses != "cpu":
            raise EngineRefused(f"no destination cpu: {self._why}")
        if self._uses == "disk" or destination == "disk":
            self._prepared = checkpoint
            return
        try:
            self._stage = await self._run("stage", checkpoint, state)
        except StageUnfit as error:
            if "cpu" in (self._asked, destination):
                raise EngineRefused(str(error)) from error
            logger.warning("stitch: this version is loaded from disk: %s", error)
            self._prepared = checkpoint
        else:
            self._staged = self._stage["id"]

    async def pause(self, mode: KVMode) -> None:
        self._mode = mode

    async def activate(self, label: str) -> None:
        request = StitchActivateReqInput(
            label=label,
            mode=self._mode,
            model_path=None if self._prepared is None else str(self._prepared),
            load_format=self._manager.config_value("load_format"),
            staged=self._staged,
        )
        try:
            reply = await self._send(ACTIVATING, request)
        except Exception as error:
            raise EngineUncertain(f"no answer from the scheduler: {error!r}") from error
        if reply.outcome == REFUSED:
            raise EngineRefused(reply.message)
        if reply.outcome != DONE:
            raise EngineUncertain(reply.message)
        how = "cpu" if self._staged else "disk" if self._prepared else None
        self._last = {
            "version": label, "destination": how, "time": time.time(), "pause": reply.pause,
            "copy": reply.copy, "bytes": reply.bytes, "stage": self._stage,
        }  # fmt: skip
        self._staged = self._stage = None
        self._manager._update_weight_version_if_provided(label)

    async def resume(self) -> None:
        """Nothing: ``activate`` has ended the pause."""

    async def abort(self, request_id: str) -> None:
        try:
            self._manager.abort_request(rid=request_id)
        except Exception as error:
            raise EngineError(f"the abort could not be sent: {error!r}") from error

    async def probe(self) -> ProbeAnswer | None:
        """A request of our own, below the gate, once SGLang is warm. None if SGLang refuses it."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        await self.warm.wait()
        asked = probe_prompt.request(
            self._manager.model_config.vocab_size, f"stitch-probe-{secrets.token_hex(8)}"
        )
        try:
            async with contextlib.aclosing(
                self._manager.generate_request(GenerateReqInput(**asked), None)
            ) as contents:
                answer = [content async for content in contents][-1]
        except ValueError as error:
            logger.warning("stitch: weights cannot be probed: %s", error)
            return None
        except Exception as error:
            raise EngineError(f"the probe's request failed: {error!r}") from error
        if probe_prompt.was_aborted(answer):
            raise EngineError("the probe's request was aborted")
        logprobs = probe_prompt.answer(answer, asked["input_ids"])
        return None if logprobs is None else ProbeAnswer(logprobs, self._signature())

    # ------------------------------------------------------------------------------------------ inside

    def _signature(self) -> str:
        from sglang.version import __version__

        settings: dict[str, Any] = self._manager.server_args.resolved_dict()
        return probe_prompt.signature({**settings, "version": __version__})

    async def _run(self, action: str, path: Path, state: str) -> dict[str, Any]:
        """One stage on all ranks, to its end. Raises EngineRefused, StageUnfit."""
        try:
            return await unless_still(self._stage_all(action, path, state), lambda: self._steps, self._still)
        except TimeoutError:
            raise EngineRefused(f"staging {path} did not get on for {self._still:g} s") from None

    async def _stage_all(self, action: str, path: Path, state: str) -> dict[str, Any]:
        id = f"{action}-{next(self._ids)}"
        request = StitchStageReqInput(action=action, id=id, path=str(path), state=state)
        wait, most = POLL_SECONDS
        try:
            while True:
                reports = (await self._send(STAGING, request)).reports
                self._steps = sum(one.get("steps", 0) for one in reports)
                for kind, error in (("unfit", StageUnfit), ("failed", EngineRefused)):
                    said = [
                        f"rank {rank}: {one['message']}" if len(reports) > 1 else one["message"]
                        for rank, one in enumerate(reports) if one["outcome"] == kind
                    ]  # fmt: skip
                    if said:
                        raise error("; ".join(dict.fromkeys(said)))
                if all(one["outcome"] == "done" for one in reports):
                    return _summary(id, reports)
                await asyncio.sleep(wait)
                wait = min(2 * wait, most)
                request = StitchStageReqInput(action="poll", id=id)
        except BaseException:
            self._cancelling = asyncio.ensure_future(self._cancel(id))
            raise

    async def _cancel(self, id: str) -> None:
        with contextlib.suppress(Exception):
            await self._send(STAGING, StitchStageReqInput(action="cancel", id=id))

    async def _send(self, communicator: str, request: Any) -> Any:
        """The answer. A caller that gives up must not leave it to the next one's question."""
        call = getattr(self._manager, f"{communicator}_communicator")(request)
        (reply,) = await asyncio.shield(asyncio.ensure_future(call))
        return reply


def _summary(id: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and bytes of the rank that took most."""
    return {
        "id": id, "outcome": "done", "state": reports[0]["state"],
        "seconds": max(one["seconds"] for one in reports), "bytes": max(one["bytes"] for one in reports),
        "image_bytes": [one["image"] for one in reports], "images": min(one["images"] for one in reports),
        "changed_segments": [one["changed"] for one in reports],
        "segments": [one["segments"] for one in reports],
    }  # fmt: skip
