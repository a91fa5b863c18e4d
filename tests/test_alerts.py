"""docs/alerts.yml: rules that Prometheus takes, over metrics that exist, and that fire when they should."""

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
PROMTOOL = shutil.which("promtool")


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


TESTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'stitch_gateway_replicas{{instance="g", state="ready"}}', values: '0x30'}}
      - {{series: 'stitch_gateway_replicas{{instance="g", state="lost"}}', values: '0x30'}}
      - {{series: 'stitch_gateway_head_version{{instance="g", run="r"}}', values: '9x30'}}
      - {{series: 'stitch_gateway_served_version{{instance="g", run="r", which="oldest"}}', values: '4x30'}}
      - {{series: 'stitch_replica_version{{instance="a", run="r"}}', values: '7x30'}}
      - {{series: 'stitch_replica_target_version{{instance="a", run="r"}}', values: '8x30'}}
      - {{series: 'stitch_replica_version{{instance="b", run="r"}}', values: '8x30'}}
      - {{series: 'stitch_replica_target_version{{instance="b", run="r"}}', values: '8x30'}}
    alert_rule_test:
      - eval_time: 5m
        alertname: StitchNoReplicaReady
        exp_alerts: [{{exp_labels: {{severity: page, instance: g, state: ready}},
          exp_annotations: {{summary: "Gateway g has no ready replica"}}}}]
      - {{eval_time: 5m, alertname: StitchReplicaLags, exp_alerts: []}}
      - eval_time: 20m
        alertname: StitchReplicaLags
        exp_alerts: [{{exp_labels: {{severity: ticket, instance: a, run: r}},
          exp_annotations: {{summary: "a is 1 versions behind run r"}}}}]
      - eval_time: 20m
        alertname: StitchFleetLags
        exp_alerts: [{{exp_labels: {{severity: ticket, instance: g, run: r}},
          exp_annotations: {{summary: "The oldest ready replica of run r is 5 versions behind"}}}}]
      - {{eval_time: 20m, alertname: StitchReplicasLost, exp_alerts: []}}
"""


@pytest.mark.skipif(
    PROMTOOL is None, reason="platform: promtool is not installed (Debian package prometheus)"
)
def test_prometheus_takes_the_rules_and_fires_them(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    tests = tmp_path / "tests.yml"
    tests.write_text(TESTS.format(rules=RULES))
    for arguments in (["check", "rules", str(RULES)], ["test", "rules", str(tests)]):
        done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    PROMTOOL is None, reason="platform: promtool is not installed (Debian package prometheus)"
)
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
