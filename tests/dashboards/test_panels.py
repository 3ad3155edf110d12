"""Every query of every panel is asked of a real Prometheus that scraped a Relight at work."""

from __future__ import annotations

import pytest
from scripts.dashboards.all import DASHBOARDS
from scripts.dashboards.grafana import Panel
from tests.dashboards.conftest import Walked
from tests.dashboards.figures import FIGURES
from tests.dashboards.recorded import FILE, exposition

pytestmark = [pytest.mark.dashboards, pytest.mark.timeout(300)]
VARIABLES = {
    "$__rate_interval": "10s",
    "$__range": "2m",
    "$namespace": "default",
    "$model": "default/m|default/spoilt|default/compiled",
}
"""As Grafana would fill them in."""


def _filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def _silent(panel: Panel, walked: Walked) -> list[str]:
    begin, end = (walked.end, walked.recorded_until) if panel.device_only else (walked.begin, walked.end)
    expressions = [_filled(query.expression) for query in panel.queries]
    return [e for e in expressions if not walked.prometheus.over(e, begin, end)]


def test_every_panel_has_data_from_a_relight_at_work_or_from_recorded_devices(walked: Walked) -> None:
    panels = [(dashboard, panel) for dashboard in DASHBOARDS for panel in dashboard.panels]
    silent = {f"{d.title} / {p.title}": found for d, p in panels if (found := _silent(p, walked))}
    device_only = [p for _, p in panels if p.device_only]
    FIGURES["panels"], FIGURES["device_only_panels"] = len(panels), len(device_only)
    FIGURES["queries"] = sum(len(p.queries) for _, p in panels)
    FIGURES["panels_without_data"] = len(silent)
    assert not silent, "\n".join(f"{title}: {queries}" for title, queries in silent.items())


def test_what_is_device_only_is_silent_without_devices(walked: Walked) -> None:
    for panel in (p for d in DASHBOARDS for p in d.panels if p.device_only):
        for query in panel.queries:
            assert not walked.prometheus.over(_filled(query.expression), walked.begin, walked.end), panel.title


def test_variables_offer_the_models_and_scale_events_are_marked(walked: Walked) -> None:
    offered = walked.prometheus.label_values("model", 'relight_desired_replicas{model=~"default/.*"}')
    assert set(offered) == {"default/m", "default/spoilt", "default/compiled"}
    marked = {_filled(d.events) for d in DASHBOARDS if d.events}
    for expression in marked:
        assert walked.prometheus.over(expression, walked.begin, walked.end)


def test_the_recorded_exposition_is_what_the_agents_code_says_of_the_recorded_readings() -> None:
    def kept(text: str) -> list[str]:
        # When a series was made is of the run, not of the devices.
        return [line for line in text.splitlines() if "_created" not in line]

    assert kept(FILE.read_text()) == kept(exposition())


def test_panels_show_what_happened(walked: Walked) -> None:
    """The walk is known: three wakes of `m` and a fourth for the killed engine, three failed proofs of `spoilt`."""

    def most(expression: str) -> float:
        found = walked.prometheus.over(expression, walked.begin, walked.end)
        return max(value for series in found for value in series["values"])

    assert most('relight_ready_replicas{model="default/m"}') == 2
    assert most('relight_guardian_requests_total{model="default/m",outcome="hit"}') >= 4
    assert most('sum(relight_rungs_total{model="default/spoilt",cause="proof-failed"})') >= 3
    assert most('relight_slow_path_total{model="default/spoilt",expected="peer_shm",taken="disk"}') >= 3
    assert most('relight_instance_failures_total{model="default/m",desired="ready"}') >= 1
    assert most('relight_cache_starts_total{outcome="hit"}') >= 1
    assert most('relight_gateway_requests_held{model="default/m"}') >= 1
    assert most("relight_invariant_violations_total") == 0
    assert most('relight_device_memory_bytes{kind="weights"}') >= 8 << 20
    assert most('relight_device_memory_bytes{kind="orphan",device="cpu-3"}') > 1 << 20
    assert most('relight_devices{healthy="false"}') >= 1
    assert set(walked.answers) == {200}


def test_a_start_leads_to_its_trace(walked: Walked) -> None:
    found = walked.prometheus.exemplars("relight_start_seconds_bucket", walked.begin, walked.end)
    assert any(len(e["labels"]["trace_id"]) == 32 for series in found for e in series["exemplars"])


def test_alerts_fire_for_what_went_wrong_and_for_nothing_else(walked: Walked) -> None:
    fired = walked.prometheus.fired(walked.begin, walked.end)
    assert {"RelightProofFailed", "RelightSlowPath"} <= fired
    assert fired <= {"RelightProofFailed", "RelightSlowPath", "RelightNoSource"}, fired
