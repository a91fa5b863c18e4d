"""A reader of sparse files written from docs/format.md alone, sharing no code with Stitch: slow and short."""

import struct
from pathlib import Path

import xxhash
import zstandard

Changes = dict[str, tuple[int, str, str, dict[int, int]]]
"""Each tensor's width, xxh3-128 before and after, and the XOR value at each element that changes."""


def read_sparse(path: Path) -> Changes:
    data = path.read_bytes()
    assert data[:16] == b"STSPARSE" + struct.pack("<II", 1, 0)
    at, stored, raw, tensors, blocks, changes, check = struct.unpack("<7Q", data[-64:-8])
    assert data[-8:] == b"STSPEND1"
    assert check == xxhash.xxh3_64_intdigest(data[at : at + stored] + data[-64:-16])
    tables = zstandard.decompress(data[at : at + stored])
    assert len(tables) == raw

    def column(code: str, count: int) -> list[int]:
        nonlocal tables
        size = struct.calcsize(f"<{count}{code}")
        values, tables = list(struct.unpack(f"<{count}{code}", tables[:size])), tables[size:]
        return values

    lengths = column("I", tensors)
    names = [bytes(column("B", length)).decode() for length in lengths]
    sizes = column("Q", tensors)
    old, new = ([bytes(column("B", 16)).hex() for _ in names] for _ in range(2))
    covered, counts, lengths, widths = (column(code, blocks) for code in "IIIB")
    checks = column("Q", blocks)
    assert (tables, sum(counts), sum(covered)) == (b"", changes, sum(sizes))

    found: list[tuple[int, int, int]] = []  # byte of the byte space, width, value
    position, offset = 0, 16
    for block, (cover, count, width) in enumerate(zip(covered, counts, widths, strict=True)):
        coded = data[offset : offset + lengths[block]]
        assert xxhash.xxh3_64_intdigest(coded) == checks[block]
        found += [(position + p * width, width, value) for p, value in read_block(coded, count, width)]
        position, offset = position + cover, offset + lengths[block]
    result: Changes = {}
    start, edges = 0, list(zip(covered, widths, strict=True))
    for i, name in enumerate(names):
        inside = [row for row in found if start <= row[0] < start + sizes[i]]
        ends, end = [], 0
        for cover, width in edges:
            end += cover
            ends.append((end, width))
        width = next(width for end, width in ends if end > start)
        result[name] = width, old[i], new[i], {(at - start) // width: value for at, _, value in inside}
        start += sizes[i]
    return result


def read_block(coded: bytes, count: int, width: int) -> list[tuple[int, int]]:
    if count == 0:
        return []
    symbols, shift = struct.unpack_from("<IB", coded)
    streams, at = [], 5 + 5 * (2 + width)
    for i in range(2 + width):
        kind, stored = struct.unpack_from("<BI", coded, 5 + 5 * i)
        stream = coded[at : at + stored]
        size = (count * shift + 7) // 8 if i == 0 else symbols if i == 1 else count
        streams.append(stream if kind == 0 else zstandard.decompress(stream) if kind == 1 else bytes(size))
        assert len(streams[-1]) == size
        at += stored
    low = int.from_bytes(streams[0], "little")
    position, high, changes = -1, 0, []
    for symbol in streams[1]:
        high += symbol
        if symbol < 255:
            i = len(changes)
            gap = high << shift | low >> shift * i & (1 << shift) - 1
            position, high = position + gap + 1, 0
            changes.append((position, sum(streams[2 + k][i] << 8 * k for k in range(width))))
    return changes
