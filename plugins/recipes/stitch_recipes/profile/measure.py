"""One update of a recipe's model on this host, from nothing: base, delta, replica, pause, comparison."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.cli.claim import new_publisher
from stitch_core.cli.common import opened_store, say
from stitch_core.cli.profile_server import HttpServer, free_port
from stitch_core.files import PosixFiles
from stitch_core.manifest import Manifest
from stitch_core.payload import Boot
from stitch_core.ports import Store, SystemClock
from stitch_core.process_memory import listening_process, process_tree, resident
from stitch_core.profile import Profile, Settings, equals_reference, outputs, profile, prompts_of
from stitch_core.profile_moves import Follow, stitch_status
from stitch_core.publisher import Publisher
from stitch_core.scratch import TMPFS, temporary_directory
from stitch_core.traffic import Json

from ..layout import rehearsal
from ..layout.synthesis import synthetic_seed
from ..schema import Recipe
from ..site import read_site
from . import changes
from .bases import Base, Size, given, made
from .engine import EngineUnavailable, Launch, has_gpu, launch, running, until_tested, without_stitch
from .host_path import HostPath, memcpy_rate, staged
from .streaming import Streamed, stream_delta
from .thread_clock import ThreadClock

RUN = "profile"
PROMPTS = 4


@dataclass(frozen=True)
class Asked:
    """What to measure. ``base``: a checkpoint of full size in place of one that is made in ``size``.

    ``engine``: "auto", or "none" for the host path only. ``program``: the ``sglang`` to start.
    """

    recipe: Recipe
    size: Size = "small"
    base: Path | None = None
    change: Literal["synthetic", "training"] = "synthetic"
    engine: Literal["auto", "none"] = "auto"
    program: str | None = None
    reference: bool = True
    traffic: Settings = field(default_factory=lambda: Settings(load=2, idle=2.0))
    seed: int = 0


@dataclass
class Measured:
    """All that came of it.

    ``load_cpu``: seconds that the thread computed which loaded the image, where it was seen.
    ``why_no_engine``: there was none, so that everything of the engine is None; ``why_not_compared``: no
    fresh server answered.
    """

    asked: Asked
    base: Base
    streamed: Streamed
    host: HostPath | None = None
    memcpy: float | None = None
    profile: Profile | None = None
    status: Json = field(default_factory=dict)
    load_cpu: float | None = None
    left_out: tuple[str, ...] = ()
    where: str = ""
    why_no_engine: str | None = None
    why_not_compared: str | None = None


async def measure(asked: Asked, work: Path) -> Measured:
    """Everything on this host: ``work`` takes a store, the checkpoint twice, and logs.

    Raises what making, publishing and staging raise; an engine that cannot serve is no error.
    """
    say(f"{asked.recipe.name}: making the checkpoint")
    base = await asyncio.to_thread(_base, asked, work)
    store_url = f"file:{work / 'store'}"
    in_memory = asked.recipe.engine.canonical_on == "memory"
    async with opened_store(store_url) as store:
        publisher = new_publisher(store, RUN, "recipe profile")
        state = await asyncio.to_thread(lambda: Checkpoint.open(base.directory, PosixFiles()).state())
        before = await publisher.claim(Boot(str(base.directory), state))
        streamed = await asyncio.to_thread(delta_of, asked, base, base.directory, before.number, work)
        result = Measured(asked, base, streamed)
        with temporary_directory(PosixFiles(), base.directory if in_memory else None) as place:
            result.where = "tmpfs" if place.is_relative_to(TMPFS) else "disk"
            chosen, port = _launch(asked, base, store_url, place)
            if isinstance(chosen, str):
                result.why_no_engine = chosen
            else:
                await _replica(result, chosen, port, store, publisher, work)
                await asyncio.to_thread(shutil.rmtree, place / "host", ignore_errors=True)
            target = publisher.head
            if target.number == before.number:
                target = await publisher.publish(streamed.payload)
            async with staged(store, before, target, base.directory, place / "again") as (host, directory):
                result.host = host
                if result.profile is not None and not isinstance(chosen, str):
                    await _compare(result, chosen, directory, work)
    result.memcpy = memcpy_rate(_copied(result) or streamed.bytes)
    return result


def _base(asked: Asked, work: Path) -> Base:
    if asked.base is not None:
        return given(asked.recipe, asked.base)
    return made(asked.recipe, asked.size, work / "base", asked.seed)


def delta_of(asked: Asked, base: Base, directory: Path, number: int, work: Path) -> Streamed:
    """The next version of what ``directory`` holds, version ``number``, as the recipe encodes it."""
    recipe, seed = asked.recipe, synthetic_seed(asked.seed, number + 1)
    if asked.change == "synthetic":
        change = changes.synthetic(base.checkpoint, rehearsal.synthetic(recipe).density, seed)
    else:
        change = changes.training(base.checkpoint, rehearsal.learning_rate(recipe), seed)
    return stream_delta(
        directory, change, work / f"delta-{number + 1:06d}", encoding=recipe.versions.encoding,
        base_number=number,
    )  # fmt: skip


def _launch(asked: Asked, base: Base, store: str, place: Path) -> tuple[Launch | str, int]:
    """The replica's command, or why there is none."""
    port = free_port()
    program = asked.program or _program()
    if asked.engine == "none":
        return "not asked for (--engine none)", port
    if program is None:
        return "there is no sglang on this host: pip install 'stitch-rl[sglang]', or --sglang PATH", port
    site = read_site(None).model_copy(update={"store": store, "run": RUN})
    return launch(
        asked.recipe, site, base.directory, program=program, port=port, gpu=has_gpu(),
        host_dir=place / "host",
    ), port  # fmt: skip


def _program() -> str | None:
    """The ``sglang`` of this environment, else one on the path."""
    own = Path(sys.executable).with_name("sglang")
    return str(own) if own.exists() else shutil.which("sglang")


async def _replica(
    result: Measured, chosen: Launch, port: int, store: Store, publisher: Publisher, work: Path
) -> None:
    """Start the replica, let it take the version under traffic, and end it."""
    result.left_out = chosen.left_out
    say(f"starting the replica: {' '.join(chosen.argv)}")
    settings = result.asked.traffic

    async def publish() -> Manifest:
        return await publisher.publish(result.streamed.payload)

    try:
        async with running(chosen, port, work / "replica.log", "/ready") as server:
            await until_tested(server, settings.patience)
            follow = Follow(server, ChainReader(store), RUN, SystemClock(), settings.patience, publish)
            pid = listening_process(port)
            clock = ThreadClock(process_tree(pid) if pid is not None else ())
            async with clock.watching():
                result.profile = await under_traffic(server, follow, result.asked, port)
            result.load_cpu = clock.longest
            result.status = await stitch_status(server)
    except EngineUnavailable as error:
        result.why_no_engine = f"stock SGLang could not serve it on this host: {error}"


async def under_traffic(server: HttpServer, follow: Follow, asked: Asked, port: int | None) -> Profile:
    """``stitch profile``'s own measurement. ``port``: of a server on this host, for its memory."""
    compared, load = prompts_of(PROMPTS, asked.traffic.load, asked.seed)
    pid = listening_process(port) if port else None

    def memory() -> int | None:
        return None if pid is None else resident(process_tree(pid))

    say(f"version {await follow.serving()} is served")
    result = await profile(server, follow, compared, load, asked.traffic, SystemClock(), memory)
    result.seed = asked.seed
    say(f"{result.moved.version} is served")
    return result


async def _compare(result: Measured, replica: Launch, directory: Path, work: Path) -> None:
    """With a fresh server of the same engine, once the replica has made room for it."""
    if not result.asked.reference:
        result.why_not_compared = "not asked for (--no-reference)"
        return
    say("starting a fresh server from the new version's checkpoint")
    port = free_port()
    stock = without_stitch(replica, directory, port)
    try:
        async with running(stock, port, work / "fresh.log", "/health") as fresh:
            assert result.profile is not None
            await compare(result.profile, fresh)
    except EngineUnavailable as error:  # a row without the comparison is worth more than none
        result.why_not_compared = f"the fresh server did not start: {error}"


async def compare(result: Profile, fresh: HttpServer) -> None:
    """The same prompts of a server that booted from the new version. Raises ServerError."""
    assert result.seed is not None
    compared, _ = prompts_of(PROMPTS, result.settings.load, result.seed)
    await fresh.ask("POST", "/flush_cache")
    answers = await outputs(fresh, compared, result.settings.tokens)
    result.checks.append(equals_reference(result.after, answers))


def _copied(result: Measured) -> int | None:
    return result.profile.moved.copied if result.profile is not None else None
