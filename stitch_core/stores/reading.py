"""A store whose word for an object's digest is not taken: it was true when the object was written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from ..ports import Capabilities, Store


def reading(store: Store) -> Store:
    """``store``, of which whoever checks an object has to read it."""
    return cast(Store, _Reading(store))


class _Reading:
    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._store.capabilities, digests=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
