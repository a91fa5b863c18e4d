"""Reading a request's body, alike at the gate and at the gateway."""

from __future__ import annotations

import json
from typing import Any

from .versions import Refusal, malformed


class Refused(Exception):
    """The request is answered with ``refusal``."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body; Refused (400) if there is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(malformed(f"the request body is not JSON: {error}")) from None
    if not isinstance(value, dict):
        raise Refused(malformed(f"the request body must be a JSON object, not {type(value).__name__}"))
    return value
