"""Promise 1 under load: versions move, engines die and come back, clients leave, and no label is ever wrong.

The fake engine's tokens are a hash of the weights that sampled them and computed their keys and values, so
each answer can be checked against its own report.
"""

import asyncio
import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.ports import SystemClock
from stitch_core.replica.admission import Gate
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.replica.server import listen, serve
from stitch_core.testing.checkpoints import random_tensors, step, write_checkpoint
from stitch_core.testing.fake_engine import FakeEngine
from stitch_core.testing.fake_server import FakeServer, Manners
from stitch_core.versions import PolicyVersion
from stitch_gateway.app import run_gateway
from stitch_gateway.pools import StaticPool

# Their weights come again and again, so that versions move for as long as it takes.
WEIGHTS, LAST = 5, 1000
# Not for a time, but until this much was seen: a busy machine takes longer.
ENOUGH = {"ok": 150, "spans": 5, 409: 1}
PATIENCE = 150.0


class Replica:
    """A fake engine behind the middleware, led through the versions by a crude reconciler."""

    def __init__(self, checkpoints: list[Path], seed: int) -> None:
        self.checkpoints = checkpoints
        self.number = 0
        self.rng = random.Random(seed)
        self.gate = Gate(SystemClock(), hold=2.0)
        self.engine = FakeEngine(checkpoints[0], step_seconds=0.002)
        server = FakeServer(self.engine, Manners(kv_versions=True, split=50))
        self.app = StitchMiddleware(
            server, self.gate, status=dict, wake=lambda: None, mismatch=self.mismatch,
            abort=self.engine.abort, grace=0.5,
        )  # fmt: skip
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def mismatch(self, reason: str) -> None:
        self.gate.forget(reason)

    async def live(self) -> None:
        """Follow the versions; now and then the engine restarts, and nobody tells the gate at once."""
        while True:
            if self.gate.serving is None:
                await self.activate()
            await asyncio.sleep(self.rng.uniform(0.05, 0.3))
            if self.rng.random() < 0.15:
                self.engine.restart()
                await asyncio.sleep(0.02)
                self.gate.forget("the engine was restarted")
            elif self.number < LAST and self.rng.random() < 0.4:
                self.number += 1
                await self.activate()

    async def activate(self) -> None:
        version = PolicyVersion("r", self.number)
        await self.engine.prepare(self.checkpoints[self.number % WEIGHTS], list(self.engine._table))
        if self.gate.serving is not None:
            self.gate.leave_version()
            now = SystemClock().monotonic()
            revoked = await self.gate.drain(now + 0.1, pins_only=True)
            for ticket in revoked:
                await self.engine.abort(ticket.request_id)
        self.gate.close("activating")
        await self.engine.pause("in_place")
        await self.engine.activate(str(version))
        await self.engine.resume()
        self.gate.open(version)


def check(answer: dict[str, Any], prompt: bytes, states: list[str]) -> None:
    """Recompute every token from what the report claims."""
    meta, output = answer["meta_info"], answer["output_ids"]
    claimed = [span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]
    kv = [span["version"] for span in meta["kv_versions"] for _ in range(span["start"], span["end"])]
    assert len(claimed) == len(output)
    known = [*prompt, *output]
    rows = [
        (token, states[version % WEIGHTS]) for token, version in zip(known, [*kv, *claimed], strict=False)
    ]
    for i, token in enumerate(output):
        seen = repr((0, states[claimed[i] % WEIGHTS], rows[: len(prompt) + i]))
        assert int.from_bytes(hashlib.sha256(seen.encode()).digest()[:2]) % 26 == token, (i, meta)


async def client(
    url: str,
    session: aiohttp.ClientSession,
    seed: int,
    replicas: list[Replica],
    states: list[str],
    seen: Counter[Any],
    over: asyncio.Event,
) -> None:
    """Until ``over``: aiohttp may take being cancelled for its own timeout, if both come in one turn."""
    rng = random.Random(seed)
    while not over.is_set():
        prompt = rng.choice(["the same", "the same beginning", f"{rng.random()}"])
        exact = rng.random() < 0.2
        # Now and then a version that nobody will have: it is held, and then answered 409.
        newest = max(replica.number for replica in replicas)
        number = LAST + 1 if rng.random() < 0.03 else rng.randint(max(0, newest - 4), newest)
        demand = {"exact_version" if exact else "min_version": number}
        stream = rng.random() < 0.5
        body = {
            "text": prompt, "stream": stream, "weight_version": demand,
            "sampling_params": {"max_new_tokens": rng.choice([1, 5, 40, 120])},
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=rng.choice([0.05, None, None, None]))
        try:
            async with session.post(url + "/generate", json=body, timeout=timeout) as response:
                data = await response.read()
        except TimeoutError:
            seen["left"] += 1
            continue
        if response.status != 200:
            seen[response.status] += 1
            continue
        answer = last_event(data) if stream else json.loads(data)
        if "error" in answer:
            seen["cut stream"] += 1
            continue
        meta = answer["meta_info"]
        check(answer, prompt.encode(), states)
        if answer["output_ids"]:
            assert meta["weight_version_start"] >= demand.get("min_version", 0)
            if exact:
                assert meta["weight_version_start"] == meta["weight_version_end"] == demand["exact_version"]
        seen["ok"] += 1
        seen["spans"] += meta["weight_version_start"] != meta["weight_version_end"]


async def enough(seen: Counter[Any]) -> None:
    while any(seen[what] < least for what, least in ENOUGH.items()):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def last_event(data: bytes) -> Any:
    events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event.strip()]
    return json.loads(events[-2] if events[-1] == b"[DONE]" else events[-1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_every_answer_is_what_it_says(tmp_path: Path, seed: int) -> None:
    generator, files = np.random.default_rng(seed), PosixFiles()
    tensors, checkpoints = random_tensors(generator), []
    for number in range(WEIGHTS):
        checkpoints.append(tmp_path / str(number))
        write_checkpoint(checkpoints[-1], files, tensors)
        tensors = step(generator, tensors, 0.05)
    states = [Checkpoint.open(path, files).state() for path in checkpoints]
    replicas = [Replica(checkpoints, seed * 10 + i) for i in range(3)]
    seen: Counter[Any] = Counter()
    over = asyncio.Event()
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    servers = [asyncio.ensure_future(serve(r.app, r.listener, stop, grace=5)) for r in replicas]
    pool, options = StaticPool([r.url for r in replicas]), {"hold": 2.0, "poll": 0.05, "drain": 1.0}
    running = run_gateway(pool, "127.0.0.1", 0, stop=stop, on_ready=port.set_result, **options)
    gateway = asyncio.ensure_future(running)
    url = f"http://127.0.0.1:{await port}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        work = [asyncio.ensure_future(replica.live()) for replica in replicas]
        work += [
            asyncio.ensure_future(client(url, session, seed * 100 + i, replicas, states, seen, over))
            for i in range(24)
        ]
        work.append(asyncio.ensure_future(enough(seen)))
        done, _ = await asyncio.wait(work, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        over.set()
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for task in done:
            task.result()  # nobody else ends but by a failed check
    assert done, f"not in {PATIENCE:g} s: {seen}"
    stop.set()
    await asyncio.gather(gateway, *servers)
    for replica in replicas:
        replica.listener.close()
        await replica.engine.close()
        assert replica.gate.active == 0
    assert not set(seen) - {"ok", "spans", "left", "cut stream", 409, 410, 503}
