"""How a version's files get into a store: a small file is read once, whatever happens to it afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from pathlib import Path

import pytest

from stitch_core.files import PosixFiles
from stitch_core.manifest import Manifest, Representation
from stitch_core.payload import Payload
from stitch_core.ports import Buffer, FileSource, Unavailable
from stitch_core.retry import Retry
from stitch_core.stores.memory import MemoryStore
from stitch_core.stores.sources import plain_bytes, source_chunks
from stitch_core.stores.transfer import DigestMismatch
from stitch_core.uploading import HELD_BYTES, upload_payload

STATE = "sha256:" + "1" * 64


class CountedFiles(PosixFiles):
    def __init__(self) -> None:
        self.bytes_read: Counter[str] = Counter()

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(path, offset, length)
        self.bytes_read[path.name] += len(data)
        return data


async def published(store: MemoryStore, files: PosixFiles, directory: Path, *names: str) -> Manifest:
    manifest = Manifest("run", 1, 1, STATE, Representation("full"))
    return await upload_payload(
        store, files, manifest, Payload("full", STATE, directory, names),
        {"policy": Retry(attempts=3, first=0.0), "rng": random.Random(0), "run_blocking": asyncio.to_thread},
    )  # fmt: skip


async def test_small_files_are_read_once_and_large_ones_twice(tmp_path: Path) -> None:
    store, files = MemoryStore(), CountedFiles()
    sizes = {"empty": 0, "small": 1000, "limit": HELD_BYTES, "large": HELD_BYTES + 1}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(random.Random(name).randbytes(size))
    made = await published(store, files, tmp_path, *sizes)
    assert files.bytes_read == {"empty": 0, "small": 1000, "limit": HELD_BYTES, "large": 2 * HELD_BYTES + 2}
    for file in made.representation.files:
        data = (tmp_path / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(data), "sha256:" + hashlib.sha256(data).hexdigest())
        assert (await store.load(made.file_key(file.name))).data == data


async def test_what_was_digested_is_what_is_sent_although_the_file_changed_since(tmp_path: Path) -> None:
    """Also at a second try: the manifest's digest is of the bytes in the store."""
    tries: list[bytes] = []

    class Busy(MemoryStore):
        async def create(self, key: str, source: Buffer | FileSource) -> None:
            (tmp_path / "f").write_bytes(b"after")
            tries.append(b"".join(source_chunks(source)))
            if len(tries) == 1:
                raise Unavailable("busy")
            await super().create(key, source)

    (tmp_path / "f").write_bytes(b"before")
    store = Busy()
    made = await published(store, PosixFiles(), tmp_path, "f")
    assert tries == [b"before", b"before"]
    assert (await store.load(made.file_key("f"))).data == b"before"


async def test_a_store_that_keeps_other_bytes_is_found_out(tmp_path: Path) -> None:
    class Wrong(MemoryStore):
        async def create(self, key: str, source: Buffer | FileSource) -> None:
            await super().create(key, b"other")

    (tmp_path / "f").write_bytes(b"bytes")
    with pytest.raises(DigestMismatch):
        await published(Wrong(), PosixFiles(), tmp_path, "f")


def test_bytes_are_copied_only_where_they_are_a_part_of_more() -> None:
    data = b"abc"
    assert plain_bytes(memoryview(data)) is data
    assert plain_bytes(memoryview(data)[1:]) == b"bc"
    assert plain_bytes(memoryview(data)[::-1]) == b"cba"
    assert plain_bytes(memoryview(bytearray(data))) == data
    assert plain_bytes(memoryview(b"")) == b""
