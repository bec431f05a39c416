"""The alerts and the dashboard of ``deploy/``: they ask for metrics, labels and flags that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import shadowkv.serve.__main__

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "helm/shadowkv/monitoring/alerts.yaml"
DASHBOARD = json.loads((DEPLOY / "helm/shadowkv/monitoring/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ADDED = {"instance", "job", "namespace", "pod", "service"}
"""Labels that Prometheus or its operator adds."""


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    return group["rules"]


def expressions() -> list[str]:
    """All that is asked of Prometheus."""
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    shown += [one["expr"] for one in DASHBOARD["annotations"]["list"]]
    shown += [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    scaling = (DEPLOY / "helm/shadowkv/templates/scaledobject.yaml").read_text()
    scaled = [one.replace("{{- $own -}}", "") for one in re.findall(r"query: (.*)", scaling)]
    assert len(scaled) == 2
    return [*shown, *scaled, *(rule["expr"] for rule in rules())]


@pytest.fixture
def samples(post, call) -> dict[str, dict[str, set[str]]]:
    """Labels and their values of each metric of a server, and of a front's own."""
    post("completions", prompt="Hi")
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(call("GET", "/metrics").text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
            found[sample.name]["replica"] |= set()  # which a front adds
    assert ':replicas"' in (ROOT / "shadowkv/serve/http/metrics.py").read_text()
    return {**found, "shadowkv:replicas": {}}


def test_metrics_and_labels_that_are_asked_for_are_there(samples):
    asked = [
        found for text in expressions() for found in re.findall(r"((?:shadowkv:|process_)\w+)(?:\{(.*?)\})?", text)
    ]
    assert len(asked) > 80
    for name, selector in asked:
        assert name in samples, name
        for label, operator, value in re.findall(r'(\w+)(=~|!=|!~|=)"(.*?)"', selector):
            assert label in samples[name].keys() | ADDED, (name, label)
            if label not in ADDED and "~" not in operator:
                assert value in samples[name][label], (name, label, value)
    known = {label for labels in samples.values() for label in labels} | ADDED | {"alertname"}
    grouped = {label for text in expressions() for by in re.findall(r"by \((.*?)\)", text) for label in by.split(", ")}
    assert {"le", "tier"} <= grouped <= known


def test_servers_are_found_by_the_name_of_their_job():
    jobs = {job for text in expressions() for job in re.findall(r'job="(.*?)"', text)}
    config = yaml.safe_load((DEPLOY / "monitoring/prometheus.yaml").read_text())
    [scraped] = config["scrape_configs"]
    assert jobs == {scraped["job_name"]} == {yaml.safe_load((DEPLOY / "helm/shadowkv/Chart.yaml").read_text())["name"]}
    port = shadowkv.serve.__main__.parse([]).port
    assert scraped["static_configs"] == [{"targets": [f"localhost:{port}"]}]


def test_panels_lie_side_by_side_and_say_what_they_show():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids, titles = ([panel[key] for panel in DASHBOARD["panels"]] for key in ("id", "title"))
    assert len({*ids}) == len(ids) and len({*titles}) == len(titles) > 30
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert {*re.findall(r"\$\{?(?!__)(\w+)", json.dumps(DASHBOARD))} == variables
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert {one["datasource"]["uid"] for one in [panel, *panel["targets"]]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_what_an_alert_advises_is_there(capsys):
    with pytest.raises(SystemExit):
        shadowkv.serve.__main__.parse(["--help"])
    flags = {*re.findall(r"--[a-z-]+", capsys.readouterr().out), "--pid", "--dir"}  # py-spy's, shadowkv cache's
    names = [rule["alert"] for rule in rules()]
    assert len({*names}) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "runbook"}
        runbook = rule["annotations"]["runbook"]
        assert {*re.findall(r"--[a-z-]+", runbook)} <= flags
        assert {*re.findall(r"ShadowKV\w+", runbook)} <= {*names}
        for quoted in re.findall(r'dashboard, "(.*?)"', runbook):
            assert quoted in {panel["title"] for panel in PANELS}


def test_the_documentation_has_every_alert_and_its_advice():
    text = (ROOT / "docs/operators.md").read_text()
    rows = dict(re.findall(r"^\| `(ShadowKV\w+)` \| .*? \| (.*) \|$", text, re.MULTILINE))
    assert {name: row.replace("`", "") for name, row in rows.items()} == {
        rule["alert"]: rule["annotations"]["runbook"] for rule in rules()
    }


def test_compose_mounts_files_that_are_there():
    folder = DEPLOY / "monitoring"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounts = [mount.split(":") for service in services.values() for mount in service["volumes"]]
    places = {target: (folder / source).resolve() for source, target, *_ in mounts if source.startswith(".")}
    assert len(places) == 5 and all(path.is_file() for path in places.values())

    command = services["prometheus"]["command"]
    assert "--config.file=/etc/prometheus/prometheus.yaml" in command
    config = yaml.safe_load(places["/etc/prometheus/prometheus.yaml"].read_text())
    assert [places[f"/etc/prometheus/{name}"] for name in config["rule_files"]] == [ALERTS]

    [source] = yaml.safe_load(places["/etc/grafana/provisioning/datasources/shadowkv.yaml"].read_text())["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in command
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert {one["current"]["value"] for one in DASHBOARD["templating"]["list"] if one["name"] == "datasource"} == {
        source["uid"]
    }
    [provider] = yaml.safe_load(places["/etc/grafana/provisioning/dashboards/shadowkv.yaml"].read_text())["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"]) and json.loads(places[home].read_text()) == DASHBOARD


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
@pytest.mark.parametrize("what, file", [("check", ALERTS), ("test", DEPLOY / "monitoring/alerts_test.yaml")])
def test_alerts_by_prometheus_own_tool(what, file):
    done = subprocess.run(["promtool", what, "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
