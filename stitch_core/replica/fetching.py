"""The files of a plan from a store to this host: many at a time, through the host's cache if there is one."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..gathering import all_of
from ..ports import Files, RunBlocking, Store
from ..stores.cache import DigestCache
from ..stores.transfer import download

FETCH_THREADS = 4
"""That hash and write: one does about 1 GB/s."""

PARALLEL_FETCHES = 16
"""Files at a time; the process's room for transfers bounds the memory."""


PATIENCE = 120.0
"""Seconds for which nothing arrives, after which what other processes fetch is fetched here as well."""

LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Wanted:
    """An object, where it is to lie, its bytes and ``sha256:<hex>``."""

    key: str
    path: Path
    size: int
    sha256: str


class Fetcher:
    """Downloads for one replica; ``run_blocking`` does the writing and hashing. Owned by one task."""

    def __init__(
        self,
        store: Store,
        files: Files,
        run_blocking: RunBlocking,
        rng: random.Random,
        *,
        cache: DigestCache | None = None,
        progress: Callable[[int], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
        patience: float = PATIENCE,
    ) -> None:
        """``progress`` gets the number of bytes of each step; ``say`` is told what the cache cannot do.

        ``patience``: seconds, see PATIENCE.
        """
        self.cache, self._patience = cache, patience
        self._store, self._files, self._run_blocking, self._rng = store, files, run_blocking, rng
        self._progress, self._say = progress, say

    async def fetch(
        self,
        wanted: Sequence[Wanted],
        failed: Callable[[Wanted, Exception], None] = lambda wanted, error: None,
    ) -> None:
        """All files, whole, verified and durable, or an error: ``failed`` is told first whose it is.

        What was whole by then stays. Raises as ``download`` does.
        """

        async def one(file: Wanted) -> None:
            try:
                await self._file(file)
            except Exception as error:
                failed(file, error)
                raise

        async def these(files: Iterable[Wanted]) -> None:
            calls: list[Callable[[], Awaitable[None]]] = [functools.partial(one, file) for file in files]
            await all_of(calls, PARALLEL_FETCHES)

        if self.cache is None:
            await these(wanted)
            return
        complete = False
        try:
            await self._shared(self.cache, wanted, these)
            complete = True
        finally:
            await self._run_blocking(lambda cache: cache.done(needed=complete), self.cache)
            problem, self.cache.problem = self.cache.problem, None
            if problem is not None:
                self._say(problem)

    async def _shared(
        self,
        cache: DigestCache,
        wanted: Sequence[Wanted],
        fetch: Callable[[Iterable[Wanted]], Awaitable[None]],
    ) -> None:
        """``fetch`` all; last, and from the cache, what other processes of this host are fetching just now.

        What they do not bring, because they fail, die or take too long, is fetched here in the end.
        """
        sizes = {file.sha256: file.size for file in wanted}
        coming = await self._run_blocking(cache.begin, sizes)
        await fetch([file for file in wanted if file.sha256 not in coming])
        left, quiet = [file for file in wanted if file.sha256 in coming], 0.0
        while left and quiet < self._patience:
            await asyncio.sleep(LOOK_SECONDS)
            quiet += LOOK_SECONDS
            coming = await self._run_blocking(cache.coming)
            ended = [file for file in left if file.sha256 not in coming]
            if ended:
                left, quiet = [file for file in left if file.sha256 in coming], 0.0
                await self._run_blocking(cache.begin, sizes)  # room for what was not brought
                await fetch(ended)
        await fetch(left)

    async def _file(self, file: Wanted) -> None:
        cache, blocking = self.cache, self._run_blocking
        if cache is not None and not await blocking(self._files.exists, file.path):
            await blocking(self._files.make_dirs, file.path.parent)
            if await blocking(cache.take, file.sha256, file.size, file.path):
                if self._progress is not None:
                    self._progress(file.size)
                return
        await download(
            self._store, file.key, self._files, file.path, file.size, file.sha256,
            run_blocking=blocking, rng=self._rng, progress=self._progress,
        )  # fmt: skip
        if cache is not None:
            await blocking(cache.put, file.sha256, file.path)
