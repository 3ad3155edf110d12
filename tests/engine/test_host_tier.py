"""After its last replica went, a real vLLM guardian wakes from a copy in host memory or from remote storage."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import START_TIMEOUT
from tests.support.live import DEADLINE, EAGER, ROOT, Live, by_state, endpoint
from tests.support.storage import Bucket

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]


@pytest.fixture(scope="module")
def kept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The tiny model on nodes that may keep copies. Engines inherit nothing: the path is whose plugin they import."""
    model = {
        "name": "tiny", "uri": str(tiny_model), "args": [*EAGER, "--kv-cache-memory-bytes=33554432"],
        "env": {"PYTHONPATH": str(ROOT / "src")},
    }  # fmt: skip
    machine = Live(tmp_path_factory.mktemp("h"), model, host_memory="1GiB")
    try:
        machine.up()
        yield machine
    finally:
        machine.down()


def copies(live: Live) -> list[dict[str, Any]]:
    slots = live.api.get("/api/v1/slots").raise_for_status().json()["items"]
    return [copy for slot in slots for copy in slot["host_tier"]["copies"]]


def ready_copy(live: Live) -> dict[str, Any]:
    deadline, pause = time.monotonic() + DEADLINE, threading.Event()
    while True:
        found = copies(live)
        if [c["state"] for c in found] == ["ready"]:
            return found[0]
        assert time.monotonic() < deadline, found
        pause.wait(0.1)


def test_a_model_at_zero_wakes_from_its_copy_with_the_tokens_of_before(kept: Live) -> None:
    before = kept.tokens(endpoint(by_state(kept.settle(1), "ready")[0]))
    copy = ready_copy(kept)
    for rung in ("host_shm", "host_tcp"):
        kept.scaled(0)
        assert copies(kept) == [copy]
        kept.scaled(1, *([rung] if rung == "host_tcp" else []))
        woken = by_state(kept.instances(), "ready")[0]
        (tried,) = kept.timeline(woken["id"])["rungs"]
        assert (tried["kind"], tried["ok"], tried["source"]) == (rung, True, copy["id"])
        assert "canary of" in tried["reason"]
        assert kept.tokens(endpoint(woken)) == before


def test_a_model_at_zero_wakes_from_remote_storage_with_the_tokens_of_before(kept: Live, tiny_model: Path) -> None:
    file = tiny_model / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    before = kept.tokens(endpoint(by_state(kept.settle(1), "ready")[0]))
    with Bucket({file.name: file.read_bytes()}) as bucket:
        kept.change(replicas=1, storage={"uri": f"{bucket.uri}?sig=secret", "sha256": {file.name: digest}})
        kept.scaled(0)
        kept.scaled(1, "storage")
    woken = by_state(kept.instances(), "ready")[0]
    timeline = kept.timeline(woken["id"])
    (tried,) = timeline["rungs"]
    assert (tried["kind"], tried["ok"]) == ("storage", True)
    assert f"{file.stat().st_size} bytes in 1 files from {bucket.uri}" in tried["reason"]
    assert "canary of" in tried["reason"]
    assert "fetch" in [p["name"] for p in timeline["phases"]]
    assert kept.tokens(endpoint(woken)) == before
    assert "secret" not in kept.logs()


def shared_bytes(pids: list[int], copy: str, field: str) -> int:
    """Bytes of a copy's pages that these processes map, by a field of their smaps."""
    found = 0
    for pid in pids:
        inside = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:
                inside = f"/memfd:relight-{copy}" in line
            elif inside and line.startswith(f"{field}:"):
                found += int(line.split()[1]) << 10
    return found


def test_two_engines_of_a_host_serve_from_the_pages_of_one_copy(kept: Live) -> None:
    before = kept.tokens(endpoint(by_state(kept.settle(1), "ready")[0]))
    copy = ready_copy(kept)
    kept.change(replicas=1, share_host_copies=True)
    kept.scaled(0)
    kept.scaled(2, "host_shm")
    woken = by_state(kept.instances(), "ready")
    for instance in woken:
        (tried,) = kept.timeline(instance["id"])["rungs"]
        assert (tried["kind"], tried["ok"], tried["bytes"]) == ("host_shm", True, 0), tried
        assert f"{copy['id']}'s own pages, proven by it and frozen" in tried["reason"]
        assert "canary of" in tried["reason"]
        assert kept.tokens(endpoint(instance)) == before
    pids = [kept.processes(i["id"]) for i in woken]
    whole = shared_bytes(pids[0], copy["id"], "Rss")
    assert whole > 0
    everybody = [*pids[0], *pids[1], *kept.processes(copy["id"])]
    assert shared_bytes(everybody, copy["id"], "Pss") <= whole + (64 << 10)
    assert shared_bytes(everybody, copy["id"], "Private_Dirty") == 0
    kept.scaled(1)
