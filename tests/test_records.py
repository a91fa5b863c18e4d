"""Records beside the chain: their byte form, where they lie, and how a full gets there exactly once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stitch_core.fulls import find_full, upload_full
from stitch_core.manifest import FormatError, PayloadFile, Representation, canonical_json, run_prefix
from stitch_core.ports import Entry, StoreError
from stitch_core.records import (
    Record,
    RecordRefused,
    list_records,
    place_of,
    places,
    read_record,
)
from stitch_core.retry import Retry
from stitch_core.safetensors import CheckpointError
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.checkpoints import write_checkpoint
from tests.small_run import FILES, FaultyStore, Trainer, inline

SHA = "sha256:" + "5" * 64
XXH = "0" * 32
FILE = (PayloadFile("model.safetensors", 3, SHA),)
FULL = Record("r", 32, SHA, Representation("full", FILE))
SPAN = Record("r", 16, SHA, Representation("delta", FILE, SHA, "xor", {"a": (XXH, "1" * 32)}), 0)
HOW: dict[str, Any] = {
    "rng": random.Random(0),
    "run_blocking": inline,
    "policy": Retry(attempts=2, first=0.001),
}


@pytest.mark.parametrize("record", [FULL, SPAN], ids=["full", "span"])
def test_round_trip_and_keys(record: Record) -> None:
    span = record.since is not None
    assert Record.decode(record.encode(), span=span) == record
    hex_digest = record.digest().removeprefix("sha256:")
    stem = f"spans/000000-000016.{hex_digest}" if span else f"fulls/000032.{hex_digest}"
    assert record.file_key("model.safetensors") == f"runs/r/{stem}/model.safetensors"
    assert record.key == f"runs/r/{stem}" + ("/span.json" if span else ".json")
    assert place_of(record.key.removeprefix("runs/r/")) == (record.since, record.number, hex_digest, None)
    assert place_of(f"{stem}/x") == (record.since, record.number, hex_digest, "x")


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(number=-1),
        lambda v: v.update(run=".."),
        lambda v: v.update(state="sha256:1"),
        lambda v: v.update(time=1),
        lambda v: v.update(format="stitch.manifest/1"),
        lambda v: v["representation"].update(kind="boot", source="x"),
        lambda v: v["representation"].update(kind="delta", base=SHA, encoding="xor", changed={}),
        lambda v: v["representation"].update(files=[["../x", 1, SHA]]),
        lambda v: v["representation"].update(files=[["span.json", 1, SHA]]),
        lambda v: v["representation"].update(files=[]),
    ],
)
def test_a_full_that_is_not_one(change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(FULL.encode())
    change(value)
    with pytest.raises(FormatError):
        Record.decode(canonical_json(value), span=False)


@pytest.mark.parametrize("change", [{"since": 16}, {"since": 17}, {"since": None}, {"since": True}])
def test_a_span_that_is_not_one(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Record.decode(canonical_json({**json.loads(SPAN.encode()), **change}), span=True)


def test_the_byte_form() -> None:
    """What other programs write and read: these bytes have these names."""
    assert FULL.encode() == (
        b'{"format":"stitch.full/1","number":32,"representation":{"files":[["model.safetensors",3,"%b"]],'
        b'"kind":"full"},"run":"r","state":"%b"}\n' % (SHA.encode(), SHA.encode())
    )
    assert SPAN.encode() == (
        b'{"format":"stitch.span/1","number":16,"representation":{"base":"%b","changed":{"a":["%b","%b"]},'
        b'"encoding":"xor","files":[["model.safetensors",3,"%b"]],"kind":"delta"},"run":"r","since":0,'
        b'"state":"%b"}\n' % (SHA.encode(), XXH.encode(), b"1" * 32, SHA.encode(), SHA.encode())
    )


def test_every_cut_of_a_record_is_refused() -> None:
    data = SPAN.encode()
    for at in range(len(data)):
        with pytest.raises(FormatError):
            Record.decode(data[:at], span=True)


@pytest.mark.parametrize(
    "key",
    ["fulls/32.{d}.json", "fulls/0000032.{d}.json", "fulls/000032.json", "fulls/000032.{d}",
     "fulls/000032.ab.json",
     "spans/000000-000016.{d}", "spans/000016.{d}/span.json", "spans/000000-0000016.{d}/span.json",
     "fulls/000032.{d}/a/b", "head", "manifests/000007.e0003.json"],
)  # fmt: skip
def test_keys_that_are_no_record(key: str) -> None:
    assert place_of(key.replace("{d}", "a" * 64)) is None


def test_places_of_a_listing() -> None:
    entries = [Entry(FULL.key, 9), Entry(FULL.file_key("model.safetensors"), 3), Entry(SPAN.file_key("x"), 5)]
    full, span = places("r", [*entries, Entry("runs/r/head", 4), Entry("runs/other/fulls/x", 4)])
    assert (full.key, full.bytes, full.digest) == (FULL.key, 3, FULL.digest())
    assert (span.key, span.bytes) == (None, 5)
    assert full.sketch({1: SHA}) is None
    assert span.sketch({0: SHA, 16: SHA}) is None, "without a document it is not a source"


# ------------------------------------------------------------------------------------------------ upload


class Anchoring:
    """A run of two deltas, and the checkpoint of the newest version."""

    def __init__(self, root: Path) -> None:
        self.trainer, self.memory, self.root = Trainer(root), MemoryStore(), root
        self.store = FaultyStore(self.memory)
        self.directory = root / "weights"

    async def publish(self) -> None:
        publisher = self.trainer.publisher(self.memory)
        await publisher.claim(self.trainer.version0)
        await self.trainer.publish(publisher)
        self.newest = await self.trainer.publish(publisher)
        write_checkpoint(self.directory, FILES, self.trainer.tensors, 2)


@pytest.fixture
async def run(tmp_path: Path) -> Anchoring:
    anchoring = Anchoring(tmp_path)
    await anchoring.publish()
    return anchoring


async def test_a_full_is_uploaded_once_and_found_again(run: Anchoring) -> None:
    record, new = await upload_full(run.store, run.newest, run.directory, FILES, **HOW)
    assert new
    assert (record.state, record.version) == (run.newest.state, run.newest.version)
    (place,) = await list_records(run.memory, "r")
    assert await read_record(run.memory, place) == record
    assert place.bytes == record.representation.bytes
    writes = [key for name, key in run.store.calls if name == "create"]
    assert writes[-1] == record.key, "the document comes last"
    run.store.calls.clear()
    again, new = await upload_full(run.store, run.newest, run.directory, FILES, **HOW)
    assert (again, new) == (record, False)
    assert [name for name, _ in run.store.calls] == ["list", "load"]


async def test_what_is_not_the_version_is_refused_before_anything_is_uploaded(run: Anchoring) -> None:
    write_checkpoint(run.root / "later", FILES, run.trainer.learn(), 1)
    with pytest.raises(RecordRefused, match="is not r/weight_v000002: its state is"):
        await upload_full(run.store, run.newest, run.root / "later", FILES, **HOW)
    with pytest.raises(CheckpointError):
        await upload_full(run.store, run.newest, run.root / "nothing", FILES, **HOW)
    assert not [name for name, _ in run.store.calls if name == "create"]


@pytest.mark.parametrize("fault", ["before", "after", "late"])
async def test_a_fault_at_any_call_leaves_no_record_or_a_whole_one(run: Anchoring, fault: str) -> None:
    """And the next attempt ends what the first began, uploading nothing a second time."""
    before = dict(run.memory.state.objects)
    calls = 1
    while True:
        run.memory.state.objects.clear()
        run.memory.state.objects.update(before)
        run.store.calls.clear()
        hit = calls

        def fail(index: int, name: str, key: str, hit: int = hit) -> str | None:
            return fault if index + 1 >= hit else None

        run.store.fail = fail
        try:
            await upload_full(run.store, run.newest, run.directory, FILES, **HOW)
            break
        except StoreError:
            pass
        await run.store.land()
        run.store.fail = lambda *_: None
        for place in await list_records(run.memory, "r"):
            if place.key is not None:
                found = await find_full(run.memory, run.newest, "r", how=HOW)  # type: ignore[arg-type]
                assert found is not None
                assert len(place.sizes) == len(found.representation.files)
        record, _ = await upload_full(run.store, run.newest, run.directory, FILES, **HOW)
        assert sum(key == record.key for key in run.memory.state.objects) == 1
        calls += 1
    assert calls > 5


async def test_a_record_that_lost_a_file_does_not_count(run: Anchoring) -> None:
    record, _ = await upload_full(run.store, run.newest, run.directory, FILES, **HOW)
    del run.memory.state.objects[record.file_key(record.representation.files[0].name)]
    again, new = await upload_full(run.store, run.newest, run.directory, FILES, **HOW)
    assert (again, new) == (record, True)


async def test_a_record_with_a_lying_name_is_not_read(run: Anchoring) -> None:
    record, _ = await upload_full(run.store, run.newest, run.directory, FILES, **HOW)
    data = run.memory.state.objects.pop(record.key)
    run.memory.state.objects[record.key.replace("000002", "000001")] = data
    listed = [place for place in await list_records(run.memory, "r") if place.key]
    with pytest.raises(FormatError, match="is the record of"):
        await read_record(run.memory, listed[0])
    run.memory.state.objects[f"{run_prefix('r')}fulls/000002.{'a' * 64}.json"] = data
    other = next(place for place in await list_records(run.memory, "r") if "a" * 64 in place.digest)
    with pytest.raises(FormatError, match="not the one in its name"):
        await read_record(run.memory, other)
