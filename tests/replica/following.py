"""A reconciler over a scripted engine that holds real bytes, a store in memory and files in a directory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stitch_core.checkpoint import Checkpoint, marks_of
from stitch_core.head import Channel, channel_key
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import EngineIdentity, EngineRefused, FileMarks, KVMode, ProbeAnswer
from stitch_core.publisher import Payload, Publisher
from stitch_core.replica.activation import ActivationSettings
from stitch_core.replica.admission import Gate, Ticket
from stitch_core.replica.probe import Probe
from stitch_core.replica.reconciler import Follow, Reconciler
from stitch_core.state import TensorInfo, state_digest, tensor_digest
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.fake_engine import state_logprobs
from stitch_core.versions import VersionConstraint
from tests.small_run import FILES, FaultyStore, Trainer, inline
from tests.virtual_time import LoopClock

Hook = Callable[[], Awaitable[None]]


class BytesEngine:
    """Holds tensors and copies what it prepared. ``before[name]`` and ``after[name]`` run around a call."""

    def __init__(self, boot: Path) -> None:
        self.boot = boot
        self.calls: list[tuple[str, Any]] = []
        self.before: dict[str, Hook] = {}
        self.after: dict[str, Hook] = {}
        self.noise: Callable[[], float] = lambda: 0.0
        self.signature = "s"
        self._boots = 0
        self.restart()

    def restart(self) -> None:
        """Another process, with the weights of ``boot``, of which the replica has seen ``boot_marks``."""
        self._boots += 1
        self.instance, self.label, self.paused = f"i{self._boots}", "default", False
        self._prepared: dict[str, bytes] | None = None
        self.boot_marks: FileMarks | None = marks_of(self.boot, FILES)
        checkpoint = Checkpoint.open(self.boot, FILES)
        self.tensors = {
            name: (ref.dtype, ref.shape, checkpoint.read(name)) for name, ref in checkpoint.tensors.items()
        }

    @property
    def state(self) -> str:
        """Of the bytes that it holds."""
        return state_digest({n: TensorInfo(d, s, tensor_digest(b)) for n, (d, s, b) in self.tensors.items()})

    def names(self, call: str) -> list[Any]:
        return [what for name, what in self.calls if name == call]

    @asynccontextmanager
    async def _called(self, name: str, what: Any) -> Any:
        self.calls.append((name, what))
        await asyncio.sleep(0)
        if name in self.before:
            await self.before[name]()
        yield
        if name in self.after:
            await self.after[name]()

    async def identity(self) -> EngineIdentity:
        async with self._called("identity", None):
            return EngineIdentity(self.instance, self.label, self.boot_marks)

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        async with self._called("prepare", sorted(changed)):
            opened = Checkpoint.open(checkpoint, FILES)
            self._prepared = {name: opened.read(name) for name in changed}

    async def pause(self, mode: KVMode) -> None:
        async with self._called("pause", mode):
            self.paused = True

    async def activate(self, label: str) -> None:
        async with self._called("activate", label):
            if self._prepared is None or not self.paused:
                raise EngineRefused("not paused, or nothing was prepared")
            for name, data in self._prepared.items():
                self.tensors[name] = (*self.tensors[name][:2], data)
            self.label, self._prepared = label, None

    async def resume(self) -> None:
        async with self._called("resume", None):
            self.paused = False

    async def abort(self, request_id: str) -> None:
        async with self._called("abort", request_id):
            pass

    async def probe(self) -> ProbeAnswer | None:
        async with self._called("probe", self.label):
            return ProbeAnswer(tuple(x + self.noise() for x in state_logprobs(self.state)), self.signature)


class Following:
    """One run and one replica that follows it, by ``follow`` or the run's head; ``probes``: with a probe."""

    def __init__(
        self, root: Path, follow: Follow | None = None, *, probes: bool = False, **options: Any
    ) -> None:
        self.root = root
        self.probes = probes
        self.trainer = Trainer(root / "train")
        self.memory = MemoryStore()
        self.store = FaultyStore(self.memory)
        self.publisher: Publisher | None = None
        self.versions: list[Manifest] = []
        self.said: list[str] = []
        self.engine = BytesEngine(self.trainer.boot)
        self.settings = ActivationSettings(
            pin_drain=0.05, switch_drain=0.05, abort_grace=0.05, engine_timeout=0.2, activate_timeout=0.2
        )
        self.follow, self.options = follow or Follow("r"), options
        self.start()

    def start(self) -> None:
        """A new process of the replica: all is lost but the engine and the files."""
        self.gate = Gate(LoopClock(), hold=0.05)
        self.host = HostCheckpoint(self.root / "host", FILES)
        options: dict[str, Any] = {"poll": 3600.0, "first_backoff": 0.01, "max_backoff": 0.02, **self.options}
        if self.probes:
            options["probe"] = Probe.kept_in(
                self.root / "host", self.engine, LoopClock(), FILES, inline, self.said.append
            )
        self.reconciler = Reconciler(
            self.store, self.engine, self.gate, self.host, self.follow, self.trainer.boot, FILES,
            LoopClock(), random.Random(0), inline, self.settings, say=self.said.append, **options,
        )  # fmt: skip
        self.gate.on_refused = self.reconciler.wake

    # ------------------------------------------------------------------------------------------ trainer

    async def claim(self) -> Manifest:
        self.publisher = self.trainer.publisher(self.memory)
        self.versions.append(await self.publisher.claim(self.trainer.version0))
        return self.versions[-1]

    async def publish(self, *names: str) -> Manifest:
        """The next version; only the tensors ``names`` change, if given."""
        if self.publisher is None:
            await self.claim()
        assert self.publisher is not None
        learn, trainer = self.trainer.learn, self.trainer
        trainer.learn = lambda: learn(*names)  # type: ignore[method-assign]
        self.versions.append(await trainer.publish(self.publisher))
        trainer.learn = learn  # type: ignore[method-assign]
        return self.versions[-1]

    async def bring_back(self, manifest: Manifest) -> Manifest:
        """The next version, with the weights of an earlier one, as a rollback makes it."""
        assert self.publisher is not None
        learn, trainer = self.trainer.learn, self.trainer

        def again() -> dict[str, Any]:
            trainer.tensors = trainer.weights[manifest.state]
            return trainer.tensors

        trainer.learn = again  # type: ignore[method-assign, assignment]
        self.versions.append(await trainer.publish(self.publisher))
        trainer.learn = learn  # type: ignore[method-assign]
        assert self.versions[-1].state == manifest.state
        return self.versions[-1]

    async def publish_full(self, payload: Payload | None = None) -> Manifest:
        if self.publisher is None:
            await self.claim()
        assert self.publisher is not None
        self.versions.append(await self.publisher.publish(payload or self.trainer.full()))
        return self.versions[-1]

    def point(self, run: str, exact: int | None = None) -> None:
        """Move the channel ``latest``."""
        self.memory.state.objects[channel_key("latest")] = Channel(run, exact).encode()

    # ------------------------------------------------------------------------------------------ replica

    async def catch_up(self) -> None:
        """Reconcile until nothing is left to do."""
        while await self.reconciler.reconcile():
            pass

    async def admit(self, request_id: str = "q", **constraint: Any) -> Ticket:
        ticket = await self.gate.admit(VersionConstraint(**constraint), request_id)
        assert isinstance(ticket, Ticket), ticket
        return ticket

    def check(self, manifest: Manifest) -> None:
        """The gate, the engine's label and the engine's bytes all say this version."""
        assert self.gate.ready
        assert self.gate.serving == manifest.version
        assert not self.engine.paused
        assert (self.engine.label, self.engine.state) == (str(manifest.version), manifest.state)

    def problem(self) -> str:
        problem = self.reconciler.status()["problem"]
        return "" if problem is None else str(problem["message"])

    @asynccontextmanager
    async def running(self) -> Any:
        """The loop runs meanwhile; what it raised is raised."""
        task = asyncio.ensure_future(self.reconciler.run())
        try:
            yield task
        finally:
            task.cancel()
            results = await asyncio.gather(task, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def serves(self, manifest: Manifest) -> None:
        await self.until(lambda: self.gate.ready and self.gate.serving == manifest.version)
        self.check(manifest)
