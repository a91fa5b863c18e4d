"""The simulator can fail: protocol code that is broken on purpose is caught, by the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stitch_core import uploading
from stitch_core.claims import Resume
from stitch_core.delta import encoder
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.doubts import Doubts
from stitch_core.head import Head, head_key
from stitch_core.host_checkpoint import Checkpoint, HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import EngineError, EngineRefused, EngineUncertain, Files, Unavailable
from stitch_core.publisher import Publisher
from stitch_core.replica import activation
from stitch_core.replica.activation import Activator
from stitch_core.replica.admission import Gate
from stitch_core.replica.outbox import Outbox
from stitch_core.replica.probe import Probe
from stitch_core.replica.reconciler import Reconciler
from stitch_core.replica.report import Checker
from stitch_core.rollback import Rollback
from stitch_core.testing import sim_ranks, sim_replica
from stitch_core.testing.sim_engine import SimulatedEngineClient
from stitch_core.testing.sim_world import World
from stitch_core.testing.simulation import run_seed
from stitch_core.trainers.own_files import OwnFiles
from stitch_core.trainers.receipts import Duty, Listing, assign

Patch = Callable[[pytest.MonkeyPatch], None]
SLOW = pytest.mark.slow  # many seeds go by before the first that shows it


def method(owner: Any, name: str) -> Callable[[Any], Patch]:
    """A patch of ``owner.name`` by the decorated function."""

    def named(replacement: Any) -> Patch:
        def patch(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(owner, name, replacement)

        patch.__name__ = replacement.__name__
        return patch

    return named


@method(activation, "changed_tensors")
def relabels_without_copying(old: Any, new: Any) -> list[str]:
    return []


def copies_what_the_delta_names(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Activator.prepare

    async def broken(self: Activator, manifest: Any, table: Any, checkpoint: Any) -> Any:
        names = manifest.representation.changed or list(table)
        monkeypatch.setattr(activation, "changed_tensors", lambda old, new: list(names))
        return await prepare(self, manifest, table, checkpoint)

    monkeypatch.setattr(Activator, "prepare", broken)


def goes_on_after_half_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    activate = SimulatedEngineClient.activate

    async def broken(self: SimulatedEngineClient, label: str) -> None:
        try:
            await activate(self, label)
        except EngineUncertain as error:
            raise EngineRefused(str(error)) from error

    monkeypatch.setattr(SimulatedEngineClient, "activate", broken)


@method(Activator, "_resume")
async def never_resumes(self: Activator) -> None:
    raise EngineError("forgot")


def prepares_in_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, activate = SimulatedEngineClient.prepare, SimulatedEngineClient.activate
    later: dict[int, Any] = {}

    async def nothing_yet(self: SimulatedEngineClient, *what: Any) -> None:
        later[id(self)] = what

    async def all_at_once(self: SimulatedEngineClient, label: str) -> None:
        await prepare(self, *later[id(self)])
        await activate(self, label)

    monkeypatch.setattr(SimulatedEngineClient, "prepare", nothing_yet)
    monkeypatch.setattr(SimulatedEngineClient, "activate", all_at_once)


def lets_the_engine_wait_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain then waits for whoever stopped to read."""

    async def straight(self: Outbox, message: Any) -> None:
        await self._send(message)

    monkeypatch.setattr(Outbox, "put", straight)


@method(Gate, "drain")
async def never_drains(self: Gate, deadline: float, *, pins_only: bool) -> list[Any]:
    return []


def claims_the_admitted_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checker, "_version", lambda self, label: self.admitted)


def keeps_the_kv_it_says_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = SimulatedEngineClient.pause
    monkeypatch.setattr(SimulatedEngineClient, "pause", lambda self, mode: pause(self, "in_place"))


def trusts_the_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: HostCheckpoint, data: Any, marker: Any) -> None:
        checkpoint = Checkpoint.open(data, self.files)
        self._checkpoint = checkpoint
        self._hold(checkpoint, checkpoint.table(), marker.target or marker.held)

    monkeypatch.setattr(HostCheckpoint, "_prove", broken)


def has_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sim_replica.Reconciler
    monkeypatch.setattr(sim_replica, "Reconciler", lambda **options: real(**{**options, "poll": 1e8}))


def stops_serving_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Reconciler._note

    def broken(self: Reconciler, error: Exception) -> None:
        note(self, error)
        self.gate.close("the store does not answer")

    monkeypatch.setattr(Reconciler, "_note", broken)


def swaps_before_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*args: Any, **options: Any) -> None:
        return None

    monkeypatch.setattr(uploading, "upload", nothing)
    monkeypatch.setattr(uploading, "verify", nothing)


def takes_silence_for_success(monkeypatch: pytest.MonkeyPatch) -> None:
    async def once(store: Any, key: str, source: Any, *args: Any, **options: Any) -> None:
        try:
            await store.create(key, source)
        except Unavailable:
            return

    async def nothing(*args: Any, **options: Any) -> None:
        return None

    monkeypatch.setattr(uploading, "upload", once)
    monkeypatch.setattr(uploading, "verify", nothing)


def moves_the_head_without_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Publisher, expected: Any, head: Head) -> str:
        await self._store.replace(head_key(self.run), head.encode())
        return "tag"

    monkeypatch.setattr(Publisher, "_swap", broken)


def claims_without_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = Head.claimed

    def broken(self: Head, writer: str, time: float) -> Head:
        head = claimed(self, writer, time)
        object.__setattr__(head, "epoch", self.epoch)
        return head

    monkeypatch.setattr(Head, "claimed", broken)


def claims_with_an_old_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "nonce", lambda self: "always-the-same")


@method(Publisher, "_check_writable")
async def claims_without_trying_to_write(self: Publisher, head: Head) -> None:
    pass


@method(DeltaEncoder, "undo")
def keeps_the_base_of_a_failed_publish(self: DeltaEncoder) -> None:
    pass


@method(Resume, "check_saved")
def resumes_in_what_was_given_up(self: Resume, run: str, head: Head) -> None:
    pass


def forgets_what_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = Head.claimed

    def broken(self: Head, writer: str, time: float) -> Head:
        return replace(claimed(self, writer, time), abandoned=())

    monkeypatch.setattr(Head, "claimed", broken)


def rolls_back_to_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = Rollback._goal

    async def broken(self: Rollback, newest: Manifest, number: int) -> Manifest:
        return await goal(self, newest, number + (number + 1 < newest.number))

    monkeypatch.setattr(Rollback, "_goal", broken)


def gives_up_nothing_before_it_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Head, "taken_back", lambda self, to: self)


@method(Publisher, "_check_at")
def claims_whatever_the_head(self: Publisher, manifest: Manifest, at: Manifest | None) -> None:
    pass


@method(Publisher, "_leads")
async def builds_on_anything(self: Publisher, parent: Manifest, state: str) -> bool:
    return True


@method(Doubts, "waiting")
def excludes_for_good_what_one_fetch_saw(self: Doubts) -> dict[str, Exception]:
    return {digest: doubt.error for digest, doubt in self._doubts.items()}


@method(Activator, "_loaded")
def takes_an_engines_word_for_its_weights(self: Activator, identity: Any, boot: Any) -> bool:
    return bool(identity.label == activation.BOOT_LABEL)


def believes_the_label_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: SimulatedEngineClient) -> None:
        return None

    monkeypatch.setattr(SimulatedEngineClient, "vouch", broken)


@method(activation, "first_change")
def does_not_look_whether_the_boot_checkpoint_changed(before: Any, after: Any) -> None:
    return None


@method(Probe, "_judge")
def compares_no_weights(self: Probe, state: str, answers: Any) -> None:
    if self._kept.get(state) is None:
        self._keep(state, answers[-1])


@method(Probe, "must_ask")
def forgets_what_was_here(self: Probe, state: str) -> bool:
    return not self._measured


def answers_before_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Gate.close
    monkeypatch.setattr(Gate, "close", lambda self, why, hold_answers=False: close(self, why))


COMES_BACK = "truth: a state that comes back is what it was"


def takes_what_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version's files are those in its directory, wherever ranks have one."""

    def all_of_them(listings: list[Listing], where: str) -> list[Duty]:
        named = frozenset(name for listing in listings for name in listing.sizes)
        return assign([replace(listings[0], named=named), *listings[1:]], where)

    monkeypatch.setattr(sim_ranks, "assign", all_of_them)


def takes_what_a_framework_left(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_what_lies_there(monkeypatch)
    monkeypatch.setattr(sim_ranks, "clear_versions", lambda directory, files: None)


def takes_what_dead_ranks_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; our own encoder writes into one directory, whoever writes there, and looks what there is."""
    takes_what_lies_there(monkeypatch)
    made = OwnFiles.__init__

    def one_for_all(self: OwnFiles, work: Path, run: str, store: str, epoch: int, files: Files) -> None:
        made(self, work, run, store, 1, files)

    async def listed(self: sim_ranks.Life, directory: Path, written: Any) -> Any:
        return await self.duties_by_index(directory), None

    monkeypatch.setattr(OwnFiles, "__init__", one_for_all)
    monkeypatch.setattr(OwnFiles, "empty", lambda self: None)
    monkeypatch.setattr(sim_ranks.Life, "own_duties", listed)


@method(encoder, "check_base")
def encodes_from_whatever_it_reads(name: str, found: Any, proven: Any, file: Path) -> None:
    pass


@method(sim_ranks, "check_base")
def claims_by_a_share_of_each_copy(name: str, found: Any, proven: Any, file: Path) -> None:
    pass


def proves_a_share_of_each_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the claim nor by what the encoder reads."""
    claims_by_a_share_of_each_copy(monkeypatch)
    encodes_from_whatever_it_reads(monkeypatch)


WHOLE = "truth: an engine that goes on is whole"
TRUTH = {"truth: the version that made it", "truth: nothing outlives what it may", WHOLE}
CHAIN = {"truth: one writer, upwards", "truth: one chain", "truth: a claim changes nothing"}
GIVEN_UP = {"truth: what was given up stays so"}
UNABLE = "independence: who cannot write fences no writer"


REAL = "truth: a state is real"
PAUSE = "short pause: nothing but the copy"
WAITS = "short pause: the gate waits for engines only"
ARRIVES = {"convergence: every live replica arrives", "convergence: it answers"}


@pytest.mark.parametrize(
    ("mutation", "scenario", "rules"),
    [
        (relabels_without_copying, "anything", TRUTH | ARRIVES),
        (copies_what_the_delta_names, "c32", TRUTH | ARRIVES),
        (takes_an_engines_word_for_its_weights, "anything", TRUTH),
        (takes_an_engines_word_for_its_weights, "c76", TRUTH),
        (believes_the_label_of_an_answer, "c76", TRUTH),
        pytest.param(does_not_look_whether_the_boot_checkpoint_changed, "anything", TRUTH, marks=SLOW),
        (does_not_look_whether_the_boot_checkpoint_changed, "c77", TRUTH),
        pytest.param(goes_on_after_half_a_copy, "anything", TRUTH, marks=SLOW),
        (never_resumes, "anything", ARRIVES | {PAUSE}),
        (prepares_in_the_pause, "anything", {PAUSE}),
        (lets_the_engine_wait_for_clients, "anything", {WAITS}),
        (never_drains, "c03", TRUTH),
        pytest.param(never_drains, "c21", TRUTH, marks=SLOW),
        (claims_the_admitted_version, "anything", TRUTH),
        (keeps_the_kv_it_says_it_drops, "anything", {"truth: the KV"}),
        pytest.param(trusts_the_marker, "anything", TRUTH | ARRIVES, marks=SLOW),
        pytest.param(excludes_for_good_what_one_fetch_saw, "anything", ARRIVES, marks=SLOW),
        (has_no_timer, "c17", ARRIVES | {"scenario: it goes on"}),
        (stops_serving_without_a_store, "anything", ARRIVES | {"independence: it goes on serving"}),
        (stops_serving_without_a_store, "c18", {"scenario: c18", "scenario: it goes on"}),
        (swaps_before_the_upload, "anything", {"durable: every byte is there"}),
        pytest.param(
            takes_silence_for_success, "anything", {"durable: every byte is there"}, marks=pytest.mark.slow
        ),
        pytest.param(moves_the_head_without_a_condition, "anything", CHAIN, marks=SLOW),
        (claims_without_an_epoch, "anything", {"truth: a claim changes nothing"}),
        (claims_with_an_old_nonce, "c07", {"truth: a claim is new"}),
        (claims_without_trying_to_write, "c81", {UNABLE, "scenario: c81", "scenario: it goes on"}),
        (claims_without_trying_to_write, "anything", {UNABLE}),
        (resumes_in_what_was_given_up, "c35", {"scenario: it goes on", "scenario: c35"}),
        (forgets_what_was_given_up, "c35", GIVEN_UP),
        (gives_up_nothing_before_it_uploads, "c35", GIVEN_UP),
        (rolls_back_to_another_version, "r02", {"truth: a rollback has the weights that it names"}),
        (claims_whatever_the_head, "c38", {"scenario: c38"}),
        (compares_no_weights, "p01", {COMES_BACK, "scenario: it goes on"}),
        (compares_no_weights, "p02", {COMES_BACK, "scenario: it goes on"}),
        (forgets_what_was_here, "p03", {COMES_BACK, "scenario: it goes on"}),
        (answers_before_the_verdict, "p03", {COMES_BACK}),
        (builds_on_anything, "r05", {"durable: it can be reached", "scenario: r05"}),
        (takes_what_dead_ranks_wrote, "c74", {REAL}),
        (takes_what_a_framework_left, "c74stock", {REAL}),
        (encodes_from_whatever_it_reads, "c75", ARRIVES | {"scenario: it goes on"}),
        (proves_a_share_of_each_copy, "c75copies", ARRIVES | {"scenario: it goes on", "scenario: c75copies"}),
        pytest.param(takes_what_a_framework_left, "anything", {REAL} | ARRIVES, marks=SLOW),
        pytest.param(encodes_from_whatever_it_reads, "anything", ARRIVES, marks=SLOW),
        (keeps_the_base_of_a_failed_publish, "c05", ARRIVES | {"scenario: it goes on", "scenario: c05"}),
    ],
)
def test_a_broken_protocol_is_caught(
    mutation: Patch, scenario: str, rules: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    for seed in range(200):
        report = run_seed(seed, scenario)
        if report.error is not None:
            assert report.rule in rules, str(report)
            return
    pytest.fail("not caught in 200 seeds")
