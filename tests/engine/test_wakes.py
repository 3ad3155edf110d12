"""A real vLLM guardian becomes a proven replica by every rung, and nothing wrong is ever routed."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from relight.agent.engines.vllm_control import call
from relight.agent.engines.vllm_ranks import refill_arguments
from relight.core.errors import RemoteFault
from relight.core.records import Rung, RungKind, SourceRef
from tests.engine.conftest import START_TIMEOUT
from tests.support.live import Live, by_state, same_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]


@pytest.mark.parametrize("rung", ["peer_shm", "peer_tcp", "disk"])
def test_a_level_2_guardian_wakes_by_each_rung_with_the_sources_tokens(one: Live, rung: str) -> None:
    sleeper = by_state(one.instances(), "dormant")[0]["id"]
    one.scaled(2, rung)
    timeline = one.timeline(sleeper)
    assert [r["kind"] for r in timeline["rungs"] if r["ok"]] == [rung]
    assert {"accept", "decide", "dispatch", "pages", "pull", "verify", "kv", "canary"} <= {
        p["name"] for p in timeline["phases"]
    }
    assert same_tokens(one)


def test_a_level_1_guardian_wakes_from_its_own_host_copy(one: Live) -> None:
    spec = one.api.get(one.path).json()["spec"]
    body = {k: v for k, v in spec.items() if k not in ("namespace", "name")}
    try:
        one.api.put(one.path, json={**body, "guardians": {"replicas": 1, "level": 1}}).raise_for_status()
        one.scaled(2, "peer_shm")
        sleeper = by_state(one.scaled(1), "dormant")[0]["id"]
        one.scaled(2, "host_copy")
        assert [r["kind"] for r in one.timeline(sleeper)["rungs"] if r["ok"]] == ["host_copy"]
        assert same_tokens(one)
    finally:
        one.api.put(one.path, json=body).raise_for_status()


def test_a_request_at_an_engine_asleep_never_gets_through_the_gateway(one: Live) -> None:
    sleeper = by_state(one.instances(), "dormant")[0]
    pinned = one.ask("wake up", headers={**one.headers, "x-relight-pin": by_state(one.instances(), "ready")[0]["id"]})
    assert pinned.status_code == 200
    assert pinned.headers["x-relight-instance"] != sleeper["id"]


def test_an_engine_asleep_refuses_to_wake_without_a_refill(one: Live) -> None:
    directory = one.state / "nodes"
    sleeper = by_state(one.instances(), "dormant")[0]
    url = next(iter(directory.glob(f"*/*/{sleeper['id']}/endpoint.json"))).read_text()
    port = int(url.rpartition(":")[2].strip(" }"))
    answer = httpx.post(f"http://127.0.0.1:{port}/wake_up", timeout=30, trust_env=False)
    assert answer.status_code == 500
    assert "a refill must precede the wake" in answer.text
    one.scaled(2)
    assert same_tokens(one)


async def test_other_content_is_refused_by_the_engine_naming_the_field(one: Live) -> None:
    sleeper = by_state(one.instances(), "dormant")[0]["id"]
    path = next((one.state / "nodes").glob(f"*/*/{sleeper}/worker-0.sock"))
    other = next(p for p in (one.state / "nodes").glob("*/*/*/source-0.sock") if sleeper not in str(p))
    reference = SourceRef("other", "node-a", 1, "", "", f"unix:{other}", "none")
    (arguments,) = refill_arguments(Rung(RungKind.PEER_SHM, "a test", reference), "r2", "", 1, share=False)
    with pytest.raises(RemoteFault, match="refused this reader"):
        await call(path, "refill", arguments, deadline=30)


def test_fifty_requests_at_zero_replicas_wake_one_replica_and_are_all_answered(one: Live) -> None:
    one.scaled(0)
    before = {s["id"] for s in one.api.get("/api/v1/starts").json()["items"]}
    answers = one.ask_many(50)
    assert [a.status_code for a in answers] == [200] * 50
    assert len({a.headers["x-relight-instance"] for a in answers}) == 1
    after = {s["id"] for s in one.api.get("/api/v1/starts").json()["items"]}
    assert len(after - before) == 1


def test_a_stream_that_runs_when_its_replica_is_to_sleep_is_finished_first(one: Live) -> None:
    one.scaled(2)
    got: dict[str, str] = {}
    begun = threading.Event()

    def read() -> None:
        body = {
            "model": "tiny",
            "prompt": "long",
            "max_tokens": 300,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        target = by_state(one.instances(), "ready")
        headers = {**one.headers, "x-relight-pin": target[-1]["id"]}
        with httpx.stream(
            "POST", f"{one.gateway}/v1/completions", json=body, headers=headers, timeout=90, trust_env=False
        ) as answer:
            text = ""
            for line in answer.iter_lines():
                begun.set()
                text += line + "\n"
            got["text"] = text

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    one.scaled(0)
    reader.join(60)
    assert got["text"].rstrip().endswith("data: [DONE]")
    assert got["text"].count('"text"') > 200
    one.scaled(1)


def test_the_pin_next_waits_for_the_woken_replica_also_right_after_the_model_was_written_again(one: Live) -> None:
    sleeper = by_state(one.instances(), "dormant")[0]["id"]
    spec = one.api.get(one.path).json()["spec"]
    body = {k: v for k, v in spec.items() if k not in ("namespace", "name")}
    one.api.put(one.path, json=body).raise_for_status()
    got: dict[str, str] = {}

    def ask() -> None:
        answer = one.ask("whoever comes next", headers={**one.headers, "x-relight-pin": "next"})
        got["instance"] = answer.headers.get("x-relight-instance", answer.text)

    client = threading.Thread(target=ask)
    client.start()
    # A request that came after the replica was ready would wait for yet another one.
    one.until_held(1)
    one.scaled(2)
    client.join(60)
    assert got["instance"] == sleeper


def test_another_revision_rolls_out_through_the_guardian_and_back_without_a_new_process(
    one: Live, tiny_model: Path, tmp_path: Path
) -> None:
    altered = tmp_path / "r2"
    shutil.copytree(tiny_model, altered)
    weights = altered / "model.safetensors"
    data = bytearray(weights.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    # The signs of every other number of the first part: another content of the same layout.
    for at in range(begin + 1, begin + (len(data) - begin) // 4, 4):
        data[at] ^= 0x80
    weights.write_bytes(data)
    spec = one.api.get(one.path).json()["spec"]
    body = {k: v for k, v in spec.items() if k not in ("namespace", "name")}
    pids = {m["pid"] for i in one.instances() for m in i["members"]}
    before = one.ask("hello").json()["choices"][0]["text"]
    try:
        one.api.put(one.path, json={**body, "uri": str(altered), "revision": "r2"}).raise_for_status()
        one.wait(lambda found: _revisions(found) == {"ready": "r2", "dormant": body["revision"]})
        assert one.ask("hello").json()["choices"][0]["text"] != before
        # A second replica copies from the first, whose canary is that of the new content.
        one.scaled(2)
        assert same_tokens(one)
        one.scaled(1)
    finally:
        one.api.put(one.path, json=body).raise_for_status()
    one.wait(lambda found: _revisions(found).get("ready") == body["revision"])
    assert one.ask("hello").json()["choices"][0]["text"] == before
    assert {m["pid"] for i in one.instances() for m in i["members"]} == pids


def _revisions(found: list[dict[str, Any]]) -> dict[str, str]:
    return {i["state"]: i["fingerprint"]["content"]["revision"] for i in found if i["fingerprint"]}
