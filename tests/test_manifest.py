"""Manifests, heads and channels: what is written reads back, and nothing else is taken."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.head import Channel, Head
from stitch_core.manifest import (
    HISTORY_ROWS,
    FormatError,
    Manifest,
    PayloadFile,
    Representation,
    Row,
    bytes_digest,
    canonical_json,
    extend_history,
    manifest_key,
    read_manifest_key,
)

RUNS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)
SHA = st.binary(min_size=32, max_size=32).map(lambda b: "sha256:" + b.hex())
XXH = st.binary(min_size=16, max_size=16).map(bytes.hex)
COUNTS = st.integers(0, 2**40)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.dictionaries(TEXT, TEXT | COUNTS | st.booleans() | st.none() | st.lists(TEXT), max_size=3)
TIMES = st.integers(0, 10**11) | st.floats(0, 1e11)


@st.composite
def rows(draw: st.DrawFn, number: int) -> Row:
    return Row(number, manifest_key(number, draw(st.integers(0, 99999))), draw(SHA), draw(SHA), draw(COUNTS))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,30}", fullmatch=True), unique=True))
    files = tuple(PayloadFile(name, draw(COUNTS), draw(SHA)) for name in names)
    kind = draw(st.sampled_from(["boot", "full", "delta"]))
    run, state, epoch = draw(RUNS), draw(SHA), draw(COUNTS)
    extra: dict[str, Any] = {"producer": draw(JSON), "metadata": draw(JSON), "time": draw(TIMES)}
    if kind == "boot":
        return Manifest(run, 0, epoch, state, Representation("boot", source=draw(TEXT)), **extra)
    numbers = sorted(draw(st.sets(st.integers(0, 10**9), min_size=2, max_size=6)), reverse=True)
    history = tuple(draw(rows(n)) for n in numbers[1:])
    boot = draw(rows(0))
    step = draw(st.none() | COUNTS)
    if kind == "full":
        full = Representation("full", files or (PayloadFile("a", 1, draw(SHA)),))
        return Manifest(run, numbers[0], epoch, state, full, history, boot, None, step, **extra)
    changed = draw(st.dictionaries(TEXT, st.tuples(XXH, XXH), max_size=4))
    delta = Representation("delta", files, draw(SHA), draw(st.sampled_from(["xor", "overwrite"])), changed)
    return Manifest(run, numbers[0], epoch, state, delta, history, boot, history[-1], step, **extra)


@given(manifests())
def test_a_manifest_reads_back_and_its_digest_is_that_of_its_bytes(manifest: Manifest) -> None:
    data = manifest.encode()
    read = Manifest.decode(data)
    assert read == manifest
    assert read.encode() == data
    assert read.digest() == bytes_digest(data) == manifest.row().digest


@given(st.builds(Channel, RUNS, st.none() | COUNTS))
def test_a_channel_reads_back(channel: Channel) -> None:
    assert Channel.decode(channel.encode()) == channel


@st.composite
def heads(draw: st.DrawFn) -> Head:
    number, epoch = draw(st.integers(0, 10**9)), draw(st.integers(0, 10**6))
    key = manifest_key(number, draw(st.integers(0, epoch)))
    return Head(number, epoch, key, draw(SHA), draw(TEXT.filter(bool)), draw(TIMES))


@given(heads())
def test_a_head_reads_back(head: Head) -> None:
    assert Head.decode(head.encode()) == head


HEAD = Head(7, 3, manifest_key(7, 2), "sha256:" + "0" * 64, "writer", 1.5)
BOOT = Manifest("run", 0, 1, "sha256:" + "1" * 64, Representation("boot", source="hf"))
DELTA = Manifest(
    "run", 1, 1, "sha256:" + "2" * 64,
    Representation("delta", (PayloadFile("a", 1, "sha256:" + "3" * 64),), BOOT.state, "xor",
                   {"w": ("0" * 32, "1" * 32)}),
    extend_history(BOOT), BOOT.row(), BOOT.row(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (Head.decode, HEAD.encode()),
        (Channel.decode, Channel("run", 3).encode()),
        (Manifest.decode, DELTA.encode()),
    ],
    ids=["head", "channel", "manifest"],
)
def test_C02_truncated_or_followed_by_junk_is_refused(decode: Any, data: bytes) -> None:
    assert decode(data).encode() == data
    for length in range(len(data)):
        with pytest.raises(FormatError, match="somewhere"):
            decode(data[:length], "somewhere")
    for junk in (b"\n", b" ", b"x", b"\x00", data):
        with pytest.raises(FormatError):
            decode(data + junk)
    with pytest.raises(FormatError):
        decode(b"\xef\xbb\xbf" + data)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff\xfe", b"run/weight_v000007\n", b"null\n", b"[]\n", b"{}\n", b"7\n", b"[" * 100_000,
        b'{"format":"stitch.head/1","number":' + b"1" * 5000 + b"}\n",
        b'{"a":"\\ud800","format":"stitch.head/1"}\n',
        b'{"format":"stitch.head/1","time":NaN}\n',
    ],
)  # fmt: skip
def test_C02_junk_is_refused(data: bytes) -> None:
    for decode in (Head.decode, Channel.decode, Manifest.decode):
        with pytest.raises(FormatError):
            decode(data)


@given(st.binary(max_size=40))
def test_C02_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Head.decode(data)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "stitch.head/2"}, {"number": -1}, {"number": True}, {"number": 7.0}, {"number": 8},
        {"epoch": 1}, {"epoch": None}, {"key": "manifests/000007.e0004.json"}, {"key": "../x"},
        {"key": "manifests/0000007.e0002.json"},
        {"key": "manifests/\u0660\u0660\u0660\u0660\u0660\u0667.e0002.json"}, {"key": 3},
        {"digest": "sha256:00"}, {"digest": "sha256:" + "A" * 64}, {"writer": ""}, {"writer": None},
        {"time": None}, {"time": "1"},
    ],
)  # fmt: skip
def test_a_head_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Head.decode(canonical_json(json.loads(HEAD.encode()) | change))


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../x"}, {"number": 0}, {"state": "x"}, {"history": []}, {"history": {}}, {"boot": None},
        {"floor": None}, {"floor": Row(1, manifest_key(1, 1), "sha256:" + "0" * 64, "sha256:" + "0" * 64, 0)},
        {"boot": Row(1, manifest_key(1, 1), "sha256:" + "0" * 64, "sha256:" + "0" * 64, 0)},
        {"step": -1}, {"time": None}, {"producer": []}, {"metadata": None}, {"surprise": 1},
        {"representation": None}, {"representation": {"kind": "span"}},
    ],
)  # fmt: skip
def test_a_manifest_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    plain = {k: v.to_json() if isinstance(v, Row) else v for k, v in change.items()}
    with pytest.raises(FormatError):
        Manifest.decode(canonical_json(json.loads(DELTA.encode()) | plain))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "full", "files": []}, {"files": [["../x", 1, "sha256:" + "0" * 64]]},
        {"files": [["a", -1, "sha256:" + "0" * 64]]}, {"files": [["a", 1, "sha256:" + "0" * 64]] * 2},
        {"files": [["a", 1]]}, {"files": None}, {"base": None}, {"encoding": "sparse9"}, {"changed": []},
        {"changed": {"w": ["0" * 32]}}, {"changed": {"w": ["0" * 32, "X" * 32]}}, {"source": "x"},
        {"kind": "boot"},
    ],
)  # fmt: skip
def test_a_representation_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    value = json.loads(DELTA.encode())
    value["representation"] |= change
    with pytest.raises(FormatError):
        Manifest.decode(canonical_json(value))


def test_only_canonical_bytes_are_taken_so_that_a_digest_names_one_document() -> None:
    value = json.loads(DELTA.encode())
    for data in (json.dumps(value).encode(), DELTA.encode().replace(b'"epoch":1', b'"epoch":2,"epoch":1')):
        with pytest.raises(FormatError, match="canonical"):
            Manifest.decode(data)


def test_history_holds_the_last_versions_newest_first() -> None:
    tip = BOOT
    for number in range(1, HISTORY_ROWS + 10):
        tip = dataclasses.replace(DELTA, number=number, history=extend_history(tip))
    assert len(tip.history) == HISTORY_ROWS
    assert [row.number for row in tip.history] == list(
        range(tip.number - 1, tip.number - 1 - HISTORY_ROWS, -1)
    )
    assert tip.parent == tip.history[0]
    assert Manifest.decode(tip.encode()) == tip


def test_keys() -> None:
    assert DELTA.key == "manifests/000001.e0001.json"
    assert read_manifest_key(manifest_key(1234567, 12345)) == (1234567, 12345)
    assert DELTA.file_key("a") == "runs/run/e0001/weight_v000001/a"


def test_a_head_moves_up_only_and_only_for_its_own_epoch() -> None:
    head = Head(0, 1, BOOT.key, BOOT.digest(), "w")
    moved = head.moved(DELTA, 5.0)
    assert (moved.number, moved.key, moved.digest, moved.writer) == (1, DELTA.key, DELTA.digest(), "w")
    with pytest.raises(ValueError, match="cannot move"):
        moved.moved(DELTA, 6.0)
    claimed = head.claimed("other", 7.0)
    assert (claimed.number, claimed.epoch, claimed.writer, claimed.digest) == (0, 2, "other", head.digest)
    with pytest.raises(ValueError, match="cannot move"):
        claimed.moved(DELTA, 8.0)
