"""Which replica gets a request. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from stitch_core.versions import PolicyVersion, VersionConstraint


@dataclass(eq=False)
class Replica:
    """What the gateway believes of one replica; all of it may be out of date."""

    id: str
    url: str
    alive: bool = False
    ready: bool = False
    serving: PolicyVersion | None = None
    in_flight: int = 0
    others: int = 0
    error: str | None = "not probed yet"

    @property
    def load(self) -> int:
        """Requests that it runs: ours, and those that others had there at the last probe."""
        return self.in_flight + self.others


def eligible(replica: Replica, constraint: VersionConstraint) -> bool:
    """Whether the replica would take the request, as far as we know."""
    return replica.ready and replica.serving is not None and constraint.allows(replica.serving)


def choose(
    replicas: Iterable[Replica],
    constraint: VersionConstraint,
    rng: random.Random,
    avoid: Collection[Replica] = (),
) -> Replica | None:
    """The least loaded eligible replica, any of them where several are; None if there is none."""
    candidates = [replica for replica in replicas if eligible(replica, constraint) and replica not in avoid]
    if not candidates:
        return None
    least = min(replica.load for replica in candidates)
    return rng.choice([replica for replica in candidates if replica.load == least])
