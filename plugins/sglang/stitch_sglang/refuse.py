"""What of SGLang the plugin does not cover, refused by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FALSE = ("", "0", "false", "no", "off")

# Attribute of SGLang's server arguments, the values that are covered, and why others are not.
COVERED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tokenizer_worker_num", (1,), "its HTTP workers load no plugins"),
    ("pp_size", (1,), "pipeline stages are not activated together"),
    ("dp_size", (1,), "data-parallel schedulers are not activated together"),
    ("nnodes", (1,), "other nodes have no host checkpoint"),
    ("disaggregation_mode", ("null",), "prefill and decode would need one version"),
    ("speculative_algorithm", (None,), "a draft model would need versions of its own"),
    ("enable_hierarchical_cache", (False,), "its keys were not checked to keep versions apart"),
    ("enable_lmcache", (False,), "its keys were not checked to keep versions apart"),
    ("enable_flexkv", (False,), "its keys were not checked to keep versions apart"),
    ("enable_unified_cache_external_linker", (False,), "its keys were not checked to keep versions apart"),
    ("radix_cache_backend", (None,), "its keys were not checked to keep versions apart"),
    ("enable_session_radix_cache", (False,), "a session's KV would outlive the version that computed it"),
    ("enable_streaming_session", (False,), "a session's KV would outlive the version that computed it"),
    ("enable_hisparse", (False,), "its copies of KV were not checked to follow an activation"),
    ("enable_http2", (False,), "only the uvicorn server was run"),
    ("grpc_port", (None,), "gRPC would bypass the gate"),
    ("grpc_mode", (False,), "gRPC would bypass the gate"),
    ("smg_grpc_mode", (False,), "gRPC would bypass the gate"),
    ("encoder_only", (False,), "it generates nothing"),
    ("is_embedding", (False,), "it generates nothing"),
    ("use_ray", (False,), "it starts another server"),
    ("weight_cache_mode", ("off",), "its weights are shared and cannot be updated"),
    (
        "load_format", ("auto", "safetensors", "fastsafetensors", "instanttensor"),
        "version 0 is the boot checkpoint's safetensors, and each version is loaded as they are",
    ),
    ("delete_ckpt_after_loading", (False,), "the boot checkpoint is what versions start from"),
    ("checkpoint_engine_wait_weights_before_ready", (False,), "nobody may send weights past the gate"),
)  # fmt: skip


class NotCovered(Exception):
    """The server cannot be a versioned replica as it is configured."""


def refuse(args: Any, environ: Mapping[str, str]) -> None:
    """Raises NotCovered with the option's name."""
    if environ.get("SGLANG_RUST_SERVER", "").lower() not in FALSE:
        raise NotCovered("SGLANG_RUST_SERVER: it has no Python HTTP server to put the gate into")
    for name, covered, why in COVERED:
        value = getattr(args, name, covered[0])
        if value not in covered:
            raise NotCovered(f"--{name.replace('_', '-')} {value}: {why}")
