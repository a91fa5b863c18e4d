"""A version named on the command line: ``RUN``, ``RUN/7``, ``RUN/weight_v000007`` or ``channel:NAME``."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ..chain import ChainReader
from ..digits import whole
from ..manifest import Manifest
from ..ports import NotFound
from ..versions import PolicyVersion, check_run_id
from .common import UsageError, check_name

HELP = "RUN (its newest version), RUN/7, RUN/weight_v000007, or channel:NAME"


@dataclass(frozen=True)
class Target:
    """``number`` None: the newest version. With ``channel`` the run is whichever that names now."""

    run: str
    number: int | None = None
    channel: str | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises UsageError, VersionError."""
        if text.startswith("channel:"):
            return cls("", channel=check_name("the channel", text.removeprefix("channel:")))
        run, slash, number = text.partition("/")
        check_run_id(run)
        if not slash:
            return cls(run)
        with contextlib.suppress(ValueError):
            return cls(run, whole(number))
        version = PolicyVersion.parse(text)
        return cls(version.run, version.number)


async def resolve(reader: ChainReader, target: Target) -> tuple[Manifest, Manifest]:
    """The version that is meant, and its run's newest. Raises UsageError, NoHead, FormatError, StoreError."""
    run, number = target.run, target.number
    if target.channel is not None:
        try:
            channel = await reader.channel(target.channel)
        except NotFound:
            raise UsageError(f"there is no channel {target.channel}") from None
        run, number = channel.run, channel.exact
    head, _ = await reader.head(run)
    newest = await reader.manifest(run, head)
    found = newest if number is None else await reader.find(newest, lambda row: row.number == number)
    if found is None:
        raise UsageError(f"run {run} has no version {number}: 'stitch versions' lists those that it has")
    return found, newest
