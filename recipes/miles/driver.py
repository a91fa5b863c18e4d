"""The training loop of stock Miles, as its own script has it: generate, train, save, update weights.

Run in the environment of miles-rl: ``driver.py ROOT FRONT_PORT ROLLOUTS [overlap] [flags for Miles]``. With
``overlap`` the next rollout is generated while the trainer trains and publishes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
# What a machine without a GPU lacks.
CPU = REPO / "tests" / "real" / "trainers_cpu"


def flags(root: Path, port: int, rollouts: int) -> list[str]:
    from policy import LAYOUT

    boot, out = str(root / "boot"), str(root / "ckpt")
    resumes = (root / "ckpt" / "latest_checkpointed_iteration.txt").exists()
    return [
        "--train-backend", "megatron", "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1",
        "--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1", "--hf-checkpoint", boot,
        # Megatron cannot load the state of torch's own Adam, which stands in for a fused one here.
        *(["--no-load-optim", "--no-load-rng"] if resumes else []),
        "--ref-load", boot, "--load", out if resumes else boot, "--save", out, "--save-interval", "1",
        # Miles always starts at rollout 0 in bridge mode, and loads a Hugging Face checkpoint in no other.
        "--megatron-to-hf-mode", "raw" if resumes else "bridge", "--ckpt-format", "torch",
        "--model-name", "qwen3",
        "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "4",
        "--num-rollout", str(rollouts), "--micro-batch-size", "1", "--rollout-max-response-len", "12",
        "--prompt-data", str(root / "prompts.jsonl"), "--input-key", "input", "--label-key", "label",
        "--custom-rm-path", "reward.reward", "--advantage-estimator", "grpo", "--lr", "1e-3",
        "--optimizer", "adam", "--bf16", "--sglang-server-concurrency", "4",
        "--save-debug-rollout-data", str(root / "samples_{rollout_id}.pt"), *LAYOUT,
        # What has no GPU.
        "--distributed-backend", "gloo", "--transformer-impl", "local",
        "--custom-model-provider-path", "cpu_model.provider", "--position-embedding-type", "rope",
        "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion",
        "--no-rope-fusion", "--no-persist-layer-norm", "--use-cpu-initialization",
        "--attention-backend", "unfused", "--hidden-dropout", "0", "--attention-dropout", "0",
        "--no-offload-train", "--no-offload-rollout",
        # What Stitch adds.
        "--rollout-external", "--rollout-external-engine-addrs", f"127.0.0.1:{port}",
        "--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(port),
        "--custom-megatron-init-path", "stitch_miles.hooks.megatron_init",
        "--custom-megatron-before-train-step-hook-path", "stitch_miles.hooks.before_train_step",
        "--rollout-function-path", "stitch_miles.rollout.generate_rollout",
        "--custom-generate-function-path", "stitch_miles.rollout.generate",
        "--data-source-path", "stitch_miles.data.StitchDataSource",
        "--custom-config-path", str(root / "stitch.yaml"),
    ]  # fmt: skip


def main(root: Path, port: int, rollouts: int, extra: list[str]) -> None:
    for path in (CPU, HERE, *(REPO / "plugins" / name for name in ("miles", "slime", "gateway")), REPO):
        sys.path.insert(0, str(path))
    import missing_modules

    missing_modules.install()
    import cuda_calls

    cuda_calls.install()
    import framework

    framework.install()
    overlap = "overlap" in extra
    extra = [flag for flag in extra if flag != "overlap"]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron insists on it with several ranks
    sys.argv = ["train.py", *flags(root, port, rollouts), *extra]
    import ray

    ray.init(
        num_cpus=8, num_gpus=6, include_dashboard=False, _temp_dir=os.environ["RAY_DIRECTORY"],
        object_store_memory=200_000_000,
        runtime_env={
            "env_vars": {
                "PYTHONPATH": os.pathsep.join(sys.path[:7]), "STITCH_CPU_TRAINER": "1", "HF_HUB_OFFLINE": "1",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            }
        },
    )  # fmt: skip
    from miles.utils.arguments import parse_args

    asyncio.run(train(parse_args(), overlap))
    ray.shutdown()


async def train(args: Any, overlap: bool) -> None:
    import miles.ray.placement_group as placement

    if overlap:
        # Miles' manager does one thing at a time: updating weights would wait for the rollout to end.
        placement.RolloutManager = Concurrent(placement.RolloutManager)
    groups = placement.create_placement_groups(args)
    rollout_manager, _ = placement.create_rollout_manager(args, groups["rollout"])
    actor, _ = await placement.create_training_models(args, groups, rollout_manager)
    await actor.update_weights()
    print(f"started at {args.start_rollout_id}", flush=True)
    if overlap:
        await overlapping(args, rollout_manager, actor)
    else:
        await one_by_one(args, rollout_manager, actor)
    await rollout_manager.dispose.remote()


async def one_by_one(args: Any, rollout_manager: Any, actor: Any) -> None:
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        data = await rollout_manager.generate.remote(rollout_id)
        await actor.train(rollout_id, data)
        await actor.save_model(rollout_id)
        await rollout_manager.save.remote(rollout_id)
        await actor.update_weights()
        print(f"finished {rollout_id}", flush=True)


async def overlapping(args: Any, rollout_manager: Any, actor: Any) -> None:
    ahead = rollout_manager.generate.remote(args.start_rollout_id)
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        data = await ahead
        # Before more prompts are taken, so that a resumed run takes these again.
        await rollout_manager.save.remote(rollout_id)
        if rollout_id + 1 < args.num_rollout:
            ahead = rollout_manager.generate.remote(rollout_id + 1)
        await actor.train(rollout_id, data)
        await actor.save_model(rollout_id)
        await actor.update_weights()
        print(f"finished {rollout_id}", flush=True)


class Concurrent:
    """An actor class of Ray whose actors answer while they generate."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def options(self, **options: Any) -> Any:
        return self._actor.options(**options, max_concurrency=4)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
