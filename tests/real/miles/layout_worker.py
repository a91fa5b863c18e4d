"""Ranks of the real Megatron actor of miles-rl, without Ray, its manager or a rollout.

``layout_worker.py ROOT SIZE PORT STEPS [tied] [flags for Miles]``: loads ROOT/boot, publishes, and again for
each ROOT/policy-N as if training had made it. One process imports everything and forks the ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
CPU = REPO / "tests" / "real" / "trainers_cpu"
RECIPE = REPO / "recipes" / "miles"


def main(root: Path, size: int, port: str, steps: int, extra: list[str]) -> int:
    sys.path[:0] = [str(CPU), str(RECIPE)]
    import missing_modules

    missing_modules.install()
    import cuda_calls

    cuda_calls.install()
    import framework

    framework.install()
    from driver import flags

    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
    usual = flags(root, 1, steps)
    if "tied" in extra:
        usual.remove("--untie-embeddings-and-output-weights")
        extra.remove("tied")
    sys.argv = ["train.py", *usual, *extra]
    import miles.backends.megatron_utils.actor  # noqa: F401
    from miles.utils.arguments import parse_args

    args = parse_args()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(args, root, r, size, port, steps)) for r in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def rank(args: Any, root: Path, rank: int, size: int, port: str, steps: int) -> None:
    import hf_load
    import miles.ray.train_actor as train_actor
    from miles.backends.megatron_utils.actor import MegatronTrainRayActor
    from safetensors.torch import load_file

    from stitch_core.trainers.hooks import trainer

    train_actor.get_local_gpu_id = lambda: 0
    actor = MegatronTrainRayActor(size, rank, "127.0.0.1", port)
    actor.init(args, "actor")
    updater = actor.weight_updater
    updater.update_weights()
    versions = [updater.weight_version]
    for step in range(steps):
        hf_load.fill(actor.model[0], args, load_file(root / f"policy-{step}" / "model.safetensors"))
        trainer().step = step
        updater.update_weights()
        versions.append(updater.weight_version)
    print(f"rank {rank}: versions {versions}", flush=True)


if __name__ == "__main__":
    directory, count, port, steps, *extra = sys.argv[1:]
    sys.exit(main(Path(directory), int(count), port, int(steps), extra))
