"""``stitch recipe profile``: one update of a recipe's model, measured on this host and projected."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stitch_core.cli.common import (
    Commands,
    UsageError,
    absolute_path,
    add_command,
    count,
    emit,
    interval,
    positive,
    scratch,
    seconds,
)

if TYPE_CHECKING:
    from .profile.measure import Measured
    from .profile.projection import Projection, Rates

LIVE = ("server", "store", "run_id", "reference")


def add_parser(actions: Commands) -> None:
    parser = add_command(
        actions, "profile", run_profile, "what one update of a recipe costs, here and projected",
        "Make the recipe's checkpoint and its next version, publish both, start the recipe's own engine,\n"
        "and let it take the update under traffic. Checked as by 'stitch profile': every request is\n"
        "answered, the output changes, and equals a fresh server's. Reported: preparation, pause, total,\n"
        "bytes, memory, and what is excluded. Without a GPU the engine runs on the CPU where it can; where\n"
        "it cannot, the row says why, and has the way to the host checkpoint only.\n\n"
        "  stitch recipe profile qwen3-0.6b/miles\n"
        "  stitch recipe profile glm-4.5-air/fp8-serve --base /models/glm-4.5-air-fp8 --project\n\n"
        "A replica that serves already takes the update with --server, --store, --run and --base, version 0\n"
        "of the run. This claims the run, which fences its trainer: use a run of its own.\n\n"
        "Exit code 1 when a check fails.",
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "--size", choices=("small", "medium", "full"), default="small",
        help="of the checkpoint that is made, of random weights (small; full is the model's own size)",
    )  # fmt: skip
    parser.add_argument(
        "--base", type=absolute_path, metavar="DIR", help="a checkpoint of the recipe, in place of one made"
    )
    parser.add_argument(
        "--change", choices=("synthetic", "training"), default="synthetic",
        help="how dense the delta is: as the public table's (synthetic), or as a step at the recipe's rate",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=count, default=0, metavar="N", help="of weights, changes and prompts (0)"
    )
    parser.add_argument(
        "--work", type=absolute_path, metavar="DIR", help="scratch space (default: a temporary directory)"
    )
    _add_engine(parser)
    _add_projection(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the engine")
    group.add_argument(
        "--engine", choices=("auto", "none"), default="auto", help="none: the way to the host checkpoint only"
    )
    group.add_argument("--sglang", metavar="PATH", help="the program to start (default: this environment's)")
    group.add_argument("--no-reference", action="store_true", help="do not compare with a fresh server")
    group.add_argument("--load", type=positive, default=2, metavar="N", help="streams of traffic (2)")
    group.add_argument("--idle", type=seconds, default=2.0, metavar="S", help="traffic before the update (2)")
    group.add_argument(
        "--patience", type=interval, default=1800.0, metavar="S", help="the longest wait for anything (1800)"
    )
    live = parser.add_argument_group("a replica that serves already")
    live.add_argument("--server", metavar="URL", help="the replica")
    live.add_argument("--store", metavar="URL", help="the store that it follows")
    live.add_argument("--run", metavar="ID", dest="run_id", help="the run that it follows")
    live.add_argument("--reference", metavar="URL", help="a server of the new version, to compare with")


def _add_projection(parser: argparse.ArgumentParser) -> None:
    from .profile.assumptions import MEANING, Assumptions

    group = parser.add_argument_group(
        "projection", "From this run's rates to full size; what follows is assumed, not measured."
    )
    group.add_argument("--project", action="store_true", help="every term, beside the published row")
    group.add_argument(
        "--rates", type=Path, metavar="FILE",
        help="what --json said of another recipe, for the engine's rates where none served this one",
    )  # fmt: skip
    defaults = Assumptions()
    for name, meaning in MEANING.items():
        value = getattr(defaults, name)
        kind: Any = positive if isinstance(value, int) else interval
        group.add_argument(f"--{name}", type=kind, default=value, metavar="N", help=f"{meaning} ({value:g})")


async def run_profile(options: argparse.Namespace) -> int:
    from stitch_core.profile_moves import NotMoved
    from stitch_core.traffic import ServerError

    from . import catalogue
    from .profile.live import Replica, measure_live
    from .profile.measure import Asked, measure
    from .profile.row import describe, rates_of, row_of

    given = [name for name in LIVE if getattr(options, name) is not None]
    if given and (len({*given, "reference"}) < len(LIVE) or options.base is None):
        raise UsageError("--server, --store, --run and --base go together; --reference is for them only")
    asked = Asked(
        catalogue.load(options.name), options.size, options.base, options.change, options.engine,
        options.sglang, not options.no_reference, _traffic(options), options.seed,
    )  # fmt: skip
    others = _others(options.rates)
    with scratch(options.work) as work:
        try:
            if given:
                replica = Replica(options.server, options.store, options.run_id, options.reference)
                result = await measure_live(asked, replica, work)
            else:
                result = await measure(asked, work)
        except (ServerError, NotMoved, TimeoutError) as error:
            raise UsageError(str(error) or f"a wait ended after {options.patience:g} s") from error
    row = row_of(result)
    lines = [describe(row)]
    row["rates"] = _rates(rates_of(result))
    if options.project:
        projected = _projected(options, result, others)
        row["projection"] = projected.report()
        lines.append(_said(projected))
    emit(row, options.json, lambda: "\n\n".join(lines))
    return 0 if row["ok"] in (True, None) else 1


def _traffic(options: argparse.Namespace) -> Any:
    from stitch_core.profile import Settings

    return Settings(load=options.load, idle=options.idle, patience=options.patience)


def _projected(options: argparse.Namespace, result: Measured, others: Rates | None) -> Projection:
    from .profile.assumptions import Assumptions
    from .profile.projection import project
    from .profile.published import of_recipe
    from .profile.row import rates_of
    from .profile.sizes import sizes_of

    recipe = result.asked.recipe
    rates = rates_of(result)
    if others is not None:
        rates = rates.with_engine_of(others)
    assumed = Assumptions(**{field.name: getattr(options, field.name) for field in fields(Assumptions)})
    canonical_on = recipe.engine.canonical_on
    return project(
        recipe.name, canonical_on, rates, sizes_of(recipe), assumed, of_recipe(recipe.name, canonical_on)
    )


def _rates(rates: Rates) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(rates)


def _others(path: Path | None) -> Rates | None:
    """The rates in another profile's JSON. Raises UsageError."""
    from .profile.projection import Rates

    if path is None:
        return None
    try:
        rates = Rates(**json.loads(path.read_text("utf-8"))["rates"])
    except OSError as error:
        raise UsageError(f"--rates {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--rates {path}: not what 'stitch recipe profile --json' prints ({error!r})"
        ) from None
    if rates.load is None:
        raise UsageError(f"--rates {path}: it has no rates of an engine either")
    return rates


def _said(p: Projection) -> str:
    """The projection in words: every term, the published row, and why they differ."""
    lines = [
        f"projected to full size, NOT measured: {p.recipe}, canonical in {p.canonical_on}, "
        f"{p.sizes.ranks} ranks, from the rates of {p.rates.of}"
    ]
    for term in p.terms:
        lines.append(f"  {_s(term.seconds):>10}  {term.part}: {term.name} = {term.formula}")
        if term.assumes and term.seconds is not None:
            lines.append(f"{'':14}assumes: {term.assumes}")
    lines += [f"{'':14}assumes: {one}" for one in p.sizes.assumed]
    ours = {"preparation": p.preparation, "pause": p.pause, "total": p.total}
    lines += [f"  {_s(value):>10}  {name}" for name, value in ours.items()]
    if p.published is None:
        lines.append("nobody has published a row of this checkpoint")
    else:
        theirs, ratios = p.published, p.ratios()
        lines.append(f"published by {theirs.source} of the public reference: {theirs.what}, {theirs.path}")
        for name in ours:
            ratio = f"ours / theirs {ratios[name]:.2f}" if name in ratios else "no ratio"
            lines.append(f"  {_s(getattr(theirs, name)):>10}  {name} ({ratio})")
    return "\n".join([*lines, *(f"why they differ: {one}" for one in p.why())])


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
