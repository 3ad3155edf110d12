"""Kubernetes' own schemas, strict: what is rendered has the fields that a version has, and no others."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema_rs
from tests.chart.helm import ROOT

from relight.controller.kubernetes.definitions import definitions

FOLDER = ROOT / ".cache" / "chart" / "schemas"
OTHERS = {"cert-manager.io", "monitoring.coreos.com", "keda.sh"}
"""Groups whose definitions are others' and lie in no package: their objects are not checked here."""


@cache
def _known(version: str) -> tuple[dict[str, Any], dict[tuple[str, str], str]]:
    found = json.loads((FOLDER / f"{version}.json").read_text())["$defs"]
    kinds = {}
    for name, schema in found.items():
        for each in schema.get("x-kubernetes-group-version-kind") or []:
            group = f"{each['group']}/" if each["group"] else ""
            kinds[f"{group}{each['version']}", each["kind"]] = name
    return found, kinds


@cache
def _validator(version: str, api_version: str, kind: str) -> Any:
    if api_version.startswith("relight.dev/"):
        (own,) = (d for d in definitions() if d["spec"]["names"]["kind"] == kind)
        return jsonschema_rs.validator_for(_closed(own["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    found, kinds = _known(version)
    name = kinds.get((api_version, kind))
    if name is None:
        raise AssertionError(f"Kubernetes {version} has no {kind} of {api_version}")
    return jsonschema_rs.validator_for({"$defs": found, "$ref": f"#/$defs/{name}"})


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    """As a server with field validation takes it: nothing that the definition does not name."""
    found = dict(node)
    if found.pop("exclusiveMinimum", False) is True:
        found["exclusiveMinimum"] = found.pop("minimum")
    if "properties" in found:
        inner = {name: _closed(value) for name, value in found["properties"].items()}
        if "spec" in inner:
            inner |= {"apiVersion": {}, "kind": {}, "metadata": {}}
        found |= {"properties": inner, "additionalProperties": False}
    if "items" in found:
        found["items"] = _closed(found["items"])
    return found


def wrong(objects: list[dict[str, Any]], version: str) -> list[str]:
    """What a cluster of that version would refuse: kind, name, path and why."""
    told = []
    for found in objects:
        group = found["apiVersion"].partition("/")[0]
        if group in OTHERS:
            continue
        for error in _validator(version, found["apiVersion"], found["kind"]).iter_errors(found):
            where = "/".join(map(str, error.instance_path))
            told.append(f"{found['kind']} {found['metadata']['name']}: {where}: {error.message[:200]}")
    return told
