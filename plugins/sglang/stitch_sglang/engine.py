"""SGLang as an Engine, from inside its HTTP process."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stitch_core.ports import EngineError, EngineIdentity, EngineRefused, EngineUncertain, KVMode

from .messages import COMMUNICATOR, DONE, REFUSED, StitchActivateReqInput


class SGLangEngine:
    """``manager`` is SGLang's TokenizerManager. Owned by its event loop.

    The pause is a part of ``activate``, one message to the scheduler, so that it cannot outlive its caller.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._instance = secrets.token_hex(8)  # the schedulers live and die with this process
        self._prepared: Path | None = None
        self._mode: KVMode = "in_place"

    async def identity(self) -> EngineIdentity:
        return EngineIdentity(self._instance, self._manager.config_value("weight_version"))

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        """The staged directory was verified by whoever staged it; SGLang reads it all at activation."""
        self._prepared = checkpoint if changed else None

    async def pause(self, mode: KVMode) -> None:
        self._mode = mode

    async def activate(self, label: str) -> None:
        request = StitchActivateReqInput(
            label=label,
            mode=self._mode,
            model_path=None if self._prepared is None else str(self._prepared),
            load_format=self._manager.config_value("load_format"),
        )
        try:
            (reply,) = await getattr(self._manager, f"{COMMUNICATOR}_communicator")(request)
        except Exception as error:
            raise EngineUncertain(f"no answer from the scheduler: {error!r}") from error
        if reply.outcome == REFUSED:
            raise EngineRefused(reply.message)
        if reply.outcome != DONE:
            raise EngineUncertain(reply.message)
        self._manager._update_weight_version_if_provided(label)

    async def resume(self) -> None:
        """Nothing: ``activate`` has ended the pause."""

    async def abort(self, request_id: str) -> None:
        try:
            self._manager.abort_request(rid=request_id)
        except Exception as error:
            raise EngineError(f"the abort could not be sent: {error!r}") from error
