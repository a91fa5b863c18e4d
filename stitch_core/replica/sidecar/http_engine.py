"""``ports.Engine`` over the HTTP API of an unmodified SGLang server on the same host.

The server reads a checkpoint while it is paused, so the pause is as long as that takes. What such a server
cannot do is said where it shows: it has no proof of its weights but its own word, and that is not taken
when a call failed (``activate``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import aiohttp

from ...checkpoint import Checkpoint, CheckpointError
from ...files import PosixFiles
from ...ports import (
    EngineBounds,
    EngineError,
    EngineIdentity,
    EngineRefused,
    EngineReplaced,
    EngineUncertain,
    KVMode,
    ProbeAnswer,
)
from .. import probe_prompt

# Said by SGLang before it touches a weight, on all ranks alike.
_UNTOUCHED = "Online weight updates are not supported"
# Seconds.
SLACK = 5.0
# The request never got as far as the weights: no permission, no such route, no such field.
_NOT_HANDLED = (401, 403, 404, 405, 413, 415, 422)


class Link:
    """A session with one server, and the number of connections that it has ``made``.

    Ends of bodies are judged by the middleware, so nothing is decompressed on the way.
    """

    def __init__(self) -> None:
        self.made = 0
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._count)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0), auto_decompress=False,
            trace_configs=[trace],
        )  # fmt: skip

    async def close(self) -> None:
        await self.session.close()

    async def _count(self, *_: Any) -> None:
        self.made += 1


class HttpEngine:
    """Drives the server at ``base``. The link is the caller's, and all that goes to the server uses it."""

    def __init__(
        self,
        link: Link,
        base: str,
        *,
        control_timeout: float = 30.0,
        update_timeout: float = 540.0,
        vocabulary: int | None = None,
    ) -> None:
        """Seconds: ``control_timeout`` for what should be quick, ``update_timeout`` to read a checkpoint.

        ``vocabulary``: how many tokens the model has; without it the server cannot be probed.
        """
        self._link = link
        self._base = base
        # What each call asks of the server adds up to this; the rest is for what passes in between.
        self.bounds = EngineBounds(
            call=SLACK + 2 * control_timeout,
            activate=SLACK + 4 * control_timeout + update_timeout,
            prepare=SLACK + 2 * control_timeout + update_timeout,
        )
        self._control = aiohttp.ClientTimeout(total=control_timeout)
        self._update = aiohttp.ClientTimeout(total=update_timeout)
        self._vocabulary = vocabulary
        self._prepared: tuple[Path, bool, EngineIdentity] | None = None
        self._mode: KVMode = "in_place"
        self._fallback = uuid.uuid4().hex
        self._instance: str | None = None  # that ``identity`` told of last
        self._vouched = 0  # of the connections made, how many are known to lead to it
        self._looking: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------- ports.Engine

    async def identity(self) -> EngineIdentity:
        """The instance is told by ``instance``, or by the durations of the start, which no two starts share.

        A server that does not tell them counts as another one after every call that could not reach it.
        """
        seen = await self._seen()
        self._instance = seen.instance  # nothing is awaited from here until the caller knows
        return seen

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        """Checks that the checkpoint is whole; the server itself reads it at activation."""

        def check() -> None:
            missing = set(changed) - set(Checkpoint.open(checkpoint, PosixFiles()).tensors)
            if missing:
                raise EngineRefused(f"{checkpoint} has no tensor {min(missing)}")

        try:
            async with asyncio.timeout(self._update.total):
                await asyncio.to_thread(check)
        except TimeoutError:
            raise EngineRefused(f"{checkpoint} is not read within {self._update.total:g} s") from None
        except (OSError, CheckpointError) as error:
            raise EngineRefused(f"{checkpoint} cannot be read: {error}") from error
        self._prepared = (checkpoint, bool(changed), await self._seen())

    async def pause(self, mode: KVMode) -> None:
        self._mode = mode
        await self._control_call("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        # Emptying CUDA's cache is slow, and nothing was freed.
        await self._control_call("/continue_generation", {"torch_empty_cache": False})

    async def abort(self, request_id: str) -> None:
        await self._control_call("/abort_request", {"rid": request_id})

    async def probe(self) -> ProbeAnswer | None:
        """A ``/generate`` like others. None from a server that refuses it, or gives no log-probabilities."""
        if self._vocabulary is None:
            return None
        status, info = await self._call("GET", "/server_info")
        if status != 200 or not isinstance(info, dict):
            raise EngineError(f"GET /server_info answers {status}")
        asked = probe_prompt.request(self._vocabulary, f"stitch-probe-{uuid.uuid4().hex}")
        status, answer = await self._call("POST", "/generate", asked, self._update)
        if status in (429, *range(500, 600)) or probe_prompt.was_aborted(answer):
            raise EngineError(f"the probe's request is answered {status}: {str(answer)[:200]}")
        logprobs = probe_prompt.answer(answer, asked["input_ids"]) if status == 200 else None
        return None if logprobs is None else ProbeAnswer(logprobs, probe_prompt.signature(info))

    async def activate(self, label: str) -> None:
        """Reload from the prepared directory, or only relabel if no tensor changed.

        Whatever is not a plain success is EngineUncertain, unless the server shows that it never began: a
        400 may stand for weights that did change, and a connection that broke for anything.
        """
        if self._prepared is None:
            raise EngineRefused("nothing was prepared")
        checkpoint, changed, prepared_on = self._prepared
        try:
            seen = await self._seen()
        except EngineError as error:
            raise EngineRefused(f"not begun: {error}") from error
        if seen != prepared_on:
            raise EngineRefused(
                f"not begun: since it was prepared the server was restarted, or relabelled from "
                f"{prepared_on.label} to {seen.label}"
            )
        before = seen.label
        try:
            status, answer = 404, None
            if not changed:
                body = {"new_version": label, "abort_all_requests": False}
                status, answer = await self._call("POST", "/update_weight_version", body)
            if status in (404, 405):
                # Something changed, or the server cannot relabel: the same bytes are as good.
                changed = True
                status, answer = await self._reload(checkpoint, label)
        except EngineError as error:
            await self._settle(label, before if not changed else None, str(error))
            return
        if status == 200 and isinstance(answer, dict) and answer.get("success") is True:
            await self._settle(label, None, "the server reported success under another label")
            return
        said = answer.get("message") if isinstance(answer, dict) else answer
        reason = f"the server answered {status}: {said}"
        untouched = not changed or status in _NOT_HANDLED or _UNTOUCHED in str(said)
        await self._settle(None, before if untouched else None, reason)

    async def vouch(self) -> None:
        """Be sure that what was answered until now came from the instance that ``identity`` told of last.

        A connection leads to one process, and breaks when that ends. So one look at the instance vouches for
        all that comes over connections made before. Raises EngineReplaced, EngineError.
        """
        made = self._link.made
        while self._vouched < made:
            if self._looking is None:
                self._looking = asyncio.ensure_future(self._look())
                # Whoever waits for it may be gone by then.
                self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())
            looking = self._looking
            await asyncio.wait({looking})
            looking.result()

    # -------------------------------------------------------------------------------------------- inside

    async def _look(self) -> None:
        try:
            made, known = self._link.made, self._instance
            # It may be asked for in a pause, which lasts as long as an update.
            instance = await self._who(self._update)
            # Told of another one meanwhile, the replica has given up all that ran.
            if instance not in (known, self._instance):
                raise EngineReplaced("the engine was restarted")
            self._vouched = made
        finally:
            self._looking = None

    async def _seen(self) -> EngineIdentity:
        return EngineIdentity(await self._who(self._control), await self._label())

    async def _who(self, timeout: aiohttp.ClientTimeout) -> str:
        status, info = await self._call("GET", "/server_info", None, timeout)
        if status != 200 or not isinstance(info, dict):
            raise EngineError(f"GET /server_info answers {status}")
        told = info.get("instance") or info.get("startup_time")
        if not told:
            return self._fallback
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]

    async def _reload(self, checkpoint: Path, label: str) -> tuple[int, Any]:
        body = {
            "model_path": str(checkpoint),
            "weight_version": label,
            "abort_all_requests": False,
            # Requests that keep their KV forbid a flush; then the cache keys of the middleware part versions.
            "flush_cache": self._mode == "retract",
        }
        return await self._call("POST", "/update_weights_from_disk", body, self._update)

    async def _settle(self, done: str | None, undone: str | None, reason: str) -> None:
        """By the label that is served now: return if it is ``done``, EngineRefused if ``undone``."""
        try:
            now = await self._label()
        except EngineError as error:
            raise EngineUncertain(f"{reason}; and then: {error}") from error
        if now == done:
            return
        if now == undone:
            raise EngineRefused(reason)
        raise EngineUncertain(f"{reason}; its label is {now!r}")

    async def _label(self) -> str:
        status, info = await self._call("GET", "/model_info")
        label = info.get("weight_version") if isinstance(info, dict) else None
        if status != 200 or not isinstance(label, str):
            raise EngineError(f"GET /model_info answers {status} without a weight_version")
        return label

    async def _control_call(self, path: str, body: dict[str, Any]) -> None:
        status, answer = await self._call("POST", path, body)
        if status != 200:
            raise EngineError(f"POST {path} answers {status}: {answer}")

    async def _call(
        self, method: str, path: str, body: Any = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> tuple[int, Any]:
        """Status and JSON (text, if it is none). EngineError: no whole answer came."""
        try:
            async with self._link.session.request(
                method, self._base + path, json=body, timeout=timeout or self._control,
                headers={"Accept-Encoding": "identity"},
            ) as answer:  # fmt: skip
                data = await answer.read()
                status, encoding = answer.status, answer.headers.get("Content-Encoding", "identity")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._fallback = uuid.uuid4().hex
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise EngineError(f"{method} {path} got no answer: {reason}") from error
        if encoding.strip().lower() != "identity":
            raise EngineError(
                f"{method} {path} is answered in content-encoding {encoding}, which was not asked for"
            )
        try:
            return status, json.loads(data)
        except ValueError:
            return status, data.decode("utf-8", "replace")
