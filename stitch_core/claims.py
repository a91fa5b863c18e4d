"""What a writer of a run asks for when it claims, why that is refused, and how publishing ends otherwise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .head import Head
from .manifest import Manifest, Row


class PublishError(Exception):
    """A version was not published; the head is where it was, and the next publish may go on."""


class ClaimRefused(PublishError):
    """The run cannot be claimed as asked."""


class HeadMoved(ClaimRefused):
    """The run has a newer version than the claim was prepared for; nobody was fenced."""


class Fenced(PublishError):
    """Another writer has claimed the run: this one publishes nothing any more."""


class OutcomeUnknown(PublishError):
    """Nobody can tell whether the head moved; only a new claim can find out."""


Find = Callable[[Callable[[Row], bool]], Awaitable[Manifest | None]]


@dataclass(frozen=True)
class Resume:
    """Where a trainer comes from; see ``Publisher.claim``.

    ``saved`` was the newest version when the checkpoint that it goes on from was saved, ``state`` is what
    its next delta builds on. ``override``: although a rollback gave the version up.
    """

    state: str | None = None
    saved: int | None = None
    override: bool = False

    def check_new(self, run: str, state: str) -> None:
        """Whether it can begin a run whose version 0 has ``state``. Raises ClaimRefused."""
        if self.state in (None, state) and not self.saved:
            return
        where = f"version {self.saved}" if self.saved else f"state {self.state}"
        raise ClaimRefused(f"run {run} does not exist, so it cannot go on from {where}: is this its store?")

    def check_saved(self, run: str, head: Head) -> None:
        """Whether it may go on from what it saved. Raises ClaimRefused."""
        if self.saved is None or self.override:
            return
        if self.saved > head.number:
            raise ClaimRefused(
                f"run {run} is at version {head.number}, but the trainer's checkpoint was saved at version "
                f"{self.saved}: is this the same store?"
            )
        given_up = head.abandoned_range(self.saved)
        if given_up is not None:
            before = given_up[0] - 1
            raise ClaimRefused(
                f"the trainer's checkpoint was saved at version {self.saved} of run {run}, and a rollback to "
                f"{before} gave up the versions {given_up[0]} to {given_up[1]}: resume from a checkpoint of "
                f"version {before} or before, or say --override to undo the rollback"
            )

    async def check_base(self, head: Head, newest: Manifest, find: Find) -> None:
        """Whether its next delta builds on a version that may be built on.

        ``find`` gives the newest version on the chain that is wanted. Raises ClaimRefused.
        """
        if self.state in (None, newest.state):
            return
        if self.saved is None and not self.override:
            raise ClaimRefused(
                f"run {newest.run} is at version {head.number}, whose state is {newest.state}, not "
                f"{self.state}: resume from a checkpoint of that version, say at which version it was saved, "
                "or start a new run"
            )
        found = await find(
            lambda row: row.state == self.state and (self.override or not head.abandoned_range(row.number))
        )
        if found is not None:
            return
        given_up = await find(lambda row: row.state == self.state)
        if given_up is None:
            raise ClaimRefused(
                f"{self.state} is the state of no version of run {newest.run}: a delta can only build on one"
            )
        raise ClaimRefused(
            f"the trainer's next delta would build on version {given_up.number} of run {newest.run}, which a "
            "rollback gave up: resume from a version before it, or say --override to undo the rollback"
        )
