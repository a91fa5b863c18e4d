"""`POST /v1/completions` and `/v1/chat/completions`: translation to and from engine requests. All pure.

`metadata` holds the version fields of report.py. With one choice they are those of `/generate`; with several,
`weight_versions`, `kv_versions`, `kv` (and `kv_passes`, if any choice has them) are lists, one item for each
choice in order, and `weight_version` is the first choice's. In a stream each choice's last chunk carries the
fields of that choice, and all its log-probabilities. As with SGLang, `input_ids` may be a chat's prompt, and
`return_meta_info` puts each choice's `meta_info` beside its message, in answers that do not stream.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .api import (
    MAX_COPIES,
    MAX_TOP_LOGPROBS,
    BadRequest,
    Limits,
    boolean,
    check_prompt,
    final_text,
    integer,
    make_request,
    meta_info,
    parse_params,
)
from .report import version_fields
from .scheduler import Outcome, Request
from .tokenizer import TemplateError

RENAMED = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "regex",
    "ebnf",
    "seed",
    "min_tokens",
)
UNSUPPORTED = ("echo", "suffix", "tools", "functions", "audio", "lora_path")


@dataclass(frozen=True)
class OpenAICall:
    """A parsed completion call: one request for each choice, and how to answer."""

    id: str
    model: str
    chat: bool
    requests: list[Request]
    stream: bool
    include_usage: bool
    logprobs: bool
    meta_info: bool
    created: int

    def envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        """The object around `choices`."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def parse_openai(body: Any, limits: Limits, *, chat: bool, model: str) -> OpenAICall:
    """Read a completion body. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name in UNSUPPORTED:
        if body.get(name):
            raise BadRequest(f"{name} is not supported by the embedded engine")
    if body.get("response_format") not in (None, {"type": "text"}):
        raise BadRequest("response_format is not supported by the embedded engine")
    n = integer(body, "n", 1, 1, MAX_COPIES)
    if body.get("best_of") not in (None, n):
        raise BadRequest("best_of is not supported by the embedded engine")
    prompts = [_chat_prompt(body, limits)] if chat else _prompts(body, limits)
    logprobs, top = _wanted_logprobs(body, chat)
    stream = boolean(body, "stream")
    wants_meta_info = chat and boolean(body, "return_meta_info")
    if stream and wants_meta_info:
        raise BadRequest("return_meta_info is not supported in streams")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object")
    rid = body.get("rid") or ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
    if not isinstance(rid, str):
        raise BadRequest("rid must be a string")
    choices = len(prompts) * n
    requests = []
    for index in range(choices):
        prompt = prompts[index // n]
        params = parse_params(_sampling(body, chat), limits, len(prompt))
        requests.append(
            make_request(
                rid if choices == 1 else f"{rid}_{index}",
                prompt,
                params,
                limits,
                copy=index % n,
                top_logprobs=top,
                stream=stream,
                asked=rid,
            )
        )
    return OpenAICall(
        id=rid,
        model=str(body.get("model") or model),
        chat=chat,
        requests=requests,
        stream=stream,
        include_usage=boolean(options, "include_usage"),
        logprobs=logprobs,
        meta_info=wants_meta_info,
        created=int(time.time()),
    )


def completion(call: OpenAICall, outcomes: Sequence[Outcome], limits: Limits) -> dict[str, Any]:
    """The whole answer of a call that does not stream."""
    choices = []
    for index, (request, outcome) in enumerate(zip(call.requests, outcomes, strict=True)):
        text = final_text(outcome, limits)
        content = {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
        choices.append({"index": index, **content, **ending(call, request, outcome, limits)})
    return {
        **call.envelope(choices, chunk=False),
        "usage": usage(call, outcomes),
        "metadata": metadata(call.requests, outcomes),
    }


def delta(
    call: OpenAICall, index: int, text: str, *, first: bool, end: dict[str, Any] | None
) -> dict[str, Any]:
    """One choice of a stream chunk: new text and, in the choice's last chunk, its `ending`."""
    if call.chat:
        content: dict[str, Any] = {
            "delta": {"role": "assistant", "content": text} if first else {"content": text}
        }
    else:
        content = {"text": text}
    return {"index": index, **content, **(end or {"logprobs": None, "finish_reason": None})}


def ending(call: OpenAICall, request: Request, outcome: Outcome, limits: Limits) -> dict[str, Any]:
    """What a choice says at its end. Token ids are given where there is no tokenizer to make text."""
    out: dict[str, Any] = {
        "logprobs": _logprobs(call, request, outcome, limits) if call.logprobs else None,
        "finish_reason": outcome.finish["type"],
        "matched_stop": outcome.finish.get("matched"),
    }
    if call.meta_info:
        out["meta_info"] = meta_info(request, outcome, logprobs=call.logprobs)
    if limits.tokenizer is None:
        out["token_ids"] = outcome.tokens
    return out


def usage(call: OpenAICall, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Tokens, each prompt counted once."""
    prompts = {id(r.prompt): len(r.prompt) for r in call.requests}
    prompt, output = sum(prompts.values()), sum(len(o.tokens) for o in outcomes)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def metadata(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The version fields, see the module."""
    fields = [
        version_fields(len(r.prompt), len(o.tokens), o.passes, o.label)
        for r, o in zip(requests, outcomes, strict=True)
    ]
    if len(fields) == 1:
        return fields[0]
    names = [
        name
        for name in ("weight_versions", "kv_versions", "kv", "kv_passes")
        if any(name in f for f in fields)
    ]
    return {
        "weight_version": fields[0]["weight_version"],
        **{name: [f.get(name, []) for f in fields] for name in names},
    }


def _sampling(body: dict[str, Any], chat: bool) -> dict[str, Any]:
    raw = {RENAMED.get(name, name): body[name] for name in PASSED if body.get(name) is not None}
    most = body.get("max_completion_tokens", body.get("max_tokens")) if chat else body.get("max_tokens", 16)
    if most is not None:
        raw["max_new_tokens"] = most
    return raw


def _prompts(body: dict[str, Any], limits: Limits) -> list[list[int]]:
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts: list[Any] = prompt if many else [prompt]  # type: ignore[assignment]
    if not all(isinstance(one, str | list) for one in prompts):
        raise BadRequest("prompt must be text, token ids, or a list of either")
    return [check_prompt(limits.encode(one) if isinstance(one, str) else one, limits) for one in prompts]


def _chat_prompt(body: dict[str, Any], limits: Limits) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages must be a non-empty list of objects")
    if body.get("input_ids") is not None:
        return check_prompt(body["input_ids"], limits)
    if limits.tokenizer is None:
        raise BadRequest("the checkpoint has no tokenizer: use /generate or /v1/completions with token ids")
    extra = body.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict) or extra.keys() & {"messages", "add_generation_prompt"}:
        raise BadRequest("chat_template_kwargs must be an object and leave the messages alone")
    try:
        return check_prompt(limits.tokenizer.chat(messages, **extra), limits)
    except (TemplateError, TypeError) as error:
        raise BadRequest(str(error)) from error


def _wanted_logprobs(body: dict[str, Any], chat: bool) -> tuple[bool, int]:
    """(report log-probabilities, how many alternatives)"""
    if chat:
        wanted = boolean(body, "logprobs")
        return wanted, integer(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS) if wanted else 0
    if body.get("logprobs") is None:
        return False, 0
    return True, integer(body, "logprobs", 0, 0, MAX_TOP_LOGPROBS)


def _logprobs(call: OpenAICall, request: Request, outcome: Outcome, limits: Limits) -> dict[str, Any]:
    tops = outcome.tops or [[] for _ in outcome.tokens]
    rows = list(zip(outcome.tokens, outcome.logprobs, tops, strict=True))
    if call.chat:
        return {
            "content": [
                {**_token(t, v, limits), "top_logprobs": [_token(i, w, limits) for w, i in top]}
                for t, v, top in rows
            ]
        }
    names = [_name(t, limits) for t, _, _ in rows]
    return {
        "tokens": names,
        "token_logprobs": [v for _, v, _ in rows],
        "top_logprobs": [{_name(i, limits): w for w, i in top} for _, _, top in rows]
        if outcome.tops
        else None,
        "text_offset": list(accumulate(map(len, names[:-1]), initial=0)),
    }


def _token(token: int, value: float, limits: Limits) -> dict[str, Any]:
    name = _name(token, limits)
    return {"token": name, "bytes": list(name.encode()), "logprob": value}


def _name(token: int, limits: Limits) -> str:
    return limits.decode([token]) if limits.tokenizer else f"token_id:{token}"
