"""Reading a request's body, alike at the gate and at the gateway."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from .versions import Refusal, malformed


class Refused(Exception):
    """The request is answered with ``refusal``."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def check_text(text: str, what: str) -> None:
    """Refused (400) for a text that UTF-8 cannot carry: JSON may spell half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(malformed(f"{what} holds half of a surrogate pair, which is no text")) from None


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body; Refused (400) if there is none."""
    try:
        value = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Refused(malformed(f"the request body is not JSON: {error}")) from None
    if not isinstance(value, dict):
        raise Refused(malformed(f"the request body must be a JSON object, not {type(value).__name__}"))
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, each of whose names comes once: of two demands the reader must not choose one."""
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {twice[:80]!r} comes twice in one object")
    return value
