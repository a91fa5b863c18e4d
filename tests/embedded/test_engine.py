"""The engine port: prepare while serving, activate in a pause, all or nothing, a clear end on failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stitch_core.checkpoint import marks_of
from stitch_core.files import PosixFiles
from stitch_core.ports import EngineError, EngineRefused, EngineUncertain
from stitch_core.replica.engines import EngineOptionError
from stitch_core.replica.probe import difference, noise_of, tolerance
from stitch_embedded.config import ModelConfig
from stitch_embedded.engine import EmbeddedEngine, Options
from stitch_embedded.replica import open_engine, read_options
from stitch_embedded.report import Span
from stitch_embedded.sampling import SamplingParams
from stitch_embedded.scheduler import Outcome, Request, Scheduler
from stitch_embedded.weights import CheckpointFiles
from stitch_embedded.worker import EngineFailed
from tests.embedded.models import config_json, nudged, random_tensors, save

pytestmark = pytest.mark.usefixtures("no_self_check")

CONFIG = ModelConfig.from_dict(config_json())
V0 = random_tensors(CONFIG, 0)
V1 = nudged(V0, 1)
FAST = Options(max_len=40, max_running=8, prefill_rows=8, seed=1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    save(root / "v0", config_json(), V0)
    save(root / "v1", config_json(), V1)
    other = config_json(rope_theta=5000.0)
    save(root / "other", other, V1)
    wide = V1 | {"model.norm.weight": torch.zeros(9, dtype=torch.bfloat16)}
    save(root / "bad", config_json(), wide)
    return root


@pytest.fixture
async def engine(checkpoints: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(checkpoints / "v0", FAST)
    engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def slow(checkpoints: Path) -> AsyncIterator[EmbeddedEngine]:
    """One step in 20 ms."""
    engine = EmbeddedEngine(checkpoints / "v0", Options(**{**FAST.__dict__, "pace": 0.02}))
    engine.start()
    yield engine
    await engine.close()


def request(rid: str = "r", new: int = 30, **options: object) -> Request:
    return Request(rid, [1, 2, 3], SamplingParams(max_new_tokens=new, seed=3), **options)  # type: ignore[arg-type]


async def generate(engine: EmbeddedEngine, one: Request) -> Outcome:
    return (await engine.generate([one]).outcomes())[0]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_activation_in_a_pause(slow: EmbeddedEngine, checkpoints: Path, mode: str) -> None:
    assert (await slow.identity()).label == "default"
    generation = slow.generate([request(), request("s", stream=True)])
    events = 0
    async for event in generation.events():
        events += 1
        if event.outcome is None and events == 4:
            await slow.prepare(checkpoints / "v1", list(V1))
            await slow.pause(mode)  # type: ignore[arg-type]
            before = await slow.counts()
            await asyncio.sleep(0.05)
            assert await slow.counts() == before
            await slow.activate("run/weight_v000001")
            await slow.resume()
        if event.outcome is not None:
            spans = event.outcome.spans(3)
            assert [s.version for s in spans] == ["default", "run/weight_v000001"]
    assert events > 30
    assert (await slow.identity()).label == "run/weight_v000001"


async def test_partial_and_empty_preparations(engine: EmbeddedEngine, checkpoints: Path) -> None:
    before = await generate(engine, request())
    await engine.pause("in_place")
    await engine.prepare(checkpoints / "v1", [])
    await engine.activate("relabelled")
    await engine.resume()
    after = await generate(engine, request())
    assert after.logprobs == before.logprobs
    assert after.spans(3) == (Span("relabelled", 0, 30),)
    await engine.prepare(checkpoints / "v1", None)
    await engine.prepare(checkpoints / "v1", ["model.norm.weight"])  # the last call counts
    await engine.pause("in_place")
    await engine.activate("norm")
    await engine.resume()
    assert (await generate(engine, request())).logprobs != before.logprobs
    await engine.prepare(checkpoints / "v0", ["model.norm.weight", "lm_head.weight"])
    await engine.pause("in_place")
    await engine.activate("back")
    await engine.resume()
    assert (await generate(engine, request())).logprobs == before.logprobs


async def test_refusals_change_nothing(engine: EmbeddedEngine, checkpoints: Path) -> None:
    before = await generate(engine, request())
    for path, names, message in [
        ("missing", None, "no checkpoint"),
        ("v1", ["nope"], "no tensor nope"),
        ("bad", None, "shape"),
        ("other", None, "another model"),
    ]:
        with pytest.raises(EngineRefused, match=message):
            await engine.prepare(checkpoints / path, names)
    await engine.pause("in_place")
    with pytest.raises(EngineRefused, match="nothing was prepared"):
        await engine.activate("x")
    await engine.resume()
    await engine.prepare(checkpoints / "v1", None)
    with pytest.raises(EngineRefused, match="in a pause"):
        await engine.activate("x")
    after = await generate(engine, request())
    assert (after.logprobs, after.label) == (before.logprobs, "default")


async def test_a_failed_copy_is_uncertain_and_stops_the_engine(
    slow: EmbeddedEngine, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = slow.generate([request()])
    await slow.prepare(checkpoints / "v1", None)

    def broken(self: Scheduler, tensors: object, label: str) -> None:
        raise RuntimeError("cosmic ray")

    monkeypatch.setattr(Scheduler, "activate", broken)
    await slow.pause("in_place")
    with pytest.raises(EngineUncertain, match="cosmic ray"):
        await slow.activate("x")
    with pytest.raises(EngineFailed, match="cosmic ray"):
        await running.outcomes()
    with pytest.raises(EngineError, match="cosmic ray"):
        await slow.health()
    with pytest.raises(EngineError):
        await slow.resume()
    with pytest.raises(EngineFailed):
        slow.generate([request()])


async def test_a_step_that_raises_fails_all_requests(
    slow: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = slow.generate([request(), request("s")])
    monkeypatch.setattr(Scheduler, "step", lambda self: 1 / 0)
    with pytest.raises(EngineFailed, match="division by zero"):
        await running.outcomes()
    with pytest.raises(EngineError, match="division by zero"):
        await slow.identity()


async def test_C82_aborts_and_cancels_exactly(slow: EmbeddedEngine) -> None:
    """Copies and a batch end with the id that was asked for, and nothing that only begins so."""
    group = slow.generate([replace(request(f"a_{i}"), asked="a") for i in range(2)])
    others = slow.generate([request("a_2"), request("a~b"), request("a0"), request("b")])
    for nobody in ("nobody", "a_", ""):
        await slow.abort(nobody)
    await slow.abort("a")
    assert [o.finish["type"] for o in await group.outcomes()] == ["abort"] * 2
    await slow.abort("a_2")
    assert [o.finish["type"] for o in await others.outcomes()] == ["abort", *["length"] * 3]
    same = [slow.generate([request("same")]) for _ in range(2)]
    slow.cancel(same[0])
    assert (await same[0].outcomes())[0].finish["type"] == "abort"
    assert (await same[1].outcomes())[0].finish["type"] == "length"


async def test_pace_holds_and_delays_no_command(checkpoints: Path) -> None:
    engine = EmbeddedEngine(checkpoints / "v0", Options(**{**FAST.__dict__, "pace": 0.2}))
    engine.start()
    start = time.monotonic()
    await engine.generate([request(new=2)]).outcomes()
    assert time.monotonic() - start >= 0.2
    await engine.close()
    engine = EmbeddedEngine(checkpoints / "v0", Options(**{**FAST.__dict__, "pace": 3599.0}))
    engine.start()
    generation = asyncio.ensure_future(engine.generate([request(new=2)]).outcomes())
    async with asyncio.timeout(60):
        await engine.pause("in_place")
        await engine.resume()
        assert not generation.done()
        await engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        await generation


async def test_close_fails_what_runs(slow: EmbeddedEngine) -> None:
    running = slow.generate([request()])
    await slow.close()
    with pytest.raises(EngineFailed, match="closed"):
        await running.outcomes()


async def test_unseeded_requests_differ(engine: EmbeddedEngine) -> None:
    copies = [Request(f"r{i}", [1, 2, 3], SamplingParams(max_new_tokens=20)) for i in range(4)]
    outcomes = await engine.generate(copies).outcomes()
    assert len({tuple(o.tokens) for o in outcomes}) == 4


async def test_opens_as_a_plugin(checkpoints: Path) -> None:
    opened = await open_engine(
        checkpoints / "v0", {"max-len": "20", "max_running": "4", "self_check_seconds": "0"}
    )
    assert (await opened.engine.identity()).label == "default"
    await opened.close()
    with pytest.raises(EngineOptionError, match="no checkpoint"):
        await open_engine(checkpoints / "missing", {})
    with pytest.raises(EngineOptionError, match="max_len 9999"):
        await open_engine(checkpoints / "v0", {"max_len": "9999"})


def test_options_from_text() -> None:
    assert read_options({"max-len": "20", "pace": "0.5", "dtype": "float32"}) == Options(
        20, pace=0.5, dtype="float32"
    )
    with pytest.raises(ValueError, match="no option 'label'"):
        read_options({"label": "x"})
    with pytest.raises(ValueError, match="'x' is not int"):
        read_options({"seed": "x"})


WRONG: list[dict[str, object]] = [
    {"max_running": 0},
    {"prefill_rows": 0},
    {"pace": -1.0},
    {"dtype": "float16"},
    {"max_len": 1},
    {"max_len": 65},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_options_are_checked(checkpoints: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EmbeddedEngine(checkpoints / "v0", Options(**wrong))  # type: ignore[arg-type]


def test_a_cache_larger_than_the_machine_is_refused(checkpoints: Path) -> None:
    with pytest.raises(ValueError, match=r"max_running 1000000000 .* GiB"):
        EmbeddedEngine(checkpoints / "v0", Options(max_running=10**9))


async def test_c77_the_boot_checkpoint_is_looked_at_before_it_is_loaded(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in the middle of the load shows, and the engine tells so of itself."""
    boot = tmp_path / "boot"
    save(boot, config_json(), V0)
    before = marks_of(boot, PosixFiles())
    read = CheckpointFiles.read

    def change(self: CheckpointFiles, *arguments: Any) -> Any:
        save(tmp_path / "new", config_json(), V1)
        boot.rename(tmp_path / "old")
        (tmp_path / "new").rename(boot)
        return read(self, *arguments)

    monkeypatch.setattr(CheckpointFiles, "read", change)
    engine = EmbeddedEngine(boot, FAST)
    engine.start()
    told = (await engine.identity()).boot_marks
    await engine.close()
    assert told == before != marks_of(boot, PosixFiles())


async def test_a_probe_finds_one_layer_of_other_weights(checkpoints: Path) -> None:
    """In one of the model's two; its own noise is none, as results do not depend on the batch."""
    boot = await probed(checkpoints / "v0")
    assert len(boot) == min(32, FAST.max_len or 0) - 1
    assert await probed(checkpoints / "v0") == boot
    other = random_tensors(CONFIG, 7)
    for layer in range(CONFIG.layers):
        mixed = {name: other[name] if f".{layer}." in name else tensor for name, tensor in V0.items()}
        save(checkpoints / f"layer{layer}", config_json(), mixed)
        assert difference(boot, await probed(checkpoints / f"layer{layer}")) > 4 * tolerance(0.0)


async def probed(checkpoint: Path) -> tuple[float, ...]:
    """What an engine of these weights answers, the same to all of several at once."""
    engine = EmbeddedEngine(checkpoint, FAST)
    engine.start()
    try:
        answers = [await engine.probe(), *await asyncio.gather(*(engine.probe() for _ in range(8)))]
        assert noise_of([one.logprobs for one in answers if one]) == 0.0
        assert answers[0] is not None
        return answers[0].logprobs
    finally:
        await engine.close()


async def test_a_probe_takes_no_draw_from_unseeded_requests(checkpoints: Path) -> None:
    outputs = []
    for probes in (0, 3):
        engine = EmbeddedEngine(checkpoints / "v0", FAST)
        engine.start()
        for _ in range(probes):
            await engine.probe()
        one = Request("r", [1, 2, 3], SamplingParams(max_new_tokens=20))
        outputs.append((await generate(engine, one)).tokens)
        await engine.close()
    assert outputs[0] == outputs[1]


async def test_a_probe_of_a_stopped_or_aborting_engine_has_no_answer(slow: EmbeddedEngine) -> None:
    probing = asyncio.ensure_future(slow.probe())
    await asyncio.sleep(0)
    await slow.abort_all()
    with pytest.raises(EngineError):
        await probing
    await slow.close()
    with pytest.raises(EngineError):
        await slow.probe()
