"""A fake inference engine: no model, but digests of real weights, KV row by row, and a real engine's manners.

Each output token is a hash of everything that would decide it in a model: the weights that sample it and,
position by position, the tokens and the weights that computed their keys and values. So a wrong weight, a
KV row that outlived its version, or a request served by the wrong run shows as another text.

``fake_server`` is its HTTP face, in the dialect of SGLang.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..checkpoint import Checkpoint, CheckpointError, marks_of
from ..files import PosixFiles
from ..ports import EngineIdentity, EngineRefused, EngineUncertain, ProbeAnswer
from ..replica.probe_prompt import PROMPT_TOKENS
from ..state import TensorInfo, state_digest

BOOT_LABEL = "default"
PauseMode = Literal["in_place", "retract", "abort"]


@dataclass(frozen=True)
class Row:
    """The keys and values of one position: the token, and the weights that computed them."""

    token: int
    label: str
    state: str


@dataclass(eq=False)
class FakeRequest:
    """One sequence. ``rows`` is its KV; ``labels`` has the version of each output token."""

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    cache_key: str = ""
    copy: int = 0
    namespace: str = ""
    output: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None
    lost: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        return self.lost or self.finish_reason is not None

    def spans(self) -> list[dict[str, Any]]:
        """``weight_versions``, as SGLang writes them: one of no length when there are no tokens."""
        return spans_of(self.labels)

    def kv_spans(self) -> list[dict[str, Any]]:
        """The versions that computed the prompt's rows, but for the last one, which samples."""
        return spans_of([row.label for row in self.rows[: len(self.prompt) - 1]])


class FakeEngine:
    """Implements ``ports.Engine``. ``step_seconds``: between two tokens of a request.

    ``fail_activation`` makes the next activation raise: "refused" before anything changed, "uncertain"
    when half of it did. Ids are aborted by prefix. KV is reused between requests that have the same
    ``cache_key`` and begin alike; unless ``separate`` keeps versions apart, as an engine with Stitch inside
    does, whatever the weights, until the cache is flushed.
    """

    def __init__(self, boot: Path, *, step_seconds: float = 0.001, separate: bool = True) -> None:
        """``boot``: the checkpoint directory that it starts from, now and after each ``restart``."""
        self.boot = boot
        self.separate = separate
        self.step_seconds = step_seconds
        self.fail_activation: Literal["refused", "uncertain"] | None = None
        self.requests: list[FakeRequest] = []
        self.tokens = 0
        self._start()

    def _start(self) -> None:
        self.instance = uuid.uuid4().hex
        self.label = BOOT_LABEL
        self.paused = False
        self._boot_marks = marks_of(self.boot, PosixFiles())
        self._table: dict[str, TensorInfo] = dict(Checkpoint.open(self.boot, PosixFiles()).table())
        self._prepared: dict[str, TensorInfo] = {}
        self._cache: dict[tuple[str, str], dict[tuple[int, ...], list[Row]]] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._stepping: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """The digest of the weights that it really has."""
        return state_digest(self._table)

    def restart(self) -> None:
        """Die and come back with boot weights; what ran is lost without an answer."""
        for request in self.requests:
            request.lost = True
            request.news.set()
        self.requests = []
        self._end_stepping()
        self._start()

    async def close(self) -> None:
        """Stop generating."""
        stepping = self._end_stepping()
        if stepping is not None:
            await asyncio.gather(stepping, return_exceptions=True)

    # ------------------------------------------------------------------------------------- ports.Engine

    async def identity(self) -> EngineIdentity:
        return EngineIdentity(self.instance, self.label, self._boot_marks)

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        self._prepared = await asyncio.to_thread(self.read, checkpoint, changed)

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True
        self._resumed.clear()
        if mode == "abort":
            self.abort_prefix("")
        if mode == "retract":
            for request in self.requests:
                request.rows = []

    async def activate(self, label: str) -> None:
        if not self.paused:
            raise EngineRefused("weights are activated in a pause only")
        failure, self.fail_activation = self.fail_activation, None
        if failure == "refused":
            raise EngineRefused("told to refuse")
        prepared, self._prepared = self._prepared, {}
        if failure == "uncertain":
            self._table.update(list(prepared.items())[: len(prepared) // 2])
            raise EngineUncertain("told to fail midway")
        self.take(prepared, label)

    async def resume(self) -> None:
        self.paused = False
        self._resumed.set()

    async def abort(self, request_id: str) -> None:
        self.abort_prefix(request_id)

    async def probe(self) -> ProbeAnswer | None:
        await self._resumed.wait()
        return ProbeAnswer(state_logprobs(self.state), "fake")

    # ------------------------------------------------------------------------------------ more control

    def read(self, checkpoint: Path, changed: Collection[str] | None) -> dict[str, TensorInfo]:
        """The named tensors (None: all) of a checkpoint, if they fit. Raises EngineRefused."""
        try:
            table = Checkpoint.open(checkpoint, PosixFiles()).table()
        except (OSError, CheckpointError) as error:
            raise EngineRefused(f"{checkpoint}: {error}") from error
        read = {}
        for name in self._table if changed is None else changed:
            old, new = self._table.get(name), table.get(name)
            if old is None or new is None or (old.dtype, old.shape) != (new.dtype, new.shape):
                raise EngineRefused(f"{checkpoint}: tensor {name} is missing, unknown or of another shape")
            read[name] = new
        return read

    def take(self, tensors: dict[str, TensorInfo], label: str) -> None:
        """Copy the weights and stamp later tokens with ``label``."""
        self._table.update(tensors)
        self.label = label
        for request in self.requests:
            if not request.rows:
                request.namespace = self._namespace

    def flush_cache(self) -> bool:
        """Forget cached KV; refused (False) while requests hold KV or wait, unless a pause retracted them."""
        if any(request.rows or not self.paused for request in self.requests):
            return False
        self._cache = {}
        return True

    def abort_prefix(self, prefix: str) -> None:
        """End every request whose id starts with ``prefix``."""
        for request in list(self.requests):
            if request.rid.startswith(prefix):
                self._finish(request, {"type": "abort", "message": "aborted"})

    # ------------------------------------------------------------------------------------- generating

    def add(self, request: FakeRequest) -> None:
        """Run a request; watch its ``news``."""
        request.namespace = self._namespace
        self.requests.append(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._step_until_idle())

    def drop(self, request: FakeRequest) -> None:
        """The client left."""
        if request in self.requests:
            self._finish(request, {"type": "abort", "message": "the client left"})

    async def _step_until_idle(self) -> None:
        while self.requests:
            await self._resumed.wait()
            await asyncio.sleep(self.step_seconds)
            if self.paused:
                continue
            state = self.state
            for request in list(self.requests):
                self._step(request, state)

    def _step(self, request: FakeRequest, state: str) -> None:
        if request.max_new_tokens:
            self._sample(request, state)
        if len(request.output) >= request.max_new_tokens:
            self._finish(request, {"type": "length", "length": request.max_new_tokens})

    def _sample(self, request: FakeRequest, state: str) -> None:
        known = (*request.prompt, *request.output)
        if not request.rows:
            request.rows = self._cached_rows(request, known)
            request.cached_tokens = len(request.rows)
        request.rows += [Row(token, self.label, state) for token in known[len(request.rows) :]]
        self._remember(request, request.rows[: len(request.prompt)])
        seen = repr((request.copy, state, [(row.token, row.state) for row in request.rows]))
        request.output.append(int.from_bytes(hashlib.sha256(seen.encode()).digest()[:2]) % 26)
        request.labels.append(self.label)
        request.news.set()
        self.tokens += 1

    @property
    def _namespace(self) -> str:
        return self.label if self.separate else ""

    def _remember(self, request: FakeRequest, rows: Sequence[Row]) -> None:
        tokens = tuple(row.token for row in rows)
        self._cache.setdefault((request.namespace, request.cache_key), {})[tokens] = list(rows)

    def _cached_rows(self, request: FakeRequest, known: Sequence[int]) -> list[Row]:
        """The longest cached beginning; the last position is always computed, since it samples."""
        best: list[Row] = []
        for tokens, rows in self._cache.get((request.namespace, request.cache_key), {}).items():
            same = 0
            while same < min(len(tokens), len(known) - 1) and tokens[same] == known[same]:
                same += 1
            if same > len(best):
                best = rows[:same]
        return best

    def _finish(self, request: FakeRequest, reason: dict[str, Any]) -> None:
        self.requests.remove(request)
        self._remember(request, request.rows)
        request.finish_reason = reason
        request.news.set()

    def _end_stepping(self) -> asyncio.Task[None] | None:
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.cancel()
        return stepping


def state_logprobs(state: str, tokens: int = PROMPT_TOKENS) -> tuple[float, ...]:
    """What weights of ``state`` give each token of a prompt but the first; other weights, other numbers."""
    digest = hashlib.shake_128(state.encode()).digest(tokens - 1)
    return tuple(-1 - value / 32 for value in digest)


def spans_of(labels: Sequence[str]) -> list[dict[str, Any]]:
    """``[{"version", "start", "end"}]`` over equal neighbours."""
    spans: list[dict[str, Any]] = []
    for i, label in enumerate(labels):
        if not spans or spans[-1]["version"] != label:
            spans.append({"version": label, "start": i, "end": i})
        spans[-1]["end"] = i + 1
    return spans
