"""The local copy of one replica: seeding, plans, refusals, and what it does with damage."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import overwrite, xor
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import (
    Holding,
    HostCheckpoint,
    HostCheckpointError,
    RepresentationInvalid,
)
from stitch_core.journal import Journal, Write
from stitch_core.lineage import Plan
from stitch_core.manifest import Manifest, Representation
from stitch_core.safetensors import Tensor, read_header, write_file
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import step, table_of
from stitch_core.testing.runs import RunBuilder

FILES = PosixFiles()


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run", FILES)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostCheckpoint]:
    host = HostCheckpoint(tmp_path / "host", FILES)
    host.open()
    yield host
    host.close()


def deltas(run: RunBuilder, *numbers: int) -> Plan:
    versions = [run.versions[n] for n in numbers]
    return Plan(versions[-1], versions[0].representation.base, None, tuple(versions))


def full(run: RunBuilder, number: int, *after: int) -> Plan:
    return Plan(
        run.versions[[number, *after][-1]], None, run.versions[number], tuple(run.versions[n] for n in after)
    )


def check(host: HostCheckpoint, run: RunBuilder, number: int) -> None:
    """The copy is version ``number`` to the last byte, says so, and shows nothing else."""
    manifest, tensors = run.versions[number], run.tensors[number]
    assert host.holding == Holding(manifest.version, manifest.digest(), manifest.state)
    assert host.table == table_of(tensors)
    assert (host.problem, host.interrupted) == (None, None)
    assert host.directory.name == f"weight_v{number:06d}"
    assert host.directory.is_symlink()
    checkpoint = Checkpoint.open(host.directory, FILES)
    assert {name: checkpoint.read(name) for name in tensors} == {name: t.data for name, t in tensors.items()}
    names = os.listdir(host.root)
    assert len([name for name in names if name.startswith("data-")]) == 1
    assert [name for name in names if name.startswith("weight_v")] == [host.directory.name]
    assert not [name for name in names if name.endswith(".tmp")]


# ------------------------------------------------------------------------------------------------- seed


def test_an_empty_root_holds_nothing(host: HostCheckpoint) -> None:
    assert host.holding is None
    assert host.problem == "it is empty"
    with pytest.raises(HostCheckpointError, match="holds no version: it is empty"):
        _ = host.directory


def test_seed_copies_the_boot_checkpoint_and_what_belongs_to_it(
    host: HostCheckpoint, run: RunBuilder
) -> None:
    (run.boot / "tokenizer.json").write_text("{}")
    (run.boot / "pytorch_model.bin").write_text("the same model in another format")
    (run.boot / "consolidated.safetensors").write_text("and another")
    (run.boot / "original").mkdir()
    (run.boot / ".gitattributes").write_text("")
    os.symlink("nowhere", run.boot / "README.md")
    real = run.boot.parent / "blob"
    shutil.move(run.boot / "config.json", real)
    os.symlink(real, run.boot / "config.json")
    host.seed(run.boot, run.versions[0])
    check(host, run, 0)
    weights = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(os.listdir(host.directory)) == sorted(
        [*weights, INDEX_NAME, "config.json", "tokenizer.json"]
    )
    assert not (host.directory / "config.json").is_symlink()


def test_a_boot_checkpoint_without_an_index_gets_one(host: HostCheckpoint, run: RunBuilder) -> None:
    (run.boot / INDEX_NAME).unlink()
    host.seed(run.boot, run.versions[0])
    check(host, run, 0)
    index = Checkpoint.open(host.directory, FILES).index
    assert index is not None
    assert set(index.weight_map) == set(run.tensors[0])


def test_a_base_that_is_not_version_0_is_refused_and_nothing_changes(
    host: HostCheckpoint, run: RunBuilder, tmp_path: Path
) -> None:
    other = RunBuilder(tmp_path / "other", FILES, seed=1)
    with pytest.raises(HostCheckpointError) as caught:
        host.seed(other.boot, run.versions[0])
    assert str(caught.value) == (
        f"the base checkpoint at {other.boot} is not version 0 of run run: "
        f"its state is {other.versions[0].state}, expected {run.versions[0].state}"
    )
    assert host.holding is None
    assert not [name for name in os.listdir(host.root) if name.startswith("data-")]
    host.seed(run.boot, run.versions[0])
    with pytest.raises(HostCheckpointError, match="is not version 0"):
        host.seed(other.boot, run.versions[0])
    check(host, run, 0)


def test_a_base_that_cannot_be_read(host: HostCheckpoint, run: RunBuilder, tmp_path: Path) -> None:
    with pytest.raises(HostCheckpointError, match="no such directory"):
        host.seed(tmp_path / "missing", run.versions[0])
    next(run.boot.glob("*-of-*.safetensors")).unlink()
    with pytest.raises(HostCheckpointError, match=r"cannot be used: .* named by the index"):
        host.seed(run.boot, run.versions[0])


def test_seeding_again_for_another_run(host: HostCheckpoint, run: RunBuilder, tmp_path: Path) -> None:
    host.seed(run.boot, run.versions[0])
    other = RunBuilder(tmp_path / "other", FILES, run="other", seed=1, layout={"x": ("U8", (3,))})
    host.seed(other.boot, other.versions[0])
    check(host, other, 0)


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize("batch_bytes", [1, 200, 64 << 20])
def test_deltas_one_by_one_and_many_at_once(tmp_path: Path, run: RunBuilder, batch_bytes: int) -> None:
    for encoding in ("xor", "overwrite", "xor", "xor", "overwrite"):
        run.delta(encoding=encoding)
    host = HostCheckpoint(tmp_path / "h", FILES, batch_bytes=batch_bytes)
    host.open()
    host.seed(run.boot, run.versions[0])
    host.apply(deltas(run, 1), run.directory_of)
    check(host, run, 1)
    host.apply(deltas(run, 2, 3, 4), run.directory_of)
    check(host, run, 4)
    host.close()
    assert host.open() == host.holding
    check(host, run, 4)
    host.apply(deltas(run, 5), run.directory_of)
    check(host, run, 5)
    host.close()


def test_a_full_and_deltas_above_it(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta()
    run.full()
    run.delta()
    run.delta(encoding="overwrite")
    host.apply(full(run, 2), run.directory_of)
    check(host, run, 2)
    assert (host.directory / "config.json").exists()
    host.apply(full(run, 2, 3, 4), run.directory_of)
    check(host, run, 4)


def test_C26_a_full_without_an_index_and_without_anything_held(host: HostCheckpoint, run: RunBuilder) -> None:
    manifest = run.full()
    files = tuple(f for f in manifest.representation.files if f.name != INDEX_NAME)
    run.versions[1] = dataclasses.replace(manifest, representation=Representation("full", files))
    (run.directory_of(manifest) / INDEX_NAME).unlink()
    host.apply(full(run, 1), run.directory_of)
    check(host, run, 1)
    assert INDEX_NAME in os.listdir(host.directory)


def test_equal_states_only_relabel(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta(run.tensors[0])
    run.full()
    data = os.readlink(host.directory)
    host.apply(deltas(run, 1), run.directory_of)
    check(host, run, 1)
    host.apply(Plan(run.versions[2], run.versions[2].state, None, ()), run.directory_of)
    check(host, run, 2)
    assert os.readlink(host.directory) == data
    host.close()
    host.open()
    check(host, run, 2)


def test_a_tensor_that_comes_back_to_an_earlier_value(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta()
    run.delta(run.tensors[0])
    run.delta(run.tensors[1])
    host.apply(deltas(run, 1, 2, 3), run.directory_of)
    check(host, run, 3)
    host.apply(deltas(run, 2), run.directory_of)
    check(host, run, 2)


def test_a_plan_from_another_base_is_refused(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta()
    run.delta()
    with pytest.raises(HostCheckpointError, match="the plan starts from"):
        host.apply(deltas(run, 2), run.directory_of)
    check(host, run, 0)


def test_a_plan_whose_files_are_gone_is_refused(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    path = run.directory_of(run.delta()) / "model-00000-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(HostCheckpointError, match=r"of run/weight_v000001 is not there, or not"):
        host.apply(deltas(run, 1), run.directory_of)
    path.unlink()
    with pytest.raises(HostCheckpointError, match="is not there"):
        host.apply(deltas(run, 1), run.directory_of)
    check(host, run, 0)


def test_room_needed_is_enough(tmp_path: Path, run: RunBuilder) -> None:
    run.delta()
    run.full()
    for plan in (deltas(run, 1), full(run, 2)):
        host = HostCheckpoint(tmp_path / f"{plan.target.number}", FILES)
        host.open()
        host.seed(run.boot, run.versions[0])
        need = host.room_needed(plan)
        before = sum(p.stat().st_size for p in (host.root).rglob("*") if p.is_file() and not p.is_symlink())
        host.apply(plan, run.directory_of)
        after = sum(p.stat().st_size for p in (host.root).rglob("*") if p.is_file() and not p.is_symlink())
        weights = sum(len(t.data) for t in run.tensors[0].values())
        assert 0 < need - plan.bytes < 3 * weights + 8000
        assert after - before <= need
        host.close()


# --------------------------------------------------------------------------------- what must be refused


def payload(path: Path) -> Path:
    return path / "model-00000-of-00001.safetensors"


def rewrite(
    run: RunBuilder, number: int, change: Callable[[dict[str, bytes], dict[str, str]], object]
) -> None:
    """Change the frames and checksums of a delta behind its manifest's back (its sizes follow)."""
    path = payload(run.directory_of(run.versions[number]))
    header, data = read_header(path, FILES), path.read_bytes()
    frames = {n: data[r.offset : r.offset + r.nbytes] for n, r in header.tensors.items()}
    checksums = dict(header.metadata)
    change(frames, checksums)
    write_file(path, FILES, {n: Tensor("U8", (len(f),), f) for n, f in frames.items()}, checksums)
    files = tuple(
        dataclasses.replace(f, size=path.stat().st_size) if f.name == path.name else f
        for f in run.versions[number].representation.files
    )
    edit(run, number, files=files)


def edit(run: RunBuilder, number: int, **changes: object) -> None:
    """Change a manifest's representation."""
    manifest = run.versions[number]
    representation = dataclasses.replace(manifest.representation, **changes)  # type: ignore[arg-type]
    run.versions[number] = dataclasses.replace(manifest, representation=representation)


EMBED = "model.embed_tokens.weight"


def refused(host: HostCheckpoint, run: RunBuilder, plan: Plan, culprit: Manifest, words: str) -> None:
    """The plan is refused for ``culprit``, and the copy stays at version 0, here and after a restart."""
    with pytest.raises(RepresentationInvalid, match=words) as caught:
        host.apply(plan, run.directory_of)
    assert caught.value.manifest_digest == culprit.digest()
    check(host, run, 0)
    host.close()
    host.open()
    check(host, run, 0)


@pytest.mark.parametrize("batch_bytes", [1, 64 << 20])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_payload_that_gives_other_bytes_is_blamed_on_its_delta(
    tmp_path: Path, run: RunBuilder, number: int, batch_bytes: int
) -> None:
    for _ in range(3):
        run.delta(density=0.9)
    name = max(run.versions[number].representation.changed)

    def change(frames: dict[str, bytes], checksums: dict[str, str]) -> None:
        size = len(run.tensors[0][name].data)
        frames[name] = xor.encode(bytes(size), b"\x01" * size)

    rewrite(run, number, change)
    host = HostCheckpoint(tmp_path / "h", FILES, batch_bytes=batch_bytes)
    host.open()
    host.seed(run.boot, run.versions[0])
    refused(host, run, deltas(run, 1, 2, 3), run.versions[number], f"tensor {name} in .* becomes")
    host.close()


def test_C01_a_payload_that_the_manifest_does_not_name(host: HostCheckpoint, run: RunBuilder) -> None:
    """An index with an empty weight_map and a manifest that says that nothing changed, but a payload."""
    host.seed(run.boot, run.versions[0])
    run.delta()
    directory = run.directory_of(run.versions[1])
    index = directory / INDEX_NAME
    index.write_text(index.read_text().split('"weight_map"')[0] + '"weight_map": {}}')
    edit(run, 1, changed={}, files=tuple(
        dataclasses.replace(f, size=(directory / f.name).stat().st_size)
        for f in run.versions[1].representation.files
    ))  # fmt: skip
    run.versions[1] = dataclasses.replace(run.versions[1], state=run.versions[0].state)
    refused(host, run, deltas(run, 1), run.versions[1], "has a payload, but the manifest does not say")


def test_a_changed_tensor_without_a_payload(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta()
    directory = run.directory_of(run.versions[1])
    write_index = (
        (directory / INDEX_NAME).read_text().replace(f'"{EMBED}": "{payload(directory).name}", ', "")
    )
    (directory / INDEX_NAME).write_text(write_index)
    rewrite(run, 1, lambda frames, _: frames.pop(EMBED))
    edit(run, 1, files=tuple(
        dataclasses.replace(f, size=(directory / f.name).stat().st_size)
        for f in run.versions[1].representation.files
    ))  # fmt: skip
    refused(host, run, deltas(run, 1), run.versions[1], f"tensor {EMBED} has no payload")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scale": ("0" * 32, "1" * 32)}, "tensor scale"),
        ({EMBED: ("0" * 32, "1" * 32)}, f"tensor {EMBED}"),
        ({"unknown": ("0" * 32, "1" * 32)}, "tensor unknown"),
    ],
)
def test_digests_that_do_not_fit(
    host: HostCheckpoint, run: RunBuilder, changed: dict[str, tuple[str, str]], words: str
) -> None:
    host.seed(run.boot, run.versions[0])
    tensors = dict(run.tensors[0]) | {EMBED: step(np.random.default_rng(5), run.tensors[0], 0.5)[EMBED]}
    run.delta(tensors)
    edit(run, 1, changed=dict(run.versions[1].representation.changed) | changed)
    refused(host, run, deltas(run, 1), run.versions[1], words)


def test_C33_a_delta_that_would_fit_but_was_made_on_another_base(
    host: HostCheckpoint, run: RunBuilder
) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta(density=0.9)
    run.delta(density=0.9)
    edit(run, 2, base=run.versions[0].state)
    refused(host, run, deltas(run, 2), run.versions[2], "must be .* before it, but is")


def test_a_state_that_the_tensors_do_not_lead_to(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.versions[1] = dataclasses.replace(run.delta(), state="sha256:" + "7" * 64)
    refused(host, run, deltas(run, 1), run.versions[1], "its tensors lead to sha256:")


def test_the_manifest_and_the_files_must_agree(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta()
    right = run.versions[1]
    edit(run, 1, encoding="overwrite")
    refused(host, run, deltas(run, 1), run.versions[1], "its index says xor, its manifest overwrite")
    run.versions[1] = right

    def change(frames: dict[str, bytes], checksums: dict[str, str]) -> None:
        checksums[EMBED] = "0" * 32

    rewrite(run, 1, change)
    refused(host, run, deltas(run, 1), run.versions[1], f"tensor {EMBED} becomes 0+ by its shard")


def test_a_frame_of_another_size(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta()
    rewrite(run, 1, lambda frames, _: frames.update({EMBED: overwrite.encode(b"abc", b"abd")}))
    refused(host, run, deltas(run, 1), run.versions[1], f"tensor {EMBED} in .*: zstd frame ends")


@pytest.mark.parametrize("after", [(), (2,)])
def test_C09_a_full_with_a_flipped_byte(
    host: HostCheckpoint, run: RunBuilder, after: tuple[int, ...]
) -> None:
    host.seed(run.boot, run.versions[0])
    run.full(step(np.random.default_rng(3), run.tensors[0]))
    run.delta()
    path = run.directory_of(run.versions[1]) / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(host, run, full(run, 1, *after), run.versions[1], "its files hold state")


def retensored(**changes: Tensor | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: t for n, t in (tensors | changes).items() if t is not None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (retensored(scale=None), "tensor scale is missing"),
        (retensored(more=Tensor("U8", (1,), b"x")), "tensor more is extra"),
        (retensored(scale=Tensor("I32", (), b"1234")), "tensor scale has dtype I32, expected F32"),
        (retensored(scale=Tensor("F32", (1,), b"1234")), "tensor scale has shape"),
    ],
)
def test_C14_a_full_of_another_layout(
    host: HostCheckpoint,
    run: RunBuilder,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    words: str,
) -> None:
    host.seed(run.boot, run.versions[0])
    run.full(change(run.tensors[0]))
    refused(host, run, full(run, 1), run.versions[1], words)


def test_C14_a_full_whose_shard_is_absent_or_truncated(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.full(shards=2)
    right = run.versions[1]
    lost = "model-00002-of-00002.safetensors"
    edit(run, 1, files=tuple(f for f in right.representation.files if f.name != lost))
    refused(host, run, full(run, 1), run.versions[1], f"{lost}: named by the index, but not there")
    path = run.directory_of(right) / lost
    path.write_bytes(path.read_bytes()[:-1])
    edit(run, 1, files=tuple(
        dataclasses.replace(f, size=f.size - 1) if f.name == lost else f for f in right.representation.files
    ))  # fmt: skip
    refused(host, run, full(run, 1), run.versions[1], f"{lost}: .* the header describes")


def test_a_bad_delta_above_a_full_is_blamed_and_the_full_is_not(
    host: HostCheckpoint, run: RunBuilder
) -> None:
    host.seed(run.boot, run.versions[0])
    run.full(step(np.random.default_rng(3), run.tensors[0]))
    run.delta()
    rewrite(run, 2, lambda frames, _: frames.update({EMBED: xor.encode(bytes(2048), b"\1" * 2048)}))
    refused(host, run, full(run, 1, 2), run.versions[2], f"tensor {EMBED} in .* becomes")


# --------------------------------------------------------------------------------------------- the host


def test_one_process_owns_a_root(host: HostCheckpoint) -> None:
    other = HostCheckpoint(host.root, FILES)
    with pytest.raises(HostCheckpointError, match=f"{host.root} is in use by another process"):
        other.open()
    with pytest.raises(HostCheckpointError, match="is not open"):
        other.seed(host.root, Manifest("r", 0, 1, "x", Representation("boot", source="")))
    host.close()
    other.open()
    other.close()
    other.close()


def test_C22_a_marker_is_a_claim_and_the_hash_is_the_proof(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta()
    host.apply(deltas(run, 1), run.directory_of)
    shard = next(host.directory.glob("*.safetensors"))
    right = shard.read_bytes()
    host.close()
    for damaged in (right[:-1] + bytes([right[-1] ^ 1]), right[:-1], b""):
        shard = next(host.root.glob("data-*")) / shard.name
        shard.write_bytes(damaged)
        assert host.open() is None
        assert host.problem is not None
        assert host.problem.startswith(("its data is not run/weight_v000001", "its data is damaged"))
        assert not list(host.root.glob("weight_v*"))
        assert host.table == {}
        host.close()
    host.open()
    host.seed(run.boot, run.versions[0])
    check(host, run, 0)


@pytest.mark.parametrize("marker", ["", "{", "{}", "[]", '{"format":"stitch.host/9"}'])
def test_a_marker_that_cannot_be_read(host: HostCheckpoint, run: RunBuilder, marker: str) -> None:
    host.seed(run.boot, run.versions[0])
    host.close()
    (host.root / "marker.json").write_text(marker)
    assert host.open() is None
    assert "marker.json" in (host.problem or "")
    host.seed(run.boot, run.versions[0])
    check(host, run, 0)


def test_damage_while_it_is_open_is_the_copys_fault_and_not_the_deltas(
    host: HostCheckpoint, run: RunBuilder
) -> None:
    host.seed(run.boot, run.versions[0])
    run.delta(density=0.9)
    ref = Checkpoint.open(host.directory, FILES).tensors[EMBED]
    FILES.write_at(host.directory / ref.file.name, ref.offset, b"\xff\xff\xff")
    with pytest.raises(HostCheckpointError, match=f"holds none: its data is damaged: tensor {EMBED}"):
        host.apply(deltas(run, 1), run.directory_of)
    assert host.holding is None
    host.seed(run.boot, run.versions[0])
    host.apply(deltas(run, 1), run.directory_of)
    check(host, run, 1)


def test_a_damaged_copy_lends_its_config_to_a_full(host: HostCheckpoint, run: RunBuilder) -> None:
    host.seed(run.boot, run.versions[0])
    run.full()
    next(host.directory.glob("*.safetensors")).unlink()
    host.close()
    assert host.open() is None
    host.apply(full(run, 1), run.directory_of)
    check(host, run, 1)
    assert (host.directory / "config.json").exists()


def test_nothing_outside_the_root_is_touched(tmp_path: Path, host: HostCheckpoint, run: RunBuilder) -> None:
    (host.root / "mine").write_text("kept")
    before = {p: p.read_bytes() for p in run.root.rglob("*") if p.is_file()}
    host.seed(run.boot, run.versions[0])
    run.full()
    host.apply(full(run, 1), run.directory_of)
    assert (host.root / "mine").read_text() == "kept"
    assert {p: p.read_bytes() for p in before} == before
    assert {p.name for p in tmp_path.iterdir()} == {"host", "run"}


def test_C16_the_journal_reaches_beyond_4_GiB(tmp_path: Path) -> None:
    big = (1 << 32) + 16
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(big)
    journal = Journal(tmp_path / "journal", FILES)
    journal.create()
    record = journal.record("tag")
    record.add([Write("sparse", big - 4, b"abcd")])
    record.seal()
    assert journal.redo("tag", tmp_path) == {}
    assert FILES.read(path, big - 4) == b"abcd"
    FILES.write_at(path, big - 4, b"XXXX")
    assert journal.redo("other tag", tmp_path) is None
    assert journal.redo("tag", tmp_path) == {}
    assert FILES.read(path, big - 4) == b"abcd"
    assert path.stat().st_size == big


@pytest.mark.slow
def test_two_hundred_small_versions(host: HostCheckpoint, tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "many", FILES, layout={f"t{i}": ("BF16", (20,)) for i in range(26)}, shards=1)
    host.seed(run.boot, run.versions[0])
    for number in range(1, 201):
        run.delta()
        host.apply(deltas(run, number), run.directory_of)
    check(host, run, 200)
    assert state_digest(host.table) == run.versions[200].state
