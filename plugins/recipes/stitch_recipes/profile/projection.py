"""A row of full size from rates that were measured on a small one: arithmetic, every term with its formula.

Pure: rates, sizes and assumptions in, terms out. What a term needs and nobody measured makes it None, and the
sums that it is part of; no other number takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from stitch_core.parallel import MOST_WORKERS

from .assumptions import Assumptions
from .published import Published

CanonicalOn = Literal["memory", "nvme"]

GB = 1e9

APPLY_MOVES = 3
"""Bytes that memory moves for each byte that is applied: read, written, read to be hashed."""

SHORT = 0.1
"""Seconds of a pause beside its copy and a step that need no reason."""

LARGE = 500_000_000
"""Bytes of a checkpoint from which on its rates say something of larger ones."""

LOAD_MOVES = 2
"""And for each that a rank takes: read from the checkpoint, written into the image."""


@dataclass(frozen=True)
class Rates:
    """What was measured. GB/s where nothing else is said; ``of`` says of what.

    ``bytes`` is the size of the checkpoint, ``ratio`` that of a delta over it. ``apply`` and ``hash`` are for
    one thread, and ``load`` for one rank, which hashes all and takes it into its image; all in bytes of the
    checkpoint for a second that it computed.
    ``copy``: the copy in the pause, over one thread's memcpy of the same bytes, as a rate; ``rest``: seconds
    of the pause beside the copy and the decoding step that it waits for.
    ``engine_of``: where the last three are those of another model.
    """

    of: str
    bytes: int
    ratio: float
    fetch: float
    apply: float
    load: float | None = None
    copy: float | None = None
    rest: float | None = None
    engine_of: str | None = None
    hash: float | None = None

    def with_engine_of(self, other: Rates) -> Rates:
        """The rates of the engine from another model's profile, where this one has none."""
        if self.load is not None:
            return self
        return replace(
            self, load=other.load, hash=other.hash, copy=other.copy, rest=other.rest, engine_of=other.of
        )


@dataclass(frozen=True)
class Sizes:
    """Of full size, in bytes. ``image`` of one rank; ``assumed`` says what is not published."""

    canonical: float
    image: float
    ranks: int
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Term:
    """``seconds`` is None where what it needs was not measured. ``part`` of the row that it counts for."""

    name: str
    part: Literal["preparation", "pause"]
    seconds: float | None
    formula: str
    assumes: str = ""


@dataclass(frozen=True)
class Projection:
    """A row of full size. ``why``: what makes it differ from what was published."""

    recipe: str
    canonical_on: CanonicalOn
    rates: Rates
    sizes: Sizes
    assumptions: Assumptions
    terms: tuple[Term, ...]
    published: Published | None

    @property
    def preparation(self) -> float | None:
        return self._sum("preparation")

    @property
    def pause(self) -> float | None:
        return self._sum("pause")

    @property
    def total(self) -> float | None:
        parts = (self.preparation, self.pause)
        return None if None in parts else sum(part for part in parts if part is not None)

    def ratios(self) -> dict[str, float]:
        """Ours over theirs, of what both have."""
        if self.published is None:
            return {}
        names = ("preparation", "pause", "total")
        both = {name: (getattr(self, name), getattr(self.published, name)) for name in names}
        return {name: ours / theirs for name, (ours, theirs) in both.items() if ours and theirs}

    def why(self) -> list[str]:
        """Reasons for a difference, those that apply here."""
        return list(_reasons(self))

    def report(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "recipe": self.recipe, "canonical_on": self.canonical_on, "preparation": self.preparation,
            "pause": self.pause, "total": self.total, "terms": [asdict(term) for term in self.terms],
            "rates": asdict(self.rates), "sizes": asdict(self.sizes), "assumptions": asdict(self.assumptions),
            "published": self.published.model_dump() if self.published else None, "ratios": self.ratios(),
            "why": self.why(),
        }  # fmt: skip

    def _sum(self, part: str) -> float | None:
        seconds = [term.seconds for term in self.terms if term.part == part]
        return None if None in seconds else sum(one for one in seconds if one is not None)


def project(
    recipe: str,
    canonical_on: CanonicalOn,
    rates: Rates,
    sizes: Sizes,
    assumptions: Assumptions,
    published: Published | None = None,
) -> Projection:
    """The terms of one update of ``recipe`` at full size."""
    terms = (
        _fetch(rates, sizes, assumptions),
        _apply(rates, sizes, assumptions, canonical_on),
        _load(rates, sizes, assumptions, canonical_on),
        _copy(rates, sizes, assumptions),
        _rest(rates, assumptions),
    )  # fmt: skip
    return Projection(recipe, canonical_on, rates, sizes, assumptions, terms, published)


def _fetch(rates: Rates, sizes: Sizes, a: Assumptions) -> Term:
    size = rates.ratio * sizes.canonical / GB
    rate = min(rates.fetch, a.network)
    return Term(
        "fetch and verify the delta", "preparation", size / rate,
        f"{sizes.canonical / GB:.1f} GB x {100 * rates.ratio:.2f} % / min({rates.fetch:.2f} measured, "
        f"{a.network:g} network) GB/s",
        "the ratio of the small model's delta; the store's network is no slower than assumed",
    )  # fmt: skip


def _apply(rates: Rates, sizes: Sizes, a: Assumptions, canonical_on: CanonicalOn) -> Term:
    """Every byte is read, hashed and, in what changed, written: on NVMe once each way."""
    threads = rates.apply * a.workers
    medium = a.memory / APPLY_MOVES if canonical_on == "memory" else a.nvme / 2
    said = f"{a.memory:g} memory / {APPLY_MOVES}" if canonical_on == "memory" else f"{a.nvme:g} NVMe / 2"
    return Term(
        "verify and apply to the canonical checkpoint", "preparation",
        sizes.canonical / GB / min(threads, medium),
        f"{sizes.canonical / GB:.1f} GB / min({rates.apply:.2f} measured x {a.workers} threads, {said}) GB/s",
        "threads do not hold each other up below the limit of the medium",
    )  # fmt: skip


def _load(rates: Rates, sizes: Sizes, a: Assumptions, canonical_on: CanonicalOn) -> Term:
    """Every rank hashes the whole checkpoint, on several threads, and takes its share of it on one."""
    name = "load into each rank's image"
    if rates.load is None or rates.hash is None:
        return Term(name, "preparation", None, _absent(rates))
    threads = a.shared(2 * sizes.ranks)
    limits = [
        (rates.hash * threads, f"{rates.hash:.2f} measured x {threads} threads"),
        (a.memory / sizes.ranks, f"{a.memory:g} memory / {sizes.ranks} ranks"),
    ]
    if canonical_on == "nvme":
        limits.append((a.nvme, f"{a.nvme:g} NVMe"))
    hashing = sizes.canonical / GB / min(rate for rate, _ in limits)
    computed = max(0.0, 1 / rates.load - 1 / rates.hash)
    shared = LOAD_MOVES * sizes.ranks / a.memory
    taking = sizes.image / GB * max(computed, shared)
    seconds = hashing + taking if threads == 1 else max(hashing, taking)
    of = "sum of" if threads == 1 else "longer of"
    return Term(
        name, "preparation", seconds,
        f"{of} {sizes.canonical / GB:.1f} GB / min({', '.join(said for _, said in limits)}) GB/s hashed, and "
        f"{sizes.image / GB:.1f} GB x max({computed:.3f} measured, {LOAD_MOVES} x {sizes.ranks} ranks / "
        f"{a.memory:g} memory) s/GB taken",
        "a rank's loader is as fast as the small BF16 model's on this CPU; ranks read a page of NVMe once",
    )  # fmt: skip


def _copy(rates: Rates, sizes: Sizes, a: Assumptions) -> Term:
    name = "copy of the image to the GPU"
    if rates.copy is None:
        return Term(name, "pause", None, _absent(rates))
    rate = min(a.pcie, a.memory / sizes.ranks)
    return Term(
        name, "pause", sizes.image / GB / (rate * rates.copy),
        f"{sizes.image / GB:.1f} GB / (min({a.pcie:g} PCIe, {a.memory:g} memory / {sizes.ranks} ranks) GB/s "
        f"x {rates.copy:.2f} measured of memcpy)",
        "a page-locked copy keeps as much of PCIe as the CPU's keeps of memcpy; every segment changed",
    )  # fmt: skip


def _rest(rates: Rates, a: Assumptions) -> Term:
    name = "wait for a step, and the rest of the pause"
    if rates.rest is None:
        return Term(name, "pause", None, _absent(rates))
    return Term(
        name, "pause", a.step + rates.rest, f"{a.step:g} s a step + {rates.rest:.3f} s measured beside it",
        "pausing and going on cost a large model's ranks what they cost here",
    )  # fmt: skip


def _absent(rates: Rates) -> str:
    return f"not measured: no engine served {rates.of} on this host"


def _reasons(p: Projection) -> Iterator[str]:
    if p.rates.bytes < LARGE:
        yield (
            f"the rates are those of {p.rates.bytes / GB:.3f} GB: what every update costs counts for much; "
            "measure with --size medium or full"
        )
    if p.rates.engine_of is not None:
        yield (
            f"the engine's rates are those of {p.rates.engine_of}: this host's engine does not serve the "
            "format, and a quantized load does more, on a GPU"
        )
    if p.rates.load is not None and p.sizes.ranks > 1:
        yield (
            f"each of {p.sizes.ranks} ranks hashes the whole checkpoint, and takes its share on one thread; "
            "the reference's post-process on the GPU"
        )
    if p.rates.rest is not None and p.rates.rest > SHORT:
        yield (
            f"{p.rates.rest:.2f} s of the pause are a CPU's, whose decoding step took longer while it staged"
        )
    if p.canonical_on == "nvme":
        yield "reads of NVMe are counted at the disk's rate; what the host's page cache keeps is not known"
    if p.published is not None and p.published.note is None:
        yield "the published row is one sample, of a synthetic delta"
    if p.assumptions.workers == MOST_WORKERS:
        yield f"at most {MOST_WORKERS} threads apply, however many cores there are"
    yield "no GPU was there: bandwidths, page-locked copies and the load's kernels are assumed, not measured"
