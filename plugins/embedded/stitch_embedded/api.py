"""`POST /generate`: SGLang's request and response, checked. Everything here is pure.

Differences from SGLang: penalties, grammars, images, LoRA, embeddings and sessions are refused unless
neutral; unknown sampling parameters are refused; `min_p`, `top_k`, `top_p` and `min_new_tokens` do not
change what is reported (sampling.py).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .config import ModelConfig
from .report import version_fields
from .sampling import SamplingParams
from .scheduler import Outcome, Request
from .tokenizer import Tokenizer

MAX_COPIES = 1024
MAX_TOP_LOGPROBS = 128


class BadRequest(ValueError):
    """The client's fault; the message says what to change."""


@dataclass(frozen=True)
class Limits:
    """What requests are checked against. `tokenizer` None: token ids only."""

    config: ModelConfig
    max_len: int
    tokenizer: Tokenizer | None

    def encode(self, text: str) -> list[int]:
        """Raises BadRequest without a tokenizer."""
        if self.tokenizer is None:
            raise BadRequest("the checkpoint has no tokenizer: give token ids")
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Empty without a tokenizer."""
        return self.tokenizer.decode(ids) if self.tokenizer else ""


@dataclass(frozen=True)
class Call:
    """A parsed `/generate`: its sequences, prompt-major, and how to answer."""

    requests: list[Request]
    many: bool
    """Answer with a list."""
    stream: bool
    logprobs: bool


def parse_generate(body: Any, limits: Limits) -> Call:
    """Read a `/generate` body. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name in ("image_data", "video_data", "audio_data", "input_embeds", "session_params", "lora_path"):
        if body.get(name):
            raise BadRequest(f"{name} is not supported by the embedded engine")
    prompts, batch = _prompts(body, limits)
    params = _each(body.get("sampling_params"), len(prompts), "sampling_params", dict)
    parsed = [parse_params(p or {}, limits, len(prompt)) for p, prompt in zip(params, prompts, strict=True)]
    copies = {integer(p or {}, "n", 1, 1, MAX_COPIES) for p in params}
    if len(copies) != 1:
        raise BadRequest("n must be the same for the whole batch")
    n = copies.pop()
    stream = boolean(body, "stream")
    logprobs = boolean(body, "return_logprob")
    start = integer(body, "logprob_start_len", -1, -1, limits.max_len)
    top = integer(body, "top_logprobs_num", 0, 0, MAX_TOP_LOGPROBS)
    given = body.get("rid")
    rids = _rids(given, len(prompts), n)
    requests = [
        make_request(
            rids[index][copy],
            prompt,
            param,
            limits,
            copy=copy,
            prompt_logprobs_from=start if logprobs and start >= 0 else None,
            top_logprobs=top if logprobs else 0,
            stream=stream,
            asked=given[index] if isinstance(given, list) else given,
        )
        for index, (prompt, param) in enumerate(zip(prompts, parsed, strict=True))
        for copy in range(n)
    ]
    return Call(requests, batch or n > 1, stream, logprobs)


def make_request(
    rid: str, prompt: list[int], params: SamplingParams, limits: Limits, *, copy: int = 0, **options: Any
) -> Request:
    """A request for the scheduler. Copies of a seeded prompt draw from seeds of their own, or all would be
    equal.
    """
    if params.seed is not None and copy:
        params = SamplingParams(**{**params.__dict__, "seed": params.seed + copy})
    stop_ids = frozenset() if params.ignore_eos else params.stop_ids | frozenset(limits.config.eos_ids)
    stop_text = limits.tokenizer.stop_finder(params.stop) if params.stop and limits.tokenizer else None
    return Request(rid, prompt, params, stop_ids=stop_ids, stop_text=stop_text, **options)


def check_prompt(ids: Any, limits: Limits) -> list[int]:
    """Token ids of one prompt, in range and not too many. Raises BadRequest."""
    if not isinstance(ids, list) or not ids:
        raise BadRequest("a prompt must be a non-empty list of token ids")
    vocab = limits.config.vocab
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise BadRequest(f"token id {token!r} is not an integer in [0, {vocab})")
    if len(ids) > limits.max_len:
        raise BadRequest(f"the prompt has {len(ids)} tokens; this engine's max_len is {limits.max_len}")
    return ids


NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "stop_regex": None,
}
"""Sampling parameters of SGLang that this engine does not compute, with the value at which they do nothing.
"""

IGNORED = {
    "n",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "custom_params",
    "stream_interval",
}
READ = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_new_tokens",
    "stop_token_ids",
    "stop",
    "ignore_eos",
    "sampling_seed",
}


def parse_params(raw: dict[str, Any], limits: Limits, prompt_tokens: int) -> SamplingParams:
    """Read SGLang's `sampling_params`. Raises BadRequest.

    Without `max_new_tokens` it is SGLang's 128, or what the context has left.
    """
    for name, value in raw.items():
        if name in NEUTRAL:
            if value not in (None, NEUTRAL[name], {}):
                raise BadRequest(f"{name} is not supported by the embedded engine")
        elif name not in READ and name not in IGNORED:
            raise BadRequest(f"unknown sampling parameter {name!r}")
    left = limits.max_len - prompt_tokens
    new = integer(raw, "max_new_tokens", min(128, left), 0, 2**31)
    if new > left:
        raise BadRequest(
            f"{prompt_tokens} prompt tokens and max_new_tokens {new} make {prompt_tokens + new}; "
            f"this engine's max_len is {limits.max_len}"
        )
    stop = raw.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise BadRequest("stop must be a string or a list of strings, none of them empty")
    if stop and limits.tokenizer is None:
        raise BadRequest("stop strings need a tokenizer, and the checkpoint has none: use stop_token_ids")
    stop_ids = raw.get("stop_token_ids") or []
    top_k = integer(raw, "top_k", -1, -1, 2**31)
    if top_k == 0:
        raise BadRequest("top_k must be -1 or at least 1")
    temperature = number(raw, "temperature", 1.0, 0.0, 1e6)
    return SamplingParams(
        max_new_tokens=new,
        temperature=0.0 if temperature < 1e-6 else temperature,  # as SGLang: greedy
        top_p=number(raw, "top_p", 1.0, 1e-9, 1.0),
        top_k=top_k,
        min_p=number(raw, "min_p", 0.0, 0.0, 1.0),
        min_new_tokens=integer(raw, "min_new_tokens", 0, 0, new),
        stop_ids=frozenset(check_prompt(stop_ids, limits)) if stop_ids else frozenset(),
        stop=tuple(stop),
        ignore_eos=boolean(raw, "ignore_eos"),
        seed=integer(raw, "sampling_seed", 0, -(2**63), 2**64 - 1)
        if raw.get("sampling_seed") is not None
        else None,
    )


def answer(
    request: Request, outcome: Outcome, limits: Limits, *, logprobs: bool, latency: float
) -> dict[str, Any]:
    """SGLang's final object for one sequence. `latency` in seconds. Log-probabilities are exact fp32
    values.
    """
    meta = meta_info(request, outcome, logprobs=logprobs) | {"e2e_latency": latency}
    return {"text": final_text(outcome, limits), "output_ids": outcome.tokens, "meta_info": meta}


def meta_info(request: Request, outcome: Outcome, *, logprobs: bool) -> dict[str, Any]:
    """What SGLang says beside the tokens of one sequence."""
    prompt = len(request.prompt)
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": outcome.finish,
        "prompt_tokens": prompt,
        "completion_tokens": len(outcome.tokens),
        "cached_tokens": 0,
        **version_fields(prompt, len(outcome.tokens), outcome.passes, outcome.label),
    }
    if logprobs:
        meta["output_token_logprobs"] = [
            [value, token, None] for value, token in zip(outcome.logprobs, outcome.tokens, strict=True)
        ]
        if request.top_logprobs:
            meta["output_top_logprobs"] = [[[v, t, None] for v, t in row] for row in outcome.tops]
        start = request.prompt_logprobs_from
        if start is not None:
            first: list[list[Any]] = [[None, request.prompt[0], None]] if start == 0 else []
            scored = request.prompt[max(1, start) :][: len(outcome.prompt_logprobs)]
            meta["input_token_logprobs"] = first + [
                [value, token, None] for value, token in zip(outcome.prompt_logprobs, scored, strict=True)
            ]
    return meta


def final_text(outcome: Outcome, limits: Limits) -> str:
    """The output's text, without the stop token or stop string that ended it."""
    matched = outcome.finish.get("matched")
    if isinstance(matched, str):
        text = limits.decode(outcome.tokens)
        return text[: text.find(matched)] if matched in text else text
    return limits.decode(outcome.tokens if matched is None else outcome.tokens[:-1])


def _prompts(body: dict[str, Any], limits: Limits) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("give either text or input_ids")
    if text is not None:
        batch = isinstance(text, list)
        texts = text if batch else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise BadRequest("text must be a string or a list of strings")
        return [check_prompt(limits.encode(t), limits) for t in texts], batch
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return [check_prompt(one, limits) for one in ids], True
    return [check_prompt(ids, limits)], False


def _rids(rid: Any, prompts: int, n: int) -> list[list[str]]:
    """One id for each copy of each prompt: as given, `<rid>_<copy>` when n > 1; made up where none is
    given.
    """
    if rid is None:
        bases = [uuid.uuid4().hex for _ in range(prompts)]
    elif isinstance(rid, str) and rid:
        bases = [rid] if prompts == 1 else [f"{rid}_{i}" for i in range(prompts)]
    elif isinstance(rid, list) and len(rid) == prompts and all(isinstance(r, str) and r for r in rid):
        bases = rid
    else:
        raise BadRequest("rid must be a string, or a list of one string per prompt")
    out = [[base] if n == 1 else [f"{base}_{copy}" for copy in range(n)] for base in bases]
    if len({one for group in out for one in group}) != prompts * n:
        raise BadRequest("rids must differ")
    return out


def _each(value: Any, count: int, name: str, kind: type) -> list[Any]:
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count or not all(v is None or isinstance(v, kind) for v in values):
        raise BadRequest(f"{name} must be an object, or a list of one object per prompt")
    return values


def integer(raw: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    """A field of a body, `default` where it is missing or null. Raises BadRequest."""
    value = raw.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadRequest(f"{name} must be an integer in [{least}, {most}], not {value!r}")
    return value


def number(raw: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    """A finite field of a body, `default` where it is missing or null. Raises BadRequest."""
    value = raw.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{name} must be a number, not {value!r}")
    if not least <= value <= most:
        raise BadRequest(f"{name} must be in [{least:g}, {most:g}], not {value!r}")
    return float(value)


def boolean(raw: dict[str, Any], name: str) -> bool:
    """A field of a body, False where it is missing or null. Raises BadRequest."""
    value = raw.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {value!r}")
    return value
