"""Watches a simulated world and ends it at the first breach of one of the five promises.

Everything is checked where it happens: a head at the instant when it moves, a token against the weights
that really made it, a pause against what its process does meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..head import Head
from ..lineage import NoPlan, Source, cheapest_plan
from ..manifest import FormatError, Manifest, bytes_digest, floor_number, run_prefix
from ..records import Record, place_of
from ..versions import PolicyVersion, VersionConstraint
from .sim_http import Response
from .sim_store import SimulatedBucket

_HEAD = re.compile(r"runs/([^/]+)/head\Z")
_PAYLOAD = re.compile(r"runs/([^/]+)/e(\d+)/")
_CREATE_ONLY = re.compile(r"runs/[^/]+/(manifests/|e\d+/|(fulls|spans)/\d)")


class Broken(AssertionError):
    """A promise was broken; the message starts with ``promise: rule``."""


class Judge:
    """``boot_state`` is version 0's; ``states`` are all weights that some trainer has had.

    ``brought_back``: runs and versions that somebody goes back to, also where a rollback gave them up.
    ``deceived``: tokens of weights about which an engine lied when nothing could tell yet.
    """

    def __init__(self, bucket: SimulatedBucket, boot_state: str) -> None:
        self.boot_state = boot_state
        self.states = {boot_state}
        self.versions: dict[PolicyVersion, Manifest] = {}
        self.heads: dict[str, Head] = {}
        self.brought_back: set[tuple[str, int]] = set()
        self.answered = 0
        self.spanning = 0
        self.collected = 0
        self.deceived = 0
        self.refused: dict[str, int] = {}
        self._bucket = bucket
        self._chain: dict[str, Manifest] = {}
        self._created: set[tuple[str, str, int]] = set()
        bucket.observers.append(self._written)

    def broken(self, rule: str, what: str) -> None:
        """End the simulation."""
        error = Broken(f"{rule}: {what}")
        self._bucket.loop.fail(error)
        raise error

    def newest(self, run: str) -> Manifest | None:
        """What the run's head names."""
        head = self.heads.get(run)
        return None if head is None else self.versions[PolicyVersion(run, head.number)]

    # ------------------------------------------------------------------------------------------ store

    def _written(self, key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        if _CREATE_ONLY.match(key) and old is not None and new is not None and old != new:
            self.broken("truth: written once", f"{who} changed {key}")
        if old is None and (match := _PAYLOAD.match(key)):
            self._created.add((who, match[1], int(match[2])))
        if match := _HEAD.match(key):
            self._head_moved(match[1], old, new, who)

    def _head_moved(self, run: str, old: bytes | None, new: bytes | None, who: str) -> None:
        try:
            head = Head.decode(new or b"", key := f"head of {run}")
            before = None if old is None else Head.decode(old, key)
        except FormatError as error:
            self.broken("durable: the head can be read", f"{who}: {error}")
            raise
        self._bucket.faults.trace.add(f"{who}: head {run} {head.number}.e{head.epoch} -> {head.key}")
        manifest = self._named(run, head, who)
        if before is None:
            if head.number != 0:
                self.broken("truth: one chain", f"{who}: a first head at {head.number}")
        elif head.number == before.number:
            if (head.key, head.digest, head.epoch) != (before.key, before.digest, before.epoch + 1):
                self.broken("truth: a claim changes nothing", f"{who}: {before} -> {head}")
            if head.writer == before.writer:
                self.broken("truth: a claim is new", f"{who}: {head}")
            self._check_given_up(run, before, head, who)
            if (who, run, head.epoch) not in self._created and self._bucket.faults.refused(who, "create"):
                self.broken("independence: who cannot write fences no writer", f"{who}: {head}")
        else:
            if head.number < before.number or (head.epoch, head.writer) != (before.epoch, before.writer):
                self.broken("truth: one writer, upwards", f"{who}: {before} -> {head}")
            if manifest.parent is None or manifest.parent.digest != before.digest:
                self.broken("truth: one chain", f"{who}: {head.key} does not follow {before.key}")
            if head.abandoned != before.abandoned:
                self.broken("truth: what was given up stays so", f"{who}: {before} -> {head}")
            self._check_rollback(manifest, head, who)
        version = manifest.version
        if self.versions.setdefault(version, manifest).digest() != manifest.digest():
            self.broken("truth: a version means one set of weights", f"{who}: {version} is two manifests")
        self.heads[run] = head

    def _check_given_up(self, run: str, before: Head, head: Head, who: str) -> None:
        """A claim carries on what was given up; only what somebody goes back to is not any more."""
        for first, last in before.abandoned:
            for number in range(first, last + 1):
                if head.abandoned_range(number) is None and (run, number) not in self.brought_back:
                    self.broken("truth: what was given up stays so", f"{who}: {number}: {before} -> {head}")
        if head.abandoned and head.abandoned[-1][1] > head.number:
            self.broken("truth: only what there is is given up", f"{who}: {head}")

    def _check_rollback(self, manifest: Manifest, head: Head, who: str) -> None:
        rollback = manifest.metadata.get("rollback")
        if rollback is None:
            return
        goal = self.versions.get(PolicyVersion(manifest.run, rollback["to"]))
        if goal is None or goal.state != manifest.state:
            self.broken("truth: a rollback has the weights that it names", f"{who}: {manifest.version}")
        given_up = range(rollback["to"] + 1, manifest.history[0].number + 1)
        if any(head.abandoned_range(number) is None for number in given_up):
            self.broken("truth: what was given up stays so", f"{who}: {manifest.version} {head}")

    def _named(self, run: str, head: Head, who: str) -> Manifest:
        """The manifest that a head names: all there, and reachable from what a new replica has."""
        objects = self._bucket.objects
        data = objects.get(run_prefix(run) + head.key)
        if data is None or bytes_digest(data) != head.digest:
            self.broken("durable: the manifest is there", f"{who}: {head.key}")
            raise AssertionError
        manifest = Manifest.decode(data, head.key)
        for file in manifest.representation.files:
            found = objects.get(manifest.file_key(file.name))
            if found is None or len(found) != file.size or bytes_digest(found) != file.sha256:
                self.broken("durable: every byte is there", f"{who}: {manifest.version} {file.name}")
        if manifest.state not in self.states:
            self.broken(
                "truth: a state is real", f"{who}: {manifest.version} has a state that nobody trained"
            )
        self._chain[manifest.digest()] = manifest
        chain = [
            manifest,
            *(self._chain[row.digest] for row in manifest.history if row.digest in self._chain),
        ]
        floor = floor_number(manifest)
        sources: list[Source] = [*(m for m in chain if m.number >= floor), *self.records(run, floor)]
        try:
            cheapest_plan(manifest, sources, {self.boot_state})
        except NoPlan as error:
            self.broken("durable: it can be reached", f"{who}: {error}")
        return manifest

    def records(self, run: str, number: int = 0) -> list[Record]:
        """The fulls and spans beside a run's chain that are whole, of version ``number`` or later."""
        objects, found = self._bucket.objects, []
        for key in objects:
            place = place_of(key.removeprefix(run_prefix(run))) if key.startswith(run_prefix(run)) else None
            if place is None or place[3] is not None or place[1] < number:
                continue
            record = Record.decode(objects[key], span=place[0] is not None, where=key)
            if all(
                bytes_digest(objects.get(record.file_key(file.name), b"")) == file.sha256
                for file in record.representation.files
            ):
                found.append(record)
        return found

    # ---------------------------------------------------------------------------------------- answers

    def check(
        self, who: str, constraint: VersionConstraint, response: Response, known: Collection[str] = ()
    ) -> None:
        """Truth of one answer to /generate.

        ``known``: states of which the replica has kept what their weights answer to a probe. An engine that
        lies about others is believed; about these it must be found out before anything is answered.
        """
        if response.status != 200:
            self._check_refusal(who, response)
            return
        meta, truth = response.body["meta_info"], response.body["true_states"]
        self.answered += 1
        said: list[PolicyVersion] = []
        for span in meta["weight_versions"]:
            if span["start"] != len(said):
                self.broken("truth: spans cover the answer", f"{who}: {meta}")
            said += [PolicyVersion(meta["run"], span["version"])] * (span["end"] - span["start"])
        if len(said) != len(truth):
            self.broken("truth: spans cover the answer", f"{who}: {len(truth)} tokens, {meta}")
        for i, (version, state) in enumerate(zip(said, truth, strict=True)):
            manifest = self.versions.get(version)
            claimed = None if manifest is None else manifest.state
            if claimed != state:
                if claimed is None or not response.body["true_lies"][i]:
                    self.broken("truth: the version that made it", f"{who}: token {i} is not of {version}")
                if claimed in known:
                    self.broken(
                        "truth: a state that comes back is what it was", f"{who}: token {i} of {version}"
                    )
                self.deceived += 1
            if not constraint.allows(version):
                self.broken("truth: what was demanded", f"{who}: token {i} of {version}, not {constraint}")
        if not said:
            return
        self.spanning += said[0] != said[-1]
        numbers = [version.number for version in said]
        if (meta["weight_version_start"], meta["weight_version_end"]) != (numbers[0], numbers[-1]):
            self.broken("truth: start and end", f"{who}: {meta}")
        if int(meta["weight_version"]) > min(numbers):
            self.broken("truth: the oldest version", f"{who}: {meta}")
        if meta["kv"] == "uniform" and response.body["true_mixed"]:
            self.broken("truth: the KV", f"{who}: some KV is of other weights than its token")

    def _check_refusal(self, who: str, response: Response) -> None:
        error: Mapping[str, Any] = (response.body or {}).get("error", {})
        if not isinstance(error, dict) or error.get("retry") not in ("here", "elsewhere", "never"):
            self.broken("independence: a clear error", f"{who}: {response}")
        kind = str(error["type"])
        self.refused[kind] = self.refused.get(kind, 0) + 1
