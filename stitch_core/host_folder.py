"""What lies in the directory of a host's copy beside the weights: lock, marker, data directories, links.

It knows how each is written so that a crash leaves the old or the new one, and nothing of what they mean.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from .host_checks import HostCheckpointError
from .host_data import make_durable_dirs
from .host_marker import Marker
from .ports import Files, write_atomic
from .safetensors import CheckpointError
from .versions import directory_name

_LINK = re.compile(r"weight_v[0-9]{6,}\Z")


class HostFolder:
    """The directory ``root``. Every call may raise OSError."""

    def __init__(self, root: Path, files: Files, nonce: Callable[[], str]) -> None:
        """``nonce`` gives what tells one data directory from the last."""
        self.root = root
        self._files = files
        self._nonce = nonce
        self._lock: contextlib.ExitStack | None = None

    @property
    def locked(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None

    def lock(self) -> None:
        """Make the directory and take its lock, if it is not taken yet.

        HostCheckpointError if another process has it.
        """
        if self._lock is not None:
            return
        make_durable_dirs(self._files, self.root)
        lock = contextlib.ExitStack()
        try:
            lock.enter_context(self._files.lock(self.root / "lock", 0.0))
        except TimeoutError:
            raise HostCheckpointError(f"{self.root} is in use by another process") from None
        self._lock = lock

    def unlock(self) -> None:
        """Give the lock back; twice is fine."""
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def marker(self) -> Marker | None:
        """The marker, None if there is none; CheckpointError if it is damaged."""
        path = self.root / "marker.json"
        return Marker.decode(self._files.read(path), str(path)) if self._files.exists(path) else None

    def write_marker(self, marker: Marker) -> None:
        write_atomic(self._files, self.root / "marker.json", marker.encode())

    @contextlib.contextmanager
    def new_data(self) -> Iterator[Path]:
        """A new data directory, removed again on failure unless the marker names it by then."""
        data = self.root / f"data-{self._nonce()}"
        self._files.make_dirs(data)
        try:
            yield data
        except Exception:
            marker = None
            with contextlib.suppress(CheckpointError):
                marker = self.marker()
            if marker is None or marker.data != data.name:
                self._files.remove_tree(data)
            raise

    def link(self, number: int, data: str) -> None:
        """Show the data directory of that name as version ``number``, and as no other."""
        link = self.root / directory_name(number)
        temporary = self.root / ".link.tmp"
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(temporary)
        self._files.symlink(data, temporary)
        self._files.rename(temporary, link)
        self._remove_links(keep=link.name)

    def unlink(self) -> None:
        """Show no version."""
        self._remove_links(keep=None)

    def clean(self, keep: str | None) -> None:
        """Remove data directories but ``keep``, and what a crash left of small files."""
        for name in self._files.list(self.root):
            if name.startswith("data-") and name != keep:
                self._files.remove_tree(self.root / name)
            elif name.startswith(".") and name.endswith(".tmp"):
                self._files.remove(self.root / name)

    def _remove_links(self, keep: str | None) -> None:
        for name in self._files.list(self.root):
            if _LINK.match(name) and name != keep:
                self._files.remove(self.root / name)
