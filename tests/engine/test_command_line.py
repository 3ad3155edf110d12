"""The command line against a running machine: what people read, what scripts read, and wrong input."""

from __future__ import annotations

import json

import pytest

from tests.engine.conftest import START_TIMEOUT
from tests.support.live import Live, by_state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]


@pytest.mark.parametrize("command", ["status", "models", "instances", "devices"])
def test_a_listing_is_a_table_for_people_and_json_for_scripts(one: Live, command: str) -> None:
    table = one.cli(command)
    assert table.returncode == 0, table.stderr
    assert "tiny" in table.stdout or "node-a" in table.stdout
    data = json.loads(one.cli(command, "--output", "json").stdout)
    assert data


def test_a_plan_says_mode_rungs_reasons_and_prices_and_changes_nothing(one: Live) -> None:
    sleeper = by_state(one.instances(), "dormant")[0]["id"]
    said = one.cli("plan", "tiny", "2")
    assert said.returncode == 0, said.stderr
    assert sleeper in said.stdout
    assert "rung peer_shm:" in said.stdout
    assert "mode guardian:" in said.stdout
    assert by_state(one.instances(), "dormant")[0]["id"] == sleeper


def test_a_scale_waits_for_its_end_and_its_timeline_accounts_for_the_time(one: Live) -> None:
    sleeper = by_state(one.instances(), "dormant")[0]["id"]
    scaled = one.cli("scale", "tiny", "2", "--output", "json")
    assert json.loads(scaled.stdout)["state"] == "done"
    shown = one.cli("timeline", sleeper)
    for phase in ("accept", "decide", "dispatch", "pages", "pull", "verify", "kv", "canary"):
        assert phase in shown.stdout
    assert "accounted for:" in shown.stdout
    assert one.cli("scale", "tiny", "1").returncode == 0


def test_logs_are_the_engines_own(one: Live) -> None:
    said = one.cli("logs", by_state(one.instances(), "ready")[0]["id"], "--tail-bytes", "100000")
    assert said.returncode == 0, said.stderr
    assert "vLLM" in said.stdout or "vllm" in said.stdout


def test_watch_resumes_after_a_revision_and_ends_after_so_many_events(one: Live) -> None:
    one.cli("scale", "tiny", "2")
    one.cli("scale", "tiny", "1")
    newest = one.api.get("/api/v1/events", params={"limit_seconds": 0.0}).status_code
    assert newest == 200
    model = one.api.get(one.path).json()
    said = one.cli("watch", "--since", str(model["revision"] - 1), "--count", "1", "--output", "json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout.splitlines()[0])["revision"] == str(model["revision"])


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("scale", "nobody", "1"), 4, "there is no model default/nobody"),
        (("scale", "tiny", "9999"), 6, "max_replicas"),
        (("scale", "tiny", "1", "--rung", "teleport"), 2, "rungs"),
        (("timeline", "i-nobody"), 4, "i-nobody"),
        (("logs", "i-nobody"), 4, "i-nobody"),
        (("instances", "--model", "x" * 200), 2, "model"),
        (("up", "-f", "MACHINE"), 6, "already up"),
    ],
)
def test_wrong_input_says_what_to_do_and_changes_nothing(
    one: Live, words: tuple[str, ...], status: int, told: str
) -> None:
    before = [(i["id"], i["state"]) for i in one.instances()]
    said = one.cli(*(str(one.directory / "machine.yaml") if w == "MACHINE" else w for w in words))
    assert said.returncode == status, said.stderr
    assert told in said.stderr
    assert [(i["id"], i["state"]) for i in one.instances()] == before
