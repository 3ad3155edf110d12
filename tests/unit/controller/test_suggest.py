"""Suggestions rest on a model's own record, say what they rest on, and are silent without one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from relight.controller.doctor.suggest import suggest
from relight.controller.flight.timeline import Timeline
from relight.core.records import Guardians, Mode, Phase, Shapes
from support.planning import SPEC

MODEL = dataclasses.replace(SPEC, engine="vllm", mode=Mode.AUTO, guardians=Guardians(1, 2), max_replicas=4)
BUSY = Shapes(0.0, {1: 500.0, 2: 300.0, 8: 150.0, 16: 45.0, 400: 5.0, 8192: 90.0}, {256: 60.0, 4096: 40.0})


def _start(mode: Mode, begun: float, seconds: float, *, slept: bool = False, ok: bool = True) -> Timeline:
    phases = (Phase("sleep", begun, begun + 1.0),) if slept else ()
    return Timeline(
        f"{begun}", "i", 1, MODEL.key, mode, "w", "nvidia", "", begun, begun + seconds, ok, "", seconds, phases=phases
    )


def _said(*starts: Timeline, shapes: Shapes | None = None, kind: str = "nvidia", **changes: Any) -> dict[str, Any]:
    found = suggest(dataclasses.replace(MODEL, **changes), kind, starts, shapes)
    assert all(s.model == MODEL.key and s.evidence for s in found)
    return {s.setting: s for s in found}


def test_nothing_is_suggested_without_a_record() -> None:
    assert _said() == {}
    assert _said(_start(Mode.LAZY, 0.0, 5.0)) == {}
    assert _said(shapes=Shapes(0.0, {1: 3.0}, {8: 3.0})) == {}


def test_graphs_are_for_the_sizes_that_ran() -> None:
    found = _said(shapes=BUSY)["args: --cudagraph-capture-sizes"]
    assert found.suggested == "1 2 8 16"
    assert "99.5% of the steps" in found.evidence
    assert "51 are captured" in found.evidence


@pytest.mark.parametrize("kind", ["cpu", ""])
def test_no_graphs_are_suggested_where_there_are_none_or_nobody_knows(kind: str) -> None:
    assert _said(shapes=BUSY, kind=kind) == {}


def test_sizes_that_are_few_already_are_left_alone() -> None:
    assert _said(shapes=BUSY, args=("--cudagraph-capture-sizes", "1 2 8 16 32")) == {}


def test_sizes_that_are_many_are_counted_however_many_words_they_are() -> None:
    sizes = tuple(str(n) for n in range(8, 208, 8))
    found = _said(shapes=BUSY, args=("--cudagraph-capture-sizes", *sizes))["args: --cudagraph-capture-sizes"]
    assert "25 are captured" in found.evidence


def test_a_batch_told_in_powers_of_two_is_not_suggested_again() -> None:
    assert "args: --max-num-batched-tokens" not in _said(shapes=BUSY, args=("--max-num-batched-tokens", "4K"))


def test_a_limit_of_sequences_that_steps_ran_into_is_raised() -> None:
    found = _said(shapes=BUSY, args=("--max-num-seqs", "8"))["args: --max-num-seqs"]
    assert (found.now, found.suggested) == ("8", "16")
    assert "ran at the limit" in found.evidence
    assert "args: --max-num-seqs" not in _said(shapes=BUSY, args=("--max-num-seqs", "256"))


def test_a_batch_that_most_prompts_do_not_fit_into_is_raised_to_nine_of_ten() -> None:
    found = _said(shapes=BUSY, args=("--max-num-batched-tokens", "2048"))["args: --max-num-batched-tokens"]
    assert (found.suggested, "40% of the prompts" in found.evidence) == ("4096", True)
    assert "args: --max-num-batched-tokens" not in _said(shapes=BUSY, args=("--max-num-batched-tokens", "8192"))


def test_guardians_are_as_many_more_as_were_missed_at_once() -> None:
    wakes = [_start(Mode.GUARDIAN, 10.0 * n, 0.4) for n in range(3)]
    missed = [_start(Mode.LAZY, 100.0, 6.0), _start(Mode.LAZY, 101.0, 6.0), _start(Mode.LAZY, 500.0, 6.0)]
    found = _said(*wakes, *missed)["guardians.replicas"]
    assert (found.now, found.suggested) == ("1", "3")
    assert "3 of the last 6 starts found no guardian and took 6.00 s, 0.40 s with one" in found.evidence
    assert "guardians.replicas" not in _said(*wakes)
    assert _said(*wakes, *missed, max_replicas=2)["guardians.replicas"].suggested == "2"
    assert "guardians.replicas" not in _said(*wakes, *missed, mode=Mode.COLD)


def test_starts_of_guardians_themselves_are_no_misses() -> None:
    assert _said(*[_start(Mode.NORMAL, 10.0 * n, 9.0, slept=True) for n in range(5)]) == {}


def test_a_mode_that_was_faster_each_time_is_suggested_and_one_that_was_tried_once_is_not() -> None:
    lazy = [_start(Mode.LAZY, 10.0 * n, 6.0) for n in range(3)]
    cold = [_start(Mode.COLD, 100.0 + 10 * n, 3.0) for n in range(3)]
    last = _start(Mode.LAZY, 200.0, 6.0)
    found = _said(*lazy, *cold, last, mode=Mode.LAZY)["mode"]
    assert (found.now, found.suggested) == ("lazy", "cold")
    assert "cold 3.00 s (3 starts)" in found.evidence
    assert "mode" not in _said(*lazy, cold[0], last, mode=Mode.LAZY)


def test_starts_that_failed_and_those_of_other_models_count_for_nothing() -> None:
    failed = [_start(Mode.LAZY, n, 6.0, ok=False) for n in range(9)]
    others = [dataclasses.replace(_start(Mode.LAZY, n, 6.0), model="default/other") for n in range(9)]
    assert _said(*failed, *others) == {}
