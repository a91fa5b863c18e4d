"""``stitch doctor`` proves what a store does, finds out those that do not, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch_core.cli import common, doctor
from stitch_core.files import PosixFiles
from stitch_core.ports import Blob, Buffer, Capabilities, Entry, FileSource, NotFound, Stamp, Unavailable
from stitch_core.stores.memory import MemoryObjects, MemoryStore
from tests.cli.commands import Said, Shell
from tests.stores.test_kit import IgnoresTags, Overwrites


def results(said: Said) -> dict[str, str]:
    return {check["check"]: check["result"] for check in said.json["checks"]}


def test_a_store_in_a_directory(shell: Shell) -> None:
    shell.claim()
    before = sorted(path for path in (shell.root / "store").rglob("*"))
    said = shell(
        "doctor", "--store", shell.store, "--base", shell.base, "--scratch", shell.root / "new", "--json"
    )
    found = results(said)
    assert said.code == 0
    assert not said.json["failed"]
    for check in ("write", "read after write", "create-only", "compare-and-swap", "race to create",
                  "race to swap", "clock", "delete", "mount", "base", "scratch"):  # fmt: skip
        assert found[check] == "ok", check
    assert sorted(path for path in (shell.root / "store").rglob("*")) == before, "nothing is left"
    assert not (shell.root / "new").exists()
    text = shell("doctor", "--store", shell.store)
    assert text.out.startswith("check ")
    assert "3 times one of 8 won" in text.out


def test_what_a_doctor_that_was_killed_left_goes_with_a_later_one(shell: Shell) -> None:
    """A directory with 8 MiB in it stayed in the store for good."""
    shell.claim()
    old, new = (shell.root / "store" / f".stitch-doctor-{name}" for name in ("old", "new"))
    for left in (old, new):
        left.mkdir()
        (left / "large").write_bytes(b"x")
    os.utime(old, (0, 0))
    assert shell("doctor", "--store", shell.store, "--read-only").code == 0
    assert old.exists()
    assert shell("doctor", "--store", shell.store).code == 0
    assert (old.exists(), new.exists()) == (False, True)


def test_a_store_that_is_not_begun_is_not_begun_by_looking(shell: Shell) -> None:
    said = shell("doctor", "--store", shell.store, "--json")
    assert said.code == 0
    assert "the first write begins the store" in said.json["checks"][0]["detail"]
    assert not (shell.root / "store").exists()
    assert [path.name for path in shell.root.iterdir()] == ["base"]


def test_read_only(shell: Shell) -> None:
    shell.claim()
    said = shell("doctor", "--store", shell.store, "--read-only", "--json")
    assert results(said)["writes"] == "skipped"
    assert "write" not in results(said)
    PosixFiles().remove_tree(shell.root / "store")
    assert shell("doctor", "--store", shell.store, "--read-only").code == 1, "a replica needs it to be there"


# --------------------------------------------------------------------------------- stores that fall short


@pytest.fixture
def check(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[MemoryStore]], Said]:
    """The doctor's word on a kind of memory store; asserts that nothing is left in it."""

    def run(kind: type[MemoryStore], left: int = 0) -> Said:
        objects = MemoryObjects()
        monkeypatch.setattr(common, "open_store", lambda url: kind(objects))
        said = shell("doctor", "--store", "other://x", "--json")
        assert len(objects.objects) == left
        return said

    return run


def test_a_sound_store(check: Callable[..., Said]) -> None:
    said = check(MemoryStore)
    assert said.code == 0
    assert results(said)["clock"] == "skipped"


class Racy(MemoryStore):
    """Compares, and writes a moment later: right alone, wrong when two meet."""

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        try:
            tag: str | None = (await self.load(key)).tag
        except NotFound:
            tag = None
        await asyncio.sleep(0.01)
        return await super().swap(key, expected, data) if tag != expected else await self._write(key, data)

    async def _write(self, key: str, data: bytes) -> str:
        await self.replace(key, data)
        return (await self.load(key)).tag


class Forgets(MemoryStore):
    """Does not show what was written."""

    async def load(self, key: str) -> Blob:
        raise NotFound(key)


class Stale(MemoryStore):
    """A listing shows what was there a while ago."""

    async def list(self, prefix: str) -> list[Entry]:
        return await super().list(prefix) if len(self.state.objects) > 3 else []


class Sleeps(MemoryStore):
    """Its clock is an hour behind."""

    async def stamp(self, key: str) -> Stamp:
        return Stamp(time.time() - 3600, time.time() - 3600)


class Weak(MemoryStore):
    """Says itself that it cannot compare and swap."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_writes=False)


@pytest.mark.parametrize(
    ("kind", "failing", "detail"),
    [
        (Overwrites, "create-only", "a second create of the same key was accepted"),
        (Overwrites, "race to create", "8 of 8 writers were told that they won"),
        (IgnoresTags, "compare-and-swap", "a swap from no object won"),
        (Racy, "race to swap", "writers were told that they won"),
        (Forgets, "read after write", "NotFound"),
        (Stale, "list after write", "a listing shows nothing"),
        (Sleeps, "clock", "apart"),
    ],
)
def test_what_is_wrong_is_found_out(
    check: Callable[..., Said], kind: type[MemoryStore], failing: str, detail: str
) -> None:
    said = check(kind)
    assert said.code == 1
    (found,) = [c for c in said.json["checks"] if c["check"] == failing]
    assert found["result"] == "fail"
    assert detail in found["detail"]
    assert found["do"]


def test_a_store_that_says_it_is_weaker(check: Callable[..., Said]) -> None:
    said = check(Weak)
    assert said.code == 0
    assert results(said)["races"] == "warn"


class Refuses(MemoryStore):
    """May be read, not written."""

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        raise Unavailable("AccessDenied")


class KeepsAll(MemoryStore):
    """Deletes nothing."""

    async def delete(self, key: str) -> None:
        raise Unavailable("AccessDenied")


def test_permissions(check: Callable[..., Said]) -> None:
    said = check(Refuses)
    assert said.code == 1
    assert results(said)["write"] == "fail"
    assert "create-only" not in results(said), "one failure is not eight"
    said = check(KeepsAll, left=8)
    assert (said.code, results(said)["delete"]) == (1, "fail")


def test_what_is_to_be_done_is_said(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "open_store", lambda url: Refuses())
    said = shell("doctor", "--store", "other://x")
    assert "FAIL" in said.out
    assert "write: make room (ENOSPC), or allow this user to write there" in said.out


# --------------------------------------------------------------------------------------- the machine


def test_a_mount_without_links_is_a_warning_and_another_s_store_a_failure(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.claim(run="with-links")

    def link(self: PosixFiles, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source))

    monkeypatch.setattr(PosixFiles, "link", link)
    said = shell("doctor", "--store", shell.store, "--json")
    mount = next(check for check in said.json["checks"] if check["check"] == "mount")
    assert (said.code, mount["result"]) == (1, "fail")
    assert "was begun with hard links" in mount["detail"]
    said = shell("doctor", "--store", f"file:{shell.root / 'new'}", "--json")
    assert (said.code, results(said)["mount"]) == (0, "warn")


def test_room_and_speed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PosixFiles, "free_bytes", lambda self, path: 10)
    said = shell("doctor", "--store", shell.store, "--base", shell.base, "--json")
    found = results(said)
    assert (said.code, found["scratch"], found["/dev/shm"]) == (1, "fail", "warn")
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "SLOW_SYNC", 0.0)
    said = shell("doctor", "--store", shell.store, "--json")
    assert (said.code, results(said)["scratch"]) == (0, "warn")
    assert shell("doctor", "--store", shell.store, "--base", shell.root / "none").code == 1


def test_mount_kinds(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nbucket /mnt/with\\040blank fuse.s3fs rw 0 0\nnone /mnt tmpfs rw 0 0\njunk\n"
    )
    assert doctor.mount_kind(Path("/mnt/with blank/x"), mounts) == "fuse.s3fs"
    assert doctor.mount_kind(Path("/mnt/x"), mounts) == "tmpfs"
    assert doctor.mount_kind(Path("/other"), mounts) == "ext4"
    assert doctor.mount_kind(Path("/other"), tmp_path / "none") == "unknown"


def test_mount_points_that_are_not_ascii_were_never_found(tmp_path: Path) -> None:
    """They were taken apart as Latin-1, so that the store on them was said to be on what is mounted above."""
    mounts = tmp_path / "mounts"
    odd = os.fsencode("/mnt/") + b"\xff\xfe"
    mounts.write_bytes(
        "/dev/a / ext4 rw 0 0\nhost:/x /mnt/donn\u00e9es\\040\u6a21\u578b nfs4 rw 0 0\n".encode()
        + b"b /mnt/back\\134040slash\\011tab xfs rw 0 0\nc " + odd + b" zfs rw 0 0\n"
        + b"d /mnt/n\\012ew btrfs rw 0 0\ne /mnt/u\\x41 fuse.x rw 0 0\n"
    )  # fmt: skip
    for path, kind in (
        ("/mnt/donn\u00e9es \u6a21\u578b/store", "nfs4"), ("/mnt/back\\040slash\ttab/s", "xfs"),
        (os.fsdecode(odd) + "/s", "zfs"), ("/mnt/n\new/s", "btrfs"), ("/mnt/u\\x41/s", "fuse.x"),
        ("/mnt/uA/s", "ext4"),
    ):  # fmt: skip
        assert doctor.mount_kind(Path(path), mounts) == kind, path


def test_a_network_mount_is_warned_of(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "mount_kind", lambda path: "fuse.sshfs")
    said = shell("doctor", "--store", shell.store, "--json")
    assert (said.code, results(said)["other hosts"]) == (0, "warn")


def test_unreachable(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(MemoryStore):
        async def list(self, prefix: str) -> list[Entry]:
            raise Unavailable("no route to host")

    monkeypatch.setattr(common, "open_store", lambda url: Away())
    said = shell("doctor", "--store", "other://x", "--json")
    assert said.code == 1
    assert list(results(said)) == ["list", "scratch", "/dev/shm"]
