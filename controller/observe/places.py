"""Where slots stand, by the word of whoever made them: pool, allowed models, why a slot closes, and what was put there.

On one machine nobody says anything, and every slot is open to models that name no pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One slot's: its pool as `namespace/name`, the models that the pool allows (empty: all), why it closes, the
    model (by key) whose replica was last seen to stand or to come there, and how long its images took."""

    pool: str = ""
    allowed: tuple[str, ...] = ()
    closing: str = ""
    shows: str = ""
    images_seconds: float = 0.0


class Places:
    """The places of all slots; `changed` is called when one is another than before."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._places: Mapping[str, Place] = {}
        self._routed: frozenset[str] = frozenset()
        self._changed = changed

    def of(self, slot: str) -> Place:
        """The slot's place."""
        return self._places.get(slot, Place())

    def set(self, places: Mapping[str, Place]) -> None:
        """All that is known of all slots."""
        if places != self._places:
            self._places = places
            self._changed()

    def routed(self, instance: str) -> bool:
        """Whether something other than gateways still sends requests to `instance`: its drain is not over."""
        return instance in self._routed

    def set_routed(self, instances: frozenset[str]) -> None:
        """All instances that requests reach by another way than a gateway."""
        if instances != self._routed:
            self._routed = instances
            self._changed()
