"""A real engine of two ranks: each rank of the woken one has its weights from the same rank of its source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import START_TIMEOUT
from tests.support.live import Live, by_state, same_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]


@pytest.fixture(scope="module")
def divided(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A tiny model over two cores: one replica on one node, one guardian on the other; between nodes TLS alone."""
    model = {
        "name": "tiny", "uri": str(tiny_model), "devices_per_member": 2,
        "args": ["--dtype=bfloat16", "--max-model-len=256", "--max-num-seqs=8", "--enforce-eager",
                 "--kv-cache-memory-bytes=16777216"],
    }  # fmt: skip
    machine = Live(tmp_path_factory.mktemp("r"), model, both_cores=True, data_tls=True, digests="sha256")
    try:
        machine.up()
        yield machine
    finally:
        machine.down()


@pytest.mark.parametrize("rung", ["peer_shm", "peer_tcp"])
def test_each_rank_wakes_from_its_own_shard(divided: Live, rung: str) -> None:
    divided.scaled(1)
    sleeper = by_state(divided.instances(), "dormant")[0]["id"]
    divided.scaled(2, rung)
    took = divided.timeline(sleeper)["rungs"][-1]
    assert (took["kind"], took["ok"]) == (rung, True)
    assert "each of 2 ranks" in took["reason"]
    assert same_tokens(divided)
