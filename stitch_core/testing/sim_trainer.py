"""A simulated trainer: the real publisher and encoder, in processes that die and are started again."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from ..delta.encoder import DeltaEncoder
from ..manifest import Manifest
from ..ports import Files, StoreError
from ..publisher import Boot, ClaimRefused, Fenced, OutcomeUnknown, Payload, Publisher, PublishError
from ..retry import Retry
from .checkpoints import write_checkpoint
from .process import SimulatedProcess
from .sim_files import SimulatedMachine
from .sim_world import BOOT, Weights, World

WORK = Path("/var/train")


class SimulatedTrainer:
    """Trains until the head is at ``versions``, then stops; a supervisor starts it again when it dies.

    ``full_rate``: how often it publishes a full where a delta would do; ``impatience``: how often it gives
    up on a publish at some moment. ``changes``: the tensors that a step changes, all by default. ``fenced``
    is set when another writer took the run: it publishes nothing more.
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
    ) -> None:
        self.world = world
        self.name = name
        self.run = run
        self.versions = versions
        self.full_rate = full_rate
        self.impatience = impatience
        self.changes: list[str] | None = None
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
        publisher = self.publisher(process)
        files = self.machine.files(process)
        while not self.done.is_set():
            try:
                head = await publisher.claim(Boot(str(BOOT), self.world.judge.boot_state))
                await self._train(publisher, files, head)
            except Fenced as fenced:
                self.fenced = fenced
                self.world.trace.add(f"{process.name}: fenced")
                self.done.set()
            except (PublishError, StoreError) as error:
                self.world.trace.add(f"{process.name}: {type(error).__name__}: {error}")
                await asyncio.sleep(self.world.timing.restart)

    def publisher(self, process: SimulatedProcess) -> Publisher:
        """The real one."""
        world = self.world
        return Publisher(
            world.store(process), self.run, files=self.machine.files(process), clock=world.clock(),
            rng=world.random, nonce=world.nonce, run_blocking=world.loop.run_blocking,
            retry=Retry(attempts=5, first=0.5, cap=10.0, deadline=90.0),
            producer={"name": process.name},
        )  # fmt: skip

    async def _train(self, publisher: Publisher, files: Files, head: Manifest) -> None:
        """From the head's weights, as a checkpoint that was saved with it has them."""
        weights = self.world.weights[head.state]
        encoder = DeltaEncoder(weights)
        while publisher.head.number < self.versions:
            await asyncio.sleep(self.world.timing.train * self.world.random.uniform(0.2, 1.8))
            weights = self.world.trained(weights, self.changes)
            number = publisher.reserve()
            try:
                payload = self._encode(encoder, weights, files, number)
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
                if payload.kind == "delta":
                    encoder.commit()
                else:
                    encoder = DeltaEncoder(weights)
        self.done.set()

    def _encode(self, encoder: DeltaEncoder, weights: Weights, files: Files, number: int) -> Payload:
        directory = WORK / f"v{number}"
        files.remove_tree(directory)
        files.make_dirs(directory)
        if self.world.random.random() < self.full_rate:
            write_checkpoint(directory, files, weights, shards=2)
            return Payload("full", self.world.know(weights), directory, tuple(files.list(directory)))
        delta = encoder.encode(weights, directory, files, number=number, base_number=number - 1)
        return Payload(
            "delta", delta.state, directory, delta.files, delta.base, delta.encoding, delta.changed, number
        )
