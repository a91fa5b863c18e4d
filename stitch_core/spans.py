"""Which spans a run ought to have, so that a joiner needs few pieces however long the run is. Pure.

One aggregate leads from the run's root (version 0, or where deltas stop to be reversible) to the last
multiple of 16. What is above it is merged by fours, and each four fours to a block, of which the next
aggregate is made: a joiner at any version takes an aggregate, at most three fours and at most three deltas.
Numbers that the run left out move an edge down to the version below.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Versions in a four and in a block. Fours are made for the ``window`` newest versions: older ones would
    serve hardly anybody. ``kept`` aggregates stay.
    """

    four: int = 4
    block: int = 16
    window: int = 64
    kept: int = 2


SHAPE = Shape()

Range = tuple[int, int]


def edges(numbers: Sequence[int], size: int) -> list[int]:
    """The number at or below each multiple of ``size``, up to the last of the ascending ``numbers``."""
    found = [n for n, after in itertools.pairwise(numbers) if -(-n // size) * size < after]
    return found + [n for n in numbers[-1:] if n % size == 0]


def wanted(numbers: Sequence[int], root: int, shape: Shape = SHAPE) -> list[Range]:
    """The spans that ought to be there above ``numbers[0]``; each is made of those before it.

    ``numbers`` are the versions from the newest aggregate's, or from the root, to the head, ascending.
    """
    at = {number: i for i, number in enumerate(numbers)}
    ends, head = edges(numbers, shape.block), numbers[-1]
    fours = [(a, b) for a, b in itertools.pairwise(edges(numbers, shape.four)) if b > head - shape.window]
    ranges = fours + list(itertools.pairwise(ends))
    ranges = [(a, b) for a, b in ranges if at[b] - at[a] > 1]
    if ends and ends[-1] > max(numbers[0], root + 1):
        ranges.append((root, ends[-1]))
    return list(dict.fromkeys(ranges))


def newest_aggregate(numbers: Sequence[int], ranges: Iterable[Range], root: int, shape: Shape = SHAPE) -> int:
    """Where the newest aggregate among the spans ``ranges`` ends; the root if there is none."""
    ends = set(edges(numbers, shape.block))
    return max((b for a, b in ranges if a == root and b in ends), default=root)


def replaced(ranges: Iterable[Range], root: int, shape: Shape = SHAPE) -> list[Range]:
    """Aggregates among ``ranges`` that newer ones have replaced. One of a single block is that as well."""
    aggregates = sorted((a, b) for a, b in ranges if a == root and b - a > shape.block)
    return aggregates[: -shape.kept]
