"""What the tests of sparse deltas share: tensors that change, and the deltas between them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from stitch_core.delta.sparse_encode import Source, encode_sparse
from stitch_core.delta.sparse_file import SparseFile
from stitch_core.delta.sparse_layout import Changed
from stitch_core.files import PosixFiles
from stitch_core.safetensors import as_bytes
from stitch_core.state import tensor_digest

FILES = PosixFiles()
Weights = dict[str, bytes]


def delta(
    path: Path,
    old: Weights,
    new: Weights,
    widths: Mapping[str, int],
    *,
    workers: int = 1,
    file_bytes: int = 1 << 30,
) -> list[SparseFile]:
    """The sparse files below ``path`` that turn ``old`` into ``new``."""
    path.mkdir(parents=True, exist_ok=True)
    sources = [Source(n, as_bytes(old[n]), as_bytes(new[n]), widths[n], tensor_digest(old[n])) for n in old]
    paths, changed, stats = encode_sparse(
        sources, lambda i: path / f"{i}.sparse", FILES, workers=workers, file_bytes=file_bytes
    )
    assert sorted(path.iterdir()) == sorted(paths)
    files = [SparseFile(p, FILES) for p in paths]
    assert {n: row for file in files for n, row in file.tensors.items()} == changed == rows(old, new, widths)
    assert (stats.tensors, stats.bytes) == (len(old), sum(map(len, old.values())))
    assert stats.changed_elements == sum(file.changes for file in files)
    assert stats.encoded_bytes == sum(p.stat().st_size for p in paths)
    return files


def rows(old: Weights, new: Weights, widths: Mapping[str, int]) -> dict[str, Changed]:
    return {
        n: Changed(len(new[n]), widths[n], tensor_digest(old[n]), tensor_digest(new[n]))
        for n in old
        if old[n] != new[n]
    }


@st.composite
def chains(draw: st.DrawFn, length: int = 3) -> tuple[list[Weights], dict[str, int]]:
    """Versions of the same few tensors, with every width and density, and those widths."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = st.sampled_from([0, 1, 2, 3, 7, 8, 9, 255, 256, 1000, 4096, 70_000])
    layout = draw(
        st.dictionaries(
            st.text(min_size=1, max_size=5), st.tuples(sizes, st.sampled_from([1, 2, 4, 8])), max_size=6
        )
    )
    versions = [{name: rng.bytes(count * width) for name, (count, width) in layout.items()}]
    for _ in range(length):
        density = draw(st.sampled_from([0.0, 0.0001, 0.001, 0.003, 0.01, 0.1, 1.0]))
        versions.append({n: moved(rng, data, density, layout[n][1]) for n, data in versions[-1].items()})
        if draw(st.booleans()):  # goes back, in part
            versions[-1] |= dict(list(versions[0].items())[:2])
    return versions, {name: width for name, (_, width) in layout.items()}


def moved(rng: np.random.Generator, data: bytes, density: float, width: int) -> bytes:
    words = np.frombuffer(data, f"<u{width}").copy()
    chosen = rng.random(words.size) < density
    words[chosen] ^= rng.integers(1, 1 << 8 * width, int(chosen.sum()), f"u{width}", endpoint=False)
    return words.tobytes()
