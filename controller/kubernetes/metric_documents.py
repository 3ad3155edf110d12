"""What the metric APIs of Kubernetes say, as JSON: discovery, lists of values, selectors, quantities. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from relight.controller.autoscale.signals import Metric, Reading
from relight.controller.kubernetes.resources import MODEL_DEPLOYMENT
from relight.core.errors import FieldError, InvalidInput, Unavailable

Document = dict[str, Any]
EXTERNAL, CUSTOM = "external.metrics.k8s.io", "custom.metrics.k8s.io"
VERSIONS = {EXTERNAL: ("v1beta1",), CUSTOM: ("v1beta2", "v1beta1")}
"""The preferred one first."""
RESOURCE = f"{MODEL_DEPLOYMENT.plural}.{MODEL_DEPLOYMENT.group}"
NAMES: Mapping[str, Metric] = {f"relight_{metric}": metric for metric in Metric}

Labels = Mapping[str, str]
Selector = Callable[[Labels], bool]


def groups() -> Document:
    """The document at /apis."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(g) for g in VERSIONS]}


def group(name: str) -> Document:
    """The document of one group."""
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name)}


def _group(name: str) -> Document:
    found = [{"groupVersion": f"{name}/{v}", "version": v} for v in VERSIONS[name]]
    return {"name": name, "versions": found, "preferredVersion": found[0]}


def resources(group: str, version: str) -> Document:
    """What a version of a group serves: each metric."""
    custom = group == CUSTOM
    kind = "MetricValueList" if custom else "ExternalMetricValueList"
    found = [
        {
            "name": f"{RESOURCE}/{name}" if custom else name,
            "singularName": "",
            "namespaced": True,
            "kind": kind,
            "verbs": ["get"],
        }
        for name in NAMES
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{group}/{version}", "resources": found}


def external(name: str, readings: Iterable[Reading], chosen: Selector, now: str) -> Document:
    """One metric of all chosen models of a namespace. Raises Unavailable when one of them is not known.

    An autoscaler adds the values up: of some of them it would make too little.
    """
    items = [
        {"metricName": name, "metricLabels": _labels(r), "timestamp": now, "value": quantity(_known(r, name))}
        for r in readings
        if chosen(_labels(r))
    ]
    return {
        "kind": "ExternalMetricValueList", "apiVersion": f"{EXTERNAL}/{VERSIONS[EXTERNAL][0]}", "metadata": {},
        "items": items,
    }  # fmt: skip


def custom(name: str, version: str, readings: Iterable[Reading], now: str) -> Document:
    """One metric of ModelDeployments. Raises Unavailable when one of them is not known."""
    told: Document = {"metricName": name} if version == "v1beta1" else {"metric": {"name": name}}
    items = [
        {"describedObject": _described(r), **told, "timestamp": now, "value": quantity(_known(r, name))}
        for r in readings
    ]
    return {"kind": "MetricValueList", "apiVersion": f"{CUSTOM}/{version}", "metadata": {}, "items": items}


def status(code: int, reason: str, message: str) -> Document:
    """A failure, as Kubernetes says it."""
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason,
        "code": code,
    }  # fmt: skip


def _labels(reading: Reading) -> Labels:
    return {"model": reading.spec.name}


def _described(reading: Reading) -> Document:
    spec = reading.spec
    return {
        "kind": MODEL_DEPLOYMENT.kind, "apiVersion": MODEL_DEPLOYMENT.api_version, "namespace": spec.namespace,
        "name": spec.name,
    }  # fmt: skip


def _known(reading: Reading, name: str) -> float:
    value = reading.value(NAMES[name])
    if value is None:
        why = "no gateway is attached" if reading.demand is None else "not every slot was heard of yet"
        raise Unavailable(f"{name} of {reading.spec.key} is not known: {why}")
    return value


def quantity(value: float) -> str:
    """A number that is not negative, in thousandths where it is not whole; rounded up, so that none is lost."""
    thousandths = math.ceil(round(value * 1000, 6))
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


_KEY = r"(?P<key>[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?)"
_VALUE = r"[A-Za-z0-9]?[-A-Za-z0-9_.]*"
_REQUIREMENT = re.compile(
    rf"\s*((?P<absent>!)\s*)?{_KEY}\s*"
    rf"((?P<operator>==|=|!=)\s*(?P<value>{_VALUE})|(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?\s*(,|$)"
)


def selector(text: str) -> Selector:
    """A label selector as kubectl writes them. Raises InvalidInput."""
    found: list[Selector] = []
    at = 0
    while at < len(text):
        matched = _REQUIREMENT.match(text, at)
        if matched is None or (matched["absent"] and (matched["operator"] or matched["set"])):
            expected = "key=value, key!=value, key in (a,b), key notin (a,b), key or !key, with commas between"
            raise InvalidInput("not a label selector", [FieldError("labelSelector", expected, text[:80])])
        found.append(_requirement(matched))
        at = matched.end()
    return lambda labels: all(holds(labels) for holds in found)


def _requirement(matched: re.Match[str]) -> Selector:
    key, operator = matched["key"], matched["operator"] or matched["set"]
    if matched["absent"]:
        return lambda labels: key not in labels
    if operator is None:
        return lambda labels: key in labels
    values = {matched["value"]} if matched["operator"] else {v.strip() for v in matched["values"].split(",")}
    if operator in ("!=", "notin"):
        return lambda labels: labels.get(key) not in values
    return lambda labels: labels.get(key) in values
