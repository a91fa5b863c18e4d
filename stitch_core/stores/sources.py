"""The bytes that ``Store.create`` is given, in memory or in a file, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from ..ports import Buffer, FileSource, StoreError

CHUNK = 8 * 2**20
"""Bytes that are held in memory at once when a file is copied."""


def source_size(source: Buffer | FileSource) -> int:
    """Bytes in the source, as declared."""
    return source.size if isinstance(source, FileSource) else memoryview(source).nbytes


def plain_bytes(view: memoryview) -> bytes:
    """Its bytes, for those who take nothing else; copied only where they are a part of more, or no bytes."""
    base = view.obj
    if isinstance(base, bytes) and len(base) == view.nbytes and view.c_contiguous:
        return base
    return bytes(view)


def source_chunks(source: Buffer | FileSource, chunk: int = CHUNK) -> Iterator[memoryview]:
    """The source's bytes in order, in pieces of at most ``chunk``. Blocking.

    Raises StoreError if the file cannot be read or does not have the declared size.
    """
    held = source.held if isinstance(source, FileSource) else source
    if held is not None:
        view = memoryview(held)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, len(flat), chunk):
            yield flat[start : start + chunk]
        return
    assert isinstance(source, FileSource)
    try:
        found = source.files.size(source.path)
        if found != source.size:
            raise StoreError(f"{source.path} has {found} bytes, {source.size} were announced")
        for start in range(0, found, chunk):
            data = source.files.read(source.path, start, min(chunk, found - start))
            if len(data) != min(chunk, found - start):
                raise StoreError(f"{source.path} shrank from {found} bytes while it was read")
            yield memoryview(data)
    except OSError as error:
        raise StoreError(f"{source.path} cannot be read: {error}") from error
