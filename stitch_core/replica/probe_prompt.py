"""The prompt of a probe, and its request and answer in the dialect of SGLang's ``/generate``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

PROMPT_TOKENS = 32

# Settings of a server that may change its numbers, by what their names have in them.
_NUMERIC = re.compile(
    r"version|dtype|quant|precision|fp4|fp32|tf32|determinis|on_policy|(tp|dp|ep|pp|cp|page|prefill)_size|nnodes"
    r"|device|backend|kernel|graph|compile|splits|fusion|allreduce|all_reduce|speculative_algorithm|override_args"
    r"|model_impl"
)
# Others that match: a name of weights, and what only moves data.
_NOT_NUMERIC = re.compile(r"weight_version|transfer|storage|grammar|tokenizer")


def prompt(vocabulary: int, most: int = PROMPT_TOKENS) -> list[int]:
    """At most 32 token ids, spread over ``vocabulary``, but for its ends, where special tokens are.

    Fixed: another choice would make all kept answers worthless.
    """
    count = min(PROMPT_TOKENS, most)
    return [(2 * i + 1) * vocabulary // (2 * count) for i in range(count)]


def request(vocabulary: int, request_id: str) -> dict[str, Any]:
    """A body for ``/generate``.

    Since log-probabilities are asked for from the first token on, SGLang computes all rows anew whatever its
    prefix cache has; with a cache key of its own, several at once do not wait for each other's rows either.
    """
    return {
        "rid": request_id,
        "extra_key": request_id,
        "input_ids": prompt(vocabulary),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def answer(value: Any, ids: Sequence[int]) -> tuple[float, ...] | None:
    """The log-probabilities in an answer to ``request`` with these ``input_ids``; None if it has none."""
    try:
        rows = value["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != list(ids):
            return None
        return tuple(float(row[0]) for row in rows[1:])
    except (TypeError, KeyError, IndexError, ValueError):
        return None


def was_aborted(value: Any) -> bool:
    """Whether an answer says that its request was ended before its time."""
    try:
        return bool(value["meta_info"]["finish_reason"]["type"] == "abort")
    except (TypeError, KeyError):
        return False


def signature(settings: Mapping[str, Any]) -> str:
    """Of a server's settings (``/server_info``): those on which its numbers depend, digested."""
    numeric = {
        name: value for name, value in settings.items()
        if _NUMERIC.search(name) and not _NOT_NUMERIC.search(name)
        and isinstance(value, (str, int, float, bool, type(None)))
    }  # fmt: skip
    return hashlib.sha256(json.dumps(numeric, sort_keys=True).encode()).hexdigest()[:16]
