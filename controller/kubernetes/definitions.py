"""The definitions of Relight's resources, as a cluster installs them: structural schemas out of the fields' bounds."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from relight.controller.kubernetes import resources
from relight.controller.kubernetes.api import Kind

Schema = dict[str, Any]

MODEL_RULES = (
    {
        "rule": "!has(self.strategy) || self.strategy.maxSurge > 0 || self.strategy.maxUnavailable > 0",
        "message": "strategy.maxSurge and strategy.maxUnavailable must not both be 0",
    },
    {
        "rule": "!has(self.bounds) || self.bounds.minReplicas <= self.bounds.maxReplicas",
        "message": "bounds.minReplicas must not exceed bounds.maxReplicas",
    },
    {
        "rule": "!has(self.scaleToZero) || !has(self.scaleToZero.idleSeconds) || !has(self.bounds) "
        "|| self.bounds.minReplicas == 0",
        "message": "scaleToZero.idleSeconds needs bounds.minReplicas 0",
    },
    {
        "rule": "!has(self.model.adapters) || !has(self.model.servedNames) "
        "|| self.model.adapters.all(a, !(a.name in self.model.servedNames))",
        "message": "model.adapters and model.servedNames need a name each",
    },
)
POOL_RULES = (
    {
        "rule": "!has(self.slot) || (has(self.slot.resourceName) && self.slot.resourceName != '') != "
        "(has(self.slot.resourceClaimTemplateName) && self.slot.resourceClaimTemplateName != '')",
        "message": "slot needs resourceName or resourceClaimTemplateName, and not both",
    },
)
"""The same is enforced by translate.py, for servers before 1.25."""


def definitions() -> list[dict[str, Any]]:
    """The three CustomResourceDefinitions, in the order in which they are installed."""
    model = _schema(resources.ModelDeploymentSpec, "What its owner asks for.")
    model["x-kubernetes-validations"] = list(MODEL_RULES)
    pool = _schema(resources.DevicePoolSpec, "What its owner asks for.")
    pool["x-kubernetes-validations"] = list(POOL_RULES)
    runtime = _schema(resources.EngineRuntimeSpec, "What its owner asks for.")
    age = ("Age", "date", ".metadata.creationTimestamp", 0)
    return [
        _definition(
            resources.ENGINE_RUNTIME,
            ("rt", "runtime"),
            runtime,
            _schema(resources.EngineRuntimeStatus, "How it stands."),
            (("Engine", "string", ".spec.engine", 0), ("Version", "string", ".status.version", 0), age),
        ),
        _definition(
            resources.DEVICE_POOL,
            ("dp", "pool"),
            pool,
            _schema(resources.DevicePoolStatus, "How it stands."),
            (
                ("Desired", "integer", ".spec.replicas", 0),
                ("Ready", "integer", ".status.slots.ready", 0),
                ("Idle", "integer", ".status.slots.idle", 0),
                ("Pending", "integer", ".status.slots.pending", 0),
                age,
            ),
            scale=True,
        ),
        _definition(
            resources.MODEL_DEPLOYMENT,
            ("md", "model"),
            model,
            _schema(resources.ModelDeploymentStatus, "How it stands."),
            (
                ("Desired", "integer", ".spec.replicas", 0),
                ("Ready", "integer", ".status.readyReplicas", 0),
                ("Waking", "integer", ".status.wakingReplicas", 0),
                ("Starting", "integer", ".status.startingReplicas", 1),
                ("Guardians", "integer", ".status.guardians.ready", 0),
                ("Revision", "string", ".status.currentRevision", 1),
                ("Pool", "string", ".spec.poolRef.name", 0),
                age,
            ),
            scale=True,
        ),
    ]


def _definition(
    kind: Kind,
    short: tuple[str, ...],
    spec: Schema,
    status: Schema,
    columns: tuple[tuple[str, str, str, int], ...],
    *,
    scale: bool = False,
) -> dict[str, Any]:
    singular = kind.kind.lower()
    subresources: dict[str, Any] = {"status": {}}
    if scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    whole = {"type": "object", "required": ["spec"], "properties": {"spec": spec, "status": status}}
    version = {
        "name": kind.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": whole},
        "subresources": subresources,
        "additionalPrinterColumns": [
            {"name": name, "type": type_, "jsonPath": path, "priority": priority}
            for name, type_, path, priority in columns
        ],
    }
    names = {"plural": kind.plural, "singular": singular, "kind": kind.kind, "listKind": f"{kind.kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{kind.group}"},
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {**names, "shortNames": list(short), "categories": ["relight"]},
            "versions": [version],
        },
    }


def _schema(model: type[BaseModel], description: str) -> Schema:
    found = model.model_json_schema(by_alias=True)
    schema = _structural(found, found.get("$defs", {}))
    schema["description"] = description
    return schema


def _structural(node: Schema, known: dict[str, Schema]) -> Schema:
    """JSON schema as pydantic writes it, in the form that API servers take: no references, no unions, no titles."""
    if "$ref" in node:
        inlined = _structural(known[node["$ref"].rpartition("/")[2]], known)
        own = {k: v for k, v in node.items() if k in ("default", "description")}
        if isinstance(own.get("default"), dict):
            # The defaults of its fields follow by themselves.
            own["default"] = {}
        return {**inlined, **own}
    if "anyOf" in node:
        # Only `X | None` is used: absent is how Kubernetes says None.
        (only,) = (option for option in node["anyOf"] if option.get("type") != "null")
        return _structural({**only, **{k: v for k, v in node.items() if k == "description"}}, known)
    # Some servers take an empty default for none at all, and refuse it.
    found = {k: v for k, v in node.items() if k in _KEPT and v not in (None, "")}
    if "exclusiveMinimum" in node:
        found |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    if node.get("type") == "integer":
        found["format"] = "int32"
    if "properties" in node:
        found["properties"] = {name: _structural(value, known) for name, value in node["properties"].items()}
    if "items" in node:
        found["items"] = _structural(node["items"], known)
    return found


_KEPT = (
    "type", "description", "default", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "pattern", "required", "x-kubernetes-preserve-unknown-fields",
)  # fmt: skip
