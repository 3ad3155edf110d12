"""What a cluster is given as files: a real API server takes all of it, and the programs in it exist and take theirs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.kubernetes.cluster import ROOT, SYSTEM, manifests
from tests.kubernetes.plane import ControlPlane

from relight.agent.config import AgentConfig
from relight.controller.config import ControllerConfig
from relight.gateway.config import GatewayConfig

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]

DEPLOY, EXAMPLES = ROOT / "deploy" / "kubernetes", ROOT / "examples" / "kubernetes"
FILES = [p for p in sorted([*DEPLOY.glob("*.yaml"), *EXAMPLES.glob("*.yaml")]) if p.name != "definitions.yaml"]
TENANT = "manifests"
NUMBER = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXT = {"type": "string"}
ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def some(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def kind(group: str, version: str, plural: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A definition with what the kind's documentation says of the fields that the examples use."""
    schema = {"openAPIV3Schema": some("spec", spec=spec)}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Groups of Kubernetes' own domains need a word of approval.
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
        },
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"plural": plural, "singular": name.lower(), "kind": name},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }  # fmt: skip


LABELS = {"type": "object", "additionalProperties": TEXT}
OTHERS = [
    kind(
        "inference.networking.k8s.io", "v1", "inferencepools", "InferencePool",
        some(
            "selector", "targetPorts", "endpointPickerRef",
            selector=some("matchLabels", matchLabels=LABELS),
            targetPorts={"type": "array", "minItems": 1, "items": some("number", number=NUMBER)},
            endpointPickerRef=some(
                "name", group=TEXT, kind=TEXT, name=TEXT, port=some("number", number=NUMBER),
                failureMode={"type": "string", "enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    kind(
        "keda.sh", "v1alpha1", "scaledobjects", "ScaledObject",
        some(
            "scaleTargetRef", "triggers",
            scaleTargetRef=some("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
            minReplicaCount={"type": "integer"}, maxReplicaCount={"type": "integer"},
            idleReplicaCount={"type": "integer"}, pollingInterval={"type": "integer"},
            cooldownPeriod={"type": "integer"}, initialCooldownPeriod={"type": "integer"}, fallback=ANY, advanced=ANY,
            triggers={"type": "array", "minItems": 1, "items": some(
                "type", "metadata", type=TEXT, metadata=LABELS, metricType=TEXT,
                authenticationRef=some("name", name=TEXT),
            )},
        ),
    ),
]  # fmt: skip


def objects() -> list[Any]:
    return [
        pytest.param(found, id=f"{path.name}-{n}-{found['kind']}")
        for path in FILES
        for n, found in enumerate(yaml.safe_load_all(path.read_text()))
        if found
    ]


@pytest.fixture(scope="module")
def ready(plane: ControlPlane) -> ControlPlane:
    plane.apply(yaml.safe_dump_all([*OTHERS, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TENANT}}]))
    return plane


@pytest.mark.parametrize("found", objects())
def test_an_api_server_takes_it(ready: ControlPlane, found: dict[str, Any]) -> None:
    namespace = found["metadata"].get("namespace", TENANT)
    # Of the same shape, on a server that is older than v2.
    found = {**found, "apiVersion": found["apiVersion"].replace("autoscaling/v2", "autoscaling/v2beta2")}
    words = ["apply", "--dry-run=server", "-n", namespace, "-f", "-"]
    assert "(server dry run)" in ready.kubectl(*words, stdin=yaml.safe_dump(found))


def containers() -> Iterator[dict[str, Any]]:
    for param in objects():
        template = (param.values[0].get("spec") or {}).get("template") or {}
        yield from template.get("spec", {}).get("containers") or []


def test_every_program_that_a_container_runs_is_one_of_the_project() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    commands = {c["command"][0] for c in containers() if c["image"].startswith("registry.example/relight")}
    assert commands == {"relight-controller", "relight-gateway", "relight-agent"}
    assert commands <= scripts.keys()


def test_the_configurations_in_the_secrets_are_what_the_programs_take() -> None:
    found = {}
    for path in (DEPLOY / "secrets.example.yaml", DEPLOY / "node.yaml"):
        for each in yaml.safe_load_all(path.read_text()):
            for name, text in (each.get("stringData") or {}).items():
                if name.endswith(".json"):
                    found[each["metadata"]["name"]] = text
    hashed = {name: json.loads(_with_hashes(text)) for name, text in found.items()}
    controller = ControllerConfig.model_validate(hashed["relight-controller"])
    assert controller.kubernetes is not None
    assert controller.kubernetes.namespace == SYSTEM
    GatewayConfig.model_validate_json(json.dumps(hashed["relight-gateway"]))
    for name in ("relight-agent", "relight-node"):
        told = {"token_file": "/var/run/secrets/relight.dev/token"}
        AgentConfig.model_validate_json(json.dumps({**hashed[name], **told}))


def _with_hashes(text: str) -> str:
    """With what its reader puts in place of the brackets."""
    lines = [line if "sha256" not in line else line.replace(line[line.index("<") : line.index(">") + 1], "a" * 64)
             for line in text.splitlines()]  # fmt: skip
    return "\n".join(lines)


def test_the_definitions_are_among_what_the_test_cluster_was_installed_from() -> None:
    assert (DEPLOY / "rbac.yaml").read_text() in manifests()
