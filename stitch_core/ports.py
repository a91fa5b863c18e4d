"""The interfaces at which Stitch meets the world: Store, Files, Engine, Pool, Clock.

Protocol code takes these as arguments and never asks which instance it got. Store, Engine and Pool are
async; a blocking backend runs its calls through an executor of its own. Files is synchronous, because
the host checkpoint and the codecs are, and every one of its calls is a point where a process can die.
"""

from __future__ import annotations

import builtins
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview


class Clock(Protocol):
    """Wall time for records, monotonic time for ages and deadlines, both in seconds.

    Sleeping is asyncio's own: the simulator's event loop runs on the same virtual time.
    """

    def time(self) -> float: ...
    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class RunBlocking(Protocol):
    """Runs a blocking call off the event loop; ``asyncio.to_thread`` is one."""

    async def __call__(self, function: Callable[..., T], /, *args: Any) -> T: ...


# ---------------------------------------------------------------------------------------------- files

FileMarks = Mapping[str, tuple[int, ...]]
"""``Files.mark`` of a directory, under the name "", and of everything in it."""


class Files(Protocol):
    """The file operations of one machine. Paths are absolute.

    What was written is seen by every later call at once, survives the death of the process, and survives
    the death of the machine only after ``sync``. Raises OSError as the standard library does.
    """

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes ``[offset, offset + length)``, all without ``length``; short at the end of the file."""
        ...

    def read_into(self, path: Path, offset: int, out: memoryview) -> int:
        """Fill ``out``, flat and writable, from ``offset`` on; how many bytes, fewer at the file's end."""
        ...

    def size(self, path: Path) -> int:
        """Bytes in a file; IsADirectoryError for a directory."""
        ...

    def exists(self, path: Path) -> bool: ...

    def list(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def mark(self, path: Path) -> tuple[int, ...]:
        """Numbers that differ once a file or directory, or a symbolic link on the way to it, was changed or
        replaced, also by what was there before; FileNotFoundError.

        They are those of stat(2): device, inode, size, times of the last change. A change within the same
        tick of the file system's clock as the one before may not show.
        """
        ...

    def write_new(self, path: Path, data: Buffer) -> None:
        """Create a file; FileExistsError if there is one. A failure may leave a part of it."""
        ...

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        """Overwrite (or extend, if ``offset`` is at the end of) an existing file."""
        ...

    def sync(self, path: Path) -> None:
        """Make a file's bytes, or a directory's entries, durable."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces a file at ``target``."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Hard link; FileExistsError if ``target`` exists, whoever made it."""
        ...

    def symlink(self, target: str, path: Path) -> None: ...
    def make_dirs(self, path: Path) -> None: ...
    def remove(self, path: Path) -> None: ...

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all below it; a path that is not there is fine.

        Symbolic links are removed, never followed.
        """
        ...

    def free_bytes(self, path: Path) -> int: ...

    def lock(self, path: Path, timeout: float) -> AbstractContextManager[None]:
        """Hold an exclusive lock between processes; TimeoutError after ``timeout`` seconds.

        The lock ends with the process that holds it.
        """
        ...


def write_atomic(files: Files, path: Path, data: Buffer, *, nonce: str = "") -> None:
    """Write or replace a small file so that a crash leaves the old or the new one, whole."""
    temporary = path.with_name(f".{path.name}{nonce}.tmp")
    with contextlib.suppress(FileNotFoundError):
        files.remove(temporary)
    files.write_new(temporary, data)
    files.sync(temporary)
    files.rename(temporary, path)
    files.sync(path.parent)


# ---------------------------------------------------------------------------------------------- store


class StoreError(Exception):
    """A store call failed."""


class NotFound(StoreError):
    """There is no object under the key."""


class NoStore(NotFound):
    """There is no store where the URL points, not even an empty one: mistyped, not mounted, or not begun."""


class AlreadyExists(StoreError):
    """A create-only write met an object under its key, with whatever bytes."""


class Conflict(StoreError):
    """A conditional write met another object than it expected."""


class WriteRefused(StoreError):
    """Nothing was written, and another try will not help: read-only, full, or not permitted."""


class Unavailable(StoreError):
    """No answer, or a failure. For a write the outcome is UNKNOWN: it may have landed, or land later."""


@dataclass(frozen=True)
class Blob:
    """A small object and the opaque tag that ``swap`` compares.

    Objects of different bytes have different tags. Equal bytes may have equal tags (S3's are content
    digests), so an object that goes from A to B and back may look untouched: put a nonce into the bytes
    where that matters.
    """

    data: bytes
    tag: str


@dataclass(frozen=True)
class Entry:
    """One row of a listing."""

    key: str
    size: int


@dataclass(frozen=True)
class FileSource:
    """Bytes for ``Store.create`` that lie in a file.

    ``sha256`` (``sha256:<hex>``): what they are known to be; a store that checks what it is sent compares.
    ``progress`` gets the number of bytes of each step, from any thread; a store may leave it alone.
    ``held``: all of them, where they were read already; then the file is not read again.
    """

    files: Files
    path: Path
    size: int
    sha256: str | None = None
    progress: Callable[[int], None] | None = field(default=None, compare=False)
    held: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Capabilities:
    """What a store can do.

    ``conditional_writes``: of any number of writers that meet at one ``create`` or ``swap``, one wins. For
    ``create`` and ``swap`` of heads, channels and pins that may rest on a lock service. A store without it
    still reads, compares and then writes, so that writers who come one after the other are told, but two
    that meet may both be told that they won, and the later one's bytes stay. Such a store must let every
    reader see one of the two, whole, ``visible_after`` seconds later, and the same one from then on: by
    reading back then, a writer whose bytes carry a nonce finds out that it lost. The publisher does so, and
    claims a run there only for a caller who vouches that it writes alone.
    ``visible_after``: seconds until a finished write is seen by every reader.
    ``digests``: the store is a DigestingStore.
    """

    conditional_writes: bool = True
    visible_after: float = 0.0
    digests: bool = False


class Store(Protocol):
    """Objects by key.

    A key is of segments of A-Z a-z 0-9 . _ - ~ joined by '/', none of them empty, starting with '.' or
    longer than 200 characters, 800 in all; ``stitch_core.stores.keys`` checks it and raises BadKey. With an
    object ``a/b`` there, ``a`` is nobody's object: a store may refuse it.

    Every call may raise Unavailable. A write that returned is durable.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def load(self, key: str) -> Blob:
        """A whole small object with its tag; NotFound."""
        ...

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """A byte range, short or empty at the end of the object; NotFound."""
        ...

    async def size(self, key: str) -> int:
        """Bytes in the object; NotFound."""
        ...

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        """Create-only write, all or nothing; AlreadyExists whatever the bytes there are.

        StoreError if a FileSource cannot be read or has another size than announced.
        """
        ...

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        """Compare-and-swap: replaces the object with tag ``expected`` (None: no object); the new tag.

        Raises Conflict, and then nothing was written. See ``Capabilities`` for stores that cannot.
        """
        ...

    async def replace(self, key: str, data: bytes) -> None:
        """Unconditional small write, for hints that nothing is decided by."""
        ...

    async def list(self, prefix: str) -> list[Entry]:
        """Objects whose key starts with ``prefix``, sorted by key. Never used to find a head.

        A prefix is text, not a directory: ``a/1`` lists ``a/10`` too, ``a/1/`` does not.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove an object; one that is not there is fine."""
        ...

    async def close(self) -> None: ...


class DigestingStore(Store, Protocol):
    """A store that digests what it takes in, so that a read-back need not move the bytes again."""

    async def digest(self, key: str) -> tuple[int, str | None]:
        """Bytes in the object, and the ``sha256:<hex>`` that the store itself found when it took them in.

        None where this object's is not known: then only reading tells. Raises NotFound.
        """
        ...


@dataclass(frozen=True)
class Stamp:
    """When an object was written and what time it is now, in wall seconds of the store's own clock.

    ``now`` is None where the store does not tell the time, such as a directory that cannot be written.
    """

    written: float
    now: float | None

    @property
    def age(self) -> float | None:
        """Seconds since it was written."""
        return None if self.now is None else self.now - self.written


class BrowsableStore(Store, Protocol):
    """A store that tells more. ``folders`` is for people's tools; by ``stamp`` alone collectors tell ages."""

    async def folders(self, prefix: str) -> builtins.list[str] | None:
        """Names between ``prefix``, which ends with '/', and the next '/'; None where it cannot."""
        ...

    async def stamp(self, key: str) -> Stamp | None:
        """When an object was written; None where it does not tell. NotFound."""
        ...


async def stamp_of(store: Store, key: str) -> Stamp | None:
    """As BrowsableStore.stamp; None where the store is none."""
    ask = getattr(store, "stamp", None)
    return None if ask is None else await ask(key)


async def time_of(store: Store, key: str, clock: Clock) -> float:
    """What time it is by the clock that dates ``key``; by ``clock`` where the store dates nothing.

    So a host whose clock is wrong holds other hosts' dates against the store's time. Raises NotFound, and
    StoreError where the store dates objects and does not tell the time.
    """
    stamp = await stamp_of(store, key)
    if stamp is None:
        return clock.time()
    if stamp.now is None:
        raise StoreError(
            f"{key}: the store does not tell what time it is, so nothing tells how old its objects are (a "
            "directory tells by a file that is written there: is it writable from here?)"
        )
    return stamp.now


async def room_of(store: Store) -> int | None:
    """Bytes that can still be written, of a store that has ``room``; None where it does not tell."""
    ask = getattr(store, "room", None)
    return None if ask is None else await ask()


# --------------------------------------------------------------------------------------------- engine

KVMode = Literal["in_place", "retract"]


class EngineError(Exception):
    """An engine call failed."""


class EngineRefused(EngineError):
    """The engine did not do it and is as it was before the call."""


class EngineUncertain(EngineError):
    """The engine's weights can no longer be known: this replica must be replaced."""


class EngineReplaced(EngineError):
    """Another instance answers than the one that ``Engine.identity`` told of last."""


@dataclass(frozen=True)
class EngineIdentity:
    """``instance`` changes when the engine process does; ``label`` is the version it stamps on tokens now.

    ``boot_marks``: of the boot checkpoint (``checkpoint.marks_of``), taken in this process before the engine
    began to load it. None where that was not seen: what an engine says of itself proves nothing about its
    weights, and all of them are copied before it serves a version.
    """

    instance: str
    label: str
    boot_marks: FileMarks | None = None


@dataclass(frozen=True)
class ProbeAnswer:
    """``logprobs``: of each token of the engine's fixed prompt but the first, by the live weights.

    ``signature``: opaque; another one where equal weights may give other numbers, as under another release,
    number format or division among devices.
    """

    logprobs: tuple[float, ...]
    signature: str


@dataclass(frozen=True)
class EngineBounds:
    """Seconds within which an engine's calls end whatever happens: more than all that they wait for inside.

    ``call``: ``identity``, ``pause``, ``resume`` and ``abort``, each. ``prepare`` None: it may take as long
    as it gets on, and ends by itself with EngineError if it does not.
    """

    call: float
    activate: float
    prepare: float | None


class Engine(Protocol):
    """One inference engine, driven by one reconciler. The label is opaque to the engine.

    Between ``pause`` and ``resume`` the engine generates nothing. ``prepare`` runs while it serves. An engine
    that knows how long its calls take at most says so in an attribute ``bounds``, an EngineBounds; calls of
    one without are given up after what ``ActivationSettings`` say.
    """

    async def identity(self) -> EngineIdentity:
        """Raises EngineError when the engine does not answer."""
        ...

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        """Read and check the named tensors of an HF checkpoint directory, all that activation will copy.

        May be called again: the last call counts. EngineRefused leaves the engine as it was.
        """
        ...

    async def pause(self, mode: KVMode) -> None:
        """Stop at a token boundary; ``retract`` drops the KV of what runs, ``in_place`` keeps it."""
        ...

    async def activate(self, label: str) -> None:
        """Copy what was prepared (possibly nothing) and stamp ``label`` on every later token.

        Raises EngineRefused if nothing was changed, EngineUncertain if anything may have been.
        """
        ...

    async def resume(self) -> None:
        """End the pause; without one it does nothing."""
        ...

    async def abort(self, request_id: str) -> None:
        """End the request; one that is not there is fine."""
        ...

    async def probe(self) -> ProbeAnswer | None:
        """What the live weights make of a fixed prompt, computed anew: no cache may answer it.

        A request like others, that waits its turn, also several at once; it waits in a pause. None where this
        engine cannot tell. Raises EngineError without an answer.
        """
        ...


# ----------------------------------------------------------------------------------------------- pool


@dataclass(frozen=True)
class ReplicaAddress:
    """Where a replica answers. ``record`` is its last announcement, if the pool has one; a hint.

    ``headers`` go with every request to it: where many replicas have one URL, they say which; they may be
    secret.
    """

    id: str
    url: str
    record: dict[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class Pool(Protocol):
    """The replicas that may be there now. Membership is a hint: the gateway probes what it is told."""

    async def replicas(self, doubted: Collection[str] = ()) -> Sequence[ReplicaAddress]:
        """``doubted``: ids that do not answer where they were last; of those nothing is told from memory."""
        ...

    async def close(self) -> None: ...


# ------------------------------------------------------------------------------------- trainer's group


class TrainerGroup(Protocol):
    """The processes of one trainer. Every process makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def gather(self, value: T) -> list[T]:
        """Every process's (picklable) value, in the order of ranks, in every process.

        Raises when a process is gone, as the framework's group does.
        """
        ...

    def twin(self) -> TrainerGroup:
        """Another group of the same processes, for what a thread of its own does in all of them.

        Every process calls this, at the same time.
        """
        ...
