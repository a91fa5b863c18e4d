"""Stitch's own encoder in a group: each source rank encodes the tensors that it gathers.

For frameworks that publish no deltas of their own. The base moves when a version is encoded and goes back
when its publishing fails, so the next publish repairs what a failed one left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from .. import leaving
from ..checkpoint import Checkpoint
from ..delta.encoder import DeltaEncoder
from ..delta.wire import DeltaError
from ..dialects import INDEX_NAME
from ..pipeline import Pipeline
from ..ports import Files, TrainerGroup
from ..safetensors import Tensor
from ..state import TensorInfo, layout_difference, state_digest
from ..versions import directory_name
from .group import RanksFailed, together
from .hosts import naming_host
from .own_files import OwnFiles, Written, whole_table, write_part, write_whole_index
from .publication import FleetLate, GroupPublisher, Own

T = TypeVar("T")


class OwnDelta:
    """Encodes and publishes a policy that lies on several ranks, none of it twice.

    With the setting ``async_`` a version is published behind the next step: at most one more waits, and the
    next ``publish`` is where a failure is raised, and where the base goes back for it. The first version, the
    weights that the trainer starts with, is waited for all the same: rollouts begin when it returns.
    """

    def __init__(self, publisher: GroupPublisher, files: Files) -> None:
        """``publisher`` has claimed the run."""
        self._publisher, self._files, self._group = publisher, files, publisher.group
        assert publisher.start is not None
        settings = publisher.settings
        self._own = OwnFiles(settings.work, settings.run, settings.store, publisher.start.epoch, files)
        self._boot = Checkpoint.open(publisher.base, files)
        self._encoder: DeltaEncoder | None = None
        self._pipeline: Pipeline[None] | None = None
        self._started_at = publisher.number
        self._late: dict[int, FleetLate] = {}
        self._thread = ThreadPoolExecutor(1, "stitch-behind") if publisher.behind else None
        if self._thread is not None:
            leaving.watch(self)

    def publish(self, tensors: Mapping[str, Tensor], *, step: int | None = None, wait: bool = False) -> int:
        """Publish the policy; its number.

        ``tensors`` are this rank's, under the names and in the layout of the boot checkpoint; a rank that
        is no source passes none. A tensor that several ranks pass is taken from the first. ``wait``: return
        when it is published, also where publishing goes on behind the step. Raises RanksFailed, of this
        version or of one before it, and then the next publish encodes against what the head last took.
        """
        self._settle(everything=False)
        names = self._together("gathering the policy", lambda: sorted(tensors))
        mine = self._share(names)
        with self._telling():
            number = self._publisher.reserve()
        encoder, pipeline = self._started(names, mine, number)
        first = pipeline.published == self._started_at
        directory = self._own.root / directory_name(number)
        try:
            tensors = {name: tensors[name] for name in mine}
            own = self._write(encoder, pipeline, tensors, directory, number)
            self._publisher.use(number)
        except BaseException:
            # What was encoded before this is still on its way; only this one is taken back.
            pipeline.settle(len(pipeline.outstanding()))
            encoder.undo()
            raise
        pipeline.queued(number, self._begin(lambda: self._deliver(pipeline, directory, number, step, own)))
        if self._thread is None or wait or first:
            self._settle(everything=True)
        return number

    def flush(self) -> None:
        """Wait for what is on its way; collective. Raises RanksFailed."""
        self._settle(everything=True)

    def finish(self) -> None:
        """Wait for what is on its way here, on this rank alone; see ``leaving``."""
        if self._pipeline is not None:
            self._pipeline.finish(f"of run {self._publisher.settings.run}")

    def lost(self) -> str | None:
        """Why a version is not published that no call has raised so far."""
        return None if self._pipeline is None else self._pipeline.lost(self._publisher.settings.run)

    def close(self) -> None:
        """Wait for what is on its way, say nothing of how it ends (``flush`` does), and end all threads."""
        leaving.forget(self)
        if self._thread is not None:
            self._thread.shutdown()
        self._publisher.close()

    def _started(
        self, names: list[list[str]], mine: list[str], number: int
    ) -> tuple[DeltaEncoder, Pipeline[None]]:
        """The encoder, made from the base when the first version is encoded."""
        if self._encoder is None or self._pipeline is None:
            what = f"encoding {directory_name(number)}"
            self._together(what, lambda: _check_names(self._boot, names))
            self._together(what, lambda: self._own.empty(keep=self._publisher.settings.keep_files))
            encoders: list[DeltaEncoder] = []  # not gathered: it holds the weights
            self._together(what, lambda: encoders.append(self._base(mine)))
            self._publisher.release_base()
            self._encoder = encoders[0]
            self._pipeline = Pipeline(self._encoder, self._started_at)
        return self._encoder, self._pipeline

    def _write(
        self,
        encoder: DeltaEncoder,
        pipeline: Pipeline[None],
        tensors: Mapping[str, Tensor],
        directory: Path,
        number: int,
    ) -> Own:
        """Encode into ``directory``; what this rank has written there."""
        what = f"encoding {directory_name(number)}"
        base, rank = pipeline.encoded, self._group.rank
        parts = self._together(what, lambda: write_part(encoder, tensors, directory, self._files, rank))
        self._together(what, lambda: self._index(parts, directory, number, base))
        if rank != 0:
            return Own(parts[rank].files)
        return Own((*parts[0].files, INDEX_NAME), state_digest(whole_table(parts)))

    def _begin(self, call: Callable[[], None]) -> Future[None]:
        if self._thread is not None:
            return self._thread.submit(call)
        future: Future[None] = Future()
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
        return future

    def _deliver(
        self, pipeline: Pipeline[None], directory: Path, number: int, step: int | None, own: Own
    ) -> None:
        group = self._publisher.behind or self._group
        try:
            with pipeline.turn(number):
                self._publisher.deliver(directory, number, group, step=step, own=own)
        except BaseException:
            with contextlib.suppress(OSError):  # it will not be published under this number
                self._files.remove_tree(directory)
            raise
        try:
            self._publisher.wait_for_fleet(number, group)
        except FleetLate as late:  # it is published: the base stays
            self._late[number] = late

    def _together(self, what: str, call: Callable[[], T]) -> list[T]:
        with self._telling():
            return together(self._group, what, call)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Where ranks fail and what is on its way fails as well, that is raised: it knows at what."""
        try:
            yield
        except RanksFailed as error:
            pipeline = self._pipeline
            earlier = None if pipeline is None else pipeline.settle(len(pipeline.outstanding()))
            if earlier is None:
                raise
            raise earlier from error

    def _settle(self, everything: bool) -> None:
        """Let the base follow what has ended, by the same versions on every rank; raise what failed."""
        pipeline = self._pipeline
        if pipeline is None or not pipeline.outstanding():
            return  # alike on every rank: all queue and settle the same versions

        def here() -> int:
            if everything:
                return len(pipeline.outstanding())
            pipeline.make_room(None)  # each call in a publish has its own deadline
            return pipeline.ended()

        count = 1 if self._thread is None else max(self._together("publishing behind the step", here))
        failure = pipeline.settle(count)
        late = [self._late.pop(number) for number in sorted(self._late) if number <= pipeline.published]
        for problem in (failure, *late):
            if problem is not None:
                raise problem

    def _share(self, names: list[list[str]]) -> list[str]:
        """The names of this rank that no rank before it has."""
        before = {name for other in names[: self._group.rank] for name in other}
        return [name for name in names[self._group.rank] if name not in before]

    def _base(self, mine: list[str]) -> DeltaEncoder:
        """An encoder of this rank's tensors, as the version is that the first delta builds on.

        Hosts may have different copies of it, and a copy may have changed since the claim: DeltaError.
        """
        encoding, proven = self._publisher.settings.encoding, self._publisher.proven.table
        with naming_host():
            return DeltaEncoder.from_checkpoint(self._boot, encoding, names=mine, proven=proven)

    def _index(self, parts: Sequence[Written], directory: Path, number: int, base: int) -> None:
        if self._group.rank == 0:
            encoding = self._publisher.settings.encoding
            write_whole_index(parts, encoding, directory, self._files, number=number, base_number=base)


def check_policy(group: TrainerGroup, boot: Path, files: Files, tensors: Mapping[str, Tensor]) -> None:
    """Whether the ranks together have the boot checkpoint's tensors, by name, dtype and shape; collective.

    For before a claim: what cannot be published is to fence no trainer. Raises RanksFailed.
    """
    names = together(group, "gathering the policy", lambda: sorted(tensors))

    def check() -> None:
        checkpoint = Checkpoint.open(boot, files)
        _check_names(checkpoint, names)
        refs = {name: checkpoint.tensors[name] for name in tensors}
        difference = layout_difference(
            {name: TensorInfo(ref.dtype, ref.shape, "") for name, ref in refs.items()},
            {name: TensorInfo(t.dtype, tuple(t.shape), "") for name, t in tensors.items()},
        )
        if difference is not None:
            raise DeltaError(f"what the trainer gathered is not laid out as version 0: {difference}")

    together(group, "comparing the policy with version 0", check)


def _check_names(boot: Checkpoint, names: list[list[str]]) -> None:
    found = {name for other in names for name in other}
    for name in sorted(found ^ set(boot.tensors)):
        word = "extra in" if name in found else "missing from"
        raise DeltaError(f"tensor {name} is {word} what the trainer gathered, compared with version 0")
