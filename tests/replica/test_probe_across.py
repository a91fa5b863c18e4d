"""Promise 1 for requests that run while weights which came back are compared."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stitch_core.replica.admission import Gate
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.testing.asgi_client import AsgiClient, Call
from stitch_core.testing.fake_engine import FakeEngine
from stitch_core.testing.fake_server import FakeServer
from stitch_core.versions import PolicyVersion
from tests.replica.scripted import label
from tests.small_run import Trainer
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


class Serving:
    """A fake engine that generates behind the middleware, at version 7 of run r."""

    def __init__(self, root: Path) -> None:
        self.engine = FakeEngine(Trainer(root).boot, step_seconds=0.1)
        self.engine.take({}, label(7))
        self.gate = Gate(LoopClock(), hold=10.0)
        self.gate.open(PolicyVersion("r", 7))
        app = StitchMiddleware(
            FakeServer(self.engine), self.gate, status=dict, wake=lambda: None,
            mismatch=lambda reason: pytest.fail(reason), abort=self.engine.abort, grace=0.05,
        )  # fmt: skip
        self.client = AsgiClient(app)

    async def running(self, *, stream: bool, tokens: int) -> Call:
        """A request that has begun to generate."""
        params = {"max_new_tokens": tokens}
        call = self.client.start(
            "POST", "/generate", {"text": "hi", "stream": stream, "sampling_params": params}
        )
        while not any(request.output for request in self.engine.requests):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return call


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    return Serving(tmp_path)


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [5, 100])
async def test_nothing_of_what_runs_across_goes_out_before_the_verdict(
    serving: Serving, tokens: int, stream: bool, wrong: bool
) -> None:
    """Neither its report nor a token of weights that are still compared, whether it ends meanwhile or not."""
    call = await serving.running(stream=stream, tokens=tokens)
    serving.gate.close("version 8 is being activated", hold_answers=True)
    serving.engine.take({}, label(8))
    before = bytes(call.body)
    await asyncio.sleep(10.0)
    assert serving.engine.tokens >= min(tokens, 50)
    assert bytes(call.body) == before
    assert (b"weight_version" in before, call.complete) == (False, False)
    if wrong:
        serving.gate.fail("other weights")
        await call.finished()
        assert b"weight_version" not in call.body
        error = call.events()[-1] if call.status == 200 else call.json()
        assert error["error"]["type"] == "EngineUnavailable"
    else:
        serving.gate.open(PolicyVersion("r", 8))
        await call.finished()
        meta = (call.events()[-2] if stream else call.json())["meta_info"]
        assert (meta["weight_version_start"], meta["weight_version_end"]) == (7, 8)
        assert meta["completion_tokens"] == tokens
    assert serving.gate.active == 0


async def test_a_client_that_leaves_during_the_comparison_lets_go(serving: Serving) -> None:
    call = await serving.running(stream=True, tokens=500)
    serving.gate.close("version 8 is being compared", hold_answers=True)
    await asyncio.sleep(1.0)
    call.disconnect()
    await call.finished()
    assert (serving.gate.active, serving.engine.requests) == (0, [])
