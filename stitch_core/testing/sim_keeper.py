"""Watches collectors and compactors, by rules of its own: when heads moved, and who fetches what.

Independent of retention.py and compactor.py: it never asks what they think, only what is gone from the
bucket.
"""

from __future__ import annotations

import json
import math
from typing import Any

from ..head import Channel
from ..lineage import NoPlan, Source, cheapest_plan
from ..manifest import Manifest, floor_number, read_payload_key, run_prefix
from ..pins import Pin
from ..publisher import PROBE
from ..records import Record, place_of
from ..retention import LOOK_AGAIN
from ..versions import PolicyVersion
from .sim_world import World


class Keeper:
    """Ends the world at the first delete that breaks a rule. ``grace`` is what its collectors use, and its
    compactors for what was replaced.

    ``deleted`` counts payload objects and records beside the chain that went, ``forgotten``
    those of replicas.
    """

    def __init__(self, world: World, grace: float) -> None:
        self.world, self.grace = world, grace
        self.deleted = self.forgotten = 0
        self._head_since: dict[PolicyVersion, float] = {}
        self._fetching_since: dict[str, float] = {}
        self._named_since: dict[tuple[str, int], float] = {}
        self._spans_since: dict[str, float] = {}
        self._records_since: dict[str, list[float]] = {}
        self._forgotten_at: dict[str, float] = {}
        self._retired: set[str] = set()
        self._gone: set[str] = set()
        world.bucket.observers.append(self._written)

    @property
    def slack(self) -> float:
        """Seconds by which a collector may know less than the truth, and its deletes come later."""
        plan = self.world.faults.plan
        late = plan.late if plan.store_late or plan.store_twice else 0.0
        stall = plan.stall if plan.stall_every else 0.0
        calls = 12 * (plan.timeout + 60 * plan.latency) if plan.store_lost or plan.store_unknown else 0.0
        outages = sum(outage.end - outage.start for outage in plan.outages)
        return LOOK_AGAIN + 200 * plan.latency * (50 if plan.slow else 1) + late + 3 * stall + calls + outages

    def _written(self, key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        now = self.world.loop.time()
        run = key.split("/")[1] if key.startswith("runs/") else ""
        if key.endswith("/head") and new is not None:
            head = self.world.judge.heads[run]
            self._head_since.setdefault(PolicyVersion(run, head.number), now)
        elif key.startswith(("channels/", "pins/")):
            named = self._named()
            self._named_since = {name: self._named_since.get(name, now) for name in named}
        elif key.startswith("replicas/"):
            if new is not None:
                self._records_since.setdefault(key, []).append(now)
            elif old is not None:
                self._check_record(key, old, who, now)
            self._look(now)
        elif run and new is None and old is not None:
            self._deleted(run, key, who, now)
        elif key.endswith("/span.json") and new is not None:
            self._spans_since.setdefault(key, now)
            self._check_span(run, key, new, who)

    def _look(self, now: float) -> None:
        """Who fetches what, by records that expired less than the grace ago, whatever clock dated them."""
        fetching: set[str] = set()
        for key, data in self.world.bucket.objects.items():
            if key.startswith("replicas/"):
                record = json.loads(data)
                lifetime = record["expires"] - record["time"]
                if now - self.world.bucket.written[key] < lifetime + self.grace:
                    fetching.update(record["fetching"])
        self._fetching_since = {digest: self._fetching_since.get(digest, now) for digest in fetching}

    def _named(self) -> set[tuple[str, int]]:
        found: set[tuple[str, int]] = set()
        for key, data in self.world.bucket.objects.items():
            if key.startswith("channels/") and (channel := Channel.decode(data, key)).exact is not None:
                found.add((channel.run, channel.exact))
            elif key.startswith("pins/"):
                pin = Pin.decode(data, key)
                found.add((pin.run, pin.number))
        return found

    # -------------------------------------------------------------------------------------- the rules

    def _deleted(self, run: str, key: str, who: str, now: float) -> None:
        judge = self.world.judge
        relative = key.removeprefix(run_prefix(run))
        if relative.rpartition("/")[2].startswith(PROBE):
            return
        payload, place = read_payload_key(relative), place_of(relative)
        number = payload[0] if payload else place[1] if place else None
        if number is None:
            judge.broken("retention: only payload goes", f"{who}: {key}")
        assert number is not None
        self.deleted += 1
        self._gone.add(key)
        self.world.trace.add(f"{who}: {key} is gone")
        newest = judge.newest(run)
        assert newest is not None
        on_chain = judge.versions.get(PolicyVersion(run, number))
        refers = payload is None or (on_chain is not None and on_chain.epoch == payload[1])
        replaced = place is not None and place[0] is not None and self._was_replaced(run, key, place, now)
        if replaced:
            refers = False
        elif refers or (payload is not None and payload[1] >= judge.heads[run].epoch):
            self._check_age(newest, number, f"{who}: {key}", now, refers)
        digest = f"sha256:{place[2]}" if place else on_chain.digest() if on_chain and refers else ""
        self._look(now)
        if now - self._fetching_since.get(digest, now) > self.slack:
            judge.broken("retention: what is being fetched stays", f"{who}: {key}")
        for (named, k), since in self._named_since.items():
            version = judge.versions.get(PolicyVersion(named, k))
            if version is None or named != run or not refers or now - since <= self.slack:
                continue
            if floor_number(version) <= number <= k:
                judge.broken("retention: what is named stays", f"{who}: {key}, needed for {version.version}")
        self._check_reach(newest, f"{who}: {key}")

    def _check_record(self, key: str, data: bytes, who: str, now: float) -> None:
        """Nobody had renewed it for its lifetime and the grace when the collector looked.

        Where it was right to go, a call that is late or lands twice may take one that was written anew.
        """
        written = self._records_since.pop(key)
        if now - self._forgotten_at.get(key, -math.inf) <= self.slack:
            return
        record = json.loads(data)
        lasts = record["expires"] - record["time"] + self.grace
        renewed = [*written[1:], now]
        if not any(w + lasts <= now and r >= now - self.slack for w, r in zip(written, renewed, strict=True)):
            self.world.judge.broken("retention: a replica that lives keeps its record", f"{who}: {key}")
        self._forgotten_at[key] = now
        self.forgotten += 1

    def _check_age(self, newest: Manifest, number: int, what: str, now: float, refers: bool) -> None:
        """Below two floors, and below the floor of a version that is the head's, or was, for long enough."""
        judge, run = self.world.judge, newest.run
        second = self._floor_before(run, floor_number(newest))
        old = [
            floor_number(judge.versions[version])
            for version, since in self._head_since.items()
            if version.run == run and now - since > self.grace
        ]
        if not refers:
            if number >= min(second, max(old, default=0)):
                judge.broken("retention: an epoch that lives", what)
        elif number >= second:
            judge.broken("retention: two floors are kept", f"{what}, the second floor is {second}")
        elif number >= max(old, default=0):
            judge.broken("retention: the grace", f"{what}, floors that are old enough: {old}")

    def _check_span(self, run: str, key: str, data: bytes, who: str) -> None:
        """Whole when it is seen, and between versions that were the head's.

        Not whole may be one whose document lands late, when a collector has taken the files: readers see by
        the listing that it is none.
        """
        judge, record = self.world.judge, Record.decode(data, span=True, where=key)
        assert record.since is not None
        ends = [judge.versions.get(PolicyVersion(run, n)) for n in (record.since, record.number)]
        states = [None if manifest is None else manifest.state for manifest in ends]
        if states != [record.representation.base, record.state]:
            judge.broken("truth: a span is between versions", f"{who}: {key}")
        for file in record.representation.files:
            name = record.file_key(file.name)
            if name not in self._gone and len(self.world.bucket.objects.get(name, b"")) != file.size:
                judge.broken("durable: every byte of a span is there", f"{who}: {key} {file.name}")

    def _was_replaced(
        self, run: str, key: str, place: tuple[int | None, int, str, str | None], now: float
    ) -> bool:
        """Two longer spans from the same version have been there for the grace; the document goes first."""
        since, number, digest, file = place
        if file is not None:
            return digest in self._retired
        newer = 0
        for other, written in self._spans_since.items():
            found = place_of(other.removeprefix(run_prefix(run)))
            if found is not None and found[0] == since and found[1] > number and now - written > self.grace:
                newer += other in self.world.bucket.objects
        if newer >= 2:
            self._retired.add(digest)
        return newer >= 2

    def _floor_before(self, run: str, floor: int) -> int:
        manifest = self.world.judge.versions[PolicyVersion(run, floor)]
        if manifest.floor is not None or manifest.parent is None:
            return manifest.floor.number if manifest.floor else 0
        return floor_number(self.world.judge.versions[PolicyVersion(run, manifest.parent.number)])

    def _check_reach(self, newest: Manifest, what: str) -> None:
        """The head is still reached from the boot checkpoint by what is there."""
        judge, objects = self.world.judge, self.world.bucket.objects
        sources: list[Source] = [
            manifest
            for version, manifest in judge.versions.items()
            if version.run == newest.run
            and all(manifest.file_key(file.name) in objects for file in manifest.representation.files)
        ]
        try:
            cheapest_plan(newest, [*sources, *judge.records(newest.run)], {judge.boot_state})
        except NoPlan as error:
            judge.broken("durable: the head stays whole", f"{what}: {error}")


def hint(name: str, fetching: tuple[str, ...], time: float, lifetime: float) -> dict[str, Any]:
    """A replica's record, as far as a collector reads it."""
    return {"id": name, "fetching": list(fetching), "time": time, "expires": time + lifetime}
