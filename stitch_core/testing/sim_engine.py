"""A simulated inference engine that holds real bytes, and whose every token says which ones made it.

It is a process of its own: calls to it travel, and are carried out although their caller died or gave up.
Each token carries the label that the engine claims and the state digest of the weights it really had, so
that a test can tell the truth from what is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, CheckpointError, marks_of
from ..ports import (
    EngineError,
    EngineIdentity,
    EngineRefused,
    EngineReplaced,
    EngineUncertain,
    FileMarks,
    Files,
    KVMode,
    ProbeAnswer,
)
from ..replica.probe_prompt import PROMPT_TOKENS
from ..state import TensorInfo, state_digest, tensor_digest
from .fake_engine import state_logprobs
from .faults import Faults
from .loop import OUTSIDE, SimulatedLoop
from .process import SimulatedProcess
from .sim_boot import BootDirectory
from .sim_files import SimulatedMachine

BOOT_LABEL = "default"


@dataclass(frozen=True)
class Token:
    """``label`` is what the engine says of it, ``state`` the weights that sampled it.

    ``lie``: they are not those that the engine said it had copied, or booted from.
    """

    label: str
    state: str
    lie: bool = False


@dataclass
class Generation:
    """One request in the engine. ``kv``: for each position of the prompt and the output, the state of the
    weights that computed its keys and values; ``mixed``: some token was sampled over keys and values of
    other weights than its own. ``outcome`` is None while it runs; then "done", "aborted" or "lost" (the
    engine died).
    """

    request_id: str
    prompt: int
    wanted: int
    instance: str = ""
    tokens: list[Token] = field(default_factory=list)
    kv: list[str] = field(default_factory=list)
    mixed: bool = False
    outcome: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.ended.set()


class _Weights:
    """Tensors by name, and the state digest of their bytes as they are."""

    def __init__(self, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        self.tensors = tensors
        self._table = {
            name: TensorInfo(dtype, shape, tensor_digest(data))
            for name, (dtype, shape, data) in tensors.items()
        }
        self.state = state_digest(self._table)

    @classmethod
    def of(cls, directory: Path, files: Files) -> _Weights:
        checkpoint = Checkpoint.open(directory, files)
        refs = checkpoint.tensors.items()
        return cls({name: (ref.dtype, ref.shape, checkpoint.read(name)) for name, ref in refs})

    def twin(self) -> _Weights:
        return _Weights(dict(self.tensors))

    def copy(self, name: str, data: bytes) -> None:
        dtype, shape, _ = self.tensors[name]
        self.tensors[name] = (dtype, shape, data)
        self._table[name] = TensorInfo(dtype, shape, tensor_digest(data))
        self.state = state_digest(self._table)


class SimulatedEngine:
    """The engine's process and what survives it: nothing but the boot checkpoint directory ``boot``.

    It boots at once, and again ``boot_seconds`` after each death. ``step_seconds`` make one token for every
    running request; ``copy_seconds`` copy one tensor. ``inside``: the replica is in its process, and has seen
    what it loads. ``on_call`` is told of every ``prepare``, ``on_resume`` of every end of a pause.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        faults: Faults,
        machine: SimulatedMachine,
        boot: Path | BootDirectory,
        *,
        name: str = "engine",
        inside: bool = False,
        step_seconds: float = 0.5,
        copy_seconds: float = 0.05,
        boot_seconds: float = 20.0,
    ) -> None:
        self.name = name
        self.loop = loop
        self.faults = faults
        self.step_seconds = step_seconds
        self._machine = machine
        self._boot = boot
        self._inside = inside
        self._copy_seconds = copy_seconds
        self.boot_seconds = boot_seconds
        self._boots = 0
        self.label = BOOT_LABEL
        self.on_call: Callable[[SimulatedProcess, str, str], None] = lambda process, what, where: None
        self.on_resume: Callable[[], None] = lambda: None
        self._start()

    # -------------------------------------------------------------------------------------- process

    def _start(self) -> None:
        self._boots += 1
        self.process = SimulatedProcess(self.loop, f"{self.name}#{self._boots}")
        self.process.on_death.append(self._died)
        self.instance = f"{self.name}-{self.loop.random.getrandbits(32):08x}"
        before, self.label = self.label, BOOT_LABEL
        self.activated = False
        self.paused = False
        self.pauser: SimulatedProcess | None = None
        self.running: dict[str, Generation] = {}
        self.waiting: dict[asyncio.Future[Any], str] = {}
        self.turn = asyncio.Lock()
        self.prepared: dict[str, bytes] = {}
        self._files = self._machine.files(self.process)
        self.weights, self.boot_marks = self._load(before)
        self.boot_state = self.weights.state
        # What it should hold, where it has lied.
        self._should: _Weights | None = None
        if self.faults.hit(self.faults.plan.engine_lies):
            self._should = self.weights.twin()
            name = self.faults.random.choice(list(self.weights.tensors))
            self.weights.copy(name, bytes(byte ^ 1 for byte in self.weights.tensors[name][2]))
            self.faults.trace.add(f"{self.process.name}: boots with another {name}")
        self._work = asyncio.Event()
        self.last_arrival = 0.0
        self.process.spawn(self._generate())

    def _load(self, label: str) -> tuple[_Weights, FileMarks | None]:
        """The weights that it boots with, and what the replica has seen of their files before.

        Others than the boot checkpoint's may come under the ``label`` that it had.
        """
        boot, random = self._boot, self.loop.random
        if not isinstance(boot, BootDirectory):
            return _Weights.of(boot, self._files), self._look(boot)
        path, looked = boot.path, None
        if self.faults.hit(self.faults.plan.engine_other_weights) and not boot.exchanged:
            if not self._inside and random.random() < 0.5:
                path = boot.other
                self.label = random.choice((BOOT_LABEL, label))
            else:
                looked = self._look(path) if random.random() < 0.5 else None
                boot.exchange()
                back = random.choice((0.0, 5.0 * random.random()))
                self.loop.call_later(back, boot.exchange, context=OUTSIDE)
        looked = looked or self._look(path)
        weights = _Weights.of(path, self._files)
        self.faults.trace.add(f"{self.process.name}: boots with {weights.state[7:15]}")
        return weights, looked

    def _look(self, boot: Path) -> FileMarks | None:
        return marks_of(boot, self._files) if self._inside else None

    def _died(self) -> None:
        self.faults.trace.add(f"{self.process.name}: the engine dies")
        for generation in list(self.running.values()):
            generation.end("lost")
        for answer, what in self.waiting.items():
            _answer(answer, None, _lost(what, sent=True))
        self.loop.call_later(self.boot_seconds, self._start, context=OUTSIDE)

    @property
    def state(self) -> str:
        """The state digest of the weights that it really holds."""
        return self.weights.state

    @property
    def lies(self) -> bool:
        """Whether it holds other weights than it says."""
        return self._should is not None and self._should.state != self.state

    def __repr__(self) -> str:
        flags = ["dead"] * self.process.dead + ["paused"] * self.paused
        return f"<{self.process.name}: {self.label}, {self.state[7:15]} {' '.join(flags)}>"

    # ----------------------------------------------------------------------------------- generation

    def submit(self, request_id: str, prompt: int, wanted: int) -> Generation:
        """Generate ``wanted`` tokens after ``prompt`` ones; wait for ``ended`` of what is returned."""
        generation = Generation(request_id, prompt, wanted, self.instance)
        if self.process.dead:
            generation.end("lost")
        else:
            self.running[request_id] = generation
            self._work.set()
        return generation

    async def _generate(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self.step_seconds)
            if self.paused:
                self._work.clear()
                continue
            for generation in list(self.running.values()):
                self._step(generation)
            if not self.running:
                self._work.clear()

    def _step(self, generation: Generation) -> None:
        state = self.state
        # Whatever has no KV yet, or lost it, is computed before the next token is sampled.
        missing = generation.prompt + len(generation.tokens) - len(generation.kv)
        generation.kv += [state] * missing
        generation.mixed = generation.mixed or generation.kv.count(state) < len(generation.kv)
        generation.tokens.append(Token(self.label, state, self.lies))
        if len(generation.tokens) >= generation.wanted:
            self._end(generation, "done")

    def _end(self, generation: Generation, outcome: str) -> None:
        self.running.pop(generation.request_id, None)
        generation.end(outcome)

    # ------------------------------------------------------------------- what its process does for calls

    def who(self) -> EngineIdentity:
        return EngineIdentity(self.instance, self.label, self.boot_marks)

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        if self.faults.hit(self.faults.plan.engine_refuses):
            raise EngineRefused("no memory to prepare")
        prepared: dict[str, bytes] = {}
        try:
            opened = Checkpoint.open(checkpoint, self._files)
            for name in changed:
                await asyncio.sleep(self._copy_seconds * self.loop.random.random())
                ref, held = opened.tensors.get(name), self.weights.tensors.get(name)
                if ref is None or held is None or (ref.dtype, ref.shape) != held[:2]:
                    raise EngineRefused(f"tensor {name} does not fit")
                prepared[name] = opened.read(name)
        except (CheckpointError, OSError) as error:
            raise EngineRefused(f"cannot read {checkpoint}: {error}") from error
        self.prepared = prepared

    async def pause(self, mode: KVMode, pauser: SimulatedProcess) -> None:
        if self.faults.hit(self.faults.plan.engine_refuses):
            raise EngineRefused("cannot pause now")
        self.paused, self.pauser = True, pauser
        if mode == "retract":
            for generation in self.running.values():
                generation.kv.clear()

    async def activate(self, label: str) -> None:
        faults = self.faults
        if faults.hit(faults.plan.engine_refuses):
            raise EngineRefused("cannot activate now")
        names = list(self.prepared)
        faults.random.shuffle(names)
        stop_after = len(names) + 1
        if faults.hit(faults.plan.engine_uncertain):
            stop_after = faults.random.randrange(len(names) + 1)
        self.activated = True
        left_out: set[str] = set()
        if names and faults.hit(faults.plan.engine_lies):
            left_out = set(names if faults.random.random() < 0.5 else names[:1])
            self._should = self._should or self.weights.twin()
        for i, name in enumerate(names):
            if i == stop_after:
                break
            await asyncio.sleep(self._copy_seconds * self.loop.random.random())
            if name not in left_out:
                self.weights.copy(name, self.prepared[name])
            if self._should is not None:
                self._should.copy(name, self.prepared[name])
        if stop_after <= len(names):
            raise EngineUncertain(f"stopped after {stop_after} of {len(names)} tensors")
        self.prepared = {}
        self.label = label
        lies = f", left out {sorted(left_out)}" if left_out else ""
        faults.trace.add(f"{self.process.name}: now says {label}, holds {self.state[7:15]}{lies}")

    async def resume(self) -> None:
        if self.faults.hit(self.faults.plan.engine_refuses):
            raise EngineRefused("cannot resume now")
        self.paused, self.pauser = False, None
        self.on_resume()
        if self.running:
            self._work.set()

    async def abort(self, prefix: str) -> None:
        """As real engines do, it ends every request whose id starts with this."""
        for generation in list(self.running.values()):
            if generation.request_id.startswith(prefix):
                self._end(generation, "aborted")

    async def probe(self) -> ProbeAnswer:
        """As a request of 32 tokens; the numbers are a little off while others run."""
        generation = self.submit(f"stitch-probe-{self.loop.random.getrandbits(32):08x}", PROMPT_TOKENS, 1)
        await generation.ended.wait()
        if generation.outcome != "done":
            raise EngineError(f"probe: the request was {generation.outcome}")
        off = 0.01 if self.running else 0.0
        values = state_logprobs(generation.tokens[0].state)
        return ProbeAnswer(tuple(value + self.loop.random.gauss(0, off) for value in values), "simulated")


class SimulatedEngineClient:
    """A ports.Engine: the engine as ``process`` reaches it. Calls arrive in order; changes take turns."""

    def __init__(self, engine: SimulatedEngine, process: SimulatedProcess) -> None:
        self._engine = engine
        self._process = process
        self._told: str | None = None

    async def identity(self) -> EngineIdentity:
        who = await self._who()
        self._told = who.instance
        return who

    async def vouch(self) -> None:
        """EngineReplaced, as for StitchMiddleware."""
        known, who = self._told, await self._who()
        if who.instance not in (known, self._told):
            raise EngineReplaced(f"it is {who.instance}, not {self._told}")

    async def _who(self) -> EngineIdentity:
        async def who() -> EngineIdentity:
            return self._engine.who()

        identity: EngineIdentity = await self._call("identity", who, in_turn=False)
        return identity

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        self._engine.on_call(self._process, "prepare", str(checkpoint))
        await self._call("prepare", lambda: self._engine.prepare(checkpoint, changed))

    async def pause(self, mode: KVMode) -> None:
        await self._call("pause", lambda: self._engine.pause(mode, self._process))

    async def activate(self, label: str) -> None:
        await self._call("activate", lambda: self._engine.activate(label))

    async def resume(self) -> None:
        await self._call("resume", self._engine.resume)

    async def abort(self, request_id: str) -> None:
        await self._call("abort", lambda: self._engine.abort(request_id), in_turn=False)

    async def probe(self) -> ProbeAnswer | None:
        answer: ProbeAnswer = await self._call("probe", self._engine.probe, in_turn=False)
        return answer

    async def _call(
        self, what: str, work: Callable[[], Coroutine[Any, Any, Any]], in_turn: bool = True
    ) -> Any:
        """Have ``work`` done by the engine's process; EngineError if it, or the answer, is lost."""
        self._process.check()
        engine, loop, faults = self._engine, self._engine.loop, self._engine.faults
        # A connection leads to one process: what is still on its way does not reach the next one.
        called = engine.process
        answer: asyncio.Future[Any] = loop.create_future()
        heard = not faults.hit(faults.plan.engine_silent)
        arrives = heard or faults.random.random() < 0.5

        async def serve() -> None:
            async with engine.turn if in_turn else contextlib.nullcontext():
                try:
                    result, error = await work(), None
                except EngineError as raised:
                    result, error = None, raised
            if heard:
                loop.call_later(faults.near(), _answer, answer, result, error, context=OUTSIDE)

        def arrive() -> None:
            if called.dead:
                _answer(answer, None, _lost(what, sent=False))
            else:
                engine.waiting[answer] = what
                called.spawn(serve())

        if in_turn:
            for rate, victim in (
                (faults.plan.engine_dies, engine.process),
                (faults.plan.caller_dies, self._process),
            ):
                if faults.hit(rate):
                    loop.call_later(faults.random.random(), victim.kill, context=OUTSIDE)
        if arrives:
            # Apart, since callbacks of one instant run in any order.
            engine.last_arrival = max(engine.last_arrival + 1e-6, loop.time() + faults.near())
            loop.call_at(engine.last_arrival, arrive, context=OUTSIDE)
        if not heard:
            faults.trace.add(f"{self._process.name}: {what} is not answered by the engine")
            wait = faults.plan.timeout * faults.random.random()
            loop.call_later(wait, _answer, answer, None, _lost(what, sent=True), context=OUTSIDE)
        try:
            return await answer
        finally:
            engine.waiting.pop(answer, None)


def _lost(what: str, *, sent: bool) -> EngineError:
    """What an adapter of a real engine has to raise: after an activation was sent, anything may be."""
    if not sent:
        return EngineRefused(f"{what}: the engine is not there")
    kind = EngineUncertain if what == "activate" else EngineError
    return kind(f"{what}: the engine does not answer")


def _answer(answer: asyncio.Future[Any], result: Any, error: EngineError | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
