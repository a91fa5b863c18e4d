"""Fulls beside the chain: a checkpoint on this host becomes one, unless a sound one of the version is there.

What is in the store is create-only. So where a full turns out to be damaged, another is put beside it, under
another name; see ``as_copy``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .checkpoint import Checkpoint
from .gathering import all_of
from .host_data import files_of
from .lineage import Source
from .manifest import FormatError, Manifest, PayloadFile, Representation, Row, bytes_digest, run_prefix
from .ports import AlreadyExists, Files, NotFound, RunBlocking, Store
from .records import (
    PARALLEL_UPLOADS,
    SPAN_FILE,
    How,
    Place,
    Record,
    RecordRefused,
    is_whole,
    list_records,
    read_record,
    upload_record,
)
from .retry import Retry, retrying
from .stores.keys import is_key
from .stores.reading import reading
from .stores.transfer import DigestMismatch, file_digest, verify

COPY_FILE = "stitch-copy.txt"
COPIES = 8
"""How many fulls of one version there may be, all but the last damaged."""


@dataclass
class Damage:
    """Fulls that do not count: what is wrong with each, by the digest that is its name.

    ``told`` is called once for each, with a sentence that names the object. ``keys`` are those of the
    documents, as far as they were listed.
    """

    told: Callable[[str], None] = lambda _: None
    problems: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def add(self, digest: str, problem: str) -> None:
        if digest not in self.problems:
            self.problems[digest] = problem
            self.told(problem)


async def find_full(
    store: Store,
    version: Manifest | Row,
    run: str,
    *,
    how: How,
    damage: Damage | None = None,
    read_back: bool = False,
) -> Record | None:
    """A full record of a version that is there with all its files, by their sizes, or ``read_back``.

    What ``damage`` knows does not count, and what is found out is added to it.
    """
    damage = damage or Damage()
    found = await retrying(lambda: list_records(store, run, ("fulls",)), how["policy"], how["rng"])
    for place in found:
        if place.number != version.number or place.key is None:
            continue
        if place.digest not in damage.problems:
            try:
                record = await retrying(functools.partial(_sound, store, place), how["policy"], how["rng"])
                if record is not None and record.state == version.state and is_whole(record, place):
                    if read_back:
                        await read_files(store, record, how)
                    return record
            except DigestMismatch as error:
                damage.add(place.digest, str(error))
            except NotFound:
                continue  # collected since it was listed
        if place.digest in damage.problems:
            damage.keys[place.digest] = place.key
    return None


async def _sound(store: Store, place: Place) -> Record | None:
    """The record at a place; None for what this release cannot read. DigestMismatch: it is damaged."""
    assert place.key is not None
    try:
        record = await read_record(store, place)
    except FormatError:
        digest = bytes_digest((await store.load(place.key)).data)
        if digest != place.digest:
            raise DigestMismatch(place.key, place.digest, digest) from None
        return None
    for file in record.representation.files:
        size = place.sizes.get(file.name, file.size)
        if size != file.size:
            raise DigestMismatch(record.file_key(file.name), f"{file.size} bytes", f"{size} bytes")
    return record


async def read_files(store: Store, source: Source, how: How) -> None:
    """Read a full's files, whatever the store itself says of them. Raises DigestMismatch, NotFound."""
    calls = [
        functools.partial(verify, reading(store), source.file_key(file.name), file.size, file.sha256, **how)
        for file in source.representation.files
    ]
    await all_of(calls, PARALLEL_UPLOADS)


async def upload_full(
    store: Store,
    manifest: Manifest,
    directory: Path,
    files: Files,
    *,
    rng: random.Random,
    run_blocking: RunBlocking,
    policy: Retry | None = None,
    say: Callable[[str], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    damage: Damage | None = None,
) -> tuple[Record, bool]:
    """Make the checkpoint in ``directory`` a full record of a version on the chain; (record, whether new).

    The directory is hashed first: nothing is uploaded unless its state is the version's, and nothing if the
    store has a full of the version. One that is in ``damage``, or is found to be damaged, does not count:
    another is put beside it. The directory must not change meanwhile: the read-back would fail, and
    ``check``, which is asked before the document is written, may raise. Raises RecordRefused,
    CheckpointError, StoreError, OSError.
    """
    how: How = {"policy": policy or Retry(), "rng": rng, "run_blocking": run_blocking}
    damage = Damage(say) if damage is None else damage
    if manifest.representation.kind == "full" and manifest.digest() not in damage.problems:
        raise RecordRefused(f"{manifest.version} is a full already")
    found = await find_full(store, manifest, manifest.run, how=how, damage=damage)
    if found is not None:
        return found, False
    say(f"hashing {directory}")
    first = await run_blocking(describe_full, manifest, directory, files)
    say(f"uploading {len(first.representation.files)} files of {manifest.version}")
    for copy in range(COPIES):
        record, extra = as_copy(first, copy)
        if record.digest() in damage.problems:
            continue
        try:
            await upload_record(store, record, directory, files, how, check, extra)
            return record, True
        except AlreadyExists as error:
            damage.add(record.digest(), str(error))
    raise RecordRefused(
        f"{COPIES} fulls of {manifest.version} are there, and all are damaged: find out what damages the "
        f"store, and delete {run_prefix(manifest.run)}fulls/{manifest.number:06d}.*"
    )


def as_copy(record: Record, copy: int) -> tuple[Record, dict[str, bytes]]:
    """A full under another name, for where one of this name is damaged, and the file that makes it another.

    A name is the digest of what it names and is never written twice, so a sound full needs other contents:
    one more file, which nobody reads, with the number of the copy.
    """
    if copy == 0:
        return record, {}
    data = f"{copy}\n".encode()
    listed = [*record.representation.files, PayloadFile(COPY_FILE, len(data), bytes_digest(data))]
    how = replace(record.representation, files=tuple(sorted(listed, key=lambda file: file.name)))
    return replace(record, representation=how), {COPY_FILE: data}


def describe_full(manifest: Manifest, directory: Path, files: Files) -> Record:
    """The record that ``directory`` would be of ``manifest``. Raises RecordRefused, CheckpointError."""
    checkpoint = Checkpoint.open(directory, files)
    state = checkpoint.state()
    if state != manifest.state:
        raise RecordRefused(
            f"{directory} is not {manifest.version}: its state is {state}, expected {manifest.state}; a "
            "trainer's export may be a step off, or of another dtype"
        )
    weights, ours = set(checkpoint.weight_files), (SPAN_FILE, COPY_FILE)
    listed = []
    for name in files_of(checkpoint):
        if name not in weights and (name in ours or not is_key(name)):
            continue
        size = files.size(directory / name)
        listed.append(PayloadFile(name, size, file_digest(files, directory / name, size)))
    how = Representation("full", tuple(listed))
    record = Record(manifest.run, manifest.number, manifest.state, how)
    return Record.decode(
        record.encode(), span=False, where=record.key
    )  # what no reader takes is refused here
