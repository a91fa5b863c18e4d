"""A simulated trainer of several ranks on two hosts, whose ranks die while they write, or read a bad base.

The real encoder, receipts and publisher. What is simulated is the launcher, which starts any number of ranks
after each claim, and the writer of a stock framework.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..checkout import base_row
from ..checkpoint import Checkpoint
from ..delta.directory import write_index
from ..delta.encoder import DeltaEncoder, check_base
from ..delta.wire import DeltaError
from ..dialects import INDEX_NAME
from ..manifest import Manifest
from ..payload import Payload
from ..ports import Files, FileSource, StoreError
from ..publisher import ClaimRefused, Fenced, OutcomeUnknown, Publisher, PublishError
from ..retry import Retry
from ..safetensors import CheckpointError, Tensor, write_file
from ..state import TensorInfo, state_digest
from ..stores.transfer import upload
from ..trainers.boot import shares
from ..trainers.hosts import clear_versions
from ..trainers.own_files import OwnFiles, Written, whole_table, write_part, write_whole_index
from ..trainers.receipts import Duty, Part, assign, carry_out, judge, list_version
from ..versions import directory_name
from .checkpoints import write_checkpoint
from .loop import OUTSIDE
from .process import SimulatedProcess
from .sim_files import SimulatedMachine
from .sim_trainer import WORK, Saved, SimulatedTrainer
from .sim_world import BOOT, Weights, World

T = TypeVar("T")
BASE = WORK / "base"
STOCK = WORK / "stock"
"""Where a framework writes, on every host."""

MOST_RANKS = 4
SHORT = Retry(attempts=5, first=0.5, cap=10.0, deadline=90.0)


@dataclass(frozen=True)
class Rank:
    """One process of the trainer."""

    number: int
    host: int
    machine: SimulatedMachine
    process: SimulatedProcess

    @property
    def files(self) -> Files:
        files: Files = self.machine.files(self.process)
        return files


class SimulatedRanks(SimulatedTrainer):
    """As its base, in several processes on two machines; when one dies, all do.

    ``sizes`` are the numbers of ranks of its next starts, by chance when they are used up. ``stock``: a
    framework encodes and writes, and keeps no undo; else Stitch does. ``spoil_rate``: how often the base
    changes on one host between a claim and what is encoded from it. ``written`` is called for each rank that
    has written its part of a version, with how many have.
    """

    def __init__(self, world: World, name: str, run: str, *, versions: int, stock: bool = False) -> None:
        super().__init__(world, name, run, versions=versions)
        self.stock = stock
        self.sizes: list[int] = []
        self.spoil_rate = 0.0
        self.machines = [self.machine, world.machine(f"{name}-2")]
        self.written: Callable[[int, int], None] = lambda number, count: None
        self._head: Manifest | None = None

    async def _claim(self, publisher: Publisher) -> Manifest:
        self._head = await super()._claim(publisher)
        return self._head

    async def _train(self, publisher: Publisher, files: Files, state: str) -> None:
        assert self.process is not None
        ranks, over = self._launch(self.process)
        life = Life(self, publisher, ranks)
        try:
            await life.train(self.world.weights[state])
        except (DeltaError, CheckpointError, OSError) as error:
            raise PublishError(str(error)) from error
        finally:
            over.append(True)
            for rank in ranks[1:]:
                rank.process.kill()
        self.done.set()

    def _launch(self, first: SimulatedProcess) -> tuple[list[Rank], list[bool]]:
        """The ranks, of which none outlives another until the list has something in it."""
        world, over = self.world, list[bool]()
        size = self.sizes.pop(0) if self.sizes else world.random.randint(1, MOST_RANKS)
        ranks = [Rank(0, 0, self.machines[0], first)]
        start = world.random.randrange(2)
        for number in range(1, size):
            host = (number + start) % 2
            process = SimulatedProcess(world.loop, f"{first.name} rank {number}")
            self.machines[host].files(process)
            ranks.append(Rank(number, host, self.machines[host], process))
        world.trace.add(f"{first.name}: {size} ranks")

        def all_die() -> None:
            for rank in () if over else ranks:
                rank.process.kill()

        for rank in ranks:
            rank.process.on_death.append(all_die)
        return ranks, over


class Life:
    """What ranks do between a claim and the next."""

    def __init__(self, trainer: SimulatedRanks, publisher: Publisher, ranks: Sequence[Rank]) -> None:
        self.trainer, self.world, self.publisher, self.ranks = trainer, trainer.world, publisher, ranks
        self.encoders: list[DeltaEncoder] = []
        self.table: dict[str, TensorInfo] = {}
        self.base = BOOT
        encoding = trainer.encoding
        self.encoding = self.world.random.choice(("xor", "sparse")) if encoding == "mixed" else encoding
        if trainer.stock:
            self.encoding = "xor"
        self.own = [OwnFiles(WORK, trainer.run, "sim:", publisher.epoch, rank.files) for rank in ranks]

    async def everywhere(self, call: Callable[[Rank], T]) -> list[T]:
        """Every rank's result, each at some moment of its own."""

        async def one(rank: Rank) -> T:
            await asyncio.sleep(self.world.random.uniform(0, 2))
            return call(rank)

        return await self._all(one)

    async def _all(self, call: Callable[[Rank], Coroutine[Any, Any, T]]) -> list[T]:
        results = await asyncio.gather(
            *(rank.process.spawn(call(rank)) for rank in self.ranks), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return list(results)  # type: ignore[arg-type]

    # -------------------------------------------------------------------------------------- the base

    async def train(self, weights: Weights) -> None:
        trainer, world = self.trainer, self.world
        await self.prove_base()
        if world.faults.hit(trainer.spoil_rate):
            self.spoil()
        await self.everywhere(self._empty)
        if trainer.stock:  # its snapshot is taken at start
            await self.take_base()
        while self.publisher.head.number < trainer.versions:
            await asyncio.sleep(world.timing.train * world.random.uniform(0.2, 1.8))
            if not self.encoders:
                await self.take_base()
            weights = world.trained(weights, trainer.changes)
            number = self.publisher.reserve()
            try:
                await self.publish(weights, number)
            except (Fenced, OutcomeUnknown, ClaimRefused):
                raise
            except (PublishError, StoreError, DeltaError, OSError) as error:
                world.trace.add(f"{trainer.name}: {error}")
                if trainer.stock:
                    raise
                for encoder in self.encoders:
                    encoder.undo()

    async def prove_base(self) -> None:
        """Every host's copy of what the first delta builds on, hashed by the ranks that see it."""
        head, saved = self.trainer._head, self.trainer.saved
        assert head is not None
        row = base_row(head, saved.number if saved else None)
        state = self.world.judge.boot_state
        if row is not None:
            self.base, state = BASE, row.state
            checked_out = self.world.weights[row.state]
            await self.everywhere(lambda rank: self._check_out(rank, checked_out))

        def hashed(rank: Rank) -> tuple[Checkpoint, dict[str, TensorInfo]]:
            peers = [other.number for other in self.ranks if other.host == rank.host]
            checkpoint = Checkpoint.open(self.base, rank.files)
            share = shares(dict(checkpoint.tensors), len(peers))[peers.index(rank.number)]
            return checkpoint, checkpoint.table(names=share)

        parts = await self.everywhere(hashed)
        first = [parts[rank.number][1] for rank in self.ranks if rank.host == self.ranks[0].host]
        self.table = {name: info for part in first for name, info in part.items()}
        for checkpoint, part in parts:
            for name, info in part.items():
                check_base(name, info, self.table, checkpoint.tensors[name].file)
        if state_digest(self.table) != state:
            raise PublishError(f"{self.base} has state {state_digest(self.table)}, expected {state}")

    def _check_out(self, rank: Rank, weights: Weights) -> None:
        if rank.number == min(other.number for other in self.ranks if other.host == rank.host):
            rank.files.remove_tree(BASE)
            write_checkpoint(BASE, rank.files, weights)

    def spoil(self) -> None:
        """One tensor of one host's copy changes; a boot checkpoint's is put right later."""
        random = self.world.random
        machine = self.trainer.machines[random.choice(self.ranks).host]
        undo = spoil(self.world, machine, self.base, random.choice(sorted(self.table)))
        if self.base == BOOT:
            self.world.loop.call_later(random.uniform(0, 60), undo, context=OUTSIDE)

    async def take_base(self) -> None:
        def take(rank: Rank) -> DeltaEncoder:
            checkpoint = Checkpoint.open(self.base, rank.files)
            names = self._mine(rank, checkpoint.tensors)
            return DeltaEncoder.from_checkpoint(
                checkpoint, self.encoding, names=names, proven=self.table, workers=1
            )

        self.encoders = await self.everywhere(take)

    def _mine(self, rank: Rank, names: Mapping[str, object]) -> list[str]:
        return sorted(names)[rank.number :: len(self.ranks)]

    def _empty(self, rank: Rank) -> None:
        if self.trainer.stock:
            clear_versions(STOCK, rank.files)
        else:
            self.own[rank.number].empty()

    # ------------------------------------------------------------------------------------- a version

    async def publish(self, weights: Weights, number: int) -> None:
        """Encode, upload from every rank, and move the head."""
        stock = self.trainer.stock
        root = STOCK if stock else self.own[0].root
        directory, encoded = root / directory_name(number), None
        if stock:
            await self.write_stock(weights, directory, number)
            duties = await self.duties_by_index(directory)
        else:
            written = await self.write_own(weights, directory, number)
            duties, encoded = await self.own_duties(directory, written)
        prefix = self.publisher.prefix(number)
        parts = await self._all(lambda rank: self._upload(rank, duties[rank.number], directory, prefix))
        verdict = judge(parts, self.table, str(directory), encoded=encoded)
        uploaded = tuple(receipt.file for part in parts for receipt in part.receipts)
        await self.publisher.publish(
            Payload(
                "delta", verdict.state, directory, (), state_digest(self.table), verdict.encoding,
                verdict.changed, number, uploaded=uploaded,
            ),
            number,
        )  # fmt: skip
        self.world.trace.add(f"{self.trainer.name}: {number} is published by {len(self.ranks)} ranks")
        self.table = dict(verdict.table)
        for encoder in self.encoders:
            encoder.commit()
        if self.world.random.random() < self.trainer.save_rate:
            self.trainer.saved = Saved(number, verdict.state)
        await self.everywhere(lambda rank: rank.files.remove_tree(directory))

    async def write_own(self, weights: Weights, directory: Path, number: int) -> list[Written]:
        def write(rank: Rank) -> Written:
            own = self._own_tensors(rank, weights)
            part = write_part(self.encoders[rank.number], own, directory, rank.files, rank.number)
            self._wrote(number)
            return part

        self._writers = 0
        parts = await self.everywhere(write)
        rank0 = self.ranks[0]
        write_whole_index(parts, self.encoding, directory, rank0.files, number=number, base_number=number - 1)
        return parts

    async def own_duties(self, directory: Path, written: list[Written]) -> tuple[list[Duty], str | None]:
        """Each rank's files are those that it says it has written; with the state that the encoders have."""
        duties = [Duty(part.files) for part in written]
        duties[0] = Duty((*written[0].files, INDEX_NAME))
        return duties, state_digest(whole_table(written))

    async def write_stock(self, weights: Weights, directory: Path, number: int) -> None:
        """A shard of each rank that has changes, numbered among those, and rank 0's index."""

        def encode(rank: Rank) -> dict[str, tuple[bytes, str]]:
            found: dict[str, tuple[bytes, str]] = {}

            def keep(payloads: Mapping[str, tuple[bytes, str]]) -> list[str]:
                found.update(payloads)
                return []

            self.encoders[rank.number].write(self._own_tensors(rank, weights), keep)
            return found

        payloads = await self.everywhere(encode)
        having = [rank.number for rank in self.ranks if payloads[rank.number]]
        names = {r: f"model-{i:05d}-of-{len(having):05d}.safetensors" for i, r in enumerate(having)}

        def write(rank: Rank) -> None:
            rank.files.make_dirs(directory)
            mine = payloads[rank.number]
            if mine:
                frames = {name: Tensor("U8", (len(frame),), frame) for name, (frame, _) in mine.items()}
                sums = {name: checksum for name, (_, checksum) in mine.items()}
                write_file(directory / names[rank.number], rank.files, frames, sums)
            self._wrote(number)

        self._writers = 0
        await self.everywhere(write)
        weight_map = {name: names[r] for r in having for name in payloads[r]}
        write_index(directory, self.ranks[0].files, weight_map, number=number, base_number=number - 1)

    async def duties_by_index(self, directory: Path) -> list[Duty]:
        def look(rank: Rank) -> Any:
            return list_version(
                directory, rank.files, index=rank.number == 0, host=lambda _: str(rank.host),
                mark=lambda _: (rank.host,),
            )  # fmt: skip

        return assign(await self.everywhere(look), str(directory))

    async def _upload(self, rank: Rank, duty: Duty, directory: Path, prefix: str) -> Part:
        part, store = carry_out(duty, directory, rank.files), self.world.store(rank.process)
        for receipt in part.receipts:
            file = receipt.file
            await upload(
                store, prefix + file.name, FileSource(rank.files, directory / file.name, file.size),
                file.sha256, policy=SHORT, rng=self.world.random, run_blocking=self.world.loop.run_blocking,
            )  # fmt: skip
        return part

    def _own_tensors(self, rank: Rank, weights: Weights) -> Weights:
        return {name: weights[name] for name in self._mine(rank, weights)}

    def _wrote(self, number: int) -> None:
        self._writers += 1
        self.trainer.written(number, self._writers)


def spoil(world: World, machine: SimulatedMachine, directory: Path, name: str) -> Callable[[], None]:
    """A bit of a tensor in a checkpoint changes on a disk; what puts it right, if the file is still there."""

    def flip() -> None:
        armed, world.faults.armed = world.faults.armed, False
        files: Files = machine.files(SimulatedProcess(world.loop, "a disk"))
        if files.exists(directory):
            ref = Checkpoint.open(directory, files).tensors[name]
            (byte,) = files.read(ref.file, ref.offset, 1)
            files.write_at(ref.file, ref.offset, bytes([byte ^ 1]))
            files.sync(ref.file)
            world.trace.add(f"{machine.name}: a bit of {name} in {directory} flips")
        world.faults.armed = armed

    flip()
    return flip
