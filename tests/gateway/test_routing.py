"""Who gets a request: pure."""

import random

import pytest

from stitch_core.versions import PolicyVersion, VersionConstraint
from stitch_gateway.routing import Replica, choose, eligible


def replica(number: int | None = 7, run: str = "r", **fields: object) -> Replica:
    serving = None if number is None else PolicyVersion(run, number)
    made = Replica("id", "http://x", alive=True, ready=True, serving=serving)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (VersionConstraint(), True),
        (VersionConstraint(min_version=7), True),
        (VersionConstraint(min_version=8), False),
        (VersionConstraint(exact_version=7), True),
        (VersionConstraint(exact_version=6), False),
        (VersionConstraint(run="r"), True),
        (VersionConstraint(run="s"), False),
        (VersionConstraint(run="s", min_version=0), False),
    ],
)
def test_eligible_by_run_and_version(constraint: VersionConstraint, expected: bool) -> None:
    assert eligible(replica(), constraint) is expected


def test_only_ready_replicas_that_serve_something() -> None:
    assert not eligible(replica(ready=False), VersionConstraint())
    assert not eligible(replica(None), VersionConstraint())


def test_least_loaded_with_what_others_have_there() -> None:
    busy, others, idle = replica(in_flight=2), replica(others=3), replica(in_flight=1)
    assert choose([busy, others, idle], VersionConstraint(), random.Random(1)) is idle
    assert choose([busy, others, idle], VersionConstraint(), random.Random(1), {idle}) is busy
    assert choose([busy], VersionConstraint(min_version=8), random.Random(1)) is None


def test_ties_are_broken_at_random() -> None:
    replicas = [replica() for _ in range(3)]
    rng = random.Random(1)
    chosen = [choose(replicas, VersionConstraint(), rng) for _ in range(60)]
    assert all(10 < chosen.count(one) < 30 for one in replicas)
