"""Images of a rank's weights, on small modules that load as SGLang's do, with its bad habits."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stitch_core.replica.child import niceness
from stitch_core.testing.checkpoints import random_tensors
from stitch_sglang.image import storage_key

from .loading import SHAPES, WIDTH, Model, Weight, bits, booted, fresh, load, run, write


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    return write(tmp_path / "boot", 0)[0]


def test_staged_and_copied_is_what_a_load_gives(tmp_path: Path, boot: Path) -> None:
    model, stager = booted(boot)
    pointers = {name: one.data_ptr() for name, one in model.named_parameters()}
    assert run(stager, "t", boot, test=True)["outcome"] == "done"
    before = bits(model)
    for seed in (1, 2, 3):
        path, state = write(tmp_path / str(seed), seed)
        report = run(stager, f"s{seed}", path, state)
        assert (report["outcome"], report["state"]) == ("done", state)
        assert bits(model) == before
        assert stager.copy(f"s{seed}") > 0
        before = bits(model)
        assert before == fresh(path)
    assert pointers == {name: one.data_ptr() for name, one in model.named_parameters()}
    assert model.head.weight is model.embed.weight


def test_one_segment_for_each_storage(boot: Path) -> None:
    _, stager = booted(boot)
    by_name = {name: one for one in stager.layout.segments for name in one.names}
    assert "embed.weight" in by_name
    assert len(stager.layout.segments) == len({storage_key(one.live) for one in stager.layout.segments})
    assert all(one.offset % 64 == 0 for one in stager.layout.segments)
    assert not by_name["layers.0.angles"].required
    assert sum(one.nbytes for one in stager.layout.segments) <= stager.layout.nbytes


def test_only_what_changed_is_copied(tmp_path: Path, boot: Path) -> None:
    model, stager = booted(boot)
    run(stager, "t", boot, test=True)
    changed = {"norm": random_tensors(np.random.default_rng(9), SHAPES)["norm"]}
    path, state = write(tmp_path / "1", 0, **changed)
    assert run(stager, "s", path, state)["changed"] == 1
    assert stager.copy("s") == 4 * WIDTH
    assert bits(model) == fresh(path)


def test_a_return_to_the_version_before_stages_nothing(tmp_path: Path, boot: Path) -> None:
    model, stager = booted(boot)
    run(stager, "t", boot, test=True)
    first, second = write(tmp_path / "1", 1), write(tmp_path / "2", 2)
    for i, (path, state) in enumerate((first, second)):
        run(stager, str(i), path, state)
        stager.copy(str(i))
    for file in first[0].iterdir():
        file.unlink()
    assert run(stager, "back", *first)["bytes"] == 0
    stager.copy("back")
    assert run(stager, "again", *second)["outcome"] == "done"
    stager.copy("again")
    assert bits(model) == fresh(second[0])


@pytest.mark.parametrize("second", [True, False])
def test_with_and_without_memory_for_a_second_image(tmp_path: Path, boot: Path, second: bool) -> None:
    model, stager = booted(boot)
    run(stager, "t", boot, test=True)
    for seed in (1, 2):
        path, state = write(tmp_path / str(seed), seed)
        report = run(stager, str(seed), path, state, second=second)
        assert report["images"] == 1 + second
        stager.copy(str(seed))
        assert bits(model) == fresh(path)


def test_weights_that_were_loaded_otherwise_are_copied_over(tmp_path: Path, boot: Path) -> None:
    """After an update from disk no image equals what is live."""
    model, stager = booted(boot)
    run(stager, "t", boot, test=True)
    stager.forget()
    with torch.no_grad():
        model.norm.fill_(7.0)
    run(stager, "s", boot)
    stager.copy("s")
    assert bits(model) == fresh(boot)


def test_a_newer_stage_supersedes_the_one_that_runs(tmp_path: Path, boot: Path) -> None:
    started: list[int] = []

    def slow(model: Model, tensors: Any) -> None:
        started.append(1)
        load(model, ((time.sleep(0.05 * (len(started) == 3)), one)[1] for one in tensors))

    model, stager = booted(boot, slow)
    run(stager, "t", boot, test=True)
    old, new = write(tmp_path / "1", 1), write(tmp_path / "2", 2)
    stager.begin("old", *old, test=False, second=True)
    while len(started) < 3:
        time.sleep(0.001)
    assert run(stager, "new", *new)["outcome"] == "done"
    assert stager.report("old")["outcome"] == "failed"
    assert stager.staged("old") is None
    stager.copy("new")
    assert bits(model) == fresh(new[0])


def test_C37_a_stage_tells_whether_it_gets_on(tmp_path: Path, boot: Path) -> None:
    """Its steps stand still as long as it does, and no longer."""
    let = threading.Semaphore(10**6)

    def held(model: Model, tensors: Any) -> None:
        load(model, ((let.acquire(), one)[1] for one in tensors))

    _, stager = booted(boot, held)
    assert run(stager, "t", boot, test=True)["steps"] > len(SHAPES)
    let = threading.Semaphore(0)
    stager.begin("s", *write(tmp_path / "1", 1), test=False, second=True)
    seen = -1
    for _ in range(len(SHAPES) - 1):
        let.release()
        while (steps := stager.report("s")["steps"]) == seen:
            time.sleep(0.001)
        seen = steps
    let.release(2)
    while stager.report("s")["outcome"] == "running":
        time.sleep(0.001)
    assert stager.report("s")["outcome"] == "done"
    assert stager.report("s")["steps"] > seen


def test_a_stage_gives_way_to_serving_and_changes_no_other_thread(tmp_path: Path, boot: Path) -> None:
    """Below its process whatever that has, not at a level of its own: a niced server would be overtaken."""
    found: list[tuple[int, int]] = []

    def watched(model: Model, tensors: Any) -> None:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        found.append((nice, torch.get_num_threads()))
        load(model, tensors)

    before = torch.get_num_threads()
    torch.set_num_threads(3)  # as a server on several cores has
    try:
        _, stager = booted(boot, watched)
        run(stager, "t", boot, test=True)
        run(stager, "s", *write(tmp_path / "1", 1))
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert found[1:] == [(min(own + niceness(), 19), 1)] * 2
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_stage_that_is_called_off_ends(boot: Path) -> None:
    _, stager = booted(boot, lambda model, tensors: [time.sleep(0.02) for _ in tensors] and None)
    stager.begin("t", boot, "", test=True, second=True)
    stager.cancel("t")
    while stager.report("t")["outcome"] == "running":
        time.sleep(0.001)
    assert stager.report("t")["message"] == "it was called off"


def test_another_state_than_was_said_is_not_staged(tmp_path: Path, boot: Path) -> None:
    model, stager = booted(boot)
    run(stager, "t", boot, test=True)
    before = bits(model)
    path, state = write(tmp_path / "1", 1)
    shard = next(path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    report = run(stager, "s", path, state)
    assert report["outcome"] == "failed"
    assert f"not {state}" in report["message"]
    shard.write_bytes(data[:-1])
    report = run(stager, "s2", path, state)
    assert report["outcome"] == "failed"
    assert str(shard) in report["message"]
    assert stager.staged("s") is stager.staged("s2") is None
    assert bits(model) == before


# ------------------------------------------------------------------------------- what the self-test finds


def refused(boot: Path, how: Any, kind: type[Model] = Model) -> str:
    model, stager = booted(boot, how, kind)
    before = bits(model)
    report = run(stager, "t", boot, test=True)
    assert report["outcome"] == "unfit"
    assert bits(model) == before
    message: str = report["message"]
    return message


def test_a_second_load_that_skips_something_is_named(boot: Path) -> None:
    """A latch: what was set at the first load is not set again."""

    class Latched(Model):
        done = False

    def how(model: Model, tensors: Any) -> None:
        first, Latched.done = not Latched.done, True
        load(model, (one for one in tensors if first or one[0] != "norm"))

    assert "norm (from byte 0 of 96)" in refused(boot, how, Latched)


def test_a_second_load_that_gives_something_else_is_named(boot: Path) -> None:
    def how(model: Model, tensors: Any) -> None:
        load(model, tensors)
        model.layers[1].qk.data[3, 1] += model.head.weight.data_ptr() % 2**20 + 1  # differs at each load

    assert "layers.1.qk (from byte 146" in refused(boot, how)


def test_a_load_that_ends_early_is_named(boot: Path) -> None:
    calls: list[int] = []

    def how(model: Model, tensors: Any) -> None:
        calls.append(1)
        for i, one in enumerate(tensors):
            if len(calls) > 1 and i == 2:
                return
            load(model, [one])

    assert "stopped before tensor" in refused(boot, how)


def test_a_number_that_changes_with_the_weights_is_named(boot: Path) -> None:
    def how(model: Model, tensors: Any) -> None:
        load(model, tensors)
        model.layers[0].scale = getattr(model.layers[0], "scale", 1.0) * 2

    assert "layers.0.scale is no tensor and changes" in refused(boot, how)


def test_a_tensor_of_another_shape_is_named(boot: Path) -> None:
    calls: list[int] = []

    def how(model: Model, tensors: Any) -> None:
        load(model, tensors)
        calls.append(1)
        if len(calls) > 1:
            model.layers[0].qk = Weight(model.layers[0].qk[:-1].clone(), loader=None)

    assert "layers.0.qk has another layout" in refused(boot, how)


def test_a_replaced_tensor_is_brought_home(tmp_path: Path, boot: Path) -> None:
    """Post-processing that binds a new tensor in place of writing to the old one."""

    def how(model: Model, tensors: Any) -> None:
        load(model, tensors)
        for layer in model.layers:
            layer.flipped = layer.qk.t().contiguous()
            layer.qk = Weight(layer.qk.data.clone(), loader=layer.load)
            layer.loads = [partial(layer.load, layer.qk)]

    model, stager = booted(boot, how)
    assert run(stager, "t", boot, test=True)["outcome"] == "done"
    path, state = write(tmp_path / "1", 1)
    run(stager, "s", path, state)
    stager.copy("s")
    assert bits(model) == fresh(path)


def test_a_derived_tensor_in_a_list_is_brought_home(tmp_path: Path, boot: Path) -> None:
    def how(model: Model, tensors: Any) -> None:
        load(model, tensors)
        if not hasattr(model, "sums"):
            model.sums = [None, None]
        for i, layer in enumerate(model.layers):
            model.sums[i] = layer.qk.sum(0)

    model, stager = booted(boot, how)
    assert run(stager, "t", boot, test=True)["outcome"] == "done"
    path, state = write(tmp_path / "1", 1)
    run(stager, "s", path, state)
    sums = model.sums[1]
    stager.copy("s")
    assert model.sums[1] is sums
    assert torch.equal(sums, model.layers[1].qk.sum(0))


def test_a_tuple_of_derived_tensors_that_is_replaced_is_named(boot: Path) -> None:
    def how(model: Model, tensors: Any) -> None:
        load(model, tensors)
        model.sums = tuple(layer.qk.sum(0) for layer in model.layers)

    assert "sums is not the same container" in refused(boot, how)


def test_a_stage_leaves_no_cycle_behind(tmp_path: Path, boot: Path) -> None:
    """A server may have frozen or stopped the collector of cycles."""
    seen: list[weakref.ref] = []

    def how(model: Model, tensors: Any) -> None:
        load(model, tensors)
        seen.extend(weakref.ref(one) for one in model.modules())
        seen.extend(weakref.ref(one) for one in model.parameters())

    model, stager = booted(boot, how)
    gc.collect()
    gc.disable()
    try:
        run(stager, "t", boot, test=True)
        run(stager, "s", *write(tmp_path / "1", 1))
        stager._thread.join()
        alive = {id(one()) for one in seen if one() is not None}
    finally:
        gc.enable()
    assert alive == {id(one) for one in (*model.modules(), *model.parameters())}
