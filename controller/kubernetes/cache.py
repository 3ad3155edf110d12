"""What the API server has of one kind, kept here by a list and a watch; each change wakes whoever listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from relight.controller.kubernetes.api import Api, Gone, Kind, Object
from relight.core.errors import Denied, NotFound, RelightError
from relight.core.logs import get_logger

FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.2, 15.0

log = get_logger("controller.kubernetes.cache")


def key_of(found: Object) -> str:
    """`namespace/name`, or the name of what has no namespace."""
    metadata = found["metadata"]
    namespace = metadata.get("namespace", "")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])


class Cache:
    """Objects of one kind by key. Until `synced` nothing may be concluded from an object's absence."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        changed: Callable[[], None],
        labels: str = "",
        *,
        namespace: str = "",
        fields: str = "",
    ) -> None:
        self._api, self.kind, self._changed, self._labels = api, kind, changed, labels
        self._namespace, self._fields = namespace, fields
        self._objects: dict[str, Object] = {}
        self.synced = asyncio.Event()

    @property
    def objects(self) -> Mapping[str, Object]:
        """By key, as last seen."""
        return self._objects

    def learned(self, found: Object) -> None:
        """Takes in what the watch or a write of our own brought, unless the other has brought something newer."""
        known = self._objects.get(key_of(found))
        if known is not None and _newer(known, found):
            return
        self._objects[key_of(found)] = found

    async def run(self) -> None:
        """Follows the server until cancelled; what it cannot reach it tries again, later and later."""
        backoff, version = FIRST_BACKOFF_SECONDS, ""
        while True:
            try:
                if not version:
                    version = await self._list()
                async for event in self._api.watch(
                    self.kind, version, self._labels, namespace=self._namespace, fields=self._fields
                ):
                    version = event.object["metadata"]["resourceVersion"]
                    backoff = FIRST_BACKOFF_SECONDS
                    self._take(event.type, event.object)
                continue
            except Gone:
                log.info("watch.gone", kind=self.kind.plural)
                version = ""
                continue
            except (NotFound, Denied) as error:
                # Definitions that are not installed yet, or a right that is not given yet.
                log.error("watch.refused", kind=self.kind.plural, error=str(error), retry_in=backoff)
                version = ""
            except RelightError as error:
                log.warning("watch.broken", kind=self.kind.plural, error=str(error), retry_in=backoff)
            except Exception:
                # Without this cache the operator is blind: it goes on, and the log tells of the defect.
                log.exception("watch.defect", kind=self.kind.plural, retry_in=backoff)
                version = ""
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _list(self) -> str:
        items, version = await self._api.list(
            self.kind, self._labels, namespace=self._namespace, fields=self._fields
        )  # fmt: skip
        self._objects = {key_of(item): item for item in items}
        self.synced.set()
        self._changed()
        return version

    def _take(self, event: str, found: Object) -> None:
        if event == "BOOKMARK":
            return
        if event == "DELETED":
            self._objects.pop(key_of(found), None)
        else:
            # A write of our own may have brought something newer already.
            self.learned(found)
        self._changed()


def _newer(known: Object, found: Object) -> bool:
    """Versions are opaque, but those of one object grow as numbers on every server there is."""
    same = known["metadata"].get("uid") == found["metadata"].get("uid")
    versions = [o["metadata"].get("resourceVersion", "") for o in (known, found)]
    return same and all(v.isdigit() for v in versions) and int(versions[0]) > int(versions[1])
