"""Requests that the API server hands on: whom its headers name, and what is asked for."""

import json

import pytest

from relight.controller.kubernetes.delegation import FrontProxy, attributes, front_proxy
from relight.controller.kubernetes.reviews import User
from relight.core.errors import Denied

PUBLISHED = {
    "data": {
        "requestheader-client-ca-file": "PEM",
        "requestheader-allowed-names": json.dumps(["front"]),
        "requestheader-username-headers": json.dumps(["X-Remote-User"]),
        "requestheader-group-headers": json.dumps(["X-Remote-Group"]),
        "requestheader-extra-headers-prefix": json.dumps(["X-Remote-Extra-"]),
    }
}


def test_the_front_proxy_names_users_groups_and_extras_by_the_published_headers():
    proxy = front_proxy(PUBLISHED)
    headers = {
        "x-remote-user": ["ann"], "x-remote-group": ["a", "b"], "x-remote-extra-scopes%2fx": ["one"],
        "x-other": ["z"],
    }  # fmt: skip
    assert proxy.user("front", headers) == User("ann", "", ("a", "b"), (("scopes/x", ("one",)),))
    assert proxy.user("front", {}) is None
    with pytest.raises(Denied):
        proxy.user("other", headers)


@pytest.mark.parametrize("found", [None, {}, {"data": {"requestheader-allowed-names": "nonsense"}}])
def test_without_a_published_proxy_nobody_is_named_by_headers(found):
    assert front_proxy(found) == FrontProxy("")
    assert front_proxy(found).user("", {"x-remote-user": ["ann"]}) is None


def test_a_request_is_asked_about_as_every_api_server_does():
    group = "/apis/external.metrics.k8s.io/v1beta1"
    base = {"group": "external.metrics.k8s.io", "version": "v1beta1"}
    assert attributes("/apis") == {"nonResourceAttributes": {"path": "/apis", "verb": "get"}}
    assert attributes(group) == {"nonResourceAttributes": {"path": group, "verb": "get"}}
    assert attributes(f"{group}/namespaces/n/depth") == {
        "resourceAttributes": {**base, "namespace": "n", "resource": "depth", "verb": "list"}
    }
    assert attributes(f"{group}/namespaces/n/models.x/m/depth") == {
        "resourceAttributes": {
            **base, "namespace": "n", "resource": "models.x", "name": "m", "subresource": "depth", "verb": "get",
        }
    }  # fmt: skip
