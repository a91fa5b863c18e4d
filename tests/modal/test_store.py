"""Each bad manner of Volumes and Dicts, and what follows from it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modal.exception
import pytest
from grpclib import GRPCError, Status

from stitch_core.files import PosixFiles
from stitch_core.ports import (
    AlreadyExists,
    Conflict,
    Entry,
    FileSource,
    NoStore,
    NotFound,
    StoreError,
    SystemClock,
    Unavailable,
)
from stitch_modal.cells import Cell
from stitch_modal.errors import Refused, translate
from stitch_modal.host import Host, dict_name
from stitch_modal.states import FORGET_AFTER, LOOK_AGAIN, STALE_AFTER
from stitch_modal.store import ModalStore, open_url
from stitch_modal.url import Location
from stitch_modal.writing import DEAD_AFTER
from tests.modal.fake import WEEK, Cloud, Container

LARGE = bytes(range(256)) * 1000


class Later:
    """Time passes as a test says, also at the server."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def sleep(self, seconds: float) -> None:
        self.cloud.later += seconds

    def time(self) -> float:
        return time.time() + self.cloud.later

    def monotonic(self) -> float:
        return time.monotonic() + self.cloud.later


def dies(cloud: Cloud, name: str, call: str, *, after: bool = False) -> None:
    """The container makes no call any more from its next ``call`` on, or from when that took effect."""
    dead = False

    def hook(wanted: bool) -> Callable[[str, Container | None, Any], GRPCError | None]:
        def check(made: str, container: Container | None, request: Any) -> GRPCError | None:
            nonlocal dead
            if container is None or container.name != name:
                return None
            dead = dead or (wanted and made == call)
            return GRPCError(Status.INVALID_ARGUMENT, "dead") if dead else None

        return check

    def raise_after(made: str, container: Container | None, request: Any) -> None:
        error = hook_after(made, container, request)
        if error is not None:
            raise error

    hook_after = hook(after)
    cloud.manners.fail, cloud.manners.after = hook(not after), raise_after


async def ended(cloud: Cloud, store: ModalStore, name: str, *, commit: bool = False) -> None:
    await store.close()
    cloud.end(name, commit=commit)
    cloud.manners.fail, cloud.manners.after = type(cloud.manners)().fail, type(cloud.manners)().after


# ------------------------------------------------------------------------------------- the retry trap


async def test_an_own_put_that_is_called_somebody_elses(cloud: Cloud) -> None:
    """The SDK repeats a put whose answer was lost, and is told that there is an entry already: its own."""
    store = cloud.store("a")
    await store.swap("head", None, b"0")
    cloud.manners.dedupe, lost = False, []

    def lose(call: str, container: Container | None, request: Any) -> None:
        if call == "DictUpdate" and not lost:
            lost.append(call)
            raise GRPCError(Status.UNAVAILABLE, "the answer was lost")

    for write in (lambda: store.create("k", b"1"), lambda: store.swap("new", None, b"1")):
        lost.clear()
        cloud.manners.after = lose
        await write()
        assert lost
    with pytest.raises(AlreadyExists):
        await store.create("k", b"1")
    await store.close()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_claim_whose_answer_never_comes(cloud: Cloud, reads: bool) -> None:
    """It is read back; if that fails too the outcome is unknown, and the same call again is told Conflict
    only when the bytes are as durable as if it had succeeded at once."""
    store, other = cloud.store("a"), cloud.store("b")
    tag = await store.swap("head", None, b"0")

    def lost(call: str, container: Container | None, request: Any) -> None:
        if call == "DictUpdate":
            raise GRPCError(Status.DATA_LOSS, "the answer was lost")

    seen = []

    def unread(call: str, container: Container | None, request: Any) -> GRPCError | None:
        seen.append(call)
        failing = call == "DictGet" and "DictUpdate" in seen and not reads
        return GRPCError(Status.DATA_LOSS, "no answer") if failing else None

    cloud.manners.after, cloud.manners.fail = lost, unread
    if reads:
        await store.swap("head", tag, b"1")
    else:
        with pytest.raises(Unavailable):
            await store.swap("head", tag, b"1")
    cloud.manners.after, cloud.manners.fail = type(cloud.manners)().after, type(cloud.manners)().fail
    with pytest.raises(Conflict):
        await store.swap("head", tag, b"1")
    cloud.dicts.clear()
    assert (await other.load("head")).data == b"1"
    await asyncio.gather(store.close(), other.close())


# --------------------------------------------------------------------------------- reloads and commits


async def test_a_reload_waits_for_files_to_be_closed(cloud: Cloud) -> None:
    store, other = cloud.store("a"), cloud.store("b")
    await other.create("k/1", b"1")
    await store.create("log", b"x")
    await other.create("k/2", b"2")
    with open(cloud.containers["a"].root / "log", "rb"):
        await asyncio.sleep(0.06)
        waiting = asyncio.ensure_future(store.read("k/2"))
        await asyncio.sleep(0.15)
        assert not waiting.done()
    assert await waiting == b"2"
    assert cloud.calls["VolumeReload"] > 3
    await asyncio.gather(store.close(), other.close())


@pytest.mark.parametrize("what", ["file", "directory"])
async def test_what_stays_open_is_named(cloud: Cloud, what: str) -> None:
    store = cloud.store("a", deadline=0.3)
    await store.create("logs/log", b"x")
    root = cloud.containers["a"].root / "logs"
    command = "import sys; print(1, flush=True); sys.stdin.read()"
    with (root / "log").open("rb") as file:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", command], cwd=root if what == "directory" else None,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file.fileno()] if what == "file" else [],
        )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        cloud.containers["a"].pids.add(process.pid)
        await asyncio.sleep(0.06)
        with pytest.raises(Unavailable, match=r"/logs.* close what is open below it in any process"):
            await store.read("missing")
        assert await store.read("logs/log") == b"x", "what is there needs no reload"
        process.stdin.close()
        process.wait()
        with pytest.raises(NotFound):
            await store.read("missing")
    await store.close()


@pytest.mark.slow
async def test_reads_never_meet_a_reload_of_their_own(cloud: Cloud, tmp_path: Path) -> None:
    """While a mount is reloaded it looks empty, and with a file open it cannot be."""
    cloud.manners.empty, cloud.manners.skip_reload = 0.005, False
    store = cloud.store("a", visible_after=0.01)
    keys = [f"k/{number}" for number in range(8)]
    for key in keys:
        await store.create(key, LARGE)

    async def read(key: str) -> None:
        for _ in range(6):
            assert await store.read(key, 100, 100_000) == LARGE[100:100_100]

    async def disturb(number: int) -> None:
        for count in range(3):
            with pytest.raises(NotFound):
                await store.read(f"none/{number}")
            await store.create(f"more/{number}.{count}", LARGE)
            assert len(await store.list("k/")) == 8

    await asyncio.gather(*map(read, keys), *map(disturb, range(3)))
    await store.close()


async def test_uploads_side_by_side_share_commits(cloud: Cloud) -> None:
    store = cloud.store("a")
    await store.create("first", b"")
    cloud.manners.commit_seconds = 0.05  # in reality it is seconds
    cloud.calls.clear()
    await asyncio.gather(*(store.create(f"k/{number}", LARGE) for number in range(32)))
    assert cloud.calls["VolumeCommit"] <= 16, "two commits each would be 64"
    assert len(cloud.committed()) == 33
    await store.close()


@pytest.mark.parametrize("late", [0.0, 0.15])
async def test_what_a_new_head_names_is_there(cloud: Cloud, late: float) -> None:
    """The Dict tells of a head at once; a reader that has just reloaded has not seen its bytes yet."""
    cloud.manners.visible_after = late
    trainer, replica = cloud.store("a"), cloud.store("b", visible_after=0.8)
    tag = await trainer.swap("head", None, b"0")
    await asyncio.sleep(late)
    await replica.load("head")
    for number in range(3):
        await replica.list("")
        await trainer.create(f"v/{number}", b"x")
        tag = await trainer.swap("head", tag, b"%d" % number)
        assert (await replica.load("head")).data == b"%d" % number
        assert await replica.read(f"v/{number}") == b"x"
    await asyncio.gather(trainer.close(), replica.close())


async def test_a_head_is_polled_without_reloads(cloud: Cloud) -> None:
    """A reload takes the mount away for a moment: only what is new and not there yet is worth one."""
    trainer, replica = cloud.store("a"), cloud.store("b", visible_after=0.01)
    tag = await trainer.swap("head", None, b"0")
    await asyncio.sleep(0.02)
    assert (await replica.load("head")).data == b"0"
    await asyncio.sleep(0.02)
    cloud.calls.clear()
    for _ in range(20):
        assert (await replica.load("head")).data == b"0"
    assert cloud.calls == {"DictGet": 20}
    await trainer.swap("head", tag, b"1")
    assert (await replica.load("head")).data == b"1", "at once"
    await asyncio.gather(trainer.close(), replica.close())


@pytest.mark.slow
async def test_half_written_files_are_seen_by_others_but_no_objects(cloud: Cloud) -> None:
    """Containers commit on their own, every few seconds, whatever is there."""
    cloud.manners.background = 0.002
    store, other = cloud.store("a"), cloud.store("b", visible_after=0.002)
    data = LARGE * 40

    class SlowFiles(PosixFiles):
        def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
            time.sleep(0.05)
            return super().read(path, offset, length)

    source = cloud.root / "source"
    source.write_bytes(data)
    writing = asyncio.ensure_future(store.create("k", FileSource(SlowFiles(), source, len(data))))
    while not writing.done():
        assert await other.list("") in ([], [Entry("k", len(data))])
        await asyncio.sleep(0.001)
    await writing
    await asyncio.sleep(0.01)
    assert await other.read("k") == data
    await asyncio.gather(store.close(), other.close())


# --------------------------------------------------------------------------------- writers that die


@pytest.mark.parametrize("data", [b"small", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("commit", [True, False])
async def test_created_and_died_before_it_was_in_its_place(cloud: Cloud, data: bytes, commit: bool) -> None:
    """Whoever creates it next finishes it, and is told that it is there."""
    store, other = cloud.store("a"), cloud.store("b")
    await store.create("warm", b"")
    dies(cloud, "a", "DictUpdate", after=True)
    with pytest.raises(StoreError):
        await store.create("k", data)
    await ended(cloud, store, "a", commit=commit)
    with pytest.raises(NotFound):
        await other.read("k")
    with pytest.raises(AlreadyExists):
        await other.create("k", b"other")
    assert await other.read("k") == data
    assert await cloud.store("c").read("k") == data
    await other.close()


async def test_created_and_died_before_the_claim(cloud: Cloud) -> None:
    store, other = cloud.store("a"), cloud.store("b", clock=Later(cloud))
    await store.create("warm", b"")
    dies(cloud, "a", "DictUpdate")
    with pytest.raises(StoreError):
        await store.create("k", LARGE)
    await ended(cloud, store, "a", commit=True)
    await other.create("k", b"other")
    assert await other.read("k") == b"other"
    assert any(path.startswith(".stitch/new/") for path in cloud.committed())
    await other.close()
    cloud.later = STALE_AFTER + 60
    third = cloud.store("c", clock=Later(cloud))
    await third.create("j", LARGE)
    assert not any(path.startswith(".stitch/new/") for path in cloud.committed()), "the leftover is gone"
    await third.close()


class Ahead(SystemClock):
    """The clock of one host, wrong by days."""

    def __init__(self, days: float) -> None:
        self.ahead = days * 86400.0

    def time(self) -> float:
        return super().time() + self.ahead


@pytest.mark.parametrize("days", [-2.0, 2.0])
async def test_c80_an_age_was_by_the_clock_of_the_host_that_asked(cloud: Cloud, days: float) -> None:
    """Where the Volume is not mounted, Modal dates the files."""
    cloud.later = -days * 86400.0
    store = cloud.store("a", mounted=False)
    await store.create("k", b"x")
    stamp = await store.stamp("k")
    assert stamp is not None
    assert stamp.age is not None
    assert -1 < stamp.age < 60
    assert set(cloud.committed()) == {"k"}
    await store.close()


async def test_c80_a_clock_two_days_ahead_swept_what_others_were_writing(cloud: Cloud) -> None:
    """Then their bytes were nowhere, and their claim of the key was in everybody's way for an hour."""
    cloud.write({f".stitch/new/{int(time.time())}.0123": b"half"})
    store = cloud.store("a", mounted=False, clock=Ahead(2.0))
    await store.create("k", LARGE)
    assert any(path.startswith(".stitch/new/") for path in cloud.committed())
    await store.close()


async def test_c80_a_claim_by_a_clock_two_days_behind_looked_like_a_dead_ones(cloud: Cloud) -> None:
    """Taken from one that is at it, the key would be had by two."""
    store, other = cloud.store("a", clock=Ahead(-2.0)), cloud.store("b")
    await store.create("k", b"x")
    dies(cloud, "a", "DictPop")
    with pytest.raises(StoreError):
        await store.delete("k")
    await ended(cloud, store, "a", commit=True)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await other.create("k", b"y")
    await other.close()


async def test_a_swap_that_only_its_cell_tells_of_is_kept(cloud: Cloud) -> None:
    """Nobody was told that it succeeded; but it may have been read, so it must not be undone by a week."""
    later = Later(cloud)
    store, reader = cloud.store("a"), cloud.store("b", clock=later)
    tag = await store.swap("head", None, b"0")
    await asyncio.sleep(0.06)
    assert (await reader.load("head")).data == b"0"
    dies(cloud, "a", "DictUpdate", after=True)
    with pytest.raises(StoreError):
        await store.swap("head", tag, b"1")
    await ended(cloud, store, "a")
    assert (await reader.load("head")).data == b"1"
    for _ in range(20):
        later.sleep(86400.0)
        assert (await reader.load("head")).data == b"1"
    assert (await cloud.store("c").load("head")).data == b"1"
    await reader.close()


@pytest.mark.parametrize("after", [True, False])
async def test_deleted_by_halves(cloud: Cloud, after: bool) -> None:
    later = Later(cloud)
    store, other = cloud.store("a"), cloud.store("b", clock=later)
    await store.create("k", b"x")
    dies(cloud, "a", "DictPop" if after else "VolumeCommit")
    with pytest.raises(StoreError):
        await store.delete("k")
    await ended(cloud, store, "a", commit=after)
    if not after:
        assert await other.read("k") == b"x", "its removal was not committed"
        await other.delete("k")
        await other.create("k", b"y")
    else:
        with pytest.raises(Unavailable, match="moved or deleted"):
            await other.create("k", b"y")
        later.sleep(DEAD_AFTER + 1)
        with pytest.raises(Unavailable):
            await other.create("k", b"y")
        await other.create("k", b"y")
    assert await other.read("k") == b"y"
    await other.close()


# ------------------------------------------------------------------------------- entries that expire


async def test_a_store_outlives_its_cells(cloud: Cloud) -> None:
    later = Later(cloud)
    store = cloud.store("a", clock=later)
    await store.create("k", b"k")
    tag = await store.swap("head", await store.swap("head", None, b"0"), b"1")
    await store.replace("hint", b"h")
    await store.delete("gone") if await store.swap("gone", None, b"") else None
    later.sleep(WEEK + 60)
    other = cloud.store("b", clock=later)
    for each in (store, other):
        assert (await each.load("head")).data == b"1"
        assert (await each.load("head")).tag == tag
        assert (await each.load("hint")).data == b"h"
        assert await each.read("k") == b"k"
        with pytest.raises(NotFound):
            await each.load("gone")
        with pytest.raises(AlreadyExists):
            await each.create("k", b"other")
        with pytest.raises(Conflict):
            await each.swap("head", None, b"other")
    assert not any(cloud.dicts.values())
    newer = await other.swap("head", tag, b"2")
    assert (await store.load("head")).tag == newer
    await store.replace("hint", b"i")
    assert (await other.load("hint")).data == b"i"
    await asyncio.gather(store.close(), other.close())


@pytest.mark.parametrize("days", [1, 8])
async def test_a_writer_that_slept_beside_its_claim(cloud: Cloud, days: int) -> None:
    """By then the cell that it lost may have expired, and its put succeeds: the files know better."""
    later = Later(cloud)
    store, other = cloud.store("a", clock=later), cloud.store("b", clock=later)
    tag = await store.swap("head", None, b"0")
    await other.load("head")
    claim = store._cells.claim

    def sleep_first(key: str, number: int, cell: Cell) -> Cell:
        asyncio.run_coroutine_threadsafe(other.swap("head", tag, b"other"), loop).result(10)
        later.sleep(days * 86400.0)
        return claim(key, number, cell)

    loop = asyncio.get_running_loop()
    store._cells.claim = sleep_first  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        await store.swap("head", tag, b"mine")
    store._cells.claim = claim  # type: ignore[method-assign]
    for each in (store, other, cloud.store("c")):
        assert (await each.load("head")).data == b"other"
    await asyncio.gather(store.close(), other.close())


async def test_a_second_winner_is_found_out(cloud: Cloud) -> None:
    """Somebody clears the Dict while two write: both are told that they won. Every reader takes the same
    one of the two, and the other writer's next swap is refused."""
    stores = [cloud.store(name) for name in "ab"]
    tag = await stores[0].swap("head", None, b"0")
    await stores[1].load("head")
    claim, won = stores[0]._cells.claim, []

    def be_late(key: str, number: int, cell: Cell) -> Cell:
        won.append(asyncio.run_coroutine_threadsafe(stores[1].swap("head", tag, b"b"), loop).result(10))
        cloud.dicts.clear()
        return claim(key, number, cell)

    loop = asyncio.get_running_loop()
    stores[0]._cells.claim = be_late  # type: ignore[method-assign]
    mine = await stores[0].swap("head", tag, b"a")
    stores[0]._cells.claim = claim  # type: ignore[method-assign]
    (yours,) = won
    readers = [cloud.store(name) for name in "cd"]
    found = [await reader.load("head") for reader in readers]
    assert found[0] == found[1]
    assert found[0].tag in (mine, yours)
    loser, lost = (stores[1], yours) if found[0].tag == mine else (stores[0], mine)
    await asyncio.sleep(0.06)
    with pytest.raises(Conflict):
        await loser.swap("head", lost, b"loser")
    assert await loser.load("head") == found[0]
    await asyncio.gather(*(store.close() for store in (*stores, *readers)))


@pytest.mark.parametrize("kind", ["swap", "replace"])
async def test_created_anew_after_another_deleted_it(cloud: Cloud, kind: str) -> None:
    both = cloud.store("a"), cloud.store("b")
    for store, other in (both, both[::-1]):
        await (store.swap("k", None, b"x") if kind == "swap" else store.replace("k", b"x"))
        await asyncio.sleep(0.06)
        assert (await other.load("k")).data == b"x"
        await other.delete("k")
        await asyncio.sleep(0.06)
        await store.create("k", LARGE)
        with pytest.raises(AlreadyExists):
            await other.create("k", b"y")
        assert await other.read("k") == LARGE
        assert await other.list("") == [Entry("k", len(LARGE))]
        assert await other.size("k") == len(LARGE)
        await store.delete("k")
        await asyncio.sleep(0.06)
        assert await other.list("") == []
        with pytest.raises(NotFound):
            await other.load("k")
    await asyncio.gather(*(each.close() for each in both))


async def test_what_is_removed_by_hand_is_not_brought_back(cloud: Cloud) -> None:
    later = Later(cloud)
    store, other = cloud.store("a", clock=later), cloud.store("b", clock=later)
    await store.swap("runs/a/head", None, b"0")
    await asyncio.sleep(0.06)
    assert (await other.load("runs/a/head")).data == b"0"
    cloud.write(dict.fromkeys(cloud.committed()))
    later.sleep(LOOK_AGAIN + 1)
    await asyncio.sleep(0.06)
    for each in (store, other):
        with pytest.raises(NotFound):
            await each.load("runs/a/head")
    assert cloud.committed() == {}
    await asyncio.gather(store.close(), other.close())


async def test_deletions_are_remembered_for_weeks_and_forgotten(cloud: Cloud) -> None:
    later = Later(cloud)
    store = cloud.store("a", clock=later)
    for key in ("pins/a", "pins/b"):
        await store.swap(key, None, b"x")
    await store.delete("pins/a")
    later.sleep(FORGET_AFTER + 60)
    assert await store.list("") == [Entry("pins/b", 1)]
    await store.delete("pins/b")
    await store.create("other", b"")
    left = [path for path in cloud.committed() if path.startswith("pins/")]
    assert not any("/.a/" in path for path in left)
    assert len(left) <= 2
    assert await store.list("") == [Entry("other", 0)]
    for name in ("x", "y"):
        later.sleep(FORGET_AFTER + 60)
        await store.swap(f"doctor/{name}/head", None, b"x")
        await store.delete(f"doctor/{name}/head")
    await store.create("more", b"")
    assert not any(path.startswith("doctor/x") for path in cloud.committed())
    await store.close()


async def test_c81_a_loop_of_symbolic_links_on_the_mount_ended_every_listing(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    store = cloud.store("a", visible_after=60.0)
    await store.create("runs/a/k", b"x")
    root = cloud.container("a").root
    (root / "runs" / "loop").symlink_to("loop")
    (root / "runs" / "a" / "up").symlink_to("..")
    assert await store.list("") == [Entry("runs/a/k", 1)]
    assert await store.folders("runs/") == ["a"]
    assert any(str(root / "runs" / "loop") in record.getMessage() for record in caplog.records)
    await store.close()


async def test_hints_cost_one_entry_and_leave_nothing(cloud: Cloud) -> None:
    store, other = cloud.store("a"), cloud.store("b")
    await store.replace("replicas/r", b"0")
    cloud.calls.clear()
    for number in range(20):
        await store.replace("replicas/r", b"%d" % number)
        assert (await other.load("replicas/r")).data == b"%d" % number
    assert cloud.calls["VolumeCommit"] == 0
    assert sum(map(len, cloud.dicts.values())) == 1
    await store.delete("replicas/r")
    assert cloud.committed() == {}
    assert not any(cloud.dicts.values())
    await asyncio.sleep(0.06)
    with pytest.raises(NotFound):
        await other.load("replicas/r")
    await asyncio.gather(store.close(), other.close())


# -------------------------------------------------------------------------------------------- browsing


@pytest.mark.parametrize("mounted", [True, False])
async def test_browsing(cloud: Cloud, mounted: bool) -> None:
    store = cloud.store("a", mounted=mounted)
    for key in ("runs/a/manifests/1", "runs/b/x", "runs/file"):
        await store.create(key, b"x")
    await store.swap("runs/a/head", None, b"y")
    assert await store.folders("runs/") == ["a", "b"]
    assert await store.folders("none/") == []
    for key in ("runs/a/head", "runs/file"):
        stamp = await store.stamp(key)
        assert stamp is not None
        assert abs(stamp.written - time.time()) < 60
        assert -1 < stamp.age < 60
    with pytest.raises(NotFound):
        await store.stamp("runs/a")
    await store.close()


async def test_ranges_from_outside_fetch_a_file_once(cloud: Cloud) -> None:
    """The API has whole files only; a download asks for a few MB at a time."""
    store = cloud.store("a", mounted=False)
    data = os.urandom(9 * 2**20)
    await store.create("k", data)
    cloud.calls.clear()
    parts = await asyncio.gather(*(store.read("k", start, 2**20) for start in range(0, len(data), 2**20)))
    assert b"".join(parts) == data
    assert cloud.calls["VolumeGetFile2"] == 1
    spooled = store._open().files._directory  # type: ignore[union-attr]
    await store.close()
    assert not os.path.exists(spooled)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (Status.UNAUTHENTICATED, Refused, "`modal token new`"),
        (Status.PERMISSION_DENIED, Refused, "check the workspace"),
        (Status.NOT_FOUND, NoStore, "`modal volume create NAME --version 2`"),
        (Status.INVALID_ARGUMENT, Refused, "InvalidError"),
        (Status.FAILED_PRECONDITION, Unavailable, "ConflictError"),
        (Status.RESOURCE_EXHAUSTED, Unavailable, "ResourceExhausted"),
    ],
)
async def test_what_the_server_says(
    cloud: Cloud, status: Status, kind: type[StoreError], message: str
) -> None:
    cloud.manners.fail = lambda call, container, request: (
        GRPCError(status, "token ak-Abc123Def456") if call == "VolumeGetOrCreate" else None
    )
    store = cloud.store("a")
    for call in (store.load("k"), store.create("k", b""), store.list("")):
        with pytest.raises(kind, match=message) as error:
            await call
        assert "Abc123" not in str(error.value)
        assert isinstance(error.value, Unavailable) == (kind is Unavailable)
    await store.close()


def test_no_token_says_what_to_do(tmp_path: Path) -> None:
    error = translate(modal.exception.AuthError("Token missing. Could not authenticate client."), "reading k")
    assert isinstance(error, Refused)
    assert "MODAL_TOKEN_ID" in str(error)


async def test_a_mount_that_is_not_there(cloud: Cloud) -> None:
    store = ModalStore(
        Location("volume", mount="/nonexistent/vol"), host=Host("volume", client=cloud.clients["a"])
    )
    with pytest.raises(Refused, match="is the Volume mounted there, in this container"):
        await store.load("k")
    await store.close()


async def test_the_mount_is_found_where_modal_puts_it(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stitch_modal.host.MODAL_MOUNTS", str(tmp_path))
    (tmp_path / "vo-1").symlink_to(cloud.container("a").root)
    for mount, uploads in ((None, 0), ("none", 1)):
        store = ModalStore(
            Location("volume", "p/", mount), host=Host("volume", client=cloud.clients["a"]), visible_after=0.0
        )
        cloud.calls.clear()
        await store.create(f"k/{uploads}", b"x")
        assert cloud.calls["VolumePutFiles2"] == uploads * 2, "once to be told what is missing"
        await store.close()
    assert cloud.committed() == {"p/k/0": b"x", "p/k/1": b"x"}


async def test_a_head_too_large_for_a_dict(cloud: Cloud) -> None:
    store = cloud.store("a")
    with pytest.raises(StoreError, match="at most on Modal"):
        await store.swap("head", None, bytes(2**21))
    await store.close()


def test_names_of_dicts_are_short_and_distinct() -> None:
    names = [dict_name("v" * length) for length in range(1, 64)]
    assert len(set(names)) == 63
    assert all(len(name) < 64 for name in names)


def test_one_handle_for_all_stores_of_a_process() -> None:
    first, second = open_url("modal://v1/a"), open_url("modal://v1/b?mount=/vol")
    assert first._host is second._host
    assert first._host is not open_url("modal://v1/a?environment=dev")._host


@pytest.mark.slow
def test_the_sdk_is_imported_at_the_first_call() -> None:
    code = (
        "import sys; from stitch_core.stores import open_store; open_store('modal://v/p?mount=/vol');"
        "assert not {'modal', 'grpclib'} & set(sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
