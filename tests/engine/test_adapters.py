"""Adapters on real engines: clients ask for one by its name, and it answers alike on a replica that was woken."""

from __future__ import annotations

import array
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engine.conftest import START_TIMEOUT
from tests.support.live import EAGER, Live, by_state, endpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]
RANK, LAYERS, HIDDEN, QUERY = 8, 2, 128, 128
NAMES = ("french", "legal")


def _adapter(path: Path, seed: int) -> Path:
    """In the form in which adapters are published: a configuration and two small matrices for each query projection."""
    path.mkdir()
    numbers = random.Random(seed)
    header: dict[str, object] = {}
    data = b""
    for layer in range(LAYERS):
        for half, shape in (("A", (RANK, HIDDEN)), ("B", (QUERY, RANK))):
            values = array.array("f", (numbers.gauss(0, 1) for _ in range(shape[0] * shape[1]))).tobytes()
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
            data += values
    told = json.dumps(header).encode()
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(told)) + told + data)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32, "lora_dropout": 0.0,
        "bias": "none", "target_modules": ["q_proj"], "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def adapted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One replica and one guardian of a tiny model with two adapters."""
    directory = tmp_path_factory.mktemp("l")
    found = [{"name": n, "uri": str(_adapter(directory / n, seed))} for seed, n in enumerate(NAMES)]
    model = {
        "name": "tiny", "uri": str(tiny_model), "args": [*EAGER, "--kv-cache-memory-bytes=33554432"],
        "adapters": found,
    }  # fmt: skip
    machine = Live(directory, model)
    try:
        machine.up()
        yield machine
    finally:
        machine.down()


def _tokens(url: str, model: str) -> list[int]:
    body = {
        "model": model, "prompt": "the replica wakes", "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status().json()
    assert answer["model"] == model
    return list(answer["choices"][0]["token_ids"])


def test_adapters_answer_by_their_names_and_alike_on_a_replica_that_was_woken(adapted: Live) -> None:
    names = ("tiny", *NAMES)
    # The source has used its adapters: what it holds of them must not be taken for weights.
    before = [_tokens(adapted.gateway, name) for name in names]
    assert len({tuple(tokens) for tokens in before}) == len(names)
    sleeper = by_state(adapted.instances(), "dormant")[0]["id"]
    adapted.scaled(2)
    rung = adapted.timeline(sleeper)["rungs"][-1]
    assert (rung["kind"], rung["ok"]) == ("peer_shm", True)
    (woken,) = (i for i in adapted.instances() if i["id"] == sleeper)
    assert [_tokens(endpoint(woken), name) for name in names] == before
    # It sleeps with its adapters used, and wakes again.
    adapted.scaled(1)
    adapted.scaled(2)
    assert [_tokens(endpoint(i), name) for i in by_state(adapted.instances(), "ready") for name in names] == before * 2


def test_the_list_of_models_names_each_adapter(adapted: Live) -> None:
    listed = httpx.get(f"{adapted.gateway}/v1/models", timeout=30, trust_env=False).json()["data"]
    assert {"tiny", *NAMES} <= {m["id"] for m in listed}
