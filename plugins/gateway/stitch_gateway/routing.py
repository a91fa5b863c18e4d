"""Which replica gets a request. Pure.

A request with a key (a session, a GRPO group) goes where rendezvous hashing puts the key: every gateway
that sees the same replicas says the same, and a replica that leaves takes only its own keys along. Unless
that replica has far more than its share; then the next in the key's order. All others: the least loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from stitch_core.versions import PolicyVersion, VersionConstraint

# A key stays with its replica up to this times the mean load, and this many sequences more.
SHARE, SLACK = 1.25, 8


@dataclass(eq=False)
class Replica:
    """What the gateway believes of one replica; all of it may be out of date.

    ``in_flight``: our requests there; ``sequences``: the sequences that they generate, which is what an
    engine queues. ``others``: what the engine had of others when it was last asked, as it ``tells``, or else
    what the replica's gate had. ``target``: the version that it is on its way to, as it says. ``late``:
    probes in a row that it left unanswered. ``headers`` go with every request to it.
    """

    id: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may let one in
    alive: bool = False
    ready: bool = False
    serving: PolicyVersion | None = None
    target: PolicyVersion | None = None
    in_flight: int = 0
    sequences: int = 0
    others: int = 0
    tells: bool = False
    late: int = 0
    error: str | None = "not probed yet"
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = xxh3_64_intdigest(self.id.encode())

    @property
    def load(self) -> int:
        """Sequences that it has: ours, and those that others had there at the last probe."""
        return self.sequences + self.others


def rank(key: bytes) -> Callable[[Replica], int]:
    """How high each replica stands for ``key``: xxh3-64 of the key, seeded with that of the replica's id."""
    return lambda replica: xxh3_64_intdigest(key, replica.seed)


def eligible(replica: Replica, constraint: VersionConstraint) -> bool:
    """Whether the replica would take the request, as far as we know."""
    return replica.ready and replica.serving is not None and constraint.allows(replica.serving)


def behind(replica: Replica, constraint: VersionConstraint) -> bool:
    """Whether the replica does not serve what is demanded, and may come to."""
    serving = replica.serving
    if serving is None or constraint.run not in (None, serving.run):
        return True
    # Asked of every replica for every request that waits: no list, no call.
    low, exact, number = constraint.min_version, constraint.exact_version, serving.number
    return (low is not None and number < low) or (exact is not None and number < exact)


def passed(replica: Replica, constraint: VersionConstraint) -> bool:
    """Whether the replica says that it will never serve the exact version that is demanded.

    One that does not answer, or has yet to come to a version, says nothing; neither does one of another run.
    A channel that was set back to an older version makes that its ``target``.
    """
    exact, serving, target = constraint.exact_version, replica.serving, replica.target
    if exact is None or serving is None or not replica.alive or constraint.run not in (None, serving.run):
        return False
    return serving.number > exact and (
        target is None or (target.run == serving.run and target.number > exact)
    )


def gone_for_good(constraint: VersionConstraint, replicas: Collection[Replica]) -> bool:
    """Whether every replica that is known answers and has passed the exact version that is demanded."""
    if constraint.exact_version is None or not replicas:
        return False
    runs = {replica.serving.run for replica in replicas if replica.serving}
    return len(runs) == 1 and all(passed(replica, constraint) for replica in replicas)


def most(replicas: Iterable[Replica], constraint: VersionConstraint, held: int) -> float:
    """The sequences up to which a replica has no more than its share once all that are coming have come.

    ``held``: sequences that wait. The first replica of a new version must not get all that waited for it;
    where no other comes it may.
    """
    count = coming = 0
    total = held
    for replica in replicas:
        if not replica.alive:
            continue
        if eligible(replica, constraint):
            count += 1
        elif not replica.ready or behind(replica, constraint):
            coming += 1
        else:
            continue
        total += replica.load
    return SHARE * total / (count + coming) + SLACK if coming else float("inf")


def choose(
    replicas: Iterable[Replica],
    constraint: VersionConstraint,
    rng: random.Random,
    avoid: Collection[Replica] = (),
    *,
    key: bytes | None = None,
    sequences: int = 1,
) -> Replica | None:
    """The eligible replica for a request of so many sequences; None if there is none.

    The highest for ``key`` of those that are not overloaded, else the least loaded (any, where several are).
    """
    candidates = [replica for replica in replicas if eligible(replica, constraint) and replica not in avoid]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    loads = [replica.load for replica in candidates]
    if key is None:
        least = min(loads)
        return rng.choice([r for r, load in zip(candidates, loads, strict=True) if load == least])
    bound = SHARE * (sum(loads) + sequences) / len(loads) + SLACK
    # The least loaded is below the mean, so that somebody always has room.
    roomy = [r for r, load in zip(candidates, loads, strict=True) if load <= bound]
    return max(roomy, key=rank(key))
