"""Alert rules and dashboard: every series and label they name is one that the server has."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from serving.metrics import Metrics
from tests.serving.conftest import ROOT
from tests.serving.descriptions import description

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
# What Prometheus adds to every series.
PROMETHEUS = {"instance", "job", "le"}
SERIES = re.compile(r"(?<![\w:\"])(?:vllm:\w+|jaxllm:\w+|http_\w+|up)\b(\{[^}]*\})?")
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@pytest.fixture(scope="module")
def series():
    """Name of each series that a server has -> its labels."""
    metrics = Metrics("m")
    metrics.describe(description({"kv_cache_dtype": "auto"}))
    found = {"up": set()}
    for collector in metrics.registry._collector_to_names:
        for family in collector.describe() or collector.collect():
            for suffix in SUFFIXES[family.type]:
                found[family.name + suffix] = set(collector._labelnames)
    return found


def expressions():
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


@pytest.mark.parametrize(("where", "expression"), [*expressions()])
def test_series_and_labels_exist(series, where, expression):
    named = list(SERIES.finditer(expression))
    assert named, expression
    labels = set(PROMETHEUS)
    for match in named:
        name = match[0].partition("{")[0]
        assert name in series, f"{where}: {name}"
        matched = set(re.findall(r"(\w+)\s*(?:=~|=|!=|!~)", match[1] or ""))
        assert matched <= series[name] | PROMETHEUS, f"{where}: {match[0]}"
        labels |= series[name]
    for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
        assert {name.strip() for name in group.split(",")} <= labels, f"{where}: by ({group})"


def test_every_alert_says_what_to_do():
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        names = [rule["alert"] for rule in group["rules"]]
        assert len(set(names)) == len(names)
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}


def test_every_alert_is_tested():
    alerts = {r["alert"] for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]}
    tests = yaml.safe_load((RULES.parent / "rules_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"] for t in tests for case in t["alert_rule_test"] if case.get("exp_alerts")
    }
    quiet = {
        case["alertname"]
        for t in tests
        for case in t["alert_rule_test"]
        if not case.get("exp_alerts")
    }
    assert fired == alerts and quiet == alerts


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_agrees():
    for words in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=RULES.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_well_formed():
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$(?:\{(\w+)\}|(\w+))", json.dumps(dashboard)))
    names = {a or b for a, b in used}
    assert names - {"__rate_interval", "__all"} <= variables
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
