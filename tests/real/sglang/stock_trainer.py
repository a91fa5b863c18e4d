"""What a stock trainer writes, and asks of a replica that receives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import write_checkpoint
from stitch_core.versions import directory_name

from .checkpoints import random_weights, to_publish, write
from .server import SGLangServer
from .world import faults

FILES = PosixFiles()
ADMIN = "s3cret"
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


class Trainer:
    """As stock slime does it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.boot = write(scratch / "boot", random_weights(0))
        self.roots = scratch / "shared"
        self.source, self.local = self.roots / "deltas", self.roots / "local"
        self.source.mkdir(parents=True)
        self.encoder = DeltaEncoder.from_checkpoint(Checkpoint.open(self.boot, FILES))
        self.number = 0
        settings = {
            "STITCH_RECEIVE": "job", "STITCH_ROOTS": str(self.roots), "STITCH_KV_MODE": "retract",
            "STITCH_ID": "receiver", "STITCH_PIN_DRAIN": "20", "STITCH_HOST_DIR": str(scratch / "host"),
            **faults(scratch),
        }  # fmt: skip
        arguments = ("--disable-overlap-schedule", "--admin-api-key", ADMIN)
        self.server = SGLangServer(self.boot, scratch, settings, arguments)
        self.server.headers = {"Authorization": f"Bearer {ADMIN}"}

    def write(self, seed: int) -> int:
        """The weights of ``seed`` as the next delta directory."""
        self.number += 1
        directory = self.source / directory_name(self.number)
        self.encoder.encode(
            to_publish(random_weights(seed)),
            directory,
            FILES,
            number=self.number,
            base_number=self.number - 1,
        )
        self.encoder.commit()
        return self.number

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        status, answer, _ = await self.server.call("POST", path, body)
        return status, answer

    async def pull(self, number: int, **changes: Any) -> tuple[int, Any]:
        body = {
            "local_checkpoint_dir": str(self.local), "source_dir": str(self.source), "target_version": number
        }  # fmt: skip
        return await self.post("/pull_weights", **{**body, **changes})

    async def update(self, number: int, **changes: Any) -> tuple[int, Any]:
        body = {"model_path": str(self.local), "weight_version": str(number)}
        return await self.post("/update_weights_from_disk", **{**body, **changes})

    def write_full(self, tensors: dict[str, Tensor], shards: int = 2) -> Path:
        """A checkpoint as the next version, whose index names no digests."""
        self.number += 1
        directory = self.source / directory_name(self.number)
        write_checkpoint(directory, FILES, tensors, shards)
        return directory

    async def said(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.server.call("GET", "/stitch/status"))[1]
        return answer

    async def move(self, number: int) -> None:
        """As slime does it; a status that is no success ends its run."""
        for status, answer in (
            await self.pull(number),
            await self.post("/pause_generation"),
            (await self.server.call("GET", "/flush_cache"))[:2],
            await self.update(number),
            await self.post("/continue_generation"),
        ):
            assert status == 200, answer

    async def activate(self, number: int, destination: str) -> None:
        """By our routes, and with that destination."""
        assert (await self.pull(number, destination=destination))[0] == 200
        status, answer = await self.post("/activate_weights", target_version=number)
        assert (status, answer["success"]) == (200, True), answer
        assert (await self.said())["last_update"]["destination"] == destination
        assert (await self.server.generate(PROMPT))["meta_info"]["weight_version"] == str(number)

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self.server.call("GET", "/ready"))[1]
        return status
