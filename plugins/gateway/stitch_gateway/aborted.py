"""How an aborted request that no replica has begun is answered: as an engine answers one from its queue.

A trainer that aborts its own requests waits for their answers, and would repeat a refused one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from stitch_core.requests import Refused
from stitch_core.versions import HEADER_RUN, Refusal

from .call import Call, copies, prompts
from .routing import Replica

MESSAGE = "aborted while the gateway held it"


def aborted_answer(call: Call, replicas: Sequence[Replica]) -> web.Response:
    """No tokens, under the version that it waited for, or that is served. Raises Refused if there is none."""
    number = _version(call, replicas)
    if call.scope is None or number is None:
        raise Refused(Refusal(409, "RequestAborted", MESSAGE, "never"))
    report = {
        "run": call.scope.run, "weight_version": str(number), "weight_version_start": number,
        "weight_version_end": number, "weight_versions": [], "kv": "uniform",
    }  # fmt: skip
    value: dict[str, Any] = json.loads(call.body)
    items = _generated(call, value, report) if call.path == "/generate" else [_openai(call, value, report)]
    headers = {HEADER_RUN: call.scope.run}
    if not value.get("stream"):
        listed = call.path == "/generate" and (len(items) > 1 or prompts(value) is not None)
        whole = items if listed else items[0]
        return web.json_response(whole, headers=headers)
    events = [json.dumps(item) for item in items] + ["[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    return web.Response(body=body, content_type="text/event-stream", headers=headers)


def _version(call: Call, replicas: Sequence[Replica]) -> int | None:
    """The least version that it could have been answered under now."""
    low, exact = call.constraint.min_version, call.constraint.exact_version
    if exact is not None:
        return exact
    run = call.constraint.run
    served = [r.serving.number for r in replicas if r.serving and run in (None, r.serving.run)]
    known = [number for number in (low, max(served, default=None)) if number is not None]
    return max(known, default=None)


def _generated(call: Call, value: dict[str, Any], report: dict[str, Any]) -> list[dict[str, Any]]:
    batch = prompts(value) or 1
    ids = call.ids if len(call.ids) == batch else call.ids[:1] * batch
    items: list[dict[str, Any]] = []
    for own in (own for own in ids for _ in range(copies(call.path, value))):
        meta = {
            "id": own, "finish_reason": {"type": "abort", "message": MESSAGE}, "prompt_tokens": 0,
            "completion_tokens": 0, "cached_tokens": 0, **report,
        }  # fmt: skip
        if value.get("return_logprob"):
            meta["output_token_logprobs"] = []
        items.append({"text": "", "output_ids": [], "meta_info": meta})
    if value.get("stream") and len(items) > 1:
        items = [{**item, "index": index} for index, item in enumerate(items)]
    return items


def _openai(call: Call, value: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    chat, stream = call.path == "/v1/chat/completions", bool(value.get("stream"))
    said = {"role": "assistant", "content": ""}
    part = {"delta" if stream else "message": said} if chat else {"text": ""}
    count = call.sequences
    choices = [{"index": index, **part, "finish_reason": "abort"} for index in range(count)]
    spans: list[Any] = [] if count == 1 else [[] for _ in choices]
    bounds = {key: report[key] for key in ("run", "weight_version_start", "weight_version_end")}
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "id": call.ids[0], "object": kind, "model": value.get("model"), "choices": choices, "usage": usage,
        **bounds, "metadata": {**report, "weight_versions": spans},
    }  # fmt: skip
