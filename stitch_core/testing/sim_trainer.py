"""A simulated trainer: the real publisher and encoder, in processes that die and are started again."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from ..delta import overwrite
from ..delta.directory import write_delta
from ..delta.encoder import DeltaEncoder
from ..manifest import Manifest
from ..ports import Files, StoreError
from ..publisher import Boot, ClaimRefused, Fenced, OutcomeUnknown, Payload, Publisher, PublishError
from ..retry import Retry
from ..state import changed_tensors, state_digest
from .checkpoints import table_of, write_checkpoint
from .process import SimulatedProcess
from .sim_files import SimulatedMachine
from .sim_world import BOOT, Weights, World

WORK = Path("/var/train")


def publisher_of(
    world: World,
    process: SimulatedProcess,
    machine: SimulatedMachine,
    run: str,
    *,
    raise_floor: bool = False,
    behind: float = 0.0,
) -> Publisher:
    """The real one; ``behind``: seconds by which its wall clock is late."""
    return Publisher(
        world.store(process), run, files=machine.files(process), clock=world.clock(behind),
        rng=world.random,
        nonce=world.nonce, run_blocking=world.loop.run_blocking,
        retry=Retry(attempts=5, first=0.5, cap=10.0, deadline=90.0), producer={"name": process.name},
        raise_floor=raise_floor,
    )  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A trainer's checkpoint, saved when ``number`` was the newest version, with that one's weights."""

    number: int
    state: str


class SimulatedTrainer:
    """Trains until the head is at ``versions``, then stops; a supervisor starts it again when it dies.

    ``full_rate``: how often it publishes a full where a delta would do; ``impatience``: how often it gives
    up on a publish at some moment. ``changes``: the tensors that a step changes, all by default. ``fenced``
    is set when another writer took the run: it publishes nothing more, unless its supervisor starts it again
    all the same, ``stubborn`` times. ``save_rate``: how often a version is saved; it resumes from the last
    one, ``saved``, and from the head's weights when none was. ``encoding`` may be "mixed": another one now
    and then. ``refused`` are claims of a version that a rollback gave up; then an operator takes ``saved``
    away. ``behind``: seconds by which its wall clock is late.
    """

    def __init__(
        self,
        world: World,
        name: str,
        run: str,
        *,
        versions: int,
        full_rate: float = 0.1,
        impatience: float = 0.0,
        save_rate: float = 0.0,
        stubborn: int = 0,
    ) -> None:
        self.world = world
        self.name = name
        self.run = run
        self.versions = versions
        self.full_rate = full_rate
        self.impatience = impatience
        self.save_rate = save_rate
        self.stubborn = stubborn
        self.saved: Saved | None = None
        self.refused: list[ClaimRefused] = []
        self.changes: list[str] | None = None
        self.raise_floor = False
        self.behind = 0.0
        self.encoding = "xor"
        self.fenced: Fenced | None = None
        self.machine: SimulatedMachine = world.machine(name)
        self.process: SimulatedProcess | None = None
        self.done = asyncio.Event()
        self._starts = 0

    async def supervise(self) -> None:
        """Keep it alive until it is done or fenced."""
        while not self.done.is_set():
            self._starts += 1
            process = self.process = SimulatedProcess(self.world.loop, f"{self.name}#{self._starts}")
            self.machine.files(process)
            life = process.spawn(self._live(process))
            ended = asyncio.ensure_future(process.ended.wait())
            await asyncio.wait([life, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if life.done() and not process.dead:
                life.result()
                process.kill()
                return
            await asyncio.sleep(self.world.timing.restart * self.world.random.random())

    async def _live(self, process: SimulatedProcess) -> None:
        publisher = publisher_of(
            self.world, process, self.machine, self.run, raise_floor=self.raise_floor, behind=self.behind
        )  # fmt: skip
        files = self.machine.files(process)
        while not self.done.is_set():
            try:
                head = await self._claim(publisher)
                state = self.saved.state if self.saved else head.state
                await self._train(publisher, files, state)
            except Fenced as fenced:
                self.fenced = fenced
                self.stubborn -= 1
                self.world.trace.add(f"{process.name}: fenced")
                if self.stubborn < 0:
                    self.done.set()
                await asyncio.sleep(self.world.timing.restart)
            except (PublishError, StoreError) as error:
                self.world.trace.add(f"{process.name}: {type(error).__name__}: {error}")
                await asyncio.sleep(self.world.timing.restart)

    async def _claim(self, publisher: Publisher) -> Manifest:
        boot, saved = Boot(str(BOOT), self.world.judge.boot_state), self.saved
        if saved is None:
            return await publisher.claim(boot)
        try:
            return await publisher.claim(boot, resume=saved.state, saved=saved.number)
        except ClaimRefused as refused:
            if "gave up" in str(refused):
                self.refused.append(refused)
                self.saved = None
            raise

    async def _train(self, publisher: Publisher, files: Files, state: str) -> None:
        """From weights of that state, as a checkpoint that was saved with them has them."""
        base = weights = self.world.weights[state]
        encoder = self._encoder(weights)
        below_floor = not await publisher.builds_on(state)
        while publisher.head.number < self.versions:
            await asyncio.sleep(self.world.timing.train * self.world.random.uniform(0.2, 1.8))
            weights = self.world.trained(weights, self.changes)
            number = publisher.reserve()
            try:
                payload = self._encode(encoder, base, weights, files, number, below_floor)
                # Now and then a caller loses patience, at whatever point.
                impatient = self.world.random.random() < self.impatience
                async with asyncio.timeout(self.world.random.uniform(0, 30) if impatient else None):
                    await publisher.publish(payload, number)
            except (Fenced, OutcomeUnknown, ClaimRefused):
                raise
            except (PublishError, OSError, TimeoutError) as error:
                self.world.trace.add(f"{self.name}: {error}")
                # What was not published is part of the next delta.
                encoder.undo()
            else:
                with contextlib.suppress(OSError):
                    files.remove_tree(payload.directory)
                how = payload.encoding or payload.kind
                self.world.trace.add(f"{self.name}: {number} is published as {how}")
                if how in ("xor", "sparse") and self.encoding != "mixed":
                    encoder.commit()
                else:
                    encoder = self._encoder(weights)
                base, below_floor = weights, False
                if self.world.random.random() < self.save_rate:
                    self.saved = Saved(number, payload.state)
        self.done.set()

    def _encoder(self, weights: Weights) -> DeltaEncoder:
        encoding = self.world.random.choice(("xor", "sparse")) if self.encoding == "mixed" else self.encoding
        return DeltaEncoder(weights, encoding, workers=1)

    def _encode(
        self,
        encoder: DeltaEncoder,
        base: Weights,
        weights: Weights,
        files: Files,
        number: int,
        below_floor: bool,
    ) -> Payload:
        directory = WORK / f"v{number}"
        files.remove_tree(directory)
        files.make_dirs(directory)
        if self.world.random.random() < self.full_rate or below_floor:
            write_checkpoint(directory, files, weights, shards=2)
            return Payload("full", self.world.know(weights), directory, tuple(files.list(directory)))
        if self.encoding == "mixed" and self.world.random.random() < 0.2:
            return _overwritten(base, weights, directory, files, number)
        delta = encoder.encode(weights, directory, files, number=number, base_number=number - 1)
        return Payload(
            "delta", delta.state, directory, delta.files, delta.base, delta.encoding, delta.changed, number
        )


def _overwritten(base: Weights, weights: Weights, directory: Path, files: Files, number: int) -> Payload:
    """A delta as a stock trainer writes it that was told to overwrite: it goes forward only."""
    before, after = table_of(base), table_of(weights)
    changed = {name: (before[name].digest, after[name].digest) for name in changed_tensors(before, after)}
    frames = {
        name: (overwrite.encode(base[name].data, weights[name].data), after[name].digest) for name in changed
    }
    names = write_delta(directory, files, frames, number=number, base_number=number - 1, encoding="overwrite")
    return Payload(
        "delta",
        state_digest(after),
        directory,
        tuple(names),
        state_digest(before),
        "overwrite",
        changed,
        number,
    )
