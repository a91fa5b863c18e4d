"""Makes one span: the cheapest reversible pieces between two versions, fetched, verified, merged, uploaded.

Which spans there ought to be is the compactor's to say. Pieces that are not what they say are excluded for
good; verified files stay below ``work``, since the next span is often made of them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .chain import ChainReader
from .delta.fold import RepresentationInvalid
from .delta.merge import merge_deltas
from .delta.transcode import in_encoding
from .doubts import Doubts
from .lineage import REVERSIBLE, NoPlan, Plan, Source
from .manifest import Manifest, PayloadFile, Representation, Row
from .planner import Planner
from .ports import Clock, Files, NotFound, RunBlocking, Store
from .records import How, Record, upload_record
from .replica.fetching import Fetcher, Wanted
from .retry import Retry, retrying
from .spans import Range
from .stores.transfer import DigestMismatch, file_digest
from .versions import PolicyVersion


class EncodingChanges(NoPlan):
    """Deltas of two encodings: the last of the older one leads to version ``at``."""

    def __init__(self, at: PolicyVersion) -> None:
        super().__init__(f"the encoding of deltas changes after {at}, and only --base tells their widths")
        self.at = at.number


class SpanMaker:
    """Makes spans of one run, in scratch space of its own below ``work``.

    ``excluded``: digests of what can be no piece; ``doubts``: of what was not as recorded when it was read.
    ``widths``: see Compactor.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        work: Path,
        chain: ChainReader,
        *,
        files: Files,
        clock: Clock,
        rng: random.Random,
        run_blocking: RunBlocking,
        policy: Retry,
        widths: Mapping[str, int] | None,
    ) -> None:
        self._store, self._run, self._work, self._files = store, run, work, files
        self._rng, self._run_blocking, self._policy, self._widths = rng, run_blocking, policy, widths
        self._planner = Planner(store, chain, piece_cost=0)
        self._fetcher = Fetcher(store, files, run_blocking, rng)
        self._local: dict[str, tuple[Path, int]] = {}  # verified files by a source's digest, and its version
        self.excluded: set[str] = set()
        self.doubts = Doubts(clock, rng)

    async def plan(
        self, target: Manifest, rows: Collection[Row], sources: dict[str, Source], start: str
    ) -> Plan:
        """The cheapest pieces from state ``start`` to ``target``, read and found reversible.

        Raises NoPlan, and as ``Doubts.around``.
        """

        async def without(avoided: set[str]) -> Plan:
            return await retrying(
                lambda: self._planner.read(target, rows, sources, {start}, self.excluded | avoided),
                self._policy, self._rng,
            )  # fmt: skip

        while True:
            plan = await self.doubts.around(without)
            unfit = [s for s in plan.sources if s.representation.encoding not in REVERSIBLE]
            if not unfit:
                if self._widths is None:
                    _check_one_encoding(plan)
                return plan
            self.excluded.update(source.digest() for source in unfit)

    async def merge(self, range: Range, plan: Plan) -> tuple[Record, Path]:
        """The record of the merged delta, and where its files lie.

        Raises NotFound and RepresentationInvalid, which exclude a piece, DigestMismatch and DeltaError.
        """
        directories = await self._fetch(plan.deltas)
        try:
            return await self._run_blocking(self._merge, range, plan, directories)
        except RepresentationInvalid as error:
            self.excluded.add(error.manifest_digest)
            raise

    async def upload(self, record: Record, directory: Path) -> None:
        """Raises AlreadyExists, DigestMismatch where something else is under its name."""
        how: How = {"policy": self._policy, "rng": self._rng, "run_blocking": self._run_blocking}
        await upload_record(self._store, record, directory, self._files, how)
        self._local[record.digest()] = directory, record.number

    async def forget(self, newest: Range) -> None:
        """Remove files here that no span above the aggregate ``newest`` is made of."""
        for digest, (path, number) in list(self._local.items()):
            made_here = path.name.startswith("span-")
            if not made_here or (number <= newest[1] and path != self._span(newest)):
                del self._local[digest]
                await self._run_blocking(self._files.remove_tree, path)

    def _span(self, range: Range) -> Path:
        return self._work / f"span-{range[0]}-{range[1]}"

    async def _fetch(self, sources: Sequence[Source]) -> dict[str, Path]:
        """Verified files of each, by its digest; those that this process made or has fetched are here."""
        wanted: dict[Wanted, Source] = {}
        for source in sources:
            digest = source.digest()
            if digest in self._local:
                continue
            directory = self._work / digest.removeprefix("sha256:")[:24]
            await self._run_blocking(self._files.make_dirs, directory)
            for file in source.representation.files:
                key = source.file_key(file.name)
                wanted[Wanted(key, directory / file.name, file.size, file.sha256)] = source

        def failed(file: Wanted, error: Exception) -> None:
            digest = wanted[file].digest()
            if isinstance(error, DigestMismatch):
                self.doubts.add(digest, error)
            elif isinstance(error, NotFound):
                self.excluded.add(digest)

        await self._fetcher.fetch(list(wanted), failed)
        self.doubts.settle(source.digest() for source in sources)
        for here, source in wanted.items():
            self._local[source.digest()] = here.path.parent, source.version.number
        return {source.digest(): self._local[source.digest()][0] for source in sources}

    def _merge(self, range: Range, plan: Plan, directories: Mapping[str, Path]) -> tuple[Record, Path]:
        """Blocking: the record of the merged delta, and where its files lie."""
        a, b = range
        path = self._span(range)
        self._files.remove_tree(path)
        deltas, where = list(plan.deltas), dict(directories)
        if self._widths is not None:
            deltas, where = in_encoding("sparse", plan.deltas, directories, self._files, self._widths)
        merged = merge_deltas(
            deltas, lambda delta: where[delta.digest()], path, self._files, number=b, base_number=a
        )
        encoding = deltas[0].representation.encoding
        listed = []
        for name in merged.files:
            size = self._files.size(path / name)
            listed.append(PayloadFile(name, size, file_digest(self._files, path / name, size)))
        assert plan.base is not None
        changed = {} if encoding == "sparse" else dict(merged.changed)
        how = Representation("delta", tuple(listed), plan.base, encoding, changed)
        return Record(self._run, b, plan.target.state, how, a), path


def _check_one_encoding(plan: Plan) -> None:
    newest = plan.deltas[-1].representation.encoding
    others = [delta.version for delta in plan.deltas if delta.representation.encoding != newest]
    if others:
        raise EncodingChanges(others[-1])
