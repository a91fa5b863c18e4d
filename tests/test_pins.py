"""Pins keep only what is whole: by the chain, or by what stands beside it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stitch_core.fulls import upload_full
from stitch_core.manifest import FormatError, run_prefix
from stitch_core.pins import PinRefused, add_pin, pin_key, read_pins
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.checkpoints import write_checkpoint
from tests.small_run import FILES, Trainer, inline, published


async def test_a_version_above_a_full_beside_the_chain(tmp_path: Path) -> None:
    """What is below it was collected; the full and the deltas from it on are all that it takes."""
    trainer, store = Trainer(tmp_path), MemoryStore()
    chain = await published(trainer, store, 5)
    write_checkpoint(tmp_path / "three", FILES, trainer.weights[chain[3].state])
    await upload_full(store, chain[3], tmp_path / "three", FILES, rng=random.Random(0), run_blocking=inline)
    for manifest in chain[1:4]:
        for file in manifest.representation.files:
            await store.delete(manifest.file_key(file.name))
    for number in (3, 5):
        await add_pin(store, f"p{number}", "r", number, 1.0)
    with pytest.raises(
        PinRefused, match=r"weight_v000001 cannot be kept, it is not whole any more: runs/r/.* is not there"
    ):
        await add_pin(store, "p1", "r", 1, 1.0)
    assert {name: pin.number for name, pin in (await read_pins(store)).items()} == {"p3": 3, "p5": 5}


async def test_a_pin_beside_others_of_any_run(tmp_path: Path) -> None:
    store = MemoryStore()
    for run in ("a", "b"):
        trainer = Trainer(tmp_path / run, run=run)
        publisher = trainer.publisher(store)
        await publisher.claim(trainer.version0)
        pin = await add_pin(store, f"best-{run}", run, 0, 2.0)
        assert pin.digest == publisher.head.digest()
    assert [str(pin.version) for pin in (await read_pins(store)).values()] == [
        "a/weight_v000000", "b/weight_v000000",
    ]  # fmt: skip
    store.state.objects[pin_key("best-a")] += b" "
    with pytest.raises(FormatError, match="pins/best-a"):
        await read_pins(store)
    assert run_prefix("a") + "head" in store.state.objects
