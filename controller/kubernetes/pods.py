"""Slot pods: what they are made of, how many there shall be, and which go. Pure."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from relight.controller.kubernetes.api import Object
from relight.controller.kubernetes.marks import condition, labels, shown
from relight.controller.kubernetes.resources import (
    CLOSING,
    DEVICE_POOL,
    GROUP,
    POOL_LABEL,
    PROVEN_GATE,
    STATE_LABEL,
    DevicePoolSpec,
    EngineRuntimeSpec,
)
from relight.controller.kubernetes.slot_identity import AUDIENCE
from relight.controller.observe.places import Place
from relight.core.errors import FieldError, InvalidInput
from relight.core.records import Desired, Snapshot
from relight.core.states import State

TEMPLATE_LABEL = f"{GROUP}/template"
ENGINE, AGENT = "engine", "agent"
SHARED, SHARED_PATH = "relight", "/relight"
TOKEN_PATH = "/var/run/secrets/relight.dev"  # noqa: S105 - a directory
CREATED_AT_ONCE = 50
LEAVE_SECONDS = 120
"""How long a deleted slot pod may take to move its replica elsewhere and drain, where the template does not say."""
_LEAVE: Object = {"preStop": {"exec": {"command": [f"{SHARED_PATH}/bin/relight-leave", f"{SHARED_PATH}/state"]}}}

# The engine's container has none: what runs there may be anybody's code.
_TOKEN: Object = {"audience": AUDIENCE, "expirationSeconds": 3600, "path": "token"}


@dataclass(frozen=True, slots=True)
class Added:
    """What Relight adds to a slot pod: its images, and where the agent finds the controller and its secrets."""

    agent_image: str
    controller_address: str
    secret: str
    """A Secret of the pool's namespace: `agent.json`, and the certificates that it names."""
    serving_port: int = 8000
    metrics_port: int = 8001
    tls_secret: str = ""
    """Another one beside it with the certificates alone, laid into the same directory."""


def slot_of(pod: Object) -> str:
    """The slot's name: unique in the cluster, and the same for the pod's whole life."""
    return f"{pod['metadata']['name']}.{pod['metadata']['namespace']}"


def template_digest(spec: DevicePoolSpec, runtime: EngineRuntimeSpec) -> str:
    """Names what a slot pod is made of, for a label."""
    made_of = [spec.slot.model_dump(), spec.pod_template, runtime.image]
    if spec.agent_config:
        made_of.append(spec.agent_config)
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


def slot_pod(pool: Object, spec: DevicePoolSpec, runtime: EngineRuntimeSpec, added: Added) -> Object:
    """A pod for one more slot of `pool`: the user's template whole, and what Relight adds.

    Raises InvalidInput when the template and what is added contradict each other.
    """
    metadata = pool["metadata"]
    template = copy.deepcopy(spec.pod_template)
    of_template = template.get("metadata") or {}
    body: Object = template.get("spec") or {}
    own_labels = {
        **(of_template.get("labels") or {}),
        POOL_LABEL: metadata["name"],
        STATE_LABEL: "idle",
        TEMPLATE_LABEL: template_digest(spec, runtime),
        "app.kubernetes.io/managed-by": "relight",
    }
    engine = _engine(body, spec, runtime, added)
    agent = _agent(body, spec, added, engine)
    others = [c for c in body.get("containers") or [] if c.get("name") not in (ENGINE, AGENT)]
    body["containers"] = [engine, agent, *others]
    # Relight's own files come with the agent's image: the engine's image is never rebuilt.
    inject = {
        "name": "relight-inject",
        "image": added.agent_image,
        "command": ["relight-inject", SHARED_PATH],
        "volumeMounts": [_mount()],
    }
    body["initContainers"] = [inject, *(body.get("initContainers") or [])]
    body["volumes"] = [
        *(body.get("volumes") or []),
        {"name": SHARED, "emptyDir": {}},
        {"name": f"{SHARED}-secret", **_secrets(added)},
        {"name": f"{SHARED}-token", "projected": {"sources": [{"serviceAccountToken": _TOKEN}]}},
    ]
    # The agent measures what the engines' processes hold, and ends whole trees of them.
    body["shareProcessNamespace"] = True
    body.setdefault("terminationGracePeriodSeconds", LEAVE_SECONDS)
    body["readinessGates"] = [*(body.get("readinessGates") or []), {"conditionType": PROVEN_GATE}]
    if spec.slot.resource_claim_template_name:
        claim = {"name": "devices", "resourceClaimTemplateName": spec.slot.resource_claim_template_name}
        body["resourceClaims"] = [*(body.get("resourceClaims") or []), claim]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{metadata['name']}-",
            "namespace": metadata["namespace"],
            "labels": own_labels,
            "annotations": of_template.get("annotations") or {},
            "ownerReferences": [
                {
                    "apiVersion": DEVICE_POOL.api_version,
                    "kind": DEVICE_POOL.kind,
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": body,
    }


def _secrets(added: Added) -> Object:
    if not added.tls_secret:
        return {"secret": {"secretName": added.secret}}
    return {"projected": {"sources": [{"secret": {"name": name}} for name in (added.secret, added.tls_secret)]}}


def _mount() -> Object:
    return {"name": SHARED, "mountPath": SHARED_PATH}


def _named(body: Object, name: str) -> Object:
    found: list[Object] = [c for c in body.get("containers") or [] if c.get("name") == name]
    return found[0] if found else {"name": name}


def _engine(body: Object, spec: DevicePoolSpec, runtime: EngineRuntimeSpec, added: Added) -> Object:
    """The engine's container: Relight's supervisor is its first process, and starts engines on the agent's word."""
    container = _named(body, ENGINE)
    image = container.get("image") or runtime.image
    if not image:
        expected = "an image in the runtime, or in the template's container `engine`"
        raise InvalidInput("a slot pod has no image", [FieldError("spec.image", expected, "none")])
    resources = copy.deepcopy(container.get("resources") or {})
    if spec.slot.resource_name:
        for part in ("requests", "limits"):
            resources[part] = {**(resources.get(part) or {}), spec.slot.resource_name: str(spec.slot.devices)}
    else:
        resources["claims"] = [*(resources.get("claims") or []), {"name": "devices"}]
    return {
        **container,
        "image": image,
        "command": [f"{SHARED_PATH}/bin/relight-supervisor", f"{SHARED_PATH}/state"],
        "resources": resources,
        "volumeMounts": [*(container.get("volumeMounts") or []), _mount()],
        "lifecycle": {**_LEAVE, **(container.get("lifecycle") or {})},
    }


def _as_engine(body: Object, engine: Object, own: Object) -> Object:
    """The security of the agent's container. Sockets, journals and memory that both have are private to one user: that
    of the engine's container or of the whole pod, where the template names it, and else root, as which engines' images
    run."""
    if "runAsUser" in own or "runAsUser" in (body.get("securityContext") or {}):
        return own
    told = (engine.get("securityContext") or {}).get("runAsUser")
    return {**own, "runAsUser": 0 if told is None else told}


def _agent(body: Object, spec: DevicePoolSpec, added: Added, engine: Object) -> Object:
    """The agent's container: it holds no devices and may be replaced while engines run."""
    container = _named(body, AGENT)
    own = [
        {"name": "RELIGHT_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "RELIGHT_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "RELIGHT_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    command = [
        "relight-agent", "--config", "/etc/relight/agent.json", "--slot", "$(RELIGHT_POD).$(RELIGHT_NAMESPACE)",
        "--controller", added.controller_address, "--address", "$(RELIGHT_ADDRESS)",
        "--serving-port", str(added.serving_port), "--metrics-port", str(added.metrics_port),
        "--shared", SHARED_PATH, "--token-file", f"{TOKEN_PATH}/token",
    ]  # fmt: skip
    if spec.agent_config:
        # The kubelet puts variables in the place of `$(NAME)`, and `$` in that of `$$`: settings arrive as written.
        command += ["--settings", json.dumps(spec.agent_config, sort_keys=True).replace("$", "$$")]
    secret = {"name": f"{SHARED}-secret", "mountPath": "/etc/relight", "readOnly": True}
    token = {"name": f"{SHARED}-token", "mountPath": TOKEN_PATH, "readOnly": True}
    ports = [
        {"name": "serving", "containerPort": added.serving_port},
        {"name": "metrics", "containerPort": added.metrics_port},
    ]
    return {
        **container,
        "image": container.get("image") or added.agent_image,
        "command": command,
        "securityContext": _as_engine(body, engine, container.get("securityContext") or {}),
        "env": [*(container.get("env") or []), *own],
        "ports": [*(container.get("ports") or []), *ports],
        "volumeMounts": [*(container.get("volumeMounts") or []), _mount(), secret, token],
        "lifecycle": {**_LEAVE, **(container.get("lifecycle") or {})},
    }


def unclear(snapshot: Snapshot) -> frozenset[str]:
    """The slots of which nothing may be concluded."""
    return frozenset(slot.slot for slot in snapshot.slots if not slot.clear)


@dataclass(frozen=True, slots=True)
class Held:
    """What a slot holds: replicas that serve or are on their way, and dormant instances."""

    replicas: int = 0
    guardians: int = 0


def held(snapshot: Snapshot) -> dict[str, Held]:
    """By slot. What nobody knows of is held to serve: its pod must not be deleted as an empty one."""
    found = {slot: Held(replicas=1) for slot in unclear(snapshot)}
    for instance in snapshot.instances:
        if instance.remembered or instance.state is State.GONE:
            continue
        dormant = instance.desired is Desired.DORMANT and instance.state is not State.READY
        for member in instance.members:
            known = found.get(member.slot, Held())
            found[member.slot] = Held(known.replicas + (not dormant), known.guardians + dormant)
    return found


@dataclass(frozen=True, slots=True)
class PoolStep:
    """What to do next for a pool: how many pods to make, which to delete, and what their annotation shall say."""

    create: int
    delete: tuple[Object, ...]
    close: tuple[tuple[Object, str], ...]
    reopen: tuple[Object, ...]


def pool_step(replicas: int, digest: str, pods: Sequence[Object], slots: Mapping[str, Held]) -> PoolStep:
    """Makes what is missing; closes what is too much or made otherwise, and deletes it once nothing serves there.

    Pods that were made by an earlier template go one at a time, and only while all the others are there and ready to
    take what they hold.
    """
    over = [p for p in pods if _phase(p) in ("Failed", "Succeeded") and not _deleted(p)]
    alive = [p for p in pods if not _deleted(p) and p not in over]
    alive.sort(key=lambda p: _cheapness(p, digest, slots))
    surplus = max(0, len(alive) - replicas)
    leaving = {_name(p): "its pool has fewer slots" for p in alive[:surplus]}
    staying = alive[surplus:]
    outdated = [p for p in staying if labels(p).get(TEMPLATE_LABEL) != digest]
    if outdated and len(staying) == replicas and all(_phase(p) == "Running" for p in staying):
        already = [p for p in outdated if CLOSING in _annotations(p)]
        leaving[_name((already or outdated)[0])] = "its pool's template is another by now"
    empty = [p for p in alive if _name(p) in leaving and not slots.get(slot_of(p), Held()).replicas]
    close = [
        (p, leaving[_name(p)])
        for p in alive
        if _name(p) in leaving and p not in empty and _annotations(p).get(CLOSING) != leaving[_name(p)]
    ]
    reopen = [p for p in alive if _name(p) not in leaving and CLOSING in _annotations(p)]
    missing = max(0, replicas - len(alive))
    return PoolStep(min(missing, CREATED_AT_ONCE), (*over, *empty), tuple(close), tuple(reopen))


def _cheapness(pod: Object, digest: str, slots: Mapping[str, Held]) -> tuple[bool, bool, int, int, bool, str]:
    found = slots.get(slot_of(pod), Held())
    return (
        CLOSING not in _annotations(pod),
        _phase(pod) == "Running",
        found.replicas,
        found.guardians,
        labels(pod).get(TEMPLATE_LABEL) == digest,
        _name(pod),
    )


def places(pods: Mapping[str, Object], nodes: Mapping[str, Object], pools: Mapping[str, Object]) -> dict[str, Place]:
    """Where each slot pod stands, and why it closes, by slot."""
    found = {}
    for pod in pods.values():
        pool = labels(pod).get(POOL_LABEL)
        if not pool:
            continue
        namespace = pod["metadata"]["namespace"]
        spec = (pools.get(f"{namespace}/{pool}") or {}).get("spec") or {}
        allowed = tuple(f"{namespace}/{name}" for name in spec.get("allowedModels") or [])
        node = nodes.get((pod.get("spec") or {}).get("nodeName") or "")
        found[slot_of(pod)] = Place(
            f"{namespace}/{pool}", allowed, _closing(pod, node), shown(pod), images_seconds(pod)
        )
    return found


def images_seconds(pod: Object) -> float:
    """From the end of its initialisation to the last first start of its containers, in seconds; 0 while not all have
    started, or one was started again. Only images are waited for meanwhile (Kubernetes API, ContainerStatus)."""
    status = pod.get("status") or {}
    begun = _seconds((condition(pod, "Initialized") or {}).get("lastTransitionTime"))
    containers = status.get("containerStatuses") or []
    started = [_seconds(((c.get("state") or {}).get("running") or {}).get("startedAt")) for c in containers]
    if begun is None or not started or any(c.get("restartCount") for c in containers):
        return 0.0
    known = [at for at in started if at is not None]
    return max(max(known) - begun, 0.0) if len(known) == len(started) else 0.0


def _seconds(text: object) -> float | None:
    """A time of the API server's as seconds since 1970; None for none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def _closing(pod: Object, node: Object | None) -> str:
    if _deleted(pod):
        return "its pod is being deleted"
    if _phase(pod) in ("Failed", "Succeeded"):
        return f"its pod has ended: {(pod.get('status') or {}).get('reason') or _phase(pod)}"
    told = _annotations(pod).get(CLOSING)
    if told:
        return str(told)
    if node is not None:
        if (node.get("spec") or {}).get("unschedulable"):
            return f"node {node['metadata']['name']} is cordoned"
        ready = condition(node, "Ready")
        if ready is not None and ready.get("status") != "True":
            return f"node {node['metadata']['name']} is not ready"
    return ""


def _annotations(found: Object) -> Mapping[str, str]:
    return found["metadata"].get("annotations") or {}


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])


def _deleted(found: Object) -> bool:
    return bool(found["metadata"].get("deletionTimestamp"))


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")
