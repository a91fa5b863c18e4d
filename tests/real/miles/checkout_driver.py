"""The stock ``train_async.py`` of a slime checkout or ``train.py`` of a Miles one, with what Stitch adds.

With ``fully-async`` it is ``train_async.py`` of Miles.

Run in the environment of miles-rl: ``checkout_driver.py ROOT PORT ROLLOUTS CHECKOUT [fully-async] [flags]``.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
CPU = HERE.parent / "trainers_cpu"
RECIPE = REPO / "recipes" / "miles"

STITCH = {
    "slime": [
        "--update-weight-mode", "delta", "--update-weight-transport", "disk",
        "--rollout-function-path", "stitch_slime.rollout.generate_rollout",
        "--rollout-sample-hook-path", "stitch_slime.rollout.record_version",
    ],
    "miles": [
        "--rollout-external", "--update-weight-transfer-mode", "disk-delta",
        "--custom-generate-function-path", "stitch_miles.rollout.generate",
    ],
}  # fmt: skip
# Miles takes the one or the other.
ROLLOUT = ["--rollout-function-path", "stitch_miles.rollout.StitchRolloutFn"]
FULLY_ASYNC = ["--fully-async", "--custom-async-data-buffer-path", "stitch_miles.buffer.StitchDataBuffer"]


def flags(root: Path, port: int, rollouts: int, framework: str) -> list[str]:
    from policy import LAYOUT

    boot, out = str(root / "boot"), str(root / "ckpt")
    resumes = (root / "ckpt" / "latest_checkpointed_iteration.txt").exists()
    return [
        "--train-backend", "megatron", "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1",
        "--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1", "--hf-checkpoint", boot,
        # Megatron cannot load the state of torch's own Adam, which stands in for a fused one here.
        "--no-load-optim", "--no-load-rng", "--ckpt-format", "torch",
        "--ref-load", boot, "--load", out if resumes else boot, "--save", out, "--save-interval", "1",
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
        *STITCH[framework],
        "--rollout-external-engine-addrs", f"127.0.0.1:{port}",
        "--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(port),
        "--update-weight-disk-dir", str(root / "updates"),
        "--update-weight-local-checkpoint-dir", str(root / "unused"),
        "--custom-update-weight-post-write-path", f"stitch_{framework}.hooks.post_write",
        "--custom-megatron-init-path", f"stitch_{framework}.hooks.megatron_init",
        "--custom-megatron-before-train-step-hook-path", f"stitch_{framework}.hooks.before_train_step",
        "--data-source-path", f"stitch_{framework}.data.StitchDataSource",
        "--custom-config-path", str(root / "stitch.yaml"),
        # Miles loads a Hugging Face checkpoint in bridge mode only, which always starts at rollout 0.
        *(["--megatron-to-hf-mode", "raw" if resumes else "bridge"] if framework == "miles" else []),
    ]  # fmt: skip


def main(root: Path, port: int, rollouts: int, checkout: Path, extra: list[str]) -> None:
    plugins = (REPO / "plugins" / name for name in ("miles", "slime", "gateway"))
    paths = [str(path) for path in (checkout, REPO, *plugins, RECIPE, CPU)]
    sys.path[:0] = paths
    framework_name = "slime" if (checkout / "slime").is_dir() else "miles"
    os.environ["SLIME_ACCELERATOR"] = "cputest"
    import missing_modules

    missing_modules.install()
    import cuda_calls

    cuda_calls.install()
    import framework

    framework.install()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron insists on it with several ranks
    fully_async = "fully-async" in extra
    extra = [flag for flag in extra if flag != "fully-async"]
    if framework_name == "miles":
        extra += FULLY_ASYNC if fully_async else ROLLOUT
    sys.argv = ["train.py", *flags(root, port, rollouts, framework_name), *extra]
    import ray

    ray.init(
        num_cpus=6, num_gpus=4, include_dashboard=False, _temp_dir=os.environ["RAY_DIRECTORY"],
        object_store_memory=200_000_000,
        runtime_env={
            "env_vars": {
                "PYTHONPATH": os.pathsep.join(paths), "STITCH_CPU_TRAINER": "1", "HF_HUB_OFFLINE": "1",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
                "SLIME_ACCELERATOR": "cputest", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            }
        },
    )  # fmt: skip
    if framework_name == "slime":
        import train_async
        from slime.utils.arguments import parse_args

        train_async.train(parse_args())
    else:
        from miles.utils.arguments import parse_args

        from stitch_miles.launch import place_external_engines

        place_external_engines()
        loop = importlib.import_module("train_async" if fully_async else "train")
        asyncio.run(loop.train(parse_args()))
    print("finished", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
