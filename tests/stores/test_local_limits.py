"""LocalStore on mounts that lack something, and on directories that go away, which never look empty."""

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stitch_core.chain import ChainReader, NoHead
from stitch_core.files import PosixFiles
from stitch_core.ports import AlreadyExists, NoStore, NotFound, StoreError, Unavailable, WriteRefused
from stitch_core.publisher import ClaimRefused
from stitch_core.stores.identity import Identity
from stitch_core.stores.local import LocalStore
from stitch_core.stores.probe import Unsupported, probe
from stitch_core.testing.stores import StoreTests
from tests.small_run import Trainer
from tests.stores.test_local_processes import finish, go, start


class Lacking(PosixFiles):
    """A mount on which some calls fail as they do on the real ones. ``directory_sync`` is of directories."""

    def __init__(self, **missing: int) -> None:
        self.missing = missing

    def write_new(self, path: Path, data: Any) -> None:
        self._fail("write_new", path)
        super().write_new(path, data)

    def write_at(self, path: Path, offset: int, data: Any) -> None:
        self._fail("write_at", path)
        super().write_at(path, offset, data)

    def _fail(self, name: str, path: Path) -> None:
        if name in self.missing:
            raise OSError(self.missing[name], os.strerror(self.missing[name]), str(path))

    def link(self, source: Path, target: Path) -> None:
        self._fail("link", source)
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._fail("rename", source)
        super().rename(source, target)

    def sync(self, path: Path) -> None:
        self._fail("directory_sync" if path.is_dir() else "sync", path)
        super().sync(path)

    def lock(self, path: Path, timeout: float) -> Any:
        self._fail("lock", path)
        return super().lock(path, timeout)


def local(root: Path, files: PosixFiles | None = None, **options: Any) -> LocalStore:
    return LocalStore(root, files, asyncio.to_thread, **options)


class TestWithoutLinks(StoreTests):
    """FAT, exFAT, most FUSE mounts: EPERM; the whole kit holds, two handles racing."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        root = tmp_path / "root"
        root.mkdir()
        return local(root, Lacking(link=errno.EPERM, directory_sync=errno.EINVAL))

    @pytest.fixture
    def second_store(self, store: LocalStore) -> LocalStore:
        return local(store.root, Lacking(link=errno.EPERM))


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
async def test_without_links_it_says_so_once_and_works(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = local(tmp_path, Lacking(link=code))
    for number in range(3):
        await store.create(f"k{number}", b"data")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} has no hard links ({errno.errorcode[code]}, {os.strerror(code)}): objects are created "
        "under a lock instead"
    ]
    with pytest.raises(AlreadyExists):
        await store.create("k0", b"other")
    assert os.listdir(tmp_path / ".stitch" / "tmp") == []


async def test_every_writer_creates_in_the_same_way(tmp_path: Path) -> None:
    """link(2) takes no lock: a mount with links and one without would not see each other's creates."""
    await local(tmp_path, Lacking(link=errno.EPERM)).create("a", b"")

    class NeverLinks(PosixFiles):
        def link(self, source: Path, target: Path) -> None:
            raise AssertionError("the store was begun without links")

    await local(tmp_path, NeverLinks()).create("b", b"")
    other = tmp_path / "other"
    await local(other).create("a", b"")
    with pytest.raises(Unsupported, match="begun where hard links work, and here they do not \\(EPERM"):
        await local(other, Lacking(link=errno.EPERM)).create("b", b"")
    assert await local(other, Lacking(link=errno.EPERM)).read("a") == b""


async def test_a_create_that_waits_for_the_lock_finds_the_object(tmp_path: Path) -> None:
    """Without links the check and the rename are one step for every writer."""
    first = local(tmp_path, Lacking(link=errno.EPERM))
    await first.create("warm", b"")
    results = await asyncio.gather(
        *(local(tmp_path, Lacking(link=errno.EPERM)).create("k", b"%d" % n) for n in range(8)),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["AlreadyExists"] * 7 + ["NoneType"]


async def test_one_process_wins_each_key_without_links(tmp_path: Path) -> None:
    """A store that was begun without links: every process takes the lock, whatever its mount can do."""
    await local(tmp_path, Lacking(link=errno.EPERM)).create("begun", b"")
    rounds = 10
    workers = [start(tmp_path, "create", me, rounds) for me in "abc"]
    go(*workers)
    won = {me: finish(worker) for me, worker in zip("abc", workers, strict=True)}
    assert sorted(number for numbers in won.values() for number in numbers) == list(range(rounds))
    for me, numbers in won.items():
        for number in numbers:
            assert await local(tmp_path).read(f"race/{number}") == me.encode() * 100_000


async def test_a_crash_without_links_leaves_all_or_nothing(tmp_path: Path) -> None:
    class Crash(BaseException):
        pass

    class Dies(Lacking):
        def rename(self, source: Path, target: Path) -> None:
            if target.name == "k":
                raise Crash
            super().rename(source, target)

        def remove(self, path: Path) -> None:
            if (path.parent.parent / "store.json").exists():
                raise Crash
            super().remove(path)

    with pytest.raises(Crash):
        await local(tmp_path, Dies(link=errno.EPERM)).create("k", b"data")
    after = local(tmp_path, Lacking(link=errno.EPERM))
    assert await after.list("") == []
    await after.create("k", b"data")


async def test_directories_that_cannot_be_synced_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = local(tmp_path / "new", Lacking(directory_sync=errno.EINVAL))
    await store.create("a/k", b"data")
    await store.swap("a/head", None, b"1")
    (record,) = caplog.records
    assert "cannot sync directories (EINVAL" in record.getMessage()
    with pytest.raises(Unavailable, match="EIO"):
        await local(tmp_path, Lacking(directory_sync=errno.EIO)).create("b", b"")
    # A file's own bytes are another matter: what is not durable is not there.
    with pytest.raises(Unavailable, match="EINVAL"):
        await local(tmp_path / "new", Lacking(sync=errno.EINVAL)).create("b", b"")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
async def test_without_locks_it_can_be_read(code: int, tmp_path: Path) -> None:
    await local(tmp_path).create("k", b"data")
    store = local(tmp_path, Lacking(lock=code))
    assert await store.read("k") == b"data"
    with pytest.raises(Unsupported, match=r"no file locks .* can be read from here and not written"):
        await store.swap("head", None, b"1")
    with pytest.raises(Unsupported, match="no file locks"):
        await local(tmp_path / "new", Lacking(lock=code)).create("k", b"")


async def test_without_rename_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"cannot be renamed .*ENOSYS.*another directory"):
        await local(tmp_path, Lacking(rename=errno.ENOSYS)).create("k", b"data")
    assert not (tmp_path / "k").exists()


def test_probe(tmp_path: Path) -> None:
    def limits(**missing: int) -> tuple[str, ...]:
        found = probe(Lacking(**missing), tmp_path, "nonce")
        assert list(tmp_path.iterdir()) == []
        assert found.sync_seconds > 0
        assert found.writable == ("rename" not in missing and "lock" not in missing)
        return found.limits

    assert limits() == ()
    (said,) = limits(link=errno.EPERM)
    assert said == (
        "there are no hard links: objects are created under a lock instead (EPERM, Operation not permitted)"
    )
    assert len(limits(lock=errno.ENOLCK, rename=errno.ENOSYS, directory_sync=errno.EINVAL)) == 3
    with pytest.raises(OSError, match="No space"):
        limits(sync=errno.ENOSPC)


@pytest.mark.parametrize("how", ["case", "dot"])
def test_probe_of_names(how: str, tmp_path: Path) -> None:
    class Fat(PosixFiles):
        """Finds a name in any case; drops a dot at the end."""

        def exists(self, path: Path) -> bool:
            names = [name.lower() for name in os.listdir(path.parent)]
            return path.name.lower() in names if how == "case" else super().exists(path)

        def rename(self, source: Path, target: Path) -> None:
            self.plain = target.with_name(target.name.rstrip(".") if how == "dot" else target.name)
            super().rename(source, self.plain)

        def remove(self, path: Path) -> None:
            super().remove(self.plain if path.name.endswith("d.") else path)

    (said,) = probe(Fat(), tmp_path, "nonce").limits
    assert "names are not kept as written" in said


class Mountpoint(Lacking):
    """Of Mountpoint for S3: a file is written once, from its start, and is never renamed nor removed."""

    kind = "fuse"

    def __init__(self) -> None:
        super().__init__(
            link=errno.EPERM, rename=errno.ENOSYS, write_at=errno.EPERM, remove=errno.EPERM,
            lock=errno.EINVAL, directory_sync=errno.ENOSYS,
        )  # fmt: skip

    def remove(self, path: Path) -> None:
        self._fail("remove", path)


class Gcsfuse(Lacking):
    """Takes writes anywhere, by sending the whole object again; has no links, and locks of this host only."""

    kind = "fuse.gcsfuse"

    def __init__(self) -> None:
        super().__init__(link=errno.ENOSYS)


class S3fs(Lacking):
    kind = "fuse.s3fs"

    def __init__(self) -> None:
        super().__init__(link=errno.EOPNOTSUPP, directory_sync=errno.EINVAL)


@pytest.mark.parametrize("kind", [Mountpoint, Gcsfuse, S3fs])
@pytest.mark.parametrize("begun", [False, True])
async def test_c81_a_mounted_bucket_did_not_say_which_kind_of_store_to_use(
    kind: type[Lacking], begun: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By an error where it cannot hold a store, by a warning where only one host may write it."""
    monkeypatch.setattr("stitch_core.stores.mount.mount_kind", lambda path: kind.kind)
    if begun:  # by a copy of a store that was begun on a disk
        await local(tmp_path).create("runs/r/k", b"data")
    store, said = local(tmp_path, kind()), ""
    for write in (store.create("runs/r/new", b"data"), store.swap("runs/r/head", None, b"data")):
        try:
            await write
        except WriteRefused as error:
            said += str(error)
    said += "".join(record.getMessage() for record in caplog.records)
    assert "s3://BUCKET/PREFIX" in said
    assert str(tmp_path) in said
    assert f" {kind.kind}:" in said


async def test_c81_a_disk_is_not_taken_for_a_bucket(tmp_path: Path) -> None:
    with pytest.raises(WriteRefused) as error:
        await local(tmp_path, Lacking(write_new=errno.EPERM)).create("k", b"data")
    assert "s3://" not in str(error.value)


@pytest.mark.parametrize(
    "missing",
    [{"link": errno.EPERM}, {"link": errno.EOPNOTSUPP}, {"write_new": errno.EROFS}, {"rename": errno.ENOSYS},
     {"write_at": errno.EPERM}, {"lock": errno.ENOLCK}],
    ids=str,
)  # fmt: skip
async def test_c81_a_claim_on_a_mount_that_lost_a_capability_fenced_the_trainer(
    missing: dict[str, int], tmp_path: Path
) -> None:
    """The head could be swapped where no object can be created: then neither of the two could publish."""
    trainer = Trainer(tmp_path)
    working = trainer.publisher(local(tmp_path / "store"))
    await working.claim(trainer.version0)
    lost = trainer.publisher(local(tmp_path / "store", Lacking(**missing)))
    with pytest.raises(ClaimRefused):
        await lost.claim(trainer.version0)
    with pytest.raises(ClaimRefused):
        await lost.take_back(-1)
    manifest = await trainer.publish(working)
    assert (manifest.number, manifest.epoch) == (1, 1)
    left = list((tmp_path / "store").rglob("claim-*"))
    assert bool(left) == ("lock" in missing), "who may not delete leaves it for the collector"


# ------------------------------------------------------------------------------------------ a lost root


async def test_a_root_that_is_gone_is_not_an_empty_store(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    await local(root).create("runs/r/head", b"data")
    reader, writer = local(root), local(root)
    assert await reader.read("runs/r/head") == b"data"
    await writer.create("runs/r/a/k", b"data")
    # Unmounted: the empty directory below comes to light. Removed: there is none.
    for left in (True, False):
        PosixFiles().remove_tree(root)
        if left:
            root.mkdir()
        for store in (reader, writer):
            for call in (
                store.load("runs/r/head"), store.size("runs/r/head"), store.list("runs/"), store.list("x"),
                store.create("runs/r/b/k", b""), store.create("runs/r/a/k2", b""),
                store.swap("runs/r/head", None, b""), store.replace("runs/r/head", b""),
                store.delete("runs/r/head"),
            ):  # fmt: skip
                with pytest.raises(Unavailable, match="not there any more: was it unmounted or removed"):
                    await call
        assert not any(root.rglob("*")), "nothing was begun anew"


async def test_another_store_under_the_same_name(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    store = local(root)
    await store.create("k", b"data")
    root.rename(tmp_path / "away")
    await local(root).create("other", b"")
    with pytest.raises(Unavailable, match="is another one now"):
        await store.load("k")
    with pytest.raises(Unavailable, match="is another one now"):
        await store.create("new/k", b"")
    PosixFiles().remove_tree(root)
    (tmp_path / "away").rename(root)
    assert await store.read("k") == b"data", "and when it is back, all is well"


async def test_a_store_of_before_gets_its_identity_from_the_next_writer(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "k").write_bytes(b"old")
    reader = local(tmp_path)
    assert await reader.read("runs/k") == b"old"
    assert not (tmp_path / ".stitch").exists(), "readers write nothing"
    await local(tmp_path).create("runs/k2", b"")
    first = (tmp_path / ".stitch" / "store.json").read_bytes()
    await local(tmp_path).create("runs/k3", b"")
    assert (tmp_path / ".stitch" / "store.json").read_bytes() == first


async def test_first_writers_agree_on_one_identity(tmp_path: Path) -> None:
    stores = [local(tmp_path / "new") for _ in range(8)]
    await asyncio.gather(*(store.create(f"k{n}", b"") for n, store in enumerate(stores)))
    for store in stores:
        assert len(await store.list("")) == 8
        with pytest.raises(NotFound):
            await store.load("none")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"create":"copy","format":"stitch.store/1","id":"x"}\n'])
async def test_an_identity_that_cannot_be_read(data: bytes, tmp_path: Path) -> None:
    await local(tmp_path).create("k", b"data")
    (tmp_path / ".stitch" / "store.json").write_bytes(data)
    with pytest.raises(StoreError, match=r"store.json: .*remove the file if the store is sound"):
        await local(tmp_path).create("k2", b"")
    (tmp_path / ".stitch" / "store.json").unlink()
    await local(tmp_path).create("k2", b"")


def test_identity_reads_what_it_writes() -> None:
    for identity in (Identity("x", "link"), Identity("y", "lock")):
        assert Identity.decode(identity.encode(), "here") == identity


async def test_a_file_is_no_store_and_never_looks_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    store = local(tmp_path / "file")
    for call in (store.list("runs/"), store.folders("runs/"), store.load("k"), store.create("k", b"")):
        with pytest.raises(NoStore, match="is a file: a store is a directory"):
            await call
    assert (tmp_path / "file").read_bytes() == b"precious"


async def test_a_run_in_a_directory_that_is_not_there(tmp_path: Path) -> None:
    store = local(tmp_path / "typo")
    with pytest.raises(NoHead, match=r"run r has no head yet: there is no directory .*typo: is it mounted"):
        await ChainReader(store).head("r")
    with pytest.raises(NoStore):
        await store.list("runs/")


# --------------------------------------------------------------------------------------- real filesystems


@pytest.fixture(params=["tmpfs", "vfat"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own, small enough to fill."""
    where = tmp_path / "mnt"
    where.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    else:
        image = tmp_path / "image"
        image.write_bytes(bytes(2 * 2**20))
        command = ["sh", "-c", f"mkfs.vfat {image} && mount -o loop -t vfat {image} {where}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"platform: cannot mount {request.param} here ({error})")
    if done.returncode:
        pytest.skip(f"platform: cannot mount {request.param} here ({done.stderr.strip()[:80]})")
    yield where
    subprocess.run(["umount", str(where)], check=True)


async def test_a_real_small_filesystem(mounted: Path) -> None:
    store = local(mounted)
    await store.create("runs/r/k", b"data")
    tag = await store.swap("runs/r/head", None, b"1")
    with pytest.raises(AlreadyExists):
        await store.create("runs/r/k", b"data")
    # Full: said, nothing half is left, and what was there is as it was.
    with pytest.raises(WriteRefused, match="ENOSPC"):
        await store.create("runs/r/big", bytes(3 * 2**20))
    assert [entry.key for entry in await store.list("")] == ["runs/r/head", "runs/r/k"]
    await store.swap("runs/r/head", tag, b"2")
    assert os.listdir(mounted / ".stitch" / "tmp") == []


async def test_a_real_unmount(mounted: Path) -> None:
    store = local(mounted)
    await store.create("runs/r/head", b"1")
    await asyncio.to_thread(subprocess.run, ["umount", str(mounted)], check=True)
    try:
        with pytest.raises(Unavailable, match="was it unmounted"):
            await store.load("runs/r/head")
        with pytest.raises(Unavailable, match="was it unmounted"):
            await store.swap("runs/r/head", None, b"0")
        assert list(mounted.iterdir()) == []
    finally:
        mount = ["mount", "-t", "tmpfs", "tmpfs", str(mounted)]
        await asyncio.to_thread(subprocess.run, mount, check=True)  # which the fixture unmounts
