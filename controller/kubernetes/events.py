"""One Kubernetes event for every decision, so that `kubectl describe` tells the story. Never in the way of one."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime

from relight.controller.kubernetes.api import EVENT, Api, Object
from relight.core.clock import Clock
from relight.core.errors import RelightError
from relight.core.ids import new_id
from relight.core.logs import get_logger

KEPT = 512
"""Events that wait while the server is slow; the oldest are dropped: what is decided now matters more."""

log = get_logger("controller.kubernetes.events")


def written(now: float) -> str:
    """A wall time as Kubernetes writes it, to the second."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Events:
    """`tell` from anywhere; `run` posts them one after another."""

    def __init__(self, api: Api, clock: Clock, component: str = "relight-controller") -> None:
        self._api, self._clock, self._component = api, clock, component
        self._waiting: deque[Object] = deque(maxlen=KEPT)
        self._some = asyncio.Event()
        self._last: dict[tuple[str, str], str] = {}

    def tell(self, about: Object, reason: str, message: str, *, warning: bool = False) -> None:
        """An event of `about`; the same word for word as the last one of this reason is not repeated."""
        metadata = about["metadata"]
        key = (metadata.get("uid", ""), reason)
        if self._last.get(key) == message:
            return
        self._last[key] = message
        now = written(self._clock.now())
        namespace = metadata.get("namespace") or "default"
        self._waiting.append(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{metadata['name']}.{new_id('e')}", "namespace": namespace},
                "involvedObject": {
                    "apiVersion": about.get("apiVersion", ""),
                    "kind": about.get("kind", ""),
                    "name": metadata["name"],
                    "namespace": metadata.get("namespace", ""),
                    "uid": metadata.get("uid", ""),
                },
                "reason": reason,
                "message": message[:1024],
                "type": "Warning" if warning else "Normal",
                "source": {"component": self._component},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            }
        )
        self._some.set()

    def forget(self, uid: str) -> None:
        """The object is gone."""
        for key in [k for k in self._last if k[0] == uid]:
            del self._last[key]

    async def run(self) -> None:
        """Posts until cancelled."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                event = self._waiting.popleft()
                try:
                    await self._api.create(EVENT, event["metadata"]["namespace"], event)
                except RelightError as error:
                    log.info("event.lost", reason=event["reason"], error=str(error))
