"""Which of several controllers acts: a Lease of the API server, and the epoch that its transitions give.

Clocks of different machines are never compared: a candidate counts, on its own monotonic clock, how long the lease has
not changed. A leader stops acting before that time is over for the fastest of them, and what it did send later is
refused where it would take effect: by agents for its epoch, by the store for its lease, by the API server for the
versions of objects that its successor wrote since.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from relight.controller.kubernetes.api import LEASE, Api, Object
from relight.core.clock import Clock
from relight.core.errors import Conflict, Denied, Fenced, InvalidInput, NotFound, RelightError
from relight.core.logs import get_logger

LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 15.0, 10.0, 2.0
"""As Kubernetes' own components have them: lease duration, renew deadline, retry period."""
LABELS = {"app.kubernetes.io/managed-by": "relight"}
"""It outlives an uninstallation: agents that run on remember the epochs that its transitions gave."""

log = get_logger("controller.kubernetes.election")


class Election:
    """One candidate. `win` returns once it leads, `keep` ends with Fenced once it does not."""

    def __init__(
        self, api: Api, namespace: str, name: str, identity: str, clock: Clock, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._clock, self._seconds = clock, lease_seconds
        self._retry = lease_seconds * RETRY_SECONDS / LEASE_SECONDS
        self._seen: tuple[str, float] = ("", 0.0)
        self._held: Object = {}
        self._until = 0.0
        self.transitions = 0

    @property
    def leads(self) -> bool:
        """Whether nobody else can lead now."""
        return self._clock.monotonic() < self._until

    def require(self) -> None:
        """Raises Fenced when somebody else may lead by now."""
        if not self.leads:
            raise Fenced(f"{self._identity} no longer holds the lease {self._namespace}/{self._name}")

    async def win(self) -> int:
        """Waits until this candidate leads. Returns how often the lease has changed hands: it only grows."""
        while True:
            try:
                if await self._try():
                    log.info("election.won", identity=self._identity, transitions=self.transitions)
                    return self.transitions
            except Conflict:
                pass
            except (InvalidInput, Denied):
                raise
            except RelightError as error:
                log.warning("election.unavailable", error=str(error))
            await asyncio.sleep(self._retry)

    async def keep(self) -> None:
        """Renews until cancelled. Raises Fenced when it could not for too long, or another leads."""
        while True:
            await asyncio.sleep(self._retry)
            begun = self._clock.monotonic()
            try:
                self._held = await self._api.replace(LEASE, self._renewed(self._held))
                self._extend(begun)
                continue
            except Conflict:
                # Somebody wrote: another leader, or a hand that touched the object.
                await self._look_again()
            except NotFound:
                raise Fenced(f"the lease {self._namespace}/{self._name} is gone") from None
            except RelightError as error:
                log.warning("election.not-renewed", error=str(error))
            self.require()

    async def release(self) -> None:
        """Lets another candidate lead at once."""
        if not self.leads:
            return
        self._until = 0.0
        body = self._renewed(self._held)
        body["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._api.replace(LEASE, body)
        except RelightError as error:
            log.info("election.not-released", error=str(error))

    async def _look_again(self) -> None:
        found = await self._api.get(LEASE, self._namespace, self._name)
        if found["spec"].get("holderIdentity") != self._identity:
            self._until = 0.0
            raise Fenced(f"{found['spec'].get('holderIdentity') or 'nobody'} leads now")
        self._held = found

    async def _try(self) -> bool:
        begun = self._clock.monotonic()
        try:
            found = await self._api.get(LEASE, self._namespace, self._name)
        except NotFound:
            body: Object = {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": {"name": self._name, "namespace": self._namespace, "labels": LABELS},
                "spec": {},
            }
            self._held = await self._api.create(LEASE, self._namespace, self._renewed(body, taken=True))
            self._extend(begun)
            return True
        spec = found.get("spec") or {}
        version = found["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, begun)
        holder = spec.get("holderIdentity") or ""
        # What the holder promised counts: it may run with other settings than this candidate.
        lasts = float(spec.get("leaseDurationSeconds") or self._seconds)
        if holder and holder != self._identity and begun < self._seen[1] + lasts:
            return False
        self._held = await self._api.replace(LEASE, self._renewed(found, taken=True))
        self._extend(begun)
        return True

    def _extend(self, begun: float) -> None:
        self.transitions = int(self._held["spec"].get("leaseTransitions") or 0)
        # From before the request was sent, and shorter than what others wait.
        self._until = begun + self._seconds * RENEW_SECONDS / LEASE_SECONDS

    def _renewed(self, found: Object, *, taken: bool = False) -> Object:
        spec = dict(found.get("spec") or {})
        now = datetime.fromtimestamp(self._clock.now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if taken:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = now
        # Whole seconds are all that the field takes: rounded up, so that others wait long enough.
        whole = int(-(-self._seconds // 1))
        spec |= {"holderIdentity": self._identity, "leaseDurationSeconds": whole, "renewTime": now}
        return {**found, "spec": spec}
