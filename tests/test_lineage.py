"""The cheapest plan, by hand and against a brute-force search."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.lineage import NoPlan, cheapest_plan
from stitch_core.manifest import Manifest, PayloadFile, Representation, extend_history


def state(i: int) -> str:
    return f"sha256:{i:064x}"


BOOT = Manifest("run", 0, 1, state(0), Representation("boot", source="x"))


def version(number: int, to: int, size: int, base: int | None = None) -> Manifest:
    """A delta from state ``base``, or a full."""
    files = (PayloadFile("a.safetensors", size, state(99)),)
    full = base is None
    representation = (
        Representation("full", files) if base is None else Representation("delta", files, state(base), "xor")
    )
    floor = None if full else BOOT.row()
    return Manifest("run", number, 1, state(to), representation, extend_history(BOOT), BOOT.row(), floor)


CHAIN = [BOOT, version(1, 1, 10, 0), version(2, 2, 10, 1), version(3, 2, 50), version(4, 3, 10, 2)]


def numbers(
    target: int, held: set[int], excluded: tuple[int, ...] = (), chain: list[Manifest] = CHAIN
) -> list[int]:
    plan = cheapest_plan(
        chain[target], chain, {state(i) for i in held}, {chain[i].digest() for i in excluded}
    )
    assert plan.target == chain[target]
    assert (plan.base is None) == (plan.full is not None)
    return [m.number for m in plan.sources]


def test_deltas_from_what_is_held() -> None:
    assert numbers(4, {0}) == [1, 2, 4]
    assert numbers(4, {0, 2}) == [4]


def test_C10_a_full_when_the_chain_below_is_gone_or_excluded_or_dearer() -> None:
    assert numbers(4, set()) == [3, 4]
    assert numbers(4, {0}, excluded=(2,)) == [3, 4]
    dear = [
        *CHAIN[:2],
        dataclasses.replace(CHAIN[2], representation=version(2, 2, 1000, 1).representation),
        *CHAIN[3:],
    ]
    assert numbers(4, {0}, chain=dear) == [3, 4]


def test_equal_states_need_nothing() -> None:
    assert numbers(3, {2}) == []
    assert numbers(2, {2}) == []


def test_no_way() -> None:
    with pytest.raises(NoPlan, match="run/weight_v000004 cannot be reached"):
        numbers(4, {0}, excluded=(2, 3))
    with pytest.raises(NoPlan):
        numbers(4, {7}, chain=[BOOT, *CHAIN[1:3], CHAIN[1], CHAIN[4]], excluded=(4,))


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 9), st.none() | st.integers(0, 5)), min_size=1, max_size=7
    ),
    st.sets(st.integers(0, 5), max_size=2),
)
def test_the_cheapest_of_all_paths(edges: list[tuple[int, int, int | None]], held: set[int]) -> None:
    chain = [version(i, to, size, base) for i, (to, size, base) in enumerate(edges, 1)]
    target = chain[-1]
    costs = dict.fromkeys(held, 0)
    for _ in range(len(chain) + 1):  # Bellman-Ford
        for to, size, base in edges:
            start = 0 if base is None else costs.get(base)
            if start is not None:
                costs[to] = min(costs.get(to, 10**9), start + size)
    goal = edges[-1][0]
    if goal not in costs:
        with pytest.raises(NoPlan):
            cheapest_plan(target, chain, {state(i) for i in held})
        return
    plan = cheapest_plan(target, chain, {state(i) for i in held})
    assert plan.bytes == costs[goal]
    at = plan.full.state if plan.full else plan.base
    assert plan.full or at in {state(i) for i in held}
    for delta in plan.deltas:
        assert delta.representation.base == at
        at = delta.state
    assert at == target.state
