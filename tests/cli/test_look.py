"""``stitch inspect``, ``verify``, ``diff`` and ``checkout``: what is there, is it whole, and as files."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stitch_core.cli import verify as verify_module
from stitch_core.cli.main import main
from stitch_core.files import PosixFiles
from stitch_core.ports import NotFound
from stitch_core.records import Record
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import write_checkpoint
from tests.cli.commands import Shell, built_once
from tests.small_run import FILES


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power, and syncing takes most of their time."""
    monkeypatch.setattr(PosixFiles, "sync", lambda self, path: None)


def build(shell: Shell) -> None:
    shell.claim("--channel", "latest")
    for number in range(1, 4):
        said = shell.publish(
            shell.learn(f"v{number}"), *(["--as-delta"] if number > 1 else []), "--step", number
        )
        assert said.code == 0, said.err


@pytest.fixture
def run(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A run of a full, a delta and a delta: versions 1 to 3, followed by channel ``latest``."""
    return built_once(shell, tmp_path_factory, build)


def payloads(shell: Shell, number: int) -> list[Path]:
    return sorted((shell.root / "store" / "runs" / "r").glob(f"e*/weight_v{number:06d}/*.safetensors"))


# ---------------------------------------------------------------------------------------------- inspect


@pytest.mark.parametrize("what", ["r", "r/3", "r/weight_v000003", "channel:latest"])
def test_inspect_a_version(run: Shell, what: str) -> None:
    found = run("inspect", what, "--store", run.store, "--json").json
    assert (found["is"], found["version"], found["kind"], found["step"]) == (
        "version",
        "r/weight_v000003",
        "delta",
        3,
    )
    chain = found["chain"]
    assert (chain["head"], chain["parent"], chain["floor"]) == (3, 2, 1)
    assert Path(chain["boot"]).name == "base"
    assert found["representation"]["encoding"] == "xor"
    text = run("inspect", what, "--store", run.store).out
    assert "version: r/weight_v000003" in text
    assert "  floor: 1" in text


def test_inspect_shows_records_beside_the_chain(run: Shell) -> None:
    """A full and a span that nobody has finished writing are shown as such."""
    prefix = run.root / "store" / "runs" / "r"
    for name in (
        "fulls/000002." + "a" * 64 + ".json",
        "spans/000001-000003." + "b" * 64 + "/model.safetensors",
    ):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_bytes(b"12345")
    also = run("inspect", "r/2", "--store", run.store, "--json").json["also"]
    assert [(row["kind"], row["bytes"], row["complete"]) for row in also] == [
        ("full", 0, True), ("span 1-3", 5, False),
    ]  # fmt: skip
    assert "full" in run("inspect", "r/2", "--store", run.store).out


def test_inspect_keys(run: Shell) -> None:
    def inspect(key: str) -> dict[str, object]:
        found: dict[str, object] = run("inspect", key, "--store", run.store, "--json").json
        return found

    head = inspect("runs/r/head")
    assert (head["is"], head["number"]) == ("head", 3)
    assert inspect("channels/latest")["follows"] == "newest"
    run("pin", "add", "best", "r", 2, "--store", run.store)
    assert inspect("pins/best")["version"] == "r/weight_v000002"
    manifest = inspect(f"runs/r/{head['manifest']}")
    assert (manifest["is"], manifest["history"]) == ("manifest", 3)
    payload = payloads(run, 3)[0].relative_to(run.root / "store").as_posix()
    assert inspect(payload) == {"is": "file", "key": payload, "bytes": payloads(run, 3)[0].stat().st_size}
    for what, complaint in (
        ("runs/r/nothing", "there is no runs/r/nothing in the store"), ("runs/../x", "is not a key"),
        ("r/9", "run r has no version 9"), ("x", "run x has no head yet"),
        ("channel:x", "there is no channel x"),
        ("channel:/", "the channel '/' is not valid"), ("r/x", "is not a version"),
    ):  # fmt: skip
        assert complaint in run("inspect", what, "--store", run.store).complaint


def test_a_key_that_is_spelt_like_a_run_could_not_be_inspected(run: Shell) -> None:
    """``consumers`` was taken for a run, and nothing said how to name the key."""
    assert run("consumer", "set", "eval", "--exact", 2, "--store", run.store, "--run", "r").code == 0
    said = run("inspect", "consumers", "--store", run.store)
    assert "run consumers has no head yet" in said.complaint
    assert said.complaint.endswith("; for the key of that name write key:consumers")
    found = run("inspect", "key:consumers", "--store", run.store, "--json").json
    assert (found["key"], found["is"], list(found["consumers"])) == ("consumers", "consumers", ["eval"])
    assert run("inspect", "key:runs/r/head", "--store", run.store, "--json").json["is"] == "head"
    for what in ("key:", "key:a//b"):
        assert "is not a key" in run("inspect", what, "--store", run.store).complaint
    assert "there is no nothing in the store" in run("inspect", "key:nothing", "--store", run.store).complaint


def test_a_run_that_is_called_as_a_folder_of_the_store(run: Shell) -> None:
    assert run.claim(run="pins").code == 0
    for what in ("pins", "run:pins", "run:pins/0", "run:r"):
        found = run("inspect", what, "--store", run.store, "--json").json
        name = what.removeprefix("run:").partition("/")[0]
        assert (found["is"], found["version"].partition("/")[0]) == ("version", name)
    assert "there is no pins/0 in the store" in run("inspect", "pins/0", "--store", run.store).complaint


def test_inspect_a_head_after_a_rollback(run: Shell) -> None:
    assert run("rollback", "--store", run.store, "--run", "r", "--to", 2).code == 0
    assert run("inspect", "runs/r/head", "--store", run.store, "--json").json["abandoned"] == ["3 to 3"]
    assert run("diff", "r/2", "r", "--store", run.store).code == 0
    assert run("verify", "r", "--store", run.store).code == 0


def test_inspect_paths(run: Shell) -> None:
    def inspect(path: Path) -> dict[str, object]:
        found: dict[str, object] = run("inspect", path, "--json").json
        return found

    checkpoint = inspect(run.base)
    assert (checkpoint["is"], checkpoint["tensors"], checkpoint["files"]) == ("checkpoint", 3, 2)
    shard = inspect(run.base / "model-00001-of-00002.safetensors")
    assert (shard["is"], shard["metadata"]) == ("safetensors file", {"format": "pt"})
    delta = inspect(payloads(run, 3)[0].parent)
    assert (delta["is"], delta["encoding"], delta["checksum"]) == ("delta", "xor", "xxh3-128")
    index = inspect(payloads(run, 3)[0].parent / "model.safetensors.index.json")
    assert (index["is"], index["version"]) == ("index of a delta", "000003")
    assert inspect(next((run.root / "store" / "runs" / "r" / "manifests").iterdir()))["is"] == "manifest"
    assert inspect(run.base / "config.json")["is"] == "JSON"
    sparse = run.root / "sparse"
    run.publish(run.learn("v4"), "--as-delta", "--encoding", "sparse")
    shutil.copytree(next((run.root / "store" / "runs" / "r").glob("e*/weight_v000004")), sparse)
    assert inspect(sparse)["encoding"] == "sparse"
    assert inspect(sparse)["changes"]
    assert run("verify", sparse).code == 0
    flip(next(sparse.glob("*.sparse")), -100)
    assert run("verify", sparse).code == 1
    assert run("inspect", run.base).code == 0
    assert "to look at a version, give --store" in run("inspect", "r/3").complaint
    (run.root / "junk.safetensors").write_bytes(b"junk")
    assert "cut short" in run("inspect", run.root / "junk.safetensors").complaint
    (run.root / "new.json").write_text('{"format": "stitch.future/9"}')
    assert "a newer Stitch wrote it" in run("inspect", run.root / "new.json").complaint


def test_inspect_the_directory_of_a_store(run: Shell) -> None:
    """It was a checkpoint without a safetensors file."""
    found = run("inspect", run.root / "store", "--json").json
    assert (found["is"], found["runs"]) == ("store", ["r"])
    assert found["look_with"] == f"stitch status --store {run.store}"


def test_inspect_a_root_of_the_public_reference(shell: Shell) -> None:
    root = shell.root / "bulletin"
    (root / "updates" / "weight_v000001").mkdir(parents=True)
    (root / "latest").write_text("my-run/weight_v000001")
    found = shell("inspect", root, "--json").json
    assert (found["is"], found["pointer"], found["versions"]) == (
        "root of the public reference", "my-run/weight_v000001", 1,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- verify


def test_verify_a_run(run: Shell) -> None:
    found = run("verify", "r", "--store", run.store, "--json").json
    assert (found["checked"], found["problems"], found["collected"]) == (7, [], 0)
    assert "all as it should be" in run("verify", "r/3", "--store", run.store).out
    assert run("verify", "channel:latest", "--store", run.store, "--json").json["checked"] == 2


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip, "is not what was announced: expected sha256:"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, got"),
        (lambda path: path.unlink(), "missing: "),
    ],
)
def test_verify_finds_and_names_it(run: Shell, damage: Callable[[Path], None], problem: str) -> None:
    (path,) = payloads(run, 3)
    damage(path)
    said = run("verify", "r", "--store", run.store, "--json")
    assert said.code == 1
    (found,) = said.json["problems"]
    assert found["where"] == path.relative_to(run.root / "store").as_posix()
    assert problem in found["problem"]
    assert run("verify", "r/3", "--store", run.store).code == 1
    assert run("verify", "r/2", "--store", run.store).code == 0
    assert "1 problems" in run("verify", "r", "--store", run.store).out


def test_verify_a_broken_manifest(run: Shell) -> None:
    path = next((run.root / "store" / "runs" / "r" / "manifests").glob("000001.*"))
    flip(path)
    said = run("verify", "r", "--store", run.store, "--json")
    assert said.code == 1
    assert [problem["where"] for problem in said.json["problems"]] == [f"runs/r/manifests/{path.name}"]
    assert said.json["checked"] == 4, "what is above it was read nevertheless"


def test_verify_what_was_collected_below_the_floor(run: Shell) -> None:
    run.publish(run.learn("v4"))  # a full: the floor
    for number in (2, 3):
        for path in payloads(run, number):
            shutil.rmtree(path.parent)
    found = run("verify", "r", "--store", run.store, "--json").json
    assert (found["collected"], found["problems"]) == (4, [])
    assert "4 below the floor were collected" in run("verify", "r", "--store", run.store).out


def test_verify_beside_a_collector_and_a_publisher_finds_nothing(
    run: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full that was collected meanwhile was missing, one of a version published meanwhile was not its."""
    assert run("anchor", "--store", run.store, "--run", "r", "--base", run.base).code == 0
    read = verify_module.read_record

    async def published_since(*args: Any) -> Record:
        return replace(await read(*args), number=9)

    async def collected_then(*args: Any) -> Record:
        record = await read(*args)
        path = run.root / "store" / record.key
        path.unlink()
        shutil.rmtree(path.with_suffix(""))
        return record

    async def collected_before(*args: Any) -> Record:
        raise NotFound("no such object")

    assert run("verify", "r", "--store", run.store, "--json").json["checked"] > 7
    for read_record, collected in ((published_since, 0), (collected_before, 0), (collected_then, 3)):
        monkeypatch.setattr(verify_module, "read_record", read_record)
        found = run("verify", "r", "--store", run.store, "--json").json
        assert (found["checked"], found["problems"], found["collected"]) == (7, [], collected)


def test_verify_called_what_was_collected_meanwhile_missing(
    run: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The floor was read once: what was below one that was raised since was said to be lost."""
    items = verify_module._run_items

    async def then_collected(*args: Any) -> Any:
        found = await items(*args)
        await asyncio.to_thread(raise_floor_and_collect)
        return found

    def raise_floor_and_collect() -> None:
        for command in (
            ("publish", run.learn("v4"), "--base", run.base),
            ("publish", run.learn("v5"), "--base", run.base),
            ("gc", "--grace", "0s"),
        ):  # fmt: skip
            assert main([*map(str, command), "--store", run.store, "--run", "r"]) == 0

    monkeypatch.setattr(verify_module, "_run_items", then_collected)
    found = run("verify", "r", "--store", run.store, "--json")
    assert found.code == 0
    result = json.loads(found.out.splitlines()[-1])
    assert (result["problems"], result["checked"] + result["collected"]) == ([], 7)
    assert result["collected"] > 0
    monkeypatch.undo()
    asked = run("verify", "r/1", "--store", run.store, "--json")
    assert asked.code == 1
    assert "below the run's floor, 5, payload may be collected" in asked.json["problems"][0]["problem"]
    (lost,) = payloads(run, 5)
    lost.unlink()
    (problem,) = run("verify", "r", "--store", run.store, "--json").json["problems"]
    assert problem["where"] == str(lost.relative_to(run.root / "store")), "what is not below it is missed"


def test_verify_goes_on_where_it_was_cut(run: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = run.root / "seen"
    monkeypatch.setattr(verify_module, "PROGRESS_SECONDS", 0.0)
    said = run("verify", "r", "--store", run.store, "--resume", memory)
    assert "7 of 7 files" in said.err
    lines = memory.read_text().splitlines(keepends=True)
    memory.write_text("".join(lines[:3]) + lines[3][:20])  # killed in the middle of a line
    found = run("verify", "r", "--store", run.store, "--resume", memory, "--json").json
    assert (found["skipped"], found["checked"]) == (3, 4)
    flip(payloads(run, 3)[0])
    memory.write_text("")
    assert run("verify", "r", "--store", run.store, "--resume", memory).code == 1
    assert run("verify", "r", "--store", run.store, "--resume", memory).code == 1, (
        "what was wrong is read again"
    )


def test_verify_directories(run: Shell) -> None:
    state = run("inspect", "r/3", "--store", run.store, "--json").json["state"]
    assert run("checkout", "r/3", run.root / "out", "--store", run.store).code == 0
    said = run("verify", run.root / "out", "--state", state)
    assert said.code == 0
    assert state in said.out
    assert run("verify", run.base, "--state", state).code == 1
    assert run("verify", payloads(run, 3)[0].parent, "--json").json["problems"] == []
    flip(run.base / "model-00001-of-00002.safetensors")
    (run.base / "model-00002-of-00002.safetensors").unlink()
    said = run("verify", run.base, "--json")
    assert said.code == 1
    assert "named by the index, but not there" in said.json["problems"][0]["problem"]
    assert "to check a version, give --store" in run("verify", "r/3").complaint


def test_verify_a_host_checkpoint(run: Shell) -> None:
    work = run.root / "work"
    assert run.publish(run.learn("v4"), "--as-delta", "--work", work).code == 0
    host = work / "stitch-scratch" / "host"
    found = run("verify", host, "--json").json
    assert (found["version"], found["problems"]) == ("r/weight_v000003", [])
    assert run("inspect", host, "--json").json["holds"] == "r/weight_v000003"
    with PosixFiles().lock(host / "lock", 1.0):
        assert "in use by a replica" in run("verify", host).complaint
    flip(next(host.glob("data-*/model-*.safetensors")))
    said = run("verify", host, "--json")
    assert said.code == 1
    assert "its marker says r/weight_v000003" in said.json["problems"][0]["problem"]
    marker = json.loads((host / "marker.json").read_text())
    marker["target"] = {**marker["held"], "number": 4}
    (host / "marker.json").write_text(json.dumps(marker))
    said = run("verify", host, "--json")
    assert "from r/weight_v000003 to r/weight_v000004 did not end" in said.json["problems"][0]["problem"]
    assert "between" in run("inspect", host, "--json").json["interrupted"]


# ------------------------------------------------------------------------------------------------- diff


def test_diff_of_versions_and_directories(run: Shell) -> None:
    said = run("diff", "r/2", "r/3", "--store", run.store, "--json")
    assert said.code == 1
    by_version = said.json
    by_directory = run("diff", run.root / "v2", run.root / "v3", "--json").json
    for result in (by_version, by_directory):
        del result["a"], result["b"]
    assert by_version == by_directory
    assert by_version["changed"] == len(by_version["differences"]) >= 1
    assert run("diff", "r/3", run.root / "v3", "--store", run.store).code == 0
    same = run("diff", "r/0", run.base, "--store", run.store, "--json")
    assert (same.code, same.json["same"], same.json["changed"]) == (0, True, 0)
    text = run("diff", "r/2", run.root / "v3", "--store", run.store)
    assert "tensors differ" in text.out
    assert "if it is a version, give --store" in run("diff", "r/2", run.base).complaint


def checkpoint(shell: Shell, name: str, tensors: dict[str, Tensor]) -> Path:
    write_checkpoint(shell.root / name, FILES, tensors)
    return shell.root / name


def test_diff_counts_and_values(shell: Shell) -> None:
    def tensors(bf16: bytes, fp8: bytes, fp4: bytes, f32: bytes) -> dict[str, Tensor]:
        return {
            "w": Tensor("BF16", (4,), bf16), "q": Tensor("F8_E4M3", (4,), fp8), "p": Tensor("F4", (4,), fp4),
            "f": Tensor("F32", (1,), f32), "same": Tensor("I32", (1,), bytes(4)),
        }  # fmt: skip

    one, half, two = b"\x80\x3f", b"\x00\x3f", b"\x00\x40"  # 1.0, 0.5, 2.0
    nan = b"\x00\x00\xc0\x7f"
    a = checkpoint(shell, "a", tensors(one * 4, b"\x38\x38\x38\x38", b"\x01\x02", bytes(4)))
    b = checkpoint(shell, "b", tensors(one + half + two + one, b"\x38\x40\x38\x38", b"\x11\x02", nan))
    result = shell("diff", a, b, "--json").json
    found = {d["name"]: d for d in result["differences"]}
    assert (result["changed"], result["tensors"], result["layout"]) == (4, 5, [])
    w = found["w"]
    # 1.0 and 0.5 differ in one byte, 1.0 and 2.0 in both.
    assert (w["bytes"], w["elements"], w["of"], w["max_abs"], w["mean_abs"]) == (3, 2, 4, 1.0, 0.75)
    assert (found["q"]["elements"], found["q"]["max_abs"]) == (1, 1.0)
    assert (found["p"]["bytes"], found["p"]["elements"], found["p"]["max_abs"]) == (1, None, None)
    assert (found["f"]["not_finite"], found["f"]["max_abs"]) == (1, None)
    assert result["by_dtype"]["BF16"]["mean_abs"] == 0.75
    assert shell("diff", a, b, "--top", 1).out.count("and 3 more") == 1


def test_diff_of_layouts(shell: Shell) -> None:
    a = checkpoint(shell, "a", {"x": Tensor("U8", (2,), b"12"), "y": Tensor("U8", (1,), b"1")})
    b = checkpoint(shell, "b", {"x": Tensor("I8", (2,), b"12"), "z": Tensor("U8", (1,), b"1")})
    said = shell("diff", a, b, "--json")
    assert (said.code, said.json["same"], said.json["changed"]) == (1, False, 0)
    assert said.json["layout"] == ["x is U8 [2] in A, I8 [2] in B", "y is only in A", "z is only in B"]
    assert "the layout differs" in shell("diff", a, b).out


# --------------------------------------------------------------------------------------------- checkout


def test_checkout(run: Shell) -> None:
    said = run(
        "checkout", "r/2", run.root / "new" / "out", "--store", run.store, "--base", run.base, "--json"
    )
    assert said.json["version"] == "r/weight_v000002"
    assert run("diff", run.root / "v2", run.root / "new" / "out").code == 0
    assert sorted(path.name for path in (run.root / "new").iterdir()) == ["out"], "nothing is left beside it"
    again = run("checkout", "r/2", run.root / "new" / "out", "--store", run.store)
    assert again.code == 0, "it is that version already"
    assert (
        "is there already, and is not r/weight_v000003"
        in run("checkout", "r", run.root / "new" / "out", "--store", run.store).complaint
    )
    empty = run.root / "empty"
    empty.mkdir()
    assert run("checkout", "channel:latest", empty, "--store", run.store).code == 0


def test_checkout_refuses_what_is_not_its_own(run: Shell) -> None:
    foreign = run.root / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    assert "is no checkpoint" in run("checkout", "r/2", foreign, "--store", run.store).complaint
    assert (foreign / "notes.txt").read_text() == "mine"
    assert "is no directory" in run("checkout", "r/2", foreign / "notes.txt", "--store", run.store).complaint


def test_checkout_to_a_link_that_leads_nowhere_fetched_it_all_first(run: Shell) -> None:
    """And failed with 'Not a directory', of a directory that nobody had named."""
    nowhere, empty, link = run.root / "nowhere", run.root / "empty", run.root / "link"
    nowhere.symlink_to("nothing")
    empty.mkdir()
    link.symlink_to(empty)
    for path, words in ((nowhere, "is there and is no directory"), (link, "is a link to an empty directory")):
        assert words in run("checkout", "r/2", path, "--store", run.store).complaint
    assert sorted(path.name for path in run.root.glob(".*.checkout")) == []


def test_checkout_goes_on_and_is_never_half_there(run: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    path = payloads(run, 3)[0]
    whole = path.read_bytes()
    flip(path)
    out = run.root / "out"
    assert "is not what was announced" in run("checkout", "r/3", out, "--store", run.store).complaint
    assert not out.exists()
    path.write_bytes(whole)
    assert run("checkout", "r/3", out, "--store", run.store).code == 0
    assert run("diff", out, run.root / "v3").code == 0
    assert not list(run.root.glob(".out.*"))


def test_checkout_without_the_base(shell: Shell) -> None:
    """Version 1 is a full, so that what is built on it needs no base; versions before it do."""
    build(shell)
    shutil.rmtree(shell.base)
    assert shell("checkout", "r/3", shell.root / "out", "--store", shell.store).code == 0
    assert (
        "base checkpoint" in shell("checkout", "r/0", shell.root / "zero", "--store", shell.store).complaint
    )
