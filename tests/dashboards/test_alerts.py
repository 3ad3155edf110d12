"""promtool says that the rules are sound, that each alert fires for what it is for, and is silent for its like."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.dashboards.alerts import ALERTS, RUNBOOKS, Alert
from scripts.dashboards.all import RULES
from tests.dashboards.alert_cases import CASES, Case
from tests.dashboards.figures import FIGURES
from tests.dashboards.prometheus import ROOT, promtool

pytestmark = pytest.mark.dashboards
BY_NAME = {alert.name: alert for alert in ALERTS}


def _expected(case: Case, alert: Alert) -> list[dict[str, Any]]:
    if case.labels is None:
        return []
    labels = dict(case.labels)
    summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), alert.summary)
    return [
        {
            "exp_labels": {**labels, "severity": alert.severity},
            "exp_annotations": {"summary": summary, "runbook_url": f"{RUNBOOKS}{alert.runbook}.md"},
        }
    ]


def _test(case: Case) -> dict[str, Any]:
    return {
        "interval": f"{case.every}s",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": case.at, "alertname": case.alert, "exp_alerts": _expected(case, BY_NAME[case.alert])}
        ],
    }


def test_the_rule_file_is_sound() -> None:
    done = promtool("check", "rules", str(ROOT / RULES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS) + 4} rules found" in done.stdout


def test_every_alert_fires_when_it_shall_and_is_silent_when_it_shall_be(tmp_path: Path) -> None:
    fires, silent = ({c.alert for c in CASES if c.fires is wanted} for wanted in (True, False))
    FIGURES["alerts"] = len(ALERTS)
    untested = sorted(set(BY_NAME) - (fires & silent))
    FIGURES["alerts_untested"] = len(untested)
    assert not untested
    failed = {}
    for name, every in sorted({(case.alert, case.every) for case in CASES}):
        path = tmp_path / f"{name}-{every}.yaml"
        tests = [_test(case) for case in CASES if (case.alert, case.every) == (name, every)]
        path.write_text(
            yaml.safe_dump({"rule_files": [str(ROOT / RULES)], "evaluation_interval": f"{every}s", "tests": tests})
        )
        done = promtool("test", "rules", str(path))
        if done.returncode:
            failed[name] = done.stdout + done.stderr
    FIGURES["alerts_untested"] = len(failed)
    assert not failed, "\n".join(failed.values())
