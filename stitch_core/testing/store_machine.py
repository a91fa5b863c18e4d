"""A hypothesis state machine that compares any store with a dict.

TestMine = store_machine(make).TestCase    # make() is a context manager that gives an empty store
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ..ports import AlreadyExists, Conflict, Entry, NotFound, Store

T = TypeVar("T")

# Few, so that rules meet; with common beginnings, so that listings can go wrong.
KEYS = ("head", "a/1", "a/10", "a/1.x/y", "a/1.x/z", "a.b/c", "~t/0")
PREFIXES = ("", "a", "a/", "a/1", "a/1.x/", "a.", "head", "head/", "z")

keys = st.sampled_from(KEYS)
payloads = st.sampled_from((b"", b"0", b"1", b"22" * 500)) | st.binary(max_size=64)


class StoreMachine(RuleBasedStateMachine):
    """The rules; ``store_machine`` adds the store."""

    make: Callable[[], AbstractContextManager[Store]]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.context = type(self).make()
        self.store = self.context.__enter__()
        self.model: dict[str, bytes] = {}
        self.tags: dict[str, dict[str, bytes]] = {key: {} for key in KEYS}

    def teardown(self) -> None:
        try:
            self.run(self.store.close())
            self.context.__exit__(None, None, None)
        finally:
            self.runner.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def fails(self, error: type[Exception], call: Coroutine[Any, Any, Any]) -> None:
        try:
            result = self.run(call)
        except error:
            return
        raise AssertionError(f"expected {error.__name__}, got {result!r}")

    def current_tag(self, key: str) -> str | None:
        return self.run(self.store.load(key)).tag if key in self.model else None

    @rule(key=keys, data=payloads)
    def create(self, key: str, data: bytes) -> None:
        if key in self.model:
            self.fails(AlreadyExists, self.store.create(key, data))
        else:
            self.run(self.store.create(key, data))
            self.model[key] = data

    @rule(key=keys, data=payloads)
    def swap(self, key: str, data: bytes) -> None:
        tag = self.run(self.store.swap(key, self.current_tag(key), data))
        self.model[key] = data
        self.tags[key][tag] = data

    @rule(key=keys, data=payloads, pick=st.data())
    def swap_with_an_old_tag(self, key: str, data: bytes, pick: st.DataObject) -> None:
        # Tags of equal bytes may be equal: only those of other bytes must be refused.
        old = sorted(tag for tag, of in self.tags[key].items() if of != self.model.get(key))
        if old:
            self.fails(Conflict, self.store.swap(key, pick.draw(st.sampled_from(old)), data))

    @precondition(lambda self: self.model)
    @rule(data=payloads, pick=st.data())
    def swap_as_if_absent(self, data: bytes, pick: st.DataObject) -> None:
        key = pick.draw(st.sampled_from(sorted(self.model)))
        self.fails(Conflict, self.store.swap(key, None, data))

    @rule(key=keys, data=payloads)
    def replace(self, key: str, data: bytes) -> None:
        self.run(self.store.replace(key, data))
        self.model[key] = data

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.run(self.store.delete(key))
        self.model.pop(key, None)

    @rule(key=keys, start=st.integers(0, 1100), length=st.none() | st.integers(0, 1100))
    def read(self, key: str, start: int, length: int | None) -> None:
        if key not in self.model:
            self.fails(NotFound, self.store.read(key, start, length))
            return
        rest = self.model[key][start:]
        assert self.run(self.store.read(key, start, length)) == (rest if length is None else rest[:length])

    @rule(prefix=st.sampled_from(PREFIXES))
    def list(self, prefix: str) -> None:
        found = sorted((key, len(data)) for key, data in self.model.items() if key.startswith(prefix))
        assert self.run(self.store.list(prefix)) == [Entry(*row) for row in found]

    @invariant()
    def same_objects(self) -> None:
        for key in KEYS:
            if key in self.model:
                assert self.run(self.store.load(key)).data == self.model[key]
                assert self.run(self.store.size(key)) == len(self.model[key])
            else:
                self.fails(NotFound, self.store.load(key))


def store_machine(make: Callable[[], AbstractContextManager[Store]]) -> type[StoreMachine]:
    """The machine for the stores that ``make`` gives; its ``TestCase`` is what pytest collects."""
    return type("StoreMachine", (StoreMachine,), {"make": staticmethod(make)})
