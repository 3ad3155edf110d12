"""A model's body at the boundary: what the defaults say may also be written."""

import pytest
from pydantic import ValidationError

from relight.controller.kubernetes.translate import model_spec
from relight.controller.specs import ModelBody
from relight.core.errors import Conflict, InvalidInput
from relight.core.records import RungKind, Storage

BODY = {"uri": "/m", "revision": "r1", "engine": "stub"}


def test_the_defaults_written_out_are_accepted_and_mean_the_same():
    written = ModelBody.model_validate(ModelBody.model_validate(BODY).model_dump(mode="json"))
    assert written == ModelBody.model_validate(BODY)
    assert written.rungs == list(RungKind)


@pytest.mark.parametrize("rungs", [[], ["peer_pigeon"], [*RungKind, RungKind.DISK]])
def test_rungs_that_are_none_unknown_or_too_many_are_refused(rungs):
    with pytest.raises(ValidationError, match="rungs"):
        ModelBody.model_validate(BODY | {"rungs": rungs})


@pytest.mark.parametrize(
    "uri", ["file:///m", "s3://b/m", "https://user:secret@s/m", "https://s/m#x", "https:///m", "https://s/m m"]
)
def test_storage_is_an_address_of_http_without_a_user(uri):
    with pytest.raises(ValidationError, match=r"storage\.uri"):
        ModelBody.model_validate(BODY | {"storage": {"uri": uri}})


def test_a_presigned_address_with_digests_is_taken_as_it_is():
    storage = {"uri": "https://s/m/?sig=x", "sha256": {"model.safetensors": "0" * 64}}
    spec = ModelBody.model_validate(BODY | {"storage": storage}).spec("default", "m")
    assert spec.storage == Storage(**storage)
    assert "sig" not in repr(spec)


def test_a_resource_says_the_same_of_starts_and_storage_as_a_body_does():
    digest = "0" * 64
    found = {
        "metadata": {"namespace": "default", "name": "m"},
        "spec": {
            "model": {
                "uri": "/m", "revision": "r1",
                "storage": {"uri": "https://s/m/", "files": [{"name": "model.safetensors", "sha256": digest}]},
            },
            "runtimeRef": {"name": "rt"}, "poolRef": {"name": "p"}, "start": {"warmUpRequests": 0},
            "shareHostCopies": True, "sources": {"allow": ["Storage"]},
        },
    }  # fmt: skip
    runtime = {"metadata": {"name": "rt"}, "spec": {"engine": "stub", "image": "x"}}
    pool = {"metadata": {"name": "p"}, "spec": {"runtimeRef": {"name": "rt"}, "slot": {"resourceName": "x/y"}}}
    spec = model_spec(found, {"default/rt": runtime}, {"default/p": pool})
    body = {
        **BODY, "storage": {"uri": "https://s/m/", "sha256": {"model.safetensors": digest}}, "warm_up_requests": 0,
        "share_host_copies": True, "rungs": ["storage"], "pool": "default/p",
    }  # fmt: skip
    assert spec == ModelBody.model_validate(body).spec("default", "m")


def test_a_resource_says_the_same_of_priority_spread_and_encryption_as_a_body_does():
    found = {
        "metadata": {"namespace": "default", "name": "m"},
        "spec": {
            "model": {"uri": "/m", "revision": "r1"}, "runtimeRef": {"name": "rt"}, "poolRef": {"name": "p"},
            "priorityClassName": "urgent", "guardians": {"replicas": 1, "spread": "Required"},
            "sources": {"encrypt": True, "maxBytesPerSecond": 5},
        },
    }  # fmt: skip
    runtime = {"metadata": {"name": "rt"}, "spec": {"engine": "stub", "image": "x"}}
    pool = {"metadata": {"name": "p"}, "spec": {"runtimeRef": {"name": "rt"}, "slot": {"resourceName": "x/y"}}}
    known = ({"default/rt": runtime}, {"default/p": pool})
    spec = model_spec(found, *known, {"urgent": {"metadata": {"name": "urgent"}, "value": 7}})
    body = {
        **BODY, "priority": 7, "guardians": {"replicas": 1, "spread": "required"}, "encrypt": True, "source_rate": 5,
        "pool": "default/p",
    }  # fmt: skip
    assert spec == ModelBody.model_validate(body).spec("default", "m")
    with pytest.raises(InvalidInput, match="priorityClassName: expected a PriorityClass of the cluster, got urgent"):
        model_spec(found, *known)


def test_a_resource_says_the_same_of_adapters_proofs_and_experts_as_a_body_does():
    found = {
        "metadata": {"namespace": "default", "name": "m"},
        "spec": {
            "model": {"uri": "/m", "revision": "r1", "adapters": [{"name": "french", "uri": "/french"}]},
            "runtimeRef": {"name": "rt"}, "poolRef": {"name": "p"}, "parallelism": {"expert": True},
            "proof": {"tokens": 2, "toleranceNats": 0.2},
        },
    }  # fmt: skip
    runtime = {"metadata": {"name": "rt"}, "spec": {"engine": "stub", "image": "x"}}
    pool = {"metadata": {"name": "p"}, "spec": {"runtimeRef": {"name": "rt"}, "slot": {"resourceName": "x/y"}}}
    body = {
        **BODY, "adapters": [{"name": "french", "uri": "/french"}], "expert_parallel": True, "pool": "default/p",
        "proof": {"tokens": 2, "tolerance_nats": 0.2},
    }  # fmt: skip
    spec = model_spec(found, {"default/rt": runtime}, {"default/p": pool})
    assert spec == ModelBody.model_validate(body).spec("default", "m")


@pytest.mark.parametrize("served", [["french"], []])
def test_an_adapter_has_a_name_of_its_own(served):
    body = {**BODY, "served_names": served, "adapters": [{"name": "french", "uri": "/french"}]}
    with pytest.raises(Conflict):
        ModelBody.model_validate(body).spec("default", "french" if not served else "m")
