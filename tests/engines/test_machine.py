"""A machine whose file names the engine sglang: up, requests, a scale-out that wakes, and to zero and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.live import Live

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory, python: Path, model: Callable[..., Path]) -> Iterator[Live]:
    wanted = {"name": "doubled", "engine": "sglang", "uri": str(model())}
    live = Live(tmp_path_factory.mktemp("m"), wanted, engines={"sglang": python})
    try:
        live.up()
        yield live
    finally:
        live.down()


def test_a_guardian_of_sglang_wakes_beside_its_replica_and_answers_as_it_does(machine: Live) -> None:
    (ready,) = [i for i in machine.settle(1) if i["state"] == "ready"]
    before = machine.ask("the same tokens").json()["choices"][0]["text"]
    both = machine.scaled(2)
    woken = next(i for i in both if i["id"] != ready["id"])
    told = machine.timeline(woken["id"])
    assert told["mode"] == "guardian"
    assert [r["kind"] for r in told["rungs"] if r["ok"]] == ["disk"]
    answers = {machine.ask("the same tokens").json()["choices"][0]["text"] for _ in range(6)}
    assert answers == {before}
    machine.scaled(0)
    assert machine.ask("the same tokens").json()["choices"][0]["text"] == before
