"""Counters, gauges and histograms, shown in the Prometheus text format.

https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4). Not ``prometheus_client``:
inside SGLang that one keeps its values in files which SGLang's own ``/metrics`` adds up, so ours would be
shown twice, and the images of trainers do not have it. What its parser reads is what the tests check.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
VERSIONS = (0, 1, 2, 3, 5, 8, 13, 21, 50, 100)
# Runs and consumers are named by clients: what comes after so many label sets is counted as "other".
MOST_SERIES = 500

Labels = tuple[str, ...]


class _Metric:
    kind = "untyped"

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)

    def samples(self) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
        """Suffix of the name, labels, value."""
        raise NotImplementedError

    def _known(self, labels: Labels, series: dict[Labels, float]) -> Labels:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        return labels if labels in series or len(series) < MOST_SERIES else ("other",) * len(labels)

    def _named(self, labels: Labels) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.labels, labels, strict=True))


M = TypeVar("M", bound=_Metric)


class Counter(_Metric):
    """Only goes up. Without labels it is there from the start, as 0."""

    kind = "counter"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        labels = self._known(labels, self._values)
        self._values[labels] = self._values.get(labels, 0.0) + by

    def samples(self) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
        for labels, value in list(self._values.items()):
            yield "", self._named(labels), value


class Gauge(_Metric):
    """What is so now. ``read`` is asked at each look, for pairs of labels and a value."""

    kind = "gauge"

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        read: Callable[[], Iterable[tuple[Labels, float | None]]] | None = None,
        kind: str = "gauge",
    ) -> None:
        super().__init__(name, help, labels)
        self.kind = kind
        self._values: dict[Labels, float] = {}
        self._read = read

    def set(self, value: float, *labels: str) -> None:
        self._values[self._known(labels, self._values)] = value

    def samples(self) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
        found = list(self._values.items()) if self._read is None else self._read()
        for labels, value in found:
            if value is not None:
                yield "", self._named(labels), value


class Histogram(_Metric):
    """How often a value fell below each of ``buckets``."""

    kind = "histogram"

    def __init__(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS
    ) -> None:
        super().__init__(name, help, labels)
        self._bounds = tuple(buckets)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        labels = self._known(labels, self._sums)
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def samples(self) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
        for labels, counts in list(self._counts.items()):
            named = self._named(labels)
            totals = list(itertools.accumulate(counts))  # one look: a thread may add meanwhile
            for bound, total in zip((*self._bounds, math.inf), totals, strict=True):
                yield "_bucket", (*named, ("le", _number(bound))), total
            yield "_sum", named, self._sums[labels]
            yield "_count", named, totals[-1]


class Registry:
    """The metrics of one process. Names are unique; ``render`` is the page that Prometheus reads."""

    def __init__(self) -> None:
        self._metrics: dict[str, _Metric] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return self._add(Counter(name, help, labels))

    def gauge(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        read: Callable[[], Iterable[tuple[Labels, float | None]]] | None = None,
        kind: str = "gauge",
    ) -> Gauge:
        """With ``kind`` "counter" one whose count is kept elsewhere, in what ``read`` reads."""
        return self._add(Gauge(name, help, labels, read, kind))

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS
    ) -> Histogram:
        return self._add(Histogram(name, help, labels, buckets))

    def render(self) -> str:
        """The page, in ``CONTENT_TYPE``."""
        lines: list[str] = []
        for metric in self._metrics.values():
            lines.append(f"# HELP {metric.name} {_escaped(metric.help)}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            for suffix, labels, value in metric.samples():
                inner = ",".join(f'{key}="{_quoted(text)}"' for key, text in labels)
                lines.append(f"{metric.name}{suffix}{'{' + inner + '}' if inner else ''} {_number(value)}")
        return "\n".join(lines) + "\n"

    def _add(self, metric: M) -> M:
        if metric.name in self._metrics:
            raise ValueError(f"there is a metric {metric.name} already")
        self._metrics[metric.name] = metric
        return metric


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
