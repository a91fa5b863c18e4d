"""Deleting from a local store: no empty directories are left, creates that race are none the worse."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stitch_core.files import PosixFiles
from stitch_core.ports import StoreError
from stitch_core.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", PosixFiles())


async def test_directories_that_become_empty_are_removed(store: LocalStore) -> None:
    for key in ("runs/r/e0001/weight_v000001/x", "runs/r/e0001/weight_v000002/x", "runs/r/head"):
        await store.create(key, b"1")
    await store.delete("runs/r/e0001/weight_v000001/x")
    assert sorted(path.name for path in (store.root / "runs/r/e0001").iterdir()) == ["weight_v000002"]
    await store.delete("runs/r/e0001/weight_v000002/x")
    assert sorted(path.name for path in (store.root / "runs/r").iterdir()) == ["head"]
    await store.delete("runs/r/head")
    assert [path.name for path in store.root.iterdir()] == [".stitch"]
    await store.create("runs/r/e0001/weight_v000001/x", b"2")
    assert (await store.load("runs/r/e0001/weight_v000001/x")).data == b"2"
    await store.close()


async def test_creates_and_deletes_in_one_directory_at_once(store: LocalStore) -> None:
    """Another store object removes the directory between its making and the link into it.

    Or between the removal of an object and the sync of its directory: that delete was Unavailable.
    """
    other = LocalStore(store.root, PosixFiles())

    async def churn(one: LocalStore, name: str) -> None:
        for i in range(40):
            await one.create(f"a/b/{name}", b"%d" % i)
            assert (await one.load(f"a/b/{name}")).data == b"%d" % i
            await one.delete(f"a/b/{name}")

    await asyncio.gather(*(churn(store if i % 2 else other, f"x{i}") for i in range(4)))
    assert [path.name for path in store.root.iterdir()] == [".stitch"]
    await store.close()
    await other.close()


async def test_nothing_behind_a_symbolic_link_is_deleted(store: LocalStore, tmp_path: Path) -> None:
    await store.create("runs/r/a", b"1")
    away = tmp_path / "away"
    away.mkdir()
    (away / "x").write_bytes(b"precious")
    (store.root / "runs/r/e0001").symlink_to(away)
    (store.root / "runs/r/link").symlink_to(away / "x")
    with pytest.raises(StoreError, match="e0001 is a symbolic link"):
        await store.delete("runs/r/e0001/x")
    await store.delete("runs/r/link")
    assert not (store.root / "runs/r/link").is_symlink()
    assert (away / "x").read_bytes() == b"precious"
    await store.close()
