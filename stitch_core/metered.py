"""What publishers, compactors and collectors count. ``docs/operations.md`` lists the names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .claims import Fenced, OutcomeUnknown
from .metrics import Registry
from .metrics_export import Exporter, from_environment
from .ports import Clock

if TYPE_CHECKING:
    from .compactor import Pass
    from .manifest import Manifest
    from .retention import Sweep


class PublisherMetrics:
    """One run or several, of one process."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter, r = exporter, exporter.registry
        self._outcomes = r.counter(
            "stitch_publisher_publishes_total", "Publishes by how they ended.", ("run", "outcome")
        )
        self._seconds = r.histogram(
            "stitch_publisher_publish_seconds",
            "From the upload to the moved head, encoding excluded.",
            ("run",),
        )
        self._bytes = r.counter(
            "stitch_publisher_bytes_total", "Bytes of what was published.", ("run", "kind")
        )
        self._head = r.gauge("stitch_publisher_head_version", "The newest version.", ("run",))
        self._last = r.gauge(
            "stitch_publisher_last_publish_timestamp_seconds", "When the head last moved.", ("run",)
        )

    @contextlib.contextmanager
    def publishing(self, run: str, clock: Clock) -> Iterator[list[Manifest]]:
        """Around one publish, which appends what it published."""
        began = clock.monotonic()
        done: list[Manifest] = []
        outcome = "failed"
        try:
            yield done
            outcome = "published"
        except Fenced:
            outcome = "fenced"
            raise
        except OutcomeUnknown:
            outcome = "unknown"
            raise
        finally:
            self._outcomes.add(run, outcome)
            for manifest in done:
                self._seconds.observe(clock.monotonic() - began, run)
                self._bytes.add(run, manifest.representation.kind, by=manifest.representation.bytes)
                self._head.set(manifest.number, run)
                self._last.set(clock.time(), run)
            self._exporter.changed(last=True)


class CompactorMetrics:
    """``stitch anchor``."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter, r = exporter, exporter.registry
        self._outcomes = r.counter(
            "stitch_compactor_passes_total", "Looks at the head, by what came of them.", ("run", "outcome")
        )
        self._seconds = r.histogram(
            "stitch_compactor_anchor_seconds", "To build and upload a full.", ("run",)
        )
        self._bytes = r.counter("stitch_compactor_bytes_total", "Bytes of uploaded fulls.", ("run",))
        self._newest = r.gauge("stitch_compactor_newest_full_version", "Of those known here.", ("run",))
        self._last = r.gauge(
            "stitch_compactor_last_success_timestamp_seconds", "The last pass without an error.", ("run",)
        )

    def passed(self, run: str, outcome: str, now: float) -> None:
        """``outcome``: idle, anchored, left (to another process), failed."""
        self._outcomes.add(run, outcome)
        if outcome != "failed":
            self._last.set(now, run)
        self._exporter.changed(last=outcome == "anchored")

    def anchored(self, run: str, number: int, size: int, seconds: float) -> None:
        """A full of version ``number`` was uploaded."""
        self._seconds.observe(seconds, run)
        self._bytes.add(run, by=size)
        self._newest.set(number, run)


class SpanMetrics:
    """``stitch compact``."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter, r = exporter, exporter.registry
        self._outcomes = r.counter(
            "stitch_spans_passes_total", "Looks at the head, by what came of them.", ("run", "outcome")
        )
        self._seconds = r.histogram("stitch_spans_merge_seconds", "To fetch, merge and upload one.", ("run",))
        self._bytes = r.counter("stitch_spans_bytes_total", "Bytes of uploaded spans.", ("run",))
        self._read = r.counter("stitch_spans_read_bytes_total", "Bytes that they were made of.", ("run",))
        self._deleted = r.counter("stitch_spans_deleted_total", "Aggregates that were replaced.", ("run",))
        self._head = r.gauge("stitch_spans_head_version", "The head at the last look.", ("run",))
        self._aggregate = r.gauge("stitch_spans_aggregate_version", "Where the newest one leads.", ("run",))
        self._missing = r.gauge("stitch_spans_missing", "Spans that ought to be there and are not.", ("run",))
        self._last = r.gauge(
            "stitch_spans_last_success_timestamp_seconds", "The last pass without an error.", ("run",)
        )

    def passed(self, run: str, done: Pass | None, now: float) -> None:
        """``done`` is what a pass did, None if it failed."""
        if done is None:
            self._outcomes.add(run, "failed")
            self._exporter.changed(last=True)
            return
        outcome = "merged" if done.made else "left" if done.busy else "idle"
        self._outcomes.add(run, outcome)
        for made in done.made:
            self._seconds.observe(made.seconds, run)
            self._bytes.add(run, by=made.bytes)
            self._read.add(run, by=made.read)
        self._deleted.add(run, by=len(done.deleted))
        self._head.set(done.head, run)
        self._aggregate.set(done.aggregate, run)
        self._missing.set(len(done.left) + len(done.problems), run)
        self._last.set(now, run)
        self._exporter.changed(last=outcome == "merged")


class CollectorMetrics:
    """``stitch gc``: of the last run of it, since none is there in between."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter, r = exporter, exporter.registry
        gauge = functools.partial(r.gauge, labels=("run",))
        self._last = gauge("stitch_collector_last_run_timestamp_seconds", "When it ended.")
        self._seconds = gauge("stitch_collector_duration_seconds", "How long it took.")
        self._listed = gauge("stitch_collector_listed_objects", "Objects below the run.")
        self._kept = gauge("stitch_collector_protected_objects", "Old ones that somebody still needs.")
        self._deleted = gauge("stitch_collector_deleted_objects", "Deleted.")
        self._freed = gauge("stitch_collector_freed_bytes", "Bytes of those.")
        self._failed = gauge("stitch_collector_failed_objects", "Could not be deleted.")
        self._floor = gauge("stitch_collector_floor_version", "From there on age is no reason.")
        self._head = gauge("stitch_collector_head_version", "The head then.")

    def swept(self, sweep: Sweep, seconds: float, now: float) -> None:
        pairs = (
            (self._last, now), (self._seconds, seconds), (self._listed, sweep.listed),
            (self._kept, sweep.kept), (self._deleted, sweep.deleted), (self._freed, sweep.freed),
            (self._failed, len(sweep.failed)), (self._floor, sweep.floor), (self._head, sweep.head),
        )  # fmt: skip
        for gauge, value in pairs:
            gauge.set(value, sweep.run)
        self._exporter.changed(last=True)


@functools.cache
def process_metrics() -> PublisherMetrics:
    """Those of this process's publishers, shown where ``STITCH_METRICS`` says."""
    return PublisherMetrics(from_environment(Registry()))
