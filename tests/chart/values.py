"""Values that tests install or render."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

Values = dict[str, Any]

SPEC: Values = {
    "model": {"uri": "/models/chat", "revision": "1"}, "runtimeRef": {"name": "vllm"}, "poolRef": {"name": "large"},
    "replicas": 1, "guardians": {"replicas": 1},
}  # fmt: skip
POOL: Values = {
    "replicas": 2, "slot": {"devices": 1, "resourceName": "nvidia.com/gpu"}, "runtime": "vllm",
}  # fmt: skip
RUNTIME: Values = {"engine": "vllm", "image": "registry.example/vllm:0.32.0"}
SMALL: Values = {"runtimes": {"vllm": RUNTIME}, "pools": {"large": POOL}, "models": {"chat": {"spec": SPEC}}}
"""One of each."""

EVERYTHING: Values = {
    "node": {"enabled": True}, "prePull": {"enabled": True, "images": ["registry.example/extra:1"], "weights": [
        {"name": "chat", "image": "registry.example/fetch:1", "command": ["fetch", "/weights"],
         "hostPath": "/srv/weights", "mountPath": "/weights"},
    ]},
    "networkPolicy": {"enabled": True}, "serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True}, "grafanaDashboards": {"enabled": True},
    "commonLabels": {"team": "serving"}, "gateway": {"ingress": {"enabled": True, "hosts": ["llm.example"]}},
}  # fmt: skip
"""What stands beside the main switches."""

TLS: dict[str, Values] = {
    "self-signed": {},
    "cert-manager": {"tls": {"mode": "cert-manager"}},
    "existing": {
        "tls": {
            "mode": "existing", "authority": "-----BEGIN CERTIFICATE-----",
            "existingSecrets": {"controller": "c-tls", "gateway": "g-tls", "agent": "a-tls", "scaler": "s-tls"},
        }
    },
}  # fmt: skip
STORE: dict[str, Values] = {
    "own": {},
    "redis": {"redis": {"enabled": True}},
    "external": {
        "externalRedis": {"url": "rediss://redis.example:6379/0", "existingSecret": "r", "tlsSecret": "r-tls"}
    },
}
SCALING: dict[str, Values] = {
    "none": {},
    "hpa": {"metrics": {"enabled": True}, "models": {"chat": {"spec": SPEC, "hpa": {"maxReplicas": 4}}}},
    "keda": {
        "externalScaler": {"enabled": True},
        "models": {"chat": {"spec": SPEC, "scaledObject": {"maxReplicaCount": 4}}},
    },
}  # fmt: skip
DOOR: dict[str, Values] = {"gateway": {}, "no-gateway": {"gateway": {"enabled": False}}}
BESIDE: dict[str, Values] = {"plain": {}, "everything": EVERYTHING}


def merged(*parts: Values) -> Values:
    """Later ones over earlier ones, as Helm does it."""
    found: Values = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def combinations() -> Iterator[tuple[str, Values]]:
    """Every combination of the main switches, by name."""
    for chosen in itertools.product(TLS, STORE, SCALING, DOOR, BESIDE):
        tls, store, scaling, door, beside = chosen
        yield "-".join(chosen), merged(SMALL, BESIDE[beside], TLS[tls], STORE[store], SCALING[scaling], DOOR[door])
