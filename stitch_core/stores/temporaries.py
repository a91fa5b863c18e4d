"""The files of a store's directory that are not objects yet: ``.stitch/tmp/<time>.<random>``."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from ..ports import Buffer, Clock, Files, FileSource
from .dated import date_of_new
from .sources import source_chunks

STALE_AFTER = 24 * 3600.0
"""Seconds since its last byte after which a temporary file is the leftover of a process that died."""


class Temporaries:
    """Those in ``directory``, which ``make`` makes, durably. From any thread. Raises OSError, StoreError."""

    def __init__(self, directory: Path, files: Files, clock: Clock, make: Callable[[Path], None]) -> None:
        self._directory, self._files, self._clock, self._make = directory, files, clock, make
        self._swept = False

    @contextlib.contextmanager
    def new(self, source: Buffer | FileSource) -> Iterator[Path]:
        """A synced file with the source's bytes, gone afterwards unless it was renamed."""
        path = self.unused()
        try:
            self._files.write_new(path, b"")
            self._sweep(path)
            offset = 0
            for chunk in source_chunks(source):
                self._files.write_at(path, offset, chunk)
                offset += len(chunk)
            self._files.sync(path)
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(path)

    def unused(self) -> Path:
        """A name in the directory, which is there, of nobody else's."""
        self._make(self._directory)
        return self._directory / f"{int(self._clock.time())}.{secrets.token_hex(8)}"

    def date_of_new(self) -> float:
        """What a file is dated that is made now."""
        return date_of_new(self._files, self.unused())

    def _sweep(self, new: Path) -> None:
        """Once: remove the leftovers. How old they are shows one that is new, since clocks may be wrong."""
        if self._swept:
            return
        self._swept = True
        now = os.stat(new).st_mtime
        for name in self._files.list(self._directory):
            # Another store may be sweeping, or the file be another user's.
            with contextlib.suppress(OSError):
                written = os.stat(self._directory / name).st_mtime
                if name.partition(".")[0].isdecimal() and written < now - STALE_AFTER:
                    self._files.remove(self._directory / name)
