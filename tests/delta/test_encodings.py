"""One tensor's delta: frames, the two encodings, and apply."""

import contextlib
import itertools
import struct
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.delta import DeltaError, overwrite, wire, xor

from .frames import apply_deltas, decompress

PAIRS = st.integers(0, 300).flatmap(lambda n: st.tuples(*[st.binary(min_size=n, max_size=n)] * 2))


@given(PAIRS)
def test_both_encodings_turn_old_into_new(pair: tuple[bytes, bytes]) -> None:
    old, new = pair
    for encoding, module in (("xor", xor), ("overwrite", overwrite)):
        frame = module.encode(old, new)
        assert apply_deltas(old, [(encoding, frame)]).tobytes() == new
        assert zstandard.frame_content_size(frame) >= 0
        assert wire.frame_length(frame) == len(frame)


@given(st.lists(st.binary(min_size=9, max_size=9), min_size=1, max_size=5), st.data())
def test_a_chain_of_any_encodings_is_one_pass(states: list[bytes], data: st.DataObject) -> None:
    deltas = []
    for old, new in itertools.pairwise(states):
        encoding = data.draw(st.sampled_from(["xor", "overwrite"]))
        deltas.append((encoding, {"xor": xor, "overwrite": overwrite}[encoding].encode(old, new)))
    assert apply_deltas(states[0], deltas).tobytes() == states[-1]


def test_slime_by_hand() -> None:
    """What the stock writers produce, put together here without our encoders."""
    compressor = zstandard.ZstdCompressor(level=1)
    diff = bytes([0, 3, 0, 0, 1])
    assert xor.encode(
        b"abcde", bytes(a ^ b for a, b in zip(b"abcde", diff, strict=True))
    ) == compressor.compress(diff)
    body = struct.pack("<I", 2) + struct.pack("<II", 1, 4) + b"XY"
    assert overwrite.encode(b"abcde", b"aXcdY") == compressor.compress(body)


def streamed(data: bytes) -> bytes:
    """A frame without its content size."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize("size", [0, 1, 1000, wire.CHUNK_BYTES, wire.CHUNK_BYTES * 2 + 5])
def test_frames_without_content_size_and_with_checksums(size: int) -> None:
    old = np.random.default_rng(0).bytes(size)
    diff = bytes(size)
    checked = zstandard.ZstdCompressor(level=3, write_checksum=True, threads=0).compress(diff)
    for frame in (streamed(diff), checked, wire.compress(diff)):
        assert apply_deltas(old, [("xor", frame)]).tobytes() == old
        assert decompress(frame, size).tobytes() == diff


FRAME = wire.compress(b"x" * 100)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (FRAME + b"\x00", "not one zstd frame"),
        (FRAME + FRAME, "not one zstd frame"),
        (FRAME[:-1], "cut short"),
        (b"", "cut short"),
        (b"junk and more junk", "not a zstd frame"),
        (b"\x50\x2a\x4d\x18\x00\x00\x00\x00" + FRAME, "not a zstd frame"),  # a skippable frame before it
        (wire.compress(b"x" * 99), "1 bytes early"),
        (wire.compress(b"x" * 101), "more bytes"),
        (streamed(b"x" * 99), "1 bytes early"),
        (streamed(b"x" * 101), "more bytes"),
    ],
)
def test_a_frame_must_hold_exactly_the_tensor(frame: bytes, words: str) -> None:
    with pytest.raises(DeltaError, match=words):
        apply_deltas(bytes(100), [("xor", frame)])
    with pytest.raises(DeltaError):
        apply_deltas(bytes(100), [("overwrite", frame)])


@given(st.integers(0, len(FRAME) - 1), st.integers(1, 255), st.booleans())
def test_damage_is_an_error_or_other_bytes_but_nothing_else(at: int, flip: int, cut: bool) -> None:
    damaged = bytearray(FRAME)
    damaged[at] ^= flip
    with contextlib.suppress(DeltaError):
        decompress(bytes(damaged[:at] if cut else damaged), 100)


def test_a_bomb_does_not_go_off() -> None:
    bomb = streamed(bytes(200 << 20))
    assert len(bomb) < 1 << 20
    for encoding in ("xor", "overwrite"):
        apply_deltas(b"", [])
        tracemalloc.start()
        with pytest.raises(DeltaError):
            apply_deltas(bytes(100), [(encoding, bomb)])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20
    with pytest.raises(DeltaError, match="4294967295 bytes in a tensor of 100"):
        apply_deltas(bytes(100), [("overwrite", wire.compress(b"\xff\xff\xff\xff"))])


@pytest.mark.parametrize("positions", [[4], [1, 1], [2, 1]])
def test_overwrite_positions_must_ascend_within_the_tensor(positions: list[int]) -> None:
    n = len(positions)
    frame = wire.compress(struct.pack(f"<I{n}I", n, *positions) + bytes(n))
    old = bytearray(b"abcd")
    with pytest.raises(DeltaError, match="ascending"):
        apply_deltas(old, [("overwrite", frame)])
    assert old == b"abcd"


def test_C16_positions_have_64_bits() -> None:
    size = (1 << 32) + 10
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    zeros = bytes(64 << 20)
    parts = [compressor.compress(zeros) for _ in range(64)]
    frame = b"".join([*parts, compressor.compress(bytes(9) + b"!"), compressor.flush()])
    seen = 0
    for at, chunk in wire.read_chunks(frame, size):
        assert at == seen
        seen += chunk.size
        if seen == size:
            assert chunk[-1] == ord("!")
            assert at >= 1 << 32
    assert seen == size


def test_C16_overwrite_refuses_a_tensor_over_4_GiB() -> None:
    with pytest.raises(DeltaError, match="use xor"):
        overwrite.check_size((1 << 32) + 1)
    overwrite.check_size(1 << 32)


def test_threads_have_contexts_of_their_own() -> None:
    rng = np.random.default_rng(0)
    old = [rng.bytes(3 << 20) for _ in range(2)]
    new = [rng.bytes(3 << 20) for _ in range(2)]
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(3):
            if apply_deltas(old[i], [("xor", xor.encode(old[i], new[i]))]).tobytes() != new[i]:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
