"""Stitch in the process that rolls out: set up once, then every request carries its demand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..stores import open_store
from .head_reader import HeadReader
from .rollout import Demand, begin_episode, evaluating, forget_abandoned, install, record, session_of
from .settings import TrainerSettings, read_settings

Generate = Callable[[Any, Any, dict[str, Any]], Awaitable[Any]]
GenerateAndRm = Callable[..., Awaitable[Any]]


class RolloutSide:
    """One framework's rollout process. ``http_module`` has its ``post``, ``package`` is its name."""

    def __init__(self, http_module: Any, package: str) -> None:
        self._http_module, self._package = http_module, package
        self._settings: TrainerSettings | None = None
        self._head: HeadReader | None = None

    def begin(self, args: Any, evaluation: bool) -> None:
        """Before a batch of generations, whose demand is read from the head as it is now."""
        evaluating.set(evaluation)
        self.set_up(args).read()

    def set_up(self, args: Any) -> HeadReader:
        """Read the settings and wrap ``post``; again it only wraps copies that were imported since."""
        if self._settings is None or self._head is None:
            settings = self._settings = read_settings(args)
            self._head = HeadReader(
                lambda: open_store(settings.store), settings.run, patience=settings.patience
            )
        install(Demand(self._settings, self._head.oldest), self._http_module, self._package)
        return self._head

    @property
    def run(self) -> str:
        """Once it is set up."""
        assert self._settings is not None
        return self._settings.run


def recording(generate: Generate) -> Generate:
    """The framework's ``generate(args, sample, sampling_params)``, which then records versions itself."""
    if hasattr(generate, "stitch_wraps"):
        return generate

    async def stitch_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        forget_abandoned(sample)
        episode = begin_episode(evaluating.get(), session_of(sample))
        result = await generate(args, sample, sampling_params)
        for one in result if isinstance(result, list) else [result]:
            record(one, episode)
        return result

    stitch_generate.stitch_wraps = generate  # type: ignore[attr-defined]
    return stitch_generate


def one_episode(generate_and_rm: GenerateAndRm) -> GenerateAndRm:
    """The framework's ``generate_and_rm(args, sample, sampling_params, evaluation)``: what a user's own
    generate function asks, in tasks of its own too, then belongs to the sample."""
    if hasattr(generate_and_rm, "stitch_wraps"):
        return generate_and_rm

    async def stitch_generate_and_rm(
        args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Any:
        begin_episode(evaluation, session_of(sample))
        return await generate_and_rm(args, sample, sampling_params, evaluation=evaluation)

    stitch_generate_and_rm.stitch_wraps = generate_and_rm  # type: ignore[attr-defined]
    return stitch_generate_and_rm
