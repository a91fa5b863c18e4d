"""Truth, after the fact: what a finished run says of itself is recomputed from its store; lies are found."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from stitch_core.cli.main import main
from stitch_embedded.proof import ProofError, ProofReport, _bits, prove
from stitch_embedded.recorded import RunFile, read_trajectories
from tests.embedded.small_fleet import MAX_LEN, make_run, write

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lines]:
    """One run for all tests; nobody changes it."""
    root = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stitch_embedded.engine.self_check", lambda *_, **__: None)
        lines = asyncio.run(make_run(root))
    return root, lines


@pytest.fixture
def lines(recorded: tuple[Path, Lines]) -> Lines:
    return copy.deepcopy(recorded[1])


@pytest.fixture
def run(recorded: tuple[Path, Lines], tmp_path: Path) -> Path:
    """A copy of the run's store and boot checkpoint, without trajectories."""
    for name in ("store", "boot"):
        shutil.copytree(recorded[0] / name, tmp_path / name)
    return tmp_path


def proven(run: Path, lines: Lines, **changes: Any) -> ProofReport:
    return prove(write(run, lines, **changes), processes=1)


def honest(lines: Lines) -> Lines:
    return [line for line in lines if line["control"] is None]


def test_every_trajectory_is_proven(run: Path, lines: Lines) -> None:
    """In both KV modes, over activations in mid-generation; and no other version would have done."""
    report = proven(run, lines)
    assert report.problems() == []
    assert (report.proven, report.trajectories) == (48, 48)
    assert report.tokens == sum(len(line["output_ids"]) for line in honest(lines))
    assert min(report.spanning.values()) >= 4
    assert report.discriminated == report.discriminable > 40
    assert report.shifted.failed_as_it_must
    assert (report.faulty.found, report.faulty.tried) == (4, 4)
    assert report.equal_states == [[2, 3]]
    value = report.to_json()
    assert value["ok"]
    assert json.loads(json.dumps(value)) == value


def test_versions_of_equal_state_are_one_version(run: Path, lines: Lines) -> None:
    """To say 2 where it was 3, which has the same weights, is no lie that bytes could show."""
    seen = [line for line in honest(lines) if any(span["version"] == 3 for span in _spans(line))]
    assert seen
    for line in seen:
        for span in _spans(line):
            span["version"] = 2 if span["version"] == 3 else span["version"]
    report = proven(run, seen, min_spanning=0)
    assert report.proven == report.trajectories
    assert report.discriminated == report.discriminable


def test_shifted_labels_are_found(run: Path, lines: Lines) -> None:
    """To the next version of another state; the newest has none."""
    older = [line for line in honest(lines) if all(span["version"] < 6 for span in _spans(line))]
    assert len(older) > 20
    for line in older:
        for span in _spans(line):
            span["version"] += 2 if span["version"] == 2 else 1
    report = proven(run, older, min_spanning=0)
    assert report.proven == 0
    assert report.problems()[0] == f"{len(older)} of {len(older)} trajectories are not proven"
    assert len(report.failures) == 10
    assert "its versions give" in report.failures[0]


def test_a_relabelling_replica_is_found(run: Path, lines: Lines) -> None:
    """The negative control, had it been in the fleet."""
    lies = [line for line in lines if line["control"] == "faulty"]
    for line in lies:
        line["control"] = None
    report = proven(run, lies, min_spanning=0)
    assert (report.proven, report.trajectories) == (0, 4)


def test_a_control_that_passes_is_a_problem(run: Path, lines: Lines) -> None:
    for line in honest(lines)[:10]:
        line["control"] = "faulty"
    assert "the faulty replica was found out in only 4 of 14" in proven(run, lines, min_spanning=0).problems()


@pytest.mark.parametrize("at", [0, 5, -1])
def test_one_flipped_bit_is_found(run: Path, lines: Lines, at: int) -> None:
    few = honest(lines)[4:10]
    line = few[3]
    line["logprobs"][at] = math.nextafter(line["logprobs"][at], 0.0)
    report = proven(run, few, min_spanning=0)
    assert report.proven == report.trajectories - 1
    assert report.failures[0].startswith(f"{line['id']}: token {at % len(line['logprobs'])} was ")


def test_a_sign_of_zero_is_a_bit() -> None:
    assert _bits([0.0]) != _bits([-0.0])
    assert _bits([math.nan]) == _bits([math.nan])


def test_another_token_is_found(run: Path, lines: Lines) -> None:
    few = honest(lines)[:6]
    few[3]["output_ids"][2] = (few[3]["output_ids"][2] + 1) % 37
    assert proven(run, few).proven == 5


def test_in_place_passed_off_as_retract(run: Path, lines: Lines) -> None:
    """A report that hides that KV was kept is not the truth either."""
    mixed = [line for line in honest(lines) if line["kv"] == "mixed" and len(line["weight_versions"]) > 1]
    for line in mixed:
        line["kv"] = "uniform"
        newest = line["weight_versions"][-1]["version"]
        line["kv_versions"] = [{"version": newest, "start": 0, "end": len(line["prompt_ids"]) - 1}]
    report = proven(run, mixed, min_spanning=0)
    assert mixed
    assert report.proven < report.trajectories


def test_too_few_spanning(run: Path, lines: Lines) -> None:
    problems = proven(run, lines, min_spanning=1000).problems()
    assert [problem.partition(" trajectories")[2] for problem in problems] == [
        " span an activation in mode in_place", " span an activation in mode retract",
    ]  # fmt: skip


def test_no_trajectories_prove_nothing(run: Path, lines: Lines) -> None:
    assert proven(run, [], min_spanning=0).problems()[0] == "0 of 0 trajectories are not proven"
    assert proven(run, [line for line in lines if line["control"]], min_spanning=0).problems()


def test_a_version_that_does_not_exist(run: Path, lines: Lines) -> None:
    line = honest(lines)[-1]
    line["weight_versions"][-1]["version"] = 99
    line["kv"], line["kv_versions"] = "uniform", []
    line.pop("kv_passes", None)
    match = f"trajectory {line['id']} claims version 99, run r has no such version"
    with pytest.raises(ProofError, match=match):
        proven(run, lines)


@pytest.mark.slow
def test_in_two_processes(run: Path, lines: Lines) -> None:
    said: list[str] = []
    report = prove(write(run, lines), processes=2, progress=said.append)
    assert (report.problems(), report.proven, said) == ([], 48, ["52 trajectories"])
    damage(run)
    with pytest.raises(ProofError, match="is not what was announced"):
        prove(run, processes=2)


def damage(run: Path) -> None:
    """One byte of version 2's payload."""
    shard = next((run / "store").glob("runs/r/*/weight_v000002/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))


# -------------------------------------------------------------------------------- what cannot be proven


def test_c09_a_damaged_store(run: Path, lines: Lines) -> None:
    damage(run)
    with pytest.raises(ProofError, match=r"run r cannot be replayed: .* is not what was announced"):
        proven(run, lines)


def test_another_boot_checkpoint(run: Path, lines: Lines) -> None:
    shard = run / "boot" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(ProofError, match="is not version 0 of run r"):
        proven(run, lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store": "nowhere"}, "run r cannot be read from its store: run r has no head yet"),
        ({"store": "tape://x"}, "there is no store 'tape' here"),
        ({"boot": "nowhere"}, "cannot be replayed"),
        ({"max_len": 8}, "more than max_len 8"),
    ],
)
def test_a_description_of_something_else(
    run: Path, lines: Lines, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProofError, match=message):
        proven(run, lines, **changes)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"store": "s", "run": "r", "boot": "b", "max_len": "64"}',
     '{"store": 5, "run": "r", "boot": "b", "max_len": 64}',
     '{"store": "s", "run": "r", "boot": "b", "max_len": 64, "min_spanning": -1}'],
)  # fmt: skip
def test_a_description_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ProofError, match=r"run\.json is not the description of a run"):
        RunFile.read(tmp_path)


def test_where_the_store_is(tmp_path: Path) -> None:
    def url(store: str) -> str:
        return RunFile(store, "r", "boot", MAX_LEN).store_url(tmp_path)

    assert url("store") == f"file:{tmp_path}/store"
    assert url("/abs/with:colon") == "file:/abs/with:colon"
    assert url("s3://bucket/x") == "s3://bucket/x"
    assert url("memory://x") == "memory://x"


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.pop("logprobs"), "KeyError: 'logprobs'"),
        (lambda line: line["logprobs"].pop(), "log-probabilities for"),
        (lambda line: line.update(logprobs=["x"]), "could not convert"),
        (lambda line: line.update(run="s"), "it is of run 's', not 'r'"),
        (lambda line: line.update(kv_mode="both"), "kv_mode 'both' is none of in_place, retract"),
        (lambda line: line.update(prompt_ids=[]), "a prompt has some"),
        (lambda line: line.update(output_ids=["a"]), "must be token ids"),
        (lambda line: line.update(output_ids=[-1]), "must be token ids"),
        (lambda line: line["output_ids"].append(1), "the report covers"),
        (lambda line: line.update(weight_versions=5), "no version fields that could be replayed"),
        (lambda line: line["weight_versions"][0].update(version="r/weight_v000001"), "line 3"),
        (lambda line: line.update(going_down(line)), "its versions go down from 5 to 4"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(
    tmp_path: Path, lines: Lines, change: Change, message: str
) -> None:
    change(lines[2])
    write(tmp_path, lines)
    with pytest.raises(ProofError, match=r"trajectories\.jsonl\.zst, line 3: ") as error:
        read_trajectories(tmp_path, "r")
    assert message in str(error.value)


@pytest.mark.parametrize("line", [b"[]\n", b"5\n", b"{\n", b"\xff\n", b"\n"])
def test_a_line_that_is_no_object(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "trajectories.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(line))
    with pytest.raises(ProofError, match="line 1"):
        read_trajectories(tmp_path, "r")


def test_a_token_that_the_model_does_not_have(run: Path, lines: Lines) -> None:
    honest(lines)[0]["prompt_ids"][0] = 37
    with pytest.raises(ProofError, match="token 37 is not one of the model's 37"):
        proven(run, lines)


def test_every_frame_of_the_file_counts(tmp_path: Path, lines: Lines) -> None:
    """One frame or many, with a newline at the end or not: all lines are read, and a cut is noticed."""
    write(tmp_path, lines)
    path = tmp_path / "trajectories.jsonl.zst"
    many = path.read_bytes()
    assert len(read_trajectories(tmp_path, "r")) == len(lines)
    text = "\n".join(json.dumps(line) for line in lines).encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(text))
    assert len(read_trajectories(tmp_path, "r")) == len(lines)
    for data in (many[:-1], path.read_bytes()[:-20], many + b"\x28"):
        path.write_bytes(data)
        with pytest.raises(ProofError, match=r"is cut short|cannot be read"):
            read_trajectories(tmp_path, "r")
    path.write_bytes(b"not zstd at all")
    with pytest.raises(ProofError, match="cannot be read"):
        read_trajectories(tmp_path, "r")
    path.unlink()
    with pytest.raises(ProofError, match="No such file"):
        read_trajectories(tmp_path, "r")


# ------------------------------------------------------------------------------------------- the command


def test_the_command(run: Path, lines: Lines, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, lines)
    assert main(["prove", str(run), "--processes=1"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0].startswith("48 of 48 trajectories (")
    assert "versions of equal state: [[2, 3]]" in said.out
    assert said.err == "52 trajectories\n"
    few = honest(lines)[:6]
    few[0]["logprobs"][0] -= 1e-3
    write(run, few, min_spanning=0)
    assert main(["prove", str(run), "--processes=1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["problems"][0] == "1 of 6 trajectories are not proven"


@pytest.mark.parametrize("processes", ["0", "-1", "x"])
def test_processes_that_are_none(tmp_path: Path, processes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prove", str(tmp_path), f"--processes={processes}"])
    assert "argument --processes: expected a whole number from 1 to" in capsys.readouterr().err


def test_no_more_processes_than_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [])
    asked: list[int] = []

    def stop(directory: Path, *, processes: int, progress: Any) -> ProofReport:
        asked.append(processes)
        raise ProofError("enough")

    monkeypatch.setattr("stitch_embedded.proof.prove", stop)
    assert main(["prove", str(tmp_path), "--processes=100000"]) == 2
    assert asked == [os.cpu_count()]


def test_the_command_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"stitch prove: {tmp_path} is not a run: it has no run.json\n"
    write(tmp_path, [])
    assert main(["prove", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[1].startswith("stitch prove: run r cannot be read from its store: run r has no head yet")


def going_down(line: dict[str, Any]) -> dict[str, Any]:
    """The report of a response that a replica cannot have given."""
    prompt, tokens = len(line["prompt_ids"]), len(line["output_ids"])
    spans = [{"version": 5, "start": 0, "end": 3}, {"version": 4, "start": 3, "end": tokens}]
    before = [{"version": 5, "start": 0, "end": prompt - 1}]
    return {"weight_versions": spans, "kv_versions": before, "kv": "mixed", "kv_passes": None}


def _spans(line: dict[str, Any]) -> list[dict[str, Any]]:
    passes = [span for one in line.get("kv_passes", ()) for span in one["kv_versions"]]
    return [*line["weight_versions"], *line["kv_versions"], *passes]
