"""What a whole cluster has of Relight: its definitions put up to date, and all of it taken away again.

For people and for the chart's hook, never for a controller: its account may do none of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from relight.controller.kubernetes.api import LEASE, POD, Api, Kind, Object
from relight.controller.kubernetes.definitions import definitions
from relight.controller.kubernetes.election import LABELS
from relight.controller.kubernetes.resources import (
    DEVICE_POOL,
    ENGINE_RUNTIME,
    FINALIZER,
    MODEL_DEPLOYMENT,
    POOL_LABEL,
)
from relight.core.clock import Clock
from relight.core.errors import NotFound, Unavailable

DEFINITION = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
SERVICE = Kind("", "v1", "services", "Service")
OF_MODELS = "app.kubernetes.io/part-of=relight,app.kubernetes.io/component=model"
"""Labels of the Services that the chart makes beside models, and leaves with them."""
KINDS = (MODEL_DEPLOYMENT, DEVICE_POOL, ENGINE_RUNTIME)
"""In the order in which they go: pools and runtimes last, for models end in them."""
LOOK_SECONDS = 0.2


async def update_definitions(api: Api) -> tuple[str, ...]:
    """Writes this version's definitions. Returns the names of those that were not so before.

    Raises Conflict when somebody else wrote one meanwhile, Denied where that is not allowed.
    """
    changed = []
    for wanted in definitions():
        name = wanted["metadata"]["name"]
        try:
            found = await api.get(DEFINITION, "", name)
        except NotFound:
            await api.create(DEFINITION, "", wanted)
            changed.append(name)
            continue
        written = await api.replace(DEFINITION, {**found, "spec": {**found["spec"], **wanted["spec"]}})
        # Not by its generation: some servers count each write of a schema with fractions.
        if written["spec"] != found["spec"]:
            changed.append(name)
    return tuple(changed)


@dataclass(frozen=True, slots=True)
class Holding:
    """What there is: names of definitions, and objects by kind as namespace/name."""

    definitions: tuple[str, ...]
    objects: dict[str, tuple[str, ...]]


async def holding(api: Api) -> Holding:
    """What `purge` would delete."""
    objects = {}
    for kind in KINDS:
        found = [o["metadata"] for o in await _all(api, kind)]
        objects[kind.plural] = tuple(f"{m['namespace']}/{m['name']}" for m in found)
    return Holding(tuple(await _definitions(api)), objects)


async def purge(api: Api, clock: Clock, patience: float, timeout: float) -> Holding:
    """Deletes every object of Relight's kinds, then definitions, leases, and Services of models that the chart left.
    Returns what there was.

    A controller that runs has `patience` seconds to end the models' instances; then, or where none runs, its finalizer
    is taken away. Slot pods end within their grace period. Raises Unavailable when something stays for longer than
    `timeout`, as for a finalizer of others.
    """
    found = await holding(api)
    await _delete(api, MODEL_DEPLOYMENT)
    await _until(clock, patience, lambda: _gone(api, MODEL_DEPLOYMENT))
    for model in await _all(api, MODEL_DEPLOYMENT):
        await _release(api, model)
    for kind in KINDS[1:]:
        await _delete(api, kind)
    await _delete_slots(api)
    for name in found.definitions:
        await api.delete(DEFINITION, "", name)
    await _delete(api, LEASE, ",".join(f"{k}={v}" for k, v in LABELS.items()))
    await _delete(api, SERVICE, OF_MODELS)

    async def none_left() -> bool:
        return not await _definitions(api)

    if not await _until(clock, timeout, none_left):
        stays = await holding(api)
        named = ", ".join(n for names in stays.objects.values() for n in names)
        raise Unavailable(f"deleted, and not gone after {timeout:g} s: {named or ', '.join(stays.definitions)}")
    return found


async def _all(api: Api, kind: Kind, labels: str = "") -> list[Object]:
    try:
        items, _ = await api.list(kind, labels)
    except NotFound:
        return []
    return items


async def _definitions(api: Api) -> list[str]:
    names = {wanted["metadata"]["name"] for wanted in definitions()}
    return [o["metadata"]["name"] for o in await _all(api, DEFINITION) if o["metadata"]["name"] in names]


async def _delete(api: Api, kind: Kind, labels: str = "") -> None:
    for found in await _all(api, kind, labels):
        await api.delete(kind, found["metadata"]["namespace"], found["metadata"]["name"])


async def _delete_slots(api: Api) -> None:
    """Not left to the garbage collector: it deletes nothing whose owner is of a kind that is not served any more."""
    for pod in await _all(api, POD, POOL_LABEL):
        metadata = pod["metadata"]
        if any(owner["kind"] == DEVICE_POOL.kind for owner in metadata.get("ownerReferences") or []):
            await api.delete(POD, metadata["namespace"], metadata["name"], uid=metadata["uid"])


async def _gone(api: Api, kind: Kind) -> bool:
    return not await _all(api, kind)


async def _release(api: Api, model: Object) -> None:
    metadata = model["metadata"]
    others = [f for f in metadata.get("finalizers") or [] if f != FINALIZER]
    try:
        await api.patch(
            MODEL_DEPLOYMENT, metadata["namespace"], metadata["name"], {"metadata": {"finalizers": others}}
        )  # fmt: skip
    except NotFound:
        # A controller was faster.
        return


async def _until(clock: Clock, seconds: float, holds: Callable[[], Awaitable[bool]]) -> bool:
    until = clock.monotonic() + seconds
    while not await holds():
        if clock.monotonic() >= until:
            return False
        await asyncio.sleep(LOOK_SECONDS)
    return True
