"""The training loop: take a batch of recent groups, make a step, publish it behind the next one.

This is all that a trainer needs of Stitch: ``PolicyPublisher.publish`` after each step, and its ``head``,
from which the rollout requests derive the version they demand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass

from stitch_core.policy_publisher import PolicyPublisher, Published
from stitch_core.publisher import PublishError

from .grpo import Grpo, StepStats
from .policy import to_publish
from .rollout import Group, Rollouts
from .settings import Settings

BATCH_SECONDS = 120.0


@dataclass(frozen=True)
class StepRecord:
    """One step. ``at``: seconds since training began; ``waited``, ``trained``, ``encoded`` are seconds too.

    ``staleness``: how many versions the tokens of the batch were behind the head, on average; ``oldest`` at
    most. ``versions``: that one trajectory's tokens come from, on average. ``in_flight``: requests at the
    gateway when the batch was taken.
    """

    step: int
    at: float
    head: int
    stats: StepStats
    staleness: float
    oldest: int
    versions: float
    waited: float
    trained: float
    encoded: float
    in_flight: int


@dataclass(frozen=True)
class Delta:
    """One version that was published."""

    number: int
    bytes: int
    changed: float
    seconds: float


class Trainer:
    """Owns the policy while it trains."""

    def __init__(
        self, grpo: Grpo, rollouts: Rollouts, publisher: PolicyPublisher, settings: Settings
    ) -> None:
        self.steps: list[StepRecord] = []
        self.deltas: list[Delta] = []
        self.failures: list[str] = []
        self._publishing: list[asyncio.Task[None]] = []
        self.began = time.time()
        self._grpo, self._rollouts, self._publisher, self._settings = grpo, rollouts, publisher, settings

    async def run(self, on_step: Callable[[int], None]) -> None:
        """All steps; ``on_step`` is told the number of each one that is done.

        Raises NoRollouts when no batch comes, PublishError when another trainer has claimed the run.
        """
        self.began = time.time()
        for step in range(1, self._settings.steps + 1):
            asked = time.monotonic()
            oldest = max(0, self._publisher.head - self._settings.max_staleness)
            groups = await self._rollouts.batch(oldest=oldest, timeout=BATCH_SECONDS)
            waited, in_flight = time.monotonic() - asked, self._rollouts.client.in_flight
            # The rollouts go on while the step is computed: torch lets the event loop run.
            record, published = await asyncio.to_thread(self._step, step, groups, waited, in_flight)
            self.steps.append(record)
            self._publishing.append(asyncio.create_task(self._follow(asyncio.wrap_future(published))))
            on_step(step)
        await asyncio.gather(*self._publishing)
        await asyncio.to_thread(self._publisher.close)

    def _step(
        self, step: int, groups: list[Group], waited: float, in_flight: int
    ) -> tuple[StepRecord, Future[Published]]:
        head = self._publisher.head
        began = time.monotonic()
        stats = self._grpo.step(groups)
        trained = time.monotonic()
        tensors = to_publish(self._grpo.policy.rollout_weights())
        published = self._publisher.publish(tensors, step=step)
        encoded = time.monotonic()
        trajectories = [t for group in groups for t in group]
        record = StepRecord(
            step, time.time() - self.began, head, stats,
            staleness=sum(t.staleness(head) for t in trajectories) / len(trajectories),
            oldest=max(head - t.oldest for t in trajectories),
            versions=sum(t.versions for t in trajectories) / len(trajectories),
            waited=waited, trained=trained - began, encoded=encoded - trained, in_flight=in_flight,
        )  # fmt: skip
        return record, published

    async def _follow(self, publishing: Awaitable[Published]) -> None:
        """Note what was published, and wake the replicas: they would look by themselves, only later."""
        try:
            done = await publishing
        except PublishError as error:
            # Not the end: the next one is encoded against what the head names.
            self.failures.append(str(error))
            return
        self.deltas.append(
            Delta(done.number, done.delta.payload_bytes, done.delta.changed_fraction, done.seconds)
        )
        await self._rollouts.client.wake()
