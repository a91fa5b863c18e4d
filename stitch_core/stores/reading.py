"""Reading what a digest names, so that neither the store's word for it nor one bad read decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from ..manifest import bytes_digest
from ..ports import Capabilities, Store


async def load_named(store: Store, key: str, digest: str) -> tuple[bytes, str]:
    """A small object and the digest of its bytes, loaded again if that is not ``digest``.

    One bad read is no damage: other bytes than those named come back only if both loads gave such. Raises
    NotFound, Unavailable.
    """
    data = (await store.load(key)).data
    found = bytes_digest(data)
    if found != digest:
        data = (await store.load(key)).data
        found = bytes_digest(data)
    return data, found


def reading(store: Store) -> Store:
    """``store``, of which whoever checks an object has to read it.

    The digest that a store tells was true when the object was written.
    """
    return cast(Store, _Reading(store))


class _Reading:
    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._store.capabilities, digests=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
