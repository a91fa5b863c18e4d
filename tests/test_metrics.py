"""The pages of metrics: what Prometheus's own parser reads from them, and where they can be looked at."""

import logging
import math
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stitch_core.claims import Fenced
from stitch_core.compactor import Made, Pass
from stitch_core.manifest import Manifest, Representation
from stitch_core.metered import CollectorMetrics, CompactorMetrics, PublisherMetrics, SpanMetrics
from stitch_core.metrics import MOST_SERIES, Registry
from stitch_core.metrics_export import BadTarget, Exporter, from_environment
from stitch_core.ports import SystemClock
from stitch_core.records import Record
from stitch_core.retention import Sweep

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(page: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def test_the_page_is_read_as_it_was_meant() -> None:
    registry = Registry()
    counter = registry.counter("a_total", 'what "it"\ncounts, back\\slash', ("run",))
    counter.add('odd "run"\n\\', by=2)
    counter.add("r")
    registry.gauge("g", "read at each look", read=lambda: [((), True), ((), None)])
    histogram = registry.histogram("h_seconds", "times", ("route",), buckets=(0.1, 1))
    for value in (0.05, 0.1, 0.5, 7):
        histogram.observe(value, "/x")
    registry.gauge("odd", "").set(math.inf)
    registry.counter("none_total", "there from the start")
    found = samples(registry.render())
    assert found[("a_total", (("run", 'odd "run"\n\\'),))] == 2
    assert found[("a_total", (("run", "r"),))] == 1
    assert (found[("g", ())], found[("odd", ())], found[("none_total", ())]) == (1, math.inf, 0)
    buckets = [found[("h_seconds_bucket", (("le", le), ("route", "/x")))] for le in ("0.1", "1", "+Inf")]
    assert buckets == [2, 3, 4]
    assert found[("h_seconds_sum", (("route", "/x"),))] == pytest.approx(7.65)
    assert found[("h_seconds_count", (("route", "/x"),))] == 4


def test_clients_cannot_make_series_without_end() -> None:
    registry = Registry()
    counter = registry.counter("a_total", "", ("consumer",))
    histogram = registry.histogram("h", "", ("consumer",))
    for number in range(MOST_SERIES + 50):
        counter.add(f"c{number}")
        histogram.observe(1, f"c{number}")
    found = samples(registry.render())
    assert found[("a_total", (("consumer", "other"),))] == 50
    assert found[("h_count", (("consumer", "other"),))] == 50
    assert sum(name == "a_total" for name, _ in found) == MOST_SERIES + 1


def test_a_name_is_used_once_and_labels_fit() -> None:
    registry = Registry()
    counter = registry.counter("a_total", "", ("run",))
    with pytest.raises(ValueError, match="already"):
        registry.gauge("a_total", "")
    with pytest.raises(ValueError, match="labels"):
        counter.add()


def get(port: int | None, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def test_a_port_shows_the_page_until_it_is_closed() -> None:
    registry = Registry()
    counter = registry.counter("a_total", "")
    exporter = Exporter(registry, "127.0.0.1:0")
    try:
        counter.add()
        assert samples(get(exporter.port)) == {("a_total", ()): 1}
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(exporter.port, "/else")
        caught.value.close()
    finally:
        exporter.close()
    with pytest.raises(urllib.error.URLError):
        get(exporter.port)


def test_a_file_is_whole_and_the_last_one_counts(tmp_path: Path) -> None:
    registry = Registry()
    counter = registry.counter("a_total", "")
    exporter = Exporter(registry, str(tmp_path / "stitch.prom"))
    exporter.changed()
    for _ in range(3):
        counter.add()
        exporter.changed()
    exporter.close()
    assert samples((tmp_path / "stitch.prom").read_text()) == {("a_total", ()): 3}
    assert [path.name for path in tmp_path.iterdir()] == ["stitch.prom"]


@pytest.mark.parametrize("target", ["x", "host:", ":99999", "-1", "70000", "/dir/file.txt"])
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(BadTarget, match="is not a port"):
        Exporter(Registry(), target)


def test_a_trainer_goes_on_where_metrics_cannot_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STITCH_METRICS", "not a place")
    with caplog.at_level(logging.WARNING, "stitch"):
        from_environment(Registry()).changed()
        Exporter(Registry(), str(tmp_path / "gone" / "stitch.prom")).close()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "STITCH_METRICS", f"metrics cannot be written to {tmp_path}/gone/stitch.prom",
    ]  # fmt: skip


def manifest(number: int) -> Manifest:
    representation = Representation("delta", base="sha256:" + "1" * 64, encoding="xor")
    return Manifest("r", number, 1, "sha256:" + "0" * 64, representation)


def test_what_a_publisher_counts() -> None:
    registry, clock = Registry(), SystemClock()
    metrics = PublisherMetrics(Exporter(registry, None))
    with metrics.publishing("r", clock) as done:
        done.append(manifest(7))
    with pytest.raises(Fenced), metrics.publishing("r", clock):
        raise Fenced("another one")
    with pytest.raises(OSError, match="full"), metrics.publishing("r", clock):
        raise OSError("full")
    found = samples(registry.render())
    run = ("run", "r")
    for outcome in ("published", "fenced", "failed"):
        assert found[("stitch_publisher_publishes_total", (("outcome", outcome), run))] == 1
    assert found[("stitch_publisher_head_version", (run,))] == 7
    assert found[("stitch_publisher_publish_seconds_count", (run,))] == 1
    assert found[("stitch_publisher_last_publish_timestamp_seconds", (run,))] > 1.7e9


def test_what_a_compactor_of_spans_counts() -> None:
    registry = Registry()
    metrics = SpanMetrics(Exporter(registry, None))
    representation = Representation("delta", base="sha256:" + "1" * 64, encoding="sparse")
    made = Made(Record("r", 32, "sha256:" + "0" * 64, representation, 0), 3, 900, 2.5)
    done = Pass(39, 0, 16, 12, ((0, 32),), False, (made,), ("runs/r/spans/x",), {(32, 36): "no"})
    metrics.passed("r", done, 5.0)
    metrics.passed("r", replace(done, made=(), deleted=(), left=(), busy=True), 6.0)
    metrics.passed("r", replace(done, made=(), deleted=(), left=()), 7.0)
    metrics.passed("r", None, 9.0)
    found = samples(registry.render())
    run = ("run", "r")
    for outcome in ("merged", "left", "idle", "failed"):
        assert found[("stitch_spans_passes_total", (("outcome", outcome), run))] == 1
    assert found[("stitch_spans_last_success_timestamp_seconds", (run,))] == 7
    assert found[("stitch_spans_missing", (run,))] == 1
    assert found[("stitch_spans_read_bytes_total", (run,))] == 900
    assert found[("stitch_spans_deleted_total", (run,))] == 1
    assert found[("stitch_spans_merge_seconds_sum", (run,))] == 2.5


def test_what_compactors_and_collectors_count(tmp_path: Path) -> None:
    registry = Registry()
    compactor = CompactorMetrics(Exporter(registry, None))
    compactor.anchored("r", 32, 1000, 4.0)
    for outcome in ("anchored", "idle", "failed"):
        compactor.passed("r", outcome, 5.0 if outcome != "failed" else 9.0)
    exporter = Exporter(registry, str(tmp_path / "gc.prom"))
    CollectorMetrics(exporter).swept(
        Sweep("r", 32, 70, 400, [], kept=3, deleted=9, freed=90, failed={"k": "no"}), 2.5, 100.0
    )
    found = {name: value for (name, _), value in samples((tmp_path / "gc.prom").read_text()).items()}
    assert found["stitch_compactor_newest_full_version"] == 32
    assert found["stitch_compactor_last_success_timestamp_seconds"] == 5
    assert found["stitch_collector_last_run_timestamp_seconds"] == 100
    assert found["stitch_collector_failed_objects"] == 1
    assert found["stitch_collector_freed_bytes"] == 90
