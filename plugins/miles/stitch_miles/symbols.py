"""What the plugin relies on in Miles; run on miles-rl 0.0.2, read in revision 31f1ca961 of 2026-08-21.

``DELTA`` are releases that publish deltas themselves, ``GATHER`` those before, where the framework's gather
feeds Stitch's own encoder.
"""

from __future__ import annotations

import importlib.util

from stitch_core.trainers.signatures import Symbol

_UPDATE = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed"
UPDATER = f"{_UPDATE}.delta:UpdateWeightFromDiskDelta"
MIXIN = f"{_UPDATE}.mixin:DistBucketedWeightUpdateMixin"

COMMON = (
    Symbol("miles.utils.distributed_utils:get_gloo_group", (), "receipts"),
    Symbol("miles.utils.http_utils:post", ("url", "payload"), "constraints"),
)
DELTA = (
    Symbol(f"{UPDATER}.update_weights", ("self",), "publish"),
    Symbol(f"{UPDATER}._capture_baseline", ("self",), "claim before the first snapshot"),
    Symbol(f"{UPDATER}._for_each_hf_bucket", ("self", "bucket_func"), "tensors without dimensions"),
)
GATHER = (
    Symbol(
        f"{MIXIN}._gather_and_update_non_expert_weights",
        ("self", "update_bucket_weight_func", "pbar"),
        "own updater: gather",
    ),
    Symbol(
        f"{MIXIN}._gather_and_update_expert_weights",
        ("self", "update_bucket_weight_func", "pbar"),
        "own updater: gather of experts",
    ),
    Symbol("miles.backends.megatron_utils.actor:UpdateWeightFromDistributed", None, "own updater: its place"),
    Symbol("miles.backends.training_utils.parallel:get_parallel_state", (), "own updater: source ranks"),
)
ROLLOUT = (
    Symbol("miles.utils.http_utils:post", ("url", "payload"), "constraints"),
    Symbol("miles.rollout.generate_hub.single_turn:generate", ("input",), "generation"),
    Symbol("miles.rollout.data_source:RolloutDataSource.save", ("self", "rollout_id"), "record"),
    Symbol("miles.rollout.data_source:RolloutDataSource.load", ("self", "rollout_id"), "resume"),
)  # fmt: skip

# What a launch script names (MILES_FORK.md, docs/trainers.md): always, and where Miles writes deltas itself.
FLAGS = (
    "--rollout-external", "--rollout-external-engine-addrs", "--sglang-router-ip", "--sglang-router-port",
    "--custom-megatron-init-path",
    "--custom-megatron-before-train-step-hook-path", "--rollout-function-path",
    "--custom-generate-function-path", "--data-source-path", "--custom-config-path",
)  # fmt: skip
DELTA_FLAGS = (
    "--update-weight-transfer-mode", "--update-weight-disk-dir", "--update-weight-local-checkpoint-dir",
    "--update-weight-delta-checksum", "--custom-update-weight-post-write-path",
)  # fmt: skip
BUFFER = (
    Symbol("miles.rollout.fully_async_data_buffer:DefaultDataBuffer.put", ("self", "input"), "attribution"),
    Symbol(
        "miles.rollout.fully_async_data_buffer:DefaultDataBuffer.get",
        ("self", "current_version"),
        "staleness",
    ),
    Symbol("miles.rollout.fully_async_data_buffer:DefaultDataBuffer.get_metrics", ("self",), "staleness"),
    Symbol("miles.rollout.fully_async_data_buffer:iter_samples", ("group",), "attribution"),
    Symbol(
        "miles.rollout.fully_async_data_buffer:DataBufferConstructorInput", None, "staleness", optional=True
    ),
)
SESSION_SERVER = (
    Symbol(
        "miles.rollout.session.samples.merge:attach_lifecycle_metadata",
        None,
        "agents: a report beside each call",
    ),
    Symbol(
        "miles.utils.lifecycle:attach_lifecycle_metadata",
        ("sample", "record"),
        "agents: a report beside each call",
    ),
    Symbol(
        "miles.rollout.session.v2.postprocessor_hub.default_postprocess:default_postprocess",
        ("leaf_samples", "session_metadata"),
        "agents: samples",
    ),
)
SESSION_FLAGS = ("--use-session-server", "--session-sample-postprocessor-path")
GROUPS = (COMMON, DELTA, GATHER, ROLLOUT, BUFFER, SESSION_SERVER)


def writes_deltas() -> bool:
    """Whether the installed Miles has a delta updater of its own."""
    return importlib.util.find_spec(UPDATER.partition(":")[0]) is not None
