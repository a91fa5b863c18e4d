"""One rank of a trainer on a real gloo group: publishes a few versions, then one fails, then rank 1 dies."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.trainers import hooks
from stitch_core.trainers.group import ProcessGroup, RanksFailed
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher
from stitch_core.trainers.settings import TrainerSettings
from stitch_core.trainers.torch_bytes import as_tensor
from stitch_core.versions import directory_name


def main(root: Path, rank: int, size: int) -> None:
    torch.distributed.init_process_group(
        "gloo", f"file://{root}/rendezvous", timedelta(seconds=60), size, rank
    )
    gloo = torch.distributed.new_group(backend="gloo")
    group = ProcessGroup(torch.distributed, lambda: gloo)
    files = PosixFiles()
    settings = TrainerSettings("r", f"file:{root}/store", root / "boot", root / "work")
    publisher = GroupPublisher(settings, group)
    publisher.claim()
    delta = OwnDelta(publisher, files)
    boot = Checkpoint.open(root / "boot", files)
    torch.manual_seed(rank)
    mine = {}
    for i, (name, ref) in enumerate(sorted(boot.tensors.items())):
        if i % size == rank and ref.dtype in ("F32", "BF16"):
            dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[ref.dtype]
            raw = torch.frombuffer(bytearray(boot.read(name) or bytes(8)), dtype=dtype)
            mine[name] = raw[: ref.nbytes // raw.element_size()].reshape(ref.shape)
    done = [delta.publish({name: as_tensor(value) for name, value in mine.items()})]
    for step in range(2):
        mine = {name: value + 1 for name, value in mine.items()}
        done.append(delta.publish({name: as_tensor(value) for name, value in mine.items()}, step=step))
    print("published", done, flush=True)

    # The frameworks call the hook for the parent directory on rank 0 alone: nothing collective may happen.
    hooks._TRAINER = hooks.Trainer(settings, group, "test")
    hooks._TRAINER._publisher = publisher
    if rank == 0:
        hooks.post_write(None, str(root / "updates"), [])

    directory = root / "updates" / directory_name(3)
    if rank == 1:
        files.make_dirs(directory)
        files.write_new(directory / "model-1.safetensors", b"cut")
    try:
        hooks.post_write(None, str(directory), [])
    except RanksFailed as error:
        print("failed", error, flush=True)
    if rank == 1:
        os._exit(0)  # as SIGKILL would: the other rank is told by gloo alone
    try:
        publisher.reserve()
        publisher.publish(directory, 4)
    except RanksFailed as error:
        print("alone", error, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
