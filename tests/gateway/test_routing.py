"""Who gets a request: pure."""

import random
from collections import Counter

import pytest

from stitch_core.versions import PolicyVersion, VersionConstraint
from stitch_gateway.routing import SHARE, SLACK, Replica, choose, eligible, rank

ANY = VersionConstraint()


def replica(number: int | None = 7, run: str = "r", id_: str = "id", **fields: object) -> Replica:
    serving = None if number is None else PolicyVersion(run, number)
    made = Replica(id_, "http://x", alive=True, ready=True, serving=serving)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def several(count: int) -> list[Replica]:
    return [replica(id_=f"host-{i}") for i in range(count)]


def homes(replicas: list[Replica], keys: int) -> dict[int, str]:
    """Where each key goes while nothing is loaded."""
    found: dict[int, str] = {}
    for key in range(keys):
        chosen = choose(replicas, ANY, random.Random(0), key=f"session-{key}".encode())
        assert chosen is not None
        found[key] = chosen.id
    return found


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
    assert not eligible(replica(ready=False), ANY)
    assert not eligible(replica(None), ANY)


def test_least_loaded_with_what_others_have_there() -> None:
    busy, others, idle = replica(sequences=2), replica(others=3), replica(sequences=1)
    assert choose([busy, others, idle], ANY, random.Random(1)) is idle
    assert choose([busy, others, idle], ANY, random.Random(1), {idle}) is busy
    assert choose([busy], VersionConstraint(min_version=8), random.Random(1)) is None


def test_ties_are_broken_at_random() -> None:
    replicas = [replica() for _ in range(3)]
    rng = random.Random(1)
    chosen = [choose(replicas, ANY, rng) for _ in range(60)]
    assert all(10 < chosen.count(one) < 30 for one in replicas)


# --------------------------------------------------------------------------------------------- affinity


def test_rank_is_fixed_across_gateways_and_releases() -> None:
    """A vector: gateways of two releases behind one balancer must agree."""
    assert rank(b"session-1")(replica(id_="host-1")) == 15458395023603825206


def test_keys_are_spread_and_order_of_discovery_does_not_matter() -> None:
    replicas = several(10)
    found = homes(replicas, 2000)
    assert homes(replicas[::-1], 2000) == found
    assert all(140 < count < 260 for count in Counter(found.values()).values())


def test_who_leaves_takes_only_its_own_keys_along() -> None:
    replicas = several(50)
    before, after = homes(replicas, 3000), homes(replicas[:-1], 3000)
    moved = [key for key in before if before[key] != after[key]]
    assert {before[key] for key in moved} == {"host-49"}
    assert len(moved) / 3000 <= 1.2 / 50


def test_a_key_comes_back_with_its_replica() -> None:
    replicas = several(8)
    before = homes(replicas, 300)
    replicas[3].ready = False
    away = homes(replicas, 300)
    assert {key for key in before if before[key] != away[key]} == {
        key for key in before if before[key] == "host-3"
    }
    replicas[3].ready = True
    assert homes(replicas, 300) == before


def test_version_comes_before_affinity() -> None:
    old, new = replica(7, id_="a"), replica(8, id_="b")
    for key in range(20):
        chosen = choose([old, new], VersionConstraint(min_version=8), random.Random(0), key=b"%d" % key)
        assert chosen is new


def test_affinity_ends_where_a_replica_has_more_than_its_share() -> None:
    replicas = several(4)
    rng, taken = random.Random(0), Counter[str]()
    for _ in range(400):  # one key that asks for everything
        chosen = choose(replicas, ANY, rng, key=b"hot")
        assert chosen is not None
        chosen.sequences += 1
        taken[chosen.id] += 1
    assert max(taken.values()) <= SHARE * 100 + SLACK + 1
    first = max(replicas, key=rank(b"hot"))
    assert taken[first.id] == max(taken.values())


def test_a_small_imbalance_moves_nobody() -> None:
    replicas = several(4)
    home = max(replicas, key=rank(b"key"))
    home.sequences = SLACK
    assert choose(replicas, ANY, random.Random(0), key=b"key") is home
    home.sequences = 2 * SLACK
    assert choose(replicas, ANY, random.Random(0), key=b"key") is not home


def test_C25_a_key_whose_replica_is_avoided_moves_to_one_and_the_same_other() -> None:
    replicas = several(6)
    home = max(replicas, key=rank(b"key"))
    others = {choose(replicas, ANY, random.Random(seed), {home}, key=b"key") for seed in range(20)}
    assert len(others) == 1
    assert home not in others
