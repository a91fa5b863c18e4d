"""What was found by using the commands as nobody is meant to."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest

from stitch_core.cli.common import SCRATCH
from stitch_core.files import PosixFiles
from tests.cli.commands import Shell, built_once


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power, and syncing takes most of their time."""
    monkeypatch.setattr(PosixFiles, "sync", lambda self, path: None)


def build(shell: Shell) -> None:
    shell.claim("--channel", "latest")
    for number in range(1, 4):
        assert shell.publish(shell.learn(f"v{number}"), "--as-delta").code == 0


@pytest.fixture
def run(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Versions 1 to 3, all deltas."""
    return built_once(shell, tmp_path_factory, build)


def test_inspect_of_a_version_that_a_rollback_made_was_a_traceback(run: Shell) -> None:
    assert run("rollback", "--store", run.store, "--run", "r", "--to", 1).code == 0
    said = run("inspect", "r", "--store", run.store)
    assert said.code == 0
    assert "rollback:\n    given_up:\n      2\n      3\n    to: 1" in said.out


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("diff", "base"), ("diff", "base", "")])
def test_an_empty_name_was_a_traceback_or_the_current_directory(run: Shell, command: tuple[str, ...]) -> None:
    """``stitch diff /models/a "$B"`` compared with whatever checkpoint the shell stood in."""
    words = [run.base if word == "base" else word for word in command]
    said = run(*words, "") if len(words) < 3 else run(words[0], "", words[1])
    assert said.code == 2
    assert said.complaint.endswith(" is empty")


def test_work_took_away_directories_of_the_user_that_had_the_names_of_its_own(run: Shell) -> None:
    """``--work /data`` removed ``/data/delta``, ``/data/merged``, ``/data/host``, ``/data/adopted``."""
    work = run.root / "data"
    mine = [work / name / "mine" for name in ("delta", "merged", "host", "adopted", "a", "b", "fetch")]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    options = ("--store", run.store, "--run", "r", "--work", work)
    assert run.publish(run.learn("v4"), "--as-delta", "--work", work).code == 0
    assert run.publish(run.delta("d5"), "--encoding", "sparse", "--work", work).code == 0
    assert run("rollback", *options, "--to", 3).code == 0
    assert run("diff", "r/1", "r/2", "--store", run.store, "--work", work).code == 1
    assert all(path.read_text() == "mine" for path in mine)
    assert len(list(work.iterdir())) == len(mine) + 1, "and everything of its own is in one place"


def test_two_commands_wrote_into_one_work_directory_at_once(run: Shell) -> None:
    work = run.root / "work"
    directory = run.learn("v4")
    assert run.publish(directory, "--as-delta", "--work", work).code == 0
    with PosixFiles().lock(work / SCRATCH / "in-use", 0.0):
        said = run.publish(directory, "--as-delta", "--work", work)
        assert f"--work {work} is in use by another process: name another one" in said.complaint
    assert run.publish(directory, "--as-delta", "--work", work).code == 0


def test_diff_could_use_a_work_directory_once(run: Shell) -> None:
    """The second one met the versions of the first, and was told that they were others."""
    diff = ("diff", "--store", run.store, "--work", run.root / "work", "--json")
    assert run(*diff, "r/1", "r/2").json["same"] is False
    assert run(*diff, "r/2", "r/2").json["same"] is True


@pytest.mark.parametrize("work", ["base/config.json", "/proc/nothing"])
def test_a_work_directory_that_is_none_was_an_error_number(run: Shell, work: str) -> None:
    path = run.root / work
    said = run("rollback", "--store", run.store, "--run", "r", "--to", 1, "--work", path)
    assert said.complaint.startswith(f"stitch rollback: --work {path} cannot be used: ")
    assert "Errno" not in said.complaint


@pytest.mark.parametrize("place", ["", "runs/r2", "runs/r/fulls/x", "v1"])
def test_a_checkout_into_the_store_made_objects_of_its_files(run: Shell, place: str) -> None:
    (run.root / "link").symlink_to(run.root / "store")
    before = sorted((run.root / "store").rglob("*"))
    for root in ("store", "link"):
        said = run("checkout", "r/2", run.root / root / place, "--store", run.store, "--base", run.base)
        assert "is inside the store" in said.complaint
    assert sorted((run.root / "store").rglob("*")) == before


def test_the_doctor_was_content_with_a_file_in_the_place_of_the_store(shell: Shell) -> None:
    path = Path(shell.store.removeprefix("file:"))
    path.write_bytes(b"")
    said = shell("doctor", "--store", shell.store, "--json")
    assert said.code == 1
    assert said.json["checks"][0] == {
        "check": "list", "result": "fail", "detail": f"NoStore: {path} is a file: a store is a directory",
        "do": said.json["checks"][0]["do"],
    }  # fmt: skip


def test_a_name_that_is_no_utf8_made_a_finished_command_a_failure(run: Shell) -> None:
    """The checkout was there, and 'codec can't encode' was all that was said."""
    directory = run.root / os.fsdecode(b"odd\xff")
    said = run("checkout", "r/2", directory, "--store", run.store)
    assert said.code == 0, said.err
    assert "odd\\udcff is r/weight_v000002, verified" in said.out
    assert directory.is_dir()


@pytest.mark.parametrize("spelling", ["as it is", "quoted"])
def test_a_store_of_such_a_name_was_another_when_its_url_was_quoted(shell: Shell, spelling: str) -> None:
    """%FF was read as U+FFFD: another directory, and a run of the same name in it."""
    path = shell.root / os.fsdecode(b"store\xff")
    quoted = f"file:{quote(os.fsencode(path))}"
    shell.store = f"file:{path}"
    assert shell.claim().code == 0
    shell.store = shell.store if spelling == "as it is" else quoted
    assert shell.head() == (0, 1)
    said = shell("doctor", "--store", shell.store, "--json")
    assert said.code == 0, said.out
    assert [p.name for p in shell.root.iterdir() if p.name.startswith("store")] == [path.name]


def test_a_link_to_itself_was_a_traceback(run: Shell) -> None:
    loop = run.root / "loop"
    loop.symlink_to(loop)
    said = run("checkout", "r/1", loop, "--store", run.store)
    assert said.code == 2
    assert "loop" in said.complaint
    assert run("doctor", "--store", run.store, "--base", run.base, "--scratch", loop).code in (0, 1)
