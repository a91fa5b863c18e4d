"""A version's files on their way into a store, each read back, and the manifest that then names them."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path

from .gathering import all_of
from .manifest import FormatError, Manifest, PayloadFile, Representation
from .payload import Payload
from .ports import Files, FileSource, RunBlocking, Store, StoreError, room_of
from .records import How
from .stores.transfer import file_digest, upload, verify

PARALLEL_UPLOADS = 16

HELD_BYTES = 4 * 2**20
"""Of a file that is read once, for its digest and for the store: 64 MiB of all that are on their way."""


NO_DIGEST = "sha256:" + "0" * 64
"""Of files that are only looked at."""


def representation_of(payload: Payload) -> Representation:
    """What a manifest says of the payload, without its files."""
    if payload.kind == "full":
        return Representation("full")
    changed = {} if payload.encoding == "sparse" else dict(payload.changed)
    return Representation("delta", (), payload.base, payload.encoding, changed)


async def upload_payload(
    store: Store, files: Files, manifest: Manifest, payload: Payload, how: How
) -> Manifest:
    """The manifest with its files, all of which are in the store and were read back.

    Raises StoreError, OSError; then none is on its way any more.
    """

    async def send(name: str) -> PayloadFile:
        source, sha256 = await how["run_blocking"](digested, files, payload.directory / name)
        await upload(store, manifest.file_key(name), source, sha256, **how)
        return PayloadFile(name, source.size, sha256)

    async def put(name: str) -> PayloadFile:
        return await check(await send(name))

    async def check(file: PayloadFile) -> PayloadFile:
        await verify(store, manifest.file_key(file.name), file.size, file.sha256, **how)
        return file

    calls = [functools.partial(put, name) for name in payload.files]
    calls += [functools.partial(check, file) for file in payload.uploaded]
    uploaded = tuple(await all_of(calls, PARALLEL_UPLOADS))
    return replace(manifest, representation=replace(manifest.representation, files=uploaded))


async def check_payload(
    store: Store, files: Files, manifest: Manifest, payload: Payload, run_blocking: RunBlocking
) -> None:
    """Whether the files can be read, are named as a manifest has them, and fit into the store.

    Raises StoreError, OSError, FormatError.
    """

    def look() -> tuple[PayloadFile, ...]:
        for name in payload.files:
            files.read(payload.directory / name, 0, 1)
        return tuple(
            PayloadFile(name, files.size(payload.directory / name), NO_DIGEST) for name in payload.files
        )

    found = await run_blocking(look)
    readable(replace(manifest, representation=replace(manifest.representation, files=found)))
    size, room = sum(file.size for file in found), await room_of(store)
    if room is not None and size > room:
        raise StoreError(f"its files have {size} bytes, and the store has room for {room}")


def digested(files: Files, path: Path) -> tuple[FileSource, str]:
    """A file to upload, and its SHA-256; a small one is kept in memory, so that it is read once. Blocking."""
    size = files.size(path)
    if size > HELD_BYTES:
        sha256 = file_digest(files, path, size)
        return FileSource(files, path, size, sha256), sha256
    data = files.read(path)
    sha256 = "sha256:" + hashlib.sha256(data).hexdigest()
    return FileSource(files, path, len(data), sha256, held=data), sha256


def readable(manifest: Manifest) -> bytes:
    """The manifest's bytes; FormatError if no reader would take them."""
    try:
        data = manifest.encode()
    except (TypeError, ValueError) as error:
        raise FormatError(f"its manifest cannot be written: {error}") from error
    Manifest.decode(data, manifest.key)
    return data
