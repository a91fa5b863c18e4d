"""What the plugin relies on in slime; run on revision 624b824a8 of 2026-08-21."""

from __future__ import annotations

from stitch_core.trainers.signatures import Symbol

UPDATER = (
    "slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta:UpdateWeightFromDiskDelta"
)

TRAINER = (
    Symbol(f"{UPDATER}.update_weights", ("self",), "publish"),
    Symbol(f"{UPDATER}._capture_baseline", ("self",), "claim before the first snapshot"),
    Symbol(f"{UPDATER}._iter_hf_tensors", ("self",), "tensors without dimensions"),
    Symbol("slime.utils.distributed_utils:get_gloo_group", (), "receipts"),
)

ROLLOUT = (
    Symbol("slime.utils.http_utils:post", ("url", "payload"), "constraints"),
    Symbol("slime.rollout.sglang_rollout:generate", ("args", "sample", "sampling_params"), "generation"),
    Symbol(
        "slime.rollout.sglang_rollout:generate_and_rm", ("args", "sample", "sampling_params", "evaluation"),
        "generation",
    ),
    Symbol(
        "slime.rollout.sglang_rollout:generate_rollout", ("args", "rollout_id", "data_source", "evaluation"),
        "rollout",
    ),
    Symbol("slime.rollout.data_source:RolloutDataSource.save", ("self", "rollout_id"), "record"),
    Symbol("slime.rollout.data_source:RolloutDataSource.load", ("self", "rollout_id"), "resume"),
)  # fmt: skip

# What a launch script names (MILES_FORK.md, docs/trainers.md).
FLAGS = (
    "--rollout-external-engine-addrs", "--sglang-router-ip", "--sglang-router-port", "--update-weight-mode",
    "--update-weight-transport", "--update-weight-disk-dir", "--update-weight-local-checkpoint-dir",
    "--update-weight-delta-checksum", "--custom-update-weight-post-write-path",
    "--custom-megatron-init-path", "--custom-megatron-before-train-step-hook-path",
    "--rollout-function-path", "--rollout-sample-hook-path", "--data-source-path", "--custom-config-path",
)  # fmt: skip
GROUPS = (TRAINER, ROLLOUT)
