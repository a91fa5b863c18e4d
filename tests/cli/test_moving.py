"""Commands that move what fleets follow: claim at a version, release, rollback, channels, pins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.testing.checkpoints import write_checkpoint
from tests.cli.commands import Said, Shell, built_once
from tests.small_run import FILES


def build(shell: Shell) -> None:
    shell.claim("--channel", "latest")
    write_checkpoint(shell.root / "v0", FILES, shell.tensors)
    for number in range(1, 5):
        shell.publish(shell.learn(f"v{number}"), "--as-delta")


@pytest.fixture
def run(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A run with versions 1 to 4 as deltas; their weights are checkpoints v0 to v4."""
    return built_once(shell, tmp_path_factory, build)


def stitch(shell: Shell, *words: object) -> Said:
    """A command of two words, or of one, with --store after them."""
    at = 2 if words[0] in ("channel", "pin") else 1
    return shell(*words[:at], "--store", shell.store, *words[at:])


def state(path: Path) -> str:
    return Checkpoint.open(path, FILES).state()


# ---------------------------------------------------------------------------------------------- rollback


def test_rollback(run: Shell) -> None:
    said = stitch(run, "rollback", "--run", "r", "--to", 2, "--json").json
    assert {k: said[k] for k in ("version", "number", "epoch", "kind", "to", "given_up", "proof")} == {
        "version": "r/weight_v000005", "number": 5, "epoch": 6, "kind": "delta", "to": 2, "given_up": [3, 4],
        "proof": "manifests",
    }  # fmt: skip
    assert said["state"] == state(run.root / "v2")
    assert said["fenced"]["epoch"] == 5
    # What it is again does not have to be done twice.
    again = stitch(run, "rollback", "--run", "r", "--to", "r/weight_v000002")
    assert (again.code, again.out) == (
        0, "r/weight_v000005 has the weights of version 2 already: nothing was done\n",
    )  # fmt: skip
    assert run.head() == (5, 6)


def test_what_was_given_up_is_shown(run: Shell) -> None:
    stitch(run, "rollback", "--run", "r", "--to", 2)
    assert stitch(run, "status", "--json").json["runs"][0]["given_up"] == [[3, 4]]
    assert "run r: versions 3 to 4 were given up by a rollback" in stitch(run, "status").out
    rows = stitch(run, "versions", "--run", "r", "--json").json
    assert [row["number"] for row in rows if row["given_up"]] == [4, 3]
    assert stitch(run, "versions", "--run", "r").out.count("delta, given up") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("old/weight_v000007", "latest is the pointer of the public reference, at version 7 of old"),
        ("weight_v000007\n", "at version 7 of a run that it does not name, in updates/weight_v000007"),
        ("../weight_v000007", "latest says '../weight_v000007', which is no version of the public reference"),
        ("\ufffd", "which is no version of the public reference"),
    ],
)
def test_c02_the_pointer_of_the_public_reference_is_read_and_never_moved(
    shell: Shell, text: str, said: str
) -> None:
    pointer = shell.root / "store" / "latest"
    pointer.parent.mkdir()
    pointer.write_text(text)
    complaint = stitch(shell, "versions", "--run", "old").complaint
    assert "run old has no head yet" in complaint
    assert said in complaint
    assert said in stitch(shell, "status").err
    assert shell.claim("--channel", "latest", run="old").code == 0
    assert pointer.read_text() == text


def test_rollback_proven_by_a_checkpoint(run: Shell) -> None:
    work = run.root / "work"
    said = stitch(
        run, "rollback", "--run", "r", "--to", 1, "--from-checkpoint", run.root / "v4", "--work", work
    )
    assert said.code == 0
    assert "has the weights of version 1: a delta of" in said.out
    assert "proven by bytes. Versions 2 to 4 are given up, the writer of epoch 5 is fenced" in said.out
    assert "merging 3 deltas\n" in said.err


def test_rollback_across_a_full(run: Shell) -> None:
    run.publish(run.learn("v5"))
    said = stitch(run, "rollback", "--run", "r", "--to", 3)
    assert "no delta (version 5, on the way back, is a full)" in said.complaint
    assert run.head() == (5, 6)
    said = stitch(run, "rollback", "--run", "r", "--to", 3, "--from-checkpoint", run.base, "--json")
    assert (said.json["kind"], said.json["state"]) == ("full", state(run.root / "v3"))


def test_what_is_no_rollback(run: Shell) -> None:
    write_checkpoint(
        run.root / "other", FILES, {**run.tensors, "a": run.tensors["a"]._replace(data=bytes(48))}
    )
    for words, why in (
        (("--to", 4), "version 4 is the head of run r: nothing to do"),
        (("--to", 9), "run r has no version 9: its head is 4"),
        (("--to", "x"), "--to x: expected a number, such as 120"),
        (("--to", "s/weight_v000002"), "is a version of another run: a rollback stays in run r"),
        (("--to", 2, "--from-checkpoint", run.root / "other"), "other is no version of run r: its state"),
        (("--to", 2, "--from-checkpoint", run.root / "none"), "none"),
    ):
        said = stitch(run, "rollback", "--run", "r", *words)
        assert (said.code, why in said.complaint) == (2, True), said.err
    assert "run s has no head yet" in stitch(run, "rollback", "--run", "s", "--to", 1).complaint
    assert run.head() == (4, 5)


# ------------------------------------------------------------------------------------- claim and release


def test_c35_a_claim_inside_what_was_given_up(run: Shell) -> None:
    stitch(run, "rollback", "--run", "r", "--to", 2)
    said = run.claim("--resume-version", 4)
    assert said.code == 2
    assert "a rollback to 2 gave up the versions 3 to 4" in said.complaint
    assert run.head() == (5, 6)
    for version in (2, 5):
        assert run.claim("--resume-version", version).code == 0
    assert run.claim("--resume-version", 4, "--override").code == 0
    assert run.claim("--resume-version", 4).code == 0
    assert run.head() == (5, 10)
    assert "--override is for a --resume-version" in run.claim("--override").complaint
    assert "was saved at version 8: is this the same store" in run.claim("--resume-version", 8).complaint


def test_release(run: Shell) -> None:
    said = stitch(run, "release", "--run", "r", "--json").json
    assert (said["run"], said["epoch"], said["head"], said["fenced"]["epoch"]) == ("r", 6, 4, 5)
    assert said["fenced"]["producer"] == {"name": "stitch publish"}
    assert run.head() == (4, 6)
    text = stitch(run, "release", "--run", "r").out
    assert text.startswith(
        "run r is released (epoch 7); its head stays at version 4. Fenced: the writer of epoch 6"
    )
    assert "run s has no head yet" in stitch(run, "release", "--run", "s").complaint


# ---------------------------------------------------------------------------------------------- channels


def test_channels(run: Shell) -> None:
    assert stitch(run, "channel", "set", "eval", "r", "--exact", 2, "--json").json == {
        "channel": "eval", "run": "r", "exact": 2, "now": "r/weight_v000002", "before": None,
    }  # fmt: skip
    said = stitch(run, "channel", "set", "eval", "r", "--exact", 3)
    assert said.out == "channel eval means r/weight_v000003; before: r/weight_v000002\n"
    rows = stitch(run, "channel", "list", "--json").json
    assert [(row["channel"], row["exact"], row["now"]) for row in rows] == [
        ("eval", 3, "r/weight_v000003"), ("latest", None, "r/weight_v000004"),
    ]  # fmt: skip
    assert "newest   r/weight_v000004" in stitch(run, "channel", "list").out
    assert stitch(run, "channel", "show", "latest").out == "channel latest means r/weight_v000004\n"
    assert stitch(run, "channel", "delete", "eval", "--json").json == {"channel": "eval", "deleted": True}
    gone = stitch(run, "channel", "show", "eval", "--json")
    assert (gone.code, gone.json["error"]) == (1, "there is no channel eval")
    assert stitch(run, "channel", "delete", "eval").complaint == "stitch channel: there is no channel eval"


def test_a_channel_never_names_what_is_not_there(run: Shell) -> None:
    key = run.root / "store" / "channels" / "latest"
    before = key.read_bytes()
    for words, why in (
        (("latest", "s"), "channel latest was not moved: run s has no head yet"),
        (("latest", "r", "--exact", 9), "run r has no version 9: its head is 4"),
        (("../x", "r"), "the channel '../x' is not valid"),
        (("latest", "-r"), None),
    ):
        if why is None:
            with pytest.raises(SystemExit):
                stitch(run, "channel", "set", *words)
        else:
            assert why in stitch(run, "channel", "set", *words).complaint
        assert key.read_bytes() == before


def test_a_channel_that_cannot_be_read_is_said_and_can_be_set(run: Shell) -> None:
    (run.root / "store" / "channels" / "latest").write_bytes(b"r/weight_v000004")
    said = stitch(run, "channel", "list")
    assert said.code == 1
    assert "not JSON" in said.out
    assert stitch(run, "channel", "set", "latest", "r").code == 0
    assert stitch(run, "channel", "list").code == 0


# -------------------------------------------------------------------------------------------------- pins


def test_pins(run: Shell) -> None:
    said = stitch(run, "pin", "add", "best", "r", 2, "--json").json
    assert (said["pin"], said["run"], said["number"]) == ("best", "r", 2)
    assert stitch(run, "pin", "add", "best", "r", 2, "--json").json == said
    assert (
        "pin best is there already and keeps r/weight_v000002"
        in stitch(run, "pin", "add", "best", "r", 3).complaint
    )
    rows = stitch(run, "pin", "list", "--json").json
    assert rows == [{k: said[k] for k in ("pin", "run", "number", "digest", "time")}]
    assert "best  r/weight_v000002" in stitch(run, "pin", "list").out
    assert stitch(run, "pin", "remove", "best").out == "pin best is removed\n"
    assert stitch(run, "pin", "remove", "best").complaint == "stitch pin: there is no pin best"
    assert stitch(run, "pin", "list", "--json").json == []


def test_what_cannot_be_pinned_leaves_no_pin(run: Shell) -> None:
    assert "run r has no version 7: its head is 4" in stitch(run, "pin", "add", "p", "r", 7).complaint
    assert "no head yet" in stitch(run, "pin", "add", "p", "s", 0).complaint
    shutil.rmtree(run.root / "store" / "runs" / "r" / "e0002")
    said = stitch(run, "pin", "add", "p", "r", 3)
    assert "r/weight_v000003 cannot be kept, it is not whole any more: runs/r/e0002" in said.complaint
    assert stitch(run, "pin", "list", "--json").json == []
    assert stitch(run, "pin", "add", "p", "r", 0).code == 0


def test_a_pin_that_cannot_be_read_is_an_error(run: Shell) -> None:
    stitch(run, "pin", "add", "p", "r", 2)
    path = run.root / "store" / "pins" / "p"
    good = path.read_bytes()
    for bad in (b"", good[:-5], json.dumps({**json.loads(good), "more": 1}).encode()):
        path.write_bytes(bad)
        said = stitch(run, "pin", "list")
        assert (said.code, "pins/p" in said.complaint) == (2, True)


@pytest.mark.parametrize(
    "words",
    [("rollback",), ("release",), ("channel",), ("channel", "set"), ("channel", "show"), ("channel", "list"),
     ("channel", "delete"), ("pin",), ("pin", "add"), ("pin", "list"), ("pin", "remove"), ("claim",)],
)  # fmt: skip
def test_help(shell: Shell, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        shell(*words, "--help")
    assert end.value.code == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 110
