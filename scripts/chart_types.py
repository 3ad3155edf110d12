"""What the chart's values may be, where a default does not say it: by a key's name, or by its whole path.

Objects of Kubernetes' own are closed as far as their first level; deeper the API server refuses what is wrong.
"""

from __future__ import annotations

from typing import Any

from relight.agent.config import AgentConfig
from relight.controller.kubernetes.definitions import definitions

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
SCALAR: Schema = {"type": ["string", "number"]}
OPEN: Schema = {"type": "object"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}


def some(*required: str, **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    found: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**found, "required": list(required)} if required else found


def several(item: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": item}


def each(value: Schema) -> Schema:
    """A mapping from any key."""
    return {"type": "object", "additionalProperties": value}


def by_name(value: Schema) -> Schema:
    """A mapping from names of objects."""
    return {"type": "object", "patternProperties": {NAME["pattern"]: value}, "additionalProperties": False}


def whole(low: int = 0, high: int = 1 << 53) -> Schema:
    """An integer."""
    return {"type": "integer", "minimum": low, "maximum": high}


LABELS = each(STRING)
QUANTITIES = each(SCALAR)
NUMBER: Schema = {"type": "number", "minimum": 0}
SECRET: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9.]+([eEinumkKMGTP][i0-9]*)?$"}
TOLERATIONS = several(
    some(key=STRING, operator={"enum": ["Exists", "Equal", "Lt", "Gt"]}, value=STRING, effect=STRING,
         tolerationSeconds=whole())
)  # fmt: skip
SECURITY = some(
    allowPrivilegeEscalation=BOOLEAN, appArmorProfile=OPEN,
    capabilities=some(add=several(STRING), drop=several(STRING)),
    privileged=BOOLEAN, procMount=STRING, readOnlyRootFilesystem=BOOLEAN, runAsGroup=whole(), runAsNonRoot=BOOLEAN,
    runAsUser=whole(), seLinuxOptions=LABELS, seccompProfile=some("type", type=STRING, localhostProfile=STRING),
)  # fmt: skip
POD_SECURITY = some(
    appArmorProfile=OPEN, fsGroup=whole(), fsGroupChangePolicy=STRING, runAsGroup=whole(), runAsNonRoot=BOOLEAN,
    runAsUser=whole(), seLinuxOptions=LABELS, seccompProfile=some("type", type=STRING, localhostProfile=STRING),
    supplementalGroups=several(whole()), sysctls=several(some("name", "value", name=STRING, value=STRING)),
)  # fmt: skip
RESOURCES = some(requests=QUANTITIES, limits=QUANTITIES, claims=several(some("name", name=STRING, request=STRING)))
ENV = several(some("name", name=STRING, value=STRING, valueFrom=OPEN))
ENV_FROM = several(some(prefix=STRING, configMapRef=OPEN, secretRef=OPEN))
MOUNTS = several(
    some("name", "mountPath", name=STRING, mountPath=STRING, subPath=STRING, subPathExpr=STRING, readOnly=BOOLEAN,
         recursiveReadOnly=STRING, mountPropagation=STRING)
)  # fmt: skip
VOLUMES = several({"type": "object", "required": ["name"], "properties": {"name": NAME}})
AFFINITY = some(nodeAffinity=OPEN, podAffinity=OPEN, podAntiAffinity=OPEN)
SPREAD = several(
    some("maxSkew", "topologyKey", "whenUnsatisfiable", maxSkew=whole(1), topologyKey=STRING,
         whenUnsatisfiable={"enum": ["DoNotSchedule", "ScheduleAnyway"]}, labelSelector=OPEN, minDomains=whole(1),
         matchLabelKeys=several(STRING), nodeAffinityPolicy=STRING, nodeTaintsPolicy=STRING)
)  # fmt: skip
ROLLING = some(type=STRING, rollingUpdate=some(maxSurge=SCALAR, maxUnavailable=SCALAR))
SERVICE_TYPE: Schema = {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}
PEERS = several(some(podSelector=OPEN, namespaceSelector=OPEN, ipBlock=OPEN))

TYPES: dict[str, Schema] = {
    **dict.fromkeys(
        ("commonLabels", "podLabels", "podAnnotations", "annotations", "nodeSelector", "labels", "additionalLabels"),
        LABELS,
    ),
    "tolerations": TOLERATIONS,
    "affinity": AFFINITY,
    "topologySpreadConstraints": SPREAD,
    "securityContext": SECURITY,
    "podSecurityContext": POD_SECURITY,
    "resources": RESOURCES,
    "env": ENV,
    "envFrom": ENV_FROM,
    "extraArgs": several(STRING),
    "extraVolumes": VOLUMES,
    "extraVolumeMounts": MOUNTS,
    "strategy": ROLLING,
    "updateStrategy": ROLLING,
    "pullPolicy": {"enum": ["", "Always", "IfNotPresent", "Never"]},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "relabelings": several(OPEN),
    "metricRelabelings": several(OPEN),
    "namespaces": several(NAME),
    "existingSecret": SECRET,
    "maxUnavailable": SCALAR,
    "size": QUANTITY,
    "sizeLimit": QUANTITY,
}

_SPECS = {d["spec"]["names"]["kind"]: d["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
          for d in definitions()}  # fmt: skip


def _closed(node: Any) -> Any:
    """A definition's schema as draft 7, which refuses what it does not name."""
    if not isinstance(node, dict):
        return node
    found = {k: v for k, v in node.items() if not k.startswith("x-kubernetes-") and k not in ("format", "default")}
    if found.pop("exclusiveMinimum", False):
        found["exclusiveMinimum"] = found.pop("minimum")
    if "properties" in found:
        found["properties"] = {name: _closed(inner) for name, inner in found["properties"].items()}
        found["additionalProperties"] = False
    if "items" in found:
        found["items"] = _closed(found["items"])
    return found


MODEL, POOL, RUNTIME = (_closed(_SPECS[kind]) for kind in ("ModelDeployment", "DevicePool", "EngineRuntime"))

TRIGGERS: Schema = {
    # Samples that go around have a mapping here, which KEDA refuses long after the installation.
    "if": {"type": "object"},
    "then": {"const": "a list: triggers: [{type: prometheus, metadata: {serverAddress: ..., query: sum(...)}}]"},
    "else": {
        "type": "array",
        "minItems": 1,
        "items": {
            **some("type", "metadata", type=STRING, name=STRING, metadata=LABELS, metricType=STRING,
                   useCachedMetrics=BOOLEAN, authenticationRef=some("name", name=NAME, kind=STRING)),
            "if": {"properties": {"type": {"const": "prometheus"}}},
            "then": {
                "properties": {
                    "metadata": {
                        "required": ["serverAddress", "query"],
                        # One number for the model: a bare series has one for each pod, and none at zero pods.
                        "properties": {
                            "query": {"pattern": "^\\s*(sum|avg|max|min|count|scalar|quantile)\\b"},
                        },
                    }
                }
            },
        },
    },
}  # fmt: skip


def _inlined(node: Any, known: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, known) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(known[node["$ref"].rpartition("/")[2]], known)
    return {k: _inlined(v, known) for k, v in node.items() if k not in ("format", "default", "title")}


def _agent() -> Schema:
    """`agent.json`, without what slot pods are told on the command line."""
    found = AgentConfig.model_json_schema()
    told = {"slot", "controller_address", "state_dir", "token", "token_file", "tls", "host", "port", "bind_host",
            "serving_port", "supervisor_socket", "supervisor_beside"}  # fmt: skip
    properties = {name: inner for name, inner in found["properties"].items() if name not in told}
    closed: Schema = _inlined({**found, "properties": properties}, found["$defs"])
    return {k: v for k, v in closed.items() if k not in ("required", "$defs", "description")}


_POOL = some(
    "slot", "runtime",
    namespace=NAME, labels=LABELS, annotations=LABELS, replicas=POOL["properties"]["replicas"],
    slot=POOL["properties"]["slot"], runtime=NAME, allowedModels=POOL["properties"]["allowedModels"],
    resources=RESOURCES, extraResources=QUANTITIES,
    rdma=some("resourceName", "count", resourceName=STRING, count=whole(1, 64)), ipcLock=BOOLEAN,
    sharedMemory=QUANTITY, weights=some("mountPath", claimName=NAME, hostPath=STRING, mountPath=STRING),
    agentImage=STRING, agentConfig=_agent(), agentResources=RESOURCES, env=ENV, envFrom=ENV_FROM, extraVolumes=VOLUMES,
    extraVolumeMounts=MOUNTS, nodeSelector=LABELS, tolerations=TOLERATIONS, affinity=AFFINITY,
    topologySpreadConstraints=SPREAD, priorityClassName=STRING, runtimeClassName=STRING, schedulerName=STRING,
    serviceAccountName=STRING, terminationGracePeriodSeconds=whole(), imagePullSecrets=several(NAME),
    podSecurityContext=POD_SECURITY, securityContext=SECURITY, podLabels=LABELS, podAnnotations=LABELS,
    podTemplate=some(metadata=some(labels=LABELS, annotations=LABELS), spec=OPEN),
)  # fmt: skip

_HPA = some(
    "maxReplicas", minReplicas=whole(1), maxReplicas=whole(1), metric={"enum": ["demand", "ratio"]}, target=whole(1),
    metrics=several({"type": "object", "required": ["type"]}), behavior=some(scaleUp=OPEN, scaleDown=OPEN),
)  # fmt: skip

_SCALED = some(
    "maxReplicaCount", minReplicaCount=whole(), maxReplicaCount=whole(1), pollingInterval=whole(1),
    cooldownPeriod=whole(), behavior=some(scaleUp=OPEN, scaleDown=OPEN), triggers=TRIGGERS,
)  # fmt: skip

_MODEL = some(
    "spec", namespace=NAME, labels=LABELS, annotations=LABELS, spec=MODEL, hpa=_HPA, scaledObject=_SCALED,
    service=some("port", type=SERVICE_TYPE, port=whole(1, 65535),
                 annotations=LABELS),
)  # fmt: skip


AT: dict[str, Schema] = {
    "logLevel": {"enum": ["debug", "info", "warning", "error"]},
    "global.imagePullSecrets": several(NAME),
    "tls.mode": {"enum": ["self-signed", "cert-manager", "existing"]},
    "tls.extraHosts": several(STRING),
    "tls.selfSigned.days": whole(1, 36_500),
    "tls.certManager.issuerRef.kind": STRING,
    "tls.certManager.duration": {"type": "string", "pattern": "^[0-9]+h$"},
    "controller.replicas": whole(1, 9),
    "controller.settings.leaseSeconds": {"type": "number", "minimum": 1, "maximum": 600},
    "controller.settings.otlpEndpoint": {"type": "string", "pattern": "^(https?://[^\\s]+)?$"},
    "controller.tokens": several(
        some("name", "roles", "sha256", name={"type": "string", "minLength": 1, "maxLength": 64},
             roles=several({"enum": ["viewer", "operator", "gateway"]}),
             sha256={"type": "string", "pattern": "^[0-9a-f]{64}$"})
    ),
    **dict.fromkeys(("controller.service.type", "gateway.service.type"), SERVICE_TYPE),
    "gateway.replicas": whole(1, 100),
    "gateway.settings.hold.seconds": NUMBER,
    "gateway.settings.hold.releasePerSecond": NUMBER,
    "gateway.settings.graceSeconds": NUMBER,
    "gateway.settings.maxTries": whole(1, 16),
    "gateway.token.sha256": {"type": "string", "pattern": "^([0-9a-f]{64})?$"},
    "gateway.service.port": whole(1, 65535),
    "gateway.ingress.hosts": several(STRING),
    "gateway.ingress.tls": several(some(hosts=several(STRING), secretName=STRING)),
    "agent.servingPort": whole(1, 65535),
    "agent.metricsPort": whole(1, 65535),
    "agent.config": _agent(),
    "runtimes": by_name(RUNTIME),
    "pools": by_name(_POOL),
    "models": by_name(_MODEL),
    "redis.server": {"enum": ["valkey-server", "redis-server"]},
    "externalRedis.url": {"type": "string", "pattern": "^(rediss?://[^@\\s]+)?$"},
    "externalRedis.sentinels": {
        **some(addresses={**several(STRING), "minItems": 1}, service=STRING),
        "dependencies": {"addresses": ["service"], "service": ["addresses"]},
    },
    "prePull.images": several(STRING),
    "prePull.weights": several(
        some("name", "image", "command", "hostPath", "mountPath", name=NAME, image=STRING, command=several(STRING),
             env=ENV, envFrom=ENV_FROM, hostPath=STRING, mountPath=STRING)
    ),
    **{f"networkPolicy.{door}From": PEERS for door in ("rest", "gateway", "serving", "metrics")},
    "prometheusRule.rules": several(
        some("expr", alert=STRING, record=STRING, expr=SCALAR, labels=LABELS, annotations=LABELS,
             **{"for": STRING, "keep_firing_for": STRING})
    ),
    "extraObjects": several({"type": "object", "required": ["apiVersion", "kind", "metadata"]}),
}  # fmt: skip
