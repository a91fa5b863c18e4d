"""docs/migrate.md, done: a root as the public reference leaves it becomes a run, its pointer unmoved."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard

from stitch_core.cli.main import build_parser
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor, write_file
from stitch_core.state import tensor_digest
from stitch_core.testing.checkpoints import step, write_checkpoint
from tests.cli.commands import Shell
from tests.small_run import FILES, Tensors
from tests.test_operations_doc import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "migrate.md").read_text()


def xor(old: bytes, new: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(old, new, strict=True))


def overwrite(old: bytes, new: bytes) -> bytes:
    """u32 count, u32 byte positions, bytes; little-endian."""
    changed = np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)).astype("<u4")
    return (
        np.array([changed.size], "<u4").tobytes()
        + changed.tobytes()
        + np.frombuffer(new, np.uint8)[changed].tobytes()
    )


def write_version(
    directory: Path,
    number: int,
    old: Tensors,
    new: Tensors,
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
) -> None:
    """A delta directory of the reference: numbers as six digits, checksums of the new bytes in the header."""
    directory.mkdir(parents=True)
    shard = "model-00000-of-00001.safetensors"
    frames, sums = {}, {}
    for name, tensor in new.items():
        before, after = bytes(old[name].data), bytes(tensor.data)
        if before == after:
            continue
        encoded = (xor if encoding == "xor" else overwrite)(before, after)
        frame = zstandard.ZstdCompressor(level=1).compress(encoded)
        frames[name] = Tensor("U8", (len(frame),), frame)
        sums[name] = tensor_digest(after) if checksum == "xxh3-128" else f"{zlib.adler32(after):08x}"
    write_file(directory / shard, PosixFiles(), frames, sums)
    index = {
        "metadata": {
            "version": f"{number:06d}", "base_version": f"{number - 1:06d}", "delta_encoding": encoding,
            "compression_format": "zstd", "checksum_format": checksum,
        },
        "weight_map": dict.fromkeys(frames, shard),
    }  # fmt: skip
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def bulletin(shell: Shell) -> Path:
    """Three versions on the shell's base: xor, xor with adler32, overwrite."""
    root, rng = shell.root / "store", np.random.default_rng(1)
    kinds = [("xor", "xxh3-128"), ("xor", "adler32"), ("overwrite", "xxh3-128")]
    for number, (encoding, checksum) in enumerate(kinds, 1):
        before, shell.tensors = shell.tensors, step(rng, shell.tensors, 0.3)
        write_version(
            root / "updates" / f"weight_v{number:06d}", number, before, shell.tensors,
            encoding=encoding, checksum=checksum,
        )  # fmt: skip
    (root / "latest").write_text("old-run/weight_v000003")
    write_checkpoint(shell.root / "expected", FILES, shell.tensors)
    return root


def contents(root: Path) -> dict[str, bytes]:
    """The reference's files, whatever else is in the root."""
    paths = [root / "latest", *(path for path in (root / "updates").rglob("*") if path.is_file())]
    return {str(path): path.read_bytes() for path in paths}


def test_step_by_step(shell: Shell, bulletin: Path) -> None:
    before = contents(bulletin)
    shown = shell("inspect", bulletin, "--json").json
    assert (shown["is"], shown["pointer"], shown["versions"]) == (
        "root of the public reference", "old-run/weight_v000003", 3,
    )  # fmt: skip
    said = shell("status", "--store", shell.store)
    assert "latest is the pointer of the public reference, at version 3 of old-run" in said.err
    assert shell("doctor", "--store", shell.store, "--base", shell.base).code == 0
    assert shell.claim().code == 0
    for directory in sorted((bulletin / "updates").iterdir()):
        said = shell.publish(directory, "--work", shell.root / "scratch")
        assert said.code == 0, said.err
    assert shell.head()[0] == 3
    assert shell("diff", "r", shell.root / "expected", "--store", shell.store).code == 0
    assert shell("channel", "set", "--store", shell.store, "latest", "r").code == 0
    assert contents(bulletin) == before, "the reference goes on working"
    keys = [run["run"] for run in shell("status", "--store", shell.store, "--json").json["runs"]]
    assert keys == ["r"]


def test_adopting_is_all_of_it_at_once(shell: Shell, bulletin: Path) -> None:
    before = contents(bulletin)
    said = shell.claim("--adopt", "--channel", "latest", "--json")
    assert said.code == 0, said.err
    assert (said.json["head"], said.json["adopted"], said.json["epoch"]) == (3, [1, 2, 3], 1)
    assert shell("diff", "r", shell.root / "expected", "--store", shell.store).code == 0
    assert contents(bulletin) == before, "the old pointer is left where it is"
    # Its trainer was not stopped after all, and moved on; a number that it left out stays left out.
    old, shell.tensors = shell.tensors, step(np.random.default_rng(2), shell.tensors, 0.3)
    write_version(bulletin / "updates" / "weight_v000005", 5, old, shell.tensors)
    assert shell.claim("--adopt", "--json").json["adopted"] == [], "what the pointer does not name yet"
    (bulletin / "latest").write_text("weight_v000005\n")
    assert shell.claim("--adopt", "--json", "--work", shell.root / "scratch").json["adopted"] == [5]
    write_checkpoint(shell.root / "later", FILES, shell.tensors)
    assert shell("diff", "r/5", shell.root / "later", "--store", shell.store).code == 0


def test_adopting_stops_at_what_cannot_be_proven_and_goes_on_from_there(shell: Shell, bulletin: Path) -> None:
    second = bulletin / "updates" / "weight_v000002" / "model.safetensors.index.json"
    index = second.read_text()
    second.unlink()  # half of it was copied
    assert shell.claim("--adopt").code == 2
    assert shell.head()[0] == 1
    second.write_text(index)
    assert shell.claim("--adopt", "--json").json["adopted"] == [2, 3]
    full = bulletin / "updates" / "weight_v000004"
    write_checkpoint(full, FILES, shell.tensors)
    (bulletin / "latest").write_text("weight_v000004")
    assert shell.claim("--adopt", "--json").json["adopted"] == [4]


def test_what_cannot_be_adopted_fences_nobody(shell: Shell, bulletin: Path) -> None:
    shell.claim()
    shell.publish(shell.learn("mine"))
    epoch = shell.head()[1]
    for text, why in (
        ("weight_v000009", "that is not there"),
        ("nonsense", "which is no version"),
        (None, "the store has no pointer of the public reference"),
    ):
        if text is None:
            (bulletin / "latest").unlink()
        else:
            (bulletin / "latest").write_text(text)
        said = shell.claim("--adopt")
        assert said.code == 2
        assert why in said.complaint
        assert shell.head()[1] == epoch
    (bulletin / "latest").write_text("weight_v000003")
    assert "were not adopted, at 1: adopt into a new run" in shell.claim("--adopt").complaint
    assert shell.head() == (1, epoch)


def test_a_version_that_does_not_fit_is_refused(shell: Shell, bulletin: Path) -> None:
    """Publishing the newest alone would be a delta on weights that are not there."""
    shell.claim()
    said = shell.publish(bulletin / "updates" / "weight_v000003")
    assert said.code == 2
    assert shell.head()[0] == 0


def test_c74_weights_that_the_references_index_does_not_name_are_not_adopted(
    shell: Shell, bulletin: Path
) -> None:
    left = shell.root / "store/updates/weight_v000002/model-00003-of-00003.safetensors"
    write_file(left, FILES, {"other": Tensor("U8", (1,), b"x")}, {"other": "00000000"})
    assert left.name in shell.claim("--adopt").complaint
    assert shell.head()[0] == 1
    left.unlink()
    assert shell.claim("--adopt").code == 0
    assert shell.head()[0] == 3


def test_only_the_newest_as_a_full(shell: Shell, bulletin: Path) -> None:
    shell.claim()
    said = shell.publish(shell.root / "expected", "--as-delta")
    assert said.code == 0, said.err
    assert shell("diff", "r/1", shell.root / "expected", "--store", shell.store).code == 0


def test_the_collector_leaves_the_reference_alone(shell: Shell, bulletin: Path) -> None:
    shell.claim()
    for number in range(3):
        shell.publish(shell.learn(f"full{number}"))
    before = contents(bulletin)
    assert shell("gc", "--store", shell.store, "--run", "r", "--grace", "0s").code == 0
    assert contents(bulletin) == before


def test_flags_exist() -> None:
    replica = COMMANDS["replica"]._option_string_actions
    column = [row.split("|")[2] for row in TEXT.splitlines() if row.startswith("| `--")]
    named = {
        flag for cell in column for flag in re.findall(r"--[a-z-]+", cell) if not flag.startswith("--custom")
    }
    assert {"--store", "--base", "--run", "--host-dir", "--kv-mode", "--drain-all", "--poll"} <= named
    assert not named - set(replica)


def test_commands_in_the_steps_parse() -> None:
    parser = build_parser()
    lines = re.findall(r"^ +stitch (.*?)(?: \|\| break)?$", TEXT, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        parser.parse_args(line.replace('"$dir"', "dir").split())
