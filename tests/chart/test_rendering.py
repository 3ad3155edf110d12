"""What the chart renders: valid for every combination of its main switches, and the same as the plain manifests."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from tests.chart.figures import COUNTS
from tests.chart.helm import CHART, NEWEST, OLDEST, ROOT, SYSTEM, Helm, HelmError, named
from tests.chart.schemas import wrong
from tests.chart.values import EVERYTHING, POOL, RUNTIME, SMALL, SPEC, combinations, merged

from relight.agent.config import AgentConfig
from relight.controller.config import ControllerConfig
from relight.controller.kubernetes.translate import model_spec, pool_spec
from relight.gateway.config import GatewayConfig

pytestmark = [pytest.mark.chart, pytest.mark.timeout(300)]
PLAIN = ROOT / "deploy" / "kubernetes"
ALL = list(combinations())
TOLD = {"token_file": "/var/run/secrets/relight.dev/token"}


def configs(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Configuration files in Secrets, by the Secret's name."""
    return {
        found["metadata"]["name"]: json.loads(text)
        for found in objects
        for name, text in (found.get("stringData") or {}).items()
        if name.endswith(".json")
    }


@pytest.mark.parametrize("number", range(0, len(ALL), 12))
def test_every_combination_is_valid_for_the_oldest_and_the_newest_kubernetes(number: int) -> None:
    for name, values in ALL[number : number + 12]:
        for kubernetes in (OLDEST, NEWEST):
            objects = Helm("helm4" if kubernetes == NEWEST else "helm3").template(values, kubernetes=kubernetes)
            assert not wrong(objects, kubernetes), name
        found = configs(objects)
        ControllerConfig.model_validate(found["relight-controller"])
        assert ("relight-gateway" in found) == values.get("gateway", {}).get("enabled", True)
        for gateway in (text for key, text in found.items() if key == "relight-gateway"):
            GatewayConfig.model_validate_json(json.dumps(gateway))
        for agent in (text for key, text in found.items() if key in ("relight-agent", "relight-node")):
            AgentConfig.model_validate_json(json.dumps({**agent, **TOLD}))
        COUNTS["combinations"] += 1


@pytest.mark.parametrize("kubernetes", [OLDEST, NEWEST])
def test_the_schemas_see_a_field_that_does_not_exist(kubernetes: str) -> None:
    for kind, name, path in (("Deployment", "relight-gateway", "spec.template.spec"), ("DevicePool", "large", "spec")):
        found = named(Helm("helm4").template(SMALL), kind, name)
        there = found
        for part in path.split("."):
            there = there[part]
        there["unknown"] = 1
        (told,) = wrong([found], kubernetes)
        assert "unknown" in told


def test_both_helms_render_the_same(helm: Helm) -> None:
    # Certificates and tokens are made anew where there is no cluster to ask for them.
    values = merged(SMALL, EVERYTHING, {"tls": {"mode": "cert-manager"}, "gateway": {"token": {
        "existingSecret": "t", "sha256": "a" * 64}}})  # fmt: skip
    other = Helm("helm3" if helm.version == "helm4" else "helm4")
    assert helm.template(values) == other.template(values)


def test_lint_finds_nothing(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm.run("lint", str(CHART), "--strict", values=merged(SMALL, EVERYTHING))


# -- the plain manifests


def _rules(objects: list[dict[str, Any]]) -> dict[tuple[str, str, str], Any]:
    """Roles, bindings and accounts, without the labels that tools put there."""
    found = {}
    for each in objects:
        if each["kind"].endswith(("Role", "RoleBinding")) or each["kind"] == "ServiceAccount":
            metadata = each["metadata"]
            labels = {k: v for k, v in (metadata.get("labels") or {}).items() if "aggregate-to" in k}
            body = {k: v for k, v in each.items() if k not in ("metadata", "apiVersion", "kind")}
            found[each["kind"], metadata.get("namespace", ""), metadata["name"]] = {**body, "labels": labels}
    return found


def _plain(name: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all((PLAIN / name).read_text()) if found]


def test_rights_are_those_of_the_plain_manifests() -> None:
    rendered = _rules(Helm("helm4").template({"metrics": {"enabled": True}}, hooks=False))
    assert rendered == _rules(_plain("rbac.yaml"))


def test_the_account_of_the_hook_may_update_the_three_definitions_and_nothing_else() -> None:
    objects = Helm("helm4").template()
    role = named(objects, "ClusterRole", "relight-definitions")
    names = [d["metadata"]["name"] for d in _plain("definitions.yaml")]
    (rule,) = role["rules"]
    assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (
        ["customresourcedefinitions"], names, ["get", "update"],
    )  # fmt: skip
    hooks = [o for o in objects if o["metadata"]["name"] == "relight-definitions"]
    assert {o["kind"] for o in hooks} == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"}
    for each in hooks:
        assert each["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
        assert "hook-succeeded" in each["metadata"]["annotations"]["helm.sh/hook-delete-policy"]


ELSEWHERE = {"image", "imagePullPolicy", "volumeMounts", "volumes", "automountServiceAccountToken"}
"""What differs between a Secret that somebody filled in and those that the chart makes."""


def _shape(found: dict[str, Any]) -> dict[str, Any]:
    spec = {k: v for k, v in found["spec"].items() if k not in ("selector", "template")}
    if "template" in found["spec"]:
        pod = found["spec"]["template"]["spec"]
        containers = [{k: v for k, v in c.items() if k not in ELSEWHERE} for c in pod["containers"]]
        pod = {k: v for k, v in pod.items() if k not in ELSEWHERE} | {"containers": containers}
        text = json.dumps({**spec, "pod": pod}).replace('"app.kubernetes.io/instance": "relight", ', "")
        return dict(json.loads(text))
    # Kubernetes' own default.
    spec.pop("type", None)
    return spec


@pytest.mark.parametrize("file", ["controller.yaml", "gateway.yaml", "metrics-apiservice.yaml", "external-scaler.yaml"])
def test_workloads_and_services_are_those_of_the_plain_manifests(file: str) -> None:
    values = {"tls": {"mode": "cert-manager"}, "metrics": {"enabled": True}, "externalScaler": {"enabled": True}}
    rendered = Helm("helm4").template(values, hooks=False)
    for wanted in _plain(file):
        found = named(rendered, wanted["kind"], wanted["metadata"]["name"])
        assert found["metadata"].get("namespace") == wanted["metadata"].get("namespace")
        theirs, ours = _shape(wanted), _shape(found)
        if wanted["kind"] == "Deployment":
            # Listens for what its configuration says, which the plain manifest leaves to its reader.
            ours["pod"]["containers"][0]["ports"] = [
                p for p in ours["pod"]["containers"][0]["ports"] if p["name"] not in ("metrics", "scaler")
            ]
        assert ours == theirs


def test_the_chart_installs_the_generated_definitions() -> None:
    assert (CHART / "crds" / "definitions.yaml").read_text() == (PLAIN / "definitions.yaml").read_text()


# -- what values become


def test_the_examples_of_the_readme_are_taken(helm: Helm) -> None:
    first, *more = re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), flags=re.DOTALL)
    whole = yaml.safe_load(first)
    for text in ("{}", *more):
        found = configs(helm.template(merged(whole, yaml.safe_load(text))))
        AgentConfig.model_validate_json(json.dumps({**found["relight-agent"], **TOLD}))
    # What stands there as a comment is taken too, as it stands.
    commented = re.findall(r"^#( {1,}.*)$", (CHART / "values.yaml").read_text(), flags=re.MULTILINE)
    shown = "\n".join(line for line in commented if line.startswith("  ") and not re.match(r"\s+#", line))
    runtimes, pools, models = (f"{name}:\n{part}" for name, part in zip(
        ("runtimes", "pools", "models"), re.split(r"\n(?=  (?:large|chat):)", shown), strict=True))  # fmt: skip
    values = merged(*(yaml.safe_load(text) for text in (runtimes, pools, models)))
    scaled = values["models"]["chat"].pop("scaledObject")
    helm.template({**values, "metrics": {"enabled": True}})
    del values["models"]["chat"]["hpa"]
    values["models"]["chat"]["scaledObject"] = scaled
    helm.template({**values, "externalScaler": {"enabled": True}})


def test_every_image_is_taken_from_the_mirror_and_by_digest_where_one_is_given() -> None:
    digest = f"sha256:{'0' * 64}"
    values = merged(SMALL, EVERYTHING, {
        "global": {"imageRegistry": "mirror.example", "imagePullSecrets": ["pull"]}, "redis": {"enabled": True},
        "controller": {"image": {"digest": digest}},
    })  # fmt: skip
    own = {"registry.example/vllm:0.32.0", "registry.example/extra:1", "registry.example/fetch:1"}
    objects = Helm("helm4").template(values)
    for pod in (p for p in map(_pod, objects) if p):
        images = {c["image"] for c in [*pod["containers"], *pod.get("initContainers", [])]} - own
        assert all(image.startswith("mirror.example/") for image in images), images
        assert pod["imagePullSecrets"] == [{"name": "pull"}]
        containers = [c for c in pod["containers"] if c["name"] == "controller"]
        assert all(c["image"] == f"mirror.example/relight/controller@{digest}" for c in containers)
    config = configs(objects)["relight-controller"]
    assert config["kubernetes"]["agent_image"] == "mirror.example/relight/agent:0.1.0"


def _pod(found: dict[str, Any]) -> dict[str, Any]:
    if found["kind"] == "Pod":
        return dict(found["spec"])
    return dict(((found.get("spec") or {}).get("template") or {}).get("spec") or {})


def test_no_pod_of_the_chart_runs_as_root_or_may_more_than_it_needs() -> None:
    values = merged(SMALL, EVERYTHING, {"redis": {"enabled": True}, "prePull": {"weights": []}})
    for found in Helm("helm4").template(values):
        pod = _pod(found)
        for container in [*pod.get("containers", []), *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            where = f"{found['kind']} {found['metadata']['name']}"
            if not found["metadata"]["name"].endswith("-node"):
                both = {**pod.get("securityContext", {}), **security}
                assert (both["runAsNonRoot"], both["readOnlyRootFilesystem"]) == (True, True), where


@pytest.mark.parametrize(
    ("resource", "extra"),
    [
        ("nvidia.com/gpu", {"nvidia.com/gpumem": 40000, "nvidia.com/gpucores": 50}),
        ("kunlunxin.com/xpu", {}),
        ("baidu.com/v100_32g_cgpu", {"baidu.com/v100_32g_cgpu_memory": 16}),
    ],
)
def test_a_pool_asks_for_its_devices_rdma_and_memory_as_its_values_say(resource: str, extra: dict[str, int]) -> None:
    pool = {
        **POOL, "slot": {"devices": 2, "resourceName": resource}, "extraResources": extra,
        "rdma": {"resourceName": "rdma/hca", "count": 1}, "sharedMemory": "16Gi",
        "weights": {"claimName": "models", "mountPath": "/models"}, "tolerations": [{"operator": "Exists"}],
        "agentConfig": {"devices": [], "accelerators": {}, "digests": "sha256"},
        "podTemplate": {
            "spec": {"hostIPC": True, "containers": [{"name": "engine", "workingDir": "/w"}, {"name": "x"}]},
        },
    }  # fmt: skip
    objects = Helm("helm4").template({"runtimes": {"vllm": RUNTIME}, "pools": {"large": pool}})
    found, runtime = named(objects, "DevicePool", "large"), named(objects, "EngineRuntime", "vllm")
    spec, _ = pool_spec(found, {f"{SYSTEM}/vllm": runtime})
    assert spec.agent_config == pool["agentConfig"]
    body = found["spec"]["podTemplate"]["spec"]
    engine, agent, other = body["containers"]
    assert (engine["name"], agent["name"], other["name"]) == ("engine", "agent", "x")
    for part in ("requests", "limits"):
        assert engine["resources"][part] == {"rdma/hca": 1, **extra}
    assert engine["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert (engine["workingDir"], body["hostIPC"], body["tolerations"]) == ("/w", True, [{"operator": "Exists"}])
    assert {m["mountPath"] for m in engine["volumeMounts"]} == {"/dev/shm", "/models"}
    assert body["automountServiceAccountToken"] is False


def test_a_model_is_what_the_controller_takes_and_has_one_writer() -> None:
    values = merged(SMALL, {"metrics": {"enabled": True}, "models": {"chat": {"hpa": {"maxReplicas": 3}}}})
    objects = Helm("helm4").template(values)
    model = named(objects, "ModelDeployment", "chat")
    assert model["spec"]["writer"] == "HPA"
    runtime, pool = named(objects, "EngineRuntime", "vllm"), named(objects, "DevicePool", "large")
    record = model_spec(model, {f"{SYSTEM}/vllm": runtime}, {f"{SYSTEM}/large": pool})
    assert (record.replicas, record.guardians.replicas) == (1, 1)
    scaler = named(objects, "HorizontalPodAutoscaler", "chat")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "chat"
    assert scaler["spec"]["metrics"][0]["external"]["metric"]["selector"] == {"matchLabels": {"model": "chat"}}


ARGUMENTS = [
    '--override-generation-config={"temperature": 0, "stop": ["\\n", "</s>"]}',
    "--chat-template={{ messages }}",
    "--quoted='a \"b\" c'",
    "--empty=",
]


def test_arguments_of_engines_arrive_byte_for_byte(helm: Helm) -> None:
    spec = {**SPEC, "args": [ARGUMENTS[0], *ARGUMENTS[2:]]}
    by_file = helm.template({"models": {"chat": {"spec": spec}}})
    by_json = helm.template({}, "--set-json", f"models.chat={json.dumps({'spec': spec})}")
    for objects in (by_file, by_json):
        assert named(objects, "ModelDeployment", "chat")["spec"]["args"] == spec["args"]


def test_an_argument_that_is_no_json_is_refused_with_itself(helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"models\.chat\.spec\.args: expected JSON, got --x="):
        helm.template({"models": {"chat": {"spec": {**SPEC, "args": ["--x={a: 1}"]}}}})


def test_rules_and_dashboards_come_out_of_their_files() -> None:
    objects = Helm("helm4").template({"prometheusRule": {"enabled": True}, "grafanaDashboards": {"enabled": True}})
    rules = CHART / "rules" / "relight.yaml"
    shipped = yaml.safe_load(rules.read_text())["groups"] if rules.exists() else []
    assert named(objects, "PrometheusRule", "relight")["spec"]["groups"] == shipped
    files = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    maps = [o for o in objects if o["kind"] == "ConfigMap" and "grafana_dashboard" in o["metadata"]["labels"]]
    assert {name: text for found in maps for name, text in found["data"].items()} == files
    assert all(found["metadata"]["annotations"]["grafana_folder"] == "Relight" for found in maps)


def test_certificates_of_a_release_are_for_the_names_by_which_its_parts_are_reached() -> None:
    values = {"tls": {"mode": "cert-manager", "extraHosts": ["relight.example", "10.1.2.3"]}}
    found = named(Helm("helm4").template(values), "Certificate", "relight-controller")["spec"]
    wanted = {f"relight-{part}.{SYSTEM}.svc" for part in ("controller", "metrics", "external-scaler")}
    assert wanted | {"relight.example", "localhost"} <= set(found["dnsNames"])
    assert found["ipAddresses"] == ["127.0.0.1", "10.1.2.3"]
