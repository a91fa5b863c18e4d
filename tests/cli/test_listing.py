"""``stitch status`` and ``stitch versions``: what is there, and what is wrong with it."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stitch_core.cli import common, publish
from stitch_core.ports import Blob, Entry, NotFound
from stitch_core.stores.local import LocalStore
from stitch_core.stores.memory import MemoryObjects, MemoryStore
from stitch_core.stores.temporaries import Temporaries
from tests.cli.commands import Shell


def put(shell: Shell, key: str, data: bytes) -> Path:
    path = shell.root / "store" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def status(shell: Shell, *more: object) -> Any:
    return shell("status", "--store", shell.store, "--json", *more).json


def test_a_store_that_is_not_there(shell: Shell) -> None:
    """Mistyped or not mounted: not the same as empty."""
    for command in (["status"], ["versions", "--run", "r"]):
        complaint = shell(*command, "--store", shell.store).complaint
        assert f"there is no directory {shell.root / 'store'}: is it mounted?" in complaint


def test_an_empty_store(shell: Shell) -> None:
    (shell.root / "store").mkdir()
    assert status(shell) == {"runs": [], "channels": [], "replicas": []}
    said = shell("status", "--store", shell.store)
    assert said.out.startswith("run")
    assert said.err == f"nothing is in {shell.store} yet; 'stitch claim' creates a run\n"
    said = shell("status", "--store", shell.store, "--run", "../x")
    assert "run id '../x' is not valid" in said.complaint
    said = shell("status", "--store", shell.store, "--run", "r")
    assert said.complaint == f"stitch status: there is no run r in {shell.store}: nobody has claimed it"


def test_status(shell: Shell) -> None:
    shell.claim("--channel", "latest")
    shell.publish(shell.learn("one"))
    record = {
        "id": "one", "address": "http://here", "run": "r", "applied": 1, "target": "r/weight_v000001",
        "fetching": [], "status": "serving", "time": time.time(), "expires": time.time() + 60,
    }  # fmt: skip
    put(shell, "replicas/one.json", json.dumps(record).encode())
    put(shell, "replicas/two.json", json.dumps({**record, "id": "two", "expires": 5}).encode())
    result = status(shell)
    assert (result["runs"][0]["head"], result["runs"][0]["epoch"], result["runs"][0]["floor"]) == (1, 2, 1)
    assert [(r["id"], r["expired"]) for r in result["replicas"]] == [("one", False), ("two", True)]
    text = shell("status", "--store", shell.store)
    assert text.code == 0
    lines = text.out.splitlines()
    assert lines[1].split()[:3] == ["r", "1", "2"]
    assert any(line.split()[:3] == ["latest", "r", "newest"] for line in lines)
    assert any("serving (expired)" in line for line in lines)
    only = status(shell, "--run", "r")
    assert [run["run"] for run in only["runs"]] == ["r"]
    assert only.keys() == {"runs"}, "nothing was listed"


@pytest.mark.parametrize(("ahead", "words"), [(-3600, "behind"), (3600, "ahead of")])
def test_a_living_replica_whose_clock_was_an_hour_behind_looked_dead(
    shell: Shell, ahead: float, words: str
) -> None:
    """And a dead one whose clock was ahead looked alive: the store tells how old a record is."""
    now = time.time()
    record = {"id": "living", "run": "r", "time": now + ahead, "expires": now + ahead + 15}
    put(shell, "replicas/living.json", json.dumps(record).encode())
    dead = put(shell, "replicas/dead.json", json.dumps({**record, "id": "dead"}).encode())
    os.utime(dead, (now - 60, now - 60))
    found = {replica["id"]: replica for replica in status(shell)["replicas"]}
    assert [found[name]["expired"] for name in ("living", "dead")] == [False, True]
    assert found["dead"]["age"] == pytest.approx(60, abs=40)
    assert found["living"]["clock_skew"] == pytest.approx(ahead, abs=40)
    said = shell("status", "--store", shell.store)
    assert re.search(rf"the clock of living is [0-9]+ s {words} the store's: set it \(NTP\)", said.out)
    assert "this machine's" not in said.out
    assert said.err == ""


def test_this_machines_clock_may_be_the_one_that_is_wrong(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records look expired, or are of the future, by a store that only says when it got them."""
    now = time.time()
    record = {"id": "one", "run": "r", "time": now - 900, "expires": now - 885}
    path = put(shell, "replicas/one.json", json.dumps(record).encode())
    os.utime(path, (now - 900, now - 900))
    assert shell("status", "--store", shell.store).err == "", "by the store's own time they have"
    with monkeypatch.context() as patched:
        patched.setattr(Temporaries, "date_of_new", not_permitted)
        said = shell("status", "--store", shell.store)
    assert "every record has expired" in said.err
    assert "'stitch doctor'" in said.err
    os.utime(path, (now + 900, now + 900))
    said = shell("status", "--store", shell.store)
    assert "s behind the store's: set it (NTP)" in said.out
    assert said.err == ""


def not_permitted(self: Temporaries) -> float:
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_c80_an_age_in_a_directory_was_by_this_machines_clock(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    now = time.time()
    record = {"id": "one", "run": "r", "time": now, "expires": now + 15}
    put(shell, "replicas/one.json", json.dumps(record).encode())
    monkeypatch.setattr("stitch_core.cli.status.time.time", lambda: now + ahead)
    (found,) = status(shell)["replicas"]
    assert (found["expired"], 0 <= found["age"] < 60) == (False, True)
    assert found["clock_skew_here"] == pytest.approx(ahead, abs=60)
    # Where nothing can be written nothing tells.
    monkeypatch.setattr(Temporaries, "date_of_new", not_permitted)
    (found,) = status(shell)["replicas"]
    assert (found["expired"], found["clock_skew_here"]) == (ahead > 0, None)


def test_a_replica_that_leaves_during_the_look_is_no_error(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shell, "replicas/one.json", b"{}")

    async def gone(self: LocalStore, key: str) -> Blob:
        raise NotFound(key)

    monkeypatch.setattr(LocalStore, "load", gone)
    assert status(shell)["replicas"] == []


@pytest.mark.parametrize(
    "record",
    [b"", b"[]", b"5", b"{}", b'{"id":"x"}', b'{"expires":"later","id":"x","time":1}',
     b'{"expires":1,"id":"x","time":null}', b'{"expires":1,"time":1}', b"\xff", b"[" * 100_000,
     b'{"expires":1,"id":"x","time":1%s}' % (b"0" * 400), b'{"expires":Infinity,"id":"x","time":1}',
     b'{"expires":1,"id":"x","time":1,"lag":NaN}', b'{"expires":1,"id":"x","time":1,"lag":1e400}'],
)  # fmt: skip
def test_a_record_that_cannot_be_read(shell: Shell, record: bytes) -> None:
    put(shell, "replicas/odd.json", record)
    said = shell("status", "--store", shell.store)
    assert said.code == 1
    assert "replicas/odd.json" in said.out
    assert "its record cannot be read" in said.out


def test_records_of_strangers(shell: Shell) -> None:
    put(shell, "replicas/odd.json", b'{"expires":1,"id":7,"time":1,"status":null}')
    said = shell("status", "--store", shell.store)
    assert said.code == 0
    assert "None (expired)" in said.out


def test_c02_what_is_broken_is_shown_and_the_exit_code_says_so(shell: Shell) -> None:
    shell.claim("--channel", "latest")
    shell.claim(run="s")
    put(shell, "runs/r/head", b"r/weight_v000007")
    put(shell, "channels/other", b"junk")
    put(shell, "runs/not~a~run/x", b"")
    result = shell("status", "--store", shell.store, "--json")
    assert result.code == 1
    runs = {run["run"]: run for run in result.json["runs"]}
    assert "not JSON" in runs["r"]["error"]
    assert runs["s"]["head"] == 0
    assert "is not valid" in runs["not~a~run"]["error"]
    assert "not JSON" in next(c for c in result.json["channels"] if c["channel"] == "other")["error"]
    assert shell("status", "--store", shell.store).code == 1


def test_a_run_that_was_begun_and_has_no_head(shell: Shell) -> None:
    shell.claim()
    (shell.root / "store" / "runs" / "r" / "head").unlink()
    assert status(shell)["runs"] == [{"run": "r", "head": None}]
    assert shell("status", "--store", shell.store).out.splitlines()[1].split() == ["r"] + ["-"] * 4


def test_versions(shell: Shell) -> None:
    for number in range(1, 4):
        shell.publish(shell.learn(f"v{number}"), *(["--as-delta"] if number > 1 else []), "--step", number)
    rows = shell("versions", "--store", shell.store, "--run", "r", "--json").json
    assert [(row["number"], row["kind"], row["step"]) for row in rows] == [
        (3, "delta", 3), (2, "delta", 2), (1, "full", 1), (0, "boot", None),
    ]  # fmt: skip
    two = shell("versions", "--store", shell.store, "--run", "r", "--limit", 2, "--json").json
    assert two == rows[:2]
    one = shell("versions", "--store", shell.store, "--run", "r", "--limit", 1, "--json").json
    assert one == rows[:1]
    page = shell("versions", "--store", shell.store, "--run", "r", "--before", 2, "--json").json
    assert page == rows[2:]
    assert shell("versions", "--store", shell.store, "--run", "r", "--before", 0, "--json").json == []
    text = shell("versions", "--store", shell.store, "--run", "r").out.splitlines()
    assert text[0].split()[:3] == ["version", "kind", "files"]
    assert text[4].split()[:2] == ["r/weight_v000000", "boot"]


def test_as_many_versions_as_asked_for_although_numbers_are_missing(shell: Shell) -> None:
    """Each restart after failures leaves a gap: numbers say little about how many there are."""
    original = publish.new_publisher

    def skipping(*args: Any) -> Any:
        publisher = original(*args)
        claim = publisher.claim

        async def claim_and_skip(*more: Any, **named: Any) -> Any:
            head = await claim(*more, **named)
            for _ in range(10):
                publisher.reserve()
            return head

        publisher.claim = claim_and_skip
        return publisher

    publish.new_publisher = skipping  # type: ignore[assignment]
    try:
        for number in range(4):
            shell.publish(shell.learn(f"v{number}"))
    finally:
        publish.new_publisher = original
    rows = shell("versions", "--store", shell.store, "--run", "r", "--limit", 4, "--json").json
    assert [row["number"] for row in rows] == [44, 33, 22, 11]


def test_versions_of_what_is_not_there(shell: Shell) -> None:
    (shell.root / "store").mkdir()
    said = shell("versions", "--store", shell.store, "--run", "r")
    assert said.complaint == "stitch versions: run r has no head yet: no trainer has claimed it"
    assert (
        "run id '../x' is not valid" in shell("versions", "--store", shell.store, "--run", "../x").complaint
    )
    shell.claim()
    put(shell, "runs/r/head", b"{}")
    assert (
        "expected format 'stitch.head/1'" in shell("versions", "--store", shell.store, "--run", "r").complaint
    )


@pytest.mark.parametrize("limit", ["0", "-1", "x"])
def test_a_limit_that_is_none(shell: Shell, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        shell("versions", "--store", shell.store, "--run", "r", "--limit", limit)
    assert exit.value.code == 2
    assert (
        f"argument --limit: expected a whole number from 1 to {2**63 - 1}, got '{limit}'"
        in capsys.readouterr().err
    )


class Flat(MemoryStore):
    """Cannot list folders, as an object store without a delimiter; counts what is listed."""

    folders = None  # type: ignore[assignment]
    listed: ClassVar[list[str]] = []

    async def list(self, prefix: str) -> list[Entry]:
        self.listed.append(prefix)
        return await super().list(prefix)


def test_status_does_not_list_every_key_of_every_run(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a thousand versions has ten thousand keys, and each thousand is a request."""
    objects = MemoryObjects()
    monkeypatch.setattr(common, "open_store", lambda url: Flat(objects))
    monkeypatch.setattr(Flat, "listed", [])
    shell.claim("--channel", "latest")
    shell.claim(run="unnamed")
    Flat.listed.clear()
    said = shell("status", "--store", shell.store, "--json")
    assert [run["run"] for run in said.json["runs"]] == ["r"]
    assert "--all lists every key" in said.err
    assert Flat.listed == ["channels/", "replicas/"]
    assert [run["run"] for run in status(shell, "--all")["runs"]] == ["r", "unnamed"]
    assert Flat.listed[-1] == "runs/"
    Flat.listed.clear()
    assert status(shell, "--run", "unnamed")["runs"][0]["head"] == 0
    assert Flat.listed == []
