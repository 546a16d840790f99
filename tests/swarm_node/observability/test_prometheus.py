"""/metrics as Prometheus reads it, and the dashboard that is made for it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import parser

import swarm_node
from swarm_node.observability.health import Health
from swarm_node.observability.metrics_reference import (
    COUNTERS,
    METRICS,
    OF_BOOTSTRAPS,
    describe_metric,
    labelled,
    metric_name,
)
from swarm_node.observability.reasons import HOSTILE
from tests.support.repository import ROOT

DASHBOARD = ROOT / "docker" / "grafana" / "swarm-node.json"
EVERY = [*(name for section in METRICS.values() for name in section), *OF_BOOTSTRAPS]
MEASURED = {
    *("disk_free_bytes", "since_checkpoint_seconds", "since_copy_seconds"),
    *("since_cloud_answer_seconds", "until_end_seconds"),
}
ROWS = [
    *("Is it training?", "Reward", "Held-out questions", "Groups", "What the swarm is worth", "Averaging", "Stages"),
    *("Traffic", "Speed", "The machine", "Cost"),
]
SHOWN = ["eval/", "machine/", "swarm/success_", "swarm/declared_", "swarm/unsolved_taught"]
UNITS = ("seconds", "bytes")
ABBREVIATED = re.compile(r"_(s|ms|us|ns|sec|b|kb|mb|gb|tb|m|h|d|mbit|bits|tok)(_|$)")
"""Units that promtool refuses (its promlint), and two of ours."""


def example(name: str) -> str:
    return re.sub(r"<(\w+)>", r"some_\1", name)


def families(name: str = "alice") -> dict[str, Any]:
    """What a node that has every number says, by metric."""
    health = Health()
    health.identify(name, "0" * 64)
    health.measures = {key: lambda: 0.5 for key in MEASURED}
    health.restarted = lambda: {"gossip": "grown to 555 MiB, 15 of them for 192.0.2.7", "dht": "exit code 2"}
    health.write(1, {example(each): 0.5 for each in EVERY})
    found = {}
    for family in parser.text_string_to_metric_families(health.metrics()):
        assert family.name not in found
        found[family.name] = family
    return found


def test_prometheus_reads_every_number_with_its_type() -> None:
    found = families()
    for each in EVERY:
        name, labels = labelled(example(each))
        assert labels == {kind: f"some_{kind}" for kind in re.findall(r"<(\w+)>", each)}
        family = found.pop(metric_name(name))
        assert family.type == ("counter" if each in COUNTERS else "gauge"), each
        assert family.documentation and "`" not in family.documentation and "](" not in family.documentation, each
        assert not re.search(r"\b(swarm|cost|eval)/", family.documentation), f"{each}: no name of /metrics"
        assert [(sample.name, sample.labels) for sample in family.samples] == [
            (metric_name(name) + "_total" * (each in COUNTERS), labels)
        ]
    assert all(family.documentation for family in found.values())
    own = {"info", "restart_info", "training", "waiting", "since_round_seconds", "start_time_seconds"} | MEASURED
    assert set(found) == {f"swarm_node_{name}" for name in own}
    assert set(EVERY) >= COUNTERS


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, family in families().items():
        assert not ABBREVIATED.search(name), name
        assert not name.endswith(("_sum", "_count", "_bucket", "_total")), f"{name}: that is a histogram's, or added"
        units = [unit for unit in UNITS if f"_{unit}" in name and f"{unit}_per_" not in name]
        assert all(name.endswith(unit) for unit in units), f"{name}: the unit comes last"
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples), name


def test_bootstraps_are_told_by_a_label_that_stays() -> None:
    down = {rule["alert"]: rule["expr"] for rule in alerts() if rule["alert"].endswith("Down")} | counts()
    target, _, gone = down.pop("SwarmBootstrapDown").partition(" or ")
    assert target == 'up{role="bootstrap"} == 0', "no history, which ends after a day"
    assert gone.count('up{role="bootstrap"}') == 2
    for name, expr in down.items():
        ups = re.findall(r"\bup\b(\{[^}]*\})?", expr)
        assert ups and all('role!="bootstrap"' in each for each in ups), name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_finds_no_fault_in_the_names() -> None:
    health = Health()
    health.identify("alice", "0" * 64)
    health.write(1, {example(each): 0.5 for each in EVERY})
    subprocess.run(["promtool", "check", "metrics"], input=health.metrics(), text=True, check=True)


def test_any_node_name_survives_in_labels() -> None:
    name = 'a "quoted" \\ name\nof two lines'
    [sample] = families(name)["swarm_node_info"].samples
    assert sample.labels == {"name": name, "role": "trainer", "swarm": "0" * 64, "version": swarm_node.__version__}
    assert sample.value == 1.0


def test_restarts_of_the_network_say_why() -> None:
    found = [(sample.labels, sample.value) for sample in families()["swarm_node_restart_info"].samples]
    assert found == [
        ({"process": "gossip", "reason": "grown to 555 MiB, 15 of them for 192.0.2.7"}, 1.0),
        ({"process": "dht", "reason": "exit code 2"}, 1.0),
    ]
    assert "restart_info" not in Health().metrics()


def test_a_figure_that_survives_resuming_is_no_counter() -> None:
    assert describe_metric("swarm/rejected/age") == describe_metric("swarm/rejected/seal")
    assert describe_metric("swarm/bytes_in") == ("All traffic in, in bytes: a running total.", True)
    for name in ("round", "num_tokens", "cost/spent", "averaging/exchanges"):
        described = describe_metric(name)
        assert described is not None and not described[1], name
    assert describe_metric("nonsense") is None


# --------------------------------------------------------------------- the dashboard and the alerts


def names_of_samples() -> set[str]:
    return {sample.name for family in families().values() for sample in family.samples}


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((DASHBOARD.parent / "alerts.yml").read_text())["groups"]
    return [rule for rule in group["rules"] if "alert" in rule]


def counts() -> dict[str, str]:
    """What alerts look up, by its name."""
    [group] = yaml.safe_load((DASHBOARD.parent / "alerts.yml").read_text())["groups"]
    return {rule["record"]: rule["expr"] for rule in group["rules"] if "record" in rule}


def check_alerts(folder: Path, series: dict[str, str], at: str, expected: dict[str, list[dict[str, str]]]) -> None:
    """Let promtool compare alerts that fire: `expected` has for each alert labels, with `summary` among them."""
    actions = {rule["alert"]: rule["annotations"]["action"] for rule in alerts()}
    tests = []
    for name, fired in expected.items():
        exp_alerts = [
            {
                "exp_labels": {key: value for key, value in labels.items() if key != "summary"},
                "exp_annotations": {"summary": labels["summary"], "action": actions[name]},
            }
            for labels in fired
        ]
        tests.append({"eval_time": at, "alertname": name, "exp_alerts": exp_alerts})
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": tests,
    }
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DASHBOARD.parent / "alerts.yml")], "tests": [test]}))
    subprocess.run(["promtool", "test", "rules", file], check=True)


def test_alerts_name_what_a_node_can_say() -> None:
    known = names_of_samples()
    for rule in alerts():
        used = re.findall(r"\bswarm_node_\w+", rule["expr"])
        assert set(used) <= known and (used or "up{" in rule["expr"]), rule["alert"]
        reasons = re.findall(r'reason=~"([^"]+)"', rule["expr"])
        assert {reason for each in reasons for reason in each.split("|")} <= HOSTILE
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "action"}
    assert len({rule["alert"] for rule in alerts()}) == len(alerts()) > 5
    loaded = yaml.safe_load((DASHBOARD.parent / "prometheus.yml").read_text())
    assert loaded["rule_files"] == ["alerts.yml"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_takes_the_alerts() -> None:
    subprocess.run(["promtool", "check", "config", DASHBOARD.parent / "prometheus.yml"], check=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_a_bootstrap_is_missed_when_its_pod_is_gone(tmp_path: Path) -> None:
    up = 'up{{job="{}", role="bootstrap", instance="{}"}}'
    series = {
        up.format("gone", "10.0.0.1:31390"): "1x10 _x40",
        up.format("down", "a:31390"): "1x10 0x40",
        up.format("moved", "10.0.0.1:31390"): "1x10 _x40",
        up.format("moved", "10.0.0.2:31390"): "_x10 1x40",
    }
    called = {"gone": {"job": "gone"}, "a:31390": {"job": "down", "role": "bootstrap", "instance": "a:31390"}}
    expected = [
        labels | {"severity": "critical", "summary": f"{name}: a bootstrap does not answer"}
        for name, labels in called.items()
    ]
    check_alerts(tmp_path, series, "25m", {"SwarmBootstrapDown": expected})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_nodes_are_missed_when_their_pods_are_gone(tmp_path: Path) -> None:
    there, gone, down, new = "1x50", "1x10 stale", "1x10 0x40", "_x11 1x40"
    jobs = {
        "all": [there, there, there],
        "moved": [there, gone, new],
        "one": [there, there, there, gone],
        "half": [there, gone, there, gone],
        "none": [gone, gone],
        "silent": [there, down, down],
    }
    series = {
        f'{name}{{job="{job}", instance="{job}{i}"}}': values
        for job, nodes in jobs.items()
        for i, values in enumerate(nodes)
        for name in ("up", "swarm_node_training")
    }
    lone = [{"job": job, "summary": f"{job}: a node does not answer"} for job in ("one", "half")]
    for instance in ("silent1", "silent2"):
        lone.append({"job": "silent", "instance": instance, "summary": f"{instance}: a node does not answer"})
    many = [
        {"job": job, "summary": f"{share} of the nodes of {job} do not answer"}
        for job, share in (("half", "50%"), ("none", "100%"), ("silent", "66.67%"))
    ]
    expected = {
        "SwarmNodeDown": [labels | {"severity": "warning"} for labels in lone],
        "SwarmNodesDown": [labels | {"severity": "critical"} for labels in many],
    }
    check_alerts(tmp_path, series, "40m", expected)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_a_node_that_ended_too_early_is_told_from_one_that_is_done(tmp_path: Path) -> None:
    """Targets that stay, as machines that are listed do."""
    until_end = {
        "endless": "Inf Inf Inf Inf Inf Inf Inf Inf Inf Inf stale",
        "early": "4000-60x10 stale",
        "done": "600-60x10 stale",
        "restarted": "Inf Inf Inf Inf _x5 Inf Inf Inf",
        "there": "9000x80",
    }
    up = {"restarted": "1x10 0x5 1x60", "there": "1x80"}
    series = {}
    for name, values in until_end.items():
        series[f'swarm_node_until_end_seconds{{job="a", instance="{name}"}}'] = values
        series[f'up{{job="a", instance="{name}"}}'] = up.get(name, "1x10 0x70")
    said = "ended before its rounds were done, and was not started again"
    ended = [
        {"job": "a", "instance": name, "severity": "warning", "summary": f"{name} {said}"}
        for name in ("endless", "early")
    ]
    check_alerts(tmp_path, series, "30m", {"SwarmNodeEnded": []})
    check_alerts(tmp_path, series, "45m", {"SwarmNodeEnded": ended})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_a_cloud_without_notices_and_a_network_that_restarts_are_told(tmp_path: Path) -> None:
    series = {
        'swarm_node_since_cloud_answer_seconds{job="a", instance="deaf"}': "2+60x60",
        'swarm_node_since_cloud_answer_seconds{job="a", instance="warned"}': "2x60",
        'swarm_node_swarm_restarts_total{job="a", instance="bad", process="gossip"}': "0x10 1+1x5 6x44",
        'swarm_node_swarm_restarts_total{job="a", instance="bad", process="dht"}': "0x30 1x30",
    }
    labels = {"job": "a", "severity": "warning"}
    deaf = "deaf: its cloud does not say whether it takes the machine back"
    bad = "bad: its process gossip was started again 6 times within an hour"
    expected = {
        "SwarmNodeUnwarned": [labels | {"instance": "deaf", "summary": deaf}],
        "SwarmNodeNetworkRestarts": [labels | {"instance": "bad", "process": "gossip", "summary": bad}],
    }
    check_alerts(tmp_path, series, "60m", expected)
    check_alerts(tmp_path, series, "9m", dict.fromkeys(expected, []))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_bootstraps_say_their_role_themselves(tmp_path: Path) -> None:
    series = {}
    for name, role in (("hub", "bootstrap"), ("node", "trainer")):
        series[f'swarm_node_info{{job="a", instance="{name}", role="{role}"}}'] = "1x60"
        series[f'swarm_node_training{{job="a", instance="{name}"}}'] = "0x60"
        series[f'swarm_node_swarm_trainers{{job="a", instance="{name}"}}'] = "0x60"
    hub, node = ({"job": "a", "instance": name} for name in ("hub", "node"))
    critical, warning = {"severity": "critical"}, {"severity": "warning"}
    expected = {
        "SwarmBootstrapNotJoinable": [
            hub | critical | {"summary": "hub: nobody can join through this bootstrap"},
        ],
        "SwarmNodeNotTraining": [node | warning | {"summary": "node runs and does not train"}],
        "SwarmNodeAlone": [node | warning | {"summary": "node sees no other member that trains"}],
    }
    check_alerts(tmp_path, series, "40m", expected)


def expressions() -> Iterator[str]:
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_every_expression_names_what_a_node_can_say() -> None:
    known = names_of_samples()
    used = set()
    for expression in expressions():
        for pattern in re.findall(r'__name__=~"([^"]+)"', expression):
            assert any(re.fullmatch(pattern, name) for name in known), expression
        for name in re.findall(r"\bswarm_node_\w+", re.sub(r'"[^"]*"', '""', expression)):
            assert name in known, expression
            used.add(name)
        assert "swarm_node_" in expression
    assert len(used) > 30
    late = {each for each in EVERY if each.startswith(tuple(SHOWN))}
    assert {metric_name(labelled(each)[0]) for each in late} <= used
    assert {f"swarm_node_{each}" for each in MEASURED} <= used


def test_every_panel_is_of_the_chosen_nodes() -> None:
    """By name and by instance: an instance alone is any, unless one is chosen."""
    chosen = 'on (job, instance) group_left (name) swarm_node_info{name=~"$name", instance=~"$instance"}'
    panels = [each for each in expressions() if not each.startswith("label_values(")]
    assert len(panels) > 40
    for expression in panels:
        assert chosen in expression and "$instance" not in expression.replace(chosen, ""), expression


def test_rates_are_of_counters_and_slopes_are_not() -> None:
    counters = {metric_name(labelled(example(each))[0]) + "_total" for each in COUNTERS}
    rated = {name for each in expressions() for name in re.findall(r"(?:rate|increase)\((swarm_node_\w+)\[", each)}
    sloped = {name for each in expressions() for name in re.findall(r"(?:deriv|delta)\((swarm_node_\w+)\[", each)}
    assert "swarm_node_swarm_rejected_total" in rated and rated <= counters
    assert sloped and not sloped & counters


def test_the_dashboard_is_as_grafana_exports_them() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["id"] is None and board["schemaVersion"] >= 38 and board["uid"] == "swarm-node"
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "name": "query", "instance": "query"}
    panels = board["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["type"] for panel in panels} - {"row"} <= {
        need["id"] for need in board["__requires"] if need["type"] == "panel"
    }
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
