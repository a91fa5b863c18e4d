"""LocalStore: a crash at any line leaves the old or the new object; durable before visible; clear errors."""

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stitch_core.files import PosixFiles
from stitch_core.ports import (
    Conflict,
    FileSource,
    NoStore,
    NotFound,
    StoreError,
    SystemClock,
    Unavailable,
    WriteRefused,
    time_of,
)
from stitch_core.stores.keys import BadKey
from stitch_core.stores.local import LocalStore, _tag
from stitch_core.stores.temporaries import STALE_AFTER
from tests.anchored_run import HandClock

pytestmark = pytest.mark.usefixtures("real_fsync")

CHANGES = ("write_new", "write_at", "sync", "rename", "link", "make_dirs", "remove", "lock")


class Crash(BaseException):
    """The process dies here."""


class QuickFiles(PosixFiles):
    """For the steps around the one that is tested: syncing takes most of their time."""

    def sync(self, path: Path) -> None:
        pass


class WatchedFiles:
    """PosixFiles that notes each change and calls ``before`` with the number of changes so far."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.before = before
        self.changes: list[tuple[str, Path]] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(PosixFiles(), name)

        def watched(*args: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread(), "the event loop is blocked"
            if name in CHANGES:
                self.before(len(self.changes))
                # Where a file comes to be is the second of two paths.
                self.changes.append((name, args[1] if name in ("rename", "link") else args[0]))
            return operation(*args)

        return watched


def dies_at(moment: int) -> Callable[[int], None]:
    """Dies before change ``moment``; what the process would do afterwards, it does no more."""
    dead = False

    def before(number: int) -> None:
        nonlocal dead
        dead = dead or number == moment
        if dead:
            raise Crash

    return before


def local(root: Path, files: Any = None, **options: Any) -> LocalStore:
    return LocalStore(root, files, asyncio.to_thread, **options)


Write = Callable[[LocalStore], Coroutine[Any, Any, Any]]


async def swap_head(store: LocalStore) -> None:
    await store.swap("runs/r/head", (await store.load("runs/r/head")).tag, b"new")


WRITES: dict[str, tuple[Write, tuple[bytes | None, bytes | None]]] = {
    "create": (lambda store: store.create("runs/r/a/new", b"new"), (None, b"new")),
    "first swap": (lambda store: store.swap("runs/r/a/new", None, b"new"), (None, b"new")),
    "swap": (swap_head, (b"old", b"new")),
    "replace": (lambda store: store.replace("runs/r/head", b"new"), (b"old", b"new")),
    "delete": (lambda store: store.delete("runs/r/head"), (b"old", None)),
}


@pytest.mark.parametrize("name", WRITES)
async def test_crash_at_any_line_leaves_old_or_new(name: str, tmp_path: Path) -> None:
    write, outcomes = WRITES[name]
    key = "runs/r/a/new" if "runs/r/a/new" in str(write.__code__.co_consts) else "runs/r/head"
    seen = []
    for moment in range(100):
        root = tmp_path / str(moment)
        await local(root, QuickFiles()).swap("runs/r/head", None, b"old")
        died = False
        try:
            await write(local(root, WatchedFiles(dies_at(moment))))
        except Crash:
            died = True
        after = local(root, QuickFiles())
        try:
            seen.append((await after.load(key)).data)
        except NotFound:
            seen.append(None)
        keys = [entry.key for entry in await after.list("")]
        assert keys == sorted({"runs/r/head", key} - ({key} if seen[-1] is None else set()))
        # Whatever died, the key is as usable as before.
        tag = None if seen[-1] is None else (await after.load(key)).tag
        await after.swap(key, tag, b"next")
        if not died:
            break
    assert moment > 3
    assert seen[-1] == outcomes[1]
    assert seen == sorted(seen, key=outcomes.index), "once new, it stays new"
    assert set(seen) == set(outcomes)


async def test_durable_before_visible_and_before_return(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(20 * 2**20))
    files = WatchedFiles()
    root = tmp_path / "new" / "root"
    store = local(root, files)
    await store.create("a/b/k", FileSource(PosixFiles(), source, 20 * 2**20))
    steps = [(name, path.relative_to(tmp_path)) for name, path in files.changes]
    visible = steps.index(("link", Path("new/root/a/b/k")))
    temporary = [path for name, path in steps if name == "write_new"][-1]
    assert temporary.parent == Path("new/root/.stitch/tmp")
    written = [number for number, step in enumerate(steps) if step == ("write_at", temporary)]
    assert len(written) == 3  # in pieces of 8 MiB
    assert max(written) < steps.index(("sync", temporary)) < visible
    # Each new directory is an entry that its parent must keep; the object is one of its directory's.
    for parent in (".", "new", "new/root", "new/root/a"):
        assert steps.index(("sync", Path(parent))) < visible
    assert ("sync", Path("new/root/a/b")) in steps[visible:]

    files.changes.clear()
    await store.create("a/b/k2", b"")
    synced = [path.relative_to(root) for name, path in files.changes if name == "sync"]
    assert synced[1:] == [Path("a/b")], "directories are made durable once"
    tag = await store.swap("a/b/k2", (await store.load("a/b/k2")).tag, b"x")
    files.changes.clear()
    await store.swap("a/b/k2", tag, b"y")
    names = [name for name, _ in files.changes]
    assert names.index("lock") < names.index("sync") < names.index("rename")
    assert ("sync", root / "a" / "b") in files.changes[names.index("rename") :]


async def test_an_object_that_is_met_is_durable(tmp_path: Path) -> None:
    """Its creator may have died between link and sync; whoever is told AlreadyExists may build on it."""
    await local(tmp_path).create("a/k", b"data")
    files = WatchedFiles()
    with pytest.raises(StoreError, match="exists"):
        await local(tmp_path, files).create("a/k", b"data")
    assert ("sync", tmp_path / "a") in files.changes
    assert ("sync", tmp_path) in files.changes


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.ESTALE, errno.EROFS, errno.EXDEV]
)
async def test_operating_system_errors_are_unavailable_or_a_refusal(code: int, tmp_path: Path) -> None:
    class Failing(PosixFiles):
        def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
            raise OSError(code, os.strerror(code), str(path))

        def sync(self, path: Path) -> None:
            self.read(path)

    await local(tmp_path).create("a/k", b"data")
    store = local(tmp_path, Failing())
    refused = Unavailable if code in (errno.EIO, errno.ESTALE, errno.EXDEV) else WriteRefused
    for call, kind in (
        (store.load("a/k"), Unavailable),
        (store.read("a/k"), Unavailable),
        (store.create("a/new", b""), refused),
        (store.replace("a/k", b""), refused),
        (store.swap("a/k", _tag(b"data"), b""), refused),
    ):
        with pytest.raises(kind) as error:
            await call
        assert str(tmp_path) in str(error.value)
        assert errno.errorcode[code] in str(error.value)
        assert os.strerror(code) in str(error.value)
    assert await local(tmp_path).read("a/k") == b"data"
    assert os.listdir(tmp_path / ".stitch" / "tmp") == []


async def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    class Full(PosixFiles):
        def write_at(self, path: Path, offset: int, data: Any) -> None:
            super().write_at(path, offset, memoryview(data)[:2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    store = local(tmp_path, Full())
    with pytest.raises(WriteRefused, match="ENOSPC"):
        await store.create("k", b"data")
    assert await store.list("") == []
    assert os.listdir(tmp_path / ".stitch" / "tmp") == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_what_fails_once_the_object_is_in_its_place_is_an_unknown_outcome(
    code: int, tmp_path: Path
) -> None:
    """Others see it already, although nothing says that it is durable."""

    class Failing(PosixFiles):
        armed = False

        def sync(self, path: Path) -> None:
            if self.armed and path.name == "a":
                raise OSError(code, os.strerror(code), str(path))
            super().sync(path)

    files = Failing()
    store = local(tmp_path, files)
    await store.create("a/k", b"data")
    files.armed = True
    for key, call in (
        ("a/new", store.create("a/new", b"new")),
        ("a/k", store.swap("a/k", _tag(b"data"), b"new")),
        ("a/k", store.replace("a/k", b"new")),
    ):
        with pytest.raises(Unavailable, match=errno.errorcode[code]):
            await call
        assert await store.read(key) == b"new"


async def test_a_held_lock_is_waited_for_and_given_up(tmp_path: Path) -> None:
    store = local(tmp_path, lock_timeout=0.2)
    tag = await store.swap("k", None, b"one")
    locks = sorted((tmp_path / ".stitch" / "locks").iterdir())
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(PosixFiles().lock(lock, 1))
        ticks = 0
        swap = asyncio.ensure_future(store.swap("k", tag, b"two"))
        while not swap.done():
            await asyncio.sleep(0.005)
            ticks += 1
        with pytest.raises(Unavailable, match="locked by another"):
            await swap
        assert ticks > 1  # the loop was free
        await store.create("other", b"")  # needs no lock
        assert await store.read("k") == b"one"
    await store.swap("k", tag, b"two")


async def test_empty_or_missing_root(tmp_path: Path) -> None:
    root = tmp_path / "missing"
    store = local(root)
    for call in (store.load("a/k"), store.read("k"), store.size("k")):
        with pytest.raises(NotFound):
            await call
    for call in (store.load("a/k"), store.list(""), store.list("a/")):
        with pytest.raises(NoStore, match="is it mounted"):
            await call
    await store.delete("a/k")
    with pytest.raises(BadKey):
        await store.create("../k", b"")
    assert not root.exists(), "reading makes nothing"
    await store.create("a/k", b"data")
    assert (root / "a" / "k").read_bytes() == b"data"


async def test_directories_that_vanish_are_made_again(tmp_path: Path) -> None:
    store = local(tmp_path / "root")
    await store.create("a/b/k", b"data")
    PosixFiles().remove_tree(tmp_path / "root" / "a")
    await store.create("a/b/k", b"data")
    assert await store.read("a/b/k") == b"data"


async def test_files_of_others_are_no_objects(tmp_path: Path) -> None:
    store = local(tmp_path)
    await store.create("a/k", b"data")
    for name in ("a/.hidden", "a/with blank", "a/.k.tmp", ".x"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a" / "dangling").symlink_to("nothing")
    assert [entry.key for entry in await store.list("")] == ["a/k"]


async def test_c81_a_loop_of_symbolic_links_ended_every_listing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is named once, and passed over: a link to itself, two to each other, one to where it lies in."""
    store = local(tmp_path)
    for key in ("runs/a/e1/k", "runs/b/k", "runs/plain"):
        await store.create(key, b"data")
    loops = {
        "runs/self": "self", "runs/ping": "pong", "runs/pong": "ping", "runs/a/up": "..",
        "runs/a/top": "../..", "runs/a/e1/here": ".", "runs/above": str(tmp_path.parent),
    }  # fmt: skip
    for key, target in loops.items():
        (tmp_path / key).symlink_to(target)
    os.mkfifo(tmp_path / "runs" / "a" / "pipe")
    for _ in range(2):
        assert [entry.key for entry in await store.list("")] == ["runs/a/e1/k", "runs/b/k", "runs/plain"]
        assert [entry.key for entry in await store.list("runs/a/e")] == ["runs/a/e1/k"]
        assert await store.folders("runs/") == ["a", "b"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(loops) + 1
    for key in [*loops, "runs/a/pipe"]:
        assert any(str(tmp_path / key) in text for text in said), key


async def test_c81_links_that_come_round_by_way_of_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link to another directory is followed, also to one outside, but for where it leads back."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    store = local(root)
    await store.create("a/k", b"data")
    (outside / "deep").mkdir(parents=True)
    (outside / "o").write_bytes(b"data")
    (root / "a" / "out").symlink_to(outside)
    (outside / "deep" / "back").symlink_to(root / "a")
    assert [entry.key for entry in await store.list("")] == ["a/k", "a/out/o"]
    (record,) = caplog.records
    assert "a/out/deep/back" in record.getMessage()


async def test_stale_temporaries_are_swept(tmp_path: Path) -> None:
    await local(tmp_path).create("a", b"")
    directory = tmp_path / ".stitch" / "tmp"
    now = time.time()
    old = now - STALE_AFTER - 10
    leave(directory / f"{int(old)}.0123", old)
    leave(directory / f"{int(now)}.0123", now)  # another process is writing it
    leave(directory / "unknown", old)
    store = local(tmp_path)
    await store.load("a")
    assert len(os.listdir(directory)) == 3, "readers remove nothing"
    await store.create("b", b"")
    assert sorted(os.listdir(directory)) == [f"{int(now)}.0123", "unknown"]


def leave(path: Path, written: float) -> None:
    path.write_bytes(b"")
    os.utime(path, (written, written))


class TwoDaysAhead(SystemClock):
    def time(self) -> float:
        return super().time() + 2 * STALE_AFTER


async def test_c80_a_clock_that_is_two_days_ahead_swept_what_others_were_writing(tmp_path: Path) -> None:
    """Also an upload that began days ago, and goes on: a temporary is as old as its last bytes."""
    await local(tmp_path).create("a", b"")
    directory, now = tmp_path / ".stitch" / "tmp", time.time()
    leave(directory / f"{int(now)}.0123", now)
    leave(directory / f"{int(now - 3 * STALE_AFTER)}.0123", now)
    await local(tmp_path, clock=TwoDaysAhead()).create("b", b"")
    assert len(os.listdir(directory)) == 2


async def test_c80_the_age_of_an_object_was_by_the_clock_of_who_asked(tmp_path: Path) -> None:
    """Both times are by who dates the files: a server, on a network mount."""
    await local(tmp_path).create("k", b"")
    stamp = await local(tmp_path, clock=TwoDaysAhead()).stamp("k")
    assert stamp.age is not None
    assert 0 <= stamp.age < 60
    assert os.listdir(tmp_path / ".stitch" / "tmp") == []


async def test_c80_the_time_is_asked_for_once_a_minute_and_goes_on_between(tmp_path: Path) -> None:
    files, clock = WatchedFiles(), HandClock()
    store = local(tmp_path, files, clock=clock)
    await store.create("k", b"")
    first = (await store.stamp("k")).now
    files.changes.clear()
    clock.now += 59.0
    later = (await store.stamp("k")).now
    assert (first is not None and later is not None and later - first, files.changes) == (59.0, [])
    clock.now += 2.0
    await store.stamp("k")
    assert [name for name, _ in files.changes] == ["write_new", "remove"]


async def test_c80_a_directory_that_cannot_be_written_tells_no_time(tmp_path: Path) -> None:
    class ReadOnly(PosixFiles):
        def write_new(self, path: Path, data: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    await local(tmp_path).create("k", b"")
    stamp = await local(tmp_path, ReadOnly()).stamp("k")
    assert (stamp.now, stamp.age) == (None, None)
    with pytest.raises(StoreError):
        await time_of(local(tmp_path, ReadOnly()), "k", SystemClock())


async def test_locks_do_not_pile_up(tmp_path: Path) -> None:
    store = local(tmp_path, QuickFiles())
    for number in range(150):
        (tmp_path / f"k{number}").write_bytes(b"")
        await store.delete(f"k{number}")
    assert len(os.listdir(tmp_path / ".stitch" / "locks")) <= 64


@pytest.mark.parametrize("call", ["delete", "replace"])
async def test_nothing_happens_between_compare_and_write(call: str, tmp_path: Path) -> None:
    """Otherwise a swap that has compared could undo a deletion or a write that came before its own."""
    store, loop = local(tmp_path), asyncio.get_running_loop()
    tag = await store.swap("k", None, b"one")
    other = store.delete("k") if call == "delete" else store.replace("k", b"hint")
    others = []

    class Interrupted(PosixFiles):
        def rename(self, source: Path, target: Path) -> None:
            others.append(asyncio.run_coroutine_threadsafe(other, loop))
            time.sleep(0.05)
            assert not others[0].done()
            super().rename(source, target)

    await local(tmp_path, Interrupted()).swap("k", tag, b"two")
    await asyncio.wrap_future(others[0])
    entries = await store.list("")
    assert [entry.key for entry in entries] == ([] if call == "delete" else ["k"])
    with pytest.raises(Conflict):
        await store.swap("k", tag, b"three")


async def test_create_between_compare_and_write_wins(tmp_path: Path) -> None:
    """Creating takes no lock, so a swap that found nothing must not write over it."""

    class Interrupted(PosixFiles):
        def link(self, source: Path, target: Path) -> None:
            if target.name == "k":
                target.write_bytes(b"created")
            super().link(source, target)

    with pytest.raises(Conflict):
        await local(tmp_path, Interrupted()).swap("k", None, b"swapped")
    assert await local(tmp_path).read("k") == b"created"


async def test_giving_up_does_not_wait_for_a_hung_mount(tmp_path: Path) -> None:
    """C18: a reader with a timeout goes on, whatever its thread hangs in."""
    release, answered = threading.Event(), threading.Event()

    class Hung(PosixFiles):
        def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
            release.wait(100)
            answered.set()
            return b""

    store = LocalStore(tmp_path, Hung())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(store.load("k"), 0.05)
    assert not answered.is_set()
    release.set()
    await store.close()


async def test_folders_and_times(tmp_path: Path) -> None:
    store, began = local(tmp_path), time.time()
    for key in ("runs/r/head", "runs/s/a/b", "runs/plain"):
        await store.create(key, b"")
    (tmp_path / "runs" / "with blank").mkdir()
    assert await store.folders("runs/") == ["r", "s"]
    assert await store.folders("none/") == await store.folders("runs/plain/") == []
    assert abs((await store.stamp("runs/r/head")).written - began) < 60
    os.utime(tmp_path / "runs/r/head", (began - 500, began - 500))
    age = (await store.stamp("runs/r/head")).age
    assert age is not None
    assert 499 < age < 560
    with pytest.raises(NotFound):
        await store.stamp("runs/none")
    with pytest.raises(NoStore):
        await local(tmp_path / "none").folders("runs/")
