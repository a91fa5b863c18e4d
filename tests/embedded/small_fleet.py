"""A run of minutes in a second: real publisher, engines, gates and reconcilers in one process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zstandard

from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.ports import KVMode, SystemClock
from stitch_core.replica.activation import ActivationSettings
from stitch_core.replica.admission import Gate
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.replica.reconciler import Follow, Reconciler
from stitch_core.safetensors import Tensor
from stitch_core.stores import open_store
from stitch_core.testing.asgi_client import AsgiClient
from stitch_embedded.config import ModelConfig
from stitch_embedded.engine import EmbeddedEngine, Options
from stitch_embedded.server import Server
from tests.embedded.models import config_json, nudged, random_tensors, save

MAX_LEN = 40
CONFIG = ModelConfig.from_dict(config_json())
REPORT = ("weight_versions", "kv_versions", "kv_passes", "kv")


class Relabelling(EmbeddedEngine):
    """Takes every label and copies nothing."""

    async def prepare(self, checkpoint: Path, changed: Any) -> None:
        await super().prepare(checkpoint, ())


def as_core(tensors: dict[str, torch.Tensor]) -> dict[str, Tensor]:
    return {
        name: Tensor("BF16", tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


class Replica:
    """One replica of the run in ``root``."""

    def __init__(self, root: Path, name: str, kv_mode: KVMode, engine_type: type[EmbeddedEngine]) -> None:
        self.name, self.kv_mode = name, kv_mode
        options = Options(max_len=MAX_LEN, max_running=8, prefill_rows=8, pace=0.01, seed=1)
        self.engine = engine_type(root / "boot", options)
        self.gate = Gate(SystemClock())
        self.store = open_store(f"file:{root / 'store'}")
        self.host = HostCheckpoint(root / f"host-{name}", PosixFiles())
        self.reconciler = Reconciler(
            self.store, self.engine, self.gate, self.host, Follow("r"), root / "boot", PosixFiles(),
            SystemClock(), random.Random(0), asyncio.to_thread, ActivationSettings(kv_mode), poll=3600.0,
        )  # fmt: skip
        app = StitchMiddleware(
            Server(self.engine, None), self.gate, status=self.reconciler.status, wake=self.reconciler.wake,
            mismatch=self.reconciler.mismatch, abort=self.engine.abort,
        )  # fmt: skip
        self.client = AsgiClient(app)

    async def follow(self) -> None:
        while await self.reconciler.reconcile():
            pass

    async def generate(self, number: int, rng: random.Random, control: str | None = None) -> dict[str, Any]:
        """One line of the trajectory file."""
        prompt = [rng.randrange(37) for _ in range(rng.choice((2, 5, 11)))]
        body = {
            "input_ids": prompt, "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": rng.randint(12, 20), "ignore_eos": True, "sampling_seed": number,
            },
        }  # fmt: skip
        call = await self.client.post("/generate", body)
        assert call.status == 200, call.json()
        answer = call.json()
        meta = answer["meta_info"]
        return {
            "id": f"{self.name}-{number}", "run": meta["run"], "replica": self.name, "kv_mode": self.kv_mode,
            "prompt_ids": prompt, "output_ids": answer["output_ids"], "temperature": 1.0, "control": control,
            "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
            **{name: meta[name] for name in REPORT if name in meta},
        }  # fmt: skip

    async def close(self) -> None:
        await self.engine.close()
        self.host.close()
        await self.store.close()


async def make_run(root: Path, versions: int = 6) -> list[dict[str, Any]]:
    """Train, serve and follow in ``root``; the lines that were recorded. Version 3 is 2 again."""
    tensors = random_tensors(CONFIG, 0)
    save(root / "boot", config_json(), tensors)
    publisher = await asyncio.to_thread(
        PolicyPublisher.start, f"file:{root / 'store'}", "r", root / "boot", root / "work"
    )
    replicas = [Replica(root, mode, mode, EmbeddedEngine) for mode in ("in_place", "retract")]
    rng = random.Random(1)
    lines: list[dict[str, Any]] = []
    try:
        for replica in replicas:
            replica.engine.start()
            await replica.follow()
        for number in range(1, versions + 1):
            if number != 3:
                tensors = nudged(tensors, number)
            published = await asyncio.to_thread(publisher.publish, as_core(tensors))
            await asyncio.wrap_future(published)
            # Under way when the replicas move on.
            running = [
                asyncio.ensure_future(replica.generate(100 * number + i, rng))
                for replica in replicas
                for i in range(4)
            ]
            await asyncio.gather(*(replica.follow() for replica in replicas))
            lines += await asyncio.gather(*running)
        lines += await _lies(root, rng)
    finally:
        await asyncio.to_thread(publisher.close)
        for replica in replicas:
            await replica.close()
    return lines


async def _lies(root: Path, rng: random.Random) -> list[dict[str, Any]]:
    """What a replica says that relabels without copying."""
    liar = Replica(root, "faulty", "in_place", Relabelling)
    try:
        liar.engine.start()
        await liar.follow()
        return [await liar.generate(i, rng, "faulty") for i in range(4)]
    finally:
        await liar.close()


def write(directory: Path, lines: list[dict[str, Any]], **changes: Any) -> Path:
    """The files that a run leaves; every line in a frame of its own, as a careful writer would."""
    description = {"store": "store", "run": "r", "boot": "boot", "max_len": MAX_LEN, "min_spanning": 4}
    (directory / "run.json").write_text(json.dumps({**description, **changes}))
    compress: Callable[[bytes], bytes] = zstandard.ZstdCompressor().compress
    data = b"".join(compress(json.dumps(line).encode() + b"\n") for line in lines)
    (directory / "trajectories.jsonl.zst").write_bytes(data)
    return directory
