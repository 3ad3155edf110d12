"""What each component's service account may do: what deploy/kubernetes/rbac.yaml says, and nothing more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from tests.kubernetes.cluster import ROOT, SYSTEM
from tests.kubernetes.plane import ControlPlane, PlaneError, User

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]

Rights = set[tuple[str, str]]
"""(resource, verb), the resource as `plural.group`, followed by the one name it is of, if of one; or (path, verb)."""
FILE = ROOT / "deploy" / "kubernetes" / "rbac.yaml"
OBJECTS = [o for o in yaml.safe_load_all(FILE.read_text()) if o]
TENANT, ELSEWHERE = "roles-tenant", "roles-elsewhere"
MODEL = """
apiVersion: relight.dev/v1alpha1
kind: EngineRuntime
metadata: {name: r}
spec: {engine: stub, image: "example/engine:1"}
---
apiVersion: relight.dev/v1alpha1
kind: DevicePool
metadata: {name: p}
spec: {replicas: 0, runtimeRef: {name: r}, slot: {resourceName: example.com/device}}
---
apiVersion: relight.dev/v1alpha1
kind: ModelDeployment
metadata: {name: m}
spec: {model: {uri: /m, revision: r1}, runtimeRef: {name: r}, poolRef: {name: p}, replicas: 0}
"""


@pytest.fixture(scope="module")
def spaces(plane: ControlPlane) -> Iterator[None]:
    for name in (TENANT, ELSEWHERE):
        plane.kubectl("create", "namespace", name)
    yield
    for name in (TENANT, ELSEWHERE):
        plane.kubectl("delete", "namespace", name, "--wait=false")


def listed(plane: ControlPlane, user: User, namespace: str) -> Rights:
    """As `kubectl auth can-i --list` has it."""
    found: Rights = set()
    for line in plane.kubectl("auth", "can-i", "--list", "-n", namespace, user=user).splitlines()[1:]:
        what, *lists = (part.strip("[] ") for part in line.replace("]", "]|").split("|")[:-1])
        resource, _, paths = what.partition("[")
        names, verbs = lists
        plural = " ".join(filter(None, (resource.strip(), names)))
        found |= {(name, verb) for name in (plural, *paths.split()) if name for verb in verbs.split()}
    return found


def written(plane: ControlPlane, account: str, namespace: str) -> Rights:
    """As the bindings of the file give it to an account of relight-system."""
    found: Rights = set()
    for binding in OBJECTS:
        if not binding["kind"].endswith("Binding"):
            continue
        everywhere = binding["kind"] == "ClusterRoleBinding"
        subject = {"kind": "ServiceAccount", "name": account, "namespace": SYSTEM}
        if subject in binding["subjects"] and (everywhere or binding["metadata"]["namespace"] == namespace):
            found |= _rights(_role(plane, binding))
    return found


def _role(plane: ControlPlane, binding: dict) -> dict:
    wanted = (binding["roleRef"]["kind"], binding["roleRef"]["name"])
    for found in OBJECTS:
        if (found["kind"], found["metadata"]["name"]) == wanted:
            return found
    path = "clusterroles" if wanted[0] == "ClusterRole" else f"namespaces/{binding['metadata']['namespace']}/roles"
    return plane.get(f"/apis/rbac.authorization.k8s.io/v1/{path}/{wanted[1]}")


def _rights(role: dict) -> Rights:
    return {
        (" ".join(filter(None, (_sub(resource, group), *rule.get("resourceNames", ())))), verb)
        for rule in role["rules"]
        for group in rule.get("apiGroups", ())
        for resource in rule.get("resources", ())
        for verb in rule["verbs"]
    } | {(path, verb) for rule in role["rules"] for path in rule.get("nonResourceURLs", ()) for verb in rule["verbs"]}


def _sub(resource: str, group: str) -> str:
    plural, _, subresource = resource.partition("/")
    return "/".join(filter(None, (f"{plural}.{group}" if group else plural, subresource)))


@pytest.fixture(scope="module")
def anyone(plane: ControlPlane, spaces: None) -> Rights:
    """What every account may, as the cluster has it."""
    found = listed(plane, plane.service_account("anyone", TENANT), TENANT)
    assert not {name for name, _ in found if "relight.dev" in name}
    return found


@pytest.mark.parametrize("account", [o["metadata"]["name"] for o in OBJECTS if o["kind"] == "ServiceAccount"])
@pytest.mark.parametrize("namespace", [SYSTEM, "kube-system", TENANT])
def test_a_component_may_do_what_the_file_says_and_nothing_more(
    plane: ControlPlane, anyone: Rights, account: str, namespace: str
) -> None:
    user = plane.service_account(account, SYSTEM)
    assert listed(plane, user, namespace) - anyone == written(plane, account, namespace) - anyone


def test_the_gateway_and_slot_pods_may_do_nothing(plane: ControlPlane, anyone: Rights) -> None:
    assert written(plane, "relight-gateway", SYSTEM) == set()
    assert listed(plane, plane.service_account("default", TENANT), TENANT) == anyone


def test_a_tenants_editor_does_its_work_in_its_namespace_and_nothing_elsewhere(
    plane: ControlPlane, anyone: Rights
) -> None:
    tenant = plane.service_account("team", TENANT)
    words = ("create", "rolebinding", "team", "-n", TENANT, "--clusterrole=relight-editor")
    plane.kubectl(*words, f"--serviceaccount={TENANT}:team")
    (role,) = (o for o in OBJECTS if o["metadata"]["name"] == "relight-editor")
    assert listed(plane, tenant, TENANT) - anyone == _rights(role)
    plane.apply(MODEL, user=tenant)
    plane.kubectl("scale", "modeldeployment/m", "--replicas=1", "-n", TENANT, user=tenant)
    assert "m" in plane.kubectl("get", "modeldeployments,devicepools,engineruntimes", "-n", TENANT, user=tenant)
    assert listed(plane, tenant, ELSEWHERE) == anyone
    for namespace, manifest in ((ELSEWHERE, MODEL), (SYSTEM, MODEL)):
        with pytest.raises(PlaneError, match="orbidden"):
            plane.kubectl("apply", "-n", namespace, "-f", "-", user=tenant, stdin=manifest)
    for what in ("modeldeployments", "pods", "secrets"):
        with pytest.raises(PlaneError, match="orbidden"):
            plane.kubectl("get", what, "-n", ELSEWHERE, user=tenant)
    with tenant.client() as client:
        path = f"/apis/relight.dev/v1alpha1/namespaces/{TENANT}/modeldeployments/m/status"
        headers = {"Content-Type": "application/merge-patch+json"}
        assert client.patch(path, json={"status": {"replicas": 9}}, headers=headers).status_code == 403
    plane.kubectl("delete", "modeldeployments,devicepools,engineruntimes", "--all", "-n", TENANT, user=tenant)
