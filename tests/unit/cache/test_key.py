"""Keys: what is private to a pod does not change them, what changes the code does, and is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relight.agent.cache.key import CacheKey, Difference, checked, describe, nearest
from relight.core.errors import InvalidInput
from tests.support.cache import START

KEY = describe(START)


def _with(**environment: str):
    return describe(replace(START, environment={**START.environment, **environment}))


@pytest.mark.parametrize(
    "name",
    [
        "HOSTNAME", "POD_NAME", "POD_IP", "NODE_NAME", "KUBERNETES_SERVICE_HOST", "VLLM_HOST_IP", "VLLM_PORT", "HOME",
        "VLLM_SERVICE_HOST", "VLLM_SERVICE_PORT", "VLLM_SERVICE_PORT_HTTP", "VLLM_PORT_8000_TCP_ADDR",
        "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE", "CUDA_VISIBLE_DEVICES", "VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY",
        "RELIGHT_INSTANCE", "RELIGHT_ENGINE_DIR", "LD_LIBRARY_PATH",
    ],
)  # fmt: skip
def test_what_is_private_to_a_pod_does_not_change_the_key(name: str) -> None:
    assert _with(**{name: "pod-7"}) == KEY


@pytest.mark.parametrize(
    "name", ["VLLM_PLUGINS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_USE_AOT_COMPILE", "OMP_NUM_THREADS", "CXX", "TRITON_X"]
)
def test_a_variable_that_changes_the_code_changes_the_key_and_is_named(name: str) -> None:
    other = _with(**{name: "other"})
    assert other.digest != KEY.digest
    assert [d.field for d in KEY.differences(other)] == [f"environment.{name}"]
    assert "'other' there" in str(KEY.differences(other)[0])


def test_a_variable_that_is_empty_differs_from_one_that_is_not_set() -> None:
    absent = describe(replace(START, environment={}))
    empty = describe(replace(START, environment={"VLLM_PLUGINS": ""}))
    assert absent.differences(empty) == [Difference("environment.VLLM_PLUGINS", None, "")]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": "models/smollm2"}),
        ("ranks", {"ranks": "0-1"}),
        ("version.torch", {"versions": {**START.versions, "torch": "2.14.0"}}),
        ("source.vllm", {"sources": {"vllm": "/usr/lib/vllm/__init__.py"}}),
        ("device.isa", {"device": {**START.device, "isa": "avx2"}}),
        ("model-file.config.json", {"model_files": {"config.json": "1" * 32}}),
        ("argument.--max-model-len", {"arguments": ("--dtype=bfloat16", "--max-model-len", "4096")}),
        ("argument.--worker-cls", {"arguments": (*START.arguments, "--worker-cls", "x.Y")}),
        ("argument.--speculative-config", {"arguments": (*START.arguments, '--speculative-config={"n": 3}')}),
    ],
)
def test_each_component_is_compared_by_name(field: str, change) -> None:
    assert [d.field for d in KEY.differences(describe(replace(START, **change)))] == [field]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-model-len=2048", "--dtype", "bfloat16"),
        ("--max_model_len", "2048", "--dtype=bfloat16"),
        (*START.arguments, "--port", "8123", "--host=0.0.0.0", "--api-key", "secret", "--load-format", "dummy"),
        (*START.arguments, "--gpu-memory-utilization", "0.5", "--seed", "3", "--kv-cache-memory-bytes=1"),
    ],
)
def test_how_arguments_are_written_and_what_only_serves_does_not_change_the_key(arguments: tuple[str, ...]) -> None:
    assert describe(replace(START, arguments=arguments)) == KEY


def test_json_is_compared_by_what_it_says_and_short_options_by_what_they_mean() -> None:
    one = describe(replace(START, arguments=('--compilation-config={"a": 1, "b": 2}', "-tp", "2")))
    two = describe(replace(START, arguments=("--tensor-parallel-size=2", '-cc={"b":2,"a":1}')))
    assert one == two


def test_negative_numbers_and_lists_are_values() -> None:
    fields = describe(replace(START, arguments=("--sizes", "1", "2", "--offset", "-3", "--flag"))).fields
    assert fields["argument.--sizes"] == "1 2"
    assert fields["argument.--offset"] == "-3"
    assert fields["argument.--flag"] == ""


def test_no_secret_enters_a_key() -> None:
    key = describe(replace(START, arguments=("--api-key", "tell-nobody"), environment={"VLLM_API_KEY": "tell-nobody"}))
    assert not any("tell-nobody" in value for value in key.fields.values())


def test_the_nearest_key_is_that_with_the_fewest_changes_of_the_same_engine() -> None:
    far = describe(replace(START, model="x", ranks="0-7"))
    near = describe(replace(START, ranks="0-1"))
    other = CacheKey({**KEY.fields, "engine": "sglang"})
    assert nearest(KEY, [far, other, near]) == (near, KEY.differences(near))
    assert nearest(KEY, [other]) is None


@pytest.mark.parametrize("raw", [None, {}, [], {"": "x"}, {"a": 1}, {"a" * 201: "x"}, {"a": "x" * (64 << 10) + "x"}])
def test_a_key_from_a_peer_that_is_none_is_refused(raw: object) -> None:
    with pytest.raises(InvalidInput):
        checked(raw)
