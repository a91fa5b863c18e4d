"""One request as the gateway holds it: parsed, with its constraint, ready to be sent to any replica."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from stitch_core.requests import Refused, json_object
from stitch_core.versions import VersionConstraint, VersionError, malformed

# Hop by hop, or no longer true of the body that is sent on.
_DROPPED = frozenset(
    (
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-stitch-exact-version",
        "x-stitch-min-version",
        "x-stitch-run",
    )
)


@dataclass(eq=False)
class Call:
    """``constraint`` travels in the body; ``aborted`` is set by an abort_request for one of ``ids``."""

    path: str
    headers: dict[str, str]
    body: bytes
    constraint: VersionConstraint
    ids: tuple[str, ...]
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


def parse_call(path: str, body: bytes, headers: Mapping[str, str], default_run: str | None) -> Call:
    """Read a generating request; ``headers`` have lower-case names. Raises Refused (400)."""
    value = json_object(body)
    try:
        constraint = VersionConstraint.parse(value.pop("weight_version", None), headers)
    except VersionError as error:
        raise Refused(malformed(str(error))) from None
    if constraint.run is None and default_run is not None:
        constraint = VersionConstraint(constraint.min_version, constraint.exact_version, default_run)
    if constraint:
        value["weight_version"] = constraint.fields()
    # The id is the gateway's to give: abort_request must find the request wherever it runs.
    given = value.get("rid")
    if given is None:
        given = value["rid"] = uuid.uuid4().hex
    ids = tuple(given) if isinstance(given, list) else (given,)
    kept = {name: text for name, text in headers.items() if name not in _DROPPED}
    kept["accept-encoding"] = "identity"
    return Call(path, kept, json.dumps(value).encode(), constraint, ids)
