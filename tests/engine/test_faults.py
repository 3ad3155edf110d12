"""kill -9 of each component while real engines serve, wake, or are read from."""

from __future__ import annotations

import threading

import httpx
import pytest

from tests.engine.conftest import START_TIMEOUT
from tests.support.live import Live, by_state, endpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]


def test_requests_go_on_while_the_agent_is_killed_and_the_next_one_adopts_the_engine(tiny: Live) -> None:
    replica = by_state(tiny.scaled(1), "ready")[0]
    node, pid = replica["members"][0]["slot"], replica["members"][0]["pid"]
    statuses: list[int] = []
    stop = threading.Event()

    def requests() -> None:
        while not stop.is_set():
            statuses.append(tiny.ask("still there").status_code)

    client = threading.Thread(target=requests)
    client.start()
    tiny.kill(tiny.component(f"agent-{node}"))
    tiny.restart(f"agent-{node}", "relight.agent")
    tiny.wait(lambda found: any(i["id"] == replica["id"] and i["state"] == "ready" for i in found))
    stop.set()
    client.join(60)
    assert statuses
    assert set(statuses) == {200}
    adopted = next(i for i in tiny.instances() if i["id"] == replica["id"])
    assert adopted["members"][0]["pid"] == pid
    assert adopted["members"][0]["incarnation"] == replica["members"][0]["incarnation"]
    tiny.scaled(2)
    assert tiny.tokens(endpoint(by_state(tiny.instances(), "ready")[0])) == tiny.tokens(
        endpoint(by_state(tiny.instances(), "ready")[1])
    )


def test_a_scale_out_whose_controller_is_killed_ends_as_asked_after_its_restart(tiny: Live) -> None:
    tiny.scaled(1)
    operation = tiny.scale(2)
    tiny.kill(tiny.component("controller"))
    tiny.restart("controller", "relight.controller")
    _answers(tiny)
    assert tiny.ended(operation)["state"] == "done"
    assert len(by_state(tiny.settle(2), "ready")) == 2
    assert tiny.ask("after all").status_code == 200


def _answers(machine: Live) -> None:
    pause = threading.Event()
    said = "nothing"
    for _ in range(300):
        try:
            answer = machine.api.get("/readyz")
            if answer.status_code == 200:
                return
            said = answer.text
        except httpx.TransportError as error:
            said = str(error)
        pause.wait(0.1)
    raise AssertionError(f"the controller did not come back: {said}")


def test_a_sleep_gives_the_weights_back_and_a_source_killed_while_read_ends_no_wake(demo_model: Live) -> None:
    found = demo_model.settle(1)
    source, sleeper = by_state(found, "ready")[0], by_state(found, "dormant")[0]

    demo_model.scaled(2, "disk")
    ready = by_state(demo_model.instances(), "ready")
    first, second = (demo_model.tokens(endpoint(i), count=32) for i in ready)
    assert first == second
    awake = demo_model.memory(sleeper["id"])
    demo_model.scaled(1)
    assert next(i for i in demo_model.instances() if i["id"] == sleeper["id"])["state"] == "dormant"
    weights = 270_079_312
    assert awake - demo_model.memory(sleeper["id"]) >= 0.95 * weights

    demo_model.change(rungs=["peer_shm", "peer_tcp", "disk"])
    operation = demo_model.scale(2)
    # The source dies in the middle of the transfer: the wake itself ends by the disk.
    demo_model.wait(lambda now: any(i["id"] == sleeper["id"] and i["state"] == "ready" for i in now))
    # What is said of a start is written after it is seen to be ready; until then the wake before it is told.
    demo_model.wait(lambda _: len(demo_model.timeline(sleeper["id"])["rungs"]) > 1)
    rungs = demo_model.timeline(sleeper["id"])["rungs"]
    assert [(r["kind"], r["ok"]) for r in rungs] == [("peer_shm", False), ("peer_tcp", False), ("disk", True)]
    assert source["id"] in rungs[0]["reason"]
    woken = next(i for i in demo_model.instances() if i["id"] == sleeper["id"])
    assert demo_model.tokens(endpoint(woken), count=32) == first
    demo_model.wait(lambda now: not any(i["id"] == source["id"] and i["state"] != "gone" for i in now))
    assert demo_model.processes(source["id"]) == []
    assert operation["replicas_after"] == 2
