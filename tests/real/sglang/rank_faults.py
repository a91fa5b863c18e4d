"""Faults of one rank, on demand: a plugin of SGLang beside Stitch's, copied to where a test's server looks.

A fault happens while there is a file of its name in the directory FAULTS: ``copy``, ``read`` and ``unfit``
on rank 1, ``memory``, ``slow`` (a read takes half a second), ``altered`` (the live weights are none of the
boot checkpoint's) and ``damaged`` (after a copy one live tensor is another) everywhere.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def register() -> None:
    from stitch_sglang import ranks
    from stitch_sglang.image import Image
    from stitch_sglang.reading import Reader
    from stitch_sglang.survey import Unfit

    copy, read, memory, opened = Image.copy_to_live, Reader._read, ranks.available_memory, ranks._open

    def there(name: str) -> bool:
        return (Path(os.environ["FAULTS"]) / name).exists()

    def wanted(name: str) -> bool:
        import torch

        return there(name) and torch.distributed.get_rank() == 1

    def copy_to_live(self, numbers, workers):
        numbers = list(numbers)
        if not wanted("copy"):
            copied = copy(self, numbers, workers)
            if there("damaged"):
                models[-1].layers[1].mlp.down_proj.weight.data.mul_(-1)
            return copied
        copy(self, numbers[:1], workers)
        raise RuntimeError("a fault after the first segment")

    def read_tensor(self, name, ref):
        if wanted("read"):
            raise OSError(f"a fault at {name}")
        if wanted("unfit"):
            raise Unfit(f"no stage of {name}")
        if there("slow"):
            time.sleep(0.5)
        return read(self, name, ref)

    models = []

    def open_stager(scheduler):
        models.append(scheduler.tp_worker.model_runner.model.model)
        if there("altered"):
            models[-1].norm.weight.data.add_(1)
        return opened(scheduler)

    ranks._open = open_stager
    ranks.available_memory = lambda: 1000 if there("memory") else memory()
    Image.copy_to_live, Reader._read = copy_to_live, read_tensor
