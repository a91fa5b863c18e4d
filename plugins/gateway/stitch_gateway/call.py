"""One request as the gateway holds it: parsed, with its constraint, ready to be sent to any replica."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from stitch_core.replica.middleware import ID_END
from stitch_core.requests import Refused, json_object
from stitch_core.versions import HEADER_CONSUMER, VersionConstraint, VersionError, malformed

from .consumers import Consumers, Scope
from .routing import Replica

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
    """``constraint`` travels in the body, ``scope`` is whose it is, ``deadline`` when holding it ends.

    ``aborted`` is set when the request is given up; ``with_scope`` says that its whole scope was.
    ``replica`` is where it runs now.
    """

    path: str
    headers: dict[str, str]
    body: bytes
    constraint: VersionConstraint
    ids: tuple[str, ...]
    scope: Scope | None
    deadline: float
    replica: Replica | None = None
    with_scope: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """What engines call it: ids that only this request's begin with."""
        prefix = self.scope.prefix if self.scope else ""
        return tuple(f"{prefix}{own}{ID_END}" for own in self.ids)


async def parse_call(
    path: str, body: bytes, headers: Mapping[str, str], consumers: Consumers, hold: float
) -> Call:
    """Read a generating request, to be held for ``hold`` seconds; ``headers`` have lower-case names.

    Raises Refused: 400, and 503 where what it demands by default cannot be said.
    """
    deadline = asyncio.get_running_loop().time() + hold
    value = json_object(body)
    try:
        given = VersionConstraint.parse(value.pop("weight_version", None), headers)
    except VersionError as error:
        raise Refused(malformed(str(error))) from None
    scope = consumers.scope(headers, given.run)
    constraint = await consumers.demand(given, headers, hold)
    if constraint:
        value["weight_version"] = constraint.fields()
    # The id is the gateway's to give: abort_request must find the request wherever it runs.
    rid = value.get("rid")
    if rid is None:
        rid = value["rid"] = uuid.uuid4().hex
    ids = tuple(rid) if isinstance(rid, list) else (rid,)
    kept = {name: text for name, text in headers.items() if name not in _DROPPED}
    kept["accept-encoding"] = "identity"
    if scope is not None:
        kept[HEADER_CONSUMER] = scope.consumer
    return Call(path, kept, json.dumps(value).encode(), constraint, ids, scope, deadline)
