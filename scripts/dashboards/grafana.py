"""Grafana's dashboard format, as far as it is used here. No queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 39
"""Of Grafana 11; newer ones read it and write their own."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


class Unit(StrEnum):
    """By Grafana's names."""

    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    RATIO = "percentunit"
    CELSIUS = "celsius"
    WATTS = "watt"
    PER_SECOND = "cps"
    COUNT = "short"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression. `right` puts it on an axis of its own, in that unit; `apart` draws it dashed and out of
    the stack; `traces` shows the exemplars that lead to them."""

    expression: str
    legend: str
    right: Unit | None = None
    apart: bool = False
    traces: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph of one or more queries. `device_only`: nothing answers without an accelerator that tells it.

    `repeated` draws it once for each chosen value of that variable.
    """

    title: str
    told: str
    unit: Unit
    queries: tuple[Query, ...]
    width: int = 8
    stacked: bool = False
    single: bool = False
    """One number instead of a graph."""
    repeated: str = ""
    device_only: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, in reading order."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top, of the values that a label has."""

    name: str
    query: str
    pattern: str = ""
    """A regular expression whose group is what is offered."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`events` is an expression that is above 0 when something happened: marked in every graph."""

    uid: str
    title: str
    told: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    events: str = ""

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Of all rows."""
        return tuple(panel for row in self.rows for panel in row.panels)


def render(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.told,
        "tags": ["relight"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "title": "Relight", "type": "dashboards", "tags": ["relight"], "asDropdown": True, "keepTime": True,
                "includeVars": True,
            }
        ],
        "annotations": {"list": _events(dashboard.events)},
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": _laid_out(dashboard.rows),
    }  # fmt: skip


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "regex": variable.pattern,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _events(expression: str) -> list[dict[str, Any]]:
    if not expression:
        return []
    return [
        {
            "name": "Scale events", "datasource": SOURCE, "enable": True, "expr": expression, "iconColor": "orange",
            "titleFormat": "{{model}}", "textFormat": "the decided number changed", "step": "15s",
        }
    ]  # fmt: skip


def _laid_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    down, number = 0, 0
    for row in rows:
        number += 1
        heading = {"x": 0, "y": down, "w": COLUMNS, "h": 1}
        found.append(
            {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": heading, "panels": []}
        )
        down, right = down + 1, 0
        for panel in row.panels:
            if right + panel.width > COLUMNS:
                down, right = down + 8, 0
            number += 1
            found.append(_panel(panel, number, {"x": right, "y": down, "w": panel.width, "h": 8}))
            right += panel.width
        down += 8
    return found


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + at), "datasource": SOURCE, "editorMode": "code", "expr": query.expression,
            "legendFormat": query.legend, "range": True, "instant": False, "exemplar": query.traces,
        }
        for at, query in enumerate(panel.queries)
    ]  # fmt: skip
    drawn = {
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 0,
        "showPoints": "auto",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    made: dict[str, Any] = {
        "id": number,
        "type": "stat" if panel.single else "timeseries",
        "title": panel.title,
        "description": panel.told,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit.value, "custom": {} if panel.single else drawn},
            "overrides": _overrides(panel),
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if panel.single else _options(),
        "targets": targets,
    }
    if panel.repeated:
        made |= {"repeat": panel.repeated, "repeatDirection": "h", "maxPerRow": COLUMNS // panel.width}
    return made


def _options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    found = []
    for at, query in enumerate(panel.queries):
        properties = []
        if query.apart or (query.right and panel.stacked):
            properties.append({"id": "custom.stacking", "value": {"mode": "none", "group": "B"}})
            properties.append({"id": "custom.fillOpacity", "value": 0})
        if query.apart:
            properties.append({"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}})
        if query.right:
            properties.append({"id": "custom.axisPlacement", "value": "right"})
            properties.append({"id": "unit", "value": query.right.value})
        if properties:
            matcher = {"id": "byFrameRefID", "options": chr(ord("A") + at)}
            found.append({"matcher": matcher, "properties": properties})
    return found
