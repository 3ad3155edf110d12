"""Requests that the API server hands on: by whose certificate, whom its headers name, what is asked for. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from relight.controller.kubernetes.api import Kind, Object
from relight.controller.kubernetes.reviews import Asked, User
from relight.core.errors import Denied

AUTHENTICATION = ("kube-system", "extension-apiserver-authentication")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """By which certificates and headers the API server hands requests on."""

    authority: str
    """PEM; empty where it hands none on."""
    names: tuple[str, ...] = ()
    """Common names of its certificates; empty for every name of the authority."""
    user_headers: tuple[str, ...] = ()
    group_headers: tuple[str, ...] = ()
    extra_prefixes: tuple[str, ...] = ()

    def user(self, common_name: str, headers: Mapping[str, list[str]]) -> User | None:
        """Whom the headers name (by lower-case name), when a certificate of `common_name` was shown. Raises Denied."""
        if self.names and common_name not in self.names:
            raise Denied(f"the certificate of {common_name!r} is none of the front proxy's")
        named = [v for name in self.user_headers for v in headers.get(name.lower(), ()) if v]
        if not named:
            return None
        groups = [v for name in self.group_headers for v in headers.get(name.lower(), ())]
        extra = tuple(
            (unquote(name[len(prefix) :]), tuple(values))
            for prefix in map(str.lower, self.extra_prefixes)
            for name, values in sorted(headers.items())
            if name.startswith(prefix)
        )
        return User(named[0], "", tuple(groups), extra)


def front_proxy(found: Object | None) -> FrontProxy:
    """As the ConfigMap says that every API server publishes."""
    data = (found or {}).get("data") or {}

    def listed(key: str) -> tuple[str, ...]:
        try:
            values = json.loads(data.get(f"requestheader-{key}") or "[]")
        except ValueError:
            return ()
        return tuple(str(v) for v in values) if isinstance(values, list) else ()

    return FrontProxy(
        str(data.get("requestheader-client-ca-file") or ""),
        listed("allowed-names"),
        listed("username-headers"),
        listed("group-headers"),
        listed("extra-headers-prefix"),
    )


def attributes(path: str, verb: str = "get") -> Asked:
    """What is asked for, as an access review takes it."""
    parts = path.strip("/").split("/")
    if parts[0] != "apis" or len(parts) < 4:
        return {"nonResourceAttributes": {"path": path, "verb": verb}}
    found = {"group": parts[1], "version": parts[2]}
    rest = parts[3:]
    if rest[0] == "namespaces" and len(rest) > 2:
        found["namespace"], rest = rest[1], rest[2:]
    found["resource"] = rest[0]
    if len(rest) > 1:
        found["name"] = rest[1]
    if len(rest) > 2:
        found["subresource"] = "/".join(rest[2:])
    # Reading a whole collection is another right, for every API server.
    found["verb"] = "list" if verb == "get" and "name" not in found else verb
    return {"resourceAttributes": found}
