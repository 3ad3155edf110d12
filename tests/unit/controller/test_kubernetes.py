"""Resources to records, pods of pools, marks, writers, statuses: the pure parts of the operator."""

from __future__ import annotations

import dataclasses
import json

import pytest

from relight.controller.kubernetes import marks as slot_marks
from relight.controller.kubernetes import pods as slot_pods
from relight.controller.kubernetes import status as statuses
from relight.controller.kubernetes.definitions import definitions
from relight.controller.kubernetes.intent import intent
from relight.controller.kubernetes.marks import Mark, marks
from relight.controller.kubernetes.pods import Added, Held, places, pool_step, slot_pod
from relight.controller.kubernetes.resources import CLOSING, FINALIZER, MODEL_LABEL, POOL_LABEL, STATE_LABEL, Writer
from relight.controller.kubernetes.translate import model_spec, pool_spec
from relight.controller.kubernetes.writers import conflict, last_writer
from relight.core.errors import InvalidInput
from relight.core.records import (
    Adapter,
    Decision,
    Desired,
    Drain,
    Guardians,
    MemoryReading,
    Mode,
    Proving,
    RungKind,
    Snapshot,
    Strategy,
)
from relight.core.states import State
from support.planning import SPEC, instance, slot

NOW = "2030-01-01T00:00:00Z"
RUNTIME = {"metadata": {"namespace": "n", "name": "rt"}, "spec": {"engine": "vllm", "image": "e:1", "args": ["--a"]}}
POOL = {
    "metadata": {"namespace": "n", "name": "p", "uid": "u-1"},
    "spec": {"replicas": 2, "slot": {"devices": 2, "resourceName": "nvidia.com/gpu"}, "runtimeRef": {"name": "rt"}},
}
ADDED = Added("agent:1", "c:1", "s")


def deployment(name="m", finalizers=(FINALIZER,), **spec):
    body = {"model": {"uri": "/m", "revision": "r1"}, "runtimeRef": {"name": "rt"}, "poolRef": {"name": "p"}}
    metadata = {"namespace": "n", "name": name, "uid": "u", "finalizers": list(finalizers), "resourceVersion": "1"}
    return {"metadata": metadata, "spec": {**body, **spec}}


def pod(name, pool="p", phase="Running", **changes):
    metadata = {"name": name, "namespace": "n", "uid": name, "resourceVersion": "1", "annotations": {}, "labels": {}}
    metadata["labels"] = {POOL_LABEL: pool, slot_pods.TEMPLATE_LABEL: "t"}
    return {"metadata": {**metadata, **changes}, "spec": {"nodeName": "node"}, "status": {"phase": phase}}


def translated(**spec):
    return model_spec(deployment(**spec), {"n/rt": RUNTIME}, {"n/p": POOL})


def test_every_field_of_a_deployment_reaches_the_record():
    found = translated(
        model={"uri": "/m", "revision": "r2", "servedNames": ["x"], "adapters": [{"name": "y", "uri": "/y"}]},
        args=["--b"],
        env=[{"name": "A", "value": "1"}],
        parallelism={"tensor": 2, "pipeline": 3, "expert": True},
        proof={"tokens": 2, "toleranceNats": 0.1},
        memoryMebibytes=2,
        replicas=3,
        bounds={"minReplicas": 1, "maxReplicas": 5},
        guardians={"replicas": 2, "level": 1},
        start={"mode": "Lazy", "deadlineSeconds": 10, "wakeDeadlineSeconds": 5},
        sources={"allow": ["PeerShm", "Disk"]},
        hostCopies=0,
        drain={"timeoutSeconds": 1, "onTimeout": "Wait"},
        strategy={"maxSurge": 2, "maxUnavailable": 1},
        paused=True,
    )
    assert (found.key, found.engine, found.uri, found.revision, found.served_names) == (
        "n/m",
        "vllm",
        "/m",
        "r2",
        ("x",),
    )
    assert (found.args, dict(found.env)) == (("--a", "--b"), {"A": "1"})
    assert (found.devices_per_member, found.members, found.memory_bytes) == (2, 3, 2 << 20)
    assert (found.replicas, found.min_replicas, found.max_replicas) == (3, 1, 5)
    assert (found.guardians, found.mode, found.rungs) == (
        Guardians(2, 1), Mode.LAZY, (RungKind.PEER_SHM, RungKind.DISK)
    )  # fmt: skip
    assert (found.start_deadline_seconds, found.wake_deadline_seconds, found.host_copies) == (10, 5, 0)
    assert found.drain == Drain(1, "wait")
    assert (found.strategy, found.pool) == (Strategy(2, 1, True), "n/p")
    assert (found.adapters, found.proof, found.expert_parallel) == ((Adapter("y", "/y"),), Proving(2, 0.1), True)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"runtimeRef": {"name": "other"}}, "spec.runtimeRef.name"),
        ({"poolRef": {"name": "other"}}, "spec.poolRef.name"),
        ({"parallelism": {"tensor": 3}}, "spec.parallelism.tensor"),
        ({"bounds": {"minReplicas": 3, "maxReplicas": 2}}, "spec.bounds.minReplicas"),
        ({"bounds": {"minReplicas": 1}, "scaleToZero": {"idleSeconds": 5}}, "spec.bounds.minReplicas"),
        ({"strategy": {"maxSurge": 0}}, "spec.strategy"),
        ({"model": {"uri": "/m", "revision": "r", "adapters": [{"name": "m", "uri": "/a"}]}}, "spec.model.adapters"),
        (
            {"model": {"uri": "/m", "revision": "r", "servedNames": ["x"], "adapters": [{"name": "x", "uri": "/a"}]}},
            "spec.model.adapters",
        ),
        ({"proof": {"toleranceNats": 0}}, "proof.toleranceNats"),
        ({"replicas": -1}, "replicas"),
        ({"replicas": "many"}, "replicas"),
        ({"start": {"mode": "fast"}}, "start.mode"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_cannot_be_run_is_refused_by_the_name_of_its_field(spec, field):
    with pytest.raises(InvalidInput) as refused:
        translated(**spec)
    assert field in [e.field for e in refused.value.errors]


def test_a_pool_names_its_devices_in_exactly_one_way():
    for wrong in ({"devices": 1}, {"devices": 1, "resourceName": "a/b", "resourceClaimTemplateName": "c"}):
        with pytest.raises(InvalidInput, match="not both"):
            pool_spec({**POOL, "spec": {**POOL["spec"], "slot": wrong}}, {"n/rt": RUNTIME})


def test_definitions_are_structural():
    def walk(node):
        assert not {"$ref", "anyOf", "title", "$defs"} & set(node), node
        assert "type" in node, node
        for child in [*node.get("properties", {}).values(), *([node["items"]] if "items" in node else [])]:
            walk(child)

    for found in definitions():
        (version,) = found["spec"]["versions"]
        walk(version["schema"]["openAPIV3Schema"])


def test_a_slot_pod_keeps_the_users_template_and_asks_for_the_devices():
    template = {
        "metadata": {"labels": {"queue": "q"}, "annotations": {"note": "1"}},
        "spec": {
            "schedulerName": "mine",
            "tolerations": [{"key": "gpu"}],
            "volumes": [{"name": "weights"}],
            "containers": [{"name": "engine", "volumeMounts": [{"name": "weights"}]}, {"name": "sidecar"}],
        },
    }
    spec, runtime = pool_spec({**POOL, "spec": {**POOL["spec"], "podTemplate": template}}, {"n/rt": RUNTIME})
    made = slot_pod(POOL, spec, runtime, ADDED)
    assert made["metadata"]["labels"]["queue"] == "q"
    assert made["metadata"]["annotations"] == {"note": "1"}
    assert (made["spec"]["schedulerName"], made["spec"]["tolerations"]) == ("mine", [{"key": "gpu"}])
    engine, agent, sidecar = made["spec"]["containers"]
    assert (engine["image"], sidecar["name"], agent["image"]) == ("e:1", "sidecar", "agent:1")
    assert engine["resources"]["limits"] == engine["resources"]["requests"] == {"nvidia.com/gpu": "2"}
    assert {"name": "weights"} in engine["volumeMounts"]
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_certificates_of_a_secret_apart_lie_beside_what_the_agent_starts_with():
    spec, runtime = pool_spec(POOL, {"n/rt": RUNTIME})
    made = slot_pod(POOL, spec, runtime, dataclasses.replace(ADDED, tls_secret="t"))
    (volume,) = (v for v in made["spec"]["volumes"] if v["name"] == "relight-secret")
    assert volume["projected"]["sources"] == [{"secret": {"name": "s"}}, {"secret": {"name": "t"}}]
    (agent,) = (c for c in made["spec"]["containers"] if c["name"] == "agent")
    assert [m["mountPath"] for m in agent["volumeMounts"] if m["name"] == "relight-secret"] == ["/etc/relight"]


def test_a_pools_own_agent_settings_reach_its_agents_and_make_its_pods_anew():
    own = {"devices": [], "accelerators": {}, "engines": {"vllm": {"python": "/opt/$(HOME)/$$/python3"}}}
    spec, runtime = pool_spec({**POOL, "spec": {**POOL["spec"], "agentConfig": own}}, {"n/rt": RUNTIME})
    plain, _ = pool_spec(POOL, {"n/rt": RUNTIME})
    told, untold = (
        next(c for c in slot_pod(POOL, s, runtime, ADDED)["spec"]["containers"] if c["name"] == "agent")["command"]
        for s in (spec, plain)
    )
    assert told[: len(untold)] == untold
    flag, text = told[len(untold) :]
    # As the kubelet passes it on.
    assert (flag, json.loads(text.replace("$$", "$"))) == ("--settings", own)
    assert "$" not in text.replace("$$", "")
    assert slot_pods.template_digest(spec, runtime) != slot_pods.template_digest(plain, runtime)


def test_an_upgrade_of_relight_alone_makes_no_pod_anew():
    spec, runtime = pool_spec(POOL, {"n/rt": RUNTIME})
    assert slot_pods.template_digest(spec, runtime) == slot_pods.template_digest(spec, runtime)
    one = slot_pod(POOL, spec, runtime, ADDED)
    two = slot_pod(POOL, spec, runtime, dataclasses.replace(ADDED, agent_image="agent:2"))
    assert one["metadata"]["labels"] == two["metadata"]["labels"]


def test_a_pool_makes_what_is_missing_and_gives_up_what_costs_least():
    pods = [pod("a"), pod("b"), pod("c", phase="Pending")]
    busy = {"a.n": Held(1, 0), "b.n": Held(0, 1)}
    assert pool_step(5, "t", pods, busy).create == 2
    assert [p["metadata"]["name"] for p in pool_step(1, "t", pods, busy).delete] == ["c", "b"]
    none = pool_step(0, "t", pods, busy)
    assert [p["metadata"]["name"] for p, _ in none.close] == ["a"], "what serves is moved first"
    assert pool_step(3, "t", pods, busy) == slot_pods.PoolStep(0, (), (), ())


def test_a_pod_that_was_closing_stays_when_the_number_rises_again():
    closing = pod("a", annotations={CLOSING: "its pool has fewer slots"})
    step = pool_step(1, "t", [closing], {"a.n": Held(1, 0)})
    assert [p["metadata"]["name"] for p in step.reopen] == ["a"]


def test_pods_of_an_earlier_template_go_one_at_a_time_while_all_others_run():
    pods = [pod("a"), pod("b")]
    step = pool_step(2, "t2", pods, {"a.n": Held(1, 0), "b.n": Held(1, 0)})
    assert len(step.close) + len(step.delete) == 1
    waiting = pool_step(2, "t2", [pods[0], pod("c", phase="Pending")], {})
    assert (waiting.close, waiting.delete) == ((), ())


def test_a_failed_pod_is_replaced():
    step = pool_step(1, "t", [pod("a", phase="Failed")], {})
    assert ([p["metadata"]["name"] for p in step.delete], step.create) == (["a"], 1)


RUNS = {"state": {"running": {"startedAt": "2026-11-30T10:01:35Z"}}}


@pytest.mark.parametrize(
    ("containers", "seconds"),
    [
        ([RUNS, {"state": {"running": {"startedAt": "2026-11-30T10:00:02Z"}}}], 95.0),
        ([RUNS, {"state": {"waiting": {"reason": "ContainerCreating"}}}], 0.0),
        ([{**RUNS, "restartCount": 1}], 0.0),
        ([{"state": {"running": {"startedAt": "2026-11-30T09:59:59Z"}}}], 0.0),
        ([{"state": {"running": {"startedAt": "soon"}}}], 0.0),
        ([], 0.0),
    ],
)
def test_how_long_a_slot_waited_for_its_images_is_told_by_its_first_starts(containers, seconds):
    ready = {"type": "Initialized", "status": "True", "lastTransitionTime": "2026-11-30T10:00:00Z"}
    assert slot_pods.images_seconds({"status": {"conditions": [ready], "containerStatuses": containers}}) == seconds
    assert slot_pods.images_seconds({"status": {"containerStatuses": containers}}) == 0.0
    assert slot_pods.images_seconds({}) == 0.0


def test_a_slot_closes_for_each_reason_that_its_pod_or_node_gives():
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    node = {"metadata": {"name": "node"}, "spec": {}, "status": ready}
    cordoned = {**node, "spec": {"unschedulable": True}}
    lost = {**node, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    cases = [
        (pod("a"), node, ""),
        (pod("a", deletionTimestamp=NOW), node, "deleted"),
        (pod("a", phase="Failed"), node, "ended"),
        (pod("a", annotations={CLOSING: "told"}), node, "told"),
        (pod("a"), cordoned, "cordoned"),
        (pod("a"), lost, "not ready"),
    ]
    for found, on, why in cases:
        place = places({"n/a": found}, {"node": on}, {"n/p": {"spec": {"allowedModels": ["m"]}}})["a.n"]
        assert (place.pool, place.allowed) == ("n/p", ("n/m",))
        assert why in place.closing
        assert bool(why) == bool(place.closing)


def fleet(*instances, slots=()):
    return Snapshot(1.0, 1, 1, (), slots or (slot("a"),), instances)


@pytest.mark.parametrize(
    ("state", "desired", "shown"),
    [
        (State.READY, Desired.READY, Mark("m", "ready", True, "Proven")),
        (State.WAKING, Desired.READY, Mark("m", "waking", False, "Waking", 1.0)),
        (State.DORMANT, Desired.READY, Mark("", "guardian", False, "Dormant")),
        (State.STARTING, Desired.READY, Mark("m", "starting", False, "Starting")),
        (State.READY, Desired.DRAINED, Mark("m", "draining", False, "Draining")),
        (State.DRAINING, Desired.DORMANT, Mark("m", "draining", False, "Draining")),
        (State.DORMANT, Desired.DORMANT, Mark("", "guardian", False, "Dormant")),
        (State.SLEEPING, Desired.DORMANT, Mark("", "guardian", False, "Dormant")),
        (State.STARTING, Desired.DORMANT, Mark("", "preparing", False, "NotAsleepYet")),
        (State.FAILED, Desired.READY, Mark("", "failed", False, "Failed")),
    ],
)
def test_a_pod_shows_its_replica_and_only_a_proven_one_opens_the_gate(state, desired, shown):
    found = dataclasses.replace(instance("i", "a", state), desired=desired)
    assert marks(fleet(found)) == {"a": shown}


def test_a_slot_whose_agent_is_lost_lets_no_request_in():
    lost = dataclasses.replace(slot("a"), alive=False)
    assert marks(fleet(instance("i", "a", State.READY), slots=(lost,)))["a"] == Mark("", "lost", False, "AgentLost")


def test_nothing_is_concluded_of_a_slot_that_nobody_knows_and_its_pod_is_held_to_serve():
    unheard = dataclasses.replace(slot("a"), clear=False)
    asleep = instance("i", "b", State.DORMANT)
    found = fleet(asleep, slots=(unheard, slot("b")))
    assert slot_pods.unclear(found) == {"a"}
    assert slot_pods.held(found) == {"a": Held(1, 0), "b": Held(0, 1)}


@pytest.mark.parametrize(
    ("state", "desired", "shows"),
    [
        (State.READY, Desired.READY, "n/m"),
        (State.WAKING, Desired.READY, "n/m"),
        (State.STARTING, Desired.READY, "n/m"),
        (State.DRAINING, Desired.DRAINED, ""),
        (State.DORMANT, Desired.DORMANT, ""),
    ],
)
def test_a_pods_gate_says_of_which_model_it_has_a_replica(state, desired, shows):
    found = pod("a")
    (mark,) = marks(fleet(dataclasses.replace(instance("i", "a", state), desired=desired))).values()
    found["status"]["conditions"] = slot_marks.gate_patch(found, mark, NOW)["status"]["conditions"]
    assert places({"n/a": found}, {}, {})["a.n"].shows == shows


def test_a_short_wake_changes_no_label_before_its_gate_is_open():
    found, waking = pod("a"), Mark("m", "waking", False, "Waking", 100.0)
    found["metadata"]["labels"][STATE_LABEL] = "guardian"
    assert [waking.early(found, now) for now in (100.0, 101.9, 102.1)] == [True, True, False]
    found["metadata"]["labels"] |= {STATE_LABEL: "draining", MODEL_LABEL: "other"}
    assert not waking.early(found, 100.0), "it must not stay behind another model's Services"
    found["metadata"]["labels"] |= {STATE_LABEL: "guardian", MODEL_LABEL: None}
    assert not Mark("m", "ready", True, "Proven").early(found, 100.0)


def test_patches_are_made_once_and_only_against_what_was_read():
    found, mark = pod("a"), Mark("m", "ready", True, "Proven")
    label = slot_marks.label_patch(found, mark)
    assert label["metadata"]["labels"] == {STATE_LABEL: "ready", MODEL_LABEL: "m"}
    assert label["metadata"]["resourceVersion"] == "1"
    found["metadata"]["labels"] |= label["metadata"]["labels"]
    assert slot_marks.label_patch(found, mark) is None
    gate = slot_marks.gate_patch(found, mark, NOW)
    found["status"]["conditions"] = gate["status"]["conditions"]
    assert slot_marks.gate_patch(found, mark, "later") is None
    assert slot_marks.label_patch(found, Mark())["metadata"]["labels"][MODEL_LABEL] is None


def wanted(deployments, stored=(), *instances):
    objects = {f"n/{d['metadata']['name']}": d for d in deployments}
    return intent(objects, {"n/rt": RUNTIME}, {"n/p": POOL}, {s.key: s for s in stored}, fleet(*instances))


def test_nothing_runs_of_a_deployment_before_it_is_held_by_the_finalizer():
    found = wanted([deployment(finalizers=())])
    assert (len(found.hold), found.put) == (1, ())


def test_a_changed_number_is_a_scale_and_anything_else_a_write():
    spec = translated(replicas=1)
    assert wanted([deployment(replicas=1)], [spec]) == wanted([deployment(replicas=1)], [spec])
    assert not wanted([deployment(replicas=1)], [spec]).put
    assert [s.replicas for s, _ in wanted([deployment(replicas=2)], [spec]).scale] == [2]
    assert wanted([deployment(replicas=2, args=["--x"])], [spec]).put
    bounded = wanted([deployment(replicas=9, bounds={"maxReplicas": 64})], [translated(bounds={"maxReplicas": 64})])
    assert [s.replicas for s, _ in bounded.scale] == [9]


def test_a_number_beyond_the_bounds_is_taken_within_them():
    (spec,) = wanted([deployment(replicas=9, bounds={"maxReplicas": 2})]).put
    assert spec.replicas == 2


def test_a_deleted_deployment_is_released_only_when_nothing_of_it_runs_even_after_a_failed_start():
    gone = deployment()
    gone["metadata"]["deletionTimestamp"] = NOW
    spec = translated()
    assert wanted([gone], [spec]).delete == ("n/m",)
    ours = dataclasses.replace(SPEC, namespace="n")
    running = dataclasses.replace(instance("i", "a", State.FAILED, ours), desired=Desired.GONE)
    assert not wanted([gone], (), running).release
    memory = dataclasses.replace(running, state=State.GONE, remembered=True)
    assert len(wanted([gone], (), memory).release) == 1


def test_what_cannot_be_run_any_more_runs_on_as_it_was():
    spec = translated()
    found = wanted([deployment(replicas=-1)], [spec])
    assert (list(found.refused), found.put, found.scale, found.delete) == (["n/m"], (), (), ())


def managed(*entries):
    fields = {"f:spec": {"f:replicas": {}}}
    return {"metadata": {"managedFields": [{"manager": m, "time": t, "fieldsV1": fields} for m, t in entries]}}


def test_writers_are_told_apart_by_field_manager():
    assert last_writer(managed(("kubectl", "1"), ("kube-controller-manager", "2"))) == "kube-controller-manager"
    assert last_writer({"metadata": {}}) == ""


def test_whoever_made_an_object_has_no_claim_to_the_number_that_it_began_with():
    made = managed(("kubectl-client-side-apply", "2026-11-30T12:00:01Z"))
    made["metadata"]["creationTimestamp"] = "2026-11-30T12:00:00Z"
    assert last_writer(made) == ""
    made["metadata"]["managedFields"][0]["time"] = "2026-11-30T12:00:09Z"
    assert last_writer(made) == "kubectl-client-side-apply"
    assert conflict(Writer.HPA, "kube-controller-manager") == ""
    assert conflict(Writer.KEDA, "keda") == ""
    assert conflict(Writer.KUBECTL, "kubectl-client-side-apply") == ""
    assert "reserves for HPA" in conflict(Writer.HPA, "kubectl")
    assert "relight-autoscaler" in conflict(Writer.AUTOSCALER, "keda")
    assert conflict(Writer.ANY, "whoever") == ""


def test_a_status_counts_what_runs_and_keeps_the_time_of_its_transitions():
    ours = dataclasses.replace(SPEC, namespace="n")
    views = (instance("i", "a", State.READY, ours), instance("j", "b", State.DORMANT, ours))
    facts = statuses.ModelFacts(
        ours, "", "", Decision(ours.key, 1, 1, "1 is the written number"), views, (), None, (), None
    )
    found = deployment()
    first = statuses.model_status(found, facts, NOW)
    assert (first["replicas"], first["readyReplicas"], first["guardians"]["ready"]) == (1, 1, 1)
    assert first["selector"] == f"{MODEL_LABEL}=m"
    assert {c["type"]: c["status"] for c in first["conditions"]} == {
        "Accepted": "True", "Available": "True", "Progressing": "False", "ConflictingWriters": "False",
        "GuardiansReady": "True",
    }  # fmt: skip
    found["status"] = {k: v for k, v in first.items() if v is not None}
    assert not statuses.differs(found, statuses.model_status(found, facts, "later"))


@pytest.mark.parametrize(
    ("decision", "state", "stand"),
    [
        (None, State.DORMANT, "False"),
        (Decision(SPEC.key, 1, 1, ""), State.STARTING, "False"),
        (Decision(SPEC.key, 1, 1, ""), State.DORMANT, "True"),
        (Decision(SPEC.key, 1, 0, ""), State.STARTING, "True"),
    ],
)
def test_guardians_stand_when_as_many_sleep_as_are_wanted(decision, state, stand):
    facts = statuses.ModelFacts(SPEC, "", "", decision, (instance("j", "b", state),), (), None, (), None)
    told = {c["type"]: c["status"] for c in statuses.model_status(deployment(), facts, NOW)["conditions"]}
    assert told["GuardiansReady"] == stand


@pytest.mark.parametrize(
    ("memory", "safe"),
    [
        (None, None),
        (MemoryReading(1.0, 10), None),
        (MemoryReading(1.0, 10, residual_bytes=10), True),
        (MemoryReading(1.0, 90, residual_bytes=90, unsafe="asleep at level 2: 90 of 100 bytes left"), False),
    ],
)
def test_whether_engines_of_a_model_are_safe_guardians_is_what_was_measured(memory, safe):
    ours = dataclasses.replace(SPEC, namespace="n")
    view = instance("j", "b", State.DORMANT, ours)
    (member,) = view.members
    member = dataclasses.replace(member, report=dataclasses.replace(member.report, memory=memory))
    views = (dataclasses.replace(view, members=(member,)),)
    facts = statuses.ModelFacts(ours, "", "", Decision(ours.key, 0, 1, ""), views, (), None, (), None)
    said = statuses.model_status(deployment(), facts, NOW)
    assert said["guardianSafe"] is safe
    told = {c["type"]: (c["status"], c.get("message", "")) for c in said["conditions"]}
    if safe is None:
        assert "GuardianSafe" not in told
    else:
        assert told["GuardianSafe"] == ("True" if safe else "False", memory.unsafe)


@pytest.mark.parametrize(
    ("template", "user"),
    [
        ({}, 0),
        ({"securityContext": {"runAsUser": 1000}}, None),
        ({"containers": [{"name": "engine", "securityContext": {"runAsUser": 7}}]}, 7),
        ({"containers": [{"name": "agent", "securityContext": {"runAsUser": 9}}]}, 9),
    ],
)
def test_an_agent_runs_as_the_user_of_the_engines_that_it_shares_sockets_with(template, user):
    pool = {**POOL, "spec": {**POOL["spec"], "podTemplate": {"spec": template}}}
    spec, runtime = pool_spec(pool, {"n/rt": RUNTIME})
    containers = {c["name"]: c for c in slot_pod(pool, spec, runtime, ADDED)["spec"]["containers"]}
    assert containers["agent"]["securityContext"].get("runAsUser") == user
