"""What consumers demand by default: one small document in the store, so that every gateway agrees.

It is ``consumers``, JSON, changed by compare-and-swap:

    {"consumers": {"eval": {"exact": 120, "lag": null, "run": null}, "train": {...}},
     "format": "stitch.consumers/1", "mover": "<fresh text of each change>"}
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stitch_core.head import FormatError
from stitch_core.manifest import canonical_json, read_count, read_document
from stitch_core.ports import Conflict, NotFound, Store, Unavailable
from stitch_core.retry import Retry, retrying
from stitch_core.versions import VersionError, check_run_id, is_number, request_scope

from .watch import Watch

KEY = "consumers"
FORMAT = "stitch.consumers/1"
MOST_CONSUMERS = 1000


class ConsumerRefused(ValueError):
    """The consumer cannot be changed as asked; the message says why."""


@dataclass(frozen=True)
class Rule:
    """What one consumer's requests demand that name no version: one of ``exact``, ``lag``.

    ``lag``: versions that an answer may be behind the head. ``run``: of requests that name none.
    """

    exact: int | None = None
    lag: int | None = None
    run: str | None = None

    def __str__(self) -> str:
        of = "" if self.run is None else f" of run {self.run}"
        return f"exactly version {self.exact}{of}" if self.lag is None else f"at most {self.lag} behind{of}"


def decode(data: bytes, where: str = KEY) -> dict[str, Rule]:
    """Read the document. Raises FormatError, naming the consumer."""
    listed = read_document(data, FORMAT, where).get("consumers")
    if not isinstance(listed, dict):
        raise FormatError(f"{where}: consumers must be an object")
    return {name: _rule(name, value, f"{where}: {name}") for name, value in listed.items()}


def _rule(name: str, value: Any, where: str) -> Rule:
    if not isinstance(value, dict) or set(value) != {"exact", "lag", "run"}:
        raise FormatError(f"{where}: expected exact, lag and run")
    given = {key: value[key] for key in ("exact", "lag") if value[key] is not None}
    if len(given) != 1:
        raise FormatError(f"{where}: one of exact and lag, and not both")
    for key, number in given.items():
        read_count(number, f"{where}: {key}")
        if key == "exact" and not is_number(number):
            raise FormatError(f"{where}: exact is no version's number: {number}")
    try:
        request_scope("run", name)
        if value["run"] is not None:
            check_run_id(value["run"])
    except VersionError as error:
        raise FormatError(f"{where}: {error}") from None
    return Rule(**value)


def encode(rules: Mapping[str, Rule], mover: str) -> bytes:
    listed = {name: asdict(rule) for name, rule in rules.items()}
    return canonical_json({"format": FORMAT, "consumers": listed, "mover": mover})


async def load(store: Store) -> dict[str, Rule]:
    """All consumers. Raises FormatError, Unavailable."""
    return (await _load(store))[0]


async def _load(store: Store) -> tuple[dict[str, Rule], str | None]:
    try:
        blob = await store.load(KEY)
    except NotFound:
        return {}, None
    return decode(blob.data), blob.tag


async def change(
    store: Store, name: str, rule: Rule | None, *, rng: random.Random, nonce: Callable[[], str]
) -> Rule | None:
    """Set a consumer, or remove it (None); what it was before.

    ``nonce`` makes fresh text: without it a change whose outcome is unknown could land after later ones
    that led back to the same bytes. Changes of other consumers at the same time are kept.
    Raises ConsumerRefused, FormatError, Unavailable.
    """
    if rule is not None:
        _rule(name, asdict(rule), KEY)  # what cannot be read again would take all consumers along

    async def once() -> Rule | None:
        rules, tag = await _load(store)
        before = rules.get(name)
        if rule is None and before is None:
            raise ConsumerRefused(f"there is no consumer {name}")
        if before == rule:
            return before
        if rule is None:
            del rules[name]
        else:
            rules[name] = rule
        if len(rules) > MOST_CONSUMERS:
            raise ConsumerRefused(f"there are {MOST_CONSUMERS} consumers already: delete some")
        await store.swap(KEY, tag, encode(rules, nonce()))
        return before

    try:
        return await retrying(once, Retry(), rng, (Conflict, Unavailable))
    except Conflict:
        raise ConsumerRefused("the consumers are being changed by others all the time: try again") from None


class RulesView(Watch):
    """Follows the document; ``rules`` is the last good reading."""

    def __init__(
        self, store: Store, rng: random.Random, *, interval: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(rng, interval=interval, clock=clock)
        self.rules: dict[str, Rule] = {}
        self._store = store

    async def _read(self) -> None:
        self.rules = await load(self._store)
