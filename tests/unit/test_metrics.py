"""Metrics of all components follow the field's rules, and what is made of them names nothing that is not there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from scripts.dashboards.alerts import ALERTS, PAGE, TICKET
from scripts.dashboards.all import DASHBOARDS, check_all
from scripts.dashboards.grafana import render
from scripts.dashboards.inventory import Exposed, inventory
from scripts.dashboards.queries import UnknownName, check

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
METRICS = inventory()
UNITS = ("seconds", "bytes", "bytes_per_second", "ratio", "celsius", "watts")
OTHER_UNITS = re.compile(
    r"_(ms|millis\w*|micros\w*|minutes|hours|kb|mb|gb|kib|mib|gib|kilo\w*|mega\w*|percent\w*|mw|kw|fahrenheit)(_|$)"
)
PAIRS = (("hits", "misses"), ("ok", "failed"), ("successes", "failures"), ("sent", "received"), ("alive", "dead"))
LABELS = frozenset(
    {
        "model", "slot", "device", "kind", "product", "healthy", "state", "desired", "level", "mode", "way", "asked",
        "taken", "expected", "rung", "card",
        "phase", "figure", "outcome", "cause", "status", "rule", "operation", "current", "transport", "verdict",
    }
)  # fmt: skip
"""Each has few values. `operation` is the name of a call of the store; no label is an id."""


def _each() -> list[object]:
    return [pytest.param(metric, id=metric.name) for metric in METRICS]


@pytest.mark.parametrize("metric", _each())
def test_a_name_says_whose_it_is_and_in_which_base_unit(metric: Exposed) -> None:
    assert re.fullmatch(r"relight_[a-z]+(_[a-z]+)*", metric.name)
    bare = metric.name.removesuffix("_total")
    assert metric.unit in ("", *UNITS)
    for unit in UNITS:
        if bare.endswith(f"_{unit}"):
            assert metric.unit == unit or metric.unit.endswith(unit), f"{metric.name} has the unit {metric.unit!r}"
    assert not metric.unit or bare.endswith(f"_{metric.unit}")
    assert not OTHER_UNITS.search(metric.name)


@pytest.mark.parametrize("metric", _each())
def test_counters_and_nothing_else_end_in_total(metric: Exposed) -> None:
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert metric.kind in ("counter", "gauge", "histogram")


@pytest.mark.parametrize("metric", _each())
def test_labels_have_few_values_and_are_no_ids(metric: Exposed) -> None:
    assert set(metric.labels) <= LABELS
    assert len(metric.labels) <= 4


@pytest.mark.parametrize("metric", _each())
def test_a_meaning_is_told(metric: Exposed) -> None:
    assert len(metric.told) >= 10
    assert "|" not in metric.told


@pytest.mark.parametrize("metric", [m for m in METRICS if m.kind == "histogram" and m.unit == "seconds"])
def test_buckets_reach_from_a_millisecond_to_five_minutes(metric: Exposed) -> None:
    assert metric.buckets[0] == 0.001
    assert metric.buckets[-1] >= 300
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_one_metric_with_a_label_stands_where_two_would() -> None:
    names = {metric.name for metric in METRICS}
    for name in names:
        for one, other in PAIRS:
            assert not (f"_{one}" in name and name.replace(f"_{one}", f"_{other}") in names), name


def test_no_name_is_exposed_twice() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


def test_a_renamed_metric_or_label_is_refused_wherever_it_is_asked_for() -> None:
    check_all(METRICS)
    for gone in METRICS:
        asked = [q.expression for d in DASHBOARDS for p in d.panels for q in p.queries] + [a.expression for a in ALERTS]
        if any(re.search(rf"\b{gone.name}(_bucket|_sum|_count)?\b", expression) for expression in asked):
            with pytest.raises(UnknownName, match=gone.name):
                check_all(tuple(replace(m, name="relight_renamed") if m is gone else m for m in METRICS))
    for wrong in ('relight_epoch{model="m"}', "sum by (instanze) (relight_epoch)", "relight_start_seconds_sums"):
        with pytest.raises(UnknownName):
            check(wrong, METRICS)


def test_every_metric_is_shown_or_alerted_on_or_left_out_on_purpose() -> None:
    asked = " ".join(
        [q.expression for d in DASHBOARDS for p in d.panels for q in p.queries] + [a.expression for a in ALERTS]
    )
    unseen = {m.name for m in METRICS if not re.search(rf"\b{m.name}(_bucket|_sum|_count)?\b", asked)}
    assert unseen == {
        # Parts and bounds of what is shown, for autoscalers and adapters that ask by name.
        "relight_held_requests", "relight_in_flight_requests", "relight_current_replicas", "relight_target_ratio",
        # Only where a collector of traces is configured.
        "relight_trace_exports_total",
        # Door by door it is told by `relight capabilities --paths`, with the reasons.
        "relight_paths",
    }  # fmt: skip


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.uid)
def test_a_dashboard_is_what_grafana_imports(dashboard) -> None:
    made = render(dashboard)
    assert made["schemaVersion"] >= 36
    assert re.fullmatch(r"[a-z0-9-]{1,40}", made["uid"])
    names = {variable["name"] for variable in made["templating"]["list"]}
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert [panel["id"] for panel in made["panels"]] == list(range(1, len(made["panels"]) + 1))
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "__range"}
            assert used <= names
            assert target["legendFormat"]
            assert target["datasource"]["uid"] == "${datasource}"
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in made["panels"]}
    assert len(places) == len(made["panels"])


def test_dashboards_do_not_collide_and_show_enough() -> None:
    assert len({d.uid for d in DASHBOARDS}) == len(DASHBOARDS)
    assert sum(len(d.panels) for d in DASHBOARDS) >= 30
    for dashboard in DASHBOARDS:
        titles = [panel.title for panel in dashboard.panels]
        assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a.name)
def test_an_alert_has_a_runbook_that_says_what_it_means_and_what_to_do(alert) -> None:
    assert re.fullmatch(r"Relight[A-Z]\w+", alert.name)
    assert alert.severity in (PAGE, TICKET)
    text = (RUNBOOKS / f"{alert.runbook}.md").read_text()
    assert alert.name in text.splitlines()[0]
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## What it means", "## Look first", "## Do"]
    row = f"| {alert.name} | {alert.severity} | [{alert.runbook}]({alert.runbook}.md) |"
    assert row in (RUNBOOKS / "README.md").read_text()


def test_runbooks_lead_to_what_there_is() -> None:
    pages = {path.stem: path.read_text() for path in RUNBOOKS.glob("*.md")}
    assert set(pages) - {"README"} == {alert.runbook for alert in ALERTS}
    commands = (ROOT / "docs" / "cli.md").read_text()
    titles = {panel.title for dashboard in DASHBOARDS for panel in dashboard.panels}
    for name, text in pages.items():
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (RUNBOOKS / link).exists(), f"{name}: {link}"
        for words in re.findall(r"`relight ([a-z]+(?: [a-z]+)?)", text):
            known = any(f"## relight {w}\n" in commands for w in (words, words.partition(" ")[0]))
            assert known, f"{name}: relight {words}"
        for shown in re.findall(r"panels? \*([^*]+)\*(?: and \*([^*]+)\*)?", text):
            assert {title for title in shown if title} <= titles, f"{name}: {shown}"
