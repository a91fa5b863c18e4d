"""docs/alerts.yml: rules that Prometheus takes, over metrics that exist, and that fire when they should."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "docs" / "alerts.yml"
SOURCES = [
    ROOT / "stitch_core" / "metered.py",
    ROOT / "stitch_core" / "replica" / "metering.py",
    ROOT / "plugins" / "gateway" / "stitch_gateway" / "metrics.py",
]
TESTS = ROOT / "tests" / "alerts.yml"


def promtool() -> str | None:
    """Installed, or where scripts/promtool.py puts it; nothing is fetched here."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return shutil.which("promtool") or shutil.which(Path(cache, "stitch", "promtool", "promtool"))


PROMTOOL = promtool()
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None,
    reason="platform: no promtool (scripts/promtool.py fetches it, or says why it cannot)",
)


def in_the_code() -> dict[str, str]:
    """Metric to the kind that made it, histograms with their series."""
    found = {}
    for path in SOURCES:
        for kind, name in re.findall(r"(counter|gauge|histogram)\(\s*\"(stitch_\w+)\"", path.read_text()):
            found[name] = kind
    return found


def expressions() -> list[str]:
    return re.findall(r"^ +expr: (.*)$", RULES.read_text(), re.MULTILINE)


def test_alerts_are_over_metrics_that_exist() -> None:
    known = in_the_code()
    series = set(known) | {f"{name}_bucket" for name, kind in known.items() if kind == "histogram"}
    assert len(expressions()) == RULES.read_text().count("- alert:")
    for expression in expressions():
        names = re.findall(r"stitch_\w+", expression)
        assert names
        assert set(names) <= series, expression


def test_metric_names_are_conventional() -> None:
    for path in SOURCES:
        for kind, name in re.findall(r"(counter|histogram)\(\s*\"(stitch_\w+)\"", path.read_text()):
            assert name.endswith("_total" if kind == "counter" else ("_seconds", "_versions")), name


def test_each_metric_and_alert_is_in_the_operators_page() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in in_the_code() if name not in text] == []
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    assert [name for name in alerts if f"`{name}`" not in text] == []


def test_each_alert_is_shown_to_fire_and_to_keep_quiet() -> None:
    quiet, loud = TESTS.read_text().split("  - name: all is wrong\n")
    for alert in re.findall(r"- alert: (\w+)", RULES.read_text()):
        assert re.search(rf"alertname: {alert}, exp_alerts: \[\]", quiet), alert
        assert re.search(rf"alertname: {alert}\n +exp_alerts:\n +- exp_labels", loud), alert


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules", str(RULES)), ("test", "rules", str(TESTS))])
def test_prometheus_takes_the_rules_and_fires_them(arguments: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_finds_nothing_wrong_with_our_pages() -> None:
    from stitch_core.metered import CollectorMetrics, CompactorMetrics, PublisherMetrics
    from stitch_core.metrics import Registry
    from stitch_core.metrics_export import Exporter
    from stitch_core.ports import SystemClock
    from stitch_core.replica.admission import Gate
    from stitch_core.replica.metering import ReplicaMetrics

    assert PROMTOOL is not None
    registry = Registry()
    PublisherMetrics(Exporter(registry, None))
    compactor = CompactorMetrics(Exporter(registry, None))
    compactor.anchored("r", 1, 1, 1.0)
    CollectorMetrics(Exporter(registry, None))
    replica = ReplicaMetrics(Gate(SystemClock()), SystemClock(), dict)
    replica.answered("/generate", 200, 0.1)
    page = registry.render() + replica.registry.render()
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
