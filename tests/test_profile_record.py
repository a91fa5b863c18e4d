"""The record of `stitch profile`: one file, one record for each setup and destination."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stitch_core.files import PosixFiles
from stitch_core.profile_record import Record, RecordError, Setup, read_records, write_record

FILES = PosixFiles()
SETUP = Setup("sha256:00", "sglang 0.5.23", {"tp_size": 1, "quantization": None})
OTHER = Setup("sha256:00", "sglang 0.5.23", {"tp_size": 2, "quantization": None})


def test_what_is_written_is_read_and_a_newer_one_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert read_records(path, FILES) == []
    first = Record(SETUP, "cpu", ("after: equal to a fresh server",), 1.0)
    others = [Record(SETUP, "disk", (), 2.0), Record(OTHER, "cpu", (), 3.0)]
    for one in (first, *others):
        write_record(path, one, FILES)
    assert read_records(path, FILES) == [first, *others]
    again = Record(SETUP, "cpu", (), 4.0)
    write_record(path, again, FILES)
    assert read_records(path, FILES) == [*others, again]
    assert (first.ok, again.ok) == (False, True)
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b'"x"', b"\xff", b'{"format": "stitch-profile-9", "profiles": []}',
        b'{"format": "stitch-profile-1", "profiles": [{"path": "cpu", "failed": [], "time": 1}]}',
        b'{"format": "stitch-profile-1", "profiles": [{"setup": {"boot": 1, "engine": "", "flags": {}}, '
        b'"path": "cpu", "failed": [], "time": 1}]}',
        b'{"format": "stitch-profile-1", "profiles": [{"setup": {"boot": "", "engine": "", "flags": {}}, '
        b'"path": "cpu", "failed": "no", "time": 1}]}',
    ],
)  # fmt: skip
def test_what_is_no_record_is_named_and_not_overwritten(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=str(path)):
        read_records(path, FILES)
    with pytest.raises(RecordError, match=str(path)):
        write_record(path, Record(SETUP, "", (), 0), FILES)
    assert path.read_bytes() == content


def test_a_record_is_plain_json(tmp_path: Path) -> None:
    write_record(tmp_path / "r", Record(SETUP, "cpu", ("x",), 1.5), FILES)
    value = json.loads((tmp_path / "r").read_text())
    assert value["profiles"] == [
        {
            "setup": {"boot": "sha256:00", "engine": "sglang 0.5.23", "flags": dict(SETUP.flags)},
            "path": "cpu", "failed": ["x"], "time": 1.5,
        }
    ]  # fmt: skip
