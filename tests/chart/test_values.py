"""Values that are wrong: refused before anything is written, with the path and what was expected."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.chart.figures import COUNTS
from tests.chart.helm import CHART, Helm, HelmError
from tests.chart.values import POOL, SMALL, SPEC, merged

pytestmark = [pytest.mark.chart, pytest.mark.timeout(300)]

MAPPING = {"type": "prometheus", "metadata": {"serverAddress": "http://p", "query": "sum(x)"}}
BARE = [{"type": "prometheus", "metadata": {"serverAddress": "http://p", "query": "vllm:num_requests_waiting"}}]
HPA, KEDA = {"maxReplicas": 4}, {"maxReplicaCount": 4}
OTHER_HPA = {
    "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "mine"},
    "spec": {"scaleTargetRef": {"kind": "ModelDeployment", "name": "chat"}},
}  # fmt: skip


def model(**more: Any) -> dict[str, Any]:
    return {"models": {"chat": {"spec": SPEC, **more}}}


def spec(**more: Any) -> dict[str, Any]:
    return {"models": {"chat": {"spec": {**SPEC, **more}}}}


def pool(**more: Any) -> dict[str, Any]:
    return {"pools": {"other": {**POOL, **more}}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    # (values, path, what the message says besides)
    ({"replicaCount": 2}, "", "replicaCount"),
    ({"controller": {"replicas": "two"}}, "controller/replicas", "integer"),
    ({"controller": {"replicas": 0}}, "controller/replicas", "1"),
    ({"controller": {"image": {"digest": "latest"}}}, "controller/image/digest", "sha256"),
    ({"controller": {"image": {"name": "x"}}}, "controller/image", "name"),
    ({"controller": {"settings": {"leaseSecond": 3}}}, "controller/settings", "leaseSecond"),
    ({"controller": {"resources": {"request": {}}}}, "controller/resources", "request"),
    ({"controller": {"tolerations": {"operator": "Exists"}}}, "controller/tolerations", "array"),
    ({"controller": {"securityContext": {"runAsRoot": True}}}, "controller/securityContext", "runAsRoot"),
    ({"controller": {"tokens": [{"name": "x", "roles": ["admin"], "sha256": "a" * 64}]}}, "controller/tokens/0", ""),
    ({"tls": {"mode": "selfsigned"}}, "tls/mode", "self-signed"),
    ({"logLevel": "trace"}, "logLevel", "debug"),
    ({"gateway": {"service": {"port": 0}}}, "gateway/service/port", "1"),
    ({"gateway": {"settings": {"hold": {"limit": -1}}}}, "gateway/settings/hold/limit", "0"),
    ({"agent": {"config": {"data_tls": "yes"}}}, "agent/config/data_tls", "boolean"),
    ({"agent": {"config": {"compile_cache": {"quota": 1}}}}, "agent/config/compile_cache", "quota"),
    ({"externalRedis": {"url": "redis://user:password@host"}}, "externalRedis/url", ""),
    ({"runtimes": {"other": {"image": "x"}}}, "runtimes/other", "engine"),
    ({"runtimes": {"vLLM": {"engine": "vllm"}}}, "runtimes", "vLLM"),
    (pool(replica=2), "pools/other", "replica"),
    (pool(slot={"devices": 0, "resourceName": "nvidia.com/gpu"}), "pools/other/slot/devices", "1"),
    (pool(slot={"resourceName": "gpu"}), "pools/other/slot/resourceName", ""),
    (pool(weights={"claimName": "x"}), "pools/other/weights", "mountPath"),
    (pool(sharedMemory=16), "pools/other/sharedMemory", "string"),
    (pool(agentConfig={"data_tls": "yes"}), "pools/other/agentConfig/data_tls", "boolean"),
    (pool(agentConfig={"slot": "mine"}), "pools/other/agentConfig", "slot"),
    ({"pools": {"other": {"runtime": "vllm"}}}, "pools/other", "slot"),
    (spec(replica=2), "models/chat/spec", "replica"),
    (spec(start={"mode": "Fast"}), "models/chat/spec/start/mode", "Guardian"),
    (spec(guardians={"level": 3}), "models/chat/spec/guardians/level", "2"),
    (model(hpa={"maxReplicas": 4, "minReplicas": 0}), "models/chat/hpa/minReplicas", "1"),
    (model(scaledObject={**KEDA, "triggers": MAPPING}), "models/chat/scaledObject/triggers", "a list: triggers: [{"),
    (model(scaledObject={**KEDA, "triggers": BARE}), "models/chat/scaledObject/triggers/0/metadata/query", "sum"),
    (model(scaledObject={**KEDA, "triggers": []}), "models/chat/scaledObject/triggers", "1"),
    (model(service={"port": 70000}), "models/chat/service/port", ""),
    ({"prometheusRule": {"rules": [{"alert": "x"}]}}, "prometheusRule/rules/0", "expr"),
]
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        merged(model(hpa=HPA, scaledObject=KEDA), {"metrics": {"enabled": True}}),
        "models.chat: expected hpa or scaledObject",
    ),
    (model(hpa=HPA), "models.chat.hpa: expected metrics.enabled"),
    ({"agent": {"config": {"accelerators": {}}}}, "agent.config: expected devices: [] beside accelerators"),
    (model(scaledObject=KEDA), "models.chat.scaledObject: expected externalScaler.enabled"),
    (
        merged(model(hpa=HPA), spec(writer="KEDA"), {"metrics": {"enabled": True}}),
        "models.chat.spec.writer: expected HPA or nothing beside hpa, got KEDA",
    ),
    (
        merged(model(hpa=HPA), {"metrics": {"enabled": True}, "extraObjects": [OTHER_HPA]}),
        "models.chat: expected one writer of spec.replicas",
    ),
    (merged(spec(writer="Kubectl"), {"extraObjects": [OTHER_HPA]}), "and HorizontalPodAutoscaler relight-system/mine"),
    (
        {"redis": {"enabled": True}, "externalRedis": {"url": "redis://r:6379/0"}},
        "redis.enabled: expected false with externalRedis",
    ),
    (pool(slot={"devices": 1}), "pools.other.slot: expected either resourceName"),
    (pool(agentConfig={"accelerators": {}}), "pools.other.agentConfig: expected devices: [] beside accelerators"),
    (pool(weights={"mountPath": "/m"}), "pools.other.weights: expected either claimName or hostPath"),
    ({"tls": {"mode": "existing"}}, "tls.existingSecrets."),
    (
        {"tls": {"mode": "cert-manager"}, "agent": {"namespaces": ["team-a"]}},
        "tls.certManager.issuerRef: expected a ClusterIssuer",
    ),
    ({"gateway": {"token": {"existingSecret": "t"}}}, "gateway.token.sha256: expected"),
    (merged(pool(), {"pools": {"nodes": POOL}, "node": {"enabled": True}}), "pools.nodes: expected another name"),
]  # fmt: skip


def refused(helm: Helm, values: dict[str, Any]) -> str:
    with pytest.raises(HelmError) as error:
        helm.template(merged(SMALL, values))
    COUNTS["bad_values_refused"] += 1
    return str(error.value)


@pytest.mark.parametrize(("values", "path", "told"), BAD, ids=[f"{p or 'top'}-{n}" for n, (_, p, _) in enumerate(BAD)])
def test_a_wrong_value_is_refused_by_the_schema_with_its_path(
    helm: Helm, values: dict[str, Any], path: str, told: str
) -> None:
    said = refused(helm, values)
    # Helm 3 says a.b.c, Helm 4 /a/b/c.
    assert path in said.replace(".", "/"), said
    assert told in said, said


@pytest.mark.parametrize(("values", "told"), CONTRADICTIONS, ids=[str(n) for n in range(len(CONTRADICTIONS))])
def test_values_that_contradict_each_other_are_refused_with_what_is_expected(
    helm: Helm, values: dict[str, Any], told: str
) -> None:
    assert told in refused(helm, values)


OPEN = {"commonLabels", "podLabels", "podAnnotations", "annotations", "nodeSelector", "labels", "additionalLabels"}
"""Mappings of the users' own keys; `global` is of all charts above."""


def _mappings(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for key, value in values.items():
        if isinstance(value, dict) and key not in OPEN and key not in ("requests", "limits", "global", "engines"):
            yield from _mappings(value, (*path, key))


def test_no_mapping_takes_a_key_that_it_does_not_know() -> None:
    import jsonschema_rs

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    validator = jsonschema_rs.validator_for(yaml.safe_load((CHART / "values.schema.json").read_text()))
    assert validator.is_valid(values)
    for path in _mappings(values):
        changed = copy.deepcopy(values)
        there = changed
        for key in path:
            there = there[key]
        # A name that would do for a pool too, with nothing that one is made of.
        there["unknown"] = {"unknown": 1}
        assert not validator.is_valid(changed), path
