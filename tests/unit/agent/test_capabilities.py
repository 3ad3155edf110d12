"""What is known of engines is learned from what they did, with its measurement, and forgotten when a version moves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from relight.agent.capabilities import AGAIN, KEPT, Capabilities, Known, key_of, merged
from relight.core.records import (
    Failure,
    InstanceReport,
    MemoryReading,
    Mode,
    Phase,
    RungKind,
    RungResult,
    StartCache,
    StartRecord,
    Verdict,
)
from relight.core.states import State

FACTS = {"driver": "580.65.06", "vllm": "0.33.0", "vllm/torch": "2.13.0+cu130", "memlock": "unlimited"}
LINKS = {("a", "b"): "NVL", ("b", "a"): "NVL"}
NOW = 1000.0


def _begun(tmp_path: Path, kind: str = "nvidia", facts: dict[str, str] | None = None, **changes: Any) -> Capabilities:
    found = Capabilities(tmp_path / "capabilities.json")
    values = {"product": "H100", "links": LINKS, "engines": ["vllm"], "facts": facts or FACTS, **changes}
    found.begin(kind, **values)
    return found


def _start(
    mode: Mode = Mode.NORMAL, ok: bool = True, reason: str = "", incarnation: int = 1, **known: Any
) -> StartRecord:
    return StartRecord("i", incarnation, "default/m", mode, "", 0.0, 8.0, ok, reason, **known)


def _report(state: State = State.READY, devices: int = 1, **known: Any) -> InstanceReport:
    names = tuple(f"d{n}" for n in range(devices))
    return InstanceReport("i", "default/m", 0, 1, names, state, 0.0, known.pop("cause", ""), 1, **known)


def _told(known: Capabilities, name: str, ranks: int | None = None, now: float = NOW):
    (found,) = [c for c in known.report(now) if c.name == name and ranks in (None, c.ranks)]
    return found


def test_nothing_is_claimed_of_what_was_never_seen(tmp_path: Path) -> None:
    told = _begun(tmp_path).report(NOW)
    # How it starts is written down in its adapter; what comes of it is not.
    assert {c.verdict for c in told if c.name != "await_weights"} == {Verdict.UNKNOWN}
    assert all(c.reason for c in told)
    assert "naming mode lazy tries it" in next(c.reason for c in told if c.name == "lazy")


def test_what_was_tested_is_known_beforehand_for_that_version_alone(tmp_path: Path) -> None:
    assert _told(_begun(tmp_path, "cpu", {"vllm": "0.32.0+cpu"}), "sleep_2").verdict is Verdict.YES
    assert _told(_begun(tmp_path, "cpu", {"vllm": "0.33.0"}), "sleep_2").verdict is Verdict.UNKNOWN


def test_a_sleep_that_kept_its_memory_is_no_guardian_and_the_verdict_has_its_measurement(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    memory = MemoryReading(NOW, 9 << 30, residual_bytes=9 << 30, unsafe="asleep at level 2: 9 GiB left, 1 of 60 given")
    report = _report(State.DORMANT, memory=memory, cause="asleep at level 2", level=2)
    assert known.over("sleep", "ok", "vllm", report, NOW)
    assert (_told(known, "sleep_2").verdict, _told(known, "sleep_2").ranks) == (Verdict.YES, 1)
    guardian = _told(known, "guardian")
    assert (guardian.verdict, guardian.at) == (Verdict.NO, NOW)
    assert "9 GiB left" in guardian.reason
    safe = dataclasses.replace(report, memory=dataclasses.replace(memory, unsafe="", residual_bytes=1 << 30))
    known.over("sleep", "ok", "vllm", safe, NOW + 1)
    assert _told(known, "guardian").verdict is Verdict.YES
    assert _told(known, "guardian").reason == "1024 MiB left behind"


def test_sleep_is_missing_once_it_failed_twice_in_a_row(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    failed = _report(State.FAILED, failure=Failure("sleep failed: XPU error -707"))
    known.over("sleep", "failed", "vllm", failed, NOW)
    assert _told(known, "sleep_2").verdict is Verdict.UNKNOWN
    known.over("sleep", "failed", "vllm", failed, NOW)
    assert _told(known, "sleep_2").verdict is Verdict.NO
    assert "-707" in _told(known, "sleep_2").reason


def test_a_lazy_start_that_failed_counts_against_lazy_once_the_same_model_starts_without(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    lazy = _start(Mode.LAZY, False, "capture failed above 1024 sequences")
    known.over("start", "failed", "vllm", _report(State.FAILED, devices=8, start=lazy), NOW)
    assert _told(known, "lazy", 0).verdict is Verdict.UNKNOWN
    known.over("start", "ok", "vllm", _report(devices=8, start=_start(Mode.NORMAL)), NOW)
    found = _told(known, "lazy", 8)
    assert found.verdict is Verdict.NO
    assert "above 1024 sequences" in found.reason
    assert "by normal was proven" in found.reason


def test_what_failed_here_is_tried_again_after_a_while_and_one_more_failure_is_enough_then(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    failed = _report(State.FAILED, failure=Failure("sleep failed: no page of the host was free"))
    for _ in range(2):
        known.over("sleep", "failed", "vllm", failed, NOW)
    assert _told(known, "sleep_2", now=NOW + AGAIN - 1).verdict is Verdict.NO
    lapsed = _told(known, "sleep_2", now=NOW + AGAIN)
    assert lapsed.verdict is Verdict.UNKNOWN
    assert "no page of the host was free" in lapsed.reason
    known.over("sleep", "failed", "vllm", failed, NOW + AGAIN)
    assert _told(known, "sleep_2", now=NOW + AGAIN).verdict is Verdict.NO


def test_what_was_tested_beforehand_counts_again_after_a_failure_that_was_long_ago(tmp_path: Path) -> None:
    known = _begun(tmp_path, "cpu", {"vllm": "0.32.0"})
    lazy = _start(Mode.LAZY, False, "killed for want of memory")
    known.over("start", "failed", "vllm", _report(State.FAILED, start=lazy), NOW)
    known.over("start", "ok", "vllm", _report(start=_start(Mode.NORMAL)), NOW)
    assert _told(known, "lazy", 1).verdict is Verdict.NO
    (found,) = [c for c in known.report(NOW + AGAIN) if c.name == "lazy"]
    assert (found.verdict, found.ranks) == (Verdict.YES, 0)


def test_wrong_arguments_that_somebody_then_puts_right_say_nothing_against_lazy(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    wrong = _start(Mode.LAZY, False, "bad model: expected a directory with config.json")
    failed = _report(State.FAILED, start=wrong, failure=Failure(wrong.reason, None))
    known.over("start", "failed", "vllm", failed, NOW)
    known.over("start", "ok", "vllm", _report(start=_start(Mode.NORMAL)), NOW)
    assert {c.verdict for c in known.report(NOW) if c.name == "lazy"} == {Verdict.UNKNOWN}


def test_a_start_that_fails_by_every_mode_says_nothing_against_one(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    for mode in (Mode.LAZY, Mode.NORMAL, Mode.COLD):
        report = _report(State.FAILED, start=_start(mode, False, "out of memory"))
        known.over("start", "failed", "vllm", report, NOW)
    assert {c.verdict for c in known.report(NOW) if c.name == "lazy"} == {Verdict.UNKNOWN}


def test_a_wake_without_capture_shows_that_graphs_were_kept_and_by_which_rung_weights_came(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    rungs = (
        RungResult(RungKind.PEER_RDMA, False, "mlx5_0: its link is DOWN", 0.1),
        RungResult(RungKind.PEER_TCP, True, "", 2.0, bytes=8 << 30),
    )
    wake = _start(rungs=rungs, phases=(Phase("pull", 0.0, 2.0),))
    for _ in range(5):
        known.over("wake", "ok", "vllm", _report(start=wake), NOW)
    assert _told(known, "graphs_kept").verdict is Verdict.YES
    assert _told(known, "peer_tcp").reason == "8192 MiB in 2.00 s"
    # A path has two ends: its failures are told, and say nothing for ever.
    assert _told(known, "peer_rdma").verdict is Verdict.UNKNOWN
    assert "DOWN" in _told(known, "peer_rdma").reason


def test_how_a_process_came_to_be_and_what_came_of_compiled_code_are_learned(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    forked = _start(process="forked from a zygote of 3 min", cache=StartCache("k", "hit", "12 artefacts"))
    known.over("start", "ok", "vllm", _report(start=forked), NOW)
    assert _told(known, "zygote").verdict is Verdict.YES
    assert known.cached("vllm", forked, NOW)
    assert not known.cached("vllm", forked, NOW)
    assert _told(known, "compile_cache").reason == "hit: 12 artefacts"
    for incarnation in (2, 3):
        bad = _start(incarnation=incarnation, cache=StartCache("k", "not-loaded", "another isa"))
        known.cached("vllm", bad, NOW)
    assert _told(known, "compile_cache").verdict is Verdict.NO


def test_a_start_is_taken_in_once_while_its_instance_is_there_and_no_longer_remembered(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    start = _start(cache=StartCache("k", "hit", "12 artefacts"))
    assert known.cached("vllm", start, NOW)
    known.remember_only({"i"})
    assert not known.cached("vllm", start, NOW)
    known.remember_only(())
    assert known.remembered == frozenset()


def test_results_outlive_the_agent_and_are_kept_by_the_versions_they_were_seen_with(tmp_path: Path) -> None:
    asleep = _report(State.DORMANT, memory=MemoryReading(NOW, 1, residual_bytes=1 << 30), level=2)
    _begun(tmp_path).over("sleep", "ok", "vllm", asleep, NOW)
    assert _told(_begun(tmp_path), "guardian").verdict is Verdict.YES
    for name, value in (("driver", "590.1"), ("vllm", "0.34.0"), ("vllm/torch", "2.14.0")):
        assert _told(_begun(tmp_path, facts={**FACTS, name: value}), "guardian").verdict is Verdict.UNKNOWN
    assert _told(_begun(tmp_path, links={}), "guardian").verdict is Verdict.UNKNOWN
    assert _told(_begun(tmp_path, facts={**FACTS, "memlock": "1"}), "guardian").verdict is Verdict.YES


def test_the_file_holds_the_last_sets_of_versions_and_a_broken_one_is_begun_anew(tmp_path: Path) -> None:
    asleep = _report(State.DORMANT, memory=MemoryReading(NOW, 1, residual_bytes=1), level=2)
    for n in range(KEPT + 2):
        _begun(tmp_path, facts={**FACTS, "driver": str(n)}).over("sleep", "ok", "vllm", asleep, NOW)
    assert _told(_begun(tmp_path, facts={**FACTS, "driver": "0"}), "guardian").verdict is Verdict.UNKNOWN
    assert _told(_begun(tmp_path, facts={**FACTS, "driver": str(KEPT)}), "guardian").verdict is Verdict.YES
    odd = json.dumps({key_of("nvidia", "H100", LINKS, "vllm", FACTS): [{"name": 1}]})
    for text in ("{", "[]", odd):
        (tmp_path / "capabilities.json").write_text(text)
        told = _begun(tmp_path).report(NOW)
        assert {c.verdict for c in told if c.name != "await_weights"} == {Verdict.UNKNOWN}


def test_an_engine_that_is_not_offered_teaches_nothing(tmp_path: Path) -> None:
    assert not _begun(tmp_path).over("sleep", "ok", "sglang", _report(State.DORMANT), NOW)


def test_what_recipes_rule_out_is_told_with_where_that_comes_from() -> None:
    (found,) = [c for c in merged("kunlun", "sglang", {}, Known(), NOW) if c.name == "sleep_2"]
    assert found.verdict is Verdict.NO
    assert "memory saver" in found.reason


def test_a_card_that_reaches_the_devices_memory_is_known_by_trying_it(tmp_path: Path) -> None:
    known = _begun(tmp_path)
    report = _report(start=_start())
    assert _told(known, "direct_transfer").verdict is Verdict.UNKNOWN
    assert known.over("start", "ok", "vllm", report, NOW, {"mlx5_0": "no: nvidia_peermem is not loaded"})
    told = _told(known, "direct_transfer")
    assert (told.verdict, told.reason) == (Verdict.NO, "mlx5_0: nvidia_peermem is not loaded")
    assert known.over("start", "ok", "vllm", report, NOW, {"mlx5_0": "no: closed", "mlx5_1": "dma-buf"})
    told = _told(known, "direct_transfer")
    assert (told.verdict, told.reason) == (Verdict.YES, "mlx5_0: closed; mlx5_1: dma-buf")
    assert not known.over("sleep", "ok", "vllm", report, NOW, {"mlx5_0": "no: it sleeps"})
    assert _told(known, "direct_transfer").verdict is Verdict.YES


@pytest.mark.parametrize(("kind", "engine"), [("nvidia", "sglang"), ("kunlun", "sglang"), ("kunlun", "vllm")])
@pytest.mark.parametrize("name", ["lazy", "zygote"])
def test_what_an_adapter_never_does_is_told_before_anybody_tries(kind: str, engine: str, name: str) -> None:
    (found,) = [c for c in merged(kind, engine, {}, Known(), NOW) if c.name == name]
    assert found.verdict is Verdict.NO
    assert found.reason
