"""Collectors and compactors in simulated worlds, also such that break a rule: the keeper finds each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stitch_core import compactor, hints, retention
from stitch_core.compactor import Compactor
from stitch_core.manifest import Manifest, floor_number
from stitch_core.replica.service import Announcer
from stitch_core.retention import Collector, Protected
from stitch_core.span_maker import SpanMaker
from stitch_core.testing.simulation import run_seed

CHUNK = 25


def run(seeds: range) -> None:
    collected = 0
    for seed in seeds:
        report = run_seed(seed, "retention")
        assert report.error is None, str(report)
        collected += report.collected
    assert collected > len(seeds), "hardly anything was collected"


def test_retention() -> None:
    run(range(5))


@pytest.mark.slow
@pytest.mark.parametrize("first", [5, *range(1000, 1100, CHUNK)])
def test_retention_with_many_seeds(first: int) -> None:
    run(range(first, first + CHUNK))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1, 5001, CHUNK))
def test_5000_interleavings(first: int) -> None:
    run(range(first, first + CHUNK))


def keeps_one_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Collector, head: Any, newest: Manifest) -> int:
        return floor_number(newest)

    monkeypatch.setattr(Collector, "_cutoff", broken)


def knows_no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    cutoff = Collector._cutoff

    async def broken(self: Collector, head: Any, newest: Manifest) -> int:
        self._grace = -1e9
        return await cutoff(self, head, newest)

    monkeypatch.setattr(Collector, "_cutoff", broken)


def believes_the_clocks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        return None

    monkeypatch.setattr(retention, "stamp_of", broken)
    monkeypatch.setattr(hints, "stamp_of", broken)


def tells_the_time_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(store: Any, key: str, clock: Any) -> float:
        return float(clock.time())

    monkeypatch.setattr(retention, "time_of", broken)


def fetches_before_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Announcer) -> None:
        pass

    monkeypatch.setattr(Announcer, "fetching", broken)


def ignores_replica_records(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Collector) -> set[str]:
        return set()

    monkeypatch.setattr(Collector, "_fetching", broken)


def forgets_who_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(store: Any, *_: Any, **__: Any) -> dict[str, bytes]:
        return {entry.key: (await store.load(entry.key)).data for entry in await store.list("replicas/")}

    monkeypatch.setattr(retention, "abandoned", broken)


def ignores_channels_and_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    protected = Collector._protected

    async def broken(self: Collector, newest: Manifest) -> Protected:
        found = await protected(self, newest)
        return Protected((), found.versions, found.digests)

    monkeypatch.setattr(Collector, "_protected", broken)


def ignores_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = Collector._may_go

    def broken(self: Collector, key: str, epoch: int, cutoff: int, on_chain: Any) -> bool:
        return may_go(self, key, epoch + 1, cutoff, on_chain)

    monkeypatch.setattr(Collector, "_may_go", broken)


def ignores_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = Collector._may_go

    def broken(self: Collector, key: str, epoch: int, cutoff: int, on_chain: Any) -> bool:
        return may_go(self, key, epoch, cutoff, ())

    monkeypatch.setattr(Collector, "_may_go", broken)


def deletes_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    read = retention.read_payload_key

    def broken(key: str) -> tuple[int, int] | None:
        return (0, 0) if key.startswith("manifests/000001") else read(key)

    async def every(self: Collector) -> Any:
        return await self._call(lambda: self._store.list(f"runs/{self._run}/"))

    monkeypatch.setattr(retention, "read_payload_key", broken)
    monkeypatch.setattr(Collector, "_list", every)


def compacts_without_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Compactor._retire

    async def broken(self: Compactor, view: Any) -> list[str]:
        self._grace = -1.0
        return await real(self, view)

    monkeypatch.setattr(Compactor, "_retire", broken)


def compacts_what_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> set[str]:
        return set()

    monkeypatch.setattr(compactor, "fetched", broken)


def keeps_one_aggregate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compactor.replaced
    monkeypatch.setattr(
        compactor, "replaced", lambda ranges, root, shape: real(ranges, root, replace(shape, kept=1))
    )


def merges_the_wrong_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SpanMaker._merge

    def broken(self: SpanMaker, *arguments: Any) -> Any:
        record, path = real(self, *arguments)
        return replace(record, number=record.number + 1), path

    monkeypatch.setattr(SpanMaker, "_merge", broken)


LIVES = "retention: a replica that lives keeps its record"
ALIVE = {"retention: an epoch that lives", "retention: two floors are kept", "durable: every byte is there"}


@pytest.mark.parametrize(
    ("mutation", "scenario", "rules"),
    [
        (keeps_one_floor, "retention", {"retention: two floors are kept"}),
        (knows_no_grace, "retention", {"retention: the grace", LIVES}),
        (knows_no_grace, "n08", {LIVES}),
        (forgets_who_lives, "retention", {LIVES}),
        (believes_the_clocks_of_others, "n08", {LIVES}),
        (ignores_replica_records, "n01", {"retention: what is being fetched stays", "scenario: n01"}),
        (
            believes_the_clocks_of_others,
            "n06",
            {"retention: what is being fetched stays", "scenario: n06", LIVES},
        ),
        (believes_the_clocks_of_others, "n07", {"retention: the grace"}),
        (tells_the_time_by_its_own_clock, "c80", {"retention: the grace", LIVES}),
        (tells_the_time_by_its_own_clock, "retention", {"retention: the grace", LIVES}),
        (fetches_before_it_says_so, "retention", {"retention: what is fetched is in the record"}),
        (fetches_before_it_says_so, "n01", {"retention: what is fetched is in the record"}),
        (ignores_channels_and_pins, "n04", {"retention: what is named stays"}),
        (ignores_epochs, "retention", ALIVE),
        (ignores_epochs, "c29", ALIVE),
        (ignores_the_chain, "retention", {"retention: two floors are kept", "durable: the head stays whole"}),
        (deletes_manifests, "retention", {"retention: only payload goes"}),
        (compacts_without_grace, "n05", {"retention: two floors are kept", "retention: the grace"}),
        (compacts_what_is_fetched, "n05", {"retention: what is being fetched stays", "scenario: n05"}),
        (keeps_one_aggregate, "n05", {"retention: two floors are kept"}),
        (merges_the_wrong_versions, "n05", {"truth: a span is between versions"}),
    ],
)
def test_a_broken_collector_or_compactor_is_caught(
    mutation: Any, scenario: str, rules: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    for seed in range(100):
        report = run_seed(seed, scenario)
        if report.error is not None:
            assert report.rule in rules, str(report)
            return
    pytest.fail("not caught in 100 seeds")
