"""Who asks: a run and one of its consumers, and what requests demand that say nothing of versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stitch_core.request_ids import Abort
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

from .consumer_rules import Rule, RulesView
from .head_view import Heads, HeadView


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

    ``lag``: versions by which an answer to the default consumer may be behind the head; None: any. What the
    store says of a consumer (``view``) comes first. Without a store there are no ``heads`` either.
    """

    run: str | None = None
    default: str = "rollout"
    lag: int | None = None
    heads: Heads | None = None
    view: RulesView | None = None

    @property
    def head(self) -> HeadView | None:
        """The head of the gateway's own run."""
        return None if self.heads is None or self.run is None else self.heads.of(self.run)

    def consumer(self, headers: Mapping[str, str]) -> str:
        """The consumer whose request it is."""
        return headers.get(HEADER_CONSUMER, self.default)

    def scope(self, headers: Mapping[str, str], run: str | None = None) -> Scope | None:
        """Whose request it is; None where no run is known. ``headers`` ignore case. Raises Refused (400)."""
        run, consumer = run or headers.get(HEADER_RUN, self.run), self.consumer(headers)
        try:
            request_scope("any" if run is None else run, consumer)
        except VersionError as error:
            raise Refused(malformed(str(error))) from None
        return None if run is None else Scope(run, consumer)

    def abort(self, given: Abort) -> Abort:
        """With the run and the consumer of who names none: those that its requests have, too."""
        return Abort(given.rid, given.run or self.run, given.consumer or self.default)

    async def demand(
        self, given: VersionConstraint, headers: Mapping[str, str], patience: float
    ) -> VersionConstraint:
        """What the request demands, with the default run and what its consumer gets.

        Raises Refused (400) for a lag behind an unknown run's head, and (503) if the store has not said
        within ``patience`` seconds of a gateway's start what consumers get, or where the head is.
        """
        if (given.min_version, given.exact_version) != (None, None):
            return VersionConstraint(given.min_version, given.exact_version, given.run or self.run)
        consumer = self.consumer(headers)
        rule = await self._rule(consumer, given.run, patience)
        run = given.run or rule.run or self.run
        if rule.lag is None or self.heads is None:
            return VersionConstraint(None, rule.exact, run)
        if run is None:
            message = f"consumer {consumer} gets versions by the head of a run: name the run"
            raise Refused(malformed(message))
        head = self.heads.of(run)
        if not await head.known(patience):
            message = f"the head of run {run} cannot be read: {head.error}"
            raise Refused(unavailable(message, retry="here"))
        # Version 0 is the boot checkpoint, and no trainer's once one has published.
        low = None if head.number is None else max(min(1, head.number), head.number - rule.lag)
        return VersionConstraint(low, None, run)

    async def _rule(self, consumer: str, run: str | None, patience: float) -> Rule:
        """What the consumer gets, if it is of the run that the request names."""
        rule = None
        if self.view is not None:
            # What cannot be read is never "no demand".
            if not await self.view.known(patience):
                raise Refused(unavailable(f"the consumers cannot be read: {self.view.error}", retry="here"))
            rule = self.view.rules.get(consumer)
        if rule is None and consumer == self.default and self.lag is not None:
            rule = Rule(lag=self.lag, run=self.run)
        return rule if rule is not None and run in (None, rule.run or run) else Rule()
