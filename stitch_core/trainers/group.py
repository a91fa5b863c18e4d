"""Groups of trainer processes, and doing one thing in all of them with one outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..ports import TrainerGroup

T = TypeVar("T")

HANGS = "Timed out"  # what gloo says of a peer that is there and does not answer


class RanksFailed(Exception):
    """At least one process of the trainer failed; every process raises it, with every message."""


class Solo:
    """A trainer of one process."""

    rank, size = 0, 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def twin(self) -> TrainerGroup:
        return Solo()


class RanksGone(Exception):
    """Processes of the group do not answer any more; ``ranks`` are theirs."""

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        names = ", ".join(map(str, ranks))
        hangs = HANGS in why
        word = "does not answer" if hangs else "is gone"
        hint = (
            "; it hangs, or waits for a rank that does: see what rank 0 says" if hangs and 0 in ranks else ""
        )
        super().__init__(f"rank {names} {word} ({why}){hint}")
        self.ranks = tuple(ranks)


class ProcessGroup:
    """A ``torch.distributed`` group that moves Python objects, such as the framework's gloo group.

    Everything goes through rank 0, one connection for each of the others: where the ring of an
    ``all_gather`` only tells that some neighbour is gone, this names the rank, and tells all that live. A
    process that died is seen at once. For one that hangs everybody waits until the group's own timeout is
    over, and rank 0 names it.
    """

    def __init__(self, distributed: Any, group: Callable[[], Any] = lambda: None) -> None:
        """``distributed`` is torch's module (the core imports no torch).

        ``group`` is asked each time, since frameworks that offload make their groups anew; None is the
        default group.
        """
        self._distributed, self._group = distributed, group
        self.rank: int = distributed.get_rank(group())
        self.size: int = distributed.get_world_size(group())

    def twin(self) -> TrainerGroup:
        """A group of gloo's own: frameworks' other collectives may run meanwhile."""
        ranks = [self._global(rank) for rank in range(self.size)]
        made = self._distributed.new_group(ranks, backend="gloo")
        return ProcessGroup(self._distributed, lambda: made)

    def gather(self, value: T) -> list[T]:
        if self.rank != 0:
            try:
                self._send(value, 0)
                values, gone, why = self._receive(0)
            except RuntimeError as error:
                raise RanksGone([0], _first_line(error)) from error
        else:
            values, gone, why = self._collect(value)
            for rank in range(1, self.size):
                # One that dies here has been heard; the next call names it.
                with contextlib.suppress(RuntimeError):
                    self._send((values, gone, why), rank)
        if gone:
            raise RanksGone(gone, why)
        return list(values)

    def _collect(self, own: Any) -> tuple[list[Any], list[int], str]:
        """Everybody's value, the ranks that gave none, and why."""
        values, gone, why = [own], [], ""
        for rank in range(1, self.size):
            try:
                values.append(self._receive(rank))
            except RuntimeError as error:
                why = _first_line(error)
                if HANGS in why:  # gloo has closed the connections to the others too
                    return values, [rank], why
                gone.append(rank)
        return values, gone, why

    def _send(self, value: Any, rank: int) -> None:
        self._distributed.send_object_list([value], self._global(rank), self._group())

    def _receive(self, rank: int) -> Any:
        values: list[Any] = [None]
        self._distributed.recv_object_list(values, self._global(rank), self._group())
        return values[0]

    def _global(self, rank: int) -> int:
        group = self._group()
        found: int = rank if group is None else self._distributed.get_global_rank(group, rank)
        return found


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
    except RanksGone as error:
        raise RanksFailed(f"{what}: {error}") from failure or error
    except Exception as error:
        raise RanksFailed(f"{what}: a process of this trainer is gone ({_text(error)})") from failure or error
    failed = [(rank, text) for rank, (_, text) in enumerate(outcomes) if text is not None]
    if failed:
        raise RanksFailed(_report(what, failed, group.size)) from failure
    return [value for value, _ in outcomes]  # type: ignore[misc]  # None only where it failed


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__


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
