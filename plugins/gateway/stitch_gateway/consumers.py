"""Who asks: a run and one of its consumers, and what requests demand that say nothing of versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stitch_core.requests import Refused
from stitch_core.versions import (
    HEADER_CONSUMER,
    HEADER_RUN,
    VersionConstraint,
    VersionError,
    malformed,
    request_scope,
    unavailable,
)

from .head_view import HeadView


@dataclass(frozen=True)
class Scope:
    """The requests of one consumer of a run; ``prefix`` is what their ids begin with at every engine."""

    run: str
    consumer: str

    @property
    def prefix(self) -> str:
        return request_scope(self.run, self.consumer)


@dataclass(frozen=True)
class Consumers:
    """``run`` and ``default`` are of requests that name none.

    ``lag``: versions by which an answer to the default consumer may be behind the ``head``; None: any.
    """

    run: str | None = None
    default: str = "rollout"
    lag: int | None = None
    head: HeadView | None = None

    def scope(self, headers: Mapping[str, str], run: str | None = None) -> Scope | None:
        """Whose request it is; None where no run is known. ``headers`` ignore case. Raises Refused (400)."""
        run = run or headers.get(HEADER_RUN) or self.run
        if run is None:
            return None
        scope = Scope(run, headers.get(HEADER_CONSUMER, self.default))
        try:
            request_scope(scope.run, scope.consumer)
        except VersionError as error:
            raise Refused(malformed(str(error))) from None
        return scope

    async def demand(
        self, given: VersionConstraint, headers: Mapping[str, str], patience: float
    ) -> VersionConstraint:
        """What the request demands, with the default run and the default consumer's lag.

        Raises Refused (503) if the head is not known within ``patience`` seconds of a gateway's start.
        """
        run = given.run or self.run
        low, exact = given.min_version, given.exact_version
        if self._lags(given, run, headers) and self.head is not None and self.lag is not None:
            if not await self.head.known(patience):
                message = f"the head of run {run} cannot be read: {self.head.error}"
                raise Refused(unavailable(message, retry="here"))
            if self.head.number is not None:
                low = max(0, self.head.number - self.lag)
        return VersionConstraint(low, exact, run)

    def _lags(self, given: VersionConstraint, run: str | None, headers: Mapping[str, str]) -> bool:
        return (
            self.head is not None
            and run == self.head.run
            and (given.min_version, given.exact_version) == (None, None)
            and headers.get(HEADER_CONSUMER, self.default) == self.default
        )


def check_consumer(name: str) -> str:
    """``name`` if it can be a consumer's; raises VersionError."""
    request_scope("run", name)
    return name
