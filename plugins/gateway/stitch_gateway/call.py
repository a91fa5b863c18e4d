"""One request as the gateway holds it: parsed, with its constraint, ready to be sent to any replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stitch_core.request_ids import Abort, take_ids
from stitch_core.requests import Refused, json_object
from stitch_core.versions import HEADER_CONSUMER, VersionConstraint, VersionError, malformed

from .consumers import Consumers, Scope
from .routing import Replica

# Whose turn it is of what: ours, and what SGLang's router and its clients speak.
SESSION_HEADERS = ("x-stitch-session", "x-smg-routing-key")
HEADER_GROUP = "x-stitch-group"
MOST_COPIES = 1024

# Hop by hop, or no longer true of the body that is sent on; or what lets a client in at Modal, not us.
_DROPPED = frozenset(
    (
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "modal-key",
        "modal-secret",
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
    """``constraint`` travels in the body, ``scope`` is whose it is (None: ``consumer``'s of a run that is not
    known), ``deadline`` when holding it ends.

    ``aborted`` is set when the request is given up; ``with_scope`` says that its whole scope was.
    ``replica`` is where it runs now. ``session`` and ``group`` are whose keys and values it shares;
    ``sequences``: how many it has generated at once. ``repeatable``: whether it may be sent again when nobody
    knows what became of it.
    """

    path: str
    headers: dict[str, str]
    body: bytes
    constraint: VersionConstraint
    ids: tuple[str, ...]
    scope: Scope | None
    deadline: float
    consumer: str = ""
    session: str | None = None
    group: str | None = None
    sequences: int = 1
    repeatable: bool = True
    replica: Replica | None = None
    with_scope: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def meant_by(self, abort: Abort) -> bool:
        """Whether that abort is of this request, or of one in its batch."""
        return any(abort.means(own, self.constraint.run, self.consumer) for own in self.ids)

    @property
    def key(self) -> bytes | None:
        """What it stays with one replica for. A group has its sessions, and the beginning that they share."""
        name = self.group or self.session
        return None if name is None else name.encode("utf-8", "surrogatepass")


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
    constraint = await consumers.demand(given, headers, hold)
    consumer, scope = consumers.consumer(headers), consumers.scope(headers, constraint.run)
    if constraint:
        value["weight_version"] = constraint.fields()
    ids = take_ids(value)
    kept = {name: text for name, text in headers.items() if name not in _DROPPED}
    kept["accept-encoding"] = "identity"
    kept[HEADER_CONSUMER] = consumer
    session = _first(headers, SESSION_HEADERS) or _session_of(value)
    return Call(
        path, kept, json.dumps(value).encode(), constraint, ids, scope, deadline, consumer,
        session=session, group=headers.get(HEADER_GROUP) or None, sequences=_sequences(path, value),
        repeatable=not value.get("session_params"),
    )  # fmt: skip


def _first(headers: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((headers[name] for name in names if headers.get(name)), None)


def _session_of(value: Mapping[str, Any]) -> str | None:
    """The session that a body names: OpenAI's ``user``, SGLang's ``session_params.id``."""
    params = value.get("session_params")
    for given in (params.get("id") if isinstance(params, dict) else None, value.get("user")):
        if isinstance(given, str) and given:
            return given
    return None


def prompts(value: Mapping[str, Any]) -> int | None:
    """How many prompts a batch has; None for a single one."""
    given = next((value[name] for name in ("text", "input_ids", "prompt") if name in value), None)
    return len(given) if isinstance(given, list) and given and isinstance(given[0], str | list) else None


def copies(path: str, value: Mapping[str, Any]) -> int:
    """``n``: how often each prompt is answered."""
    params = value.get("sampling_params") if path == "/generate" else value
    n = params.get("n") if isinstance(params, dict) else None
    return n if isinstance(n, int) and 0 < n <= MOST_COPIES else 1


def _sequences(path: str, value: Mapping[str, Any]) -> int:
    return (prompts(value) or 1) * copies(path, value)
