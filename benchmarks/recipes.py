"""Update times of the recipes: measured on this CPU, projected to full size, and published by others.

Rows R were measured here by `stitch recipe profile`, on checkpoints with the models' tensors, scaled down
but where it says full. Rows P are arithmetic on these rates, with assumptions about hosts that are not here;
rows V are what the public reference has published (recipes/published.toml). Needs the environment of `make
venv-sglang`; without it only the way to the host checkpoint is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(path) for path in (ROOT / "plugins").iterdir())]

from benchmarks.activation import sglang_python  # noqa: E402
from benchmarks.harness import Row, at_least, run, say  # noqa: E402
from recipes.local.sglang_server import environment  # noqa: E402
from stitch_core.cli.common import size_text  # noqa: E402
from stitch_core.profile import Settings  # noqa: E402
from stitch_core.traffic import Json  # noqa: E402
from stitch_recipes import catalogue  # noqa: E402
from stitch_recipes.profile.assumptions import Assumptions  # noqa: E402
from stitch_recipes.profile.bases import Size  # noqa: E402
from stitch_recipes.profile.measure import Asked, measure  # noqa: E402
from stitch_recipes.profile.projection import Projection, Rates, project  # noqa: E402
from stitch_recipes.profile.published import of_recipe  # noqa: E402
from stitch_recipes.profile.row import rates_of, row_of  # noqa: E402
from stitch_recipes.profile.sizes import sizes_of  # noqa: E402

ROOM = 12 << 30
"""Bytes that the largest run takes: a checkpoint of 1.2 GB, its copies, images."""

FULL: tuple[tuple[str, Size], ...] = (
    ("qwen3-0.6b/miles", "full"),  # its engine's rates are those of all projections
    ("qwen3-30b-a3b/miles", "medium"),
    ("glm-4.5-air/bf16", "medium"),
    ("glm-4.5-air/fp8-serve", "medium"),
    ("glm-4.7-flash/code", "medium"),
    ("glm-5.2/fp8", "medium"),
    ("glm-5.2/nvfp4", "medium"),
    ("kimi-k2.6/nvfp4-serve", "medium"),
    ("kimi-k3/mxfp4-serve", "medium"),
)
QUICK: tuple[tuple[str, Size], ...] = (("qwen3-0.6b/miles", "small"), ("kimi-k3/mxfp4-serve", "small"))
PARTS = ("preparation", "pause", "total")


@dataclass
class Case:
    """One recipe: its row, its rates, and what follows from them."""

    number: int
    row: Json
    rates: Rates
    projection: Projection | None = None


async def measured(options: argparse.Namespace, work: Path) -> list[Case]:
    """Every recipe in turn: two cores are no place for two servers."""
    python = sglang_python()
    if python is None:
        say("recipes.py: no engine is started without SGLang's environment: make venv-sglang")
    else:
        os.environ.update(environment(work, {}))
    cases: list[Case] = []
    for number, (name, size) in enumerate(QUICK if options.quick else FULL, 1):
        tries = python is not None and not (options.quick and cases)
        asked = Asked(
            catalogue.load(name), size, engine="auto" if tries else "none",
            program=str(python.with_name("sglang")) if python else None, reference=not options.quick,
            traffic=Settings(8, 2, 16, 1.0 if options.quick else 4.0, patience=900.0),
        )  # fmt: skip
        scratch = work / name.replace("/", "-")
        scratch.mkdir()
        result = await measure(asked, scratch)
        shutil.rmtree(scratch)
        row = row_of(result)
        cases.append(Case(number, row, rates_of(result)))
        say(f"{name}: {row['preparation']}, {row['pause']}, ok {row['ok']}; load {os.getloadavg()[0]:.1f}")
    engine = cases[0].rates
    for case in () if options.quick else cases:  # what every update costs would be multiplied by 100,000
        recipe = catalogue.load(str(case.row["recipe"]))
        where = recipe.engine.canonical_on
        rates = case.rates.with_engine_of(engine)
        theirs = of_recipe(recipe.name, where)
        case.projection = project(recipe.name, where, rates, sizes_of(recipe), Assumptions(), theirs)
    return cases


def rows(cases: list[Case]) -> Iterator[Row]:
    """All rows of all cases. What was not measured has no row; the host path's says so."""
    for case in cases:
        yield from of_case(case)


def of_case(case: Case) -> Iterator[Row]:
    row, n, p = case.row, case.number, case.projection
    name, checkpoint = row["recipe"], row["checkpoint"]
    what = f"{name}, {checkpoint['size']}, {size_text(checkpoint['bytes'])}, measured here on a CPU"
    out = "; ".join(row["excludes"])
    before = row["preparation"]
    values = {"preparation": before["total"], "pause": row["pause"]["total"], "total": row["total"]}
    if before["total"] is None:
        values = {"fetch, verify and apply only": before["fetch"] + before["apply"]}
    for letter, (part, value) in zip("abc", values.items(), strict=False):
        if value is not None:
            yield Row(f"R{n}{letter}", f"{part}, s: {what}", value, excludes=out)
    if row["checks"]:
        passed = sum(check["ok"] for check in row["checks"]) / len(row["checks"])
        yield at_least(f"R{n}d", f"checks that pass, of {len(row['checks'])}: {name}", passed, 1.0)
    if p is None:
        return
    for letter, part in zip("abc", PARTS, strict=True):
        value = getattr(p, part)
        if value is not None:
            yield Row(
                f"P{n}{letter}", f"{part}, s: {name} at full size, projected", value,
                excludes="; ".join(p.why()),
            )  # fmt: skip
    for letter, part in zip("abc", PARTS, strict=True):
        theirs = getattr(p.published, part) if p.published else None
        if p.published and theirs is not None:
            yield Row(
                f"V{n}{letter}", f"{part}, s: {p.published.what}, published by the public reference",
                theirs, excludes=p.published.note or "one sample, synthetic deltas",
            )  # fmt: skip


def table(cases: list[Case]) -> str:
    """README's table, from the same values."""
    lines = [
        "| recipe | measured here: CPU, scaled | projected: full size, GPUs | published: public reference |",
        "|---|---|---|---|",
    ]
    for case in cases:
        row, p = case.row, case.projection
        before = row["preparation"]
        size = f"{row['checkpoint']['size']}, {size_text(row['checkpoint']['bytes'])}"
        if before["total"] is None:
            here = f"host only {before['fetch'] + before['apply']:.2f} ({size})"
        else:
            here = f"{_three(before['total'], row['pause']['total'], row['total'])} ({size})"
        ours = _three(p.preparation, p.pause, p.total) if p else "-"
        theirs = (
            _three(p.published.preparation, p.published.pause, p.published.total)
            if p and p.published
            else "-"
        )
        lines.append(f"| `{row['recipe']}` | {here} | {ours} | {theirs} |")
    return "\n".join(lines) + "\n"


def _three(*values: float | None) -> str:
    """Three digits, and whole numbers from 100 on."""
    shown = (
        value if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values
    )
    return " / ".join(text or "-" for text in shown)


def main(options: argparse.Namespace) -> list[Row]:
    memory = Path("/dev/shm")
    room = memory.is_dir() and shutil.disk_usage(memory).free > ROOM
    say(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} CPUs")
    with tempfile.TemporaryDirectory(
        prefix="stitch-recipes-", dir=options.work or (memory if room else None)
    ) as name:
        cases = asyncio.run(measured(options, Path(name)))
    if options.table:
        options.table.write_text(table(cases))
    return list(rows(cases))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, help="scratch space (/dev/shm if it has 12 GiB)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write README's table there, too")


if __name__ == "__main__":
    run(__doc__ or "", main, add_options)
