"""The calls of a store's directory that some mounts lack: refused in words, or borne and said once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from ..mounts import mount_kind
from ..ports import Files
from .probe import NO_DIRECTORY_SYNC, NO_LINKS, NO_LOCKS, NOT_THERE, Unsupported, error_text

logger = logging.getLogger("stitch")


class Mount:
    """``files`` under ``root``. Raises Unsupported for what is lacking, OSError for everything else."""

    def __init__(self, root: Path, files: Files) -> None:
        self.root, self._files = root, files
        self._said: set[str] = set()

    @property
    def advice(self) -> str:
        """What is to be said beside a refusal: nothing, but where the directory may be a bucket."""
        kind = mount_kind(self.root)
        if kind != "fuse" and not kind.startswith("fuse."):
            return ""
        return (
            f"; {self.root} is on a mount of kind {kind}: where that is a bucket (Mountpoint for S3, "
            "gcsfuse, s3fs), name the bucket itself as the store, s3://BUCKET/PREFIX, not this directory"
        )

    def link(self, source: Path, target: Path) -> None:
        """FileExistsError if ``target`` is there."""
        try:
            self._files.link(source, target)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise Unsupported(
                f"{self.root} was begun where hard links work, and here they do not ({error_text(error)}): "
                f"write from such a machine, or begin a new store here{self.advice}"
            ) from error

    def rename(self, source: Path, target: Path) -> None:
        """Replaces what is at ``target``."""
        try:
            self._files.rename(source, target)
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
            raise Unsupported(
                f"files cannot be renamed in {self.root} ({error_text(error)}), which a store needs: use "
                f"another directory, or a store of another kind{self.advice}"
            ) from error

    @contextlib.contextmanager
    def lock(self, path: Path, timeout: float) -> Iterator[None]:
        """TimeoutError after ``timeout`` seconds."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._files.lock(path, timeout))
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                raise Unsupported(
                    f"{self.root} has no file locks ({error_text(error)}), so it can be read from here and "
                    f"not written: use another directory, or a store of another kind{self.advice}"
                ) from error
            yield

    def sync_directory(self, path: Path) -> None:
        """Make a directory's entries durable, where the mount knows how to."""
        try:
            self._files.sync(path)
        except OSError as error:
            if error.errno not in NO_DIRECTORY_SYNC:
                raise
            self.say(
                f"{self.root} cannot sync directories ({error_text(error)}): the last writes may be lost "
                "when the machine that holds it loses power"
            )

    def say(self, text: str) -> None:
        """Once each."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)
