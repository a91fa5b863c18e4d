"""``stitch claim`` and ``stitch publish``: what is wrong is one line, and fences nobody."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.dialects import INDEX_NAME
from stitch_core.safetensors import Tensor, write_file
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import random_tensors, table_of, write_checkpoint
from tests.cli.commands import Shell
from tests.small_run import FILES, LAYOUT
from tests.woken import Woken


def test_claim(shell: Shell) -> None:
    first = shell.claim("--json").json
    assert first == {
        "run": "r", "epoch": 1, "head": 0, "state": Checkpoint.open(shell.base, FILES).state(),
        "channel": None,
    }  # fmt: skip
    again = shell.claim("--channel", "latest")
    assert again.out == ("run r is claimed (epoch 2); its head is version 0; channel latest follows it\n")
    assert shell("status", "--store", shell.store, "--json").json["channels"] == [
        {"channel": "latest", "run": "r", "exact": None}
    ]
    shell.claim("--channel", "latest", run="s")
    assert shell("status", "--store", shell.store, "--json").json["channels"][0]["run"] == "s"


def test_claims_that_are_refused(shell: Shell) -> None:
    other = shell.root / "other"
    write_checkpoint(other, FILES, random_tensors(np.random.default_rng(5), LAYOUT))
    shell.claim()
    said = shell.claim(base=other)
    assert said.code == 2
    assert (
        f"stitch claim: the base checkpoint {other} is not version 0 of run r: its state is" in said.complaint
    )
    nothing = shell.root / "nothing"
    assert shell.claim(base=nothing).complaint == f"stitch claim: {nothing}: no such directory"
    assert "run id 'no/run' is not valid" in shell.claim(run="no/run").complaint
    assert "--channel 'no channel' is not valid" in shell.claim("--channel", "no channel").complaint
    assert shell.head() == (0, 1), "the run was claimed once only"
    bad_store = shell("claim", "--store", "/data", "--run", "r", "--base", shell.base)
    assert "'/data' is not a store URL: a directory is written file:/path" in bad_store.complaint


def test_a_store_that_is_not_mounted_is_not_begun_anew(shell: Shell) -> None:
    """It was made where the mount was missing, with another run of the name, and no replica heard of it."""
    shell.publish(shell.learn("one"))
    (shell.root / "store").rename(shell.root / "away")
    said = shell("publish", shell.learn("two"), "--store", shell.store, "--run", "r", "--base", shell.base)
    assert said.code == 2
    assert "is it mounted? The first claim makes a new store" in said.complaint
    assert not (shell.root / "store").exists()


def test_a_full_and_deltas(shell: Shell) -> None:
    said = shell.publish(shell.learn("one"), "--step", 10, "--json").json
    assert (said["version"], said["kind"], said["epoch"], said["tensors"]) == (
        "r/weight_v000001",
        "full",
        1,
        None,
    )
    said = shell.publish(shell.learn("two"), "--as-delta", "--json").json
    assert (said["number"], said["kind"], said["epoch"]) == (2, "delta", 2)
    assert said["state"] == state_digest(table_of(shell.tensors))
    said = shell.publish(shell.delta("three"), "--json").json
    assert (said["number"], said["kind"]) == (3, "delta")
    assert said["state"] == state_digest(table_of(shell.tensors))
    said_text = shell.publish(shell.delta("four"))
    assert said_text.out.startswith("r/weight_v000004 is published: a delta of ")
    assert said_text.err == "rebuilding version 3 to prove the base\npublishing 2 files\n"


def test_sparse_deltas_of_checkpoints_and_of_what_a_stock_trainer_wrote(shell: Shell) -> None:
    sizes = []
    for number, (make, *more) in enumerate(
        [
            (shell.learn, "--as-delta", "--encoding", "sparse"),
            (shell.delta, "--encoding", "sparse"),
            (shell.delta,),
            (shell.learn, "--as-delta"),
        ],
        start=1,
    ):
        said = shell.publish(make(f"v{number}"), *more, "--json").json
        assert (said["number"], said["state"]) == (number, state_digest(table_of(shell.tensors)))
        sizes.append(said["tensors"])
    assert all(sizes)
    listed = shell("versions", "--store", shell.store, "--run", "r", "--json").json
    assert {row["number"]: row["encoding"] for row in listed} == {
        0: None, 1: "sparse", 2: "sparse", 3: "xor", 4: "xor",
    }  # fmt: skip
    full = shell.publish(shell.learn("five"), "--encoding", "sparse").complaint
    assert "--encoding is for deltas: add --as-delta" in full


def test_waiting_for_replicas(shell: Shell) -> None:
    said = shell.publish(shell.learn("one"), "--wait-replicas", "1", "--wait-timeout", "0")
    assert said.code == 1
    assert "r/weight_v000001 is published" in said.out
    assert "after 0 s 0 of 0 live replicas serve it, 1 were asked for" in said.err
    there = {"run": "r", "applied": 9, "target": None, "expires": time.time() + 60}
    (shell.root / "store/replicas").mkdir()
    (shell.root / "store/replicas/a.json").write_text(json.dumps(there))
    assert shell.publish(shell.learn("two"), "--wait-replicas", "1.0").code == 0
    with pytest.raises(SystemExit):
        shell.publish(shell.learn("three"), "--wait-replicas", "1.5")
    assert shell.head() == (2, 2)


def test_waking(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STITCH_WAKE_TOKEN", "token-0123456789abcdef")
    with Woken().running() as server:
        said = shell.publish(shell.learn("one"), "--wake", "http://127.0.0.1:1", "--wake", server.url)
        assert (said.code, server.calls) == (0, [("/wake", "Bearer token-0123456789abcdef")])
    refused = shell.publish(shell.learn("two"), "--wake", "gateway:30000")
    assert (refused.code, shell.head()[0]) == (2, 1)
    assert "'gateway:30000' cannot be woken: expected the URL of a gateway" in refused.complaint


def test_the_same_work_directory_twice(shell: Shell) -> None:
    work = shell.root / "work"
    for number in (1, 2):
        directory = shell.learn(f"v{number}")
        assert shell.publish(directory, "--as-delta", "--work", work, "--json").json["number"] == number
    assert work.is_dir()


def payload_of(shell: Shell, number: int) -> set[str]:
    return {path.name for path in (shell.root / f"store/runs/r/e0001/weight_v{number:06d}").iterdir()}


def test_c74_a_full_has_no_shard_that_its_index_does_not_name(shell: Shell) -> None:
    """Ranks that died left it, or it is the model in another format; a replica's engine might read it."""
    directory = shell.learn("full")
    names = {path.name for path in directory.iterdir()}
    left = directory / "model-00003-of-00003.safetensors"
    shutil.copy(next(directory.glob("*.safetensors")), left)
    (directory / "pytorch_model.bin").write_bytes(b"the same model, in another format")
    said = shell.publish(directory)
    assert said.code == 0
    assert left.name in said.err
    assert payload_of(shell, 1) == names


def test_c74_a_full_without_an_index_is_one_attempts_or_refused(shell: Shell) -> None:
    shell.claim()
    directory = shell.root / "full"
    write_checkpoint(directory, FILES, shell.tensors, 2, index=False)
    left = directory / "model-00003-of-00003.safetensors"
    shutil.copy(next(directory.glob("*.safetensors")), left)
    assert left.name in shell.publish(directory).complaint
    assert shell.head() == (0, 1), "nobody was fenced"
    left.unlink()
    assert shell.publish(directory, "--json").json["number"] == 1


def test_c74_a_delta_with_weights_that_no_index_names_is_refused(shell: Shell) -> None:
    shell.claim()
    directory = shell.delta("delta")
    names = {path.name for path in directory.iterdir()}
    left = directory / "model-00003-of-00003.safetensors"
    write_file(left, FILES, {"other": Tensor("U8", (1,), b"x")}, {"other": "0" * 32})
    assert left.name in shell.publish(directory).complaint
    assert shell.head() == (0, 1), "nobody was fenced"
    left.rename(directory / "notes.txt")
    assert shell.publish(directory, "--json").json["number"] == 1
    assert {path.name for path in (shell.root / "store/runs/r/e0002/weight_v000001").iterdir()} == names


def test_c01_a_payload_that_the_index_does_not_name(shell: Shell) -> None:
    """It is not "nothing changed"."""
    shell.claim()
    directory = shell.delta("sly")
    index = json.loads((directory / INDEX_NAME).read_text())
    index["weight_map"] = {}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    assert "model-00000-of-00001.safetensors" in shell.publish(directory).complaint
    assert shell.head() == (0, 1), "nobody was fenced"


def test_c33_a_delta_of_another_base(shell: Shell) -> None:
    delta = shell.delta("first")
    shell.publish(delta)
    said = shell.publish(delta)
    assert said.code == 2
    assert "on this base, its checksum promises" in said.complaint
    assert shell.head() == (1, 1)
    assert shell.publish(shell.delta("second"), "--json").json["number"] == 2


def test_what_is_wrong_with_the_directory_fences_nobody(shell: Shell) -> None:
    shell.claim()
    missing = shell.root / "missing"
    assert shell.publish(missing).complaint == f"stitch publish: {missing} is not a directory"
    delta = shell.delta("delta")
    assert "is a delta already: --as-delta is for full" in shell.publish(delta, "--as-delta").complaint
    next(delta.glob("*.safetensors")).unlink()
    assert "named by the index, but not there" in shell.publish(delta).complaint
    empty = shell.root / "empty"
    empty.mkdir()
    assert shell.publish(empty).complaint == f"stitch publish: {empty}: no *.safetensors file"
    odd = shell.learn("odd")
    for name in ("two words.txt", "config.json~"):  # what an editor leaves
        (odd / name).write_text("x")
        assert name in shell.publish(odd).complaint
        (odd / name).unlink()
    for how in ((), ("--as-delta",)):
        other = shell.root / f"other{len(how)}"
        write_checkpoint(other, FILES, {k: t for k, t in shell.tensors.items() if k != "b"})
        said = shell.publish(other, *how).complaint
        assert said == f"stitch publish: {other} does not have the layout of version 0: tensor b is missing"
    assert shell.head() == (0, 1)


@pytest.mark.parametrize("step", ["-1", "1.5", str(2**63)])
def test_a_step_that_is_none_fences_nobody(
    shell: Shell, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.claim()
    with pytest.raises(SystemExit):
        shell.publish(shell.learn("one"), f"--step={step}")
    assert (
        f"argument --step: expected a whole number from 0 to {2**63 - 1}, got '{step}'"
        in capsys.readouterr().err
    )
    assert shell.head() == (0, 1)


def test_c14_a_shard_cut_by_one_byte(shell: Shell) -> None:
    directory = shell.learn("cut")
    shard = next(directory.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "but the header describes" in shell.publish(directory).complaint


def test_c09_a_base_with_one_flipped_byte(shell: Shell) -> None:
    shell.claim()
    bad = shell.root / "bad"
    shutil.copytree(shell.base, bad)
    shard = next(bad.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    assert "is not version 0 of run r" in shell.claim(base=bad).complaint


def test_subdirectories_and_hidden_files_stay_behind(shell: Shell) -> None:
    directory = shell.learn("hf")
    (directory / "original").mkdir()
    (directory / "original" / "params.json").write_text("{}")
    (directory / ".gitattributes").write_text("x")
    shell.publish(directory)
    payload = shell.root / "store" / "runs" / "r" / "e0001" / "weight_v000001"
    assert sorted(path.name for path in payload.iterdir()) == [
        "config.json", "model-00001-of-00001.safetensors", INDEX_NAME,
    ]  # fmt: skip


def test_the_head_cannot_be_rebuilt(shell: Shell) -> None:
    """The payload of the head is gone: a full can still be published."""
    shell.publish(shell.learn("one"), "--as-delta")
    shutil.rmtree(shell.root / "store" / "runs" / "r" / "e0001" / "weight_v000001")
    two, epoch = shell.learn("two"), shell.head()[1]
    assert "no such object" in shell.publish(two, "--as-delta").complaint
    assert shell.head()[1] == epoch
    assert shell.publish(two, "--json").json["number"] == 2
