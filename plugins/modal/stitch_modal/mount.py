"""A Volume as this container mounts it: a copy of what was committed, as of the last reload.

While a reload or a commit runs the mount looks empty, and both fail while any process of the container has a
file or its working directory below it. So every use of the mount is counted, no file is kept open after a
call, and a reload or a commit waits until this process has none, then tries again, with growing pauses, while
others have one. All of it is blocking and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from stitch_core.ports import Buffer, Clock, FileSource, Unavailable
from stitch_core.stores.sources import source_chunks

from .errors import translate

T = TypeVar("T")
logger = logging.getLogger("stitch")

DEADLINE = 120.0
"""Seconds that a reload or a commit may wait for files to be closed."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
LONGEST_GATHERING = 2.0
VANISHED = 16


class Gate:
    """Any number of users, or one alone. Who waits to be alone holds up new users, so it comes to be."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._waiting = 0
        self._alone = False

    @contextlib.contextmanager
    def using(self, timeout: float) -> Iterator[None]:
        """TimeoutError after ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._alone or self._waiting), timeout):
                raise TimeoutError
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        """TimeoutError after ``timeout`` seconds."""
        with self._changed:
            self._waiting += 1
            try:
                if not self._changed.wait_for(lambda: not (self._alone or self._users), timeout):
                    raise TimeoutError
                self._alone = True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class Mount:
    """The mount at ``path``, one for all stores of a process. ``volume`` is the process's only handle."""

    def __init__(
        self,
        path: str,
        volume: Any,
        *,
        deadline: float = DEADLINE,
        rng: random.Random | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path = path
        self._volume, self._deadline = volume, deadline
        self._rng, self._monotonic, self._sleep = rng or random.Random(), monotonic, sleep
        self._gate = Gate()
        self._reloaded = -float("inf")
        self._commits = threading.Condition()
        self._committing = False
        self._begun = self._done = 0
        self._failed: BaseException | None = None
        self._writers = self._joined = 0
        self._took = 0.0  # seconds of the last commit: what a gathering may take

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keeps reloads and commits of this process away. Not to be held while waiting for anything."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._gate.using(self._deadline))
            except TimeoutError:
                raise Unavailable(
                    f"{self.path}: a reload or commit has not ended for {self._deadline:g} s"
                ) from None
            yield

    def reload(self, max_age: float) -> None:
        """See at least what had been committed ``max_age`` seconds ago."""
        wanted = self._monotonic() - max_age

        def reload() -> None:
            if self._reloaded < wanted or self.looks_empty():
                began = self._monotonic()
                self._volume.reload()
                self._reloaded = began

        if self._reloaded < wanted or self.looks_empty():
            self._alone(f"reloading {self.path}", reload)

    def looks_empty(self) -> bool:
        """Also while another process of this container reloads; then a reload waits for it."""
        with os.scandir(self.path) as rows:
            return next(rows, None) is None

    def commit(self) -> None:
        """Make durable, and visible to later reloads, all that was written before the call.

        Calls that meet share one commit.
        """
        with self._commits:
            self._joined += 1
            self._commits.notify_all()
            try:
                mine = self._begun + 1  # the next to begin has all that is there now
                while self._committing and self._done < mine:
                    self._commits.wait(1.0)
                if self._done < mine:
                    self._committing = True
                    self._lead(mine)
                elif self._failed is not None:
                    raise Unavailable(f"committing {self.path}: {self._failed}") from self._failed
            finally:
                self._joined -= 1

    def _lead(self, mine: int) -> None:
        """Commit for all that have joined, or soon will; called, and left, with ``_commits`` held."""
        self._commits.wait_for(lambda: self._writers <= self._joined, min(self._took, LONGEST_GATHERING))
        self._commits.release()
        began, failed = self._monotonic(), None
        try:
            self._alone(f"committing {self.path}", self._commit)
        except BaseException as error:
            failed = error
            raise
        finally:
            self._commits.acquire()
            self._took = self._monotonic() - began
            self._begun = max(self._begun, mine)
            self._committing, self._done, self._failed = False, self._begun, failed
            self._commits.notify_all()

    def _commit(self) -> None:
        with self._commits:
            self._begun += 1
        self._volume.commit()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what will end in a commit: one that is about to begin waits a moment for it to join."""
        with self._commits:
            self._writers += 1
        try:
            yield
        finally:
            with self._commits:
                self._writers -= 1
                self._commits.notify_all()

    def _alone(self, what: str, operation: Callable[[], Any]) -> None:
        """Run it with no use of the mount by this process; again while another process has a file open."""
        until, pause = self._monotonic() + self._deadline, FIRST_PAUSE
        while True:
            try:
                with self._gate.alone(max(until - self._monotonic(), 0.0)):
                    operation()
                return
            except TimeoutError:
                raise Unavailable(
                    f"{what}: this process has used the mount for {self._deadline:g} s on end"
                ) from None
            except RuntimeError as error:  # how the SDK says that files are open, or that commits conflict
                delay = pause * self._rng.uniform(0.5, 1.0)
                if self._monotonic() + delay > until:
                    raise Unavailable(
                        f"{what}: {error}; close what is open below it in any process of this container: log "
                        "files, databases, memory maps, working directories"
                    ) from error
            except Exception as error:
                told = translate(error, what)
                if told is None:
                    raise
                raise told from error
            self._sleep(delay)
            pause = min(pause * 2, LONGEST_PAUSE)


class MountedFiles:
    """Files below ``below`` on a mount, by paths relative to it. Raises OSError and StoreError."""

    def __init__(self, mount: Mount, below: str) -> None:
        self._mount = mount
        self.root = os.path.join(mount.path, below)

    def refresh(self, max_age: float) -> None:
        self._mount.reload(max_age)

    def commit(self) -> None:
        self._mount.commit()

    def writing(self) -> AbstractContextManager[None]:
        return self._mount.writing()

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self._mount.using(), open(self._at(path), "rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def size(self, path: str) -> int | None:
        """Bytes in a file, None where there is none."""
        with self._mount.using():
            at = self._at(path)
            try:
                return os.stat(at).st_size if os.path.isfile(at) else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def modified(self, path: str) -> float:
        with self._mount.using():
            return os.stat(self._at(path)).st_mtime

    def date_of_new(self, temporary: str, clock: Clock) -> float:
        """What a file that is made now will be dated: by this container, whatever the others' clocks say."""
        return clock.time()

    def names(self, folder: str) -> list[tuple[str, bool]]:
        """What is in a directory, and whether each is a directory; nothing where there is none."""
        try:
            with self._mount.using(), os.scandir(self._at(folder)) as rows:
                # Not followed, as in a walk: a link may lead round in a circle, and Stitch makes none.
                return sorted((row.name, row.is_dir(follow_symlinks=False)) for row in rows)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def walk(self, folder: str) -> list[tuple[str, int]]:
        """Path and size of every file below a directory."""
        found = self._walk(folder)
        if self._mount.looks_empty():  # while another process reloads, or in truth
            self._mount.reload(0.0)
            found = self._walk(folder)
        return found

    def _walk(self, folder: str) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        with self._mount.using():
            for directory, _, names in os.walk(self._at(folder)):
                for name in names:
                    at = os.path.join(directory, name)
                    try:
                        found.append((os.path.relpath(at, self.root), os.stat(at).st_size))
                    except FileNotFoundError:
                        pass
                    except OSError as error:
                        if error.errno != errno.ELOOP:
                            raise
                        logger.warning("%s is a loop of symbolic links: it is no object", at)
        return found

    def write(self, path: str, source: Buffer | FileSource) -> None:
        """A file that nobody looks at before it is moved; none is left when this fails."""
        at = self._at(path)
        with self._mount.using():
            try:
                with self._into(at, lambda: open(at, "wb")) as file:
                    for chunk in source_chunks(source):
                        file.write(chunk)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(at)
                raise

    def move(self, source: str, target: str) -> None:
        """Whole, or not at all; replaces what is there."""
        with self._mount.using():
            here, there = self._at(source), self._at(target)
            with contextlib.suppress(OSError):
                os.rmdir(there)  # a directory that a delete left empty, elsewhere
            if not os.path.exists(here):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), here)
            self._into(there, lambda: os.replace(here, there))

    def put(self, path: str, data: bytes, temporary: str) -> None:
        """A small file, whole or not at all; ``temporary`` is a path of nobody else's."""
        self.write(temporary, data)
        self.move(temporary, path)

    def remove(self, path: str) -> None:
        """Also the directories that it leaves empty; a file that is not there is fine."""
        with self._mount.using():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self._at(path))
            folder = os.path.dirname(path)
            while folder and not folder.startswith(".stitch"):
                try:
                    os.rmdir(self._at(folder))
                except OSError:  # not empty, or gone
                    return
                folder = os.path.dirname(folder)

    def _into(self, at: str, operation: Callable[[], T]) -> T:
        """In a directory that others may remove while it is empty."""
        for _ in range(VANISHED):
            os.makedirs(os.path.dirname(at), exist_ok=True)
            try:
                return operation()
            except FileNotFoundError:
                continue
        return operation()

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path)
