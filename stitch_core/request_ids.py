"""What a request is called: by its client, by engines, by who aborts it. Alike at the gate and the gateway.

An id is its client's own: two consumers may use the same one at a time. Engines abort all whose id begins
with what they are told, so at an engine a request is ``<run>~<consumer>~<id>~`` (nothing where it does not
name the run or the consumer), and copies of it (n > 1) have something behind that. No part contains a ``~``,
so that no request's id is the beginning of another's.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .requests import Refused, check_text
from .versions import (
    HEADER_CONSUMER,
    HEADER_RUN,
    Refusal,
    VersionError,
    check_run_id,
    malformed,
    request_scope,
)

END = "~"
_SCOPE = re.compile(r"([^~]+)~([^~]+)~")


def take_ids(body: dict[str, Any]) -> tuple[str, ...]:
    """The ids in ``body["rid"]``; the request gets one there if it has none. Raises Refused (400)."""
    given = body.get("rid")
    if given is None:
        given = body["rid"] = uuid.uuid4().hex
    ids = tuple(given) if isinstance(given, list) else (given,)
    if not ids or not all(isinstance(own, str) and own for own in ids) or len(set(ids)) != len(ids):
        raise Refused(malformed("rid must be a non-empty string, or a list of different ones"))
    for own in ids:
        check_text(own, "rid")
    return ids


def engine_id(run: str | None, consumer: str | None, own: str, same: int = 0) -> str:
    """An engine's id for the client's ``own``; ``same``: how many of that name are running already."""
    text = own.replace("%", "%25").replace(END, "%7E") + (f"%n{same}" if same else "")
    return f"{run or ''}{END}{consumer or ''}{END}{text}{END}"


def check_consumer(consumer: object) -> str:
    """``consumer`` if it can be a consumer's name; raises VersionError."""
    request_scope("run", consumer)
    return str(consumer)


@dataclass(frozen=True)
class Abort:
    """Whose requests are to end: those called ``rid`` by ``consumer`` (None: by who names no consumer).

    ``run`` None: of any run. A ``rid`` that is the scope of a run and a consumer means all of theirs.
    """

    rid: str
    run: str | None = None
    consumer: str | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], headers: Mapping[str, str]) -> Abort:
        """Run and consumer are those of the body, else of the headers. Raises Refused (400, 403)."""
        rid, everybody = body.get("rid"), body.get("abort_all")
        if everybody is not None and not isinstance(everybody, bool):
            # What is merely not false, "false" for one, must not end a consumer's whole step.
            raise Refused(malformed(f"abort_all must be true or false, not {str(everybody)[:80]!r}"))
        if everybody or not isinstance(rid, str) or not rid:
            message = "abort_request needs the rid of one request: abort_all would reach everybody's"
            raise Refused(Refusal(403, "RouteBlocked", message, "never"))
        run, consumer = named(body, headers)
        return cls(rid, run, consumer)

    def means(self, own: str, run: str | None, consumer: str | None) -> bool:
        """Whether the request is meant that its client calls ``own``; ``run`` None: nobody knows."""
        scope = _SCOPE.fullmatch(self.rid)
        if scope is not None and scope.groups() == (run, consumer):
            return True
        return (own, consumer) == (self.rid, self.consumer) and (self.run is None or run in (None, self.run))

    def body(self) -> dict[str, Any]:
        """As it is passed on."""
        whose = {"run": self.run, "consumer": self.consumer}
        return {"rid": self.rid, **{name: text for name, text in whose.items() if text is not None}}


def named(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The run and the consumer that a control request names. Raises Refused (400)."""
    run = body.get("run", headers.get(HEADER_RUN))
    consumer = body.get("consumer", headers.get(HEADER_CONSUMER))
    try:
        return (
            None if run is None else check_run_id(run),
            None if consumer is None else check_consumer(consumer),
        )
    except VersionError as error:
        raise Refused(malformed(str(error))) from None


@dataclass(eq=False)
class Name:
    """One running request (one of a batch): its client's id and the ``engine``'s, and whose it is."""

    own: str
    engine: str
    run: str | None
    consumer: str | None


class Running:
    """The requests that one gate has let in."""

    def __init__(self) -> None:
        self._names: dict[str, Name] = {}

    def add(self, ids: Sequence[str], run: str | None, consumer: str | None) -> list[Name]:
        """Call them so that engines tell them from all that run. Each must be dropped."""
        names = []
        for own in ids:
            same = 0
            while (engine := engine_id(run, consumer, own, same)) in self._names:
                same += 1
            self._names[engine] = Name(own, engine, run, consumer)
            names.append(self._names[engine])
        return names

    def drop(self, names: Sequence[Name]) -> None:
        """They have ended. Dropping twice is fine."""
        for name in names:
            if self._names.get(name.engine) is name:
                del self._names[name.engine]

    def meant(self, abort: Abort) -> list[str]:
        """What engines call the requests that are to end."""
        return [one.engine for one in self._names.values() if abort.means(one.own, one.run, one.consumer)]


def own_id(names: Sequence[Name], given: str) -> str:
    """The client's id for an engine's; copies have theirs with something behind it."""
    for name in names:
        if given.startswith(name.engine):
            return name.own + given[len(name.engine) :]
    return given
