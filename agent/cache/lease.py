"""Leases: one compile per key at a time. A pure state machine; the caller brings the clock's reading.

    free --acquire--> held --publish or release--> free
                       |  \\--renew--> held
                       \\--expiry--> free (the holder died, or lost its way)

A lease is a promise about effort, not about safety: should two engines compile one key after all (a partition, a node
that forgot its leases in a restart), one of the two bundles is kept and both engines serve. So nothing is fenced by
it, and nodes need not keep it on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from relight.core.errors import Conflict, FieldError, InvalidInput

LONGEST = 900.0
"""Seconds: a holder renews every third of what it asked for, so that its death is noticed long before a compile
ends."""
MOST = 10_000


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody compiles this key: `holder` until `expires_at` (monotonic seconds of the node)."""

    holder: str
    token: str
    expires_at: float


class Leases:
    """The leases of one node, by key. Not safe for threads: whoever owns it locks."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def current(self, key: str, now: float) -> Held | None:
        """The lease on a key, unless it has run out."""
        held = self._held.get(key)
        if held is not None and now >= held.expires_at:
            del self._held[key]
            return None
        return held

    def acquire(self, key: str, holder: str, token: str, seconds: float, now: float) -> Held:
        """The lease that stands afterwards: the caller's own if it carries `token`, somebody else's otherwise.

        Asked again with the same token it renews: a lost answer does no harm.
        """
        if not 0 < seconds <= LONGEST:
            raise InvalidInput("bad lease", [FieldError("seconds", f"above 0, at most {LONGEST:g}", str(seconds))])
        held = self.current(key, now)
        if held is not None and held.token != token:
            return held
        if held is None and len(self._held) >= MOST:
            self._sweep(now)
            if len(self._held) >= MOST:
                raise Conflict(f"{MOST} leases are held here already")
        self._held[key] = Held(holder, token, now + seconds)
        return self._held[key]

    def release(self, key: str, token: str, now: float) -> bool:
        """Ends the caller's own lease. False when it was not the caller's, or had run out."""
        held = self.current(key, now)
        if held is None or held.token != token:
            return False
        del self._held[key]
        return True

    def _sweep(self, now: float) -> None:
        self._held = {key: held for key, held in self._held.items() if now < held.expires_at}
