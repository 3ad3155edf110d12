"""What the proof is worth on a real engine: one bit wrong anywhere in its weights, five hundred times.

The test reads the engine as a receiver does, under a grant of its own making, which ends the offers that the controller
knows: so this is the last file of the folder.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from relight.agent.engines.canary import PROMPT
from relight.agent.engines.vllm_control import call
from relight.core.clock import SystemClock
from relight.core.errors import ModelDirty
from relight.core.records import Proving
from relight.transfer import grants
from relight.transfer.manifest import WeightManifest
from relight.transfer.request import Holder, Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import refill
from relight.transfer.transports.shm import Pages, ShmReader
from tests.engine.conftest import START_TIMEOUT
from tests.support.live import Live, by_state, endpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]
CORRUPTIONS, CLEAN = 500, 1000


@dataclass
class Subject:
    """A ready engine, its weights as its own memory file, and a reader of them."""

    weights: mmap.mmap
    manifest: WeightManifest
    holder: Holder
    wanted: Wanted
    target: Segment
    http: httpx.Client
    model: str

    def proven(self) -> None:
        """One refill from the engine. Raises ModelDirty when a digest differs."""
        self.target.drop()
        refill(self.target, self.wanted, [self.holder], streams=1, clock=SystemClock())

    def canary(self) -> tuple[int, float] | None:
        """Token and log-probability (nats); None when the engine has no finite answer to give."""
        body: dict[str, Any] = {
            "model": self.model, "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0, "logprobs": 1,
            "ignore_eos": True, "return_token_ids": True, "add_special_tokens": False,
        }  # fmt: skip
        answer = self.http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return None
        choice = answer.json()["choices"][0]
        return choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]


def _memory_of(instance: str) -> int:
    """A descriptor of the engine's weights: the memory file that it named after itself."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(f"/memfd:relight-{instance} "):
                return os.open(link, os.O_RDWR)
        except OSError:
            continue
    raise AssertionError(f"no memory file of {instance}")


@pytest.fixture
def subject(one: Live) -> Iterator[Subject]:
    ready = by_state(one.instances(), "ready")[0]
    socket = next((one.state / "nodes").glob(f"*/*/{ready['id']}/worker-0.sock"))
    key = grants.new_key()
    offer = asyncio.run(call(socket, "open_source", {"key": key}, deadline=30.0))
    grant = grants.mint(key, grants.Claims(ready["id"], offer["generation"], "", "test", SystemClock().now() + 3600))

    def connect() -> ShmReader:
        return ShmReader(offer["addresses"]["shm"], grant, ready["id"], 5.0, pages)

    pages = Pages()
    reader = connect()
    manifest = reader.describe()
    reader.close()
    descriptor = _memory_of(ready["id"])
    target = Segment("worth", manifest.segment_bytes)
    prints = manifest.fingerprint
    wanted = Wanted(prints.layout, {t.name: t for t in manifest.tensors}, prints.content["revision"])
    with (
        mmap.mmap(descriptor, manifest.segment_bytes) as weights,
        httpx.Client(base_url=endpoint(ready), timeout=30.0, trust_env=False) as http,
    ):
        yield Subject(weights, manifest, Holder(ready["id"], connect), wanted, target, http, one.model["name"])
    os.close(descriptor)
    target.close()


def test_every_wrong_bit_is_caught_by_digest_and_no_right_weights_are_refused(
    subject: Subject, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    right = subject.canary()
    assert right is not None
    draw = random.Random(8)
    tensors = [t for t in subject.manifest.tensors if t.bytes]
    missed, seen_by_canary = [], 0
    for _ in range(CORRUPTIONS):
        tensor = draw.choice(tensors)
        at, bit = tensor.offset + draw.randrange(tensor.bytes), 1 << draw.randrange(8)
        subject.weights[at] ^= bit
        try:
            subject.proven()
            missed.append((tensor.name, at, bit))
        except ModelDirty as error:
            if f"tensor {tensor.name} from" not in str(error):
                missed.append((tensor.name, at, bit))
        got = subject.canary()
        seen_by_canary += got is None or got[0] != right[0] or not abs(got[1] - right[1]) <= Proving().tolerance_nats
        subject.weights[at] ^= bit
    assert not missed
    for _ in range(CLEAN):
        subject.proven()
        assert subject.canary() == right
    worth = {"corruptions": CORRUPTIONS, "by_digest": CORRUPTIONS, "by_canary_alone": seen_by_canary, "clean": CLEAN}
    record_property("worth", worth)
    with capsys.disabled():
        print(f"\n{json.dumps(worth)}")
