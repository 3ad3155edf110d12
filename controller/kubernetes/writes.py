"""Writes to the API server while this controller leads, each conditional on what was read; what one step found out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from relight.controller.kubernetes.api import Api, Kind, Object
from relight.controller.kubernetes.cache import Cache, key_of
from relight.controller.kubernetes.election import Election
from relight.controller.kubernetes.intent import Intent
from relight.core.errors import Conflict, Fenced, InvalidInput, NotFound, RelightError
from relight.core.logs import get_logger
from relight.core.records import Plan, Snapshot

log = get_logger("controller.kubernetes")


@dataclass(slots=True)
class Step:
    """What one step found out on its way, for the statuses at its end."""

    snapshot: Snapshot
    intent: Intent
    made: Plan | None
    """The last plan of the reconcile loop."""
    refused_pools: dict[str, str] = field(default_factory=dict)
    retry: bool = False
    """Something is to be tried again without any change."""


class Writes:
    """Every write of the operator goes through here."""

    def __init__(self, api: Api, election: Election) -> None:
        self.api, self._election = api, election

    async def do(self, step: Step, what: str, call: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        """Does one write. None when it was refused: the next step decides anew. Raises Fenced."""
        self._election.require()
        try:
            return await call(*args, **options)
        except Fenced:
            raise
        except (Conflict, NotFound) as error:
            # The object moved; the watch brings what it is now, if it has not already.
            log.info("write.moved", what=what, reason=str(error))
            step.retry = True
        except InvalidInput as error:
            log.error("write.refused", what=what, error=str(error))
        except RelightError as error:
            log.warning("write.failed", what=what, error=str(error))
            step.retry = True
        return None

    async def patch(
        self, step: Step, kind: Kind, cache: Cache, found: Object, body: Object, subresource: str = ""
    ) -> Object:
        """Merges `body` into `found` as it was read. What the server made of it, or `found` where it refused."""
        metadata = found["metadata"]
        body = {**body, "metadata": {"resourceVersion": metadata["resourceVersion"], **body.get("metadata", {})}}
        done = await self.do(
            step, f"{subresource or 'object'} of {kind.kind} {key_of(found)}", self.api.patch, kind,
            metadata.get("namespace", ""), metadata["name"], body, subresource=subresource,
            # Conditions of a pod have other writers: they are merged by their type.
            strategic=bool(subresource) and not kind.group,
        )  # fmt: skip
        if done is None:
            return found
        written: Object = done
        if not written["metadata"].get("deletionTimestamp"):
            cache.learned(written)
        return written
