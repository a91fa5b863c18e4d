"""Ids that are equal, or begin alike: an abort ends what it means, at an engine that aborts by prefix."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core.files import PosixFiles
from stitch_core.replica.admission import Gate
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.request_ids import Abort, Running, engine_id, own_id
from stitch_core.requests import Refused
from stitch_core.testing.asgi_client import AsgiClient, Call
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from stitch_core.testing.fake_engine import FakeEngine
from stitch_core.testing.fake_server import FakeServer
from stitch_core.versions import PolicyVersion
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

LONG = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1_000_000}}
ROLLOUT, EVAL = {"x-stitch-consumer": "rollout"}, {"x-stitch-consumer": "eval"}


class Serving:
    """A fake engine behind the middleware, serving version 7 of run r."""

    def __init__(self, boot: Path) -> None:
        self.engine = FakeEngine(boot, step_seconds=0.01)
        gate = Gate(LoopClock())
        app = StitchMiddleware(
            FakeServer(self.engine), gate, status=dict, wake=lambda: None, mismatch=gate.forget,
            abort=self.engine.abort,
        )  # fmt: skip
        self.client = AsgiClient(app)
        self.engine.take({}, str(PolicyVersion("r", 7)))
        gate.open(PolicyVersion("r", 7))
        self.calls: list[Call] = []

    async def ask(self, rid: Any, headers: dict[str, str] | None = None, **fields: Any) -> Call:
        """A request that the engine runs."""
        before = len(self.engine.requests)
        call = self.client.start("POST", "/generate", {**LONG, "rid": rid, **fields}, headers=headers or {})
        async with asyncio.timeout(60):
            while len(self.engine.requests) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.calls.append(call)
        return call

    async def abort(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> int:
        """How many requests it meant."""
        answer = await self.client.post("/abort_request", body, headers=headers or {})
        assert answer.status == 200
        return int(answer.json()["requests"])

    @property
    def running(self) -> list[Call]:
        return [call for call in self.calls if not call.returned]


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Serving]:
    tensors = random_tensors(np.random.default_rng(0), {"w": ("F32", (8,))})
    write_checkpoint(tmp_path / "boot", PosixFiles(), tensors, 1)
    replica = Serving(tmp_path / "boot")
    yield replica
    replica.engine.abort_prefix("")
    await asyncio.gather(*(call.finished() for call in replica.calls))
    await replica.engine.close()


def ended(call: Call) -> tuple[str, str]:
    """Why, and under which id."""
    meta = call.json()["meta_info"]
    return meta["finish_reason"]["type"], meta["id"]


async def test_C39_two_consumers_use_one_id(replica: Serving) -> None:
    mine, evals = await replica.ask("q", ROLLOUT), await replica.ask("q", EVAL)
    unnamed = await replica.ask("q")
    assert await replica.abort({"rid": "q", "consumer": "nobody"}) == 0
    assert await replica.abort({"rid": "q"}, EVAL) == 1
    await evals.finished()
    assert replica.running == [mine, unnamed]
    assert await replica.abort({"rid": "q"}) == 1
    await unnamed.finished()
    assert replica.running == [mine]
    # What has ended takes no name along that another still has.
    assert await replica.abort({"rid": "q", "run": "s"}, ROLLOUT) == 0
    assert await replica.abort({"rid": "q", "run": "r"}, ROLLOUT) == 1
    await mine.finished()
    assert [ended(call) for call in replica.calls] == [("abort", "q")] * 3


async def test_C39_one_consumer_asks_twice_under_one_id(replica: Serving) -> None:
    """As who tries again while the first try still runs: neither is refused, both have the name."""
    first, second = await replica.ask("q", ROLLOUT), await replica.ask("q", ROLLOUT)
    other = await replica.ask("q%n1", ROLLOUT)
    first.disconnect()
    await first.finished()
    assert await replica.abort({"rid": "q"}, ROLLOUT) == 1
    await second.finished()
    assert ended(second) == ("abort", "q")
    assert replica.running == [other]


@pytest.mark.parametrize("headers", [{}, {**ROLLOUT, "x-stitch-run": "r"}, ROLLOUT, {"x-stitch-run": "r"}])
async def test_C82_an_abort_takes_nothing_that_only_begins_so(
    replica: Serving, headers: dict[str, str]
) -> None:
    copies = await replica.ask("q", headers, sampling_params={**LONG["sampling_params"], "n": 2})  # type: ignore[dict-item]
    batch = await replica.ask(["req-1", "req-2"], headers, input_ids=[[1], [2]])
    others = [
        await replica.ask(rid, headers) for rid in ("q~b", "q-2", "q0", "q~", "q%7Eb", "req-10", "req-1~")
    ]
    # Runs and consumers are no ids, and no ids are these.
    others += [await replica.ask(rid) for rid in ("r", "r~rollout", "~", "%")]
    assert await replica.abort({"rid": "q"}, headers) == 1
    await copies.finished()
    assert [one["meta_info"]["finish_reason"]["type"] for one in copies.json()] == ["abort"] * 2
    assert {one["meta_info"]["id"] for one in copies.json()} == {"q_0", "q_1"}
    for rid in ("req-", "re", "q-", "q", "r~", "~~", "r~rollout~q"):
        assert await replica.abort({"rid": rid}, headers) == 0
    assert await replica.abort({"rid": "req-1"}, headers) == 1
    assert await replica.abort({"rid": "req-2"}, headers) == 1
    await batch.finished()
    assert replica.running == others
    assert await replica.abort({"rid": "q~b"}, headers) == 1
    await others[0].finished()
    assert ended(others[0]) == ("abort", "q~b")
    assert replica.running == others[1:]


async def test_the_abort_of_a_scope_reaches_all_of_it_and_no_more(replica: Serving) -> None:
    mine = [await replica.ask(None, ROLLOUT), await replica.ask("q", {**ROLLOUT, "x-stitch-run": "r"})]
    others = [await replica.ask("q", EVAL), await replica.ask("q")]
    for scope in ("r~rollou~", "s~rollout~", "~rollout~", "r~rollout"):
        assert await replica.abort({"rid": scope}) == 0
    assert await replica.abort({"rid": "r~rollout~"}) == 2
    for call in mine:
        await call.finished()
    assert replica.running == others


NAMES = ["q", "q~", "q~b", "q%7Eb", "%", "%n1", "q%n1", "q%25n1", "", "r", "~", "~~", "r~c", "r~c~q"]


def test_C82_no_name_at_an_engine_is_the_beginning_of_another() -> None:
    parts = [(run, consumer, own, same) for run in (None, "r", "c") for consumer in (None, "c", "r")
             for own in NAMES for same in (0, 1, 2, 25)]  # fmt: skip
    engine = [engine_id(*each) for each in parts]
    assert not [
        (a, b) for i, a in enumerate(engine) for j, b in enumerate(engine) if i != j and b.startswith(a)
    ]


def test_names_are_let_go_once() -> None:
    running = Running()
    first = running.add(["q"], None, None)
    second = running.add(["q"], None, None)
    assert first[0].engine != second[0].engine
    running.drop(first)
    running.drop(first)
    third = running.add(["q"], None, None)
    assert third[0].engine == first[0].engine
    running.drop(first)  # late: the name is another's now
    assert running.meant(Abort("q")) == [second[0].engine, third[0].engine]
    assert own_id(third, third[0].engine + "_1") == "q_1"
    assert own_id(third, "another") == "another"


@pytest.mark.parametrize(
    "body", [{"rid": "q", "run": "a/b"}, {"rid": "q", "consumer": 7}, {"abort_all": "no"}]
)
def test_an_abort_that_cannot_be_read_is_a_400(body: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        Abort.parse(body, {})
    assert refused.value.refusal.status == 400
