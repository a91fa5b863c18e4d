"""The cheapest plan, by hand and against a brute-force search."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.lineage import NoPlan, Source, Undo, cheapest_plan
from stitch_core.manifest import Manifest, PayloadFile, Representation, extend_history
from stitch_core.records import Record


def state(i: int) -> str:
    return f"sha256:{i:064x}"


BOOT = Manifest("run", 0, 1, state(0), Representation("boot", source="x"))


def version(number: int, to: int, size: int, base: int | None = None, encoding: str = "xor") -> Manifest:
    """A delta from state ``base``, or a full."""
    files = (PayloadFile("a.safetensors", size, state(99)),)
    full = base is None
    representation = (
        Representation("full", files)
        if base is None
        else Representation("delta", files, state(base), encoding)
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
    return [source.version.number for source in plan.sources]


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


def record(to: int, size: int, since: int | None = None, encoding: str = "xor") -> Record:
    """A full of a state, or a span that leads to it."""
    files = (PayloadFile("a.safetensors", size, state(98)),)
    if since is None:
        return Record("run", 1, state(to), Representation("full", files))
    return Record("run", 9, state(to), Representation("delta", files, state(since), encoding), 1)


def test_a_laggard_above_the_target_takes_xor_backwards() -> None:
    """A channel that was moved down: the replica undoes the delta, it fetches no full."""
    plan = cheapest_plan(CHAIN[1], CHAIN, {state(2)})
    (undo,) = plan.deltas
    assert isinstance(undo, Undo)
    assert undo.digest() == CHAIN[2].digest()
    assert (undo.representation.base, undo.state) == (state(2), state(1))


def test_overwrite_goes_forward_only() -> None:
    there = Representation("delta", CHAIN[1].representation.files, state(0), "overwrite")
    chain = [BOOT, dataclasses.replace(CHAIN[1], representation=there)]
    with pytest.raises(NoPlan):
        cheapest_plan(BOOT, chain, {state(1)})
    assert cheapest_plan(chain[1], chain, {state(0)}).bytes == 10


def test_C10_records_stand_in_for_deltas_that_are_gone_or_dear() -> None:
    span, full = record(3, 12, since=0), record(2, 5)
    gone = {CHAIN[1].digest(), CHAIN[3].digest()}
    assert cheapest_plan(CHAIN[4], [*CHAIN, span], {state(0)}, gone).sources == (span,)
    assert cheapest_plan(CHAIN[4], [*CHAIN, full], {state(0)}, gone).sources == (full, CHAIN[4])
    assert cheapest_plan(CHAIN[4], [*CHAIN, span], {state(0)}).sources == (span,)
    dear = record(3, 31, since=0)
    assert len(cheapest_plan(CHAIN[4], [*CHAIN, dear], {state(0)}).sources) == 3
    assert cheapest_plan(CHAIN[4], [*CHAIN, dear], {state(0)}, piece_cost=1).sources == (dear,)


Edge = tuple[int, int, int | None, bool]


def brute_force(
    edges: list[Edge], held: set[int], goal: int, piece: int, at: int | None, seen: tuple[int, ...]
) -> tuple[int, int] | None:
    """The least (cost, pieces) over every simple path, found by walking them all."""
    if at == goal:
        return 0, 0
    found = [brute_force(edges, held, goal, piece, s, (s,)) for s in held] if at is None else []
    for to, size, base, reversible in edges:
        ways = {(base, to)} | ({(to, base)} if reversible and base is not None else set())
        for start, end in ways:
            if start != at or end is None or end in seen:
                continue
            rest = brute_force(edges, held, goal, piece, end, (*seen, end))
            found.append(None if rest is None else (rest[0] + size + piece, rest[1] + 1))
    return min((cost for cost in found if cost is not None), default=None)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 9), st.none() | st.integers(0, 5), st.booleans()),
        min_size=1, max_size=7,
    ),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.none() | st.integers(0, 5)), max_size=3),
    st.sets(st.integers(0, 5), max_size=2),
    st.sampled_from([0, 3]),
    st.sets(st.integers(0, 6), max_size=2),
)  # fmt: skip
def test_the_cheapest_of_all_paths(
    chain: list[Edge],
    beside: list[tuple[int, int, int | None]],
    held: set[int],
    piece: int,
    excluded: set[int],
) -> None:
    """Fulls and deltas of manifests, fulls and spans beside the chain, forwards and backwards."""
    manifests = [
        version(i, to, size, base, "xor" if both else "overwrite")
        for i, (to, size, base, both) in enumerate(chain, 1)
    ]
    records = [record(to, size, base) for to, size, base in beside]
    sources: list[Source] = [*manifests, *records]
    edges = [*chain, *((to, size, base, True) for to, size, base in beside)]
    bad = {sources[i].digest() for i in excluded if i < len(sources)}
    left = [edge for edge, source in zip(edges, sources, strict=True) if source.digest() not in bad]
    target, starts = manifests[-1], {state(i) for i in held}
    expected = brute_force(left, held, chain[-1][0], piece, None, ())
    if expected is None:
        with pytest.raises(NoPlan):
            cheapest_plan(target, sources, starts, bad, piece)
        return
    plan = cheapest_plan(target, sources, starts, bad, piece)
    pieces = len(plan.sources)
    assert (plan.bytes + piece * pieces, pieces) == expected
    at = plan.base if plan.full is None else plan.full.state
    assert plan.full is not None or at in starts
    for delta in plan.deltas:
        assert delta.representation.base == at
        at = delta.state
    assert at == target.state
    assert not {source.digest() for source in plan.sources} & bad
