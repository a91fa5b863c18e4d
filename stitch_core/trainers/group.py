"""Groups of trainer processes, and doing one thing in all of them with one outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..ports import TrainerGroup

T = TypeVar("T")


class RanksFailed(Exception):
    """At least one process of the trainer failed; every process raises it, with every message."""


class Solo:
    """A trainer of one process."""

    rank, size = 0, 1

    def gather(self, value: T) -> list[T]:
        return [value]


class ProcessGroup:
    """A ``torch.distributed`` group that moves Python objects, such as the framework's gloo group.

    ``distributed`` is that module (an argument, since the core imports no torch); None is the default group.
    """

    def __init__(self, distributed: Any, group: Any = None) -> None:
        self._distributed, self._group = distributed, group
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        self._distributed.all_gather_object(values, value, group=self._group)
        return values


def together(group: TrainerGroup, what: str, call: Callable[[], T]) -> list[T]:
    """Every process's result of ``call``, in the order of ranks.

    A process where it fails takes part all the same, so that nobody waits for it: then all raise
    RanksFailed, in the failing process from the error itself.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:
        failure = error
    try:
        outcomes = group.gather((result, None if failure is None else _text(failure)))
    except Exception as error:
        raise RanksFailed(f"{what}: a process of this trainer is gone ({_text(error)})") from failure or error
    failed = [(rank, text) for rank, (_, text) in enumerate(outcomes) if text is not None]
    if failed:
        raise RanksFailed(_report(what, failed, group.size)) from failure
    return [value for value, _ in outcomes]  # type: ignore[misc]  # None only where it failed


def _text(error: Exception) -> str:
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def _report(what: str, failed: Sequence[tuple[int, str]], size: int) -> str:
    """One line for each message; ranks that say the same share it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failed:
        ranks.setdefault(text, []).append(rank)
    lines = [f"rank {', '.join(map(str, which))}: {text}" for text, which in ranks.items()]
    return f"{what} failed on {len(failed)} of {size} ranks; " + "; ".join(lines)
