"""``stitch_prove``, and exports that become fulls: nothing is taken on anybody's word."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from stitch_core.checkout import checkout
from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.directory import DeltaDirectory, write_shards
from stitch_core.dialects import INDEX_NAME
from stitch_core.records import list_records
from stitch_core.retry import Retry
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import table_of, write_checkpoint
from stitch_core.trainers import hooks
from stitch_core.trainers.exports import KEEP, Exports
from stitch_core.trainers.group import RanksFailed, Solo
from stitch_core.trainers.own_delta import OwnDelta
from tests.small_run import FILES
from tests.trainers.ranks import Stock, ThreadGroup, World, on_ranks, own, same
from tests.trainers.test_publication import plain, rebuilt, versions
from tests.trainers.test_resume import publish_full


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def adler(directory: Path, tensors: dict[str, Tensor], wrong: str | None = None) -> Path:
    """The same delta as a trainer writes it with ``--update-weight-delta-checksum adler32``."""
    delta = DeltaDirectory.open(directory, FILES)
    sums = {n: f"{zlib.adler32(bytes(tensors[n].data)):08x}" for n in delta.payloads}
    if wrong is not None:
        sums[wrong] = "00000001"
    payloads = {name: (delta.read(name), sums[name]) for name in delta.payloads}
    index = json.loads((directory / INDEX_NAME).read_text())
    for path in directory.iterdir():
        path.unlink()
    index["metadata"]["checksum_format"] = "adler32"
    index["weight_map"] = write_shards(directory, FILES, payloads)
    (directory / INDEX_NAME).write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
def test_deltas_are_applied_to_a_proven_copy_first(world: World, tmp_path: Path, checksum: str) -> None:
    stock = Stock(world, tmp_path / "updates")
    directories = []
    for _ in range(3):
        directories.append(stock.write(world.learn()))
        if checksum == "adler32":
            adler(directories[-1], world.tensors)

    def train(group: ThreadGroup) -> list[int]:
        publisher = world.publisher(group, prove=True)
        publisher.claim()
        done = [publisher.publish(path, i + 1) for i, path in enumerate(directories)]
        publisher.close()
        return done

    assert same(on_ranks(2, train)) == [1, 2, 3]
    assert rebuilt(world, 3) == plain(world.tensors)
    assert FILES.list(world.root / "work") == []


def test_c33_a_delta_that_does_not_give_what_it_promises_never_moves_the_head(
    world: World, tmp_path: Path
) -> None:
    """Every receipt fits, the index fits: only applying it shows that it was made from another base."""
    stock = Stock(world, tmp_path / "updates")
    stock.write(world.learn())  # never published: what follows builds on it
    directory = stock.write(world.learn())
    index = directory / INDEX_NAME
    index.write_text(index.read_text().replace('"base_version": "000001"', '"base_version": "000000"'))

    def train(group: ThreadGroup) -> int:
        publisher = world.publisher(group, prove=True)
        publisher.claim()
        return publisher.publish(directory, 1)

    for error in on_ranks(2, train):
        assert "publishing weight_v000001 of run r (moving the head) failed on 1 of 2 ranks" in str(error)
        assert "its checksum promises" in str(error)
    assert [m.number for m in versions(world)] == [0]


def test_a_wrong_checksum_is_named(world: World, tmp_path: Path) -> None:
    directory = Stock(world, tmp_path / "updates").write(world.learn())
    name = next(iter(DeltaDirectory.open(directory, FILES).payloads))
    adler(directory, world.tensors, wrong=name)
    publisher = world.publisher(Solo(), prove=True)
    publisher.claim()
    with pytest.raises(RanksFailed, match=f"tensor {name} becomes .* its checksum promises 00000001"):
        publisher.publish(directory, 1)


def test_proofs_go_on_after_a_failure_behind_the_step_and_on_resume(world: World) -> None:
    made = world.publisher(Solo(), prove=True, async_=True)
    made.claim()
    delta = OwnDelta(made, FILES)
    assert delta.publish(world.learn(), wait=True) == 1
    publisher = made._publisher
    assert publisher is not None
    publish = publisher.publish
    publisher.publish = lambda *_: (_ for _ in ()).throw(OSError("no space left"))  # type: ignore[method-assign]
    with pytest.raises(RanksFailed, match="no space left"):
        delta.publish(world.learn(), wait=True)
    publisher.publish = publish  # type: ignore[method-assign]
    assert delta.publish(world.learn(), wait=True) == 3
    made.close()
    publish_full(world, world.learn())
    again = world.publisher(Solo(), prove=True)
    again.claim()
    assert OwnDelta(again, FILES).publish(world.learn()) == 5
    assert rebuilt(world, 5) == plain(world.tensors)


def test_the_proven_copy_becomes_a_full_every_so_many_versions_and_the_floor_rises(world: World) -> None:
    made = world.publisher(Solo(), prove=True, anchor_every=2)
    made.claim()
    delta = OwnDelta(made, FILES)
    for number in range(1, 4):
        delta.publish(world.learn())
        deadline = time.monotonic() + 60
        while number == 2 and not fulls(world) and time.monotonic() < deadline:
            time.sleep(0.02)
    made.close()
    assert fulls(world) == [2]
    floor = versions(world)[3].floor
    assert floor is not None
    assert floor.number == 2
    for number in (1, 2):  # as a collector may
        for path in (world.root / "store/runs/r").glob(f"e*/weight_v{number:06d}/*"):
            path.unlink()
    again = world.publisher(Solo(), prove=True)
    again.claim()
    assert OwnDelta(again, FILES).publish(world.learn()) == 4
    again.close()
    out = world.root / "out"
    asyncio.run(checkout(world.store(), "r", 4, out, files=FILES, base=world.boot))
    assert Checkpoint.open(out, FILES).state() == state_digest(table_of(world.tensors))
    assert FILES.list(world.root / "work") == ["updates"]


# ----------------------------------------------------------------------------------------------- exports


def exports(world: World, every: int | None = None) -> Exports:
    return Exports(world.store, FILES, Retry(attempts=1), every)


def fulls(world: World) -> list[int]:
    return [place.number for place in asyncio.run(list_records(world.store(), "r", ("fulls",)))]


def test_an_export_becomes_a_full_of_the_version_that_it_is(world: World) -> None:
    """It is saved before the version is published, so it waits for that."""
    delta, made = own(world, Solo()), exports(world)
    delta._publisher.on_published = made.published
    delta.publish(world.learn())
    export = world.root / "export"
    write_checkpoint(export, FILES, world.learn(), shards=2)
    made.saved(export)
    delta.publish(world.tensors)
    delta.publish(world.learn())
    made.close()
    assert fulls(world) == [2]


def test_exports_between_two_anchors_are_left(world: World) -> None:
    delta, made = own(world, Solo()), exports(world, every=2)
    delta._publisher.on_published = made.published
    for number in range(1, 5):
        write_checkpoint(world.root / f"export-{number}", FILES, world.learn())
        made.saved(world.root / f"export-{number}")
        delta.publish(world.tensors)
    made.close()
    assert fulls(world) == [2, 4]


def test_an_export_of_what_is_published_already(world: World) -> None:
    delta, made = own(world, Solo()), exports(world)
    delta._publisher.on_published = made.published
    delta.publish(world.learn())
    export = world.root / "export"
    write_checkpoint(export, FILES, world.tensors)
    made.saved(export)
    made.close()
    assert fulls(world) == [1]


def test_an_export_that_is_no_version_is_said_and_skipped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stitch")
    delta, made = own(world, Solo()), exports(world)
    delta._publisher.on_published = made.published
    export = world.root / "export"
    name = next(name for name, tensor in world.tensors.items() if tensor.dtype == "F32" and tensor.shape)
    halved: dict[str, Any] = dict(world.learn())
    halved[name] = halved[name]._replace(dtype="BF16", data=bytes(len(halved[name].data) // 2))
    write_checkpoint(export, FILES, halved)
    made.saved(export)
    made.saved(world.root / "nothing")
    for _ in range(KEEP):
        delta.publish(world.learn())
    made.close()
    assert fulls(world) == []
    assert f"the export in {export} has state sha256:" in caplog.text
    assert "an export did not become a full: " in caplog.text
    assert "no such directory" in caplog.text


def test_the_hooks_offer_exports_on_rank_0_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = hooks.Trainer(world.settings(), Solo(), "test")
    monkeypatch.setattr(hooks, "_TRAINER", trainer)
    seen: list[Path] = []
    monkeypatch.setattr(trainer, "exported", seen.append)
    hooks.post_save(None, 3, "/ckpt/iter_3", None)
    hooks.post_save(None, 3, "/ckpt/iter_3", "/ckpt/hf_3")

    class Module:
        __name__ = "actor"

        @staticmethod
        def save_hf(args: Any, directory: str, model: Any) -> str:
            return f"{directory} {model}"

    hooks.offer_exports(Module, "save_hf")
    hooks.offer_exports(Module, "save_hf")
    hooks.offer_exports(Module, "gone")
    assert Module.save_hf(None, "/ckpt/hf_4", "m") == "/ckpt/hf_4 m"
    trainer.group = type("Rank1", (), {"rank": 1, "size": 2})()
    Module.save_hf(None, "/ckpt/hf_5", "m")
    assert seen == [Path("/ckpt/hf_3"), Path("/ckpt/hf_4")]
