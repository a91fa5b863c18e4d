"""A trainer of four ranks on two hosts, over a real gloo group; one of them may be told to die at a step.

Started once as ``python -m tests.gloo.worker``: it imports torch, and forks the ranks of every scenario
(lines of JSON on its standard input) from there. A host is a directory: what a rank sees of the other's is
what the store and the group tell it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.directory import write_index
from stitch_core.files import PosixFiles
from stitch_core.ports import Buffer, FileSource
from stitch_core.safetensors import Tensor
from stitch_core.stores.local import LocalStore
from stitch_core.trainers import hooks
from stitch_core.trainers.group import ProcessGroup, RanksFailed
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher
from stitch_core.trainers.receipts import Duty
from stitch_core.trainers.settings import TrainerSettings
from stitch_core.versions import directory_name

SIZE = 4
DEADLINE = 30.0
STEPS = ("listing", "upload", "receipts", "manifest", "swap", "swapped")


def trained(name: str, tensor: Tensor, step: int) -> Tensor:
    """A tensor after ``step`` steps; -1 is the boot checkpoint. Any process can tell what it must be."""
    data = np.frombuffer(bytes(tensor.data), np.uint8)
    rng = np.random.default_rng([step + 1, *name.encode()])
    mask = rng.integers(0, 256, data.size, np.uint8) * (rng.random(data.size) < 0.3)
    return tensor if step < 0 else tensor._replace(data=(data ^ mask.astype(np.uint8)).tobytes())


def host(root: Path, rank: int) -> Path:
    return root / f"host{rank // 2}"


@dataclass(frozen=True)
class Scenario:
    """``kill`` is (rank, step, version); ``first`` the first training step, of ``steps``."""

    root: Path
    name: str
    first: int
    steps: int
    async_: bool = False
    kill: tuple[int, str, int] | None = None
    broken: bool = False


class Dying:
    """Ends this process at one step of publishing one version, as SIGKILL does at any moment."""

    def __init__(self, rank: int, kill: tuple[int, str, int]) -> None:
        _, self.step, self.number = kill
        self.rank = rank
        self.name = directory_name(self.number)

    def at(self, step: str) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        prefix_of, upload, finish, clean = (
            GroupPublisher._prefix, GroupPublisher._upload, GroupPublisher._finish, GroupPublisher._clean,
        )  # fmt: skip
        dying = self

        def _prefix(self: Any, number: int) -> Any:
            if number == dying.number:
                dying.at("listing")
            return prefix_of(self, number)

        def _upload(self: Any, directory: Path, duty: Duty, prefix: str) -> Any:
            here = directory.name == dying.name
            if here and not duty.uploads:
                dying.at("upload")  # one that uploads dies in the store
            receipts = upload(self, directory, duty, prefix)
            if here:
                dying.at("receipts")
            return receipts

        def _finish(self: Any, directory: Path, *rest: Any) -> None:
            here = directory.name == dying.name and dying.rank != 0  # rank 0 dies in the store
            if here:
                dying.at("manifest")
            finish(self, directory, *rest)
            if here:
                dying.at("swap")

        def _clean(self: Any, directory: Path) -> None:
            if directory.name == dying.name:
                dying.at("swapped")
            clean(self, directory)

        GroupPublisher._prefix = _prefix  # type: ignore[method-assign]
        GroupPublisher._upload = _upload  # type: ignore[method-assign]
        GroupPublisher._finish = _finish  # type: ignore[method-assign]
        GroupPublisher._clean = _clean  # type: ignore[method-assign]


class DyingStore(LocalStore):
    """Dies with the first file of the version uploaded, before its manifest, before or after its swap."""

    dying: Dying | None = None

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        if self.dying and f"manifests/{self.dying.number:06d}." in key:
            self.dying.at("manifest")
        await super().create(key, source)
        if self.dying and f"/{self.dying.name}/" in key:
            self.dying.at("upload")

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        here = (
            self.dying is not None
            and key.endswith("/head")
            and json.loads(data)["number"] == self.dying.number
        )
        if here and self.dying:
            self.dying.at("swap")
        tag = await super().swap(key, expected, data)
        if here and self.dying:
            self.dying.at("swapped")
        return tag


def train(scenario: Scenario, rank: int, say: Any) -> None:
    root = scenario.root
    torch.distributed.init_process_group(
        "gloo", f"file://{root}/{scenario.name}-rendezvous", timedelta(seconds=DEADLINE / 2), SIZE, rank
    )
    group = ProcessGroup(torch.distributed)
    files = PosixFiles()
    here = host(root, rank)
    settings = TrainerSettings(
        "r", f"file:{root}/store", here / "boot", here / "work", async_=scenario.async_, patience=20.0
    )
    store = DyingStore(root / "store")
    if scenario.kill is not None and scenario.kill[0] == rank:
        store.dying = Dying(rank, scenario.kill)
        store.dying.install()
    publisher = GroupPublisher(settings, group, files=files, store=lambda: store)
    start = publisher.claim()
    say(claimed=start.number)
    delta = OwnDelta(publisher, files)
    boot = Checkpoint.open(settings.boot, files)
    names = sorted(boot.tensors)
    # The first tensor belongs to all, as tied embeddings do.
    mine = [name for i, name in enumerate(names) if i == 0 or i % SIZE == rank]
    tensors = {n: Tensor(boot.tensors[n].dtype, boot.tensors[n].shape, boot.read(n)) for n in mine}
    for step in range(scenario.first, scenario.first + scenario.steps):
        now = {name: trained(name, tensor, step) for name, tensor in tensors.items()}
        say(published=delta.publish(now, step=step if step >= 0 else None))
    delta.flush()
    if scenario.broken:
        fail_together(publisher, group, here / "updates", say)
    publisher.close()


def fail_together(publisher: GroupPublisher, group: ProcessGroup, updates: Path, say: Any) -> None:
    """The hook is called for the parent directory on rank 0 alone; then one rank has a file that is cut."""
    hooks._TRAINER = hooks.Trainer(publisher.settings, group, "test")
    hooks._TRAINER._publisher = publisher
    if group.rank == 0:
        hooks.post_write(None, str(updates), [])
    number = publisher.number + 1
    directory, cut = updates / directory_name(number), "model-1.safetensors"
    if group.rank == 0:
        directory.mkdir(parents=True)
        write_index(directory, PosixFiles(), {"a": cut}, number=number, base_number=publisher.number)
    if group.rank == 3:
        directory.mkdir(parents=True)
        (directory / cut).write_bytes(b"cut")
    group.gather(None)
    try:
        hooks.post_write(None, str(directory), [])
    except RanksFailed as error:
        say(failed=str(error))


def run_rank(scenario: Scenario, rank: int) -> int:
    """Says what happened in a file; the exit code is 0 unless it is another failure than RanksFailed."""
    with (scenario.root / f"{scenario.name}-{rank}.jsonl").open("w", buffering=1) as out:

        def say(**what: Any) -> None:
            out.write(json.dumps(what) + "\n")

        try:
            train(scenario, rank, say)
        except RanksFailed as error:
            say(error=str(error))
        except BaseException as error:
            say(crash=repr(error))
            return 1
        return 0


def run(scenario: Scenario) -> list[int | None]:
    """Exit codes by rank (negative: the signal), None for one that has not ended by the deadline."""
    pids: list[int] = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run_rank(scenario, rank)
            finally:
                os._exit(code)
        pids.append(pid)
    codes: dict[int, int | None] = {}
    until = time.monotonic() + DEADLINE
    while len(codes) < SIZE and time.monotonic() < until:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def main() -> None:
    for line in sys.stdin:
        value = json.loads(line)
        root, kill = Path(value.pop("root")), value.pop("kill", None)
        scenario = Scenario(root, kill=None if kill is None else tuple(kill), **value)
        print(json.dumps(run(scenario)), flush=True)


if __name__ == "__main__":
    main()
