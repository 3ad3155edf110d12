"""Everything that is generated here, by the path that it is written to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from .alerts import ALERTS, RECORDED, rule_file
from .devices import DEVICES
from .grafana import Dashboard, render
from .inventory import Exposed, inventory
from .page import page
from .plane import PLANE
from .queries import check
from .serving import SERVING
from .starts import STARTS

DASHBOARDS = (SERVING, STARTS, DEVICES, PLANE)
CHART = Path("deploy/helm/relight")
RULES = CHART / "rules" / "relight.yaml"
_MADE = "# Written by `make docs`; do not edit.\n"


def documents() -> Mapping[Path, str]:
    """By path in the repository. Raises UnknownName when an expression names what is not exposed."""
    metrics = inventory()
    check_all(metrics)
    found = {Path("docs/metrics.md"): page(metrics)}
    for dashboard in DASHBOARDS:
        found[CHART / "dashboards" / f"{dashboard.uid}.json"] = json.dumps(render(dashboard), indent=2) + "\n"
    found[RULES] = _MADE + yaml.safe_dump(rule_file(), sort_keys=False, width=118)
    return found


def expressions(dashboard: Dashboard) -> list[str]:
    """All that a dashboard asks."""
    variables = [variable.query for variable in dashboard.variables]
    queries = [query.expression for panel in dashboard.panels for query in panel.queries]
    return [*variables, *([dashboard.events] if dashboard.events else []), *queries]


def check_all(metrics: tuple[Exposed, ...]) -> None:
    """Raises UnknownName when a dashboard, a rule or an alert names what is not exposed."""
    recorded = [rule.name for rule in RECORDED]
    asked = [expression for dashboard in DASHBOARDS for expression in expressions(dashboard)]
    for expression in (*asked, *(rule.expression for rule in (*RECORDED, *ALERTS))):
        check(expression, metrics, recorded)
