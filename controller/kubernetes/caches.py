"""Everything that the operator looks at, each kind kept by a watch of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from relight.controller.kubernetes.api import NODE, POD, Api, Kind, Object
from relight.controller.kubernetes.cache import Cache
from relight.controller.kubernetes.resources import DEVICE_POOL, ENGINE_RUNTIME, MODEL_DEPLOYMENT, POOL_LABEL
from relight.core.logs import get_logger

HPA = Kind("autoscaling", "v1", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
PRIORITY_CLASS = Kind("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False)
PATIENCE_SECONDS = 10.0

log = get_logger("controller.kubernetes")


class Caches:
    """`run` in tasks of the caller's; nothing may be concluded from an absence before `filled` has returned."""

    def __init__(self, api: Api, changed: Callable[[], None]) -> None:
        self.models = Cache(api, MODEL_DEPLOYMENT, changed)
        self.pools = Cache(api, DEVICE_POOL, changed)
        self.runtimes = Cache(api, ENGINE_RUNTIME, changed)
        self.pods = Cache(api, POD, changed, POOL_LABEL)
        self.nodes = Cache(api, NODE, changed)
        self.hpas = Cache(api, HPA, changed)
        self.priorities = Cache(api, PRIORITY_CLASS, changed)
        self.all = (self.models, self.pools, self.runtimes, self.pods, self.nodes, self.hpas, self.priorities)

    async def filled(self) -> None:
        """Returns when every cache was filled once."""
        for cache in self.all:
            while not cache.synced.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(cache.synced.wait(), PATIENCE_SECONDS)
                if not cache.synced.is_set():
                    log.warning("operator.waits", kind=cache.kind.plural, reason="it could not be listed yet")

    def pods_of(self, pool: str) -> list[Object]:
        """The slot pods of a pool, by its key."""
        namespace, _, name = pool.partition("/")
        return [
            p
            for p in self.pods.objects.values()
            if p["metadata"]["namespace"] == namespace and p["metadata"]["labels"].get(POOL_LABEL) == name
        ]

    def pools_with(self, runtime: Object) -> frozenset[str]:
        """The keys of the pools that use a runtime."""
        namespace, name = runtime["metadata"]["namespace"], runtime["metadata"]["name"]
        return frozenset(
            key
            for key, pool in self.pools.objects.items()
            if pool["metadata"]["namespace"] == namespace
            and ((pool.get("spec") or {}).get("runtimeRef") or {}).get("name") == name
        )

    def scalers_of(self, model: str) -> list[str]:
        """The names of the HorizontalPodAutoscalers that write a model's number, by its key."""
        namespace, _, name = model.partition("/")
        return sorted(h["metadata"]["name"] for h in self.hpas.objects.values() if _targets(h, namespace, name))


def _targets(hpa: Mapping[str, Any], namespace: str, name: str) -> bool:
    target = (hpa.get("spec") or {}).get("scaleTargetRef") or {}
    return (
        hpa["metadata"]["namespace"] == namespace
        and target.get("kind") == MODEL_DEPLOYMENT.kind
        and target.get("name") == name
    )
