"""What the middleware does with a request line: an allow-list, since an engine's next release adds routes."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """How a route is handled."""

    GENERATE = "generate"  # through the gate, the report in meta_info
    OPENAI = "openai"  # through the gate, the report in metadata
    ABORT = "abort"
    INFO = "info"  # the engine's JSON with ours in it
    PASS = "pass"
    HEALTH = "health"
    READY = "ready"
    WAKE = "wake"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"


ROUTES: dict[str, tuple[str, Kind]] = {
    "/generate": ("POST", Kind.GENERATE),
    "/v1/completions": ("POST", Kind.OPENAI),
    "/v1/chat/completions": ("POST", Kind.OPENAI),
    "/abort_request": ("POST", Kind.ABORT),
    "/wake": ("POST", Kind.WAKE),
    "/health": ("GET", Kind.HEALTH),
    "/ready": ("GET", Kind.READY),
    "/server_info": ("GET", Kind.INFO),
    "/get_server_info": ("GET", Kind.INFO),
    "/model_info": ("GET", Kind.INFO),
    "/get_model_info": ("GET", Kind.INFO),
    "/health_generate": ("GET", Kind.PASS),
    "/metrics": ("GET", Kind.PASS),
    "/v1/models": ("GET", Kind.PASS),
    "/v1/loads": ("GET", Kind.PASS),
    "/get_load": ("GET", Kind.PASS),
}

# Named so that whoever calls one learns why not. All others are unknown, and refused as well.
BLOCKED = frozenset(
    (
        "/activate_weights",
        "/api/chat",
        "/api/generate",
        "/begin_weight_update",
        "/classify",
        "/continue_generation",
        "/encode",
        "/end_weight_update",
        "/flush_cache",
        "/init_weights_update_group",
        "/invocations",
        "/load_lora_adapter",
        "/open_session",
        "/pause_generation",
        "/pull_weights",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/set_internal_state",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/vertex_generate",
    )
)


def classify(path: str) -> tuple[str, Kind]:
    """The one method that a clean path allows besides OPTIONS (and HEAD for GET), and its kind."""
    if path in ROUTES:
        return ROUTES[path]
    return "", Kind.BLOCKED if path in BLOCKED else Kind.UNKNOWN
