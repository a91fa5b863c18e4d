"""Bytes are verified before use: what is wrong in the store is named, not loaded, and costs no serving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.host_checkpoint import RepresentationInvalid
from stitch_core.lineage import NoPlan
from stitch_core.manifest import Manifest
from stitch_core.ports import NotFound
from stitch_core.publisher import Payload
from stitch_core.replica.staging import NoRoom
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.stores.transfer import DigestMismatch
from stitch_core.testing.checkpoints import random_tensors, table_of, write_checkpoint
from tests.replica.following import Following
from tests.small_run import FILES, Tensors

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def f(tmp_path: Path) -> Following:
    """A replica that serves version 1."""
    following = Following(tmp_path)
    await following.publish()
    await following.catch_up()
    return following


def object_of(f: Following, manifest: Manifest, suffix: str = ".safetensors") -> str:
    file = next(file for file in manifest.representation.files if file.name.endswith(suffix))
    return manifest.file_key(file.name)


def flip(f: Following, key: str) -> None:
    data = bytearray(f.memory.state.objects[key])
    data[-1] ^= 1
    f.memory.state.objects[key] = bytes(data)


async def refused(f: Following, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        await f.reconciler.reconcile()
    f.check(f.versions[1])


@pytest.mark.parametrize("full", [True, False], ids=["full", "delta"])
async def test_c09_one_flipped_byte(f: Following, full: bool) -> None:
    """Caught and not loaded. It is fetched again after delays that grow, and the next full is taken first."""
    manifest = await (f.publish_full() if full else f.publish())
    key = object_of(f, manifest)
    flip(f, key)
    fetched = []
    for _ in range(40):
        f.store.calls.clear()
        await refused(f, DigestMismatch, key)
        fetched.append(("read", key) in f.store.calls)
        await asyncio.sleep(1.0)
    assert fetched[:2] == [True, True]
    assert 3 <= sum(fetched) <= 8
    await f.publish()
    await refused(f, DigestMismatch, key)
    newest = await f.publish_full()
    await f.catch_up()
    f.check(newest)


BAD_READS: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "short": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("bad", BAD_READS.values(), ids=BAD_READS)
@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("full", [True, False], ids=["full", "delta"])
async def test_c73_bad_reads_of_a_sound_store_only_delay(
    f: Following, bad: Callable[[bytes], bytes], times: int, full: bool
) -> None:
    """They excluded the only way to the version for the life of the process."""
    manifest = await (f.publish_full() if full else f.publish())
    key, left = object_of(f, manifest), [times]
    read = f.memory.read

    async def badly(asked: str, start: int = 0, length: int | None = None) -> bytes:
        data = await read(asked, start, length)
        if asked != key or not data or not left[0]:
            return data
        left[0] -= 1
        return bad(data)

    f.memory.read = badly  # type: ignore[method-assign]
    for _ in range(10):
        with contextlib.suppress(DigestMismatch):
            await f.reconciler.reconcile()
        await asyncio.sleep(1.0)
    assert left == [0]
    f.check(manifest)


async def test_c73_one_bad_read_of_the_boot_checkpoint_is_no_other_checkpoint(tmp_path: Path) -> None:
    """A replica ended because its base was taken for another."""
    f = Following(tmp_path)
    manifest = await f.publish()
    stager = f.reconciler._stager
    boot = await stager.boot()
    name = next(iter(boot.table))
    stager._read = replace(boot, table={**boot.table, name: replace(boot.table[name], digest="0" * 32)})
    await f.catch_up()
    f.check(manifest)


async def test_c73_what_is_wrong_by_its_own_record_is_read_twice_and_no_more(f: Following) -> None:
    await f.publish_full(replace(f.trainer.full(), state="sha256:" + "1" * 64))
    for _ in range(2):
        await refused(f, RepresentationInvalid, "r/weight_v000002")
    f.store.calls.clear()
    await refused(f, NoPlan, "r/weight_v000002")
    assert {name for name, _ in f.store.calls} == {"load", "list"}


async def test_c08_other_bytes_of_the_same_size(f: Following) -> None:
    """A store that was written behind our back: never served under the version's name."""
    manifest = await f.publish()
    key = object_of(f, manifest)
    f.memory.state.objects[key] = bytes(len(f.memory.state.objects[key]))
    await refused(f, DigestMismatch, "expected sha256")


async def test_c14_a_shard_that_is_absent_or_cut_short(f: Following) -> None:
    manifest = await f.publish_full()
    key = object_of(f, manifest)
    data = f.memory.state.objects.pop(key)
    await refused(f, NotFound, key)
    f.memory.state.objects[key] = data[:-1]
    await refused(f, DigestMismatch, f"expected {len(data)} bytes, got {len(data) - 1}")


async def test_a_version_that_does_not_fit_is_refused_with_numbers(f: Following) -> None:
    """Before anything is fetched; served as soon as there is room."""
    manifest = await f.publish_full()
    stager = f.reconciler._stager
    f.store.calls.clear()
    stager._room = lambda path: 1000
    await refused(
        f, NoRoom, r"r/weight_v000002 takes up to .* GiB \(\d{4,} bytes\) at .*\(1000 bytes\) are free"
    )
    assert not [key for name, key in f.store.calls if name == "load" and key.endswith(".safetensors")]
    stager._room = FILES.free_bytes
    await f.catch_up()
    f.check(manifest)


async def test_a_404_costs_one_backoff_only(f: Following) -> None:
    manifest = await f.publish()
    key = object_of(f, manifest)
    data = f.memory.state.objects.pop(key)
    await refused(f, NotFound, key)
    f.memory.state.objects[key] = data
    await f.catch_up()
    f.check(manifest)


def changed(tensors: Tensors, **changes: Any) -> Tensors:
    return {name: t for name, t in {**tensors, **changes}.items() if t is not None}


RNG = np.random.default_rng(3)
EXTRA = random_tensors(RNG, {"extra": ("F32", (2,))})["extra"]
OTHER_DTYPE = random_tensors(RNG, {"b": ("BF16", (10,))})["b"]
OTHER_SHAPE = random_tensors(RNG, {"b": ("F32", (1, 5))})["b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, "tensor b is missing"),
        ({"extra": EXTRA}, "tensor extra is extra"),
        ({"b": OTHER_DTYPE}, "tensor b has dtype BF16, expected F32"),
        ({"b": OTHER_SHAPE}, r"tensor b has shape \[1, 5\], expected \[5\]"),
    ],
    ids=["missing", "extra", "dtype", "shape"],
)
async def test_c14_a_full_of_another_layout(
    f: Following, change: dict[str, Tensor | None], message: str
) -> None:
    """Its digests are right, and it is another model."""
    tensors = changed(f.trainer.learn(), **change)
    directory = f.root / "other"
    write_checkpoint(directory, FILES, tensors, 2)
    payload = Payload("full", state_digest(table_of(tensors)), directory, tuple(FILES.list(directory)))
    await f.publish_full(payload)
    for _ in range(2):
        await refused(f, RepresentationInvalid, message)
    await refused(f, NoPlan, "r/weight_v000002")


async def test_c14_a_full_that_is_not_what_its_manifest_says(f: Following) -> None:
    await f.publish_full(replace(f.trainer.full(), state="sha256:" + "1" * 64))
    await refused(f, RepresentationInvalid, r"its files hold state sha256:.*, not sha256:1111")


async def test_c14_a_full_whose_index_names_an_absent_shard(f: Following) -> None:
    payload = f.trainer.full()
    shard = "model-00001-of-00002.safetensors"
    await f.publish_full(replace(payload, files=tuple(name for name in payload.files if name != shard)))
    await refused(f, RepresentationInvalid, f"{shard}: named by the index, but not there")


async def test_a_full_without_an_index(f: Following) -> None:
    payload = f.trainer.full()
    index = "model.safetensors.index.json"
    full = await f.publish_full(replace(payload, files=tuple(n for n in payload.files if n != index)))
    await f.catch_up()
    f.check(full)


Lie = Callable[[Payload], dict[str, Any]]


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda p: {"state": "sha256:" + "1" * 64}, "lead to sha256:.*, not to sha256:1111"),
        (lambda p: {"changed": {}}, "has a payload, but the manifest does not say that it changes"),
        (lambda p: {"changed": {**p.changed, "z": ("0" * 32, "1" * 32)}}, "has no payload"),
        (lambda p: {"encoding": "overwrite"}, "its index says xor, its manifest overwrite"),
        (
            lambda p: {"changed": {n: (old, "0" * 32) for n, (old, _) in p.changed.items()}},
            "by its shard, 00000000000000000000000000000000 by the manifest",
        ),
        (
            lambda p: {"changed": {n: ("0" * 32, new) for n, (_, new) in p.changed.items()}},
            "must be 00000000000000000000000000000000 before it",
        ),
    ],
    ids=["state", "c01 no change said", "no payload", "encoding", "new digest", "old digest"],
)
async def test_a_delta_that_is_not_what_its_manifest_says(f: Following, lie: Lie, message: str) -> None:
    """Found before a byte of the host's copy is changed; the copy goes on from where it was."""
    assert f.publisher is not None
    payload = f.trainer.delta(2)
    await f.publisher.publish(replace(payload, **lie(payload)))
    await refused(f, RepresentationInvalid, message)
    assert f.host.holding is not None
    assert f.host.holding.state == f.versions[1].state


# ------------------------------------------------------------------------------------------------- plans


async def test_c10_older_deltas_were_pruned(f: Following) -> None:
    """A replica below the pruned part takes the full; it never applies to the wrong base."""
    for _ in range(2):
        await f.publish()
    full = await f.publish_full()
    newest = await f.publish()
    for manifest in f.versions[2:4]:
        for file in manifest.representation.files:
            del f.memory.state.objects[manifest.file_key(file.name)]
    f.store.calls.clear()
    await f.catch_up()
    f.check(newest)
    read = {key for name, key in f.store.calls if name == "read"}
    assert read == {m.file_key(file.name) for m in (full, newest) for file in m.representation.files}


async def test_c10_pruned_and_no_full(f: Following) -> None:
    for _ in range(2):
        await f.publish()
    key = object_of(f, f.versions[2])
    del f.memory.state.objects[key]
    await refused(f, NotFound, key)


async def test_a_replica_that_is_ahead_of_a_full_takes_deltas_from_it(f: Following) -> None:
    """It holds the full's weights already: only the delta is fetched."""
    await f.publish_full()
    await f.catch_up()
    newest = await f.publish()
    f.store.calls.clear()
    await f.catch_up()
    f.check(newest)
    assert all("weight_v000003" in key for name, key in f.store.calls if name == "read")


async def test_a_delta_that_builds_on_an_older_version(f: Following) -> None:
    """A replica that holds the version in between goes back to the one that it is built on."""
    await f.publish()
    await f.catch_up()
    f.trainer.resume(f.versions[1].state)
    newest = await f.publish()
    assert newest.representation.base == f.versions[1].state
    assert newest.history[0].number == 2
    await f.catch_up()
    f.check(newest)


async def test_back_to_weights_that_the_chain_had_before(f: Following) -> None:
    """Two versions of one state: the replica that holds it only relabels, another takes the shorter way."""
    await f.publish()
    f.trainer.resume(f.versions[2].state)
    f.trainer.learn = lambda *_: f.trainer.weights[f.versions[1].state]  # type: ignore[method-assign]
    again = await f.publish()
    assert again.state == f.versions[1].state
    f.store.calls.clear()
    await f.catch_up()
    f.check(again)
    assert not [key for name, key in f.store.calls if name == "read"]


async def test_a_damaged_host_checkpoint_is_made_again(f: Following) -> None:
    newest = await f.publish("a")
    damaged = Checkpoint.open(f.host.directory, FILES).tensors["a"]
    FILES.write_at(damaged.file, damaged.offset, b"\xff" * damaged.nbytes)
    async with f.running():
        await f.serves(newest)
    assert "its data is damaged: tensor a" in f.said[0]


async def test_downloads_that_were_verified_are_used_again(f: Following) -> None:
    """The second file of a version fails: the first one is not fetched twice."""
    full = await f.publish_full()
    shards = [m.file_key(file.name) for m in (full,) for file in m.representation.files]
    data = f.memory.state.objects.pop(shards[-1])
    await refused(f, NotFound, shards[-1])
    assert (f.host.root / "fetch").exists()
    f.memory.state.objects[shards[-1]] = data
    f.store.calls.clear()
    await f.catch_up()
    f.check(full)
    assert {key for name, key in f.store.calls if name == "read"} == {shards[-1]}
    assert not (f.host.root / "fetch").exists()


async def test_what_is_being_fetched_is_announced(f: Following) -> None:
    newest = await f.publish()
    seen: list[Any] = []

    def fail(index: int, name: str, key: str) -> None:
        if name == "read":
            seen.append(f.reconciler.record("id", "http://x", 15.0)["fetching"])

    f.store.fail = fail
    await f.catch_up()
    assert seen[0] == [newest.digest()]
    assert f.reconciler.record("id", "http://x", 15.0)["fetching"] == []
