"""What slots are told to keep in host memory: the last decision, with grants for whom each copy reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from relight.controller.observe.ring import GRANT_SECONDS, period
from relight.controller.plan.hosts import Hosted, hosted
from relight.controller.plan.sources import copies_of
from relight.core.logs import get_logger
from relight.core.records import HostTier, Rung, Snapshot, SourceRef
from relight.transfer.grants import Claims, mint

log = get_logger("controller.hosts")


@dataclass(frozen=True, slots=True)
class Present:
    """The decision as of `revision`, and the keys that sources signed it with, by name of the source."""

    revision: int
    made: Hosted
    keys: Mapping[str, str] = field(repr=False)


def told(present: Present, receiver: str, now: float) -> HostTier | None:
    """What the slot `receiver` is told; equal for all calls within one period of the grants."""
    tier = present.made.tiers.get(receiver)
    if tier is None:
        return None
    expires_at = (period(now) + 2) * GRANT_SECONDS
    wanted = tuple(
        replace(w, rungs=tuple(_granted(r, w.copy, present.keys, expires_at) for r in w.rungs)) for w in tier.wanted
    )
    return replace(tier, wanted=wanted)


def _granted(rung: Rung, copy: str, keys: Mapping[str, str], expires_at: float) -> Rung:
    def grant(source: SourceRef) -> SourceRef:
        claims = Claims(source.instance, source.generation, source.manifest_digest, copy, expires_at)
        try:
            return replace(source, grant=mint(keys.get(source.instance, ""), claims))
        except ValueError:
            # The source refuses an empty grant and says so; the next rung is tried.
            log.warning("hosts.unusable-key", source=source.instance)
            return source

    helpers = tuple(map(grant, rung.helpers))
    return replace(rung, source=grant(rung.source) if rung.source else None, helpers=helpers)


class Hosts:
    """The present decision."""

    def __init__(self) -> None:
        self.present: Present | None = None
        self._listeners: list[Callable[[], None]] = []
        self._count = 0

    def listen(self, changed: Callable[[], None]) -> None:
        """`changed` is called whenever `present` was replaced."""
        self._listeners.append(changed)

    def update(self, snapshot: Snapshot) -> None:
        """Takes in a snapshot. One that is not synced says nothing: copies would go with models' unseen sources."""
        if not snapshot.synced:
            return
        before = self.present
        made = hosted(snapshot, before.made.tiers if before else {})
        keys = _keys(snapshot, made)
        if before is not None and (before.made, before.keys) == (made, keys):
            return
        self._count += 1
        self.present = Present(self._count, made, keys)
        log.info(
            "hosts.changed", copies={s: [w.copy for w in t.wanted] for s, t in made.tiers.items()},
            missing=dict(made.missing),
        )  # fmt: skip
        for listener in self._listeners:
            listener()


def _keys(snapshot: Snapshot, made: Hosted) -> dict[str, str]:
    named = {
        source.instance
        for tier in made.tiers.values()
        for wanted in tier.wanted
        for rung in wanted.rungs
        for source in (rung.source, *rung.helpers)
        if source is not None
    }
    keys = {c.report.copy: c.offer.grant_key for c in copies_of(snapshot)}
    for view in snapshot.instances:
        for member in view.members:
            if member.report is not None and member.report.source is not None:
                keys[view.instance] = member.report.source.grant_key
    return {name: key for name, key in keys.items() if name in named}
