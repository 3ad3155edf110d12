"""From what resources say to what the store shall hold of models. Pure: which to write, scale, delete, and whose
finalizer may go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from relight.controller.kubernetes.api import Object
from relight.controller.kubernetes.resources import FINALIZER
from relight.controller.kubernetes.translate import model_spec
from relight.controller.kubernetes.writers import last_writer
from relight.core.errors import InvalidInput
from relight.core.records import ModelSpec, Snapshot
from relight.core.states import State


@dataclass(frozen=True, slots=True)
class Intent:
    """What is wanted of all models."""

    put: tuple[ModelSpec, ...]
    """New, or other than stored in more than their number."""
    scale: tuple[tuple[ModelSpec, str], ...]
    """Other than stored in their number alone, with who wrote it."""
    delete: tuple[str, ...]
    """Stored, and nobody wants them any more."""
    hold: tuple[Object, ...]
    """To get the finalizer: nothing of them may run before they have it."""
    release: tuple[Object, ...]
    """Deleted, and nothing of them runs any more: their finalizer goes."""
    refused: Mapping[str, InvalidInput]
    """By key: what cannot be run, and why. What ran of it before runs on as it was."""


def intent(
    deployments: Mapping[str, Object],
    runtimes: Mapping[str, Object],
    pools: Mapping[str, Object],
    stored: Mapping[str, ModelSpec],
    snapshot: Snapshot,
    priorities: Mapping[str, Object] | None = None,
) -> Intent:
    """Compares what is wanted with what is stored."""
    running = {i.model for i in snapshot.instances if not i.remembered and i.state is not State.GONE}
    put, scale, hold, release = [], [], [], []
    refused: dict[str, InvalidInput] = {}
    wanted = set()
    for key, found in sorted(deployments.items()):
        metadata = found["metadata"]
        held = FINALIZER in (metadata.get("finalizers") or [])
        if metadata.get("deletionTimestamp"):
            if held and key not in stored and key not in running:
                release.append(found)
            continue
        wanted.add(key)
        if not held:
            hold.append(found)
            continue
        try:
            spec = model_spec(found, runtimes, pools, priorities)
        except InvalidInput as error:
            refused[key] = error
            continue
        # Every writer's number is taken within the bounds; the store refuses one above the maximum.
        spec = replace(spec, replicas=min(spec.replicas, spec.max_replicas))
        before = stored.get(key)
        if before is None or replace(before, replicas=spec.replicas) != spec:
            put.append(spec)
        elif before.replicas != spec.replicas:
            scale.append((spec, last_writer(found) or "kubernetes"))
    delete = tuple(sorted(set(stored) - wanted))
    return Intent(tuple(put), tuple(scale), delete, tuple(hold), tuple(release), refused)
