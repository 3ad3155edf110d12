"""The Kubernetes API over the official client's asyncio part: plain JSON objects in and out, errors of ours.

The one place that imports the client. Its generated models are left aside: custom resources have none, and a template
that a user wrote must pass through whole, fields of newer servers included.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, ApiException, Configuration

from relight.core.errors import Conflict, Denied, FieldError, InvalidInput, NotFound, RelightError, TooOld, Unavailable

Object = dict[str, Any]
"""One Kubernetes object as JSON has it."""
REQUEST_SECONDS = 10.0
WATCH_SECONDS = 290
"""After how long the server ends a watch: shorter than what middleboxes cut without a word."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A resource of the API: where its objects are found. `group` is empty for the core."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As objects carry it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL's path; without a namespace that of all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [p for p in (self.plural, name, subresource) if p]
        return "/" + "/".join(parts)


POD = Kind("", "v1", "pods", "Pod")
NODE = Kind("", "v1", "nodes", "Node", namespaced=False)
EVENT = Kind("", "v1", "events", "Event")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")


class Gone(TooOld):
    """A watch was asked to resume from what the server has forgotten: list again."""


@dataclass(frozen=True, slots=True)
class Watched:
    """One event of a watch: ADDED, MODIFIED, DELETED, BOOKMARK."""

    type: str
    object: Object


class Api:
    """A connection to one API server. `open`, then any number of calls at once, then `close`."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    @classmethod
    async def open(cls, kubeconfig: Path | None) -> Api:
        """By a kubeconfig file, or by the service account of this pod. Raises InvalidInput where that cannot be."""
        configuration = Configuration()
        # The client's loaders and its close carry no types: hence the three exemptions here and in `close`.
        try:
            if kubeconfig is None:
                kube_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            else:
                await kube_config.load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (kube_config.ConfigException, OSError, ValueError) as error:
            where = str(kubeconfig or "the pod's service account")
            expected = "a kubeconfig, or a service account's token mounted"
            raise InvalidInput("no way to the Kubernetes API", [FieldError(where, expected, str(error))]) from error
        configuration.retries = None
        return cls(ApiClient(configuration))

    async def close(self) -> None:
        """Ends the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, namespace: str, name: str, subresource: str = "") -> Object:
        """One object. Raises NotFound."""
        return await self._call("GET", kind.path(namespace, name, subresource))

    async def list(
        self, kind: Kind, labels: str = "", *, namespace: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """All objects, of all namespaces where none is named, and the version to watch from."""
        found: list[Object] = []
        query = {"limit": "500", **_selected(labels, fields)}
        while True:
            page = await self._call("GET", kind.path(namespace), query)
            found += page.get("items") or []
            metadata = page.get("metadata", {})
            if not metadata.get("continue"):
                return found, metadata.get("resourceVersion", "")
            query["continue"] = metadata["continue"]

    async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Creates. Raises Conflict when it exists."""
        return await self._call("POST", kind.path(namespace), body=body)

    async def replace(self, kind: Kind, body: Object, subresource: str = "", manager: str = "") -> Object:
        """Writes whole, at the version that `body` carries. Raises Conflict when another wrote since."""
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace", ""), metadata["name"], subresource)
        return await self._call("PUT", path, {"fieldManager": manager} if manager else None, body)

    async def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        body: Object,
        *,
        subresource: str = "",
        strategic: bool = False,
        manager: str = "",
    ) -> Object:
        """Merges. A `metadata.resourceVersion` in `body` makes it conditional: Conflict when another wrote since."""
        how = "strategic-merge-patch" if strategic else "merge-patch"
        path = kind.path(namespace, name, subresource)
        query = {"fieldManager": manager} if manager else None
        return await self._call("PATCH", path, query, body, content=f"application/{how}+json")

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str = "", grace: int | None = None) -> None:
        """Deletes this very object, when `uid` is told. One that is gone already is no error."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self._call("DELETE", kind.path(namespace, name), body=body)
        except NotFound:
            return

    async def watch(
        self, kind: Kind, version: str, labels: str = "", *, namespace: str = "", fields: str = ""
    ) -> AsyncGenerator[Watched, None]:
        """Events after `version`; ends when the server ends it. Raises Gone, Unavailable."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            **_selected(labels, fields),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=WATCH_SECONDS + 30)
        reply = await self._send("GET", kind.path(namespace), query, None, "application/json", timeout)
        try:
            # Lines, and not chunks: an object may come in several.
            while line := await reply.content.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(event["object"].get("code", 500), event["object"], kind.plural)
                yield Watched(event["type"], event["object"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unavailable(f"the watch of {kind.plural} broke: {error or type(error).__name__}") from error
        finally:
            reply.close()

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
    ) -> Object:
        reply = await self._send(method, path, query, body, content, aiohttp.ClientTimeout(total=REQUEST_SECONDS))
        try:
            found: Object = json.loads(await reply.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unavailable(f"{method} {path}: the answer broke off: {error or type(error).__name__}") from error
        finally:
            reply.release()
        return found

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        content: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        settings = self._client.configuration
        # Asked for at each call: a service account's token is renewed in its file.
        auth = (await settings.auth_settings()).get("BearerToken")
        headers = {"Content-Type": content, "Accept": "application/json"}
        if auth and auth["value"]:
            headers[auth["key"]] = auth["value"]
        url = f"{settings.host}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            answer = await self._client.call_api(method, url, headers, body, _request_timeout=timeout)
        except (aiohttp.ClientError, ApiException, TimeoutError, OSError) as error:
            raise Unavailable(f"the Kubernetes API does not answer: {error or type(error).__name__}") from error
        reply: aiohttp.ClientResponse = answer.response
        if reply.status < 400:
            return reply
        try:
            text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            text = ""
        finally:
            reply.release()
        try:
            status = json.loads(text)
        except ValueError:
            status = {"message": text[:200]}
        raise _error(reply.status, status, f"{method} {path}", reply.headers.get("Retry-After"))


def _selected(labels: str, fields: str) -> dict[str, str]:
    return {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


def _error(code: int, status: Any, what: str, retry_after: str | None = None) -> RelightError:
    told = status.get("message", "") if isinstance(status, dict) else str(status)
    message = f"{what}: {told or code}"
    if code == 404:
        return NotFound(message)
    if code == 409:
        return Conflict(message)
    if code == 410:
        return Gone(message)
    if code in (401, 403):
        return Denied(message, authenticated=code == 403)
    if code in (400, 405, 413, 415, 422):
        causes = (status.get("details") or {}).get("causes") or [] if isinstance(status, dict) else []
        errors = [FieldError(c.get("field", ""), c.get("message", ""), c.get("reason", "")) for c in causes]
        return InvalidInput(message, errors)
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else 1.0
    return Unavailable(message, retry_after=seconds)
