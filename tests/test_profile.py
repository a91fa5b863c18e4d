"""The measuring of an update, on a server whose every answer is scripted: what each check finds out."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stitch_core.process_memory import listening_process, process_tree, resident
from stitch_core.profile import (
    Moved,
    Output,
    Profile,
    Settings,
    equals_reference,
    outputs,
    profile,
    prompts_of,
)
from stitch_core.profile_moves import NotMoved, Receive
from stitch_core.traffic import Json, ServerError, Traffic
from tests.virtual_time import LoopClock

CLOCK = LoopClock()
pytestmark = pytest.mark.virtual_time
QUICK = Settings(tokens=3, load=2, load_tokens=4, idle=0.05, tail=0.02, least=0.0, patience=5.0)


@dataclass
class Scripted:
    """A server that holds ``weights`` and calls them ``says(version)``."""

    version: int = 7
    weights: int = 7
    says: Callable[[int], Any] = lambda version: version
    refuse: bool = False
    cut: bool = False
    routes: dict[str, tuple[int, Any]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    async def generate(self, body: Json) -> Json:
        count = body["sampling_params"]["max_new_tokens"]
        ids = [self.weights + i for i in range(count)]
        said = self.says(self.version)
        meta = {"output_token_logprobs": [[-i / 3, i, None] for i in ids], "weight_version_start": said,
                "weight_version_end": said, "completion_tokens": count}  # fmt: skip
        return {"output_ids": ids, "text": "", "meta_info": meta}

    async def stream(self, body: Json) -> AsyncIterator[Json]:
        if self.refuse:
            raise ServerError("503", again=True)
        for count in range(1, body["sampling_params"]["max_new_tokens"]):
            await asyncio.sleep(0.002)
            yield {"meta_info": {"completion_tokens": count, "finish_reason": None}}
        if self.cut:
            raise ServerError("a stream was cut")
        await asyncio.sleep(0.002)
        yield await self.generate(body)

    async def ask(self, method: str, path: str, body: Json | None = None) -> tuple[int, Any]:
        self.asked.append((f"{method} {path}", body))
        return self.routes.get(path, (404, {}))


async def measured(server: Scripted, move: Callable[[Scripted], None], **moved: Any) -> Profile:
    async def update() -> Moved:
        began = CLOCK.monotonic()
        await asyncio.sleep(0.1)
        server.refuse = True
        await asyncio.sleep(0.05)
        move(server)
        server.refuse = False
        given = {"path": "cpu", "version": "r/8", "number": 8, "drain": 0.0, "pause": 0.05} | moved
        return Moved(began=began, served=CLOCK.monotonic(), **given)

    compared, load = prompts_of(2, 2, 0)
    return await profile(server, update, compared, load, QUICK, CLOCK, lambda: 1000)


def failed(result: Profile) -> list[str]:
    return [check.what for check in result.checks if not check.ok]


def to_8(server: Scripted) -> None:
    server.version = server.weights = 8


async def test_an_update_as_it_should_be() -> None:
    result = await measured(Scripted(), to_8)
    assert (failed(result), result.ok) == ([], True)
    row = result.row()
    assert row["total"] == pytest.approx(row["preparation"] + row["pause"] + row["drain"])
    assert 0.02 < row["pause"] < row["total"] < 1.0
    assert row["memory"] == {"before": 1000, "peak": 1000, "after": 1000, "image": None}
    assert row["throughput"]["ratio"] > 0.2
    assert 0.001 < row["throughput"]["step"] < 0.1
    assert row["requests"]["refused"] > 0
    assert 0.02 < row["silence"] < 0.5


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda server: setattr(server, "version", 8), ["output changed"]),
        (lambda server: setattr(server, "weights", 8), ["after: the new version"]),
        (lambda server: (to_8(server), setattr(server, "cut", True)), ["during: every request answered"]),
        (
            lambda server: (to_8(server), setattr(server, "says", lambda _: 9)),
            ["after: the new version"],
        ),
        (
            lambda server: (to_8(server), setattr(server, "says", lambda _: None)),
            ["during: only versions from the old to the new", "after: the new version"],
        ),
    ],
)
async def test_what_is_wrong_is_found(change: Callable[[Scripted], None], what: list[str]) -> None:
    assert failed(await measured(Scripted(), change)) == what


async def test_a_relabelled_state_may_change_nothing() -> None:
    relabel = lambda server: setattr(server, "version", 8)  # noqa: E731
    assert (await measured(Scripted(), relabel, same_state=True)).ok
    assert failed(await measured(Scripted(), to_8, same_state=True)) == [
        "the state is the same, so must the output be"
    ]


async def test_one_bit_of_a_logprob_is_a_difference() -> None:
    answers = await outputs(Scripted(), [[1], [2]], 3)
    assert equals_reference(answers, answers).ok
    nearly = [answers[0], replace(answers[1], logprobs=(*answers[1].logprobs[:-1], -3.0000000000000004))]
    check = equals_reference(answers, nearly)
    assert (check.ok, check.detail) == (False, "1 of 2 differ; prompt 1 in its log-probabilities")


async def test_an_answer_without_logprobs_is_none() -> None:
    with pytest.raises(ServerError, match="3 tokens has 0 log"):
        Output.of({"output_ids": [1, 2, 3], "meta_info": {}})


async def test_traffic_that_never_starts_is_an_error() -> None:
    traffic = Traffic(Scripted(refuse=True), [[1]], 4, CLOCK)
    traffic.start()
    with pytest.raises(ServerError, match="no tokens"):
        await traffic.flows(0.1)
    await traffic.stop(1.0)
    assert traffic.refused > 1


def test_rates_steps_and_silences() -> None:
    traffic = Traffic(Scripted(), [[1], [2]], 4, CLOCK)
    traffic.came = [(0.0, 1, 0), (0.1, 1, 1), (0.2, 1, 0), (0.3, 1, 1), (1.3, 2, 0), (1.4, 1, 1)]
    assert traffic.rate(0.0, 0.4) == pytest.approx(10)
    assert traffic.rate(1.0, 2.0) == 3
    assert traffic.rate(1.0, 1.0) is None
    assert traffic.step(0.0, 0.4) == pytest.approx(0.2)
    assert traffic.longest_silence(0.5, 0.6) == pytest.approx(1.0)
    assert traffic.longest_silence(1.31, 1.39) == pytest.approx(0.1)


def test_prompts_begin_apart() -> None:
    compared, load = prompts_of(4, 4, 3)
    assert len({prompt[0] for prompt in [*compared, *load]}) == 8
    assert prompts_of(4, 4, 3) == (compared, load)
    with pytest.raises(ValueError, match="at most 95 prompts"):
        prompts_of(90, 6, 0)


async def test_a_receiver_is_driven_by_our_route_where_it_is_and_else_by_the_stock_one() -> None:
    done: tuple[int, Any] = (200, {"success": True})
    for routes, last in (
        ({"/activate_weights": done}, "POST /activate_weights"),
        ({"/update_weights_from_disk": done}, "POST /update_weights_from_disk"),
    ):
        server = Scripted(routes={"/pull_weights": done, **routes})
        move = Receive(server, Path("/source"), Path("/local"), 8, CLOCK, "cpu")
        moved = await move()
        posts = [one for one in server.asked if one[0].startswith("POST")]
        assert posts[0] == ("POST /pull_weights", {
            "local_checkpoint_dir": "/local", "source_dir": "/source", "target_version": 8,
            "destination": "cpu",
        })  # fmt: skip
        assert posts[-1][0] == last
        assert (moved.number, moved.path, moved.image) == (8, "engine", None)
    stage = {"image_bytes": [64, 128], "images": 2}
    last = {"version": "job.1/weight_v000008", "destination": "cpu", "copy": 0.1, "bytes": 99, "stage": stage}
    said = {"destination": {"uses": "cpu"}, "last_update": last}
    routes = {"/pull_weights": done, "/activate_weights": done, "/stitch/status": (200, said)}
    moved = await Receive(Scripted(routes=routes), Path("/source"), Path("/local"), 8, CLOCK)()
    assert (moved.path, moved.copied, moved.image, moved.version) == ("cpu", 99, 384, last["version"])
    moved = await Receive(Scripted(routes=routes), Path("/source"), Path("/local"), 9, CLOCK)()
    assert (moved.path, moved.copied) == ("cpu", None), "what is said of another update counts for nothing"
    refused = Scripted(routes={"/pull_weights": (400, {"success": False, "message": "no such directory"})})
    with pytest.raises(NotMoved, match="no such directory"):
        await Receive(refused, Path("/source"), Path("/local"), 8, CLOCK)()


def test_the_memory_of_a_server_and_all_below_it() -> None:
    code = (
        "import socket, subprocess, sys; s = socket.create_server(('127.0.0.1', 0));"
        "c = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE);"
        "print(s.getsockname()[1], c.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port, child = map(int, process.stdout.readline().split())
        assert listening_process(port) == process.pid
        assert process_tree(process.pid) == [process.pid, child]
        assert resident([process.pid, child]) > resident([process.pid]) > 1_000_000
        process.communicate("\n")
    assert resident([process.pid]) == 0
    with socket.create_server(("127.0.0.1", 0)) as probe:
        assert listening_process(probe.getsockname()[1]) == os.getpid()
    assert listening_process(1) is None
