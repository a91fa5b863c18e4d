"""The engine as the rest of the process sees it: requests in, outcomes out, and the control calls of
`ports.Engine`.

Who owns what: the worker's thread owns the scheduler (weights, cache, requests); the event loop that called
`start` owns `Generation` objects and everything below `_active`. Between them go commands (`Worker.call`)
and events (`call_soon_threadsafe`, one call for all events of a step).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from stitch_core.checkpoint import marks_of
from stitch_core.files import PosixFiles
from stitch_core.ports import (
    EngineBounds,
    EngineError,
    EngineIdentity,
    EngineRefused,
    EngineUncertain,
    FileMarks,
    ProbeAnswer,
)
from stitch_core.replica.probe_prompt import prompt

from .config import ModelConfig
from .process import settle
from .sampling import SamplingParams
from .scheduler import Event, Outcome, PauseMode, Request, Scheduler
from .selfcheck import self_check
from .weights import DTYPES, CheckpointError, CheckpointFiles, Weights
from .worker import EngineFailed, Worker

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """How to run the engine.

    `max_len`: positions a sequence may have, prompt and output together; the cost of attention grows with
    it (default: the model's own, at most 4096). `max_running`: sequences decoded at once, others wait.
    `prefill_rows`: prompt tokens per step. `pace`: least seconds per step, the declared decode pace.
    `dtype`: "bfloat16" or "float32" (default: as stored). `label`: the version of the boot weights. `seed`:
    of unseeded requests' draws. `update_timeout`: seconds to read a version, and to copy it in the pause.
    """

    max_len: int | None = None
    max_running: int = 256
    prefill_rows: int = 512
    pace: float = 0.0
    dtype: str | None = None
    label: str = "default"
    seed: int | None = None
    self_check_seconds: float = 0.5
    update_timeout: float = 600.0

    def check(self, max_len: int, most: int) -> None:
        """Raises ValueError naming the option that will not do; `most`: positions the model was made for."""
        if not 2 <= max_len <= most:
            raise ValueError(f"max_len {max_len} is not in [2, {most}]")
        for name in ("max_running", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 <= self.pace < 3600:
            raise ValueError(f"pace {self.pace} is not a number of seconds in [0, 3600)")
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")


class Generation:
    """Requests that were accepted together: iterate over their events, or wait for their outcomes."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self._queue: asyncio.Queue[Event | EngineFailed] = asyncio.Queue()

    async def events(self) -> AsyncIterator[Event]:
        """All events of all requests, until each had its outcome. Raises EngineFailed when the engine
        stops.
        """
        left = len(self.requests)
        while left:
            event = await self._queue.get()
            if isinstance(event, EngineFailed):
                raise event
            left -= event.outcome is not None
            yield event

    async def outcomes(self) -> list[Outcome]:
        """One for each request, in order. Raises EngineFailed when the engine stops first."""
        done = {e.request: e.outcome async for e in self.events() if e.outcome is not None}
        return [done[request] for request in self.requests]


class EmbeddedEngine:
    """Implements `stitch_core.ports.Engine`, and generates."""

    def __init__(self, model: str | Path, options: Options | None = None) -> None:
        """Load and check a checkpoint; blocking. Raises SelfCheckError, and ValueError for all else."""
        self.options = options = options or Options()
        self._boot_marks = _marks_of(Path(model).absolute())
        self.model_path = str(model)
        self.config = ModelConfig.read(model)
        self.max_len = min(self.config.max_positions, 4096) if options.max_len is None else options.max_len
        options.check(self.max_len, self.config.max_positions)
        files = CheckpointFiles(model, self.config)
        self._stored = files.stored_dtype()
        dtype = DTYPES[options.dtype] if options.dtype else self._stored
        if dtype not in DTYPES.values():
            raise CheckpointError(f"{model}: weights are {dtype}; the engine runs {' or '.join(DTYPES)}")
        _check_memory(self.config, options.max_running, self.max_len, dtype)
        self.bounds = EngineBounds(60.0, options.update_timeout, options.update_timeout)
        settle()
        weights = Weights(self.config, dtype)
        weights.copy_from(files.read(None, dtype, self._stored))
        most_rows = options.max_running + options.prefill_rows
        self_check(weights, self.max_len, most_rows, seconds=options.self_check_seconds)
        scheduler = Scheduler(
            weights,
            options.label,
            max_len=self.max_len,
            max_running=options.max_running,
            prefill_rows=options.prefill_rows,
        )
        self._dtype = dtype
        self._instance = uuid.uuid4().hex
        self._random = random.Random(options.seed)
        self._worker = Worker(scheduler, self._post, self._post_failure, options.pace)
        self._active: dict[Request, Generation] = {}
        self._prepared: Mapping[str, Tensor] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin serving, once; call it on the event loop that will use the engine."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._worker.start()

    async def close(self) -> None:
        """Stop the thread; requests that run fail with EngineFailed."""
        await asyncio.to_thread(self._worker.close)
        self._fail_active("the engine is closed")

    # ------------------------------------------------------------------------------------------ generating

    def generate(self, requests: Sequence[Request]) -> Generation:
        """Queue checked requests (api.py). Raises EngineFailed. Requests without a seed get one."""
        if not self._worker.alive:
            raise EngineFailed(self._worker.failed or "the engine is not running")
        for request in requests:
            seed = request.params.seed
            request.seed = self._random.getrandbits(64) if seed is None else seed % 2**64
        generation = Generation(requests)
        self._active.update(dict.fromkeys(generation.requests, generation))

        def add(scheduler: Scheduler) -> None:
            for request in generation.requests:
                scheduler.add(request)

        self._worker.call(add)
        return generation

    def cancel(self, generation: Generation) -> None:
        """Abort what of it still runs, without waiting."""
        requests = {request for request in generation.requests if request in self._active}
        if requests:
            self._worker.call(lambda s: s.abort(requests.__contains__))

    def in_flight(self, rid: str) -> bool:
        """A request of exactly this id is running or waiting."""
        return any(request.rid == rid for request in self._active)

    # ------------------------------------------------------------------------------------- ports.Engine

    async def identity(self) -> EngineIdentity:
        """Who answers, and the version it stamps on tokens now."""
        return EngineIdentity(self._instance, await self._call(lambda s: s.label), self._boot_marks)

    async def prepare(self, checkpoint: Path, changed: Collection[str] | None) -> None:
        """Read and check the named tensors (None: all) while serving. EngineRefused changes nothing."""
        self._prepared = await asyncio.to_thread(self._read, checkpoint, changed)

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary. "abort" ends all requests, "retract" drops their KV, "in_place" keeps
        it.
        """
        await self._call(lambda s: s.pause(mode))

    async def activate(self, label: str) -> None:
        """In a pause: copy what was prepared, and stamp `label` on all later tokens.

        EngineRefused: not paused, or nothing was prepared. EngineUncertain: the copy failed, the engine has
        stopped.
        """
        await self._activate(label, unpaused=False)

    async def resume(self) -> None:
        """End the pause; without one it does nothing."""
        await self._call(lambda s: s.resume())

    async def abort(self, request_id: str) -> None:
        """End what was asked under `request_id`, copies and a whole batch included; none is fine.

        Nothing else that begins so, unlike SGLang: "req-1" leaves "req-10" alone.
        """
        await self._call(lambda s: s.abort(lambda r: request_id in (r.rid, r.asked)))

    async def probe(self) -> ProbeAnswer | None:
        """The log-probabilities of a fixed prompt, as a request like others."""
        ids = prompt(self.config.vocab, self.max_len - 1)
        # With a seed of its own it takes no draw from the others.
        params = SamplingParams(max_new_tokens=1, ignore_eos=True, seed=0)
        request = Request(f"stitch-probe-{uuid.uuid4().hex}", ids, params, prompt_logprobs_from=0)
        try:
            generation = self.generate([request])
            try:
                (outcome,) = await generation.outcomes()
            finally:
                self.cancel(generation)
        except EngineFailed as error:
            raise EngineError(str(error)) from error
        if outcome.finish["type"] == "abort":
            raise EngineError("the probe's request was aborted")
        return ProbeAnswer(tuple(outcome.prompt_logprobs), f"embedded {torch.__version__} {self._dtype}")

    # ------------------------------------------------------------------------------------- more control

    async def health(self) -> None:
        """Raises EngineError when the engine no longer generates. Says nothing about pauses."""
        if not self._worker.alive:
            raise EngineError(self._worker.failed or "the engine is not running")

    async def paused(self) -> bool:
        """Between `pause` and `resume`."""
        return await self._call(lambda s: s.paused)

    async def counts(self) -> tuple[int, int]:
        """(requests in slots, requests waiting for one)"""
        return await self._call(lambda s: (len(s.running), len(s.waiting)))

    async def abort_all(self) -> None:
        """End every request."""
        await self._call(lambda s: s.abort(lambda _: True))

    async def load_weights(self, checkpoint: Path, label: str, *, abort_all: bool = False) -> None:
        """Prepare a whole checkpoint and activate it at a token boundary, paused or not, keeping KV."""
        await self.prepare(checkpoint, None)
        if abort_all:
            await self.abort_all()
        await self._activate(label, unpaused=True)
        self.model_path = str(checkpoint)

    def _read(self, checkpoint: Path, changed: Collection[str] | None) -> dict[str, Tensor]:
        try:
            if (checkpoint / "config.json").exists() and _differ(ModelConfig.read(checkpoint), self.config):
                raise EngineRefused(f"{checkpoint}: config.json describes another model")
            return CheckpointFiles(checkpoint, self.config).read(changed, self._dtype, self._stored)
        except ValueError as error:
            raise EngineRefused(str(error)) from error

    async def _activate(self, label: str, *, unpaused: bool) -> None:
        prepared = self._prepared
        if prepared is None:
            raise EngineRefused("nothing was prepared")

        def activate(scheduler: Scheduler) -> None:
            if not (scheduler.paused or unpaused):
                raise EngineRefused("weights are activated in a pause only")
            try:
                scheduler.activate(prepared, label)
            except BaseException as error:
                reason = (
                    f"activating {label} failed, the weights are undefined: {type(error).__name__}: {error}"
                )
                self._worker.fail(reason)
                raise EngineUncertain(reason) from error

        await self._call(activate)
        self._prepared = None

    async def _call(self, command: Callable[[Scheduler], T]) -> T:
        try:
            return await asyncio.wrap_future(self._worker.call(command))
        except EngineFailed as error:
            raise EngineError(str(error)) from error

    # ---------------------------------------------------------------------------- from the worker's thread

    def _post(self, events: Sequence[Event]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _post_failure(self, reason: str) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fail_active, reason)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            generation = self._active.get(event.request)
            if generation is not None:
                generation._queue.put_nowait(event)
                if event.outcome is not None:
                    del self._active[event.request]

    def _fail_active(self, reason: str) -> None:
        for generation in set(self._active.values()):
            generation._queue.put_nowait(EngineFailed(reason))
        self._active.clear()


def _marks_of(model: Path) -> FileMarks | None:
    with contextlib.suppress(ValueError, OSError):  # whoever reads it says what is wrong with it
        return marks_of(model, PosixFiles())
    return None


def _check_memory(config: ModelConfig, slots: int, max_len: int, dtype: torch.dtype) -> None:
    """Raises ValueError when the KV cache would take more than half of the machine's memory."""
    size = 2 * config.layers * slots * config.kv_heads * max_len * config.head_dim * dtype.itemsize
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if size > most:
        raise ValueError(
            f"KV for max_running {slots} sequences of max_len {max_len} takes {size / 2**30:.1f} GiB, "
            f"more than half of this machine's memory: lower either"
        )


def _differ(one: ModelConfig, other: ModelConfig) -> bool:
    """They compute different things from the same tensors, or want different tensors."""
    return replace(one, eos_ids=(), max_positions=0) != replace(other, eos_ids=(), max_positions=0)
