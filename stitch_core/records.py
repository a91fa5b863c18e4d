"""Representations that stand beside the chain, each with a record: fulls, and spans of merged deltas.

    runs/<run>/fulls/000032.<digest>.json               a full of version 32, files below 000032.<digest>/
    runs/<run>/spans/000000-000016.<digest>/span.json  the deltas from 0 to 16 as one, files beside it

Anyone may write one, readers find them by listing, and nothing needs one. A record is named by its own
digest, is trusted because its states are those of versions on the chain, and is as create-only as all else.
Nothing in it tells when or by whom it was written: equal files have equal keys, whoever uploads them.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from .gathering import all_of
from .lineage import Sketch
from .manifest import (
    FormatError,
    PayloadFile,
    Representation,
    bytes_digest,
    canonical_json,
    read_count,
    read_document,
    read_representation,
    read_run,
    read_sha256,
    run_prefix,
)
from .ports import AlreadyExists, Entry, Files, FileSource, RunBlocking, Store
from .retry import Retry, retrying
from .stores.reading import load_named
from .stores.transfer import upload, verify
from .versions import PolicyVersion

FULL_FORMAT = "stitch.full/1"
SPAN_FORMAT = "stitch.span/1"
SPAN_FILE = "span.json"
PARALLEL_UPLOADS = 8

_FULL = re.compile(r"fulls/([0-9]{6,18})\.([0-9a-f]{64})(?:\.json|/([^/]+))\Z")
_SPAN = re.compile(r"spans/([0-9]{6,18})-([0-9]{6,18})\.([0-9a-f]{64})/([^/]+)\Z")


class RecordRefused(Exception):
    """A directory that cannot become a record: it does not hold what the record would say."""


@dataclass(frozen=True)
class Record:
    """A full of version ``number``, or with ``since`` a span of deltas from there to ``number``.

    ``state`` is that of version ``number``; a span's representation is a delta whose base is the state of
    version ``since``. See lineage.Source.
    """

    run: str
    number: int
    state: str
    representation: Representation
    since: int | None = None

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.run, self.number)

    @property
    def name(self) -> str:
        """Without its files' names, relative to the run."""
        digest = self.digest().removeprefix("sha256:")
        if self.since is None:
            return f"fulls/{self.number:06d}.{digest}"
        return f"spans/{self.since:06d}-{self.number:06d}.{digest}"

    @property
    def key(self) -> str:
        """Full key of the record's own document, which is written last."""
        return run_prefix(self.run) + self.name + (".json" if self.since is None else f"/{SPAN_FILE}")

    def file_key(self, name: str) -> str:
        """Full key of one of its files."""
        return f"{run_prefix(self.run)}{self.name}/{name}"

    def digest(self) -> str:
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        return bytes_digest(self.encode())

    def encode(self) -> bytes:
        value: dict[str, Any] = {
            "format": FULL_FORMAT if self.since is None else SPAN_FORMAT, "run": self.run,
            "number": self.number, "state": self.state, "representation": self.representation.to_json(),
        }  # fmt: skip
        return canonical_json(value if self.since is None else {**value, "since": self.since})

    @classmethod
    def decode(cls, data: bytes, *, span: bool, where: str = "record") -> Record:
        """Read and check a record; FormatError names ``where`` and the field."""
        value = read_document(data, SPAN_FORMAT if span else FULL_FORMAT, where)
        number = read_count(value.get("number"), f"{where}: number")
        since = read_count(value.get("since"), f"{where}: since") if span else None
        if since is not None and since >= number:
            raise FormatError(f"{where}: a span from {since} to {number}")
        how = read_representation(value.get("representation"), where)
        if how.kind != ("delta" if span else "full") or any(f.name == SPAN_FILE for f in how.files):
            raise FormatError(
                f"{where}: a full has a full's files, a span a delta's, none called {SPAN_FILE}"
            )
        state = read_sha256(value.get("state"), f"{where}: state")
        record = cls(read_run(value, where), number, state, how, since)
        if record.encode() != data:
            raise FormatError(f"{where}: has fields that its format does not have")
        return record


# ---------------------------------------------------------------------------------------------- finding


@dataclass(frozen=True)
class Place:
    """What a listing shows of a record: its files' ``sizes``, in bytes; no ``key`` without a document."""

    run: str
    since: int | None
    number: int
    digest: str
    key: str | None
    sizes: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def sketch(self, states: Mapping[int, str]) -> Sketch | None:
        """It as a source for a plan, if the versions that it says it is of are in ``states``, by number."""
        state = states.get(self.number)
        base = None if self.since is None else states.get(self.since)
        if state is None or self.key is None or (self.since is not None and base is None):
            return None
        version = PolicyVersion(self.run, self.number)
        if base is None:
            return Sketch.full(version, state, self.bytes, self.digest, self.key)
        return Sketch.delta(version, base, state, self.bytes, self.digest, self.key)


def place_of(relative: str) -> tuple[int | None, int, str, str | None] | None:
    """(since, number, hex digest, file or None for the document) of a key below its run; None for others."""
    if match := _FULL.match(relative):
        found = (None, int(match[1]), match[2], match[3])
        stem = f"fulls/{found[1]:06d}.{match[2]}"
        return found if relative in (f"{stem}.json", f"{stem}/{match[3]}") else None
    if match := _SPAN.match(relative):
        since, number, file = int(match[1]), int(match[2]), match[4]
        if relative != f"spans/{since:06d}-{number:06d}.{match[3]}/{file}":
            return None
        return since, number, match[3], None if file == SPAN_FILE else file
    return None


def places(run: str, entries: Iterable[Entry]) -> list[Place]:
    """The records in a listing of a run's keys, those without a document among them."""
    prefix = run_prefix(run)
    keys: dict[tuple[int | None, int, str], str | None] = {}
    sizes: dict[tuple[int | None, int, str], dict[str, int]] = {}
    for entry in entries:
        found = place_of(entry.key.removeprefix(prefix)) if entry.key.startswith(prefix) else None
        if found is None:
            continue
        since, number, digest, file = found
        at = (since, number, digest)
        keys.setdefault(at, None)
        if file is None:
            keys[at] = entry.key
        else:
            sizes.setdefault(at, {})[file] = entry.size
    return [Place(run, *at[:2], f"sha256:{at[2]}", key, sizes.get(at, {})) for at, key in keys.items()]


async def list_records(store: Store, run: str, kinds: Sequence[str] = ("fulls", "spans")) -> list[Place]:
    """Two listings (or one) of what stands beside the chain. Raises Unavailable."""
    listed = await asyncio.gather(*(store.list(f"{run_prefix(run)}{kind}/") for kind in kinds))
    return places(run, [entry for entries in listed for entry in entries])


async def read_record(store: Store, place: Place | Sketch) -> Record:
    """The record at a place. Raises NotFound, FormatError when it is not what its name says, Unavailable."""
    digest, key = (place.of, place.where) if isinstance(place, Sketch) else (place.digest, place.key)
    if key is None:
        raise FormatError(f"{place}: its files have no record yet")
    data, found = await load_named(store, key, digest)
    if found != digest:
        raise FormatError(f"{key} has digest {found}, not the one in its name")
    record = Record.decode(data, span=key.endswith(f"/{SPAN_FILE}"), where=key)
    if record.key != key:
        raise FormatError(f"{key} is the record of {record.name} of run {record.run}")
    return record


# --------------------------------------------------------------------------------------------- uploading


class How(TypedDict):
    """How to talk to the store; see stores.transfer."""

    policy: Retry
    rng: random.Random
    run_blocking: RunBlocking


async def upload_record(
    store: Store,
    record: Record,
    directory: Path,
    files: Files,
    how: How,
    check: Callable[[], None] = lambda: None,
    extra: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Upload the files of a record from ``directory``, read them back, and write its document last.

    Create-only, and found there is as good as written; ``check`` may object before the document. ``extra``
    are files that are not in the directory. Raises StoreError, AlreadyExists for other bytes.
    """

    async def put(file: PayloadFile) -> None:
        source = extra.get(file.name) or FileSource(files, directory / file.name, file.size, file.sha256)
        await upload(store, record.file_key(file.name), source, file.sha256, **how)
        await verify(store, record.file_key(file.name), file.size, file.sha256, **how)

    listed = record.representation.files
    await all_of([functools.partial(put, file) for file in listed], PARALLEL_UPLOADS)
    check()
    data = record.encode()

    async def create() -> None:
        try:
            await store.create(record.key, data)
        except AlreadyExists:
            if (await store.load(record.key)).data != data:
                raise

    await retrying(create, how["policy"], how["rng"])


def is_whole(record: Record, place: Place) -> bool:
    """Whether a listing shows every file of a record in its size."""
    return all(place.sizes.get(file.name) == file.size for file in record.representation.files)
