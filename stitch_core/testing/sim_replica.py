"""A simulated replica: the real reconciler, gate, host checkpoint and middleware over a simulated engine."""

from __future__ import annotations

import asyncio
import contextlib

from ..host_checkpoint import HostCheckpoint
from ..ports import KVMode
from ..replica.activation import ActivationSettings, ReplicaFailed
from ..replica.admission import Gate
from ..replica.middleware import StitchMiddleware
from ..replica.probe import Probe, WeightsDiffer, difference
from ..replica.probe_kept import FILE_NAME, KeptAnswers
from ..replica.reconciler import Follow, Reconciler
from ..replica.staging import WrongBase
from ..versions import VersionConstraint
from .fake_engine import state_logprobs
from .loop import OUTSIDE
from .process import SimulatedProcess
from .sim_engine import SimulatedEngine, SimulatedEngineClient
from .sim_http import Client, Response, call, engine_app
from .sim_world import BOOT, DISK, RAM, World

SOON = 10.0
"""Seconds in which the gate lets go of what the engine has done with."""


class SimulatedReplica:
    """A machine with an engine process and a Stitch process, which a supervisor starts again when it dies.

    ``together``: the two are one process, as with the middleware inside the engine's server, and die as
    one; otherwise they are engine and sidecar. ``in_ram``: the host checkpoint lies on tmpfs.
    """

    def __init__(
        self,
        world: World,
        name: str,
        follow: Follow,
        *,
        kv_mode: KVMode = "in_place",
        together: bool = False,
        in_ram: bool = True,
        drain_all: bool = False,
    ) -> None:
        self.world = world
        self.name = name
        self.follow = follow
        self.kv_mode = kv_mode
        self.together = together
        self.machine = world.machine(name)
        self.boot = world.boot_directory(self.machine)
        self.engine = SimulatedEngine(
            world.loop, world.faults, self.machine, self.boot, name=f"{name}-engine", inside=together,
            step_seconds=world.timing.token, copy_seconds=0.05, boot_seconds=world.timing.boot,
        )  # fmt: skip
        self.process = SimulatedProcess(world.loop, name)
        self.process.kill()
        self.reconciler: Reconciler | None = None
        self.gate: Gate | None = None
        self.failures: list[str] = []
        self.stopped = False
        self.app: StitchMiddleware | None = None
        self.settings = ActivationSettings(
            kv_mode=kv_mode, drain_all=drain_all, pin_drain=world.timing.pin_drain,
            switch_drain=world.timing.switch_drain, engine_timeout=world.timing.engine_timeout,
            activate_timeout=60.0,
        )  # fmt: skip
        self._host_root = (RAM if in_ram else DISK) / "host"
        self._starts = 0
        self._kept: KeptAnswers | None = None
        self._known: set[str] = set()
        world.watch(self.engine)

    # ------------------------------------------------------------------------------------------- life

    async def supervise(self) -> None:
        """Start it, and again whenever it dies or gives up its engine."""
        while not self.stopped:
            process = self._start()
            assert self.reconciler is not None
            life = process.spawn(self.reconciler.run())
            ended = asyncio.ensure_future(process.ended.wait())
            await asyncio.wait([life, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if life.done() and not process.dead:
                self._gave_up(process, life)
            if self.together:
                self.engine.process.kill()
            await asyncio.sleep(self.world.timing.restart * self.world.random.random())

    def _gave_up(self, process: SimulatedProcess, life: asyncio.Task[None]) -> None:
        """A replica whose engine cannot be trusted is replaced, engine and all.

        So is one that met another boot checkpoint than its run's.
        """
        error = life.exception()
        if not isinstance(error, ReplicaFailed) and not (
            isinstance(error, WrongBase) and self.boot.exchanges
        ):
            raise error or AssertionError("the reconciler returned")
        self.failures.append(str(error))
        if isinstance(error.__cause__, WeightsDiffer):
            self._forget_answers()
        self.world.trace.add(f"{process.name}: failed: {error}")
        process.kill()
        self.engine.process.kill()

    def _forget_answers(self) -> None:
        """As operators do, who cannot know whether the weights then or now were wrong."""
        armed, self.world.faults.armed = self.world.faults.armed, False
        files = self.machine.files(SimulatedProcess(self.world.loop, f"{self.name} operator"))
        with contextlib.suppress(FileNotFoundError):
            files.remove(self._host_root / FILE_NAME)
        self.world.faults.armed = armed

    def _start(self) -> SimulatedProcess:
        world = self.world
        self._starts += 1
        process = self.process = SimulatedProcess(world.loop, f"{self.name}#{self._starts}")
        files, clock = self.machine.files(process), world.clock()
        engine = SimulatedEngineClient(self.engine, process)
        gate = self.gate = Gate(clock)
        host = HostCheckpoint(
            self._host_root, files, nonce=world.nonce, batch_bytes=20, part_bytes=16, workers=1
        )
        self._kept, self._known = (
            KeptAnswers(files, self._host_root / FILE_NAME, world.loop.run_blocking, world.trace.add),
            set(),
        )
        probe = Probe(engine, clock, self._kept, answer=world.timing.engine_timeout)
        self.reconciler = reconciler = Reconciler(
            store=world.store(process), engine=engine, gate=gate, host=host, follow=self.follow, boot=BOOT,
            files=files, clock=clock, rng=world.random, run_blocking=world.loop.run_blocking,
            activation=self.settings, poll=world.timing.poll, probe=probe,
        )  # fmt: skip
        gate.on_refused = reconciler.wake
        reconciler.on_update = self._updated
        engine_http = engine_app(self.engine, lambda own: self._ended(process, gate, own))
        self.app = StitchMiddleware(
            engine_http, gate, status=reconciler.status, wake=reconciler.wake,
            mismatch=self._mismatch, abort=engine.abort,
            kv_across="uniform" if self.kv_mode == "retract" else "mixed",
            vouch=None if self.together else engine.vouch,
        )  # fmt: skip
        if self.together:
            self.engine.process.on_death.append(process.kill)
        return process

    def _ended(self, process: SimulatedProcess, gate: Gate, request_id: str) -> None:
        """The engine has done with a request: soon the gate has, too, whatever its client does."""
        loop = self.world.loop
        tickets = [ticket for ticket in gate.running if ticket.request_id == request_id]

        def check(asked: float) -> None:
            if process.dead or not any(ticket in gate.running for ticket in tickets):
                return
            # It could do nothing meanwhile, or the answer waits for a verdict on the weights, which ends.
            if process.stalled_until > asked or gate.holds_answers:
                loop.call_later(SOON, check, loop.time(), context=OUTSIDE)
                return
            rule = "short pause: the gate waits for engines only"
            self.world.judge.broken(rule, f"{process.name} {request_id}")

        loop.call_later(SOON, check, loop.time(), context=OUTSIDE)

    def _updated(self) -> None:
        assert self.gate is not None
        self.world.trace.add(f"{self.process.name}: serves {self.gate.serving}")

    def _mismatch(self, reason: str) -> None:
        self.world.trace.add(f"{self.process.name}: mismatch: {reason}")
        if not self.engine.process.dead and self.engine.activated:
            self.world.judge.broken("truth: nothing outlives what it may", f"{self.process.name}: {reason}")
        assert self.reconciler is not None
        self.reconciler.mismatch(reason)

    # --------------------------------------------------------------------------------------- requests

    async def ask(
        self,
        request_id: str,
        constraint: VersionConstraint,
        *,
        tokens: int,
        stream: bool = False,
        client: Client | None = None,
    ) -> Response | None:
        """One request over the network; None if the connection broke or the client left."""
        process, app = self.process, self.app
        await asyncio.sleep(self.world.faults.near())
        if process.dead or app is None:
            return None
        body = {
            "rid": request_id,
            "prompt": 3,
            "max_new_tokens": tokens,
            "stream": stream,
            "weight_version": constraint.fields(),
        }
        answer = process.spawn(call(app, "POST", "/generate", body, client=client))
        ended = asyncio.ensure_future(process.ended.wait())
        await asyncio.wait([answer, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not answer.done():
            return None
        try:
            response = answer.result()
        except Exception as error:
            # A server answers 500 where its app raised.
            self.world.trace.add(f"{process.name}: {type(error).__name__}: {error}")
            return None
        if response is not None:
            known = self._look_at_kept()
            self.world.judge.check(f"{process.name} {request_id}", constraint, response, known)
        return response

    def _look_at_kept(self) -> set[str]:
        """States whose right answer this process has kept, ever."""
        for state in self.world.judge.states - self._known if self._kept is not None else ():
            assert self._kept is not None
            kept = self._kept.get(state)
            if kept is not None and difference(kept, state_logprobs(state)) < 0.5:
                self._known.add(state)
        return self._known

    # ------------------------------------------------------------------------------------------ state

    @property
    def health(self) -> tuple[str, str] | None:
        """Which process and engine serve here, None if they do not now."""
        if self.gate is None or not self.gate.ready or self.process.dead or self.engine.process.dead:
            return None
        serves = self.engine.activated and self.engine.label == str(self.gate.serving)
        return (self.process.name, self.engine.instance) if serves else None

    @property
    def drains(self) -> bool:
        """Whether a request without any demand may have to end before its time."""
        return self.settings.drain_all or self.follow.channel is not None

    @property
    def applied(self) -> int | None:
        """The version it serves now."""
        alive = self.gate is not None and not self.process.dead and self.gate.ready
        return self.gate.serving.number if alive and self.gate and self.gate.serving else None

    def why_not(self, run: str) -> str | None:
        """Why it does not serve the head of ``run`` as it should, None if it does."""
        newest = self.world.judge.newest(run)
        if self.process.dead or self.gate is None or self.reconciler is None:
            return f"{self.name} is not running"
        if newest is None:
            return f"{self.name}: run {run} has no head"
        if not self.gate.ready or self.gate.serving != newest.version:
            return f"{self.name} does not serve {newest.version}"
        engine = self.engine
        if engine.process.dead or engine.paused or (engine.label, engine.state) != (
            str(newest.version), newest.state
        ):  # fmt: skip
            return f"{self.name}: its engine is {engine}"
        return None
